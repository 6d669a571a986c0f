"""Whole steps of programs, which `fusedops bench --step` times with the share of each part.

To add a step, write a function from a device to a `Step`, and name it in `STEPS` of
`bench.measure`. A peer is declared as an op's is, with the step's name in place of the op's.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fusedops
from bench.peers import Unsuited, peer
from bench.timing import NUMPY, TORCH
from fusedops import crystal, maps, samples
from fusedops._catalogue import BOTH, FORWARD, Steps
from fusedops._frame.check import is_tensor
from fusedops._frame.op import Op
from fusedops._frame.registry import BackendName
from fusedops.density import Lattice
from fusedops.structure import Structure, planar_groups, read_structure

#: The variable that names the folder with structures that aren't in the package.
DATA = "FUSEDOPS_DATA"


@dataclass(frozen=True)
class Part:
    """A part of a step: a function of leaves, or of the values of parts before it, by name.

    A function of arrays returns its value and pullback, as an op's `vjp`; of tensors, its value.
    It may hold parameters, which get gradients too.
    """

    name: str
    of: tuple[str, ...]
    function: Callable[..., Any]
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Chain:
    """A step of a program: its value is the sum of the parts that no other part is a function of.

    The value is a loss, which has gradients by the `leaves` and by the parameters of all parts,
    unless the program has none.
    """

    leaves: dict[str, Any]
    parts: tuple[Part, ...]
    has_gradients: bool = True

    def steps(self) -> Steps:
        """Return functions that compute the passes of the step, and of each of its parts."""
        return _of_tensors(self) if any(map(is_tensor, self.leaves.values())) else _of_arrays(self)

    def loss(self, values: dict[str, Any]) -> Any:
        """Return the loss from the values of all parts."""
        used = {name for part in self.parts for name in part.of}
        last = (values[part.name] for part in self.parts if part.name not in used)
        return functools.reduce(operator.add, last)


@dataclass(frozen=True)
class Served:
    """A step that is served whole."""

    passes: Steps

    def steps(self) -> Steps:
        """Return the functions that compute the passes of the step."""
        return self.passes


def backward_of(part: str) -> str:
    """Return the name of a part's backward pass."""
    return f"{part}, backward"


def _of_arrays(chain: Chain) -> Steps:
    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        values, pullbacks = dict(chain.leaves), {}
        for part in chain.parts:
            found = part.function(*(values[name] for name in part.of))
            values[part.name], pullbacks[part.name] = found
        return values, pullbacks

    def back(pullbacks: dict[str, Any]) -> dict[str, Any]:
        """Return the cotangents of leaves and parts."""
        cotangents: dict[str, Any] = {}
        for part in reversed(chain.parts):
            seed = cotangents.setdefault(part.name, 1.0)
            for name, more in zip(part.of, pullbacks[part.name](seed), strict=True):
                cotangents[name] = cotangents[name] + more if name in cotangents else more
        return cotangents

    def forward() -> tuple[Any, ...]:
        return (chain.loss(run()[0]),)

    def both() -> tuple[Any, ...]:
        values, pullbacks = run()
        cotangents = back(pullbacks)
        return chain.loss(values), *(cotangents[name] for name in chain.leaves)

    values, pullbacks = run()
    steps: Steps = {FORWARD: forward}
    for part in chain.parts:
        steps[part.name] = partial(part.function, *(values[name] for name in part.of))
    if chain.has_gradients:
        steps[BOTH] = both
        for name, cotangent in back(pullbacks).items():
            if name in pullbacks:
                steps[backward_of(name)] = partial(pullbacks[name], cotangent)
    return steps


def _of_tensors(chain: Chain) -> Steps:
    import torch

    differ = chain.has_gradients
    leaves = {name: x.detach().clone().requires_grad_(differ) for name, x in chain.leaves.items()}
    varied = [*leaves.values(), *(x for part in chain.parts for x in part.parameters)]

    def run() -> dict[str, Any]:
        values = dict(leaves)
        for part in chain.parts:
            values[part.name] = part.function(*(values[name] for name in part.of))
        return values

    def forward() -> tuple[Any, ...]:
        return (chain.loss(run()),)

    def both() -> tuple[Any, ...]:
        loss = chain.loss(run())
        return loss.detach(), *torch.autograd.grad(loss, varied)

    if not differ:
        return {FORWARD: torch.no_grad()(forward)}
    values = run()
    wanted = [values[part.name] for part in chain.parts]
    cotangents = torch.autograd.grad(chain.loss(values), wanted)
    steps: Steps = {FORWARD: torch.no_grad()(forward), BOTH: both}
    for part, dy in zip(chain.parts, cotangents, strict=True):
        inputs = [values[name].detach().requires_grad_() for name in part.of]
        steps[part.name] = torch.no_grad()(partial(part.function, *inputs))
        steps[backward_of(part.name)] = _backward(part, inputs, dy)
    return steps


def _backward(part: Part, inputs: list[Any], dy: Any) -> Callable[[], tuple[Any, ...]]:
    """Return a part's backward pass, after a forward pass that its first call makes.

    Autograd's graph of a forward pass keeps the nodes of the parameters' gradients, with the stream
    they were made on. While it lives, no pass on another stream can be captured in a CUDA graph.
    """
    import torch

    forward = functools.cache(partial(part.function, *inputs))
    by = [*inputs, *part.parameters]
    return lambda: torch.autograd.grad(forward(), by, dy, retain_graph=True)


def result(steps: Steps) -> tuple[Any, ...]:
    """Return the value of a step, and its gradients where it has any."""
    return steps[BOTH if BOTH in steps else FORWARD]()


@dataclass(frozen=True)
class Case:
    """A problem of a step; `make` raises `Unsuited`, with the reason, where it can't be made.

    Its `shape` has the sizes that a table shows.
    """

    name: str
    make: Callable[[], Any]
    quick: bool = False


@dataclass(frozen=True)
class Step:
    """A whole step of a program, on a device and in a dtype.

    Parameters
    ----------
    name : str
    op : Op
        The op whose backends are timed.
    cases : tuple of Case
        From small to large.
    checks : tuple of Case
        Small problems, on which the value and gradients of every program are compared with the
        reference in float64; `tolerance` is the largest error of ours, relative.
    reference : callable
        From a problem to its value and gradients in float64.
    ours : callable
        From a problem, one of `hows`, a device, a dtype and a backend to a `Chain`.
    needs : tuple of str
        The packages that make the cases.
    hows : tuple of str
        "NumPy" and "torch", as `ours` takes them; with "torch and a graph" a step captures its own
        graphs.
    has_shares : bool
        Whether the times of its parts add up to the whole's.
    captured : bool
        Whether a CUDA graph can hold the step: a program may wait for the GPU in it.
    rounds : int or None
        How often each program of a step of minutes is timed, which then is all that is measured.
    """

    name: str
    op: Op
    cases: tuple[Case, ...]
    checks: tuple[Case, ...]
    tolerance: float
    reference: Callable[[Any], tuple[Any, ...]]
    ours: Callable[..., Any]
    device: str
    dtype: str = "float32"
    needs: tuple[str, ...] = ("gemmi",)
    hows: tuple[str, ...] = (NUMPY, TORCH)
    has_shares: bool = True
    captured: bool = True
    rounds: int | None = None


RESOLUTION = 2.0
"""Å."""

N_SIGMA = 3.0
"""TorchRef's radius of an atom, in standard deviations."""


@dataclass(frozen=True)
class Crystal:
    """A shaken model of a crystal, and the amplitudes of the model before, with noise.

    Parameters
    ----------
    atoms : maps.ScatteringAtoms
        Of the asymmetric unit, with B raised by `blur`, Å².
    grid : maps.MapGrid
        With voxels of a third of the resolution.
    groups : list
        The planes of the model.
    hkl : array (M, 3)
        The unique reflections up to the resolution.
    observed, sigma : array (M,)
        Amplitudes, electrons.
    model : gemmi.Structure or None
        The shaken model, unless it is generated.
    """

    atoms: maps.ScatteringAtoms
    blur: float
    grid: maps.MapGrid
    groups: list[tuple[np.ndarray, np.ndarray]]
    hkl: np.ndarray
    observed: np.ndarray
    sigma: np.ndarray
    model: Any = None

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that a table shows."""
        return {
            "atoms": len(self.atoms.xyz),
            "voxels": math.prod(self.grid.shape),
            "reflections": len(self.hkl),
            "planes": sum(len(index) for index, _ in self.groups),
        }


def refinement(device: str) -> Step:
    """Least squares on amplitudes to 2 Å, and planarity, with gradients by xyz, B and occupancy."""
    return Step(
        "refinement",
        fusedops.gaussian_density,
        (
            Case("1ubi", partial(_of_file, "1ubi"), quick=True),
            Case("3p3w", partial(_of_file, "3p3w")),
            Case("generated", partial(_generated, 50_000)),
        ),
        (Case("generated", partial(_generated, 100)),),
        # The target's differences are a tenth of the amplitudes, so rounding counts ten times, and
        # gradients sum thousands of voxels.
        1e-4,
        lambda problem: _refined(problem, NUMPY, "cpu", "float64", "numpy").steps()[BOTH](),
        _refined,
        device,
    )


def pair(device: str, dtype: str | None = None) -> Step:
    """Boltz's block of a pair representation of 128 channels, and four, with all gradients."""
    dtype = dtype or dtype_on(device)
    pairs = partial(_pairs, dtype=dtype)
    sizes = (64, 128) if device == "cpu" else (128, 256, 384, 512, 768)
    return Step(
        "pair",
        fusedops.triangle_multiplicative_update,
        (
            *(Case("block", partial(pairs, N), quick=sizes[0] == N) for N in sizes),
            Case("4 blocks", partial(pairs, sizes[0], 4)),
        ),
        (Case("block", partial(pairs, 20)),),
        # Relative to the largest element of each gradient; in 16 bits every part rounds z.
        1e-5 if dtype == "float32" else 0.06,
        lambda problem: _pair_by(_formulas(), problem, "cpu", "float64").steps()[BOTH](),
        _pair_by_modules,
        device,
        dtype,
        needs=("torch",),
        hows=(TORCH,),
    )


def pair_float32(device: str) -> Step:
    """The same in float32, as Boltz-1 computes it."""
    return replace(pair(device, "float32"), name="pair_float32")


def _of_file(name: str) -> Crystal:
    """Return the crystal of an entry of the Protein Data Bank."""
    structure = samples.ubiquitin() if name == "1ubi" else read_structure(_path(name))
    grid = maps.crystal_grid(structure, RESOLUTION / 3)
    atoms = maps.scattering_atoms(structure)
    found = _shaken(atoms, grid, planar_groups(structure).groups)
    return replace(found, model=_moved(structure, found))


def _path(name: str) -> Path:
    folder = Path(os.environ.get(DATA, ""))
    for ending in (".pdb", ".pdb.gz", ".cif", ".cif.gz"):
        if DATA in os.environ and (folder / f"{name}{ending}").is_file():
            return folder / f"{name}{ending}"
    raise Unsuited(
        f"needs {name}.pdb or {name}.cif, gzipped or not, in the folder that {DATA} names"
    )


def _generated(count: int) -> Crystal:
    """Return a crystal of a chain of flat peptides, in four copies and as much solvent."""
    import gemmi

    rng = np.random.default_rng(count)
    xyz, indices = samples.protein(max(1, count // 6), rng)
    # 18 Å³ an atom, and as much for solvent.
    edge = (4 * 2 * 18 * len(xyz)) ** (1 / 3)
    cell = gemmi.UnitCell(0.9 * edge, edge, edge / 0.9, 90, 90, 90)
    matrix = np.array(cell.orth.mat.tolist())
    _, b, _, amplitudes, widths = samples.atoms_in(matrix, len(xyz), rng)
    occupancy = np.ones(len(xyz))
    atoms = maps.ScatteringAtoms(xyz, b, occupancy, amplitudes, widths, [], 0)
    blank = gemmi.Int8Grid()
    blank.set_unit_cell(cell)
    blank.spacegroup = gemmi.SpaceGroup("P 21 21 21")
    blank.set_size_from_spacing(RESOLUTION / 3, gemmi.GridSizeRounding.Up)
    grid = maps.MapGrid(cell, blank.spacegroup, tuple(blank.shape))
    return _shaken(atoms, grid, [(index, np.full(len(index), 0.02)) for index in indices])


def _shaken(
    atoms: maps.ScatteringAtoms,
    grid: maps.MapGrid,
    groups: list[tuple[np.ndarray, np.ndarray]],
    resolution: float = RESOLUTION,
) -> Crystal:
    """Return a crystal whose model is moved away from the data."""
    import gemmi

    rng, count = np.random.default_rng(0), len(atoms.xyz)
    hkl = gemmi.make_miller_array(grid.cell, grid.spacegroup, resolution)
    blur = atoms.needed_blur(resolution / 3)
    blurred = atoms.blurred(blur)
    arrays = blurred.xyz, blurred.b, blurred.occupancy, blurred.amplitudes, blurred.widths
    rho = fusedops.gaussian_density(*arrays, grid.matrix, grid.shape)
    symmetry = {"blur": blur, "operations": grid.spacegroup.operations()}
    exact = abs(crystal.structure_factors(rho, hkl, grid.matrix, **symmetry))
    sigma = 0.05 * (exact + np.median(exact))
    observed = abs(exact + sigma * rng.normal(size=len(hkl)))
    factors = np.exp(rng.normal(scale=0.1, size=(count, *[1] * (atoms.b.ndim - 1))))
    moved = atoms.xyz + rng.normal(scale=0.1, size=(count, 3))
    shaken = replace(atoms, xyz=moved, b=factors * atoms.b).blurred(blur)
    return Crystal(shaken, blur, grid, groups, hkl, observed, sigma)


def _moved(structure: Structure, problem: Crystal) -> Any:
    """Return gemmi's structure with the atoms of a problem."""
    import gemmi

    moved, atoms = structure.gemmi.clone(), problem.atoms.blurred(-problem.blur)
    for k, cra in zip(structure._order.tolist(), moved[0].all(), strict=True):
        cra.atom.pos, cra.atom.occ = gemmi.Position(*atoms.xyz[k]), atoms.occupancy[k]
        if atoms.b.ndim == 1:
            cra.atom.b_iso = atoms.b[k]
        else:
            cra.atom.aniso = gemmi.SMat33f(*atoms.b[k])
    return moved


def _leaves(problem: Crystal) -> dict[str, np.ndarray]:
    atoms = problem.atoms
    return {"xyz": atoms.xyz, "b": atoms.b, "occupancy": atoms.occupancy}


def _refined(
    problem: Crystal, how: str, device: str, dtype: str, backend: BackendName | None
) -> Chain:
    """Return the step by our ops."""
    grid = problem.grid
    lattice, planes = Lattice(grid.matrix, grid.shape), fusedops.Planes(problem.groups)
    symmetry = {"blur": problem.blur, "operations": grid.spacegroup.operations()}
    reflections = crystal.Reflections(problem.hkl, grid.matrix, grid.shape, **symmetry)
    constants = problem.atoms.amplitudes, problem.atoms.widths, problem.observed, problem.sigma
    ops: list[Any] = [
        fusedops.gaussian_density,
        crystal.structure_factors,
        fusedops.planarity_nll,
    ]
    if how == NUMPY:
        cast: Callable[[Any], Any] = partial(np.asarray, dtype=dtype)
        density, factors, nll = (op.vjp for op in ops)
        target: Callable[..., Any] = _least_squares
    else:
        import torch

        cast = partial(torch.tensor, dtype=getattr(torch, dtype), device=device)
        lattice, planes = lattice.to(device), planes.to(device)
        reflections = reflections.to(device)
        density, factors, nll = ops
        target = _least_squares_of_tensors
    amplitudes, widths, observed, sigma = map(cast, constants)
    on = {"n_sigma": N_SIGMA, "on_bad": "skip", "backend": backend}
    return Chain(
        {name: cast(array) for name, array in _leaves(problem).items()},
        (
            Part(
                "density",
                ("xyz", "b", "occupancy"),
                lambda *leaves: density(*leaves, amplitudes, widths, lattice, **on),
            ),
            Part("Fourier", ("density",), lambda rho: factors(rho, reflections)),
            Part("target", ("Fourier",), lambda F: target(F, observed, sigma)),
            Part("planarity", ("xyz",), lambda xyz: nll(xyz, planes, backend=backend)),
        ),
    )


def _least_squares(F: Any, observed: Any, sigma: Any) -> tuple[Any, Callable[..., Any]]:
    amplitude = abs(F)
    z = (amplitude - observed) / sigma
    slope = np.divide(z, sigma * amplitude, out=np.zeros_like(z), where=amplitude > 0)
    return 0.5 * z @ z, lambda dvalue: (dvalue * slope * F,)


def _least_squares_of_tensors(F: Any, observed: Any, sigma: Any) -> Any:
    from torch.nn.functional import mse_loss

    return 0.5 * mse_loss(F.abs() / sigma, observed / sigma, reduction="sum")


def _torchref(problem: Crystal, device: str, bits: int) -> Steps:
    """Density, symmetry in reciprocal space, target and planes of TorchRef, on the same grid."""
    import torch
    from torchref.base.targets.planarity import planarity_math
    from torchref.base.targets.xray_ls import ls_xray_loss_math
    from torchref.model.context import ModelContext
    from torchref.model.sf_fft import SfFFT
    from torchref.symmetry import Cell, SpaceGroup

    dtype = getattr(torch, f"float{bits}")
    cast = partial(torch.tensor, dtype=dtype, device=device)
    atoms, grid, hkl = problem.atoms, problem.grid, torch.tensor(problem.hkl, device=device)
    context = ModelContext(
        cell=Cell(grid.cell.parameters, dtype=dtype, device=device),
        spacegroup=SpaceGroup(grid.spacegroup.xhm(), dtype=dtype, device=torch.device(device)),
    )
    engine = SfFFT(context, explicit_gridsize=grid.shape, dtype_float=dtype)
    late = engine.late_symmetry_compatible
    amplitudes, widths, observed, sigma = map(
        cast, (atoms.amplitudes, atoms.widths, problem.observed, problem.sigma)
    )
    none = [x.new_zeros((0, *x.shape[1:])) for x in (cast(atoms.xyz), observed, observed)]
    none += [amplitudes[:0], widths[:0]]
    s = problem.hkl @ np.linalg.inv(grid.matrix)
    unblurred = cast(np.exp(problem.blur / 4 * (s * s).sum(1)))
    # TorchRef misreads sigmas (P,) where P is also the number of a plane's atoms.
    groups = [
        (torch.tensor(index, device=device), cast(np.tile(sigmas[:, None], index.shape[1])))
        for index, sigmas in problem.groups
    ]

    def density(*leaves: Any) -> Any:
        drawn = *leaves, amplitudes, widths
        both = [*none, *drawn] if leaves[1].ndim == 2 else drawn
        return engine.build_density_map(*both, apply_symmetry=not late)

    def factors(rho: Any) -> Any:
        return engine.map_to_structure_factors(rho, hkl, apply_symmetry=late) * unblurred

    return Chain(
        {name: cast(array) for name, array in _leaves(problem).items()},
        (
            Part("density", ("xyz", "b", "occupancy"), density),
            Part("Fourier", ("density",), factors),
            Part("target", ("Fourier",), lambda F: ls_xray_loss_math(observed, F, sigma)),
            Part("planarity", ("xyz",), lambda xyz: planarity_math(xyz, groups)),
        ),
    ).steps()


@peer("TorchRef 0.7", "refinement", package="torchref.model")
def torchref(problem: Crystal, device: str) -> Steps:
    return _torchref(problem, device, 32)


@peer("TorchRef 0.7, float64", "refinement", package="torchref.model", devices=("cpu",))
def torchref_float64(problem: Crystal, device: str) -> Steps:
    """Its kernels for the CPU are faster in float64 than in float32."""
    return _torchref(problem, device, 64)


@peer("gemmi", "refinement", package="gemmi", devices=("cpu",), checked=False, tensors=False)
def gemmi(problem: Crystal, device: str) -> Steps:
    """The structure factors of gemmi, without planes and gradients.

    It draws atoms further than ours, to 1e-5 electrons/Å³, so its target isn't ours.
    """
    import gemmi

    if problem.model is None:
        raise Unsuited
    calculator, model = gemmi.DensityCalculatorX(), problem.model[0]
    calculator.blur = problem.blur
    rho = calculator.grid
    rho.setup_from(problem.model)
    rho.spacegroup = problem.grid.spacegroup
    rho.set_size(*problem.grid.shape)
    place = {tuple(hkl): k for k, hkl in enumerate(problem.hkl.tolist())}

    def density(*_: Any) -> tuple[Any, None]:
        rho.fill(0)
        calculator.add_model_density_to_grid(model)
        return None, None

    def symmetry(_: Any) -> tuple[Any, None]:
        rho.symmetrize_sum()
        return None, None

    def factors(_: Any) -> tuple[Any, None]:
        transformed = gemmi.transform_map_to_f_phi(rho, half_l=True)
        return transformed.prepare_asu_data(RESOLUTION, unblur=problem.blur), None

    found = factors(symmetry(density()))[0].miller_array
    order = [place[tuple(hkl)] for hkl in found.tolist()]
    observed, sigma = problem.observed[order], problem.sigma[order]
    return Chain(
        _leaves(problem),
        (
            Part("density", ("xyz", "b", "occupancy"), density),
            Part("symmetry", ("density",), symmetry),
            Part("Fourier", ("symmetry",), factors),
            Part("target", ("Fourier",), lambda F: _least_squares(F.value_array, observed, sigma)),
        ),
        has_gradients=False,
    ).steps()


def dtype_on(device: str) -> str:
    """Return the dtype in which models of torch are timed on a device."""
    return "float32" if device == "cpu" else "bfloat16"


@dataclass(frozen=True)
class Pairs:
    """A pair representation, and blocks with Boltz's names.

    Parameters
    ----------
    z : tensor (1, N, N, C), float64
        A tenth of the residues is padding.
    mask : tensor (1, N, N), float64
        Zero for pairs with padding.
    blocks : list of dict
        For each part of each block, by Boltz's name, its parameters.
    dtype : str
        The dtype in which peers compute.
    """

    z: Any
    mask: Any
    blocks: list[dict[str, dict[str, Any]]]
    dtype: str = "float32"

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that a table shows."""
        return {"N": self.z.shape[1], "C": self.z.shape[-1]}

    def to(self, device: str, dtype: str) -> Pairs:
        """Return the problem on a device and in a dtype, with parameters that have gradients."""
        import torch

        def cast(x: Any) -> Any:
            return x.to(device, getattr(torch, dtype))

        blocks = [
            {
                part: {name: cast(x).detach().clone().requires_grad_() for name, x in own.items()}
                for part, own in block.items()
            }
            for block in self.blocks
        ]
        return Pairs(cast(self.z), cast(self.mask), blocks, dtype)

    def chain(self, blocks: list[dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]]) -> Chain:
        """Return the step of blocks: functions of z by name, each with its parameters.

        Each part of a single block is a part of the step, and each of several blocks.
        """
        import torch

        if len(blocks) > 1:
            blocks = [
                {
                    f"block {k}": (
                        _in_turn(block),
                        tuple(x for _, own in block.values() for x in own),
                    )
                }
                for k, block in enumerate(blocks, 1)
            ]
        parts, last, mask = [], "z", self.mask[..., None]
        for block in blocks:
            for name, (function, parameters) in block.items():
                parts.append(Part(name, (last,), function, parameters))
                last = name

        def target(z: Any) -> Any:
            z = z.to(torch.promote_types(z.dtype, torch.float32)) * mask
            return 0.5 * z.square().mean()

        return Chain({"z": self.z}, (*parts, Part("target", (last,), target)))


def _in_turn(block: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> Callable[..., Any]:
    def run(z: Any) -> Any:
        for function, _ in block.values():
            z = function(z)
        return z

    return run


#: The steps of a block, which have the same peers.
PAIR = "pair", "pair_float32"

#: The names of a block's parts, by Boltz's names.
PARTS = {
    "tri_mul_out": "outgoing update",
    "tri_mul_in": "incoming update",
    "tri_att_start": "starting attention",
    "tri_att_end": "ending attention",
    "transition_z": "transition",
}


def _pairs(N: int, count: int = 1, dtype: str = "float32") -> Pairs:
    import torch

    from fusedops.nn import PairBlock

    rng = torch.Generator().manual_seed(N)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in PairBlock(128).state_dict().items()}

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    blocks = []
    for _ in range(count):
        block: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for key, shape in shapes.items():
            part, _, name = key.partition(".")
            around = float("norm" in name and name.endswith("weight"))
            scale = 0.1 if len(shape) == 1 else shape[1] ** -0.5
            block[part][name] = around + scale * normal(*shape)
        blocks.append(block)
    present = (torch.arange(N) < N - N // 10).double()
    return Pairs(normal(1, N, N, 128), (present[:, None] * present)[None], blocks, dtype)


def installed(package: str) -> bool:
    """Return whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def _pair_by_modules(
    problem: Pairs, how: str, device: str, dtype: str, backend: BackendName | None
) -> Chain:
    """Return the step by our modules, which choose their attention."""
    from fusedops.nn import PairBlock

    given = problem.to(device, dtype)

    def functions(parameters: dict[str, dict[str, Any]]) -> Any:
        block = PairBlock(128, 0.0, backend=backend).to(given.z)
        found = {}
        for part, name in PARTS.items():
            module: Any = getattr(block, part)
            module.load_state_dict(parameters[part])
            masked = () if part == "transition_z" else (given.mask,)
            found[name] = (partial(_added, module, *masked), tuple(module.parameters()))
        return found

    return given.chain([functions(parameters) for parameters in given.blocks])


def _added(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return z, the last argument, and the update of it."""
    *masked, z = arguments
    return z + function(z, *masked)


Formulas = dict[str, Callable[..., Any]]


def _formulas() -> Formulas:
    """Return Boltz's parts in plain torch, as functions of parameters, z and a mask."""
    import torch
    from torch.nn import functional as F

    def norm(x: Any, p: dict[str, Any], name: str) -> Any:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    def update(terms: str, p: dict[str, Any], z: Any, mask: Any) -> Any:
        n = norm(z, p, "norm_in")
        sides = F.linear(n, p["p_in.weight"]) * F.linear(n, p["g_in.weight"]).sigmoid()
        o = torch.einsum(terms, *(sides * mask[..., None]).chunk(2, -1))
        gate = F.linear(n, p["g_out.weight"]).sigmoid()
        return F.linear(norm(o, p, "norm_out"), p["p_out.weight"]) * gate

    def attention(starting: bool, p: dict[str, Any], z: Any, mask: Any) -> Any:
        if not starting:
            z, mask = z.transpose(1, 2), mask.transpose(1, 2)
        n = norm(z, p, "layer_norm")
        bias = F.linear(n, p["linear.weight"]).permute(0, 3, 1, 2)[:, None]
        q, k, v, g = (F.linear(n, p[f"mha.linear_{name}.weight"]) for name in "qkvg")
        heads = (bias.shape[2], -1)
        q, k, v = (x.unflatten(-1, heads).transpose(-2, -3) for x in (q, k, v))
        logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        logits = logits + 1e9 * (mask[:, :, None, None] - 1) + bias
        o = (logits.softmax(-1) @ v).transpose(-2, -3) * g.sigmoid().unflatten(-1, heads)
        out = F.linear(o.flatten(-2), p["mha.linear_o.weight"])
        return out if starting else out.transpose(1, 2)

    def transition(p: dict[str, Any], z: Any, mask: Any) -> Any:
        n = norm(z, p, "norm")
        hidden = F.silu(F.linear(n, p["fc1.weight"])) * F.linear(n, p["fc2.weight"])
        return F.linear(hidden, p["fc3.weight"])

    return {
        "tri_mul_out": partial(update, "bikd,bjkd->bijd"),
        "tri_mul_in": partial(update, "bkid,bkjd->bijd"),
        "tri_att_start": partial(attention, True),
        "tri_att_end": partial(attention, False),
        "transition_z": transition,
    }


def _pair_by(formulas: Formulas, problem: Pairs, device: str, dtype: str) -> Chain:
    """Return the step by formulas."""
    given = problem.to(device, dtype)
    return given.chain(_by_formulas(formulas, given))


def _by_formulas(formulas: Formulas, given: Pairs) -> list[Any]:
    """Return the blocks of a problem for `Pairs.chain`."""
    return [
        {
            name: (
                _of_z(formulas[part], parameters[part], given.mask),
                (*parameters[part].values(),),
            )
            for part, name in PARTS.items()
        }
        for parameters in given.blocks
    ]


def _of_z(formula: Callable[..., Any], p: dict[str, Any], mask: Any) -> Callable[..., Any]:
    return lambda z: z + formula(p, z, mask)


@peer("torch eager", *PAIR)
def pair_in_torch(problem: Pairs, device: str) -> Steps:
    """Boltz's formulas, as it runs them without kernels."""
    return _pair_by(_formulas(), problem, device, problem.dtype).steps()


@peer("torch.compile", *PAIR, quick=False)
def pair_compiled(problem: Pairs, device: str) -> Steps:
    """The same formulas, compiled as one function."""
    import torch

    given = problem.to(device, problem.dtype)
    blocks = _by_formulas(_formulas(), given)
    every = {str(k): part for k, part in enumerate(x for block in blocks for x in block.values())}
    parameters = tuple(x for _, own in every.values() for x in own)
    # Of a few sizes of one function it compiles one for all, and of more sizes none.
    torch.compiler.reset()
    compiled = torch.compile(_in_turn(every), dynamic=False)
    steps = given.chain([{"blocks": (compiled, parameters)}]).steps()
    return {what: steps[what] for what in (FORWARD, BOTH)}


@peer("cuEquivariance", *PAIR, package="cuequivariance_torch", devices=("cuda",), quick=False)
def pair_by_cuequivariance(problem: Pairs, device: str) -> Steps:
    """Its triangle update and attention, as Boltz calls them, and Boltz's transition."""
    from cuequivariance_torch import triangle_attention, triangle_multiplicative_update
    from torch.nn import functional as F

    def update(direction: str, p: dict[str, Any], z: Any, mask: Any) -> Any:
        weights = {name.replace(".", "_"): x for name, x in p.items()}
        return triangle_multiplicative_update(z, direction=direction, mask=mask, **weights)

    def attention(starting: bool, p: dict[str, Any], z: Any, mask: Any) -> Any:
        if not starting:
            z, mask = z.transpose(1, 2), mask.transpose(1, 2)
        n = F.layer_norm(z, z.shape[-1:], p["layer_norm.weight"], p["layer_norm.bias"])
        bias = F.linear(n, p["linear.weight"]).permute(0, 3, 1, 2)[:, None]
        q, k, v, g = (F.linear(n, p[f"mha.linear_{name}.weight"]) for name in "qkvg")
        heads = (bias.shape[2], -1)
        q, k, v = (x.unflatten(-1, heads).transpose(-2, -3) for x in (q, k, v))
        o = triangle_attention(q, k, v, bias, mask[:, :, None, None].bool())
        o = o.transpose(-2, -3) * g.sigmoid().unflatten(-1, heads)
        out = F.linear(o.flatten(-2), p["mha.linear_o.weight"])
        return out if starting else out.transpose(1, 2)

    formulas = _formulas() | {
        "tri_mul_out": partial(update, "outgoing"),
        "tri_mul_in": partial(update, "incoming"),
        "tri_att_start": partial(attention, True),
        "tri_att_end": partial(attention, False),
    }
    return _pair_by(formulas, problem, device, problem.dtype).steps()
