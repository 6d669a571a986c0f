"""The named cases and the tolerances of every op, for tests, benches and the demo."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusedops._frame import primitive, registry
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Primitive
from fusedops.conv import Sequences
from fusedops.conv.op import conv, conv_step, conv_vjp
from fusedops.density import Lattice
from fusedops.density.op import density, density_vjp, density_vjp_vjp
from fusedops.generated.op import generated, generated_vjp
from fusedops.harmonics.op import matrices, matrices_vjp, matrices_vjp_vjp, matrix_size
from fusedops.planarity import Planes
from fusedops.planarity.op import gradient_vjp, nll
from fusedops.samples import _exact, atoms_in, convolved, cubes, pair, protein
from fusedops.scatter import ScatterPlan
from fusedops.scatter.op import gather, scatter
from fusedops.so2.op import gate, gate_vjp, gate_vjp_vjp, so2, so2_vjp
from fusedops.trimul.op import trimul, trimul_vjp
from fusedops.wigner import Edges, m_major_order
from fusedops.wigner.op import edge_wigner
from fusedops.wigner.rows import function_rows, message_rows

__all__ = [
    "CASES",
    "TOLERANCE",
    "Case",
    "check",
    "error",
    "poisoned_outputs",
    "run",
]

#: Largest error allowed, relative to the largest element of the reference, for sums of up to 64
#: terms. Planarity accumulates in float64 and rounds once, whatever the length of a sum, so its
#: error in other dtypes is one or two roundings of the output. Its second derivative divides by
#: gaps between eigenvalues, which magnifies float64's rounding errors. The convolution sums up to
#: 31 products in float32; the error grows with the root of their number. It sums over tokens in
#: float64, or in partial sums of at most 64 tokens.
TOLERANCE = {"float64": 1e-12, "float32": 3e-7, "bfloat16": 8e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Case:
    """A primitive with arguments that a real program would pass.

    Attributes
    ----------
    name : str
        The workload's name; ``str`` puts the primitive's name before it.
    primitive : Primitive
        The primitive to call.
    make : callable
        Returns the float64 arrays and the static arguments, equal in every call.
    terms : int
        The number of products that an output's element sums, if it is large.

    Examples
    --------
    >>> from fusedops.testing import CASES
    >>> str(CASES[0]), CASES[0].make()[0][0].shape
    ('planarity_nll-chain-uniform', (157, 3))
    """

    name: str
    primitive: Primitive
    make: Callable[[], tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]]
    terms: int = 0

    def tolerance(self, dtype: str) -> float:
        """Return the largest error allowed, which grows with the root of the terms.

        Parameters
        ----------
        dtype : str
            ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.

        Returns
        -------
        float
            Relative to the largest element of the reference.

        Examples
        --------
        >>> from fusedops.testing import CASES
        >>> CASES[0].tolerance("float32")
        3e-07
        """
        return TOLERANCE[dtype] * max(1.0, self.terms**0.5 / 8)

    def __str__(self) -> str:
        return f"{self.primitive.name}-{self.name}"


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill every output with NaN before a kernel runs, to show elements that it doesn't write.

    Returns
    -------
    context manager
        For a ``with`` statement. It affects all threads of the process.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> with poisoned_outputs():
    ...     float(fusedops.dynamic_conv(np.ones((1, 2, 1)), np.ones((1, 1))).sum())
    2.0
    """
    before, primitive.poison = primitive.poison, True
    try:
        yield
    finally:
        primitive.poison = before


def error(value: Any, reference: Any) -> float:
    """Return the largest difference, relative to the largest element of the reference.

    Parameters
    ----------
    value, reference : array
        Of any dtype; they are compared in float64.

    Returns
    -------
    float
        Infinite if shapes differ, or if an element of `value` isn't finite.

    Examples
    --------
    >>> error([1.0, 2.5], [1.0, 2.0])
    0.25
    """
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if value.shape != reference.shape or not np.isfinite(value).all():
        return np.inf
    difference = np.abs(value - reference).max(initial=0.0)
    return float(difference / (np.abs(reference).max(initial=0.0) or 1.0))


def run(
    case: Case,
    framework: str,
    backend: str | None,
    dtype: str,
    *,
    wanted: tuple[bool, ...] | None = None,
    device: str = "cpu",
) -> tuple[list[Any], list[np.ndarray | None]]:
    """Evaluate a case on a backend, into outputs poisoned with NaN.

    Parameters
    ----------
    case : Case
        One of `CASES`.
    framework : {"numpy", "torch"}
        The framework of the arrays.
    backend : str or None
        The backend that must serve the call; None for the first that can.
    dtype : str
        ``"float64"``, ``"float32"``; in torch ``"bfloat16"`` and ``"float16"`` too.
    wanted : tuple of bool, optional
        The outputs to compute; all by default.
    device : str
        A torch device.

    Returns
    -------
    outputs : list of array
        In float64; None for an unwanted output. At the end, the arrays updated in place.
    arrays : list of array
        The case's arrays rounded to `dtype`, as the kernel got them, in float64.

    Raises
    ------
    BackendUnavailable
        If the backend can't serve the call.

    Examples
    --------
    >>> from fusedops.testing import CASES
    >>> outputs, arrays = run(CASES[0], "numpy", "numpy", "float64")
    >>> [output.shape for output in outputs]
    [(), (157, 3)]
    """
    primitive = case.primitive
    arrays: list[Any]
    static: Sequence[Any]
    given, static = case.make()
    if framework == "numpy":
        arrays = [None if a is None else a.astype(dtype) for a in given]
        rounded = [None if a is None else a.astype(np.float64) for a in arrays]
    else:
        import torch

        kind = getattr(torch, dtype)
        arrays = [None if a is None else torch.tensor(a, device=device, dtype=kind) for a in given]
        rounded = [None if a is None else a.double().cpu().numpy().copy() for a in arrays]
        static = [s.to(device) if isinstance(s, Packed) else s for s in static]
        static = [_constant(s, kind, device) if isinstance(s, np.ndarray) else s for s in static]
    out = primitive.all if wanted is None else [want or None for want in wanted]
    with poisoned_outputs(), registry.asking(backend):
        outputs = [*primitive(*arrays, *static, out=out)]
    outputs += [a for n, a in zip(primitive.arrays, arrays, strict=True) if n in primitive.mutates]
    if framework == "torch":
        outputs = [None if out is None else out.double().cpu().numpy() for out in outputs]
    return outputs, rounded


def _constant(array: np.ndarray, kind: Any, device: str) -> Any:
    """Return a constant array as a tensor: integers, or floats of at least 32 bits."""
    import torch

    kind = torch.promote_types(kind, torch.float32) if array.dtype.kind == "f" else None
    return torch.tensor(array, device=device, dtype=kind)


def check(
    case: Case,
    framework: str,
    backend: str | None,
    dtype: str,
    device: str = "cpu",
    *,
    alone: bool = True,
) -> None:
    """Raise AssertionError unless a backend agrees with the reference on a case.

    In float32, outputs computed alone (of five outputs or more, in two halves) must equal those
    computed together; on the CPU bit for bit.

    Parameters
    ----------
    case, framework, backend, dtype, device
        See `run`.
    alone : bool
        Whether to compute outputs alone, too.

    Raises
    ------
    AssertionError
        If they disagree; the message has the case and the error of every output.
    BackendUnavailable
        If the backend can't serve the call.

    Examples
    --------
    >>> from fusedops.testing import CASES
    >>> check(CASES[0], "numpy", "numpy", "float32")
    """
    primitive = case.primitive
    outputs, rounded = run(case, framework, backend, dtype, device=device)
    reference = primitive.formula(primitive.Arguments._make((*rounded, *case.make()[1])))
    updated = [a for n, a in zip(primitive.arrays, rounded, strict=True) if n in primitive.mutates]
    names = primitive.outputs + primitive.mutates
    errors = {
        name: error(out, want)
        for name, out, want in zip(names, outputs, [*reference, *updated], strict=True)
        # The order of atoms on a GPU is arbitrary, so the formula returns None for it.
        if want is not None
    }
    # On the CPU the bridge computes most ops in float32 when given 16-bit floats.
    narrow = device == "cpu" and dtype not in ("float32", "float64")
    worked = "float32" if narrow and not primitive.sixteen_bits else dtype
    if not max(errors.values()) <= case.tolerance(worked):
        raise AssertionError(f"{case} on {backend} in {dtype}: {errors}")
    count = len(primitive.outputs)
    if dtype != "float32" or count == 1 or not alone:
        return
    # Of five outputs or more, every second at a time.
    step = count if count < 5 else 2
    for first in range(step):
        wanted = tuple(number % step == first for number in range(count))
        some, _ = run(case, framework, backend, dtype, wanted=wanted, device=device)
        # On a GPU each choice compiles another kernel, in which products and sums may fuse anew.
        allowed = 0.0 if device == "cpu" else case.tolerance(worked)
        for number in range(first, count, step):
            if outputs[number] is None:
                continue
            if not error(some[number], outputs[number]) <= allowed:
                raise AssertionError(
                    f"{case} on {backend} in {dtype}: {names[number]} alone differs"
                )


def _chain(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    xyz, indices = protein(24, rng, noise=0.05)
    return xyz, [(index, np.full(len(index), 0.02)) for index in indices]


def _atom_sigmas(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    xyz, indices = protein(24, rng, noise=0.05)
    return xyz, [
        (index.astype(np.int32), rng.uniform(0.01, 0.05, index.shape if g % 2 else len(index)))
        for g, index in enumerate(indices)
    ]


def _sizes(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Groups of 3 to 70 atoms in no order, at random positions: nothing like a plane."""
    xyz = rng.normal(size=(90, 3)) * [5, 3, 1]
    groups = [
        (np.stack([rng.choice(80, n, replace=False) for _ in range(p)]), rng.uniform(0.1, 1, p))
        for n, p in ((64, 1), (3, 4), (17, 2), (4, 19), (70, 1), (3, 2), (9, 5))
    ]
    return xyz, groups


def _shared(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Every atom in many planes, one twice in a plane, and atoms in none."""
    xyz = rng.normal(size=(40, 3)) * [4, 4, 0.2]
    return xyz, [(rng.integers(3, 15, (30, 5)), np.full(30, 0.3))]


def _degenerate(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Among good planes: an exact one, a line, a point, and coordinates that aren't finite."""
    xyz, groups = _chain(rng)
    square = np.array([[0.0, 0, 0], [2, 0, 0], [2, 2, 0], [0, 2, 0]])
    line = np.arange(4)[:, None] * [1.0, 2.0, -2.0]
    point = np.full((4, 3), 7.25)
    nan, infinite = square.copy(), square.copy()
    nan[1, 2] = np.nan
    infinite[2, 0] = -np.inf
    at = len(xyz)
    extra = [square, line, point, nan, infinite]
    index = at + np.arange(4 * len(extra)).reshape(-1, 4)
    return np.concatenate([xyz, *extra]), [*groups, (index, np.full(len(extra), 0.02))]


def _none(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    return rng.normal(size=(5, 3)), []


def _planarity_cases() -> list[Case]:
    def add(name: str, build: Callable[..., Any], fit: str) -> None:
        def make(direction: bool) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(7)
            xyz, groups = build(rng)
            arrays = (xyz, rng.normal(size=xyz.shape)) if direction else (xyz,)
            return arrays, (Planes(groups), fit)

        cases.append(Case(f"{name}-{fit}", nll, lambda: make(False)))
        cases.append(Case(f"{name}-{fit}", gradient_vjp, lambda: make(True)))

    cases: list[Case] = []
    for fit in ("uniform", "weighted"):
        add("chain", _chain, fit)
        add("atom_sigmas", _atom_sigmas, fit)
        add("sizes", _sizes, fit)
        add("shared", _shared, fit)
        add("degenerate", _degenerate, fit)
    add("none", _none, "uniform")
    return cases


def _conv_case(
    name: str,
    shape: tuple[int, int, int, int],
    *,
    static: bool = False,
    state: bool = False,
    bias: bool = False,
    residual: bool = False,
    cu_seqlens: list[int] | None = None,
    silu: bool = False,
    final: bool = False,
) -> list[Case]:
    """Return a convolution (B, T, D, W) and its gradient, which `final` gives a dfinal_state."""
    B, T, D, W = shape
    count = B if cu_seqlens is None else len(cu_seqlens) - 1

    def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
        rng = np.random.default_rng(W)
        arrays = [
            rng.normal(size=(B, T, D)),
            rng.normal(size=(D, W) if static else (B, T, D, W)) / np.sqrt(W),
            rng.normal(size=(count, D, W)) if state else None,
            rng.normal(size=D) if bias else None,
            # The gradient's dout, or the residual, which no gradient reads.
            rng.normal(size=(B, T, D)) if gradient or residual else None,
        ]
        if gradient:
            arrays.append(rng.normal(size=(count, D, W)) if final else None)
        sequences = None if cu_seqlens is None else Sequences(np.array(cu_seqlens))
        return tuple(arrays), (sequences, "silu" if silu else "none")

    return [Case(name, conv, lambda: make(False)), Case(name, conv_vjp, lambda: make(True))]


def _step_case(
    name: str,
    B: int,
    D: int,
    W: int,
    *,
    static: bool,
    bias: bool,
    silu: bool,
    residual: bool = False,
    tokens: int | None = None,
    length: int | None = None,
    paged: bool = False,
    circular: bool = False,
) -> Case:
    """A step of one token, or of `tokens`; states hold `length` inputs, W by default."""
    L = W if length is None else length

    def make() -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
        rng = np.random.default_rng(W)
        each = (B,) if tokens is None else (B, tokens)
        kernels = rng.normal(size=(D, W) if static else (*each, D, W))
        state = rng.normal(size=(B + 2 * paged, D, L))
        given = (
            rng.normal(size=(*each, D)),
            state,
            kernels,
            rng.normal(size=D) if bias else None,
            rng.normal(size=(*each, D)) if residual else None,
        )
        slots = positions = None
        if paged:
            slots = rng.permutation(B + 2)[:B]
            slots[1:2] = -1
        if circular:
            positions = rng.integers(0, 100, B)
        return given, (slots, positions, "silu" if silu else "none")

    return Case(name, conv_step, make)


def _conv_cases() -> list[Case]:
    # Sequences that are empty, shorter than the kernel, as long as a chunk, and longer.
    packed = [0, 0, 3, 67, 67, 68, 136]
    cases = _conv_case("jet", (2, 70, 40, 4), state=True, silu=True, final=True)
    for width in (1, 2, 3, 4, 5, 7, 16, 31):
        shape = (2 if width < 16 else 1, 66 if width < 5 else 39 + width, 5, width)
        odd = width % 2 == 1
        cases += _conv_case(f"w{width}", shape, silu=odd, bias=not odd, state=odd)
    for static in (False, True):
        kind = "static" if static else "dynamic"
        every: dict[str, Any] = {"static": static, "state": True, "final": True}
        every |= {"bias": True, "residual": True}
        some: dict[str, Any] = {"bias": True, "residual": static, "silu": True}
        cases += _conv_case(f"{kind}-mamba", (2, 70, 40, 4), static=static, **some)
        cases += _conv_case(f"{kind}-short", (3, 2, 4, 7), silu=True, **every)
        cases += _conv_case(f"{kind}-packed", (1, 136, 9, 4), cu_seqlens=packed, silu=True, **every)
        cases += _conv_case(f"{kind}-packed-w7", (1, 136, 3, 7), cu_seqlens=packed, static=static)
        cases += _conv_case(f"{kind}-no-tokens", (2, 0, 3, 4), **every)
    cases += _conv_case("no-batch", (0, 5, 3, 2))
    cases += _conv_case("no-channels", (2, 5, 0, 3), static=True, state=True)
    cases += _conv_case("no-sequences", (1, 0, 3, 2), cu_seqlens=[0], state=True)
    cases.append(_step_case("jet", 3, 40, 4, static=False, bias=False, silu=True))
    cases.append(_step_case("w5", 2, 5, 5, static=False, bias=True, silu=False))
    cases.append(_step_case("static-w1", 2, 5, 1, static=True, bias=True, silu=True))
    cases.append(_step_case("no-batch", 0, 5, 3, static=True, bias=False, silu=False))
    some = {"static": True, "bias": True, "silu": True}
    several = {**some, "static": False, "residual": True}
    cases.append(_step_case("paged", 5, 8, 4, **some, paged=True))
    cases.append(_step_case("residual", 5, 8, 4, **some, paged=True, residual=True))
    cases.append(_step_case("short-state", 3, 8, 4, **some, length=3, paged=True))
    cases.append(_step_case("tokens", 3, 5, 4, **several, tokens=3, length=7))
    cases.append(_step_case("more-tokens-than-state", 3, 5, 3, **some, tokens=5, length=2))
    cases.append(_step_case("circular", 4, 5, 3, **some, tokens=2, length=5, circular=True))
    return cases


def _wigner_case(
    name: str,
    lmax: int,
    mmax: int | None = None,
    *,
    nodes: int = 4,
    edges: int = 7,
    channels: int = 3,
    way: str = "forth",
    packed: bool = False,
    own: bool = False,
    base: bool = False,
    scale: float = 1.0,
    scaled: bool = False,
) -> Case:
    """Return all partial derivatives of the form; `own` makes every edge a node of its own."""

    def make() -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
        rng = np.random.default_rng(lmax)
        limit = lmax if mmax is None else mmax
        count, rows, ends = edges if own else nodes, (lmax + 1) ** 2, 2 if way == "forth" else 1
        # The last node has no edge; self-loops and repeated edges occur by chance.
        graph = None if own else Edges(rng.integers(0, max(nodes - 1, 1), (2, edges)), nodes)
        x = rng.normal(size=(count, rows, channels))
        message = rng.normal(size=(edges, len(m_major_order(lmax, limit)), ends * channels))
        wigner = rng.normal(size=(edges, *matrix_size(lmax, packed))) / np.sqrt(2 * lmax + 1)
        functions = function_rows(lmax, limit)
        factors = rng.normal(size=(edges, functions * ends * channels)) if scaled else None
        arrays = rng.normal(size=x.shape) if base else None, x, message, wigner, factors
        return arrays, (graph, limit, way, scale)

    # Sums run over channels, or over the rows of a degree at both ends of a node's edges; factors
    # round terms once more.
    terms = 2 * (1 + scaled) * max(channels, (2 * lmax + 1) * edges // max(nodes - 1, 1))
    return Case(name, edge_wigner, make, terms)


def _generated_cases() -> list[Case]:
    cases: list[Case] = []

    def add(
        name: str,
        shape: tuple[int, int, int, int, int],
        *,
        cu_seqlens: list[int] | None = None,
        silu: bool = False,
        bare: bool = False,
    ) -> None:
        """Add a convolution (B, T, D, W, H) and its gradient; a bare one has no optional array."""
        B, T, D, W, H = shape
        count = B if cu_seqlens is None else len(cu_seqlens) - 1

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(W)
            arrays = [
                rng.normal(size=(B, T, D)),
                rng.normal(size=(B, T, H)),
                rng.normal(size=(D * W, H)) / np.sqrt(max(H, 1) * W),
            ]
            shapes: list[tuple[int, ...]] = [(D * W,), (count, D, W), (D,)]
            if gradient:
                shapes += [(B, T, D), (count, D, W)]
            arrays += [
                None if bare and shape != (B, T, D) else rng.normal(size=shape) for shape in shapes
            ]
            sequences = None if cu_seqlens is None else Sequences(np.array(cu_seqlens))
            return tuple(arrays), (sequences, "silu" if silu else "none")

        # Gradients sum over the weight's rows, and over tokens.
        terms = 8 * max(D * W, H, B * T)
        cases.append(Case(name, generated, lambda: make(False), terms))
        cases.append(Case(name, generated_vjp, lambda: make(True), terms))

    add("generated", (2, 70, 24, 4, 16), silu=True)
    add("generated-bare", (2, 19, 5, 3, 7), bare=True)
    add("generated-packed", (1, 136, 9, 4, 5), cu_seqlens=[0, 0, 3, 67, 67, 68, 136], silu=True)
    add("generated-w7", (3, 2, 4, 7, 3))
    add("generated-w1", (1, 5, 3, 1, 2), silu=True, bare=True)
    add("generated-w17", (1, 40, 2, 17, 3), silu=True)
    add("generated-nothing", (2, 9, 3, 2, 0))
    add("generated-no-tokens", (2, 0, 3, 4, 2), silu=True)
    add("generated-no-batch", (0, 5, 3, 2, 2), bare=True)
    add("generated-no-sequences", (1, 0, 3, 2, 2), cu_seqlens=[0])
    return cases


def _wigner_cases() -> list[Case]:
    cases = [
        _wigner_case("uma-scaled", 2, nodes=6, edges=20, channels=40, packed=True, scaled=True),
        _wigner_case("uma", 2, nodes=6, edges=20, channels=40),
        _wigner_case("uma-back", 2, nodes=6, edges=20, channels=40, way="back"),
        _wigner_case("uma-degree", 2, 0, channels=40, way="back", base=True, scale=0.3),
    ]
    for lmax in range(5):
        for mmax in range(lmax + 1):
            for way in ("forth", "back"):
                packed = (lmax + mmax + len(way)) % 2 == 0
                name = f"l{lmax}-m{mmax}-{way}"
                cases.append(_wigner_case(name, lmax, mmax, way=way, packed=packed))
    for lmax, edges in ((6, 3), (8, 1)):
        cases.append(_wigner_case(f"l{lmax}", lmax, 2, nodes=2, edges=edges, channels=2))
    for packed in (False, True):
        name = f"undo-{'packed' if packed else 'dense'}"
        cases.append(_wigner_case(name, 2, 1, way="undo", packed=packed))
    for lmax, mmax in ((1, 0), (2, 1), (3, 2)):
        cases.append(_wigner_case(f"l{lmax}-m{mmax}-scaled", lmax, mmax, scale=0.3, scaled=True))
    cases.append(_wigner_case("no-edges-scaled", 1, edges=0, scaled=True))
    cases.append(_wigner_case("wide", 1, channels=300, packed=True))
    cases.append(_wigner_case("wide-back", 1, channels=300, way="back"))
    cases.append(_wigner_case("own", 2, 1, way="back", own=True))
    cases.append(_wigner_case("no-edges", 1, edges=0, base=True, way="back"))
    cases.append(_wigner_case("no-nodes", 1, nodes=0, edges=0))
    cases.append(_wigner_case("no-channels", 1, channels=0))
    for way in ("forth", "back"):
        cases.append(_wigner_case(f"hub-{way}", 1, nodes=2, edges=70, way=way))
    return cases


def _matrix_cases() -> list[Case]:
    def add(name: str, lmax: int, layout: str) -> None:
        def make(count: int) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(lmax)
            axes = np.concatenate([np.eye(3), -np.eye(3)])
            # Beside the poles and the equator, and no direction at all.
            beside = [[1e-6, 1, -1e-6], [1e-6, -1, 1e-6], [1, 1e-6, 1], [1, -1e-6, 1], [0, 0, 0]]
            vectors = np.concatenate([axes, beside, rng.normal(size=(6, 3))])
            shape = len(vectors), *matrix_size(lmax, layout == "packed")
            arrays = vectors, rng.normal(size=shape), rng.normal(size=vectors.shape)
            return arrays[:count], (lmax, layout)

        # Torch's formula makes degrees of each other in float32; kernels round once.
        terms = 64 * (lmax + 1) ** 2
        for count, kind in enumerate((matrices, matrices_vjp, matrices_vjp_vjp), 1):
            cases.append(Case(name, kind, functools.partial(make, count), terms))

    cases: list[Case] = []
    for lmax in (0, 1, 2, 3, 6, 8):
        for layout in ("dense", "packed"):
            add(f"l{lmax}-{layout}", lmax, layout)
    return cases


def _so2_cases() -> list[Case]:
    def add(name: str, *sizes: int, **options: Any) -> None:
        """Add a convolution of `sizes`, as `convolved` has them, and its gradient."""
        edges, lmax, mmax, channels, width, gates = sizes

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(lmax)
            given = convolved(rng, *sizes, **options)
            arrays: list[np.ndarray | None] = [given.get(name) for name in so2.arrays]
            if gradient:
                arrays.append(rng.normal(size=(edges, message_rows(lmax, mmax), width)))
                arrays.append(rng.normal(size=(edges, gates)) if gates else None)
            return tuple(arrays), (lmax, gates, "ieee")

        # Sums run over an order's inputs, its results, or edges.
        terms = max(2 * (lmax + 1) * max(channels, width) + gates, edges, 512)
        cases.append(Case(name, so2, lambda: make(False), terms))
        cases.append(Case(name, so2_vjp, lambda: make(True), terms))

    cases: list[Case] = []
    add("uma", 20, 2, 2, 16, 8, 16)
    add("uma-second", 20, 2, 2, 8, 16, 0, radial=False)
    for lmax, mmax in ((0, 0), (1, 0), (1, 1), (3, 1), (4, 4), (6, 2)):
        odd = (lmax + mmax) % 2 == 1
        add(f"l{lmax}-m{mmax}", 7, lmax, mmax, 3, 2, lmax, radial=not odd, bias=odd)
    # More than one block of edges.
    add("blocks", 300, 1, 1, 2, 3, 1)
    add("no-edges", 0, 2, 1, 3, 2, 2)
    add("no-channels", 5, 1, 1, 0, 2, 1)
    add("no-results", 5, 1, 1, 2, 0, 1)
    return cases


def _gate_cases() -> list[Case]:
    def add(name: str, edges: int, lmax: int, mmax: int, channels: int, layout: str) -> None:
        def make(count: int) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(lmax)
            gates, x = (edges, lmax * channels), (edges, message_rows(lmax, mmax), channels)
            arrays = [rng.normal(size=shape) for shape in (gates, x, x, gates, x)]
            return tuple(arrays[:count]), (lmax, mmax, layout)

        for count, kind in ((2, gate), (3, gate_vjp), (5, gate_vjp_vjp)):
            cases.append(Case(name, kind, functools.partial(make, count)))

    cases: list[Case] = []
    add("gates", 9, 2, 2, 16, "m")
    for lmax, mmax in ((0, 0), (1, 1), (3, 1), (4, 4)):
        for layout in ("m", "l"):
            add(f"l{lmax}-m{mmax}-{layout}", 5, lmax, mmax, 3, layout)
    add("many-channels", 2, 1, 1, 150, "l")
    add("no-edges", 0, 1, 1, 3, "m")
    add("no-channels", 3, 2, 1, 0, "m")
    return cases


def _scatter_cases() -> list[Case]:
    def add(
        name: str,
        shape: tuple[int, int, int, int],
        grid: tuple[int, int, int] | int,
        index: str = "int64",
        terms: int = 0,
    ) -> None:
        """Add a case on a crystal's grid, or, if `grid` is a map's size, with indices anywhere."""

        def make(back: bool) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(shape[0])
            count, *cube = shape
            if isinstance(grid, int):
                wa = rng.integers(0, grid // 2, (count, cube[0]))
                wbwc = rng.integers(0, grid - grid // 2, (count, *cube[1:]))
                elements = grid
            else:
                wa, wbwc = cubes(rng, count, grid, cube)
                elements = int(np.prod(grid))
            plan = ScatterPlan(wa.astype(index), wbwc.astype(index), elements)
            return (rng.normal(size=elements if back else shape),), (plan,)

        cases.append(Case(name, scatter, lambda: make(False), terms))
        cases.append(Case(name, gather, lambda: make(True)))

    cases: list[Case] = []
    add("torchref", (30, 9, 9, 9), (24, 20, 28))
    add("odd", (7, 5, 4, 3), (12, 9, 11), "int32")
    add("wrapped", (3, 5, 7, 9), (4, 5, 6))
    add("parts", (2, 3, 4, 33), (9, 250, 256), "int32")
    add("rows", (2, 3, 2, 70), (5, 6, 90))
    add("anywhere", (5, 3, 4, 5), 77)
    # Sums of 174 terms, in any order where atomics add them: the error of 1,000 in a good order.
    add("one", (40, 2, 2, 2), 3, terms=1000)
    add("far", (4, 3, 2, 3), 1_000_000)
    add("point", (6, 1, 1, 1), (5, 5, 5))
    add("no-cubes", (0, 3, 3, 3), (5, 5, 5))
    add("no-planes", (3, 0, 3, 3), (5, 5, 5))
    add("no-rows", (3, 3, 3, 0), (5, 5, 5))
    return cases


def _density_cases() -> list[Case]:
    def add(
        name: str,
        count: int,
        cell: Any,
        shape: Any,
        radius: float,
        *,
        bad: bool = False,
        clamp: int = 0,
        along: int = 5,
        slab: tuple[int, int] | None = None,
        terms: int = 2048,
    ) -> None:
        def make(
            anisotropic: bool, order: int
        ) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            """Return the arguments of the map, of its gradients, or of second derivatives.

            The first arrays, as many as `along`, have tangents.
            """
            rng = np.random.default_rng(count)
            matrix = np.array(cell, np.float64)
            atoms = xyz, b, occupancy, amplitudes, _ = atoms_in(
                matrix, count, rng, anisotropic=anisotropic
            )
            far = rng.uniform(0.6, 1.0, count) * radius
            amplitudes[:1, 1] = 0
            if bad:
                xyz[1, 2], occupancy[3], far[4] = np.nan, np.inf, -1.0
                b[5], amplitudes[6, 0] = -90.0, np.nan
            if clamp and anisotropic:
                # One, two and three directions are too sharp.
                b[:3, :3] -= [[0.8, 0.1, 0.0], [0.8, 0.8, 0.0], [2.0, 2.0, 2.0]]
            elif clamp:
                b[:3] -= 20.0, 50.0, 99.0
            lattice = Lattice(matrix, shape)
            lattice = lattice if slab is None else lattice.slab(*slab)
            if order == 0:
                return atoms, (far, lattice, clamp)
            arrays: tuple[np.ndarray | None, ...] = (*atoms, rng.normal(size=lattice.shape))
            if order == 2:
                # U is about a fiftieth of B.
                scales = 1, 0.02 if anisotropic else 1, 1, 1, 1
                tangents = [
                    scale * rng.normal(size=a.shape) for scale, a in zip(scales, atoms, strict=True)
                ]
                arrays += *tangents[:along], *[None] * (5 - along)
            return arrays, (far, None, lattice, *([clamp] if order == 1 else []))

        for kind in ("iso", "aniso"):
            primitives = density, density_vjp, density_vjp_vjp
            for order, of in enumerate(primitives[:2] if clamp else primitives):
                made = functools.partial(make, kind == "aniso", order)
                cases.append(Case(f"{name}-{kind}", of, made, terms if order else terms // 8))

    cases: list[Case] = []
    orthogonal = np.diag([9.0, 11.0, 13.0])
    triclinic = [[9.0, 3.0, -4.0], [0.0, 8.0, 3.0], [0.0, 0.0, 7.0]]
    # Few atoms and voxels: Triton's interpreter takes a second for a box of a thousand.
    add("protein", 4, orthogonal, (9, 10, 16), 2.5)
    add("triclinic", 3, triclinic, (9, 8, 6), 2.7, along=3)
    add(
        "long", 1, [[5.0, 0, 0], [0, 6.0, 0], [1.0, 0, 40.0]], (2, 3, 90), 10.0, along=1, terms=8192
    )
    small = [[4.0, 1.0, -1.8], [0.0, 3.5, 1.2], [0.0, 0.0, 3.0]]
    # Many images, whose second derivatives cancel.
    add("small", 2, small, (5, 4, 3), 4.0, terms=4096)
    add("bad", 8, orthogonal, (6, 7, 8), 1.5, bad=True)
    # Rounding U moves a small eigenvalue.
    add("clamp", 5, orthogonal, (8, 7, 6), 1.7, clamp=1, terms=16384)
    # Only tails of Gaussians, in which rounding of large exponents counts.
    add("one-voxel", 4, triclinic, (1, 1, 1), 9.0, terms=32000)
    add("no-atoms", 0, orthogonal, (4, 5, 6), 2.0)
    add("slab", 3, orthogonal, (9, 6, 8), 2.2, slab=(6, 8), terms=4096)
    # Fewer voxels even out fewer roundings.
    add("slab-of-images", 2, small, (5, 3, 2), 4.0, slab=(1, 4), terms=16384)
    add("no-planes", 2, triclinic, (4, 5, 6), 2.0, slab=(4, 4))
    return cases


def _trimul_cases() -> list[Case]:
    def add(
        name: str,
        shape: tuple[int, int, int, int],
        direction: str,
        gate: str = "output",
        *,
        hidden: bool = True,
        **options: Any,
    ) -> None:
        """Add an update and its gradient, which gets o as an argument if `hidden`."""
        # Rounded numbers go through five products and two LayerNorms. LayerNorms subtract the mean
        # and divide by the deviation, which magnifies errors, the more so the fewer the channels;
        # of a single channel nothing but rounding errors is left.
        few = min(shape[2:]) < 8
        terms = 1024 if few else 512
        terms *= 4 if shape[2:] == (1, 1) else 1

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(shape[2])
            arrays: tuple[Any, ...] = tuple(pair(*shape, rng, gate=gate, **options).values())
            static = (direction, gate, "float32", 1e-5, 0)
            if gradient:
                a = trimul.Arguments._make((*arrays, *static))
                o = trimul.formula(a)[1] if hidden else None
                D = len(a.p_out_weight)
                arrays = (*arrays, o, _exact(rng.normal(size=(*a.x.shape[:3], D))))
            return arrays, static

        cases.append(Case(name, trimul, lambda: make(False), terms))
        cases.append(Case(name, trimul_vjp, lambda: make(True), 8 * terms if few else 4 * terms))

    cases: list[Case] = []
    add("boltz", (1, 12, 32, 32), "outgoing", mask=True)
    add("openfold", (2, 5, 6, 5), "incoming", mask=False, biases=True)
    add("gpu-mode", (2, 7, 4, 9), "outgoing", "hidden", mask=True, hidden=False)
    add("hidden-incoming", (1, 7, 5, 3), "incoming", "hidden", biases=True)
    add("plain", (1, 5, 9, 8), "outgoing", norms=False, hidden=False)
    add("plain-incoming", (1, 5, 8, 9), "incoming", "hidden", norms=False, mask=False)
    add("one-residue", (2, 1, 5, 7), "outgoing", biases=True)
    add("one-channel", (1, 3, 1, 1), "incoming", biases=True, mask=False)
    add("wide", (1, 3, 70, 33), "incoming", mask=False)
    add("long", (1, 19, 6, 8), "outgoing", "hidden", mask=True, biases=True)
    add("narrower", (1, 5, 9, 8), "outgoing", D=5, biases=True)
    add("wider", (2, 4, 8, 9), "incoming", "hidden", D=19, biases=True, hidden=False)
    add("no-residues", (1, 0, 4, 4), "outgoing", biases=True, mask=True)
    add("no-batch", (0, 3, 4, 4), "incoming", "hidden")
    return cases


#: Every case of every op.
CASES = [
    *_planarity_cases(),
    *_conv_cases(),
    *_generated_cases(),
    *_wigner_cases(),
    *_matrix_cases(),
    *_so2_cases(),
    *_gate_cases(),
    *_scatter_cases(),
    *_density_cases(),
    *_trimul_cases(),
]
