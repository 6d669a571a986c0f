"""The edge Wigner operations, their edges and matrices, on the reference and the kernels."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

import fusedops
import guarded
from contract import EXAMPLES, compare, function_of, leaves_of, same, solve, tensor
from fusedops._frame import registry
from fusedops._frame.arrays import wide
from fusedops.harmonics.op import matrices as matrices_primitive
from fusedops.harmonics.op import matrices_vjp, matrices_vjp_vjp, matrix_size
from fusedops.testing import TOLERANCE, error
from fusedops.wigner import m_major_order, wigner_d, wigner_d_of
from fusedops.wigner.examples import rotation
from fusedops.wigner.op import edge_wigner
from fusedops.wigner.plan import _Check, grouped_ends
from fusedops.wigner.rows import degree_of, function_rows
from places import (
    EXACT,
    FILLING,
    HAS_TORCH,
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
BY_NAME = {example.name: example for example in EXAMPLES}

# A self-loop, a repeated edge and its reverse, a node (4) without an edge,
# and nodes that are only targets (3) or only sources (5).
ENDS = np.array([[0, 1, 2, 1, 2, 0, 5], [1, 0, 2, 0, 1, 3, 1]])
NODES = 6


def harmonics(v: np.ndarray, lmax: int) -> np.ndarray:
    """Return real spherical harmonics (E, (lmax + 1)²) of unit vectors, with y as polar axis."""
    x, y, z = v.T
    azimuth, sine = np.arctan2(x, z), np.hypot(x, z)
    P = {(0, 0): np.ones_like(y)}
    for m in range(lmax + 1):
        if m:
            P[m, m] = (2 * m - 1) * sine * P[m - 1, m - 1]
        for l in range(m + 1, lmax + 1):
            before = P[l - 2, m] if l - 2 >= m else 0.0
            P[l, m] = ((2 * l - 1) * y * P[l - 1, m] - (l + m - 1) * before) / (l - m)
    columns = []
    for l in range(lmax + 1):
        for m in range(-l, l + 1):
            a = abs(m)
            norm = math.sqrt((2 * l + 1) * math.factorial(l - a) / math.factorial(l + a))
            turn = np.sin(a * azimuth) if m < 0 else np.cos(a * azimuth)
            columns.append(norm * P[l, a] * turn * (math.sqrt(2) if m else 1.0))
    return np.stack(columns, 1)


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
    l, _ = orders(round(dense.shape[-1] ** 0.5) - 1)
    return dense[:, l[:, None] == l]


def unpack(packed, lmax):
    dense = np.zeros((len(packed), (lmax + 1) ** 2, (lmax + 1) ** 2), packed.dtype)
    l, _ = orders(lmax)
    dense[:, l[:, None] == l] = packed
    return dense


def problem(op="forth", lmax=2, *, packed=False, edges=7, channels=3):
    """Return a problem with NaN wherever a matrix isn't read; packed ones have mmax = lmax - 1."""
    way = "back" if op == "undo" else op
    make = functools.partial(rotation, way=way, packed=packed, transpose=op == "undo")
    example = dataclasses.replace(BY_NAME[op], make=make)
    p = example.of((NODES, edges, lmax, channels))
    unread = ~is_read(op, lmax, p.arguments.get("mmax", 0))
    matrices = p.arguments[p.leaves[-1]].copy()
    matrices[:, pack(unread[None])[0] if packed else unread] = np.nan
    return p.but(**{p.leaves[-1]: matrices})


#: The reference.
FORMULA = "numpy", "numpy"


def close(got, want):
    assert error(got, want) <= TOLERANCE[str(got.dtype)]


@pytest.mark.parametrize("lmax", range(9))
def test_orders_are_sorted_by_order_then_sign_then_degree(lmax):
    l, m = orders(lmax)
    by_order = np.lexsort((l, m < 0, abs(m)))
    for mmax in range(lmax + 1):
        m_major_order(lmax, mmax)[:] = 0
        order = m_major_order(lmax, mmax)
        assert order.dtype == np.int64
        same(order, by_order[abs(m)[by_order] <= mmax])
    same(m_major_order(lmax), m_major_order(np.int32(lmax), np.int64(lmax)))


def m_major(matrices, mmax):
    """Return dense matrices with nothing outside of their blocks, and the rows of messages."""
    lmax = degree_of(matrices)
    l, m = orders(lmax)
    order = np.lexsort((l, m < 0, abs(m)))
    dense = unpack(matrices if matrices.ndim == 2 else pack(matrices), lmax)
    return dense, order[abs(m)[order] <= mmax]


def ends_of(edges):
    return np.stack([edges.source, edges.target]) if isinstance(edges, fusedops.Edges) else edges


def function_of_rows(lmax, mmax):
    """Return each message row's function: one for l and |m|, in the order of their first rows."""
    l, m = orders(lmax)[:, m_major_order(lmax, mmax)]
    kinds = list(zip(l, abs(m), strict=True))
    functions = list(dict.fromkeys(kinds))
    return [functions.index(kind) for kind in kinds]


def forth(x, edge_index, wigner, mmax, radial=None):
    W, order = m_major(wigner, mmax)
    ends = [np.einsum("erj,ejc->erc", W[:, order], x[end]) for end in ends_of(edge_index)]
    out = np.concatenate(ends, axis=2)
    if radial is None:
        return out
    own = function_of_rows(degree_of(wigner), mmax)
    return out * radial.reshape(len(out), max(own) + 1, -1)[:, own]


def back(message, wigner_inv, mmax, edge_index=None, num_nodes=None, transpose=False):
    V, order = m_major(wigner_inv, mmax)
    V = V.swapaxes(1, 2) if transpose else V
    rotated = np.einsum("ejr,erc->ejc", V[:, :, order], message)
    if edge_index is None:
        return rotated
    out = np.zeros((num_nodes or edge_index.num_nodes, *rotated.shape[1:]))
    np.add.at(out, ends_of(edge_index)[1], rotated)
    return out


def degree(x, radial, edge_index, wigner_inv, rescale_factor, transpose=False):
    return x + back(radial, wigner_inv, 0, edge_index, transpose=transpose) / rescale_factor


@pytest.mark.parametrize("op", OPS)
def test_the_formula(op):
    oracle = {"forth": forth, "degree": degree}.get(op, back)
    sizes = (NODES, 7, 4, 3), (NODES, 7, 1, 2)
    compare(OPS[op], oracle, sizes, **({} if op == "forth" else {"transpose": (False, True)}))


# Rows of high degrees are taken some at a time, the last fewer, before elements that are NaN.
@pytest.mark.parametrize("lmax", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_no_result_depends_on_an_element_that_is_not_read(place, op, lmax, packed):
    """Zeros are exact: gradients of such elements, and of nodes without edges."""
    p = problem(op, lmax, packed=packed)
    results = solve(place, p)
    read = p.mapped(np.nan_to_num)
    for got, want in zip(results, solve(FORMULA, read), strict=True):
        close(got, want)
        assert not got[want == 0].any()
    if op == "degree":
        # The last node has no edge.
        same(results[0][-1], p.arguments["x"][-1])
        same(results[1], p.cotangents[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_bad_number_reaches_nothing_but_what_depends_on_it(quick, op, packed):
    """Results are linear in a number of features or of a matrix, and NaN goes where a one does."""
    p = problem(op, 3, packed=packed, channels=9)
    rng = np.random.default_rng(0)
    for name in p.leaves:
        index = tuple(rng.choice(np.argwhere(np.isfinite(p.arguments[name][1]))))
        found = []
        for place, number in ((FORMULA, 1.0), (quick, np.nan)):
            other = p.arguments[name].copy()
            other[1][index] += number
            pairs = zip(solve(place, p), solve(place, p.but(**{name: other})), strict=True)
            found.append(pairs)
        for (a, b), (before, after) in zip(*found, strict=True):
            reached = abs(b - a) > 1e-9
            assert np.isnan(after[reached]).all()
            (same if quick[1] in EXACT else close)(after[~reached], before[~reached])


@needs_torch
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float64"),
        ("float64", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("op", OPS)
def test_wide_matrices_are_used_as_they_are(any_torch_backend, op, dtypes):
    """Results and gradients have the dtypes of their arrays, to which they are rounded once."""
    lmax = 1 if any_torch_backend == "triton" else 3
    p = problem(op, lmax, packed=dtypes[0] != "float32")
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    *features, wigner = (tensor(p.arguments[name]) for name in p.leaves)
    leaves = [*(a.to(kinds[0]) for a in features), wigner.to(kinds[1])]
    leaves = dict(zip(p.leaves, (a.requires_grad_() for a in leaves), strict=True))
    cotangent = tensor(p.cotangents[0]).to(kinds[0])
    out = OPS[op](**p.arguments | leaves, backend=any_torch_backend)
    gradients = torch.autograd.grad(out, [*leaves.values()], cotangent)
    exact = {name: leaf.detach().double().numpy() for name, leaf in leaves.items()}
    q = dataclasses.replace(p.but(**exact), cotangents=(cotangent.double().numpy(),))
    # The sums' own error: in float64 where any array is.
    own = 1e-14 if "float64" in dtypes else 3 * TOLERANCE["float32"]
    pairs = zip((out, *gradients), solve(FORMULA, q), (cotangent, *leaves.values()), strict=True)
    for got, want, like in pairs:
        assert got.dtype == like.dtype
        # Triton's interpreter cuts bfloat16 off where a GPU rounds.
        cut = any_torch_backend == "triton" and got.dtype == torch.bfloat16
        unit = torch.finfo(got.dtype).eps * (1.0 if cut else 0.5)
        off = np.abs(got.detach().double().numpy() - want)
        assert (off <= 1.01 * unit * np.abs(want) + own * np.abs(want).max()).all()


@needs_torch
@pytest.mark.parametrize("op", OPS)
def test_backward_keeps_nothing_but_the_arguments(torch_backend, op):
    p = problem(op, packed=True)
    leaves = leaves_of(p)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function_of(p, torch_backend)(*leaves)
    assert saved
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    assert {t.untyped_storage().data_ptr() for t in saved} <= own


# Edges.


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize(
    ("nodes", "count"),
    [(0, 0), (3, 0), (1, 5), (255, 300), (65536, 99), (65537, 99), (200_000, 3000)],
)
def test_edges_are_sorted_by_both_ends_and_stay_in_order(nodes, count, kind):
    rng = np.random.default_rng(nodes)
    ends = rng.integers(0, nodes, (2, count)).astype(kind) if count else np.zeros((2, 0), kind)
    if count > 20:
        # The ends share low digits, include the largest node, and repeat.
        ends[:, :4] = nodes - 1
        ends[:, 4:8] = (nodes - 1) & 0xFFFF
        ends[:, 8:16] = ends[:, 16:24] % 2
    edges = fusedops.Edges(ends, np.int32(nodes))
    assert (edges.num_nodes, edges.num_edges, edges.device) == (nodes, count, "cpu")
    same(edges.source, ends[0].astype(np.int64))
    same(edges.target, ends[1].astype(np.int64))
    for nodes_of, order, ptr in (
        (ends[0], edges.by_source, edges.source_ptr),
        (ends[1], edges.by_target, edges.target_ptr),
    ):
        want = np.argsort(nodes_of, kind="stable")
        same(order, want)
        same(ptr, np.searchsorted(nodes_of[want], np.arange(nodes + 1)))


KINDS = {
    "a list": lambda: ENDS.tolist(),
    "a tuple": lambda: tuple(map(tuple, ENDS.tolist())),
    "contiguous": lambda: ENDS.copy(),
    "Fortran int32": lambda: np.asfortranarray(ENDS.astype(np.int32)),
    "tensor": lambda: tensor(ENDS.copy()),
    "tensor of int32": lambda: tensor(ENDS).int(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_a_copy_of_any_kind_of_edge_index(kind):
    if "tensor" in kind and not HAS_TORCH:
        pytest.skip("torch is not installed")
    given, want = KINDS[kind](), fusedops.Edges(ENDS, NODES)
    edges = fusedops.Edges(given, NODES)
    if hasattr(given, "dtype"):
        same(np.asarray(given), ENDS.astype(np.asarray(given).dtype))
        given[:] = 0
    for field in edges._fields:
        same(getattr(edges, field), getattr(want, field))
    if HAS_TORCH:
        for one, other in zip(edges.tensors_here(), want.tensors_here(), strict=True):
            assert torch.equal(one, other)


@needs_torch
def test_a_tensor_of_edges_is_read_anew():
    p = problem("back")
    arrays = *(p.arguments[name].copy() for name in p.leaves), ENDS.copy()
    message, wigner, ends = map(tensor, arrays)
    for target in (ENDS[1].copy(), 2):
        ends[1] = torch.as_tensor(target)
        want = OPS["back"](message, fusedops.Edges(ends, NODES), wigner)
        assert torch.equal(OPS["back"](message, ends, wigner, NODES), want)


@needs_torch
@pytest.mark.parametrize("nodes", [0, 1, 6, 40_000])
def test_one_sort_groups_edges_by_both_ends(nodes):
    """A bad end is in no group."""
    ends = torch.randint(-1, nodes + 1, (2, 300), generator=torch.Generator().manual_seed(nodes))
    bad = (ends < 0) | (ends >= nodes)
    found = grouped_ends(ends, bad, nodes)
    rows = torch.where(bad, nodes, ends).numpy()
    for keys, order, ptr in zip(rows, found[::2], found[1::2], strict=True):
        want = np.argsort(keys, kind="stable")
        same(order.numpy(), want)
        same(ptr.numpy(), np.searchsorted(keys[want], np.arange(nodes + 1)))


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
    for look in (edges.check, edges._look):
        with pytest.raises(IndexError, match=r"edge_index\[1, 1\] is 7"):
            look()
    edges.__dict__["_unchecked"] = _Check(ends, ends > 9, 2)
    edges._look()
    assert "_unchecked" not in edges.__dict__


def with_end(row, edge, value):
    ends = ENDS.copy()
    ends[row, edge] = value
    return ends


BAD_EDGES = {
    "too large": (with_end(0, 3, 6), 6, r"edge_index\[0, 3\] is 6; it should be in \["),
    "target too large": (with_end(1, 6, 9), 6, r"edge_index\[1, 6\] is 9"),
    "negative": (with_end(0, 3, -1), 6, r"edge_index\[0, 3\] is -1; .* \[0, 6\), num_nodes"),
    "far too large": (with_end(1, 0, 2**62), 6, rf"edge_index\[1, 0\] is {2**62}"),
    "the first of many": (with_end(0, 3, 7)[:, ::-1] * 9, 9, r"\[0, 0\] is 45"),
    "of no nodes": ([[0], [0]], 0, r"edge_index\[0, 0\] is 0; it should be in \[0, 0\)"),
    "bytes": (ENDS.astype("u1"), 6, "edge_index has dtype uint8; it should be int32 or int64"),
    "big endian": (ENDS.astype(">i8"), 6, "edge_index has dtype >i8"),
    "a list of pairs": (ENDS.T, 6, r"edge_index has shape \(7, 2\); it should be \(2, E\)"),
    "three rows": (ENDS[[0, 1, 0]], 6, r"edge_index has shape \(3, 7\)"),
}


@pytest.mark.parametrize("name", BAD_EDGES)
def test_bad_edges_name_the_argument(name):
    given, nodes, message = BAD_EDGES[name]
    kinds = [given]
    if HAS_TORCH and getattr(given, "dtype", None) in (np.int64, np.uint8):
        kinds.append(torch.tensor(np.ascontiguousarray(given)))
    for kind in kinds:
        with pytest.raises((TypeError, ValueError, IndexError), match=f"Edges: .*{message}"):
            fusedops.Edges(kind, nodes)


#: Arguments of the op, its arrays by functions of them, and the error.
BAD = [
    ("forth", {"mmax": 3}, "mmax is 3; it should be at most 2, lmax"),
    ("forth", {"wigner": lambda w: w[:, :4, :4]}, "mmax is 2; it should be at most 1, lmax"),
    ("forth", {"wigner": lambda w: w[:5]}, "edge_index has 7 edges; it should have 5, the length"),
    ("forth", {"x": lambda x: x[:5]}, "edge_index has 6 nodes; it should have 5"),
    ("forth", {"edge_index": ENDS + 3}, r"edge_index\[0, 6\] is 8; it should be in \[0, 6\)"),
    ("forth", {"edge_index": (ENDS - 1).tolist()}, r"edge_index\[0, 0\] is -1; .* \[0, 6\)"),
    ("back", {"mmax": 1}, r"message has shape \(7, 9, 3\); it should be \(E, 7, C\)"),
    ("back", {"num_nodes": 3}, "edge_index has 6 nodes; it should have 3"),
    ("back", {"edge_index": ENDS}, "num_nodes is None; it should be an int"),
    ("back", {"edge_index": ENDS, "num_nodes": 2}, r"edge_index\[0, 2\] is 2; .* \[0, 2\)"),
    ("own", {"wigner_inv": lambda w: w[:, :8, :8]}, r"has shape \(7, 8, 8\); it should be \(E, \("),
    ("own", {"wigner_inv": lambda w: w[:, :0, :0]}, r"has shape \(7, 0, 0\); it should be"),
    *(
        ("degree", {"rescale_factor": factor}, f"rescale_factor is {factor}; it should be finite")
        for factor in (0, -0.0, np.inf, np.nan, 1e-320, -1e-320)
    ),
]


@pytest.mark.parametrize(("op", "changes", "message"), BAD)
def test_arguments_that_do_not_fit_are_named(op, changes, message):
    given = problem(op).arguments
    given = given | {n: v(given[n]) if callable(v) else v for n, v in changes.items()}
    for function in (OPS[op], OPS[op].vjp, OPS[op].explain):
        with pytest.raises((TypeError, ValueError, IndexError), match=message):
            function(**given)


@pytest.mark.parametrize("factor", [1e-39, 10**400])
def test_a_factor_whose_inverse_is_no_number_in_float32(factor):
    given = problem("degree").astype("float32").arguments | {"rescale_factor": factor}
    with pytest.raises(ValueError, match=r"rescale_factor is .*; it should be (a )?finite"):
        OPS["degree"](**given)


# Matrices.


def matrix_of(turn, lmax):
    """Return any rotation's D, fitted to the turned harmonics of many points."""
    points = unit(np.random.default_rng(9).normal(size=(20 * (lmax + 1) ** 2, 3)))
    turned, plain = harmonics(points @ turn.T, lmax), harmonics(points, lmax)
    fitted = np.linalg.lstsq(plain, turned)[0].T
    assert error(plain @ fitted.T, turned) < 1e-13
    return fitted


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
@pytest.mark.parametrize("lmax", [0, 1, 2, 6])
def test_matrices_turn_harmonics(quick, lmax, dtype):
    """D Y(v) = Y(R v) for the rotation R that turns the edge to +y, which D of degree 1 is."""
    vectors = (directions() * 1.7).astype(dtype)
    D = matrices(quick, vectors, lmax)
    assert (D.dtype, D.shape) == (dtype, (len(vectors), (lmax + 1) ** 2, (lmax + 1) ** 2))
    R = matrices(quick, vectors.astype(np.float64), 1)[:, 1:, 1:]
    u = unit(vectors.astype(np.float64))
    assert error(np.einsum("eij,ej->ei", R, u), np.tile([0.0, 1, 0], (len(u), 1))) < 2e-15
    assert error(np.linalg.det(R), np.ones(len(R))) < 2e-15
    # The shortest way leaves its axis u × y; half a turn about x comes first below the equator.
    flip = np.where(u[:, 1:2] < 0, [1.0, -1.0, -1.0], 1.0)
    axis = np.cross(flip * u, [0.0, 1.0, 0.0])
    assert error(np.einsum("eij,ej->ei", R, flip * axis), axis) < 4e-15
    points = unit(np.random.default_rng(5).normal(size=(12, 3)))
    turned = np.einsum("eij,pj->epi", R, points)
    want = harmonics(turned.reshape(-1, 3), lmax).reshape(len(R), 12, -1)
    got = np.einsum("eij,pj->epi", D.astype(np.float64), harmonics(points, lmax))
    # An element sums 2 lmax + 1 terms.
    assert error(got, want) < 3 * MATRIX_ERROR[dtype]
    identity = np.broadcast_to(np.eye((lmax + 1) ** 2), D.shape)
    assert error(D.astype(np.float64) @ D.swapaxes(1, 2), identity) < 2 * MATRIX_ERROR[dtype]
    packed = matrices(quick, vectors, lmax, packed=True)
    same(packed, pack(D))
    same(unpack(packed, lmax), D)


def test_harmonics_of_degree_one_are_x_y_z():
    """They follow e3nn's convention."""
    vectors = unit(directions())
    close(harmonics(vectors, 1)[:, 1:] / np.sqrt(3), vectors)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("float64", (1e-250, 1e-160, 3.0, 1e160, 1e250)),
        ("float32", (1e-30, 1e-21, 3.0, 1e20, 1e30)),
    ],
)
def test_the_length_of_a_vector_does_not_matter(quick, dtype, scales):
    """Not even where squares over- or underflow; powers of two, which round nothing, no bit."""
    vectors = directions()
    vectors = np.where(abs(vectors) < 1e-8, 0.0, vectors).astype(dtype)
    want = matrices(quick, vectors, 3)
    for power in (-40, -1, 3, 40):
        same(matrices(quick, vectors * np.asarray(2.0**power, dtype), 3), want)
    for scale in scales:
        got = matrices(quick, vectors * np.asarray(scale, dtype), 3)
        assert error(got, want) < 2 * MATRIX_ERROR[dtype]


def test_matrices_of_one_edge_do_not_depend_on_others(quick):
    vectors = directions()
    whole = matrices(quick, vectors, 3)
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
def test_a_vector_of_no_length_counts_as_the_axis(backend, packed):
    vectors = np.array([[0.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    D, pullback = wigner_d.vjp(vectors, 3, packed=packed, backend=backend)
    close(unpack(D, 3) if packed else D, np.broadcast_to(np.eye(16), (2, 16, 16)))
    (gradient,) = pullback(np.random.default_rng(0).normal(size=D.shape))
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


@needs_torch
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lmax", [1, 3])
def test_derivatives_of_matrices_at_the_poles_and_beside_the_jump(lmax, packed):
    # Steps of differences don't cross the equator.
    jump = [[1.0, 1e-5, 0.3], [1.0, -1e-5, 0.3]]
    x = tensor(np.concatenate([1.5 * AXES[[1, 4]], BESIDE[[0, 9]], jump, directions()[-2:]]))

    def function(x):
        return wigner_d(x, lmax, packed=packed)

    assert torch.autograd.gradcheck(function, (x.requires_grad_(),))
    assert torch.autograd.gradgradcheck(function, (x,), fast_mode=lmax == 3)


def of_matrices(lmax, packed, dtype="float64", vectors=None):
    """Return the primitives of matrices with random arguments."""
    rng = np.random.default_rng(lmax)
    vectors = 1.3 * directions() if vectors is None else vectors
    shape = len(vectors), *matrix_size(lmax, packed)
    arrays = vectors, rng.normal(size=shape), rng.normal(size=vectors.shape)
    arrays = [array.astype(dtype) for array in arrays]
    static = lmax, "packed" if packed else "dense"
    kinds = matrices_primitive, matrices_vjp, matrices_vjp_vjp
    return [(p, p.Arguments(*arrays[: k + 1], *static)) for k, p in enumerate(kinds)]


@pytest.mark.parametrize(
    ("lmax", "packed"), [(0, True), (1, False), (3, True), (8, False), (20, True)]
)
def test_kernels_of_matrices_round_once(exact, lmax, packed):
    """Value and both derivatives of any degree are exact enough to show a step in float32."""
    vectors = 1.3 * directions()[:: 1 if lmax < 9 else 5]
    for dtype, allowed in (("float32", 1.2e-7), ("float64", 1e-14 * (1 + lmax))):
        for primitive, a in of_matrices(lmax, packed, dtype, vectors):
            want = primitive.formula(a._replace(**{n: wide(getattr(a, n)) for n in a._fields[:-2]}))
            with registry.asking(exact):
                got = primitive(*a)
            for one, other in zip(got, want, strict=True):
                assert error(one, other) < allowed


@needs_triton
def test_plain_torch_serves_matrices_of_high_degrees():
    vectors = np.concatenate([AXES, BESIDE[:2], EQUATOR[:5], np.zeros((1, 3))])
    for primitive, a in of_matrices(16, True, vectors=vectors):
        tensors = [tensor(x) if isinstance(x, np.ndarray) else x for x in a]
        with registry.asking("triton"):
            got = primitive(*tensors)
        for one, other in zip(got, primitive.formula(a), strict=True):
            assert error(one.numpy(), other) < 1e-13


def turns(kind, count=6):
    """Return random rotations of a kind, and their matrices."""
    Rotation = pytest.importorskip("scipy.spatial.transform").Rotation
    rng = np.random.default_rng(count)
    if kind == "angles":
        angles = rng.uniform(-7, 7, size=(count, 3))
        return angles, Rotation.from_euler("YXY", angles).as_matrix()
    q = rng.normal(size=(count, 4))
    R = Rotation.from_quat(q[:, [1, 2, 3, 0]]).as_matrix()
    return (q if kind == "quaternions" else R), R


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("lmax", [0, 2, 5])
@pytest.mark.parametrize("kind", ["matrices", "quaternions", "angles"])
def test_matrices_of_given_rotations(kind, lmax, packed):
    given, R = turns(kind, 3)
    want = np.stack([matrix_of(turn, lmax) for turn in R])
    want = pack(want) if packed else unpack(pack(want), lmax)
    np.testing.assert_allclose(wigner_d_of(given, lmax, packed=packed), want, atol=1e-12)


@needs_torch
@pytest.mark.parametrize("kind", ["quaternions", "angles"])
def test_derivatives_by_given_rotations(kind):
    given = tensor(turns(kind, 3)[0]).requires_grad_()
    assert torch.autograd.gradcheck(lambda g: wigner_d_of(g, 2), given, fast_mode=True)
    packed = functools.partial(wigner_d_of, lmax=2, packed=True)
    assert torch.autograd.gradgradcheck(packed, given, fast_mode=True)


@needs_torch
@pytest.mark.parametrize("length", [1e-30, 1e30])
def test_quaternions_of_any_length(length):
    q = turns("quaternions")[0]
    given = (q * length).astype(np.float32)
    for array in (given, tensor(given)):
        np.testing.assert_allclose(wigner_d_of(array, 3), wigner_d_of(q, 3), atol=1e-5)


@needs_torch
@pytest.mark.filterwarnings("error")
def test_a_quaternion_of_length_zero_is_no_turn():
    q = np.stack([np.zeros(4), [1.0, 2, 3, 4]])
    same(wigner_d_of(q, 3)[0], np.eye(16))
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
    want = wigner_d_of(given.double(), 6)
    rounding = torch.finfo(given.dtype).eps
    torch.testing.assert_close(found.double(), want, rtol=rounding, atol=1e-5)


def _turns(matrices):
    return torch.linalg.qr(matrices).Q


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3,), (3, 3)])
def test_given_rotations_are_exported(shape, packed):
    class Matrices(torch.nn.Module):
        def forward(self, rotation):
            return wigner_d_of(rotation, 3, packed=packed)

    torch.manual_seed(0)
    few, many = torch.randn(2, *shape), torch.randn(5, *shape)
    if len(shape) == 2:
        few, many = (q * torch.linalg.det(q)[:, None, None] for q in map(_turns, (few, many)))
    sizes = ({0: torch.export.Dim("edges", min=2)},)
    program = torch.export.export(Matrices(), (few,), dynamic_shapes=sizes)
    torch.testing.assert_close(program.module()(many), wigner_d_of(many, 3, packed=packed))


def test_a_rotation_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"wigner_d_of: rotation has shape \(2, 5\); it should be"):
        wigner_d_of(np.ones((2, 5)), 1)


# Memory of others.


def fill_by_liars(place, lie):
    """Fill arrays of 4 nodes by edges between 9, or arrays of 4 edges by 5 edges."""
    ends = np.array([[0, 1, 2, 2, 0], [1, 0, 2, 1, 2]])
    edges = fusedops.Edges(*((ends, 4) if lie == "edges" else (4 * ends, 9)))
    count, out = 4 if lie == "edges" else 5, 9 if lie == "outputs" else 4
    for way, end in itertools.product(("forth", "back", "undo"), (True, False)):
        message, wigner = (count, 4, 6 if way == "forth" else 3), (count, 4, 4)
        arrays = [np.ones(shape) for shape in ((out, 4, 3), (4, 4, 3), message, wigner)]
        # An edge's own results may be left as they are.
        outputs = [np.ones(shape) for shape in ((out, 4, 3), message, wigner)]
        static = edges, 1, way, 1.0
        given, outputs = (*arrays, None, *static), (*outputs, None)
        _, found = guarded.fill(place, edge_wigner, given, outputs, end)
        assert all(np.isfinite(a).all() for a in found if a is not None)


@needs_linux
@pytest.mark.parametrize("lie", ["nodes", "edges", "outputs"])
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_edges_that_lie_lead_nowhere(place, lie):
    """Nothing outside is touched; a call makes an output for every node that the edges name."""
    guarded.run(fill_by_liars, place, lie)


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


@pytest.mark.parametrize("lmax", [1, 2, 4])
@pytest.mark.parametrize("bound", ["_WITH_PRODUCTS", "_FEW"])
def test_gradients_are_those_of_few_and_of_many_nodes(monkeypatch, bound, lmax):
    """Few nodes leave the gradients of matrices to edges, and take programs of few channels."""
    available("torch", "triton")
    from gpukern.wigner import triton as kernels

    edges, generator = fusedops.Edges(ENDS, NODES), torch.Generator().manual_seed(lmax)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, requires_grad=True)

    count = ENDS.shape[1]
    x, wigner = numbers(NODES, (lmax + 1) ** 2, 24), numbers(count, *matrix_size(lmax, packed=True))
    radial = numbers(count, function_rows(lmax, min(lmax, 2)) * 48)

    def gradients(backend):
        out = fusedops.node_to_edge_wigner_permute(
            x, edges, wigner, mmax=min(lmax, 2), radial=radial, backend=backend
        )
        return torch.autograd.grad(out.square().sum(), (x, wigner, radial))

    few = gradients("triton")
    monkeypatch.setattr(kernels, bound, {"_WITH_PRODUCTS": 0, "_FEW": ()}[bound])
    many = gradients("triton")
    for a, b, c in zip(few, many, gradients("torch"), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-4)


def test_matrices_that_are_no_rotations_are_refused():
    R = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    R *= np.linalg.det(R)
    good = np.stack([R, R.T])
    np.testing.assert_allclose(wigner_d_of(good, 1)[:, 1:, 1:], good, atol=1e-12)
    for bad in (-R, 2 * R):
        with pytest.raises(
            ValueError, match=r"rotation\[1\] is .*; it should be a matrix of a proper"
        ):
            wigner_d_of(np.stack([R, bad]), 1)
