"""A few small calls of every op, with which test_contract.py tests the promises of all ops.

An `Example` makes the arguments of a call, of several sizes; a `Problem` is one such call with
cotangents of its outputs, as NumPy arrays. Access to the frame's internals is at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import fusedops
from fusedops._frame import registry
from fusedops._frame.kinds import forget_plans
from fusedops.samples import atoms_in, convolved, cubes, pair, protein
from fusedops.testing import CASES, TOLERANCE, error
from fusedops.wigner import m_major_order, wigner_d
from fusedops.wigner.rows import function_rows, message_rows
from places import EXACT, HAS_TORCH

if HAS_TORCH:
    import torch


@dataclass(frozen=True)
class Example:
    """A kind of call.

    `make` returns the arguments by name, floats in float64, of a size: `tiny` for derivatives of
    higher order, `small` for most tests, `medium` for more than one block of a kernel, `large` for
    several threads, and `others`, which share numbers that `torch.compile` may take for constants.
    Only `leaves` have a gradient. Where `exact` is False, results depend on layout and threads, by
    roundings. Derivatives of a `slow` example are checked along random directions alone. Optional
    arrays that are `needed` fit the others, which fewer of them would not.
    """

    name: str
    op: Any
    make: Callable[..., dict[str, Any]]
    leaves: tuple[str, ...]
    tiny: tuple[int, ...]
    small: tuple[int, ...]
    medium: tuple[int, ...]
    large: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    exact: bool = True
    terms: int = 64
    slow: bool = False
    needed: tuple[str, ...] = ()

    def problem(self, size: str = "small", dtype: str = "float64") -> Problem:
        return self.of(getattr(self, size), dtype)

    def of(self, size: tuple[int, ...], dtype: str = "float64") -> Problem:
        cotangents = cotangents_of(self.op, self.make, size)
        return Problem(self, made(self.make, size), cotangents).astype(dtype)

    @property
    def takes_out(self) -> bool:
        return "out" in inspect.signature(self.op).parameters

    @property
    def floats(self) -> tuple[str, ...]:
        """The arguments that are arrays of floats; a cell's numbers are those of a lattice."""
        arguments = made(self.make, self.tiny)
        return tuple(
            name
            for name, value in arguments.items()
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and name != "cell"
        )

    @property
    def optional(self) -> tuple[str, ...]:
        """The leaves that may be left out."""
        may = [n for n in self.leaves if self.op.declared[n].optional]
        return tuple(n for n in may if n not in self.needed)

    def __str__(self) -> str:
        return self.name


def made(make: Callable[..., dict[str, Any]], size: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of a size; packed ones are new, because calls leave caches in them."""
    return make(np.random.default_rng(0), *size)


@functools.cache
def cotangents_of(op: Any, make: Any, size: tuple[int, ...]) -> tuple[Any, ...]:
    """Return random arrays of the shapes of the reference's outputs."""
    rng = np.random.default_rng(1)
    outs = tuple_of(op(**made(make, size), backend="numpy"))
    return tuple(rng.normal(size=np.shape(out)) for out in outs)


@dataclass(frozen=True)
class Problem:
    """A call's arguments by name, as NumPy arrays, and the cotangents of its outputs."""

    example: Example
    arguments: dict[str, Any]
    cotangents: tuple[Any, ...]

    @property
    def op(self) -> Any:
        return self.example.op

    @property
    def leaves(self) -> list[str]:
        return [n for n in self.example.leaves if self.arguments.get(n) is not None]

    def but(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, arguments={**self.arguments, **changes})

    def floats_mapped(self, function: Callable[[Any], Any]) -> Problem:
        """Return the problem with a function applied to every array of floats."""
        names = self.example.floats
        arguments = {n: function(a) if n in names else a for n, a in self.arguments.items()}
        return Problem(self.example, arguments, tuple(map(function, self.cotangents)))

    def mapped(self, function: Callable[[Any], Any]) -> Problem:
        """Return the problem with a function applied to every array."""
        arguments = {
            n: function(a) if isinstance(a, np.ndarray) else a for n, a in self.arguments.items()
        }
        return Problem(self.example, arguments, tuple(map(function, self.cotangents)))

    def astype(self, dtype: str) -> Problem:
        return self.floats_mapped(lambda a: np.array(a, dtype))

    def of_ones(self) -> Problem:
        """Return the problem with cotangents of ones."""
        cotangents = tuple(np.ones_like(c) for c in self.cotangents)
        return dataclasses.replace(self, cotangents=cotangents)


def planarity(rng: Any, residues: int, *, sigmas: str, fit: str) -> dict[str, Any]:
    xyz, indices = protein(residues, rng, noise=0.2)
    if residues == 1:
        # Rings have many atoms, which make derivatives along every coordinate slow.
        xyz, indices = xyz[:9], indices[:2]
    groups = [
        (i, np.full(len(i), 0.5) if sigmas == "plane" else rng.uniform(0.3, 0.6, i.shape))
        for i in indices
    ]
    return {"xyz": xyz, "plane_groups": fusedops.Planes(groups), "fit": fit}


def convolution(
    rng: Any, B: int, T: int, D: int, W: int, *, static: bool = False
) -> dict[str, Any]:
    return {
        "x": rng.normal(size=(B, T, D)),
        "kernels": rng.normal(size=(D, W) if static else (B, T, D, W)),
        "initial_state": rng.normal(size=(B, D, W)),
        "bias": rng.normal(size=D),
        "residual": rng.normal(size=(B, T, D)),
        "output_final_state": True,
        "activation": "silu",
    }


def packed_convolution(
    rng: Any, S: int, T: int, D: int, W: int, *, static: bool = False, raw: bool = False
) -> dict[str, Any]:
    """S sequences, of which the first is empty."""
    cu_seqlens = np.sort(np.concatenate([[0, 0, T], rng.integers(0, T + 1, S - 2)]))
    return {
        "x": rng.normal(size=(1, T, D)),
        "kernels": rng.normal(size=(D, W) if static else (1, T, D, W)),
        "initial_state": rng.normal(size=(S, D, W)),
        "bias": rng.normal(size=D),
        "cu_seqlens": cu_seqlens if raw else fusedops.Sequences(cu_seqlens),
        "activation": "silu" if static else None,
    }


def generated(
    rng: Any, B: int, T: int, D: int, W: int, H: int, *, packed: bool = False
) -> dict[str, Any]:
    """A convolution of B sequences with generated kernels, or of B packed in T tokens."""
    given: dict[str, Any] = {"output_final_state": True, "activation": "silu"}
    count = B
    if packed:
        cu_seqlens = np.sort(np.concatenate([[0, 0, T], rng.integers(0, T + 1, B - 2)]))
        given, B = {"cu_seqlens": fusedops.Sequences(cu_seqlens)}, 1
    return {
        "x": rng.normal(size=(B, T, D)),
        "hidden": rng.normal(size=(B, T, H)),
        "weight": rng.normal(size=(D * W, H)),
        "bias": rng.normal(size=D * W),
        "initial_state": rng.normal(size=(count, D, W)),
        "conv_bias": rng.normal(size=D),
        **given,
    }


def rotation(
    rng: Any,
    nodes: int,
    edges: int,
    lmax: int,
    C: int,
    *,
    way: str,
    packed: bool = False,
    transpose: bool = False,
    scaled: bool = False,
    raw: bool = False,
) -> dict[str, Any]:
    """Features of nodes or edges; the last node has no edge."""
    ends = rng.integers(0, nodes - 1, (2, edges))
    rows, mmax = (lmax + 1) ** 2, 0 if way == "degree" else lmax - packed
    shape = (edges, rows, rows)
    matrices = rng.normal(size=shape) / np.sqrt(2 * lmax + 1)
    if packed:
        l = np.floor(np.sqrt(np.arange(rows)))
        matrices = matrices[:, l[:, None] == l]
    shapes = {
        "x": (nodes, rows, C),
        "message": (edges, len(m_major_order(lmax, mmax)), C),
        "radial": (edges, lmax + 1, C),
    }
    names = {"forth": ("x",), "back": ("message",), "own": ("message",), "degree": ("x", "radial")}
    arguments = {name: rng.normal(size=shapes[name]) for name in names[way]}
    if way != "own":
        arguments["edge_index"] = ends if raw else fusedops.Edges(ends, nodes)
    arguments["wigner" if way == "forth" else "wigner_inv"] = matrices
    if scaled:
        functions = function_rows(lmax, mmax)
        arguments["radial"] = rng.normal(size=(edges, 2 * functions * C))
    if way == "degree":
        arguments["rescale_factor"] = 2.5
    else:
        arguments["mmax"] = mmax
    if raw and way == "back":
        arguments["num_nodes"] = nodes
    if transpose:
        arguments["transpose"] = True
    return arguments


def directions(rng: Any, edges: int, lmax: int, *, packed: bool) -> dict[str, Any]:
    return {"edge_vec": rng.normal(size=(edges, 3)), "lmax": lmax, "packed": packed}


def messages(
    rng: Any, edges: int, lmax: int, mmax: int, C: int, D: int, *, gates: int, bare: bool = False
) -> dict[str, Any]:
    given = convolved(rng, edges, lmax, mmax, C, D, gates, radial=not bare, bias=not bare)
    return {**given, "gate_channels": gates}


def gated(
    rng: Any, edges: int, lmax: int, mmax: int, C: int, *, layout: str = "m"
) -> dict[str, Any]:
    shapes = {"gates": (edges, lmax * C), "x": (edges, message_rows(lmax, mmax), C)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {**arrays, "mmax": mmax, "layout": layout}


def scattered(
    rng: Any, C: int, nx: int, ny: int, nz: int, n: int, *, back: bool = False, raw: bool = False
) -> dict[str, Any]:
    """Cubes of a periodic grid n³ that overlap; raw ones lie anywhere in the map."""
    size = n**3
    if raw:
        wa, wbwc = rng.integers(-9, size // 2, (C, nx)), rng.integers(9, size // 2, (C, ny, nz))
    else:
        wa, wbwc = cubes(rng, C, (n, n, n), (nx, ny, nz))
    values = (
        {"grid": rng.normal(size=size)}
        if back
        else {"density_cube": rng.normal(size=(C, nx, ny, nz))}
    )
    if not raw:
        return {**values, "wa": fusedops.ScatterPlan(wa, wbwc, size)}
    return {**values, "wa": wa, "wbwc": wbwc, **({} if back else {"map_size": size})}


def drawn(rng: Any, count: int, n: int, *, anisotropic: bool, raw: bool = False) -> dict[str, Any]:
    """Atoms in and around a triclinic cell of n³ voxels."""
    cell = np.array([[6.0, 2.0, -3.0], [0.0, 5.0, 2.0], [0.0, 0.0, 5.0]]) * n / 7
    shape = (n + 1, n, n - 1)
    names = ("xyz", "b", "occupancy", "amplitudes", "widths")
    return {
        **dict(zip(names, atoms_in(cell, count, rng, anisotropic=anisotropic), strict=True)),
        **({"cell": cell, "grid_shape": shape} if raw else {"cell": fusedops.Lattice(cell, shape)}),
        "radius": rng.uniform(1.5, 2.1, count),
        "on_bad": "skip",
    }


def update(rng: Any, B: int, N: int, C: int, H: int, **options: Any) -> dict[str, Any]:
    given = {k: options.pop(k) for k in ("direction", "gate") if k in options}
    arrays = pair(B, N, C, H, rng, gate=given["gate"], **options)
    return {**{name: a for name, a in arrays.items() if a is not None}, **given}


def _example(name: str, op: Any, make: Any, *leaves: str, **options: Any) -> Example:
    return Example(name, op, make, leaves, **options)


def _rotation(name: str, op: Any, *leaves: str, **options: Any) -> Example:
    return _example(
        name,
        op,
        functools.partial(rotation, **options),
        *leaves,
        tiny=(3, 2, 1, 1),
        small=(6, 7, 2, 3),
        medium=(6, 7, 3, 5),
        large=(91, 500, 2, 19),
        others=((7, 20, 2, 4), (11, 37, 2, 4), (30, 64, 2, 4)),
    )


def _scatter(name: str, op: Any, leaf: str, **options: Any) -> Example:
    return _example(
        name,
        op,
        functools.partial(scattered, **options),
        leaf,
        tiny=(2, 2, 1, 3, 3),
        small=(3, 2, 3, 5, 5),
        medium=(5, 3, 4, 6, 5),
        # A map of several parts, with many cubes in each.
        large=(90, 5, 6, 19, 104),
        others=((5, 3, 4, 6, 5), (8, 5, 7, 9, 7), (4, 3, 4, 6, 9)),
    )


def _density(name: str, *leaves: str, **options: Any) -> Example:
    return _example(
        name,
        fusedops.gaussian_density,
        functools.partial(drawn, **options),
        *("xyz", "b", "occupancy", *leaves),
        tiny=(2, 5),
        small=(4, 7),
        medium=(4, 7),
        large=(60, 40),
        others=((12, 7), (17, 9), (8, 6)),
        # Gradients cancel.
        terms=4000,
        slow=True,
    )


_NORMS = ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")
_WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")


def _triangle(name: str, leaves: tuple[str, ...], **options: Any) -> Example:
    op = fusedops.triangle_multiplicative_update
    return _example(
        name,
        op,
        functools.partial(update, **options),
        *(n for n in inspect.signature(op).parameters if n in leaves),
        tiny=(1, 3, 4, 3),
        small=(2, 5, 6, 7),
        medium=(2, 5, 6, 7),
        large=(1, 33, 17, 16),
        others=((2, 9, 6, 7), (3, 11, 6, 7), (5, 4, 6, 7)),
        exact=False,
        # Products of few channels, and two LayerNorms.
        terms=8192,
        slow=True,
    )


EXAMPLES = [
    *(
        _example(
            f"planarity-{fit}",
            fusedops.planarity_nll,
            functools.partial(planarity, sigmas=sigmas, fit=fit),
            "xyz",
            tiny=(1,),
            small=(8,),
            medium=(24,),
            large=(800,),
            # Sizes that are equal by chance would be one to the compiler.
            others=((10,), (12,), (17,)),
        )
        for sigmas, fit in (("plane", "uniform"), ("atom", "weighted"))
    ),
    *(
        _example(
            f"conv{suffix}",
            fusedops.dynamic_conv,
            functools.partial(convolution, static=bool(suffix)),
            *("x", "kernels", "initial_state", "bias", "residual"),
            tiny=(1, 3, 2, 2),
            small=(2, 5, 3, 4),
            medium=(2, 70, 5, 3),
            large=(3, 400, 40, 4),
            others=((2, 9, 3, 4), (2, 12, 3, 4), (2, 17, 3, 4)),
        )
        for suffix in ("", "-static")
    ),
    *(
        _example(
            f"conv-packed{suffix}",
            fusedops.dynamic_conv,
            functools.partial(packed_convolution, static=bool(suffix)),
            *("x", "kernels", "initial_state", "bias"),
            tiny=(3, 4, 2, 2),
            small=(3, 7, 3, 4),
            medium=(4, 140, 5, 3),
            large=(18, 1800, 40, 4),
            # torch.compile would keep equal sizes equal, so the first ones differ.
            others=((4, 467, 11, 3), (6, 14, 11, 3), (5, 76, 11, 3)),
        )
        for suffix in ("", "-static")
    ),
    *(
        _example(
            f"generated{suffix}",
            fusedops.dynamic_conv_generated,
            functools.partial(generated, packed=bool(suffix)),
            *("x", "hidden", "weight", "bias", "initial_state", "conv_bias"),
            tiny=(3, 3, 2, 2, 2),
            small=(3, 7, 3, 4, 5),
            medium=(4, 150, 5, 3, 4),
            large=(5, 1300, 40, 4, 8),
            # torch.compile would keep equal sizes equal, so the first ones differ.
            others=((4, 467, 11, 3, 7), (6, 14, 11, 3, 7), (5, 76, 11, 3, 7)),
            exact=False,
            # Sums over tokens, and over the weight's rows.
            terms=8192,
            slow=True,
        )
        for suffix in ("", "-packed")
    ),
    _rotation("forth", fusedops.node_to_edge_wigner_permute, "x", "wigner", way="forth"),
    _rotation(
        "forth-packed",
        fusedops.node_to_edge_wigner_permute,
        *("x", "wigner"),
        way="forth",
        packed=True,
    ),
    _rotation(
        "forth-scaled",
        fusedops.node_to_edge_wigner_permute,
        *("x", "wigner", "radial"),
        way="forth",
        packed=True,
        scaled=True,
    ),
    _rotation(
        "back", fusedops.permute_wigner_inv_edge_to_node, "message", "wigner_inv", way="back"
    ),
    _rotation(
        "undo",
        fusedops.permute_wigner_inv_edge_to_node,
        *("message", "wigner_inv"),
        way="back",
        packed=True,
        transpose=True,
    ),
    _rotation("own", fusedops.permute_wigner_inv, "message", "wigner_inv", way="own"),
    _rotation(
        "degree",
        fusedops.edge_degree_scatter,
        *("x", "radial", "wigner_inv"),
        way="degree",
        packed=True,
    ),
    *(
        _example(
            f"matrices-{layout}",
            wigner_d,
            functools.partial(directions, packed=layout == "packed"),
            "edge_vec",
            tiny=(2, 1),
            small=(7, 2),
            medium=(7, 3),
            large=(500, 2),
            others=((20, 2), (37, 2), (50, 2)),
        )
        for layout in ("dense", "packed")
    ),
    *(
        _example(
            f"so2{suffix}",
            fusedops.so2_convolution,
            functools.partial(messages, gates=gates, bare=bool(suffix)),
            *("message", "weight_m0", "weight_m1"),
            *(() if suffix else ("bias", "radial")),
            tiny=(2, 1, 1, 1, 2),
            small=(7, 2, 1, 3, 4),
            medium=(300, 1, 1, 2, 3),
            large=(1500, 2, 1, 16, 8),
            others=((20, 2, 1, 3, 4), (37, 2, 1, 3, 4), (50, 2, 1, 3, 4)),
            exact=False,
            # Sums over edges.
            terms=4096,
            slow=True,
            needed=("weight_m1",),
        )
        for suffix, gates in (("", 2), ("-bare", 0))
    ),
    *(
        _example(
            f"gates-{layout}",
            fusedops.gate_activation,
            functools.partial(gated, layout=layout),
            *("gates", "x"),
            tiny=(2, 1, 1, 2),
            small=(7, 2, 1, 3),
            medium=(7, 3, 2, 70),
            large=(900, 2, 2, 40),
            others=((20, 2, 1, 3), (37, 2, 1, 3), (50, 2, 1, 3)),
            # Torch rounds the σ of a strided tensor otherwise.
            exact=False,
        )
        for layout in ("m", "l")
    ),
    _scatter("scatter", fusedops.structured_scatter_add, "density_cube"),
    _scatter("gather", fusedops.structured_gather, "grid", back=True),
    _density("density-iso", anisotropic=False),
    _density("density-aniso", "amplitudes", "widths", anisotropic=True),
    _triangle(
        "triangle",
        ("x", "mask", *_NORMS, *_WEIGHTS, *(w.replace("weight", "bias") for w in _WEIGHTS)),
        direction="outgoing",
        gate="output",
        mask=False,
        biases=True,
    ),
    _triangle("triangle-hidden", ("x", *_NORMS, *_WEIGHTS), direction="incoming", gate="hidden"),
]
#: Examples with indices, sequences and cells that every call reads anew.
UNPACKED = [
    dataclasses.replace(
        next(e for e in EXAMPLES if e.name == name),
        name=f"{name}-raw",
        make=functools.partial(make, raw=True),
    )
    for name, make in (
        ("conv-packed", packed_convolution),
        ("forth", functools.partial(rotation, way="forth")),
        ("back", functools.partial(rotation, way="back")),
        ("scatter", scattered),
        ("gather", functools.partial(scattered, back=True)),
        ("density-iso", functools.partial(drawn, anisotropic=False)),
    )
]


def tensor(array: Any) -> Any:
    """Return a tensor that shares an array's memory; for a number, a new tensor."""
    array = np.asarray(array)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def as_framework(framework: str, p: Problem) -> dict[str, Any]:
    """Return a problem's arguments, as tensors if need be."""
    if framework == "numpy":
        return dict(p.arguments)
    return {n: tensor(a) if isinstance(a, np.ndarray) else a for n, a in p.arguments.items()}


def leaves_of(p: Problem) -> list[Any]:
    return [tensor(p.arguments[name].copy()).requires_grad_() for name in p.leaves]


def function_of(p: Problem, backend: str | None = None, **options: Any) -> Callable[..., Any]:
    """Return the call as a function of the tensors that have a gradient."""
    arguments = as_framework("torch", p)

    def function(*leaves: Any, **more: Any) -> Any:
        given = {**arguments, **dict(zip(p.leaves, leaves, strict=True)), **options, **more}
        return p.op(**given, backend=backend)

    return function


def tuple_of(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def evaluate(place: tuple[str, str | None], p: Problem, **options: Any) -> list[np.ndarray]:
    """Return the outputs, as arrays."""
    out = p.op(**as_framework(place[0], p), **options, backend=place[1])
    return [np.asarray(one) for one in tuple_of(out)]


def solve(place: tuple[str, str | None], p: Problem) -> list[np.ndarray]:
    """Return the outputs and the gradients of the leaves, as arrays."""
    framework, backend = place
    if framework == "numpy":
        out, pullback = p.op.vjp(**p.arguments, wrt=p.leaves, backend=backend)
        return [np.asarray(a) for a in (*tuple_of(out), *pullback(*p.cotangents))]
    leaves = [tensor(p.arguments[name]).requires_grad_() for name in p.leaves]
    outs = tuple_of(function_of(p, backend)(*leaves))
    gradients = torch.autograd.grad(outs, leaves, tuple(map(tensor, p.cotangents)))
    return [a.detach().numpy() for a in (*outs, *gradients)]


def total(p: Problem, backend: str | None = None) -> Callable[..., Any]:
    """Return a number as a function of the leaves, such that no derivative is constant."""
    function, weights = function_of(p, backend), list(map(tensor, p.cotangents))

    def weighted(*leaves: Any) -> Any:
        # The squares alone of an orthogonal matrix have a constant sum.
        outs = tuple_of(function(*leaves))
        return sum((out.square() * w).sum() for out, w in zip(outs, weights, strict=True))

    return weighted


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got, want, strict=True)


def close(p: Problem, got: Any, want: Any, times: float = 1.0) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    allowed = TOLERANCE[str(got.dtype)] * max(1.0, p.example.terms**0.5 / 8)
    assert error(got, want) <= times * allowed


def agree(p: Problem, backend: str | None, got: Any, want: Any) -> None:
    """Compare bit for bit where the backend's order of operations is always the same."""
    if p.example.exact and backend in EXACT:
        same(got, want)
    else:
        close(p, got, want)


def all_agree(p: Problem, backend: str | None, got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        agree(p, backend, one, other)


# Access to the frame's internals.


def of_primitives(*names: str) -> list[Any]:
    """Return the cases of all primitives that have any, by name."""
    return [case for case in CASES if case.name in names]


def registered(case: Any, backend: str = "", dtype: Any = None, layout: Any = None) -> Any:
    """Return a registered operator, and its arguments for a case."""
    from fusedops._frame.bridge.graphs import _take_apart

    primitive, (arrays, others) = case.primitive, case.make()
    count = len(primitive.constants)
    tensors = [
        None if a is None else torch.tensor(a, dtype=dtype) for a in (*arrays, *others[:count])
    ]
    if layout is not None:
        tensors = [None if a is None else layout(a) for a in tensors]
    if primitive.pullback is not None:
        for leaf in tensors[: len(arrays)]:
            if leaf is not None:
                leaf.requires_grad_()
    operator = getattr(torch.ops.fusedops, primitive.name).default
    flat = _take_apart(primitive, others[count:])
    return operator, (*tensors, *flat, list(primitive.all), backend)


@contextlib.contextmanager
def requests(monkeypatch: Any) -> Iterator[list[tuple[str, str | None]]]:
    """List the primitive and the requested backend of every choice of a backend."""
    asked: list[tuple[str, str | None]] = []
    genuine = registry.choose

    def watched(request: Any) -> Any:
        asked.append((request.op, request.forced))
        return genuine(request)

    # A plan keeps its backend, and would skip the choice.
    forget_plans()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "choose", watched)
        yield asked
    forget_plans()


def taken_apart(packed: Any) -> Any:
    """Return a packed argument made of the tensors of another."""
    return type(packed).from_tensors(packed.tensors_here(), packed.sizes())


def capture(run):
    """Return a CUDA graph of a function's work, and the results that it computes."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
