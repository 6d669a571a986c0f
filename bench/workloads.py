"""Calls of every op as real programs make them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import fusedops
from fusedops import samples
from fusedops._catalogue import BOTH, FORWARD, Call, Steps, tolerance
from fusedops._frame import registry
from fusedops._frame.check import is_tensor, reference
from fusedops._frame.op import Op
from fusedops._frame.packed import Packed
from fusedops.density import atom_radius
from fusedops.testing import errors_of
from fusedops.trimul.op import ARRAYS
from fusedops.wigner import wigner_d
from fusedops.wigner.rows import message_rows

BACKWARD = "backward"

#: The name of calls on the CPU so small that their time is the host's.
CALL = "a call"


@dataclass(frozen=True)
class Work:
    """The least work of a pass: bytes moved, floating-point operations, exponentials."""

    bytes: float
    flops: float = 0.0
    exps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.exps + other.exps)


@dataclass(frozen=True)
class Problem(Call):
    """A call of an op, with the work that it is.

    Parameters
    ----------
    op : Op
    arguments : dict
        By name, in the order of the signature.
    leaves : tuple of str
        Arguments with gradients, in the order in which a pullback returns them.
    shape : dict of str to int
        The sizes that a table shows.
    work : dict of str to Work
        By pass.
    wide : frozenset of str
        Arguments that stay float32 where the others have 16 bits.
    raw : dict
        Further values that peers need.
    preparations : dict of str to callable
        Steps that a program does once for many calls.
    """

    op: Op
    arguments: dict[str, Any]
    leaves: tuple[str, ...]
    shape: dict[str, int]
    work: dict[str, Work]
    wide: frozenset[str] = frozenset()
    raw: dict[str, Any] = field(default_factory=dict)
    preparations: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def cotangent(self) -> Any:
        """Return random numbers like the value, without computing the value."""
        primitive = self.op.primitive
        a, shown = self._bound()
        shape, dtype = primitive.describe(a)[primitive.outputs.index(shown)]
        first = reference(a)
        if is_tensor(first):
            import torch

            torch.manual_seed(1)
            return torch.randn(tuple(shape), device=first.device, dtype=dtype)
        return np.random.default_rng(1).standard_normal(shape).astype(dtype)[()]

    def backward(self, backend: str | None, cotangent: Any) -> Callable[[], tuple[Any, ...]]:
        """Return a function that computes the gradients alone, after a forward pass made here."""
        primitive = self.op.primitive
        a, shown = self._bound()
        wanted = [
            None if array is None or name in self.op.by_request else True
            for name, array in zip(primitive.arrays, a, strict=False)
        ]
        dy = [cotangent if name == shown else None for name in primitive.outputs]
        out = [True if name == shown else None for name in primitive.outputs]

        def results() -> Any:
            with registry.asking(backend):
                return primitive(*a, out=primitive.with_saved(out))

        def step() -> tuple[Any, ...]:
            with registry.asking(backend):
                found = primitive.pulled_back(a, y, dy, wanted)
            return tuple(dx for dx, want in zip(found, wanted, strict=True) if want)

        if self.framework == "torch":
            import torch

            results, step = torch.no_grad()(results), torch.no_grad()(step)
        y = results()
        return step

    def _bound(self) -> tuple[Any, str]:
        """Return the primitive's arguments, and the output that is shown."""
        bound = self.op.bound(**self.arguments)
        return bound.a, bound.shown[0]


class Source:
    """Random numbers and arrays for a problem: NumPy's, or torch's on a GPU."""

    def __init__(self, dtype: str = "float64", device: str = "cpu") -> None:
        self.rng = np.random.default_rng(0)
        self.dtype, self.device = dtype, device
        self.wide = "float32" if dtype in ("bfloat16", "float16") else dtype
        if device != "cpu":
            import torch

            self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, wide: bool = False) -> Any:
        """Return normal numbers, in float32 at least if `wide`."""
        dtype = self.wide if wide or self.device == "cpu" else self.dtype
        numbers: Any
        if self.device == "cpu":
            numbers = self.rng.standard_normal(shape, np.dtype(dtype))
            numbers *= scale
            return numbers
        import torch

        kind = getattr(torch, dtype)
        numbers = torch.randn(shape, generator=self.generator, device=self.device, dtype=kind)
        return numbers.mul_(scale)

    def bytes(self, *arrays: Any, wide: bool = False) -> int:
        """Return how many bytes arrays have in the dtype; if `wide`, in float32 at least."""
        itemsize = 2 if self.wide != self.dtype and not wide else np.dtype(self.wide).itemsize
        return itemsize * sum(math.prod(array.shape) for array in arrays)

    def here(self, value: Any) -> Any:
        """Return an array, floats in the problem's dtype, or a packed argument, on its device."""
        if isinstance(value, Packed):
            return value if self.device == "cpu" else value.to(self.device)
        if value.dtype.kind == "i":
            if self.device == "cpu":
                return value
            import torch

            return torch.tensor(value, device=self.device)
        if self.device == "cpu":
            return np.ascontiguousarray(value, self.wide)
        import torch

        return torch.tensor(value, device=self.device, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class Workload:
    """A kind of problem, of one size and in one dtype.

    `make` returns a problem of a size, counted in `unit`; a problem of size `small` has a
    reference that takes no more than a moment. Errors are held to the tolerance of `rounds_to`, the
    dtype if None, for as many `terms` as the value and gradients add up. A workload `needs`
    packages. A `tiny` workload, of one thread, is so small that the time of a call is the host's.
    """

    op: Op
    name: str
    make: Callable[[Source, int], Problem]
    size: int
    unit: str
    small: int
    device: str
    dtype: str = "float32"
    rounds_to: str | None = None
    terms: tuple[int, int] = (0, 0)
    threads: int | None = None
    quick: bool = False
    needs: tuple[str, ...] = ()
    prepares: bool = False
    tiny: bool = False

    @property
    def times_host(self) -> bool:
        """Whether the host's own time with a call is measured."""
        return self.tiny or self.device != "cpu"

    def at(self, size: int) -> Workload:
        return replace(self, size=size)

    def problem(self) -> Problem:
        """Return the problem: tensors on a GPU, NumPy arrays of 32 bits or more on the CPU."""
        return self.make(Source(self.dtype, self.device), self.size)

    def tolerance(self, backward: bool, dtype: str | None = None) -> float:
        return tolerance(self.terms[backward], self.rounds_to or dtype or self.dtype)


def errors(
    workload: Workload,
    steps: Callable[[Problem, Any], Steps],
    framework: str,
    dtype: str | None = None,
) -> dict[str, float]:
    """Return the errors of the value and of gradients against the reference, relative.

    Parameters
    ----------
    workload : Workload
        Of the size to check.
    steps : callable
        From a problem in `framework` and a cotangent to functions that compute its passes.
    framework : {"numpy", "torch"}
        The framework of the problem's arrays.
    dtype : str, optional
        Replaces the workload's.
    """
    exact = workload.make(Source(), workload.size)
    cotangent: Any = exact.rounded().cotangent() if exact.leaves else None
    dtype = dtype or workload.dtype
    given = exact.astype(dtype) if framework == "numpy" else exact.to(workload.device, dtype)
    if cotangent is not None and framework == "numpy":
        cotangent = np.asarray(cotangent, dtype)[()]
    elif cotangent is not None:
        import torch

        cotangent = torch.tensor(cotangent).to(given.cotangent())
    return errors_of(exact, given, cotangent, steps)


def _planarity(source: Source, planes: int, *, listed: bool = False) -> Problem:
    """Peptides and side chains of a protein, all of sigma 0.02 Å."""
    xyz, indices = samples.protein(max(1, round(planes / 1.4375)), np.random.default_rng(planes))
    groups = [(index, np.full(len(index), 0.02)) for index in indices]
    packed = fusedops.Planes(groups)
    entries, count = packed.num_entries, packed.num_planes
    # Bytes: coordinates and gradient; indices, weights and the planes' offsets. Operations:
    # centroid, covariance and distances, the eigenproblem, and the gradient.
    coordinates = source.bytes(xyz)
    laid_out = 4 * entries + 12 * count
    forward = Work(coordinates + laid_out, 26 * entries + 60 * count)
    work = {
        FORWARD: forward,
        BACKWARD: Work(2 * coordinates, xyz.size),
        BOTH: Work(2 * coordinates + laid_out, forward.flops + 8 * entries),
    }
    given = groups if listed else source.here(packed)
    arguments = {"xyz": source.here(xyz), "plane_groups": given}
    shape = {"planes": count, "atoms": len(xyz)}
    raw = {"groups": groups}
    return Problem(fusedops.planarity_nll, arguments, ("xyz",), shape, work, raw=raw)


def _geometry(source: Source, residues: int) -> Problem:
    """A backbone with restraints of all kinds, of which two in three are contacts."""
    xyz, columns = samples.backbone(residues, np.random.default_rng(residues))
    packed = fusedops.Restraints(**columns)
    b = np.random.default_rng(0).uniform(5, 50, len(xyz))
    restraints, entries = sum(packed.counts), packed.index.size
    # Bytes: coordinates and B, and gradients; indices, ideals and weights. Operations: of a length,
    # an angle, a torsion, a volume, and an image's place; a third more for the gradient.
    atoms = source.bytes(xyz, b)
    laid_out = 4 * entries + 16 * restraints
    terms = zip(packed.counts, (12, 30, 60, 30, 30, 4), strict=True)
    flops = sum(count * of for count, of in terms)
    forward = Work(atoms + laid_out, flops)
    backward = Work(2 * atoms + laid_out, 2 * flops)
    arguments = {"xyz": source.here(xyz), "restraints": source.here(packed), "b": source.here(b)}
    shape = {"restraints": restraints, "atoms": len(xyz)}
    raw = {"restraints": columns}
    work = _work(forward, backward)
    return Problem(fusedops.geometry_nll, arguments, ("xyz", "b"), shape, work, raw=raw)


def _work(forward: Work, backward: Work | None = None) -> dict[str, Work]:
    """Return the work by pass, where the pass of both is their sum."""
    if backward is None:
        return {FORWARD: forward}
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}


def _conv(
    source: Source,
    tokens: int,
    *,
    batch: int,
    channels: int,
    width: int,
    silu: bool = False,
    static: bool = False,
) -> Problem:
    """A convolution with kernels by token and channel, or static ones, by channel.

    An activation's operations don't count.
    """
    x = source.normal(batch, tokens, channels)
    tokens_of_kernels = () if static else (batch, tokens)
    kernels = source.normal(*tokens_of_kernels, channels, width, scale=width**-0.5)
    products = 2 * width * math.prod(x.shape)
    taps = source.bytes(kernels)
    work = _work(
        Work(2 * source.bytes(x) + taps, products),
        Work(3 * source.bytes(x) + 2 * taps, 2 * products),
    )
    arguments = {"x": x, "kernels": kernels, "activation": "silu" if silu else None}
    shape = {"B": batch, "T": tokens, "D": channels, "W": width}
    leaves, raw = ("x", "kernels"), {"static": static}
    return Problem(fusedops.dynamic_conv, arguments, leaves, shape, work, raw=raw)


def _generated(source: Source, tokens: int, *, batch: int, channels: int, hidden: int) -> Problem:
    """A convolution of four taps that a linear layer makes, with SiLU, and all gradients."""
    width = 4
    x, inputs = source.normal(batch, tokens, channels), source.normal(batch, tokens, hidden)
    arguments = {
        "x": x,
        "hidden": inputs,
        "weight": source.normal(channels * width, hidden, scale=(width * hidden) ** -0.5),
        "bias": source.normal(channels * width, scale=width**-0.5),
    }
    leaves = tuple(arguments)
    read, out = source.bytes(*arguments.values()), source.bytes(x)
    products = 2 * batch * tokens * channels * width * hidden
    # A backward that stores no kernels makes them again.
    work = _work(Work(read + out, products), Work(2 * read + out, 3 * products))
    shape = {"B": batch, "T": tokens, "D": channels, "W": width, "H": hidden}
    op = fusedops.dynamic_conv_generated
    return Problem(op, arguments | {"activation": "silu"}, leaves, shape, work)


def _step(source: Source, batch: int, *, channels: int, width: int, paged: bool = False) -> Problem:
    """A step by one token of every sequence, with states updated in place.

    Paged states are half of the rows of a server's cache, at random.
    """
    x, kernels = source.normal(batch, channels), source.normal(batch, channels, width)
    arguments = {"x": x, "state": source.normal(batch, channels, width), "kernels": kernels}
    if paged:
        arguments["state"] = source.normal(2 * batch, channels, width)
        arguments["slots"] = source.here(source.rng.permutation(2 * batch)[:batch])
    work = _work(Work((2 + 3 * width) * source.bytes(x), 2 * math.prod(kernels.shape)))
    shape = {"B": batch, "D": channels, "W": width}
    return Problem(fusedops.dynamic_conv_step, arguments | {"activation": "silu"}, (), shape, work)


def _tokens(
    source: Source, lead: tuple[int, ...], heads: int, keys: int, values: int
) -> dict[str, Any]:
    """Return queries, keys of length 1, values, gates and strengths of tokens."""
    q, k = (source.normal(*lead, heads, keys, scale=keys**-0.5) for _ in range(2))
    k /= (k * k).sum(-1)[..., None] ** 0.5
    v = source.normal(*lead, heads, values)
    # Gates and strengths stay in float32, as models make them.
    g, beta = (source.normal(*lead, heads, wide=True) for _ in range(2))
    return {"q": q, "k": k, "v": v, "g": -abs(g), "beta": 1 / (1 + 2**beta)}


def _delta(
    source: Source, tokens: int, *, batch: int, heads: int, keys: int, values: int
) -> Problem:
    """Linear attention by the gated delta rule."""
    arguments = _tokens(source, (batch, tokens), heads, keys, values)
    leaves = tuple(arguments)
    read, out = source.bytes(*arguments.values()), source.bytes(arguments["v"])
    # A token takes three products of a matrix and a vector, and its gradients seven.
    products = 2 * batch * tokens * heads * keys * values
    work = _work(Work(read + out, 3 * products), Work(2 * read + out, 7 * products))
    shape = {"B": batch, "T": tokens, "H": heads, "K": keys, "V": values}
    wide = frozenset({"g", "beta"})
    return Problem(fusedops.gated_delta_rule, arguments, leaves, shape, work, wide)


def _delta_step(source: Source, batch: int, *, heads: int, keys: int, values: int) -> Problem:
    """A step by one token of every sequence, with states of float32 updated in place."""
    arguments = _tokens(source, (batch,), heads, keys, values)
    arguments["state"] = source.normal(batch, heads, keys, values, wide=True)
    moved = 2 * source.bytes(arguments["state"], wide=True)
    work = _work(Work(moved, 6 * batch * heads * keys * values))
    shape = {"B": batch, "H": heads, "K": keys, "V": values}
    op, wide = fusedops.gated_delta_rule_step, frozenset({"g", "beta", "state"})
    return Problem(op, arguments, (), shape, work, wide)


def _edges(
    op: Op,
    source: Source,
    count: int,
    *,
    lmax: int = 2,
    per_node: int = 30,
    channels: int = 128,
    packed: bool = False,
) -> Problem:
    """Random edges with matrices of random directions."""
    nodes = max(2, count // per_node)
    index = source.rng.integers(0, nodes, (2, count))
    edges = source.here(fusedops.Edges(index, nodes))
    vectors = source.normal(count, 3, wide=True)
    wigner = wigner_d(vectors, lmax, packed=packed)
    rows, orders = (lmax + 1) ** 2, message_rows(lmax, lmax)
    x, message = source.normal(nodes, rows, channels), source.normal(count, orders, channels)
    radial = source.normal(count, lmax + 1, channels)
    features, turned = source.bytes(x), source.bytes(message)
    matrices = source.bytes(wigner, wide=True)
    # Only the blocks are multiplied, though dense matrices are read whole.
    products = 2 * count * channels * sum((2 * l + 1) ** 2 for l in range(lmax + 1))
    back = {"wigner_inv": wigner, "transpose": True}
    if op is fusedops.node_to_edge_wigner_permute:
        arguments = {"x": x, "edge_index": edges, "wigner": wigner}
        leaves: tuple[str, ...] = ("x", "wigner")
        work = _work(
            Work(2 * turned + matrices + features, 2 * products),
            Work(2 * turned + 2 * (matrices + features), 4 * products),
        )
    elif op is fusedops.permute_wigner_inv_edge_to_node:
        arguments = {"message": message, "edge_index": edges} | back
        leaves = "message", "wigner_inv"
        work = _work(
            Work(turned + matrices + features, products),
            Work(2 * (turned + matrices) + features, 2 * products),
        )
    elif op is fusedops.permute_wigner_inv:
        arguments = {"message": message} | back
        leaves = "message", "wigner_inv"
        work = _work(
            Work(2 * turned + matrices, products),
            Work(3 * turned + 2 * matrices, 2 * products),
        )
    else:
        arguments = {"x": x, "radial": radial, "edge_index": edges} | back
        leaves = "x", "radial", "wigner_inv"
        moved, products = source.bytes(radial), 2 * count * rows * channels
        work = _work(
            Work(moved + matrices + 2 * features, products),
            Work(2 * (moved + matrices + features), 2 * products),
        )
    shape = {"lmax": lmax, "N": nodes, "E": count, "C": channels}
    raw = {"index": index, "lmax": lmax, "nodes": nodes, "packed": packed}
    prepare: dict[str, Callable[[], Any]] = {
        "Edges": partial(fusedops.Edges, _tensor_like(index, x), nodes)
    }
    return Problem(
        op, arguments, leaves, shape, work, frozenset({"wigner", "wigner_inv"}), raw, prepare
    )


def _tensor_like(index: np.ndarray, like: Any) -> Any:
    return sys.modules["torch"].tensor(index, device=like.device) if is_tensor(like) else index


def _directions(source: Source, count: int, *, lmax: int, packed: bool = False) -> Problem:
    vectors = source.normal(count, 3)
    # Matrices are written once; the backward reads their cotangents.
    entries = sum((2 * l + 1) ** 2 for l in range(lmax + 1)) if packed else (lmax + 1) ** 4
    moved = source.bytes(vectors) * (1 + entries / 3)
    arguments = {"edge_vec": vectors, "lmax": lmax, "packed": packed}
    shape = {"lmax": lmax, "E": count}
    return Problem(wigner_d, arguments, ("edge_vec",), shape, _work(Work(moved), Work(2 * moved)))


def _messages(
    source: Source, count: int, *, lmax: int = 2, channels: int = 256, width: int = 128
) -> Problem:
    """Messages of both ends of edges, and the weights of a first SO(2) layer."""
    message, weights = source.normal(count, message_rows(lmax, lmax), channels), {}
    functions = products = 0
    for m in range(lmax + 1):
        degrees = lmax + 1 - m
        rows, inputs = (1 if m == 0 else 2) * degrees * width, degrees * channels
        scale = inputs**-0.5
        weights[f"weight_m{m}"] = source.normal(rows, inputs, scale=scale)
        # A complex product has twice the products of its weight's numbers.
        products += (1 if m == 0 else 2) * rows * inputs
        functions += degrees
    radial = source.normal(count, functions * channels)
    given = source.bytes(message, radial, *weights.values())
    made = source.bytes(message) * width // channels
    work = _work(
        Work(given + made, 2 * count * products), Work(2 * given + made, 4 * count * products)
    )
    arguments = {"message": message, **weights, "radial": radial}
    shape = {"lmax": lmax, "E": count, "C": channels, "D": width}
    return Problem(fusedops.so2_convolution, arguments, tuple(arguments), shape, work)


def _gates(source: Source, count: int, *, lmax: int = 2, channels: int = 128) -> Problem:
    gates = source.normal(count, lmax * channels)
    x = source.normal(count, message_rows(lmax, lmax), channels)
    moved, exps = source.bytes(gates), count * (lmax + 1) * channels
    work = _work(
        Work(moved + 2 * source.bytes(x), exps=exps),
        Work(2 * moved + 3 * source.bytes(x), exps=exps),
    )
    shape = {"lmax": lmax, "E": count, "C": channels}
    return Problem(fusedops.gate_activation, {"gates": gates, "x": x}, ("gates", "x"), shape, work)


def _cubes(
    op: Op,
    source: Source,
    count: int,
    *,
    voxels: float = 256**3 / 20_000,
    ordered: bool = False,
    index: str = "int64",
    planned: bool = True,
    edge: int = 17,
) -> Problem:
    """Cubes around random points of a periodic grid, along which `ordered` ones are sorted.

    The grid has `voxels` voxels for every cube.
    """
    grid = max(edge + 1, round((voxels * count) ** (1 / 3)))
    wa, wbwc = samples.cubes(source.rng, count, (grid,) * 3, (edge,) * 3)
    if ordered:
        order = np.argsort(wa[:, edge // 2] + wbwc[:, edge // 2, edge // 2])
        wa, wbwc = wa[order], wbwc[order]
    wa, wbwc, size = wa.astype(index), wbwc.astype(index), grid**3
    scatters = op is fusedops.structured_scatter_add
    values = source.normal(count, edge, edge, edge) if scatters else source.normal(size)
    inner = source.bytes(np.empty((count, edge, edge, edge), np.bool_))
    whole = source.bytes(np.empty(0).reshape(0)) + inner * size // (count * edge**3)
    # A scatter clears the map and writes it.
    add, take = Work(inner + 2 * whole, count * edge**3), Work(inner + whole)
    here = [_tensor_like(array, values) for array in (wa, wbwc)]

    def plan() -> fusedops.ScatterPlan:
        return fusedops.ScatterPlan(here[0], here[1], size, copy=False)

    places = {"wa": plan()} if planned else dict(zip(("wa", "wbwc"), here, strict=True))
    if scatters and not planned:
        places["map_size"] = size
    name = "density_cube" if scatters else "grid"
    work = _work(add, take) if scatters else _work(take, add)
    shape = {"cubes": count, "edge": edge, "map": grid}
    raw = {"wa": wa, "wbwc": wbwc, "size": size, "index": index}
    prepare = {"ScatterPlan": plan}
    return Problem(op, {name: values} | places, (name,), shape, work, raw=raw, preparations=prepare)


def _atoms(
    source: Source,
    count: int,
    *,
    anisotropic: bool = False,
    volume: float = 10.8,
    spacing: float = 0.5,
    radius: float | None = None,
    least: int = 24,
) -> Problem:
    """Atoms of five Gaussians anywhere in a cubic cell, with `volume` Å³ for each.

    Radii follow the rule unless given. A map has at least `least` voxels along an edge.
    """
    voxels = max(least, round((volume * count) ** (1 / 3) / spacing))
    cell = np.diag([spacing * voxels] * 3)
    arrays = samples.atoms_in(cell, count, np.random.default_rng(0), anisotropic=anisotropic)
    far = atom_radius(arrays[1], arrays[4]) if radius is None else np.full(count, radius)
    return _density(source, arrays, far, cell, (voxels,) * 3, {})


def _density(
    source: Source,
    arrays: Any,
    radius: np.ndarray,
    cell: np.ndarray,
    grid: tuple[int, int, int],
    raw: dict[str, Any],
) -> Problem:
    names = "xyz", "b", "occupancy", "amplitudes", "widths"
    given = {name: source.here(array) for name, array in zip(names, arrays, strict=True)}
    arguments = given | {
        "cell": source.here(fusedops.Lattice(cell, grid)),
        "radius": source.here(radius),
        "on_bad": "skip",
    }
    voxel = abs(float(np.linalg.det(cell))) / math.prod(grid)
    visits = 4 / 3 * math.pi * float((radius**3).sum()) / voxel
    gaussians = arrays[3].shape[1]
    atoms, size = source.bytes(*given.values()), source.bytes(np.empty(grid, np.bool_))
    # Each Gaussian takes an exponential for every voxel of an atom's sphere, each way; operations
    # are the distance and the sums over Gaussians.
    work = _work(
        Work(atoms + size, visits * (8 + 2 * gaussians), visits * gaussians),
        Work(2 * atoms + size, visits * (16 + 6 * gaussians), visits * gaussians),
    )
    shape = {"atoms": len(radius), "map": grid[0]}
    raw = {**raw, "cell": cell}
    return Problem(fusedops.gaussian_density, arguments, names[:3], shape, work, raw=raw)


def _crystal(source: Source, copies: int, *, spacing: float = 0.66) -> Problem:
    """Copies of ubiquitin (1ubi) in a larger cell without symmetry, on the grid that gemmi takes.

    Every atom has an isotropic B, raised to suit the voxels, and the radius that gemmi gives it
    at its cutoff of 1e-5 electrons/Å³.
    """
    import gemmi

    from fusedops.maps import scattering_atoms

    structure = samples.ubiquitin()
    for cra in structure.gemmi[0].all():
        cra.atom.aniso = gemmi.SMat33f(0, 0, 0, 0, 0, 0)
    atoms = scattering_atoms(structure)
    blur = atoms.needed_blur(spacing)
    atoms = atoms.blurred(blur)
    edges = np.array(structure.gemmi.cell.parameters[:3])
    side = math.ceil(copies ** (1 / 3))
    cuts = side, side, math.ceil(copies / side**2)
    shifts = [edges * at for at in np.ndindex(*cuts)][:copies]

    crystal = gemmi.Structure()
    crystal.spacegroup_hm = "P 1"
    crystal.cell = gemmi.UnitCell(*(edges * cuts), 90, 90, 90)
    model = gemmi.Model(1)
    for shift in shifts:
        for chain in structure.gemmi[0]:
            moved = chain.clone()
            for residue in moved:
                for atom in residue:
                    atom.pos += gemmi.Position(*shift)
            model.add_chain(moved)
    model = crystal.add_model(model)
    calculator = gemmi.DensityCalculatorX()
    calculator.rate, calculator.d_min, calculator.blur = 1.5, 3 * spacing, blur
    calculator.set_grid_cell_and_spacegroup(crystal)
    calculator.initialize_grid()
    # Atoms in the file's order, which scattering_atoms may change.
    order = np.argsort(structure._order)
    reach = np.array([calculator.estimate_radius(cra.atom) for cra in structure.gemmi[0].all()])

    xyz = np.concatenate([atoms.xyz + shift for shift in shifts])
    alike = atoms.b, atoms.occupancy, atoms.amplitudes, atoms.widths
    arrays = xyz, *(np.concatenate([array] * copies) for array in alike)
    grid = calculator.grid
    matrix = np.array(crystal.cell.orth.mat.tolist())
    raw = {"calculator": calculator, "structure": crystal}
    radius = np.concatenate([reach[order]] * copies)
    return _density(source, arrays, radius, matrix, (grid.nu, grid.nv, grid.nw), raw)


def _update(
    source: Source,
    residues: int,
    *,
    batch: int = 1,
    channels: int = 128,
    hidden: int = 128,
    gate: str = "output",
    precision: str | None = None,
    biases: bool = False,
) -> Problem:
    """An outgoing update without a mask, with norms; projections may have biases."""
    N, B, C, H = residues, batch, channels, hidden
    G = C if gate == "output" else H
    arguments = {"x": source.normal(B, N, N, C)}
    for name, n in (("norm_in", C), ("norm_out", H)):
        arguments[f"{name}_weight"] = source.normal(n, scale=0.3) + 1
        arguments[f"{name}_bias"] = source.normal(n, scale=0.3)
    for name, sides in (
        ("p_in", (2 * H, C)),
        ("g_in", (2 * H, C)),
        ("p_out", (C, H)),
        ("g_out", (G, C)),
    ):
        arguments[f"{name}_weight"] = source.normal(*sides, scale=sides[1] ** -0.5)
        if biases:
            arguments[f"{name}_bias"] = source.normal(sides[0], scale=0.3)
    rows, leaves = B * N * N, tuple(sorted(arguments, key=[*ARRAYS].index))
    # x and the output move once; left, right, o and the gate twice, in the factors' dtype.
    # A backward pass counts twice.
    x = source.bytes(arguments["x"])
    width = 2 if precision in ("fp16", "bf16") else x // max(1, math.prod(arguments["x"].shape))
    moved = 2 * x + 2 * rows * width * (3 * H + G)
    products = 2 * rows * (C * (4 * H + G) + N * H + H * C)
    work = _work(Work(moved, products), Work(2 * moved, 2 * products))
    shape = {"N": N, "B": B, "C": C, "H": H}
    options = {"gate": gate, "precision": precision}
    op = fusedops.triangle_multiplicative_update
    return Problem(op, arguments | options, leaves, shape, work)


def _attention(
    source: Source, residues: int, *, batch: int = 1, heads: int = 4, channels: int = 32
) -> Problem:
    """Triangle attention without a mask, of AlphaFold 3's heads."""
    N, B, H, D = residues, batch, heads, channels
    arguments = {name: source.normal(B, N, N, H, D) for name in "qkv"}
    arguments["bias"] = source.normal(B, H, N, N)
    edges, bias = source.bytes(arguments["q"]), source.bytes(arguments["bias"])
    # Forward two products, of queries and keys and of shares and values; backward five.
    products, logits = 2 * B * H * N**3 * D, B * H * N**3
    forward = Work(4 * edges + bias, 2 * products, logits)
    backward = Work(8 * edges + 2 * bias, 5 * products, logits)
    shape = {"N": N, "B": B, "H": H, "D": D}
    leaves, work = tuple(arguments), _work(forward, backward)
    return Problem(fusedops.triangle_attention, arguments, leaves, shape, work)


def _planarity_workloads() -> Iterator[Workload]:
    op = fusedops.planarity_nll
    cpu = Workload(op, "protein", _planarity, 1, "planes", 100, "cpu")
    for planes in (60, 500, 5_000, 100_000):
        yield replace(cpu, size=planes, quick=planes == 5_000)
    listed = replace(cpu, name="protein as a list", make=partial(_planarity, listed=True))
    for planes in (500, 5_000, 100_000):
        yield listed.at(planes)
    for planes in (60, 602, 20_200, 606_000):
        yield replace(cpu, size=planes, device="cuda", quick=planes == 20_200)


def _geometry_workloads() -> Iterator[Workload]:
    cpu = Workload(fusedops.geometry_nll, "backbone", _geometry, 1, "residues", 20, "cpu")
    for residues in (60, 600, 6_000):
        yield replace(cpu, size=residues, quick=residues == 600)
    for residues in (60, 600, 6_000, 60_000):
        yield replace(cpu, size=residues, device="cuda", quick=residues == 6_000)


def _conv_workloads() -> Iterator[Workload]:
    def jet(device: str, B: int, T: int, D: int, dtype: str, quick: bool) -> Iterator[Workload]:
        for silu in (False, True):
            make = partial(_conv, batch=B, channels=D, width=4, silu=silu)
            name = "Jet-Nemotron, SiLU" if silu else "Jet-Nemotron"
            w = Workload(fusedops.dynamic_conv, name, make, T, "tokens", 64, device, dtype)
            yield replace(w, quick=quick and not silu)

    for B, T, D in ((1, 64, 64), (1, 2048, 1024), (2, 4096, 1536)):
        for dtype in ("float32", "bfloat16"):
            yield from jet("cpu", B, T, D, dtype, T == 2048 and dtype == "float32")
    for B, T, D in ((1, 64, 64), (1, 4096, 1536), (8, 4096, 1536)):
        for dtype in ("bfloat16", "float32"):
            yield from jet("cuda", B, T, D, dtype, B == 1)
    for device, B, T, D, dtype in (
        ("cpu", 1, 2048, 1024, "float32"),
        ("cuda", 1, 4096, 3072, "bfloat16"),
        ("cuda", 8, 4096, 3072, "bfloat16"),
    ):
        make = partial(_conv, batch=B, channels=D, width=4, silu=True, static=True)
        w = Workload(fusedops.dynamic_conv, "static, SiLU", make, T, "tokens", 64, device, dtype)
        # A gradient of kernels sums over tokens.
        yield replace(w, terms=(0, 40_000), quick=device == "cuda" and B == 1)
    for device, B, T, D in (
        *(("cpu", 1, 64, 64), ("cpu", 1, 1024, 256), ("cpu", 1, 2048, 1536)),
        *(("cuda", 1, 64, 64), ("cuda", 1, 4096, 1536)),
        *(("cuda", 8, 4096, 1536), ("cuda", 8, 4096, 3072)),
    ):
        fused = fusedops.dynamic_conv_generated
        make = partial(_generated, batch=B, channels=D, hidden=D // 8)
        layer = Workload(fused, "Jet-Nemotron", make, T, "tokens", 64, device)
        # Gradients sum over the weight's rows, or over tokens.
        layer = replace(layer, terms=(1000, 40_000), quick=(B, T, D) != (1, 64, 64) and B == 1)
        yield layer
        if device == "cuda":
            yield replace(layer, dtype="bfloat16")
    make = partial(_step, channels=3072, width=4)
    op, name = fusedops.dynamic_conv_step, "Jet-Nemotron, a step"
    step = Workload(op, name, make, 64, "sequences", 64, "cpu", quick=True)
    for size in (1, 64):
        yield replace(step, size=size, quick=size == 64)
        for dtype in ("bfloat16", "float32"):
            yield replace(step, size=size, device="cuda", dtype=dtype)
    paged = replace(step, name=f"{name}, paged", make=partial(make, paged=True), quick=False)
    yield paged
    for size in (1, 64, 256):
        yield replace(paged, size=size, device="cuda", dtype="bfloat16")


def _delta_workloads() -> Iterator[Workload]:
    qwen: dict[str, Any] = {"heads": 16, "keys": 128, "values": 128}
    places = ("cpu", 1, 64), ("cpu", 1, 2048), ("cuda", 1, 64), ("cuda", 1, 2048), ("cuda", 8, 4096)
    for device, B, T in places:
        make = partial(_delta, batch=B, **qwen)
        w = Workload(fusedops.gated_delta_rule, "Qwen3-Next", make, T, "tokens", 128, device)
        # A state keeps the errors of tokens before.
        w = replace(w, terms=(20_000, 20_000), quick=(B, T) == (1, 2048))
        yield w
        jet = partial(_delta, batch=B, heads=12, keys=96, values=256)
        yield replace(w, name="Jet-Nemotron", make=jet, quick=False)
        yield replace(w, dtype="bfloat16", quick=False)
    step = partial(_delta_step, **qwen)
    op, name = fusedops.gated_delta_rule_step, "Qwen3-Next, a step"
    for device, size in (("cpu", 1), ("cpu", 64), ("cuda", 1), ("cuda", 64)):
        w = Workload(op, name, step, size, "sequences", 4, device, terms=(20_000, 0))
        yield replace(w, quick=size == 1)


def _wigner_workloads() -> Iterator[Workload]:
    forth, back = fusedops.node_to_edge_wigner_permute, fusedops.permute_wigner_inv_edge_to_node
    for op in (forth, back):
        # An element sums over channels, or over one degree's rows of a node's edges.
        uma = Workload(
            op, "UMA", partial(_edges, op), 60_000, "edges", 120, "cpu", terms=(600, 1200)
        )
        yield replace(uma, prepares=op is forth)
        yield replace(uma, size=3_000, quick=True)
        yield replace(uma, name="UMA, packed", make=partial(_edges, op, packed=True))
        gpu = replace(uma, device="cuda")
        dense = partial(_edges, op, per_node=160)
        for dtype in ("float32", "bfloat16"):
            single = dtype == "float32"
            w = replace(gpu, dtype=dtype, quick=single)
            yield replace(w, size=3_000)
            yield replace(w, prepares=op is forth and single)
            yield replace(w, make=dense, size=320_000, quick=False)
        yield replace(gpu, name="MACE, lmax 1", make=partial(_edges, op, lmax=1))
        make = partial(_edges, op, lmax=4, per_node=15)
        yield replace(gpu, name="eSCN, lmax 4", make=make, size=30_000)
    others: list[tuple[Op, str, Callable[[Source, int], Problem]]] = [
        (op, "UMA", partial(_edges, op))
        for op in (fusedops.permute_wigner_inv, fusedops.edge_degree_scatter)
    ]
    for packed in (False, True):
        name = "UMA, packed" if packed else "UMA"
        others.append((wigner_d, name, partial(_directions, lmax=2, packed=packed)))
    for op, name, kind in others:
        cpu = Workload(op, name, kind, 60_000, "edges", 120, "cpu", terms=(600, 1200))
        yield cpu
        yield replace(cpu, size=3_000, quick=True)
        for size in (3_000, 60_000):
            yield replace(cpu, size=size, device="cuda", quick=True)


def _so2_workloads() -> Iterator[Workload]:
    # Sums over an order's inputs or results; over edges for weights.
    convolution, gates = fusedops.so2_convolution, fusedops.gate_activation
    name = "UMA, first layer"
    first = Workload(convolution, name, _messages, 60_000, "edges", 40, "cpu", terms=(768, 2048))
    gate = Workload(gates, "UMA", _gates, 60_000, "edges", 120, "cpu")
    for device in ("cpu", "cuda"):
        for size in (60_000, 3_000):
            yield replace(first, size=size, device=device, quick=size == 3_000)
            yield replace(gate, size=size, device=device, quick=size == 3_000)


def _scatter_workloads() -> Iterator[Workload]:
    def cubes(op: Op, device: str, count: int, voxels: float, **kinds: Any) -> Workload:
        make = partial(_cubes, op, voxels=voxels, **kinds)
        terms = (256, 0) if op is scatter else (0, 256)
        return Workload(op, "TorchRef", make, count, "cubes", 40, device, terms=terms)

    scatter, gather = fusedops.structured_scatter_add, fusedops.structured_gather
    on_256 = 256**3 / 20_000
    for ordered in (True, False):
        name = f"TorchRef, {'sorted' if ordered else 'unsorted'}"
        planned = cubes(scatter, "cpu", 20_000, on_256, ordered=ordered)
        yield replace(planned, name=name, prepares=not ordered)
        listed = cubes(scatter, "cpu", 20_000, on_256, ordered=ordered, planned=False)
        yield replace(listed, name=f"{name}, no plan")
    for op in (scatter, gather):
        yield cubes(op, "cpu", 300, on_256)
        yield replace(cubes(op, "cpu", 1_000, on_256), quick=True)
    yield cubes(gather, "cpu", 20_000, on_256)
    for op in (scatter, gather):
        for count, grid in ((50_000, 384), (3_000, 128), (300, 64)):
            small = count == 3_000
            gpu = cubes(op, "cuda", count, grid**3 / count)
            yield replace(gpu, quick=count <= 3_000, prepares=small and op is scatter)
            gpu = cubes(op, "cuda", count, grid**3 / count, index="int32")
            yield replace(gpu, name="TorchRef, int32")


def _density_workloads() -> Iterator[Workload]:
    op = fusedops.gaussian_density
    # Gradients are sums over thousands of voxels.
    terms = 2048, 8192
    for kind in ("isotropic", "anisotropic"):
        make = partial(_atoms, anisotropic=kind == "anisotropic")
        atoms = Workload(op, kind, make, 20_000, "atoms", 8, "cpu", terms=terms)
        yield atoms
        yield replace(atoms, size=500, quick=True)
        for count, voxels in ((50_000, 320), (3_000, 128), (300, 60)):
            given = {"spacing": 0.52, "volume": (0.52 * voxels) ** 3 / count, "radius": 4.0}
            atoms = replace(atoms, make=partial(make, **given), size=count, device="cuda")
            yield replace(atoms, quick=count == 3_000)
    crystal = Workload(op, "1ubi, one thread", _crystal, 1, "copies", 1, "cpu", terms=terms)
    for copies in (1, 17):
        yield replace(crystal, size=copies, threads=1, needs=("gemmi",))


def _trimul_workloads() -> Iterator[Workload]:
    # Roundings go through five products and two LayerNorms.
    op, terms = fusedops.triangle_multiplicative_update, (512, 2048)
    boltz = Workload(op, "Boltz", _update, 64, "residues", 20, "cpu", terms=terms)
    for N in (64, 128, 256):
        yield replace(boltz, size=N, quick=N == 64)
    small = (64, 1, 128), (128, 1, 128)
    shapes = (256, 2, 128), (768, 1, 128), (256, 2, 384), (512, 1, 128)
    for N, B, C in (*small, *shapes, (1024, 1, 128), (768, 1, 384), (1024, 1, 384)):
        make = partial(_update, batch=B, channels=C)
        gpu = replace(boltz, size=N, device="cuda", quick=N == 128)
        half = partial(make, gate="hidden", precision="fp16")
        yield replace(gpu, name="gpu-mode", make=half, rounds_to="float16")
        yield replace(gpu, make=make, dtype="bfloat16")
        if (N, C) in ((256, 128), (768, 128), (768, 384)):
            # By default, as models in float32 call it.
            yield replace(gpu, name="Boltz, float32", make=make, quick=False)
    # Other sizes and dtypes that docs/folding.md lists. TF32 rounds as float16 does.
    autocast, tf32 = ("bf16", "bfloat16"), ("tf32", "float16")
    for name, C, (precision, rounds_to), biases in (
        ("OpenFold", 128, autocast, True),
        ("OpenFold, templates", 64, autocast, True),
        ("Protenix-v2", 256, autocast, False),
        ("Protenix-v2, float32", 256, (None, None), False),
        ("OpenFold 3", 128, tf32, False),
        ("OpenFold 3, templates", 64, tf32, False),
    ):
        make = partial(_update, channels=C, hidden=C, precision=precision, biases=biases)
        program = replace(boltz, name=name, make=make, device="cuda", rounds_to=rounds_to)
        yield replace(program, size=384)


def _attention_workloads() -> Iterator[Workload]:
    # Gradients are differences of sums of exponentials, whose logits are rounded.
    op, terms = fusedops.triangle_attention, (512, 2048)
    cpu = Workload(op, "AlphaFold 3", _attention, 64, "residues", 20, "cpu", terms=terms)
    for N in (64, 128, 256):
        yield replace(cpu, size=N, quick=N == 64)
    yield replace(cpu, size=128, dtype="bfloat16")
    for N in (128, 256, 512, 768):
        gpu = replace(cpu, size=N, device="cuda", quick=N == 128)
        yield gpu
        yield replace(gpu, dtype="bfloat16")


#: Ops on the edges of a graph.
ON_EDGES = (
    fusedops.node_to_edge_wigner_permute,
    fusedops.permute_wigner_inv_edge_to_node,
    fusedops.permute_wigner_inv,
    fusedops.edge_degree_scatter,
)


def _tiny_workloads(others: Iterable[Workload]) -> Iterator[Workload]:
    """Yield a call of every op so small that its time on one thread is the frame's."""
    alike: dict[Op, Workload] = {}
    for workload in others:
        if workload.device == "cpu":
            alike.setdefault(workload.op, workload)

    def call(op: Op, make: Callable[[Source, int], Problem], size: int = 1) -> Workload:
        w = replace(alike[op], name=CALL, make=make, size=size, small=size, threads=1)
        return replace(w, quick=True, tiny=True, prepares=False)

    yield call(fusedops.planarity_nll, _planarity)
    yield call(fusedops.geometry_nll, _geometry, 2)
    yield call(fusedops.dynamic_conv, partial(_conv, batch=1, channels=4, width=4), 4)
    yield call(
        fusedops.dynamic_conv_generated, partial(_generated, batch=1, channels=4, hidden=4), 4
    )
    yield call(fusedops.dynamic_conv_step, partial(_step, channels=4, width=4))
    head: dict[str, Any] = {"heads": 1, "keys": 4, "values": 4}
    yield call(fusedops.gated_delta_rule, partial(_delta, batch=1, **head), 2)
    yield call(fusedops.gated_delta_rule_step, partial(_delta_step, **head))
    for op in ON_EDGES:
        yield call(op, partial(_edges, op, lmax=1, channels=4), 2)
    yield call(wigner_d, partial(_directions, lmax=1))
    yield call(fusedops.so2_convolution, partial(_messages, lmax=1, channels=4, width=4))
    yield call(fusedops.gate_activation, partial(_gates, lmax=1, channels=4))
    for way in (fusedops.structured_scatter_add, fusedops.structured_gather):
        yield call(way, partial(_cubes, way, edge=3))
    atoms = partial(_atoms, spacing=1.0, radius=1.0, least=8)
    yield call(fusedops.gaussian_density, atoms)
    update = partial(_update, channels=8, hidden=8)
    yield call(fusedops.triangle_multiplicative_update, update, 2)
    yield call(fusedops.triangle_attention, partial(_attention, heads=1, channels=4), 2)


_LARGER = (
    *_planarity_workloads(),
    *_geometry_workloads(),
    *_conv_workloads(),
    *_delta_workloads(),
    *_wigner_workloads(),
    *_so2_workloads(),
    *_scatter_workloads(),
    *_density_workloads(),
    *_trimul_workloads(),
    *_attention_workloads(),
)

#: Every call that is timed.
WORKLOADS = (*_LARGER, *_tiny_workloads(_LARGER))


def _growing(device: str) -> Iterator[tuple[Workload, tuple[int, ...]]]:
    def sizes(first: int) -> tuple[int, ...]:
        return tuple(round(first * 10 ** (k / 3)) for k in range(10))

    def of(op: Op, name: str, make: Any, unit: str, **options: Any) -> Workload:
        return Workload(op, name, make, 0, unit, 1, device, **options)

    gpu = device == "cuda"
    yield of(fusedops.planarity_nll, "protein", _planarity, "planes"), sizes(600 if gpu else 100)
    yield of(fusedops.geometry_nll, "backbone", _geometry, "residues"), sizes(60 if gpu else 10)
    conv = partial(_conv, batch=1, channels=1536 if gpu else 256, width=4)
    dtype = "bfloat16" if gpu else "float32"
    name = "Jet-Nemotron"
    yield of(fusedops.dynamic_conv, name, conv, "tokens", dtype=dtype), sizes(64 if gpu else 16)
    channels = 1536 if gpu else 256
    fused = partial(_generated, batch=1, channels=channels, hidden=channels // 8)
    yield (
        of(fusedops.dynamic_conv_generated, name, fused, "tokens", dtype=dtype),
        sizes(64 if gpu else 16),
    )
    step = partial(_step, channels=3072, width=4)
    yield (
        of(fusedops.dynamic_conv_step, f"{name}, a step", step, "sequences", dtype=dtype),
        sizes(1),
    )
    qwen: dict[str, Any] = {"heads": 16 if gpu else 2, "keys": 128, "values": 128}
    delta, delta_step = partial(_delta, batch=1, **qwen), partial(_delta_step, **qwen)
    yield of(fusedops.gated_delta_rule, "Qwen3-Next", delta, "tokens"), sizes(8)
    yield of(fusedops.gated_delta_rule_step, "a step", delta_step, "sequences"), sizes(1)
    for op in ON_EDGES:
        yield of(op, "UMA", partial(_edges, op), "edges"), sizes(300 if gpu else 60)
    yield of(wigner_d, "UMA", partial(_directions, lmax=2), "edges"), sizes(300 if gpu else 60)
    for layer, make in ((fusedops.so2_convolution, _messages), (fusedops.gate_activation, _gates)):
        yield of(layer, "UMA", make, "edges"), sizes(300 if gpu else 60)
    for way in (fusedops.structured_scatter_add, fusedops.structured_gather):
        yield of(way, "TorchRef", partial(_cubes, way), "cubes"), sizes(50 if gpu else 20)
    atoms = partial(_atoms, spacing=0.52, volume=92.2, radius=4.0) if gpu else _atoms
    density = fusedops.gaussian_density
    yield of(density, "isotropic", atoms, "atoms"), sizes(50 if gpu else 20)
    width = 128 if gpu else 32
    update = partial(_update, channels=width, hidden=width)
    powers = tuple(2**k for k in range(11))
    yield (
        of(fusedops.triangle_multiplicative_update, "Boltz", update, "residues", dtype=dtype),
        powers,
    )
    rows = _attention if gpu else partial(_attention, heads=1, channels=8)
    yield of(fusedops.triangle_attention, "AlphaFold 3", rows, "residues", dtype=dtype), powers


#: A kind of problem of every op with sizes over three decades, by device.
GROWTH = {device: tuple(_growing(device)) for device in ("cpu", "cuda")}
