"""Rotations of node features into the frames of edges, and back, with sums over a node's edges.

The one trilinear form whose partial derivatives are all of these operations, and the public ops.
The matrices come from `fusedops.harmonics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fusedops._frame.arrays import ArrayT, add_at, added, cast, namespace, widened, zeros
from fusedops._frame.check import (
    dtype_name,
    flag,
    real,
)
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.harmonics.op import matrix_size
from fusedops.wigner.plan import Edges, ends_of, late, read_graph
from fusedops.wigner.rows import (
    degree_of,
    degrees,
    function_rows,
    functions_of,
    message_rows,
    order_limit,
)


def _blocks(
    wigner: Any, mmax: int, way: str
) -> Iterator[tuple[slice, np.ndarray, tuple[Any, ...]]]:
    """Yield for every degree its l-major rows, its m-major rows, and the index of its blocks.

    The index takes the m-major rows that are kept, and all l-major columns. It transposes matrices
    of the way back, in which m-major rows are columns.
    """
    at = 0
    for rows, kept, own in degrees(degree_of(wigner), mmax):
        width = rows.stop - rows.start
        i, j = np.meshgrid(kept, np.arange(width), indexing="ij")
        if way == "back":
            i, j = j, i
        if wigner.ndim == 3:
            yield rows, own, (slice(None), rows.start + i, rows.start + j)
        else:
            yield rows, own, (slice(None), at + i * width + j)
        at += width * width


def _formula(a: Any) -> tuple[Any, ...]:
    r"""Return the partial derivatives of the form T by x (plus base), message, wigner and factors.

    .. math:: T = s \sum_e \sum_h \sum_{r, j} W_{erj} \, x_{n_h(e), j} \cdot y_{ehr} \cdot
                  f_{eh, q(r)}

    with :math:`n_h(e)` the node at end h of edge e, :math:`y_{eh}` the message's channels for that
    end, r and j rows of one degree, and q(r) the `functions_of` r; f is one if it isn't given. The
    way "forth" reads both ends, source and target. The way "back" reads the target, and has the
    matrices transposed; "undo" goes the same way with the matrices of the way forth.
    """
    x, message, wigner = a.x, a.message, a.wigner
    edges, mmax, way, scale = a.edges, a.mmax, a.way, a.scale
    w = widened(a)
    shift, nodes, messages, matrices, f = w.base, w.x, w.message, w.wigner, w.factors
    dx: Any
    dmessage: Any
    dwigner: Any
    described: Any
    ends = ends_of(edges, way, wigner)
    described = edge_wigner.describe(a)
    dx, dmessage, dwigner, df = (
        None if output is None else zeros(matrices, output[0]) for output in described
    )
    functions, given = functions_of(degree_of(wigner), mmax), messages
    if f is not None:
        count = function_rows(degree_of(wigner), mmax)
        f = f.reshape(f.shape[0], count, f.shape[1] // count)[:, functions.tolist()]
        messages = messages if messages is None else messages * f
    for rows, own, where in _blocks(wigner, mmax, way):
        blocks = scale * matrices[where]
        for h, index in enumerate(ends):
            if x is not None:
                inputs = nodes[:, rows] if index is None else nodes[index][:, rows]
                channels = slice(h * x.shape[2], (h + 1) * x.shape[2])
                dmessage[:, own, channels] = blocks @ inputs
            if message is not None:
                C = message.shape[2] // len(ends)
                part = messages[:, own, h * C : (h + 1) * C]
                _add_at(dx[:, rows], index, blocks.swapaxes(1, 2) @ part)
            if x is not None and message is not None:
                dwigner[where] += scale * (part @ inputs.swapaxes(1, 2))
    if shift is not None:
        dx = dx + shift
    if df is not None:
        both = given * dmessage
        of = [np.flatnonzero(functions == q).tolist() for q in range(count)]
        df = namespace(both).stack([both[:, rows].sum(1) for rows in of], 1).reshape(df.shape)
    if f is not None and dmessage is not None:
        dmessage = dmessage * f
    return tuple(
        None if result is None else cast(result, output[1])
        for result, output in zip((dx, dmessage, dwigner, df), described, strict=True)
    )


def _add_at(total: Any, index: Any, values: Any) -> None:
    if index is None:
        total += values
    else:
        add_at(total, index, values)


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    """Pull back through the partial derivatives of T, which is linear in each of its arguments.

    Each output is the derivative of T by one argument. With the output's cotangent in the place of
    that argument, the derivatives of T by the others are their cotangents.
    """
    # NumPy gets a copy, since users may write to a gradient.
    dbase = cast(dy.dx, dy.dx) if wanted.base and dy.dx is not None else None
    calls = []
    static = a.edges, a.mmax, a.way, a.scale
    factors, (_, *others) = (a.x, a.message, a.wigner, a.factors), wanted
    for slot, cotangent in enumerate(dy):
        out = [want if other != slot else None for other, want in enumerate(others)]
        if cotangent is not None and any(out):
            given = [cotangent if other == slot else factor for other, factor in enumerate(factors)]
            calls.append(Call(edge_wigner, None, *given, *static, out=out, before=(dbase,)))
    if len(calls) == 1:
        return calls[0]
    found: list[Any] = [None] * len(dy)
    for call in calls:
        pulled = edge_wigner(*call.a, out=call.slots)
        found = [
            added(dx, more) if want else dx
            for dx, more, want in zip(found, pulled, call.slots, strict=True)
        ]
    return dbase, *found


def _rows_of(a: Any) -> tuple[int, ...]:
    """Return L, P and M, and F, the numbers of all functions of an edge."""
    lmax = degree_of(a.wigner)
    ends = 2 if a.way == "forth" else 1
    channels = ends * a.x.shape[2] if a.message is None else a.message.shape[2]
    rows, functions = message_rows(lmax, a.mmax), function_rows(lmax, a.mmax)
    return (lmax + 1) ** 2, matrix_size(lmax, True)[0], rows, functions * channels


edge_wigner = Primitive(
    "edge_wigner",
    family="wigner",
    arrays={
        "base": "(N, L, C), optional",
        "x": "(N, L, C), optional",
        "message": "(E, M, ends * C), optional",
        "wigner": "(E, L, L) or (E, P)",
        "factors": "(E, F), optional",
    },
    static={"edges": Edges, "mmax": int, "way": str, "scale": float},
    sizes={
        "N": lambda a: a.wigner.shape[0] if a.edges is None else a.edges.num_nodes,
        "ends": lambda a: 2 if a.way == "forth" else 1,
        "L, P, M, F": _rows_of,
    },
    outputs={
        "dx": "(N, L, C) as base, x, message with message",
        "dmessage": "(E, M, ends * C) as message, x with x",
        "dwigner": "like wigner with x, message",
        "dfactors": "like factors with x, message",
    },
    formula=_formula,
    pullback=_pullback,
)


def _lmax(name: str, argument: str, wigner: Any) -> int:
    """Return the largest degree of matrices, dense or packed."""
    lmax = degree_of(wigner)
    if tuple(wigner.shape[1:]) != matrix_size(lmax, packed=wigner.ndim == 2):
        raise ValueError(
            f"{name}: {argument} has shape {tuple(wigner.shape)}; it should be (E, (lmax + 1)², "
            "(lmax + 1)²), or (E, 1 + 9 + … + (2 lmax + 1)²) for packed blocks"
        )
    return lmax


@op(edge_wigner, names={"factors": "radial"})
def node_to_edge_wigner_permute(
    x: ArrayT,
    edge_index: Edges | ArrayT,
    wigner: ArrayT,
    *,
    radial: ArrayT | None = None,
    mmax: int | None = None,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return the features of both ends of every edge, rotated into the edge's frame, m-major.

    .. math:: \mathrm{out}_{e, r} = f_{e, q(r)} \odot \Bigl( \sum_j W_{e, P(r), j} \, x_{s(e), j}
              \;\Big\|\; \sum_j W_{e, P(r), j} \, x_{t(e), j} \Bigr)

    with P(r) the l-major row of m-major row r (`fusedops.wigner.m_major_order`), j over the rows of
    its degree, s(e), t(e) the source and the target of edge e, and f radial functions, one for the
    degree and ``|m|`` of a row and each channel.

    Parameters
    ----------
    x : array or tensor (N, (lmax + 1)², C), float32 or float64; in torch bfloat16 and float16 too
        Features of the nodes, l-major: row l² + l + m, for C channels.
    edge_index : Edges, or array or tensor (2, E), int32 or int64
        Source and target of every edge. `Edges` made once per graph save the sort. A tensor on a
        GPU is sorted when first used and after every write to it (in inference mode in every call);
        a view of the same numbers finds these edges again.
    wigner : array or tensor (E, (lmax + 1)², (lmax + 1)²) or (E, Σ(2l + 1)²)
        The matrices of the edges, dimensionless like `x`. Either dense, with only the diagonal
        blocks of 2l + 1 rows read; or packed, these blocks one after the other, row by row.
    radial : array or tensor (E, Σ (lmax + 1 - m) 2C), optional
        f, for every order m from 0 to mmax 2C numbers for each of its degrees, dimensionless, as
        `so2_convolution` takes them. On a GPU messages are multiplied as they are written, which
        spares the convolution's reading and writing; on a CPU the convolution does it in the cache.
    mmax : int, optional
        The largest order ``|m|`` that is kept, at most lmax; lmax if not given.

    Returns
    -------
    array or tensor (E, M, 2C)
        The C channels of the source, then the C of the target, in the dtype of `x`; accumulated in
        float32 or better.

    Raises
    ------
    IndexError
        If an end of an edge is not a node.

    Notes
    -----
    x, wigner and radial have gradients of any order; only these are kept for the backward. The
    gradient of dense matrices is zero outside of the blocks, and in rows ``|m| > mmax``. Sums over
    a node's edges run in the order of the edges, the same in every run and for any number of
    threads. Autocast changes no dtypes.

    References
    ----------
    Passaro and Zitnick, ICML 2023 (eSCN); the shapes follow fairchem's UMA backends, which on the
    way back take `wigner_inv` before `edge_index`.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x = np.arange(8.0).reshape(2, 4, 1)  # two nodes, lmax = 1, one channel
    >>> edges = fusedops.Edges([[0], [1]], num_nodes=2)
    >>> message = fusedops.node_to_edge_wigner_permute(x, edges, np.eye(4)[None])
    >>> message[0].tolist()  # (0, 0), (1, 0), (1, 1), (1, -1)
    [[0.0, 4.0], [2.0, 6.0], [3.0, 7.0], [1.0, 5.0]]
    """
    name = "node_to_edge_wigner_permute"
    limit = order_limit(name, mmax, _lmax(name, "wigner", wigner))
    edges = read_graph(name, edge_index, x.shape[0], x, "x", wigner.shape[0])
    return to_run(
        (None, x, None, wigner, radial, edges, limit, "forth", 1.0), "dmessage", late(edges)
    )


def _way_back(name: str, transpose: bool) -> str:
    flag(name, "transpose", transpose)
    return "undo" if transpose else "back"


@op(edge_wigner, names={"wigner": "wigner_inv"})
def permute_wigner_inv_edge_to_node(
    message: ArrayT,
    edge_index: Edges | ArrayT,
    wigner_inv: ArrayT,
    num_nodes: int | None = None,
    *,
    mmax: int | None = None,
    transpose: bool = False,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return messages rotated out of the frames of their edges, l-major, summed by target.

    .. math:: \mathrm{out}_{n, i} = \sum_{e: t(e) = n} \sum_r V_{e, i, P(r)} \,
              \mathrm{message}_{e, r}

    with P(r) the l-major row of m-major row r, and r over the rows of the degree of i.

    Parameters
    ----------
    message : array or tensor (E, M, C), float32 or float64; in torch bfloat16 and float16 too
        Features of the edges, m-major (`fusedops.wigner.m_major_order`).
    edge_index : Edges, or array or tensor (2, E), int32 or int64
        Source and target of every edge; see `node_to_edge_wigner_permute`.
    wigner_inv : array or tensor (E, (lmax + 1)², (lmax + 1)²) or (E, Σ(2l + 1)²)
        V, dense or packed: W⁻¹ = Wᵀ for the matrices W of `node_to_edge_wigner_permute`.
    num_nodes : int, optional
        N; not needed with `Edges`.
    mmax : int, optional
        The largest order ``|m|`` of `message`; lmax if not given. Larger orders count as zero.
    transpose : bool
        Whether `wigner_inv` holds the matrices W of `node_to_edge_wigner_permute`, to be read
        transposed. Not for W with an envelope, which would be applied on this way too.

    Returns
    -------
    array or tensor (N, (lmax + 1)², C)
        In the dtype of `message`; zero for a node that is no edge's target.

    Raises
    ------
    IndexError
        If an end of an edge is not a node.

    Notes
    -----
    message and wigner_inv have gradients of any order; see `node_to_edge_wigner_permute`.
    `permute_wigner_inv` is the same without the sum.

    References
    ----------
    See `node_to_edge_wigner_permute`.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> message = np.ones((2, 4, 1))
    >>> wigner_inv = np.stack([np.eye(4), 2 * np.eye(4)])
    >>> edges = fusedops.Edges([[0, 1], [1, 1]], num_nodes=2)
    >>> x = fusedops.permute_wigner_inv_edge_to_node(message, edges, wigner_inv)
    >>> x[..., 0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]]
    """
    name = "permute_wigner_inv_edge_to_node"
    limit = order_limit(name, mmax, _lmax(name, "wigner_inv", wigner_inv))
    edges = read_graph(name, edge_index, num_nodes, message, "message", wigner_inv.shape[0])
    arguments: Any = None, None, message, wigner_inv, None, edges
    arguments += limit, _way_back(name, transpose), 1.0
    return to_run(arguments, "dx", late(edges))


@op(edge_wigner, names={"wigner": "wigner_inv"})
def permute_wigner_inv(
    message: ArrayT,
    wigner_inv: ArrayT,
    *,
    mmax: int | None = None,
    transpose: bool = False,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return messages rotated out of the frames of their edges, l-major, edge by edge.

    .. math:: \mathrm{out}_{e, i} = \sum_r V_{e, i, P(r)} \, \mathrm{message}_{e, r}

    Parameters
    ----------
    message : array or tensor (E, M, C), float32 or float64; in torch bfloat16 and float16 too
        Features of the edges, m-major.
    wigner_inv : array or tensor (E, (lmax + 1)², (lmax + 1)²) or (E, Σ(2l + 1)²)
        V, the matrices, dense or packed.
    mmax : int, optional
        The largest order ``|m|`` that `message` has; lmax if not given.
    transpose : bool
        Whether `wigner_inv` holds the matrices W of `node_to_edge_wigner_permute`, to be read
        transposed. Not for W with an envelope, which would be applied on this way too.

    Returns
    -------
    array or tensor (E, (lmax + 1)², C)
        In the dtype of `message`.

    Notes
    -----
    message and wigner_inv have gradients of any order.

    References
    ----------
    See `node_to_edge_wigner_permute`.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> message = np.array([0.0, 2, 3, 1]).reshape(1, 4, 1)  # (0, 0), (1, 0), (1, 1), (1, -1)
    >>> fusedops.permute_wigner_inv(message, np.eye(4)[None]).ravel().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    name = "permute_wigner_inv"
    limit = order_limit(name, mmax, _lmax(name, "wigner_inv", wigner_inv))
    return to_run(
        (None, None, message, wigner_inv, None, None, limit, _way_back(name, transpose), 1.0), "dx"
    )


@op(edge_wigner, names={"base": "x", "message": "radial", "wigner": "wigner_inv"})
def edge_degree_scatter(
    x: ArrayT,
    radial: ArrayT,
    edge_index: Edges | ArrayT,
    wigner_inv: ArrayT,
    *,
    rescale_factor: float = 1.0,
    transpose: bool = False,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return node features plus the edge-degree embedding, a sum of radial functions over edges.

    .. math:: \mathrm{out}_{n, i} = x_{n, i} + \frac{1}{\mathrm{rescale\_factor}}
              \sum_{e: t(e) = n} V_{e, i, l^2 + l} \, \mathrm{radial}_{e, l}

    with l the degree of row i: only the columns m = 0 of the matrices are read.

    Parameters
    ----------
    x : array or tensor (N, (lmax + 1)², C), float32 or float64; in torch bfloat16 and float16 too
        Features of the nodes, l-major.
    radial : array or tensor (E, lmax + 1, C)
        Functions of the edge's length, one for every degree and channel.
    edge_index : Edges, or array or tensor (2, E), int32 or int64
        Source and target of every edge; see `node_to_edge_wigner_permute`.
    wigner_inv : array or tensor (E, (lmax + 1)², (lmax + 1)²) or (E, Σ(2l + 1)²)
        V, the matrices, dense or packed.
    rescale_factor : float
        The divisor of the sums, such as the mean number of a node's edges.
    transpose : bool
        Whether `wigner_inv` holds the matrices W of `node_to_edge_wigner_permute`, to be read
        transposed. Not for W with an envelope, which would be applied on this way too.

    Returns
    -------
    array or tensor (N, (lmax + 1)², C)
        In the dtype of `x`.

    Raises
    ------
    IndexError
        If an end of an edge is not a node.

    Notes
    -----
    x, radial and wigner_inv have gradients of any order.

    References
    ----------
    The embedding follows fairchem's UMA, whose `edge_degree_scatter` takes `wigner_inv` before
    `edge_index`, and flat radial functions, (E, (lmax + 1) C).

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x, radial = np.ones((1, 4, 1)), np.array([[[5.0], [7.0]]])
    >>> edges = fusedops.Edges([[0], [0]], num_nodes=1)
    >>> fusedops.edge_degree_scatter(x, radial, edges, np.eye(4)[None]).ravel().tolist()
    [6.0, 1.0, 8.0, 1.0]
    """
    name = "edge_degree_scatter"
    _lmax(name, "wigner_inv", wigner_inv)
    factor = real(name, "rescale_factor", rescale_factor)
    double = "float64" in [dtype_name(array.dtype) for array in (x, radial, wigner_inv)]
    range_of = np.finfo(np.float64 if double else np.float32)
    magnitude = abs(factor)
    if not magnitude > 0 or not float(range_of.tiny) <= 1 / magnitude <= float(range_of.max):
        raise ValueError(
            f"{name}: rescale_factor is {rescale_factor}; it should be finite, as its inverse"
        )
    edges = read_graph(name, edge_index, x.shape[0], x, "x", wigner_inv.shape[0])
    static: tuple[Any, ...] = edges, 0, _way_back(name, transpose), 1 / factor
    arguments = x, None, radial, wigner_inv, None, *static
    return to_run(arguments, "dx", late(edges))
