"""The edge Wigner operations, their edges and matrices, on the reference and the kernels."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

import fusedops
import guarded
from fusedops._frame import registry
from fusedops._frame.arrays import wide
from fusedops.harmonics.op import matrices as matrices_primitive
from fusedops.harmonics.op import matrices_vjp, matrices_vjp_vjp, matrix_size
from fusedops.testing import TOLERANCE, error
from fusedops.wigner import m_major_order, wigner_d, wigner_d_of
from fusedops.wigner.op import edge_wigner
from fusedops.wigner.plan import _Check, grouped_ends
from fusedops.wigner.rows import function_rows
from places import (
    EXACT,
    FILLING,
    HAS_TORCH,
    SERVE_TENSORS,
    available,
    interpreted,
    needs_linux,
    needs_torch,
    needs_triton,
)

if HAS_TORCH:
    import torch

pytestmark = interpreted


OPS = {
    "forth": fusedops.node_to_edge_wigner_permute,
    "back": fusedops.permute_wigner_inv_edge_to_node,
    "undo": fusedops.permute_wigner_inv_edge_to_node,
    "own": fusedops.permute_wigner_inv,
    "degree": fusedops.edge_degree_scatter,
}
# The arrays with gradients, in the order of the arguments; "undo" goes back with the matrices
# of the way forth.
NAMES = {
    "forth": ("x", "wigner"),
    "back": ("message", "wigner_inv"),
    "undo": ("message", "wigner_inv"),
    "own": ("message", "wigner_inv"),
    "degree": ("x", "radial", "wigner_inv"),
}

# A self-loop, a repeated edge and its reverse, a node (4) without an edge,
# and nodes that are only targets (3) or only sources (5).
ENDS = np.array([[0, 1, 2, 1, 2, 0, 5], [1, 0, 2, 0, 1, 3, 1]])
NODES = 6


class Problem(NamedTuple):
    """The arguments of an op, and the cotangent of its result."""

    op: str
    arrays: tuple[Any, ...]
    ends: np.ndarray
    nodes: int
    lmax: int
    mmax: int
    packed: bool
    rescale: float
    cotangent: Any
    transpose: bool

    @property
    def named(self):
        return dict(zip(NAMES[self.op], self.arrays, strict=True))

    @property
    def options(self):
        """The arguments without a gradient."""
        edges = None if self.op == "own" else fusedops.Edges(self.ends, self.nodes)
        return options_of(self, edges)


def options_of(p, edges):
    options = {} if p.op == "own" else {"edge_index": edges}
    options.update({"rescale_factor": p.rescale} if p.op == "degree" else {"mmax": p.mmax})
    if p.transpose:
        options["transpose"] = True
    if p.op in ("back", "undo") and not isinstance(edges, fusedops.Edges):
        options["num_nodes"] = p.nodes
    return options


def orders(lmax):
    """Return the degree and the order of every l-major row."""
    pairs = [(l, m) for l in range(lmax + 1) for m in range(-l, l + 1)]
    return np.array(pairs).T


def is_read(op, lmax, mmax):
    """Return which elements of a dense matrix an op reads."""
    l, m = orders(lmax)
    block = l[:, None] == l
    return block & (abs(m)[:, None] <= mmax if op in ("forth", "undo") else abs(m) <= mmax)


def pack(dense):
    spans = [slice(l * l, (l + 1) ** 2) for l in range(round(dense.shape[-1] ** 0.5))]
    rows = [
        dense[:, span, span].reshape(len(dense), (span.stop - span.start) ** 2) for span in spans
    ]
    return np.concatenate(rows, 1)


def unpack(packed, lmax):
    dense = np.zeros((len(packed), (lmax + 1) ** 2, (lmax + 1) ** 2), packed.dtype)
    l, _ = orders(lmax)
    dense[:, l[:, None] == l] = packed
    return dense


def problem(
    op="forth",
    lmax=2,
    mmax=None,
    *,
    packed=False,
    ends=ENDS,
    nodes=NODES,
    channels=3,
    dtypes="float64",
    rescale=2.5,
    seed=0,
):
    """Return a problem with NaN wherever a matrix isn't read."""
    rng = np.random.default_rng(seed)
    mmax = 0 if op == "degree" else lmax if mmax is None else mmax
    ends = np.asarray(ends).reshape(2, -1)
    nodes = ends.shape[1] if op == "own" else nodes
    E, R, M = ends.shape[1], (lmax + 1) ** 2, len(m_major_order(lmax, mmax))
    wigner = rng.normal(size=(E, R, R)) / np.sqrt(2 * lmax + 1)
    wigner[:, ~is_read(op, lmax, mmax)] = np.nan
    shapes = {"x": (nodes, R, channels), "message": (E, M, channels), "radial": (E, M, channels)}
    arrays = [rng.normal(size=shapes[name]) for name in NAMES[op][:-1]]
    arrays.append(pack(wigner) if packed else wigner)
    dtypes = (dtypes,) * len(arrays) if isinstance(dtypes, str) else dtypes
    arrays = [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    shape = (E, M, 2 * channels) if op == "forth" else (nodes, R, channels)
    cotangent = rng.normal(size=shape).astype(dtypes[0])
    common = ends, nodes, lmax, mmax, packed, rescale, cotangent, op == "undo"
    return Problem(op, tuple(arrays), *common)


def dense(p):
    """Return the result and the gradients, by products of whole matrices in float64."""
    *features, wigner = (array.astype(np.float64) for array in p.arrays)
    g = p.cotangent.astype(np.float64)
    wigner = unpack(wigner, p.lmax) if p.packed else wigner
    read = is_read(p.op, p.lmax, p.mmax)
    wigner = np.where(read, wigner, 0.0)
    kept = np.eye(read.shape[0])[m_major_order(p.lmax, p.mmax)]
    source, target = p.ends
    C = features[0].shape[-1]
    if p.op == "forth":
        (x,) = features
        forth = kept @ wigner
        dx, dwigner, halves = np.zeros_like(x), 0.0, []
        for ends, part in ((source, g[..., :C]), (target, g[..., C:])):
            halves.append(forth @ x[ends])
            np.add.at(dx, ends, forth.swapaxes(1, 2) @ part)
            dwigner = dwigner + kept.T @ part @ x[ends].swapaxes(1, 2)
        results = [np.concatenate(halves, -1), dx]
    else:
        scale = 1 / p.rescale if p.op == "degree" else 1.0
        target = np.arange(len(target)) if p.op == "own" else target
        wigner = wigner.swapaxes(1, 2) if p.transpose else wigner
        back = scale * (wigner @ kept.T)
        out = features[0].copy() if p.op == "degree" else np.zeros((p.nodes, len(read), C))
        np.add.at(out, target, back @ features[-1])
        dwigner = scale * (g[target] @ (kept.T @ features[-1]).swapaxes(1, 2))
        dwigner = dwigner.swapaxes(1, 2) if p.transpose else dwigner
        results = [out, *([g] if p.op == "degree" else []), back.swapaxes(1, 2) @ g[target]]
    dwigner = np.where(read, dwigner, 0.0)
    return [*results, pack(dwigner) if p.packed else dwigner]


def tensor(array):
    return torch.from_numpy(array)


def leaves_of(p):
    return [tensor(array).requires_grad_() for array in p.arrays]


def function_of(p, backend=None, edges=None):
    """Return the op as a function of the arrays that have a gradient."""
    options = p.options if edges is None else options_of(p, edges)

    def function(*arrays, **more):
        named = dict(zip(NAMES[p.op], arrays, strict=True))
        return OPS[p.op](**named, **options, backend=backend, **more)

    return function


def solve(place, p, edges=None):
    """Return the result and the gradients, as arrays."""
    framework, backend = place
    if framework == "numpy":
        options = p.options if edges is None else options_of(p, edges)
        out, pullback = OPS[p.op].vjp(**p.named, **options, backend=backend)
        return [out, *pullback(p.cotangent)]
    leaves = leaves_of(p)
    out = function_of(p, backend, edges)(*leaves)
    gradients = torch.autograd.grad(out, leaves, tensor(p.cotangent))
    return [out.detach().numpy(), *(gradient.numpy() for gradient in gradients)]


def evaluate(place, p, arrays=None):
    """Return the result alone, an array, of other arrays."""
    arrays = p.arrays if arrays is None else arrays
    if place[0] == "torch":
        arrays = [tensor(array) for array in arrays]
    return np.asarray(function_of(p, place[1])(*arrays))


def same(got, want):
    np.testing.assert_array_equal(got, want, strict=True)


def close(got, want, dtype=None, terms=64):
    """Compare with a reference by test_matrix.py's tolerance for sums of `terms` products."""
    dtype = str(got.dtype) if dtype is None else dtype
    assert error(got, want) <= TOLERANCE[dtype] * max(1.0, terms**0.5 / 8)


def agree(place, got, want):
    assert got.dtype == want.dtype
    (same if place[1] in EXACT else close)(got, want)


def test_orders_of_the_documented_example():
    assert m_major_order(2).tolist() == [0, 2, 6, 3, 7, 1, 5, 8, 4]
    assert m_major_order(2, mmax=1).tolist() == [0, 2, 6, 3, 7, 1, 5]
    assert m_major_order(2, 0).tolist() == [0, 2, 6]
    assert m_major_order(0).tolist() == [0]


@pytest.mark.parametrize("lmax", range(9))
def test_orders_are_sorted_by_order_then_sign_then_degree(lmax):
    l, m = orders(lmax)
    by_order = np.lexsort((l, m < 0, abs(m)))
    for mmax in range(lmax + 1):
        order = m_major_order(lmax, mmax)
        assert order.dtype == np.int64
        same(order, by_order[abs(m)[by_order] <= mmax])
        # As in eSCN, degrees above mmax keep 2 mmax + 1 orders.
        assert len(order) == (mmax + 1) ** 2 + (lmax - mmax) * (2 * mmax + 1)
    same(np.sort(m_major_order(lmax)), np.arange((lmax + 1) ** 2))
    same(m_major_order(lmax), m_major_order(np.int32(lmax), np.int64(lmax)))


def test_an_order_may_be_written_to():
    order = m_major_order(2)
    order[:] = 0
    assert m_major_order(2).tolist() == [0, 2, 6, 3, 7, 1, 5, 8, 4]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((-1,), ValueError, "lmax is -1; it should be at least 0"),
        ((2.0,), TypeError, "lmax is a float; it should be an int"),
        ((None,), TypeError, "lmax is a NoneType; it should be an int"),
        (("2",), TypeError, "lmax is a str; it should be an int"),
        ((2, 3), ValueError, "mmax is 3; it should be at most 2, lmax"),
        ((2, -1), ValueError, "mmax is -1; it should be at least 0"),
        ((2, 1.0), TypeError, "mmax is a float; it should be an int"),
    ],
)
def test_bad_orders(arguments, kind, message):
    with pytest.raises(kind, match=f"m_major_order: {message}"):
        m_major_order(*arguments)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lmax", range(5))
@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients_by_whole_matrices(quick, op, lmax, packed):
    """Unread elements change no bit of a result, and have no gradient."""
    for mmax in range(lmax + 1 if op != "degree" else 1):
        for dtype in ("float64", "float32"):
            p = problem(op, lmax, mmax, packed=packed, dtypes=dtype, seed=mmax)
            results = solve(quick, p)
            assert len(results) == 1 + len(p.arrays)
            for got, want in zip(results, dense(p), strict=True):
                assert got.dtype == dtype
                close(got, want)
            outside = ~is_read(op, lmax, p.mmax)
            unread = pack(outside[None])[0] if packed else outside
            assert not results[-1][:, unread].any()


@needs_triton
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients_when_interpreted(op, packed):
    lmax, mmax, dtype = (2, 1, "float32") if packed else (1, 0, "float64")
    p = problem(op, lmax, mmax, packed=packed, dtypes=dtype)
    results = solve(("torch", "triton"), p)
    for got, want in zip(results, dense(p), strict=True):
        assert got.dtype == dtype
        close(got, want)
    read = is_read(op, lmax, p.mmax)
    unread = pack(~read[None])[0] if packed else ~read
    assert not results[-1][:, unread].any()


GRAPHS = {
    "no edges": ([[], []], 3),
    "no nodes": ([[], []], 0),
    "one edge": ([[1], [0]], 2),
    "a loop": ([[0], [0]], 1),
    "loops": ([[2, 0, 1, 2], [2, 0, 1, 2]], 4),
    "one edge many times": ([[1] * 5, [0] * 5], 2),
    "both ways": ([[0, 1, 2, 0], [1, 0, 0, 2]], 3),
    "most nodes alone": ([[7, 20], [20, 9]], 40),
    "into a hub": ([*np.ogrid[1:70, 3:4]], 70),
    "out of a hub": ([[3] * 69, list(range(69))], 70),
}


@needs_triton
@pytest.mark.parametrize("channels", [3, 128])
@pytest.mark.parametrize("op", ["forth", "back"])
def test_rows_of_high_degrees_are_taken_some_at_a_time(op, channels):
    """The last rows of a degree are fewer than others; the elements behind them are NaN."""
    p = problem(op, 4, ends=[[0, 1], [1, 0]], nodes=2, channels=channels)
    for got, want in zip(solve(("torch", "triton"), p), dense(p), strict=True):
        close(got, want, "float64")


def ends_of(name):
    ends, nodes = GRAPHS[name]
    source, target = np.broadcast_arrays(*(np.asarray(e, np.int64).ravel() for e in ends))
    return {"ends": np.stack([source, target]), "nodes": nodes}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("op", OPS)
def test_any_graph(quick, op, graph):
    for channels in (1, 4, 17):
        p = problem(op, 2, 1, **ends_of(graph), channels=channels)
        for got, want in zip(solve(quick, p), dense(p), strict=True):
            close(got, want)


@needs_triton
@pytest.mark.parametrize("graph", ["no edges", "no nodes", "loops", "both ways"])
@pytest.mark.parametrize("op", ["forth", "back"])
def test_any_graph_when_interpreted(op, graph):
    p = problem(op, 1, **ends_of(graph))
    for got, want in zip(solve(("torch", "triton"), p), dense(p), strict=True):
        close(got, want)


@pytest.mark.parametrize("op", OPS)
def test_no_channels(place, op):
    p = problem(op, 1, channels=0)
    for got, want in zip(solve(place, p), dense(p), strict=True):
        same(got, want)
    assert not solve(place, p)[-1].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nodes_without_edges_get_exact_zeros(quick, dtype):
    """Given sums stay as they are, and features that no edge reads have a gradient of zero."""
    forth, back, degree = (
        solve(quick, problem(op, dtypes=dtype)) for op in ("forth", "back", "degree")
    )
    assert not forth[1][4].any()
    assert forth[1][[0, 1, 2, 3, 5]].any((1, 2)).all()
    assert not back[0][[4, 5]].any()
    p = problem("degree", dtypes=dtype)
    same(degree[0][[4, 5]], p.arrays[0][[4, 5]])
    same(degree[1], p.cotangent)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_number_reaches_nothing_but_its_degree_and_channel(quick, op, packed):
    """It reaches its node's edges, or its edge's node."""
    p = problem(op, 3, 2, packed=packed, channels=9)
    degrees = orders(3)[0]
    row = {"forth": 6, "degree": 2}.get(op, 5)
    at = (1, row, 4)
    bad = p.arrays[-2].copy()
    bad[at] = np.nan
    want = solve(quick, p)
    got = solve(quick, p._replace(arrays=(*p.arrays[:-2], bad, p.arrays[-1])))
    reached = [np.zeros(array.shape, bool) for array in want]
    own = degrees[row] if op == "forth" else degrees[m_major_order(3, p.mmax)[row]]
    if op == "forth":
        rows = degrees[m_major_order(3, p.mmax)] == own
        for half, ends in enumerate(p.ends):
            for edge in np.flatnonzero(ends == 1):
                reached[0][edge, rows, 9 * half + 4] = True
        edges = (p.ends == 1).any(0)
        inside = np.outer(degrees == own, np.arange(len(degrees)) == row)
    else:
        reached[0][1 if op == "own" else p.ends[1, 1], degrees == own, 4] = True
        edges = np.arange(len(p.ends[0])) == 1
        column = m_major_order(3, p.mmax)[row]
        inside = np.outer(degrees == own, np.arange(len(degrees)) == column)
        inside = inside.T if p.transpose else inside
    inside &= is_read(op, 3, p.mmax)
    inside = pack(inside[None])[0] if packed else inside
    reached[-1][np.ix_(edges, *map(np.arange, inside.shape))] = inside
    for after, before, there in zip(got, want, reached, strict=True):
        agree(quick, after[~there], before[~there])
        assert np.isnan(after[there]).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_bad_matrix_reaches_nothing_but_what_its_edge_does(quick, op, packed):
    """It reaches its edge's message and nodes, but no gradient of a matrix."""
    p = problem(op, packed=packed)
    wigner = p.arrays[-1].copy()
    wigner[1] = np.nan
    source, target = p.ends[:, 1]
    reached = {
        "forth": ([1], [source, target], []),
        "back": ([target], [1], []),
        "undo": ([target], [1], []),
        "own": ([1], [1], []),
        "degree": ([target], [], [1], []),
    }[op]
    got = solve(quick, p._replace(arrays=(*p.arrays[:-1], wigner)))
    for after, before, rows in zip(got, solve(quick, p), reached, strict=True):
        kept = ~np.isin(np.arange(len(after)), rows)
        agree(quick, after[kept], before[kept])
        assert all(np.isnan(after[row]).any() for row in rows)


def along_axes(p, cotangent, function):
    """Return the gradients of ⟨cotangent, function⟩ by differences of long steps.

    The function is linear in every array, and a step of 1 makes no error but a rounding.
    """
    gradients = []
    for at, array in enumerate(p.arrays):
        gradient = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            values = []
            for step in (1, -1):
                arrays = [a.copy() for a in p.arrays]
                arrays[at][index] += step
                values.append(np.vdot(cotangent, function(*arrays)))
            gradient[index] = (values[0] - values[1]) / 2
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_pullbacks_are_what_differences_say(backend, op, packed):
    p = problem(op, 1, int(packed), packed=packed, channels=2, ends=ENDS[:, :4], nodes=3)
    _, *gradients = solve(("numpy", backend), p)
    want = along_axes(p, p.cotangent, function_of(p, backend))
    assert [g.shape for g in gradients] == [a.shape for a in p.arrays]
    for got, difference in zip(gradients, want, strict=True):
        close(got, difference)


def plain_forth(x, source, target, wigner, order):
    rotate = wigner[:, order]
    return torch.cat([rotate @ x[source], rotate @ x[target]], -1)


def plain_back(message, target, wigner_inv, order, nodes):
    values = wigner_inv[:, :, order] @ message
    return values.new_zeros(nodes, *values.shape[1:]).index_add(0, target, values)


# One number for every pair of a degree and an order up to a sign commutes with turns about y.
def commuting(weights, lmax, mmax):
    l, m = orders(lmax)[:, m_major_order(lmax, mmax)]
    return weights[l * (lmax + 1) + abs(m)][:, None]


def energy_of(positions, features, weights, ends, mmax, backend):
    """Return the energy of a small interatomic potential; None for a backend is plain torch."""
    source, target = ends
    nodes, lmax = len(positions), round(features.shape[1] ** 0.5) - 1
    vectors = positions[target] - positions[source]
    wigner = wigner_d(vectors, lmax)
    radial = torch.exp(-vectors.square().sum(-1))
    order = torch.from_numpy(m_major_order(lmax, mmax))
    channels = features.shape[2]
    mix = radial[:, None, None] * commuting(weights, lmax, mmax)
    degree = radial[:, None, None] * weights[: lmax + 1, None] * features.new_ones(channels)
    if backend is None:
        centre = wigner.mT[:, :, order[: lmax + 1]] @ degree
        start = features.index_add(0, target, centre / 3.0)
        message = mix * plain_forth(start, source, target, wigner, order)
        message = message[..., :channels] * torch.tanh(message[:, :1, channels:])
        out = plain_back(message, target, wigner.mT, order, nodes)
    else:
        edges = fusedops.Edges(ends, nodes)
        start = fusedops.edge_degree_scatter(
            features, degree, edges, wigner.mT, rescale_factor=3.0, backend=backend
        )
        message = fusedops.node_to_edge_wigner_permute(
            start, edges, wigner, mmax=mmax, backend=backend
        )
        message = mix * message
        message = message[..., :channels] * torch.tanh(message[:, :1, channels:])
        out = fusedops.permute_wigner_inv_edge_to_node(
            message, edges, wigner.mT, mmax=mmax, backend=backend
        )
    return (out * (start + out)).sum()


def atoms(seed=0, nodes=4, lmax=2, channels=2):
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(nodes, 3)), rng.normal(size=(nodes, (lmax + 1) ** 2, channels))
    weights = rng.normal(size=(lmax + 1) ** 2)
    ends = np.array([[0, 1, 2, 3, 0, 2, 1], [1, 0, 1, 2, 2, 3, 3]])
    return tuple(tensor(array).requires_grad_() for array in (*arrays, weights)), tensor(ends)


@needs_torch
@pytest.mark.parametrize("mmax", [0, 1, 2])
def test_forces_can_be_trained_on(torch_backend, mmax):
    """Energies, forces and a loss's gradients through forces equal plain torch's."""
    found = []
    for backend in (torch_backend, None):
        leaves, ends = atoms()
        energy = energy_of(*leaves, ends, mmax, backend)
        (forces,) = torch.autograd.grad(energy, leaves[0], create_graph=True)
        loss = (forces - 0.3).square().sum()
        found.append([energy, forces, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def harmonics(lmax, vectors):
    """Return e3nn's real spherical harmonics (E, (lmax + 1)²), from SciPy's complex ones."""
    special = pytest.importorskip("scipy.special")
    x, y, z = np.asarray(vectors, float).T
    # The polar axis is y, and azimuths count from z to x. The arc tangent keeps digits near poles.
    polar, azimuth = np.arctan2(np.hypot(x, z), y), np.arctan2(x, z)
    columns = []
    for l, m in orders(lmax).T:
        # SciPy's have the phase of Condon and Shortley.
        if hasattr(special, "sph_harm_y"):
            value = (-1.0) ** m * special.sph_harm_y(l, abs(m), polar, azimuth)
        else:
            value = (-1.0) ** m * special.sph_harm(abs(m), l, azimuth, polar)
        columns.append(value.real if m == 0 else 2**0.5 * (value.real if m > 0 else value.imag))
    return np.stack(columns, 1)


def rotation(seed):
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.linalg.det(q)


def matrix_of(turn, lmax):
    """Return any rotation's D, fitted to the turned harmonics of many points."""
    points = np.random.default_rng(9).normal(size=(20 * (lmax + 1) ** 2, 3))
    turned, plain = harmonics(lmax, points @ turn.T), harmonics(lmax, points)
    fitted = np.linalg.lstsq(plain, turned)[0].T
    assert error(plain @ fitted.T, turned) < 1e-13
    return fitted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("lmax", "mmax"), [(1, 1), (2, 1), (3, 3), (4, 2)])
def test_rotating_the_inputs_rotates_the_outputs(quick, lmax, mmax, packed):
    """The messages go through a layer that commutes with turns about the edge."""
    rng = np.random.default_rng(lmax)
    x = rng.normal(size=(NODES, (lmax + 1) ** 2, 3))
    vectors = rng.normal(size=(ENDS.shape[1], 3))
    scales = commuting(rng.normal(size=(lmax + 1) ** 2), lmax, mmax)
    turn = rotation(lmax)
    D = matrix_of(turn, lmax)
    edges = fusedops.Edges(ENDS, NODES)
    backend = {"backend": quick[1]}

    def layer(x, vectors):
        wigner = wigner_d(vectors, lmax)
        forth, back = wigner, wigner.swapaxes(1, 2).copy()
        forth, back = (pack(a) if packed else a for a in (forth, back))
        degree = np.ones((len(vectors), lmax + 1, 3))
        arrays = [x, forth, back, degree]
        x, forth, back, degree = map(tensor, arrays) if quick[0] == "torch" else arrays
        x = fusedops.edge_degree_scatter(x, degree, edges, back, **backend)
        message = fusedops.node_to_edge_wigner_permute(x, edges, forth, mmax=mmax, **backend)
        message = message * (tensor(scales) if quick[0] == "torch" else scales)
        out = fusedops.permute_wigner_inv_edge_to_node(message, edges, back, mmax=mmax, **backend)
        return np.asarray(out)

    turned = layer(D @ x, vectors @ turn.T)
    # Roundings of the matrices grow with each degree.
    assert error(turned, D @ layer(x, vectors)) < 1e-12
    assert error(turned, layer(x, vectors)) > 0.1


def features_for(dtype, lmax=2, channels=3):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(NODES, (lmax + 1) ** 2, channels)).astype(dtype)
    wigner = wigner_d(rng.normal(size=(ENDS.shape[1], 3)).astype(dtype), lmax)
    return x, wigner


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_there_and_back_is_the_sum_of_neighbours(quick, dtype, packed):
    """With orthogonal matrices, the source's half sums neighbours, the target's the node itself."""
    x, wigner = features_for(dtype)
    arrays = [x, wigner, wigner.swapaxes(1, 2)]
    arrays = [arrays[0], *(pack(a) if packed else a for a in arrays[1:])]
    x, wigner, inverse = map(tensor, arrays) if quick[0] == "torch" else arrays
    edges, backend = fusedops.Edges(ENDS, NODES), {"backend": quick[1]}
    message = fusedops.node_to_edge_wigner_permute(x, edges, wigner, **backend)
    for h, ends in enumerate(ENDS):
        half = message[..., 3 * h : 3 * h + 3]
        got = fusedops.permute_wigner_inv_edge_to_node(half, edges, inverse, **backend)
        want = np.zeros(arrays[0].shape)
        np.add.at(want, ENDS[1], arrays[0][ends])
        # Matrices and messages are rounded, too.
        assert error(np.asarray(got), want) < 3 * TOLERANCE[dtype]
        alone = fusedops.permute_wigner_inv(half, inverse, **backend)
        assert error(np.asarray(alone), arrays[0][ends]) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("mmax", [0, 1, 2])
def test_the_way_back_is_the_transpose_of_the_way_forth(quick, mmax):
    """⟨y, forth x⟩ = ⟨back y, x⟩, and forth's pullback is back at both ends."""
    p = problem("forth", 2, mmax)
    out, dx, _ = solve(quick, p)
    x, wigner = p.arrays
    assert abs(np.vdot(p.cotangent, out) - np.vdot(dx, x)) <= 1e-14 * np.linalg.norm(
        p.cotangent
    ) * np.linalg.norm(out)
    found = 0
    for h, ends in enumerate((p.ends[::-1], p.ends)):
        message = p.cotangent[..., 3 * h : 3 * h + 3]
        back = p._replace(op="back", ends=ends)
        found = found + evaluate(quick, back, (message, wigner.swapaxes(1, 2)))
    close(found, dx)


@pytest.mark.parametrize("op", ["forth", "back", "own"])
def test_linear_in_the_features_and_in_the_matrices(quick, op):
    p, other = problem(op, 2, 1), problem(op, 2, 1, seed=1)
    for at in range(2):
        mixed, second = list(p.arrays), list(p.arrays)
        second[at] = other.arrays[at]
        mixed[at] = 3 * p.arrays[at] - 0.7 * other.arrays[at]
        want = 3 * evaluate(quick, p) - 0.7 * evaluate(quick, p, second)
        close(evaluate(quick, p, mixed), want)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["back", "own", "degree"])
def test_matrices_may_be_those_of_the_way_forth(quick, op, packed):
    """Matrices read transposed give the results of transposed copies."""
    p = problem(op, 3, 1)
    wigner = p.arrays[-1]
    found = []
    for transpose, given in ((False, wigner), (True, wigner.swapaxes(1, 2).copy())):
        arrays = (*p.arrays[:-1], pack(given) if packed else given)
        results = solve(quick, p._replace(arrays=arrays, packed=packed, transpose=transpose))
        dwigner = unpack(results[-1], 3) if packed else results[-1]
        found.append([*results[:-1], dwigner.swapaxes(1, 2) if transpose else dwigner])
    for got, want in zip(*found, strict=True):
        close(got, want)


def test_the_degree_embedding_is_a_way_back_of_the_orders_zero(quick):
    p = problem("degree", 3)
    x, radial, wigner = p.arrays
    back = problem("back", 3, 0)._replace(arrays=(radial, wigner))
    want = x + evaluate(quick, back) / p.rescale
    close(evaluate(quick, p), want)
    whole = p._replace(rescale=1.0)
    options = {name: v for name, v in whole.options.items() if name != "rescale_factor"}
    arrays = [tensor(a) for a in p.arrays] if quick[0] == "torch" else p.arrays
    named = dict(zip(NAMES["degree"], arrays, strict=True))
    got = fusedops.edge_degree_scatter(**named, **options, backend=quick[1])
    same(np.asarray(got), evaluate(quick, whole))


@pytest.mark.parametrize("op", OPS)
def test_the_order_of_edges_matters_to_roundings_alone(quick, op):
    p = problem(op, 1)
    shuffle = np.random.default_rng(0).permutation(len(p.ends[0]))
    by_edge = [len(array) == len(shuffle) and name != "x" for name, array in p.named.items()]
    arrays = [a[shuffle] if e else a for a, e in zip(p.arrays, by_edge, strict=True)]
    moves_edges = op in ("forth", "own")
    cotangent = p.cotangent[shuffle] if moves_edges else p.cotangent
    other = p._replace(arrays=tuple(arrays), ends=p.ends[:, shuffle], cotangent=cotangent)
    moved = [moves_edges, *by_edge]
    for got, want, edges in zip(solve(quick, other), solve(quick, p), moved, strict=True):
        if edges:
            agree(quick, got, want[shuffle])
        else:
            close(got, want)


def test_edges_say_what_they_hold():
    edges = fusedops.Edges(ENDS, NODES)
    assert (edges.num_nodes, edges.num_edges, edges.device) == (6, 7, "cpu")
    none = fusedops.Edges(np.zeros((2, 0), np.int32), 0)
    assert (none.num_nodes, none.num_edges) == (0, 0)
    assert fusedops.Edges(ENDS, np.int32(9)).num_nodes == 9


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize(
    ("nodes", "count"),
    [(0, 0), (3, 0), (1, 5), (3, 50), (255, 300), (65535, 99), (65536, 99), (65537, 99)]
    + [(70_000, 3000), (131_073, 50), (200_000, 3000)],
)
def test_edges_are_sorted_by_both_ends_and_stay_in_order(nodes, count, kind):
    rng = np.random.default_rng(nodes)
    ends = rng.integers(0, nodes, (2, count)).astype(kind) if count else np.zeros((2, 0), kind)
    if count > 20:
        # The ends share low digits, include the largest node, and repeat.
        ends[:, :4] = nodes - 1
        ends[:, 4:8] = (nodes - 1) & 0xFFFF
        ends[:, 8:16] = ends[:, 16:24] % 2
    edges = fusedops.Edges(ends, nodes)
    same(edges.source, ends[0].astype(np.int64))
    same(edges.target, ends[1].astype(np.int64))
    for nodes_of, order, ptr in (
        (ends[0], edges.by_source, edges.source_ptr),
        (ends[1], edges.by_target, edges.target_ptr),
    ):
        want = np.argsort(nodes_of, kind="stable")
        same(order, want)
        same(ptr, np.searchsorted(nodes_of[want], np.arange(nodes + 1)))


@needs_torch
def test_tensors_of_edges_lie_as_the_arrays_do():
    for kind in (torch.int32, torch.int64):
        edges = fusedops.Edges(tensor(ENDS).to(kind), NODES)
        for field, tensors in zip(edges._fields, edges.tensors_here(), strict=True):
            same(tensors.numpy(), getattr(fusedops.Edges(ENDS, NODES), field))


KINDS = {
    "a list": lambda: ENDS.tolist(),
    "a tuple": lambda: tuple(map(tuple, ENDS.tolist())),
    "rows": lambda: list(ENDS),
    "int32": lambda: ENDS.astype(np.int32),
    "int64": lambda: ENDS,
    "transposed": lambda: np.ascontiguousarray(ENDS.T).T,
    "reversed": lambda: ENDS[::-1, ::-1].copy()[::-1, ::-1],
    "strided": lambda: np.repeat(ENDS, 3, 1)[:, ::3],
    "frozen": lambda: frozen(ENDS.copy()),
    "Fortran int32": lambda: np.asfortranarray(ENDS.astype(np.int32)),
    "tensor": lambda: tensor(ENDS),
    "tensor of int32": lambda: tensor(ENDS).int(),
    "tensor transposed": lambda: tensor(ENDS).T.contiguous().T,
    "Edges of a tensor": lambda: fusedops.Edges(tensor(ENDS), NODES),
}


def frozen(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["forth", "back", "degree"])
def test_every_kind_of_edge_index_gives_the_same_bits(quick, op, kind):
    if "tensor" in kind and not HAS_TORCH:
        pytest.skip("torch is not installed")
    p = problem(op)
    edge_index = KINDS[kind]()
    before = copy.deepcopy(edge_index)
    for got, want in zip(solve(quick, p, edge_index), solve(quick, p), strict=True):
        same(got, want)
    if isinstance(edge_index, np.ndarray):
        same(edge_index, before)


def test_edges_are_a_copy():
    p = problem("back")
    for contiguous in (True, False):
        ends = ENDS.copy() if contiguous else ENDS.T.copy().T
        edges = fusedops.Edges(ends, NODES)
        ends[:] = 0
        for got, want in zip(
            solve(("numpy", None), p, edges), solve(("numpy", None), p), strict=True
        ):
            same(got, want)


@needs_torch
def test_edges_of_a_tensor_are_a_copy_and_a_tensor_is_read_anew():
    p = problem("back")
    ends = tensor(ENDS.copy())
    edges = fusedops.Edges(ends, NODES)
    leaves = leaves_of(p)
    want = function_of(p)(*leaves)
    assert torch.equal(function_of(p, edges=ends)(*leaves), want)
    ends[1] = 2
    assert torch.equal(function_of(p, edges=edges)(*leaves), want)
    moved = p._replace(ends=ends.numpy())
    assert torch.equal(function_of(p, edges=ends)(*leaves), function_of(moved)(*leaves))


@needs_torch
def test_edges_made_in_inference_mode_stay_usable():
    p = problem("forth")
    with torch.inference_mode():
        inside = fusedops.Edges(tensor(ENDS), NODES)
    leaves = leaves_of(p)
    out = function_of(p, "torch", inside)(*leaves)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    sum(g.nansum() for g in first).backward()
    assert leaves[0].grad.isfinite().all()


@needs_torch
@pytest.mark.parametrize("nodes", [1, 6, 40_000])
def test_one_sort_groups_edges_by_both_ends(nodes):
    ends = torch.randint(nodes, (2, 300), generator=torch.Generator().manual_seed(nodes))
    none = torch.zeros(2, 300, dtype=torch.bool)
    found = grouped_ends(ends, none, nodes)
    for want, got in zip(fusedops.Edges(ends, nodes).tensors_here()[2:], found, strict=True):
        assert torch.equal(want, got)


@needs_torch
def test_a_bad_end_is_in_no_group():
    ends = torch.tensor([[0, 9, 1, 0], [1, 1, -5, 0]])
    bad = (ends < 0) | (ends >= 2)
    by_source, source_ptr, by_target, target_ptr = grouped_ends(ends, bad, 2)
    assert source_ptr.tolist() == [0, 2, 3]
    assert by_source.tolist() == [0, 3, 2, 1]
    assert target_ptr.tolist() == [0, 1, 3]
    assert by_target.tolist() == [3, 0, 1, 2]
    *_, empty = grouped_ends(ends, bad | True, 0)
    assert empty.tolist() == [0]


@needs_torch
def test_a_late_check_raises_in_every_later_call(monkeypatch):
    # torch without CUDA can't tell.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Event:
        ready = False

        def query(self):
            return self.ready

        def synchronize(self):
            self.ready = True

    ends = torch.tensor([[0, 0], [1, 7]])
    held = _Check(ends, ends > 1, 2)
    held.event = Event()
    edges = fusedops.Edges([[0, 0], [1, 1]], 2)
    edges.__dict__["_unchecked"] = held
    edges._look()
    with pytest.raises(IndexError, match=r"edge_index\[1, 1\] is 7"):
        edges.check()
    with pytest.raises(IndexError, match=r"edge_index\[1, 1\] is 7"):
        edges._look()
    good = _Check(ends, ends > 9, 2)
    edges.__dict__["_unchecked"] = good
    edges._look()
    assert "_unchecked" not in edges.__dict__


def with_end(row, edge, value):
    ends = ENDS.copy()
    ends[row, edge] = value
    return ends


BAD_EDGES = {
    "too large": (with_end(0, 3, 6), 6, IndexError, r"edge_index\[0, 3\] is 6; it should be in \["),
    "target too large": (with_end(1, 6, 9), 6, IndexError, r"edge_index\[1, 6\] is 9"),
    "negative": (with_end(0, 3, -1), 6, IndexError, r"edge_index\[0, 3\] is -1; .* \[0, 6\), num_"),
    "far too large": (with_end(1, 0, 2**62), 6, IndexError, rf"edge_index\[1, 0\] is {2**62}"),
    "the first of many": (with_end(0, 3, 7)[:, ::-1] * 9, 9, IndexError, r"\[0, 0\] is 45"),
    "of no nodes": ([[0], [0]], 0, IndexError, r"edge_index\[0, 0\] is 0; it should be in \[0, 0"),
    "floats": (ENDS.astype(float), 6, TypeError, "edge_index has dtype float64; it should be int3"),
    "bool": (ENDS > 0, 6, TypeError, "edge_index has dtype bool; it should be int32 or int64"),
    "bytes": (ENDS.astype("u1"), 6, TypeError, "edge_index has dtype uint8"),
    "unsigned": (ENDS.astype("u8"), 6, TypeError, "edge_index has dtype uint64"),
    "big endian": (ENDS.astype(">i8"), 6, TypeError, "edge_index has dtype >i8"),
    "missing": (None, 6, TypeError, "edge_index is None; it should be an array"),
    "text": ("edges", 6, TypeError, "edge_index has dtype <U5"),
    "a list of pairs": (ENDS.T, 6, ValueError, r"edge_index has shape \(7, 2\); .* be \(2, E\)"),
    "rank 1": (ENDS[0], 6, ValueError, r"edge_index has shape \(7,\)"),
    "rank 3": (ENDS[None], 6, ValueError, r"edge_index has shape \(1, 2, 7\)"),
    "a number": (3, 6, ValueError, r"edge_index has shape \(\)"),
    "three rows": (ENDS[[0, 1, 0]], 6, ValueError, r"edge_index has shape \(3, 7\)"),
    "negative num_nodes": (ENDS, -1, ValueError, "num_nodes is -1; it should be at least 0"),
    "float num_nodes": (ENDS, 6.0, TypeError, "num_nodes is a float; it should be an int"),
    "no num_nodes": (ENDS, None, TypeError, "num_nodes is a NoneType; it should be an int"),
}


@pytest.mark.parametrize("name", BAD_EDGES)
def test_bad_edges_name_the_argument(name):
    given, nodes, kind, message = BAD_EDGES[name]
    before = copy.deepcopy(given)
    with pytest.raises(kind, match=f"Edges: .*{message}"):
        fusedops.Edges(given, nodes)
    np.testing.assert_array_equal(given, before)
    if HAS_TORCH and getattr(given, "dtype", None) in (np.int64, np.float64, np.bool_, np.uint8):
        with pytest.raises(kind, match=f"Edges: .*{message}"):
            fusedops.Edges(torch.tensor(np.ascontiguousarray(given)), nodes)


@needs_torch
def test_edges_that_cannot_be_read_name_the_argument():
    for given in (torch.zeros(2, 5, dtype=torch.long, device="meta"), tensor(ENDS).to_sparse()):
        with pytest.raises((TypeError, ValueError), match="edge_index"):
            fusedops.Edges(given, NODES)


@pytest.mark.parametrize("op", ["forth", "back", "degree"])
def test_bad_edges_in_a_call_name_the_end(op):
    p = problem(op)
    for ends, message in ((with_end(1, 2, 6), r"\[1, 2\] is 6"), (with_end(0, 0, -3), "is -3")):
        kinds = [ends, ends.astype(np.int32), ends.tolist()]
        for edge_index in kinds:
            with pytest.raises(IndexError, match=message):
                OPS[op](**p.named, **options_of(p, edge_index))
        if HAS_TORCH:
            with pytest.raises(IndexError, match=message):
                function_of(p, edges=tensor(ends))(*map(tensor, p.arrays))


def arguments(op, lmax=2, mmax=None):
    """Return arguments of ones: 4 nodes, 5 edges, 2 channels."""
    p = problem(op, lmax, mmax, ends=ENDS[:, :5], nodes=4, channels=2)
    ones = {name: np.ones_like(array) for name, array in p.named.items()}
    return {**ones, **options_of(p, fusedops.Edges(p.ends, 4) if op != "own" else None)}


def shape_of(op):
    return {"forth": (5, 9, 4), "own": (5, 9, 2)}.get(op, (4, 9, 2))


BAD_MATRICES = {
    "a number": (
        lambda: 1.0,
        ValueError,
        r"has shape \(\); it should be \(\w, L, L\) or \(\w, P\)",
    ),
    "of rank 1": (
        lambda: np.ones(9),
        ValueError,
        r"has shape \(9,\); it should be \(\w, L, L\) or ",
    ),
    "of rank 4": (lambda: np.ones((1, 5, 9, 9)), ValueError, r"has shape \(1, 5, 9, 9\); it shoul"),
    "oblong": (lambda: np.ones((5, 9, 8)), ValueError, r"has shape \(5, 9, 8\); .*, L, L\)"),
    "oblong the other way": (lambda: np.ones((5, 4, 9)), ValueError, r"has shape \(5, 4, 9\); it"),
    "of no square": (lambda: np.ones((5, 8, 8)), ValueError, r"has shape \(5, 8, 8\); it should b"),
    "of nothing": (lambda: np.ones((5, 0, 0)), ValueError, r"has shape \(5, 0, 0\); it should be"),
    "no sum of blocks": (lambda: np.ones((5, 34)), ValueError, r"has shape \(5, 34\); .* 1 \+ 9 "),
    "flat": (lambda: np.ones((5, 81)), ValueError, r"has shape \(5, 81\); .* for packed blocks"),
    "packed of nothing": (lambda: np.ones((5, 0)), ValueError, r"has shape \(5, 0\); it should be"),
}
BAD_FEATURES = {
    "of rank 1": (lambda a: a[0, 0], ValueError, r"has shape \(2,\); it should be \("),
    "of rank 4": (lambda a: a[None], ValueError, r"has shape \(1, .*\); it should be \("),
}
BAD = {
    "forth": {
        "x of rank 2": ({"x": np.ones((4, 9))}, ValueError, r"x has shape \(4, 9\); it should be"),
        "x of another lmax": (
            {"x": np.ones((4, 4, 2))},
            ValueError,
            r"x has .* 4, 2\); .* \(4, 9, C\)",
        ),
        "x with too many rows": (
            {"x": np.ones((4, 10, 2))},
            ValueError,
            r"x has .* be \(4, 9, C\)",
        ),
        "wigner of another lmax": (
            {"wigner": np.ones((5, 4, 4))},
            ValueError,
            r"mmax is 2; .* at most 1",
        ),
        "more matrices": ({"wigner": np.ones((6, 9, 9))}, ValueError, "edge_index has 5 edges; it"),
        "more edges": ({"edge_index": ENDS % 4}, ValueError, "edge_index has 7 edges; .* have 5, "),
        "fewer nodes": ({"x": np.ones((3, 9, 2))}, ValueError, "edge_index has 4 nodes; .* have 3"),
        "more nodes": ({"x": np.ones((5, 9, 2))}, ValueError, "edge_index has 4 nodes; .* have 5"),
        "too few nodes": (
            {"x": np.ones((2, 9, 2)), "edge_index": ENDS[:, :5]},
            IndexError,
            r"edge_index\[0, 2\] is 2; it should be in \[0, 2\)",
        ),
    },
    "back": {
        "message of rank 2": ({"message": np.ones((5, 9))}, ValueError, r"message has .* \(5, 9\)"),
        "message of another lmax": (
            {"message": np.ones((5, 4, 2))},
            ValueError,
            r"message has shape \(5, 4, 2\); it should be \(E, 9, C\)",
        ),
        "message of another mmax": (
            {"message": np.ones((5, 9, 2)), "mmax": 1},
            ValueError,
            r"message has shape \(5, 9, 2\); it should be \(E, 7, C\)",
        ),
        "more messages": (
            {"message": np.ones((6, 9, 2))},
            ValueError,
            r"inv has shape .* be \(6, L",
        ),
        "more edges": ({"edge_index": ENDS % 4, "num_nodes": 4}, ValueError, "edge_index has 7 ed"),
        "num_nodes of Edges a float": ({"num_nodes": 4.0}, TypeError, "num_nodes is a float; it"),
        "another num_nodes": ({"num_nodes": 3}, ValueError, "edge_index has 4 nodes; .* have 3"),
        "no num_nodes": ({"edge_index": ENDS[:, :5]}, TypeError, "num_nodes is None; it should be"),
        "float num_nodes": (
            {"edge_index": ENDS[:, :5], "num_nodes": 4.0},
            TypeError,
            "num_nodes is a float; it should be an int",
        ),
        "negative num_nodes": (
            {"edge_index": ENDS[:, :5], "num_nodes": -1},
            ValueError,
            "num_nodes is -1; it should be at least 0",
        ),
        "too few nodes": (
            {"edge_index": ENDS[:, :5], "num_nodes": 2},
            IndexError,
            r"edge_index\[0, 2\] is 2; it should be in \[0, 2\)",
        ),
    },
    "own": {
        "more messages": (
            {"message": np.ones((6, 9, 2))},
            ValueError,
            r"inv has shape .* be \(6, L",
        ),
        "fewer messages": (
            {"message": np.ones((1, 9, 2))},
            ValueError,
            r"inv has shape .* be \(1, L",
        ),
        "message of another mmax": (
            {"message": np.ones((5, 7, 2))},
            ValueError,
            r"message has shape \(5, 7, 2\); it should be \(E, 9, C\)",
        ),
    },
    "degree": {
        "x of another lmax": ({"x": np.ones((4, 4, 2))}, ValueError, r"x has .* be \(4, 9, C\)"),
        "more nodes": ({"x": np.ones((5, 9, 2))}, ValueError, "edge_index has 4 nodes; .* have 5"),
        "radial of another lmax": ({"radial": np.ones((5, 2, 2))}, ValueError, r"radial has shape"),
        "radial l-major": ({"radial": np.ones((5, 9, 2))}, ValueError, "radial has shape"),
        "radial of another E": ({"radial": np.ones((6, 3, 2))}, ValueError, r"should be \(6, L"),
        "radial of another C": ({"radial": np.ones((5, 3, 1))}, ValueError, "radial has shape"),
        "radial flat": ({"radial": np.ones((5, 5))}, ValueError, r"radial has shape \(5, 5\); it "),
        "radial of rank 1": ({"radial": np.ones(5)}, ValueError, r"radial has shape \(5,\)"),
        "rescale zero": ({"rescale_factor": 0}, ValueError, "rescale_factor is 0; it should be fi"),
        "rescale -0": ({"rescale_factor": -0.0}, ValueError, "rescale_factor is -0.0; it should b"),
        "rescale inf": ({"rescale_factor": np.inf}, ValueError, "rescale_factor is inf"),
        "rescale tiny": ({"rescale_factor": 1e-320}, ValueError, "rescale_factor is 1e-320; it sh"),
        "rescale text": ({"rescale_factor": "2"}, TypeError, "rescale_factor is a str; it should"),
        "rescale list": ({"rescale_factor": [2.0]}, TypeError, "rescale_factor is a list; it sho"),
        "rescale missing": ({"rescale_factor": None}, (TypeError, ValueError), "rescale_factor is"),
        "rescale nan": ({"rescale_factor": np.nan}, ValueError, "rescale_factor is nan"),
        "more edges": ({"edge_index": ENDS % 4}, ValueError, "edge_index has 7 edges; .* have 5"),
    },
}
BAD_ORDERS = {
    "mmax too large": ({"mmax": 3}, ValueError, "mmax is 3; it should be at most 2, lmax"),
    "mmax negative": ({"mmax": -1}, ValueError, "mmax is -1; it should be at least 0"),
    "mmax a float": ({"mmax": 1.0}, TypeError, "mmax is a float; it should be an int"),
    "mmax text": ({"mmax": "1"}, TypeError, "mmax is a str; it should be an int"),
}


def bad_calls():
    for op, own in BAD.items():
        found = dict(own)
        for name in NAMES[op]:
            array = arguments(op)[name]
            for what, (make, kind, message) in BAD_FEATURES.items():
                # For matrices these values are legal, or mean something else.
                if name[:6] != "wigner":
                    found[f"{name} {what}"] = {name: make(array)}, kind, f"{name} {message}"
            for what, (make, kind, message) in BAD_MATRICES.items():
                if name[:6] == "wigner":
                    found[f"{name} {what}"] = {name: make()}, kind, f"{name} {message}"
        if op != "degree":
            found |= BAD_ORDERS
        if op != "own":
            found["edges of floats"] = (
                {"edge_index": ENDS[:, :5] * 1.0, **({"num_nodes": 4} if op == "back" else {})},
                TypeError,
                "edge_index has dtype float64; it should be int32 or int64",
            )
        yield from ((op, what, *bad) for what, bad in found.items())


BAD_CALLS = list(bad_calls())


@pytest.mark.parametrize(
    ("op", "changes", "kind", "message"),
    [(op, *bad) for op, _, *bad in BAD_CALLS],
    ids=[f"{op}-{name}" for op, name, *_ in BAD_CALLS],
)
def test_bad_input_names_the_argument(op, changes, kind, message):
    given = {**arguments(op), **changes}
    before = copy.deepcopy(given)
    out = np.full(shape_of(op), 7.0)
    with pytest.raises(kind, match=message):
        OPS[op](**given, out=out)
    for function in (OPS[op].vjp, OPS[op].explain):
        with pytest.raises(kind, match=message):
            function(**given)
    assert (out == 7).all()
    for name, value in before.items():
        if not isinstance(value, fusedops.Edges):
            np.testing.assert_array_equal(given[name], value)


@pytest.mark.parametrize("op", OPS)
def test_the_error_names_the_op(op):
    name = OPS[op].__name__
    first = NAMES[op][0]
    with pytest.raises(ValueError, match=rf"^{name}: {first} has shape \(3,\)"):
        OPS[op](**{**arguments(op), first: np.ones(3)})


def bad_tensors():
    edges = tensor(ENDS[:, :5])
    return {
        "edges on meta": ({"edge_index": edges.to("meta")}, ValueError, "edge_index is on meta; i"),
        "edges of floats": ({"edge_index": edges.double()}, TypeError, "edge_index has dtype floa"),
        "edges of bools": ({"edge_index": edges > 0}, TypeError, "edge_index has dtype bool"),
        "edges of pairs": ({"edge_index": edges.T}, ValueError, r"edge_index has shape \(5, 2\)"),
        "edges too many": ({"edge_index": tensor(ENDS) % 4}, ValueError, "edge_index has 7 edges"),
        "an end too large": ({"edge_index": edges + 2}, IndexError, r"edge_index\[0, 2\] is 4; it"),
    }  # fmt: skip


@needs_torch
@pytest.mark.parametrize("name", bad_tensors() if HAS_TORCH else ())
def test_bad_tensors_name_the_argument(name):
    changes, kind, message = bad_tensors()[name]
    given = {
        name: tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments("degree").items()
    }
    out = torch.full(shape_of("degree"), 7.0, dtype=torch.float64)
    with pytest.raises(kind, match=message):
        fusedops.edge_degree_scatter(**{**given, **changes}, out=out)
    assert (out == 7).all()


DTYPES = ["float32", "float64"]


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids="-".join)
@pytest.mark.parametrize("op", ["forth", "back", "own"])
def test_results_have_the_dtype_of_the_features(place, op, dtypes):
    """Matrices of any dtype don't change this, and every gradient has its array's dtype."""
    p = problem(op, 1, packed=True, dtypes=dtypes)
    results = solve(place, p)
    for got, want, dtype in zip(results, dense(p), (dtypes[0], *dtypes), strict=True):
        assert got.dtype == dtype
        close(got, want)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids="-".join)
def test_the_degree_embedding_has_the_dtype_of_the_nodes(quick, dtypes):
    p = problem("degree", 1, dtypes=dtypes)
    for got, want, dtype in zip(solve(quick, p), dense(p), (dtypes[0], *dtypes), strict=True):
        assert got.dtype == dtype
        close(got, want)


@pytest.mark.parametrize("op", OPS)
def test_wide_matrices_are_used_as_they_are(quick, op):
    """With float32 features and float64 matrices, only the final result is rounded."""
    p = problem(op, 2, dtypes=("float32",) * (len(NAMES[op]) - 1) + ("float64",))
    for got, want in zip(solve(quick, p), dense(p), strict=True):
        roundings = np.finfo(got.dtype).eps / 2 * np.abs(want)
        assert (np.abs(got - want) <= 1.001 * roundings + 1e-14).all()


SIXTEEN = ["bfloat16", "float16"]


def rounded(p, dtypes):
    """Return a problem's arrays and cotangent as tensors of dtypes, and the problem rounded so."""
    kinds = [getattr(torch, dtype) for dtype in (*dtypes, dtypes[0])]
    tensors = [tensor(a).to(k) for a, k in zip((*p.arrays, p.cotangent), kinds, strict=True)]
    arrays = [array.double().numpy() for array in tensors]
    return tensors, p._replace(arrays=tuple(arrays[:-1]), cotangent=arrays[-1])


@needs_torch
@pytest.mark.parametrize("wide", ["float32", None])
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", SERVE_TENSORS)
def test_sixteen_bits_are_rounded_once(backend, op, dtype, wide):
    """Sums are of float32 or better for 16-bit features with matrices of 16 bits or float32."""
    dtypes = (dtype,) * (len(NAMES[op]) - 1) + (wide or dtype,)
    p = problem(op, 1 if backend == "triton" else 3, 1, packed=wide is None)
    (*leaves, cotangent), p = rounded(p, dtypes)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = function_of(p, backend)(*leaves)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    results = (out, *gradients)
    for got, want, kind in zip(results, dense(p), (dtypes[0], *dtypes), strict=True):
        assert got.dtype == getattr(torch, kind)
        # Half a unit in the last place, and the error of the float32 sums. Triton's
        # interpreter cuts bfloat16 off where a GPU rounds.
        cut = backend == "triton" and kind == "bfloat16"
        unit = torch.finfo(got.dtype).eps * (1.0 if cut else 0.5)
        allowed = 1.01 * unit * np.abs(want) + 3 * TOLERANCE["float32"] * np.abs(want).max()
        off = np.abs(got.detach().double().numpy() - want)
        assert not (off > allowed).any()


@needs_torch
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("op", ["forth", "back"])
def test_second_derivatives_of_sixteen_bits(torch_backend, op, dtype):
    (*half, cotangent), _ = rounded(problem(op, 2), (dtype, "float32"))
    full = [array.detach().double() for array in half]
    found = []
    for arrays in (half, full):
        leaves = [array.requires_grad_() for array in arrays]
        out = function_of(problem(op, 2), torch_backend)(*leaves)
        first = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), create_graph=True)
        along = [torch.ones_like(gradient) for gradient in first]
        found.append([*first, *torch.autograd.grad(first, leaves, along)])
    for got, want, leaf in zip(found[0], found[1], [*half, *half], strict=True):
        assert got.dtype == leaf.dtype
        narrow = dtype if got.dtype == half[0].dtype else "float32"
        # Gradients of matrices see rounded features, which are exact here.
        close(got.detach().double().numpy(), want.detach().numpy(), narrow, 256)


SUBSETS = list(itertools.product([True, False], repeat=4))[:-1]


def factors_of(message, lmax, mmax):
    """Return factors for messages."""
    edges, _, width = message.shape
    count = function_rows(lmax, mmax)
    return np.random.default_rng(2).normal(size=(edges, count * width))


@pytest.mark.parametrize(("lmax", "mmax"), [(0, 0), (2, 2), (3, 1)])
def test_radial_functions_multiply_the_rows_of_their_degree_and_order(quick, lmax, mmax):
    p = problem("forth", lmax, mmax)
    message = solve(quick, p)[0]
    radial = factors_of(message, lmax, mmax)
    order = m_major_order(lmax, mmax)
    degree = np.sqrt(order).astype(int)
    kinds = list(zip(degree, abs(order - degree * degree - degree), strict=True))
    # Functions come in the order in which m-major rows first have their degree and |m|.
    functions = list(dict.fromkeys(kinds))
    own = radial.reshape(len(radial), len(functions), -1)
    want = message * own[:, [functions.index(kind) for kind in kinds]]
    x, wigner, f = (tensor(a) if quick[0] == "torch" else a for a in (*p.arrays, radial))
    op = fusedops.node_to_edge_wigner_permute
    found = op(x, wigner=wigner, radial=f, **p.options, backend=quick[1])
    close(np.asarray(found), want)


@needs_torch
def test_gradgradcheck_with_radial_functions(torch_backend):
    p = problem("forth", 1)
    radial = factors_of(np.zeros((len(ENDS[0]), 4, 6)), 1, 1)
    leaves = [tensor(array).requires_grad_() for array in (*p.arrays, radial)]

    def rotated(x, wigner, radial):
        op = fusedops.node_to_edge_wigner_permute
        return op(x, wigner=wigner, radial=radial, **p.options, backend=torch_backend)

    assert torch.autograd.gradcheck(rotated, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(rotated, leaves, fast_mode=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", ["forth", "back", "undo", "own"])
def test_some_outputs_are_what_they_are_among_all(place, way, packed):
    """Every subset of outputs is tried, with and without given sums to add to, and factors."""
    interpreted = place[1] == "triton"
    lmax, mmax = (1, 0) if interpreted else (3, 2)
    p = problem(way, lmax, mmax, packed=packed)
    base, x = np.random.default_rng(1).normal(size=(2, p.nodes, (lmax + 1) ** 2, 3))
    message = p.cotangent if way == "forth" else p.arrays[0]
    static = p.options.get("edge_index"), mmax, "back" if way == "own" else way, 0.5

    def call(arrays, wanted):
        with fusedops.use_backend(place[1]):
            return edge_wigner(*arrays, *static, out=[want or None for want in wanted])

    for first in [base] if interpreted else [None, base]:
        arrays = [first, x, message, p.arrays[-1], factors_of(message, lmax, mmax)]
        if way != "forth" or first is not None:
            arrays[-1] = None
        if place[0] == "torch":
            arrays = [a if a is None else tensor(a) for a in arrays]
        together = call(arrays, (True, True, True, True))
        for wanted in SUBSETS:
            some = call(arrays, wanted)
            for want, got, whole in zip(wanted, some, together, strict=True):
                if want and whole is not None:
                    got, whole = np.asarray(got), np.asarray(whole)
                    assert np.isfinite(got).all()
                    (close if interpreted else same)(got, whole)


@pytest.mark.parametrize("way", ["forth", "back", "undo"])
def test_outputs_are_there_where_their_factors_are(place, way):
    """Without features only dx is returned, without messages only dmessage."""
    p = problem(way, 1)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NODES, 4, 3))
    message = p.cotangent if way == "forth" else p.arrays[0]

    def outputs(*arrays):
        if place[0] == "torch":
            arrays = [a if a is None else tensor(a) for a in arrays]
        with fusedops.use_backend(place[1]):
            return edge_wigner(*arrays, None, fusedops.Edges(ENDS, NODES), 1, way, 1.0)

    whole = outputs(None, x, message, p.arrays[-1])
    for arrays, there in (((None, x, None), 1), ((None, None, message), 0)):
        some = outputs(*arrays, p.arrays[-1])
        assert [out is not None for out in some] == [at == there for at in range(4)]
        agree(place, np.asarray(some[there]), np.asarray(whole[there]))


@needs_torch
@pytest.mark.parametrize("op", OPS)
def test_backward_keeps_nothing_but_the_arguments(torch_backend, op):
    p = problem(op, packed=True)
    leaves = leaves_of(p)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function_of(p, torch_backend)(*leaves)
    assert saved
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    assert {t.untyped_storage().data_ptr() for t in saved} <= own
    gradients = torch.autograd.grad(out, leaves, tensor(p.cotangent))
    for got, want in zip(gradients, solve(("torch", torch_backend), p)[1:], strict=True):
        same(got.numpy(), want)


AXES = np.concatenate([np.eye(3), -np.eye(3)])
# Beside the poles of the axis, and beside the equator, where the choice of the rotation jumps.
BESIDE = np.array([[a, s, b] for s in (1, -1) for a in (0, 1e-9, -1e-9) for b in (1e-9, -1e-9)])
EQUATOR = np.array([[1, s, 0.3] for s in (0.0, -0.0, 1e-17, -1e-17, 1e-300, -1e-300, 1e-9, -1e-9)])


def directions(count=20):
    vectors = np.random.default_rng(3).normal(size=(count, 3))
    return np.concatenate([AXES, BESIDE, EQUATOR, vectors])


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def matrices(place, vectors, lmax, **options):
    framework, backend = place
    vectors = tensor(np.asarray(vectors)) if framework == "torch" else vectors
    return np.asarray(wigner_d(vectors, lmax, backend=backend, **options))


# Torch's formula rounds degree after degree in float32: measured 5e-7 at lmax = 6.
MATRIX_ERROR = {"float64": 1e-14, "float32": 1e-6}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lmax", [0, 1, 2, 4, 6])
def test_matrices_turn_harmonics(quick, lmax, dtype):
    """D Y(v) = Y(R v) for the rotation R that turns the edge to +y, which D of degree 1 is."""
    vectors = (directions() * 1.7).astype(dtype)
    D = matrices(quick, vectors, lmax)
    assert (D.dtype, D.shape) == (dtype, (len(vectors), (lmax + 1) ** 2, (lmax + 1) ** 2))
    R = matrices(quick, vectors.astype(np.float64), 1)[:, 1:, 1:]
    u = unit(vectors.astype(np.float64))
    assert error(np.einsum("eij,ej->ei", R, u), np.tile([0.0, 1, 0], (len(u), 1))) < 2e-15
    assert error(np.linalg.det(R), np.ones(len(R))) < 2e-15
    points = unit(np.random.default_rng(5).normal(size=(12, 3)))
    turned = np.einsum("eij,pj->epi", R, points)
    want = harmonics(lmax, turned.reshape(-1, 3)).reshape(len(R), 12, -1)
    got = np.einsum("eij,pj->epi", D.astype(np.float64), harmonics(lmax, points))
    # An element sums 2 lmax + 1 terms.
    assert error(got, want) < 3 * MATRIX_ERROR[dtype]


def test_harmonics_of_degree_one_are_x_y_z():
    """The tests' harmonics follow e3nn's convention."""
    vectors = unit(directions())
    close(harmonics(1, vectors)[:, 1:] * np.sqrt(4 * np.pi / 3), vectors)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lmax", [0, 1, 3, 6])
def test_matrices_are_orthogonal_blocks(quick, lmax, dtype):
    D = matrices(quick, directions().astype(dtype), lmax).astype(np.float64)
    identity = np.broadcast_to(np.eye((lmax + 1) ** 2), D.shape)
    assert error(D @ D.swapaxes(1, 2), identity) < 2 * MATRIX_ERROR[dtype]
    assert (D[:, 0, 0] == 1).all()
    l, _ = orders(lmax)
    assert not D[:, l[:, None] != l].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lmax", [0, 1, 2, 6])
def test_packed_matrices_are_the_blocks(quick, lmax, dtype):
    vectors = directions().astype(dtype)
    whole, packed = (matrices(quick, vectors, lmax, packed=p) for p in (False, True))
    same(packed, pack(whole))
    same(unpack(packed, lmax), whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_length_of_a_vector_does_not_matter(quick, dtype):
    """Any unit gives the same matrices; powers of two, which round nothing, the same bits."""
    vectors = directions()
    vectors = np.where(abs(vectors) < 1e-15, 0.0, vectors).astype(dtype)
    want = matrices(quick, vectors, 3)
    for power in (-40, -1, 3, 40):
        same(matrices(quick, vectors * np.asarray(2.0**power, dtype), 3), want)
    for scale in (1e-10, 3.0, 1e12):
        got = matrices(quick, vectors * np.asarray(scale, dtype), 3)
        assert error(got, want) < 2 * MATRIX_ERROR[dtype]


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("float64", (1e-250, 1e-160, 1e160, 1e250)), ("float32", (1e-30, 1e-21, 1e20, 1e30))],
)
def test_vectors_whose_squares_are_no_numbers(quick, dtype, scales):
    """Vectors whose squares over- or underflow are treated as any others."""
    vectors = directions()[-20:].astype(dtype)
    want = matrices(quick, vectors, 3)
    for scale in scales:
        got = matrices(quick, vectors * np.asarray(scale, dtype), 3)
        assert error(got, want) < 2 * MATRIX_ERROR[dtype]


def test_matrices_of_one_edge_do_not_depend_on_others(quick):
    vectors = directions()
    whole = matrices(quick, vectors, 3)
    for edge in (0, 9, 30):
        close(matrices(quick, vectors[edge : edge + 1], 3)[0], whole[edge])
    vectors[4] = np.nan
    spoilt = matrices(quick, vectors, 3)
    kept = np.arange(len(vectors)) != 4
    close(spoilt[kept], whole[kept])
    l, _ = orders(3)
    assert np.isnan(spoilt[4][(l[:, None] == l) & (l > 0)]).all()
    if quick[0] == "numpy":
        _, pullback = wigner_d.vjp(vectors, 3, backend=quick[1])
        (gradient,) = pullback(np.ones_like(spoilt))
        assert np.isfinite(gradient[kept]).all()
        assert np.isnan(gradient[4]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_vector_of_no_length_counts_as_the_axis(quick, packed):
    vectors = np.zeros((2, 3))
    vectors[1] = [0.0, 3.0, 0.0]
    D = matrices(quick, vectors, 3, packed=packed)
    close(unpack(D, 3) if packed else D, np.broadcast_to(np.eye(16), (2, 16, 16)))
    _, pullback = wigner_d.vjp(vectors, 3, packed=packed)
    cotangent = np.random.default_rng(0).normal(size=D.shape)
    (gradient,) = pullback(cotangent)
    assert not gradient[0].any()
    assert gradient[1].any()
    assert np.isfinite(gradient).all()


@needs_torch
@pytest.mark.parametrize("vector", [[0.0, 0, 0], [0, 2, 0], [0, -2, 0], [1, 0, 1], [1, -0.0, 1]])
def test_derivatives_of_three_orders_are_finite_everywhere(torch_backend, vector):
    """They are finite where the rotation jumps, and zero for a vector without direction."""
    x = torch.tensor([vector], dtype=torch.float64, requires_grad=True)
    weights = torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = (wigner_d(x, 3, backend=torch_backend) * weights).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        assert gradient.isfinite().all()
        assert gradient.any() == any(vector)
        value = (gradient * torch.tensor([0.3, -0.7, 0.9])).sum()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lmax", [0, 1, 2, 5])
def test_the_gradient_of_matrices_is_what_differences_say(lmax, packed):
    # A step from the equator would cross it, so vectors start beside it.
    vectors = np.concatenate([AXES[[1, 4]], BESIDE, 1.3 * directions()[-20:]])
    rng = np.random.default_rng(lmax)
    D, pullback = wigner_d.vjp(vectors, lmax, packed=packed)
    cotangent = rng.normal(size=D.shape)
    (gradient,) = pullback(cotangent)
    assert gradient.shape == vectors.shape
    step = 1e-5
    for axis in np.eye(3):
        high, low = (wigner_d(vectors + s * axis, lmax, packed=packed) for s in (step, -step))
        along = ((high - low) * cotangent).reshape(len(D), -1).sum(1) / (2 * step)
        # Differences err by the squared step times a third derivative, as lmax³, and by roundings.
        assert np.abs(gradient @ axis - along).max() <= 2e-8 * (1 + np.abs(gradient).max())
    across = np.einsum("ei,ei->e", gradient, vectors)
    assert np.abs(across).max() <= 1e-13 * (1 + np.abs(gradient).max())


@needs_torch
@pytest.mark.parametrize("packed", [False, True])
def test_first_and_second_derivatives_of_matrices(packed):
    vectors = np.concatenate([[[0, 1.5, 0], [0, -1.5, 0]], [[0.3, 0.8, -0.5], [1.0, -0.4, 0.2]]])
    x = tensor(vectors).requires_grad_()
    for lmax, fast in ((1, False), (3, True)):

        def function(x, lmax=lmax):
            return wigner_d(x, lmax, packed=packed)

        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,), fast_mode=fast)


@needs_torch
def test_gradients_of_matrices_in_numpy_and_torch():
    vectors = directions()
    for dtype in ("float32", "float64"):
        D, pullback = wigner_d.vjp(vectors.astype(dtype), 4)
        cotangent = np.random.default_rng(0).normal(size=D.shape).astype(dtype)
        (want,) = pullback(cotangent)
        x = tensor(vectors.astype(dtype)).requires_grad_()
        wigner_d(x, 4).backward(tensor(cotangent))
        assert want.dtype == x.grad.numpy().dtype == dtype
        assert error(x.grad.numpy(), want) < 10 * MATRIX_ERROR[dtype]


@needs_torch
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_matrices_of_sixteen_bits_are_float32_rounded_once(dtype):
    half = tensor(directions()[-20:]).to(getattr(torch, dtype)).requires_grad_()
    full = half.detach().float().requires_grad_()
    got, want = wigner_d(half, 3), wigner_d(full, 3)
    assert got.dtype == half.dtype
    assert torch.equal(got, want.to(half.dtype))
    got.sum().backward()
    want.sum().backward()
    assert torch.equal(half.grad, full.grad.to(half.dtype))


def of_matrices(lmax, packed, dtype="float64", vectors=None):
    """Return the primitives of matrices with random arguments, by name."""
    rng = np.random.default_rng(lmax)
    vectors = 1.3 * directions() if vectors is None else vectors
    shape = len(vectors), *matrix_size(lmax, packed)
    arrays = vectors, rng.normal(size=shape), rng.normal(size=vectors.shape)
    arrays = [array.astype(dtype) for array in arrays]
    static = lmax, "packed" if packed else "dense"
    kinds = matrices_primitive, matrices_vjp, matrices_vjp_vjp
    return [(p, p.Arguments(*arrays[: k + 1], *static)) for k, p in enumerate(kinds)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lmax", [0, 1, 2, 3, 6, 8, 20])
def test_kernels_of_matrices_round_once(exact, lmax, packed):
    """Value and both derivatives of any degree are exact enough to show a step in float32."""
    for dtype, allowed in (("float32", 1.2e-7), ("float64", 1e-14 * (1 + lmax))):
        for primitive, a in of_matrices(lmax, packed, dtype):
            want = primitive.formula(a._replace(**{n: wide(getattr(a, n)) for n in a._fields[:-2]}))
            with registry.asking(exact):
                got = primitive(*a)
            for one, other in zip(got, want, strict=True):
                assert error(one, other) < allowed


@needs_triton
@pytest.mark.parametrize("lmax", [2, 3, 16])
def test_kernels_of_matrices_when_interpreted(lmax):
    """Kernels take an edge a thread or pairs of orders; plain torch serves higher degrees."""
    vectors = np.concatenate([AXES, BESIDE[:2], EQUATOR[:5], np.zeros((1, 3))])
    for primitive, a in of_matrices(lmax, lmax == 16, vectors=vectors):
        tensors = [tensor(x) if isinstance(x, np.ndarray) else x for x in a]
        with registry.asking("triton"):
            got = primitive(*tensors)
        for one, other in zip(got, primitive.formula(a), strict=True):
            assert error(one.numpy(), other) < 1e-13


@needs_torch
@pytest.mark.parametrize("order", [3, 4])
def test_higher_derivatives_of_matrices(torch_backend, order):
    """No kernel has a third derivative: torch differentiates the formula, and it is right."""
    x = tensor(unit(directions()[-3:]) * 1.2).requires_grad_()
    rng = np.random.default_rng(order)
    weights, steps = tensor(rng.normal(size=(3, 35))), tensor(rng.normal(size=(order, 3, 3)))

    def derivative(x):
        value = (wigner_d(x, 2, packed=True, backend=torch_backend) * weights).sum()
        for step in steps[1:]:
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = (gradient * step).sum()
        return value

    assert torch.autograd.gradcheck(derivative, (x,))


GUARDED_MATRICES = """
import numpy as np
from fusedops.harmonics.op import matrices, matrices_vjp, matrices_vjp_vjp, matrix_size
from guarded import fill, guarded


for at_the_end in (True, False):
    for lmax, layout, count, dtype in SIZES:
        rng = np.random.default_rng(0)
        shapes = [(count, 3), (count, *matrix_size(lmax, layout == "packed")), (count, 3)]
        arrays = [guarded(rng.normal(size=s).astype(dtype), at_the_end) for s in shapes]
        for number, primitive in enumerate((matrices, matrices_vjp, matrices_vjp_vjp), 1):
            a = primitive.Arguments(*arrays[:number], lmax, layout)
            outputs = [
                guarded(np.full(d[0], np.nan, dtype), at_the_end) for d in primitive.describe(a)
            ]
            fill(primitive, a, outputs)
            for got, want in zip(outputs, primitive.formula(a)):
                np.testing.assert_allclose(got, want, atol=1e-11 if dtype == "f8" else 1e-4)
"""
# Numbers of edges below a tile, equal to one, and above.
MATRIX_SIZES = {
    True: [(1, "dense", 33, "f4"), (2, "packed", 5, "f8"), (3, "dense", 5, "f4")],
    False: [
        (lmax, layout, count, dtype)
        for lmax in (0, 1, 2, 5)
        for count in (1, 16, 70)
        for layout, dtype in (("dense", "f8"), ("packed", "f4"))
    ],
}


@needs_linux
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_kernels_of_matrices_read_nothing_beyond_their_arrays(place):
    guarded.run(place, GUARDED_MATRICES, SIZES=MATRIX_SIZES[place[1] == "triton"])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lmax", [0, 2])
def test_matrices_of_no_edges(quick, lmax, packed):
    shape = (0, 35 if lmax else 1) if packed else (0, (lmax + 1) ** 2, (lmax + 1) ** 2)
    assert matrices(quick, np.zeros((0, 3)), lmax, packed=packed).shape == shape
    _, pullback = wigner_d.vjp(np.zeros((0, 3)), lmax, packed=packed)
    assert pullback(np.zeros(shape))[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"edge_vec": np.ones((2, 3), int)}, TypeError, "edge_vec has dtype int64; it should be"),
        ({"edge_vec": np.ones((2, 3), "f2")}, TypeError, "edge_vec has dtype float16"),
        ({"edge_vec": None}, TypeError, "edge_vec is None; it should be an array"),
        ({"edge_vec": np.ones((2, 2))}, ValueError, r"edge_vec has shape \(2, 2\); .* \(E, 3\)"),
        ({"edge_vec": np.ones(3)}, ValueError, r"edge_vec has shape \(3,\)"),
        ({"edge_vec": np.ones((1, 2, 3))}, ValueError, r"edge_vec has shape \(1, 2, 3\)"),
        ({"lmax": -1}, ValueError, "lmax is -1; it should be at least 0"),
        ({"lmax": 2.0}, TypeError, "lmax is a float; it should be an int"),
        ({"lmax": None}, TypeError, "lmax is a NoneType; it should be an int"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it should be one of"),
    ],
)
def test_bad_input_of_matrices_names_the_argument(changes, kind, message):
    given = {"edge_vec": np.ones((2, 3)), "lmax": 2, **changes}
    before = copy.deepcopy(given["edge_vec"])
    for function in (wigner_d, wigner_d.vjp, wigner_d.explain):
        with pytest.raises(kind, match=message):
            function(**given)
    np.testing.assert_array_equal(given["edge_vec"], before)


@needs_torch
@pytest.mark.parametrize("mmax", [0, 1, 2])
def test_an_energy_is_invariant_and_its_forces_turn(torch_backend, mmax):
    """Positions and features turn together."""
    (positions, features, weights), ends = atoms(seed=mmax)
    turn = rotation(7)
    D = tensor(matrix_of(turn, 2))
    turned = (positions.detach() @ tensor(turn).T).requires_grad_()
    energies, forces = [], []
    for x, values in ((positions, features), (turned, D @ features)):
        energies.append(energy_of(x, values, weights, ends, mmax, torch_backend))
        forces.append(torch.autograd.grad(energies[-1], x)[0])
    torch.testing.assert_close(energies[1], energies[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(forces[1], forces[0] @ tensor(turn).T, rtol=1e-11, atol=1e-11)


@needs_torch
@pytest.mark.parametrize("height", [0.0, -0.0, 1e-7, -1e-7, 1e-12])
def test_forces_do_not_see_where_the_rotation_jumps(torch_backend, height):
    """A layer that commutes with turns sees no jump in a step across the equator."""
    (positions, features, weights), ends = atoms()
    start = positions.detach().clone()
    start[1, 1] = start[0, 1] + height
    start[2, 1] = start[1, 1] - height
    positions = start.clone().requires_grad_()
    energy = energy_of(positions, features, weights, ends, 2, torch_backend)
    (forces,) = torch.autograd.grad(energy, positions)
    step = 1e-5
    with torch.no_grad():
        for index in itertools.product(range(3), range(3)):
            moved = []
            for sign in (1, -1):
                other = start.clone()
                other[index] += sign * step
                moved.append(energy_of(other, features, weights, ends, 2, torch_backend))
            along = (moved[0] - moved[1]) / (2 * step)
            # Differences err by the squared step, and by roundings of an energy of about 10.
            assert abs(along - forces[index]) <= 1e-8 * (1 + forces.abs().max())
    # The matrices do jump there, so a jump that mattered would fail the test.
    both = wigner_d(torch.tensor([[1.0, 1e-9, 0.3], [1.0, -1e-9, 0.3]]), 2)
    assert (both[0] - both[1]).abs().max() > 0.5


LINE = fusedops.Edges([[0], [1]], 2)
FEATURES, MESSAGE, MATRIX = np.ones((2, 4, 1)), np.ones((1, 4, 1)), np.ones((1, 4, 4))


@needs_torch
def test_a_raw_edge_index_under_torch_func():
    x, wigner, index = torch.rand(2, 4, 1), torch.ones(1, 4, 4), torch.tensor([[0], [1]])

    def total(x, index):
        return fusedops.node_to_edge_wigner_permute(x, index, wigner).sum()

    want = torch.func.grad(total)(x, fusedops.Edges(index, 2))
    assert torch.equal(torch.func.grad(lambda x: total(x, index))(x), want)
    with pytest.raises(
        TypeError, match=r"edge_index is mapped over or differentiated by torch\.func"
    ):
        torch.vmap(total, (None, 0))(x, index[None])


@needs_torch
def test_a_raw_edge_index_is_recorded_as_it_is():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, wigner, index = torch.rand(2, 4, 1), torch.ones(1, 4, 4), torch.tensor([[0], [1]])

    def function(x, index):
        return fusedops.node_to_edge_wigner_permute(x, index, wigner)

    recorded = make_fx(function)(x, index)
    for other in (index, index.flip(0), index * 0):
        assert torch.equal(recorded(x, other), function(x, other))


def turns(kind, count=6):
    """Return random rotations of a kind, and their matrices by products of turns about axes."""
    rng = np.random.default_rng(count)
    if kind == "quaternions":
        q = rng.normal(size=(count, 4))
        unit = q / np.linalg.norm(q, axis=1)[:, None]
        angle, axis = (
            2 * np.arccos(unit[:, 0]),
            unit[:, 1:] / np.linalg.norm(unit[:, 1:], axis=1)[:, None],
        )
        cross = np.stack([np.cross(axis, e) for e in np.eye(3)], -1)
        s, c = np.sin(angle)[:, None, None], np.cos(angle)[:, None, None]
        return q, np.eye(3) + s * cross + (1 - c) * cross @ cross
    angles = rng.uniform(-7, 7, size=(count, 3))
    c, s, zero, one = np.cos(angles).T, np.sin(angles).T, np.zeros(count), np.ones(count)

    def about_y(k):
        return np.array([[c[k], zero, s[k]], [zero, one, zero], [-s[k], zero, c[k]]]).transpose(
            2, 0, 1
        )

    about_x = np.array([[one, zero, zero], [zero, c[1], -s[1]], [zero, s[1], c[1]]]).transpose(
        2, 0, 1
    )
    R = about_y(0) @ about_x @ about_y(2)
    return (angles if kind == "angles" else R), R


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("lmax", [0, 2, 5])
@pytest.mark.parametrize("kind", ["matrices", "quaternions", "angles"])
def test_matrices_of_given_rotations(kind, lmax, packed):
    given, R = turns(kind, 3)
    found = wigner_d_of(given, lmax, packed=packed)
    want = np.stack([matrix_of(turn, lmax) for turn in R])
    degree = np.sqrt(np.arange((lmax + 1) ** 2)).astype(int)
    blocks = degree[:, None] == degree
    np.testing.assert_allclose(found, want[:, blocks] if packed else want * blocks, atol=1e-12)


@needs_torch
@pytest.mark.parametrize("kind", ["quaternions", "angles"])
def test_derivatives_by_given_rotations(kind):
    given = tensor(turns(kind, 3)[0]).requires_grad_()
    assert torch.autograd.gradcheck(lambda g: wigner_d_of(g, 2), given)
    assert torch.autograd.gradgradcheck(lambda g: wigner_d_of(g, 2, packed=True), given)


@needs_torch
def test_matrices_of_given_rotations_are_those_of_e3nn():
    o3 = pytest.importorskip("e3nn.o3")
    for kind, theirs in (
        ("angles", lambda l, g: o3.wigner_D(l, *g.T)),
        ("quaternions", lambda l, g: o3.Irrep(l, 1).D_from_quaternion(g)),
    ):
        given = tensor(turns(kind)[0])
        found = wigner_d_of(given, 4)
        # e3nn's quaternions are units.
        given = given if kind == "angles" else torch.nn.functional.normalize(given)
        for l in range(5):
            own = slice(l * l, (l + 1) ** 2)
            torch.testing.assert_close(found[:, own, own], theirs(l, given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1e-30, 1e30])
def test_quaternions_of_any_length(length):
    q = turns("quaternions")[0]
    given = (q * length).astype(np.float32)
    np.testing.assert_allclose(wigner_d_of(given, 3), wigner_d_of(q, 3), atol=1e-5)
    if torch is not None:
        np.testing.assert_allclose(
            wigner_d_of(torch.from_numpy(given), 3), wigner_d_of(q, 3), atol=1e-5
        )


@pytest.mark.filterwarnings("error")
def test_a_quaternion_of_length_zero_is_no_turn():
    q = np.stack([np.zeros(4), [1.0, 2, 3, 4]])
    np.testing.assert_array_equal(wigner_d_of(q, 3)[0], np.eye(16))
    if torch is not None:
        leaf = tensor(q).requires_grad_()
        D = wigner_d_of(leaf, 3)
        (dq,) = torch.autograd.grad((D * torch.arange(256.0).view(16, 16)).sum(), leaf)
        assert torch.equal(D[0], torch.eye(16, dtype=D.dtype))
        assert not dq[0].any()
        assert dq[1].any()


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["matrices", "quaternions", "angles"])
def test_sixteen_bits_of_a_rotation_are_rounded_once(kind, dtype):
    given = tensor(turns(kind)[0]).to(getattr(torch, dtype))
    found = wigner_d_of(given, 6)
    assert found.dtype == given.dtype
    rounding = torch.finfo(given.dtype).eps
    want = wigner_d_of(given.double(), 6)
    torch.testing.assert_close(found.double(), want, rtol=rounding, atol=1e-5)


BAD_ROTATIONS = {
    "shape": (np.ones((2, 5)), {}, ValueError, r"rotation has shape \(2, 5\); it should be \(E, 3"),
    "integers": (np.ones((2, 3), int), {}, TypeError, "rotation has dtype int64; it should be"),
    "degree": (np.ones((2, 3)), {"lmax": -1}, ValueError, "lmax is -1"),
    "flag": (np.ones((2, 3)), {"packed": 1}, TypeError, "packed is a int"),
    "backend": (np.ones((2, 3)), {"backend": "nope"}, ValueError, "backend is 'nope'"),
}


@pytest.mark.parametrize("name", BAD_ROTATIONS)
def test_bad_rotations_name_the_argument(name):
    given, options, kind, message = BAD_ROTATIONS[name]
    with pytest.raises(kind, match=f"wigner_d_of: .*{message}"):
        wigner_d_of(given, **{"lmax": 1, **options})


@pytest.mark.parametrize("factor", [1e-39, 10**400, -1e-320])
def test_a_factor_whose_inverse_is_no_number_in_float32(factor):
    x, radial = np.ones((2, 4, 1), np.float32), np.ones((1, 2, 1), np.float32)
    wigner = np.ones((1, 4, 4), np.float32)
    with pytest.raises(ValueError, match=r"rescale_factor is .*; it should be (a )?finite"):
        fusedops.edge_degree_scatter(x, radial, LINE, wigner, rescale_factor=factor)


@pytest.mark.parametrize("value", ["no", np.ones(2), 1, None])
def test_flags_are_true_or_false(value):
    message, wigner = np.ones((1, 4, 1)), np.ones((1, 4, 4))
    with pytest.raises(TypeError, match=r"transpose is a .*; it should be True or False"):
        fusedops.permute_wigner_inv(message, wigner, transpose=value)
    with pytest.raises(TypeError, match=r"packed is a .*; it should be True or False"):
        wigner_d(np.ones((1, 3)), 1, packed=value)


@pytest.mark.parametrize("place", FILLING, ids="-".join)
@pytest.mark.parametrize("way", ["forth", "back", "undo"])
@pytest.mark.parametrize("lie", ["nodes", "edges", "of outputs too"])
def test_edges_that_lie_lead_nowhere(place, way, lie):
    """Edges may claim more nodes or edges than the arrays have: nothing outside is touched."""
    framework, backend = place
    nodes, count, rows, channels = 4, 4 if lie == "edges" else 7, 4, 3
    rng = np.random.default_rng(0)
    bound = nodes if lie == "edges" else 9
    edges = fusedops.Edges(rng.integers(0, bound, (2, 7)), bound)
    assert lie == "edges" or (edges.source.max() >= nodes and edges.target.max() >= nodes)
    shapes = {
        "base": (nodes, rows, channels),
        "x": (nodes, rows, channels),
        "message": (count, rows, channels * (2 if way == "forth" else 1)),
        "wigner": (count, rows, rows),
    }

    def around(shape, fill):
        """Return memory and an array in its middle, with room for every wrong index."""
        guard = np.full((7, *shape), fill)
        return guard, guard[3]

    arrays, outputs, guards = [], [], []
    for name in shapes:
        _, array = around(shapes[name], np.nan)
        array[...] = rng.normal(size=shapes[name])
        arrays.append(array)
    if lie == "of outputs too":
        # A call makes an output for every node that the edges name.
        arrays[0], shapes["x"] = np.zeros((bound, rows, channels)), (bound, rows, channels)
    for name in list(shapes)[1:]:
        guard, array = around(shapes[name], 5.0)
        outputs.append(array)
        guards.append(guard)
    request = registry.Request("edge_wigner", framework, "cpu", np.dtype(np.float64), backend)
    kernel = registry.choose(request)[1]
    if framework == "torch":
        arrays, outputs = ([torch.from_numpy(a) for a in group] for group in (arrays, outputs))
    a = edge_wigner.Arguments(*arrays, None, edges, 1, way, 1.0)
    kernel(a, edge_wigner.Outputs(*outputs, None))
    for name, guard in zip(edge_wigner.outputs, guards, strict=False):
        touched = (guard != 5).any((1, 2, 3))
        assert not touched[[0, 1, 2, 4, 5, 6]].any(), f"{name} is written outside"
        assert np.isfinite(guard[3]).all(), f"{name} is of what was read outside"


GUARDED = """
import numpy as np
from fusedops import Edges
from fusedops.harmonics.op import matrix_size
from fusedops.wigner import m_major_order
from fusedops.wigner.op import edge_wigner
from fusedops.wigner.rows import function_rows
from guarded import FRAMEWORK, fill, guarded


def check(lmax, mmax, way, channels, packed, own, dtype, absent, at_the_end):
    rng = np.random.default_rng(0)
    ends = np.array([[0, 1, 2, 2, 0], [1, 0, 2, 1, 2]])
    count, rows, halves = 5, (lmax + 1) ** 2, 2 if way == "forth" else 1
    nodes = count if own else 4
    edges = None if own else Edges(ends, nodes)
    lists = [] if own else [guarded(getattr(edges, f), at_the_end) for f in edges._fields]
    if FRAMEWORK == "torch" and not own:
        import torch
        edges = Edges.from_tensors([torch.from_numpy(a) for a in lists], edges.sizes())
    elif not own:
        vars(edges).update(zip(edges._fields, lists))
    shapes = [(nodes, rows, channels)] * 2
    shapes += [(count, len(m_major_order(lmax, mmax)), halves * channels)]
    shapes += [(count, *matrix_size(lmax, packed))]
    shapes += [(count, function_rows(lmax, mmax) * halves * channels)]
    absent = absent if way == "forth" else (*absent, 4)
    arrays = [
        None if at in absent else guarded(rng.normal(size=s).astype(dtype), at_the_end)
        for at, s in enumerate(shapes)
    ]
    a = edge_wigner.Arguments(*arrays, edges, mmax, way, 0.5)
    outputs = [
        None if d is None else guarded(np.full(d[0], np.nan, dtype), at_the_end)
        for d in edge_wigner.describe(a)
    ]
    want = edge_wigner.formula(a._replace(edges=None if own else Edges(ends, nodes)))
    fill(edge_wigner, a, outputs)
    for a, b in zip(outputs, want):
        if a is not None:
            np.testing.assert_allclose(a, b, atol=1e-12 if dtype == "f8" else 1e-5)


for at_the_end in (True, False):
    for way in ("forth", "back", "undo"):
        for lmax, mmax, channels, packed, dtype in SIZES:
            check(lmax, mmax, way, channels, packed, False, dtype, (), at_the_end)
        check(1, 1, way, 3, True, False, "f4", (0, 1), at_the_end)
        check(1, 0, way, 3, False, False, "f8", (0, 2), at_the_end)
    check(2, 1, "back", 5, True, True, "f4", (0,), at_the_end)
"""
# Channels fewer than a vector register's, as many, and more.
SIZES = {
    True: [(0, 0, 1, True, "f8"), (1, 0, 3, True, "f4")],
    False: [
        (lmax, mmax, channels, packed, dtype)
        for lmax, mmax in ((0, 0), (1, 1), (2, 1), (3, 2))
        for channels in (1, 3, 8, 17)
        for packed, dtype in ((False, "f8"), (True, "f4"))
    ],
}


@needs_linux
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_kernels_read_nothing_beyond_their_arrays(place):
    guarded.run(place, GUARDED, SIZES=SIZES[place[1] == "triton"])


def test_a_step_writes_no_gradient_that_it_lacks_factors_for(monkeypatch):
    """Above lmax 2 a rotation and its radial functions are two steps on a GPU."""
    available("torch", "triton")
    from gpukern.wigner import triton as kernels

    rotate, calls = kernels.edge_wigner, []
    monkeypatch.setattr(
        kernels, "edge_wigner", lambda a, y: (calls.append((a.factors, y.dfactors)), rotate(a, y))
    )
    import torch

    edges = fusedops.Edges([[0, 1], [1, 1]], num_nodes=3)
    x, wigner = torch.randn(3, 16, 1), torch.randn(2, 84)
    radial = torch.randn(2, function_rows(3, 3) * 2, requires_grad=True)

    def gradient(backend):
        out = fusedops.node_to_edge_wigner_permute(x, edges, wigner, radial=radial, backend=backend)
        return torch.autograd.grad(out.square().sum(), radial)[0]

    torch.testing.assert_close(gradient("triton"), gradient("torch"), rtol=1e-4, atol=1e-4)
    assert calls
    assert all(factors is not None or dfactors is None for factors, dfactors in calls)
