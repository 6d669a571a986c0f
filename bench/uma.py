"""A whole step of UMA: energy, forces and stress of atoms, by fairchem's model with random weights.

fairchem builds the model in each of its modes, from the same seed; ours is its fastest mode with
`fusedops.compat.fairchem`, in eager calls and by `ForceStep`. With given edges the parts of the
model are timed, too. Steps of a simulation find the edges; there fairchem's Nitro, which refuses
all checkpoints but two, gets the random weights by the methods that load these.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import fusedops
from bench import memory
from bench.peers import Unsuited, peer
from bench.steps import Case, Served, Step, backward_of
from bench.timing import GRAPHS, TORCH
from fusedops import samples
from fusedops._catalogue import BOTH, FORWARD, Steps
from fusedops._frame.registry import BackendName

CUTOFF = 6.0
"""Å, of UMA-S."""

SPACING = 5.64
"""The edge of the cell of NaCl with eight atoms, Å."""

MANY = {"cpu": 10_000, "cuda": 200_000}
"""Edges beyond which parts are not timed, as their graphs leave too little memory."""

#: Atoms of a simulation beyond which the general mode is not timed.
MOST = 5_000

#: The sizes of UMA-S.
SIZES: dict[str, Any] = {
    "sphere_channels": 128,
    "hidden_channels": 128,
    "edge_channels": 128,
    "num_distance_basis": 64,
    "num_layers": 4,
    "lmax": 2,
    "mmax": 2,
    "cutoff": CUTOFF,
    "ff_type": "spectral",
    "chg_spin_emb_type": "rand_emb",
    "dataset_mapping": {"omat": "omat"},
}

#: The sizes of the model that Nitro knows.
SIMULATED: dict[str, Any] = {
    **SIZES,
    "max_num_elements": 100,
    "num_distance_basis": 32,
    "charge_balanced_channels": [0, 1, 2],
    "max_neighbors": 300,
    "otf_graph": True,
    "always_use_pbc": False,
    "direct_forces": False,
    "regress_forces": True,
    "regress_stress": True,
}


@dataclass(frozen=True)
class Atoms:
    """Atoms, and all pairs of them within the cutoff.

    Parameters
    ----------
    xyz : array (N, 3)
        Å.
    numbers : array (N,)
        Atomic numbers.
    cell : array (3, 3)
        Vectors of the cell as rows, Å.
    edges : array (2, E)
        Source and target of every edge.
    images : array (E, 3)
        The cell of the source less the cell of the target.
    """

    xyz: np.ndarray
    numbers: np.ndarray
    cell: np.ndarray
    edges: np.ndarray
    images: np.ndarray

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that a table shows."""
        return {"atoms": len(self.xyz), "edges": self.edges.shape[1]}


def uma(device: str) -> Step:
    """Energy, and its gradients by positions and strain, of salt and of ubiquitin in vacuum."""
    repeats = ((5, 5, 1), (5, 5, 5)) if device == "cpu" else ((5, 5, 1), (4, 8, 8), (7, 13, 13))
    return Step(
        "uma",
        fusedops.so2_convolution,
        (
            *(Case("NaCl", partial(_salt, *n), quick=n == repeats[0]) for n in repeats),
            Case("1ubi", _ubiquitin),
        ),
        (Case("NaCl", _few),),
        # Relative to the largest element; forces are sums of edges' that nearly cancel.
        1e-4,
        lambda _: _truth(),
        _ours,
        device,
        needs=("torch", "scipy", "gemmi", "fairchem-core"),
        hows=(TORCH, GRAPHS),
        captured=False,
    )


def _few() -> Atoms:
    return _salt(2, 1, 1)


@functools.cache
def _truth() -> tuple[Any, ...]:
    """Return energy, gradients by positions and by strain of few atoms, in float64."""
    return _Model(_few(), "general", "cpu", "float64").energy_and_gradients()


def _salt(*repeats: int) -> Atoms:
    """Return rock salt, shaken by 0.1 Å."""
    place = np.array([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) * SPACING / 2
    basis = np.concatenate([place, place + [SPACING / 2, 0, 0]])
    cells = np.stack(np.meshgrid(*map(np.arange, repeats), indexing="ij"), -1).reshape(-1, 1, 3)
    xyz = (basis + cells * SPACING).reshape(-1, 3)
    numbers = np.tile(np.repeat([11, 17], 4), len(cells))
    xyz = xyz + np.random.default_rng(0).normal(scale=0.1, size=xyz.shape)
    return _with_edges(xyz, numbers, np.diag(repeats) * SPACING)


def _ubiquitin() -> Atoms:
    """Return the atoms of 1UBI, without hydrogen, in vacuum."""
    structure = samples.ubiquitin()
    numbers = [atom.atom.element.atomic_number for atom in structure.gemmi[0].all()]
    xyz = np.asarray(structure.xyz)[structure._order]
    span = np.ptp(xyz, axis=0) + 4 * CUTOFF
    return _with_edges(xyz - xyz.min(0), np.array(numbers), np.diag(span))


def _with_edges(xyz: np.ndarray, numbers: np.ndarray, cell: np.ndarray) -> Atoms:
    """Return atoms in an orthorhombic cell with their edges, in order of targets."""
    from scipy.spatial import cKDTree

    box = np.diag(cell)
    near = [np.arange(-n, n + 1) for n in np.ceil(CUTOFF / box).astype(int)]
    shifts = np.stack(np.meshgrid(*near, indexing="ij"), -1).reshape(-1, 3)
    tree, pairs, images = cKDTree(xyz), [], []
    for shift in shifts:
        moved = xyz + shift * box
        inside = np.flatnonzero(
            ((moved > xyz.min(0) - CUTOFF) & (moved < xyz.max(0) + CUTOFF)).all(1)
        )
        for source, targets in zip(
            inside.tolist(), tree.query_ball_point(moved[inside], CUTOFF), strict=True
        ):
            found = [n for n in targets if n != source or shift.any()]
            pairs += [(source, target) for target in found]
            images += [shift] * len(found)
    edges, images_of = np.array(pairs).T, np.array(images)
    order = np.argsort(edges[1], kind="stable")
    return Atoms(xyz, numbers, cell, edges[:, order], images_of[order])


class _Model:
    """fairchem's model of some atoms, in a mode, and the steps that a bench times."""

    def __init__(
        self, problem: Atoms, mode: str, device: str, dtype: str, forces: bool = False
    ) -> None:
        import torch
        from fairchem.core.models.uma.escn_md import eSCNMDBackbone
        from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

        kind = getattr(torch, dtype)

        def tensor(array: Any, kind: Any = torch.int64) -> Any:
            # fairchem's kernels read rows of edges as if they were contiguous.
            return torch.tensor(np.ascontiguousarray(array), dtype=kind, device=device)

        data = self.data = _described(problem, device, dtype)
        # ASE's atoms lie in the cell, in float32, and the images are of atoms as they are given.
        data["pos"], data["cell"] = tensor(problem.xyz, kind), tensor(problem.cell, kind)[None]
        data["edge_index"] = tensor(problem.edges)
        data["cell_offsets"] = tensor(problem.images, kind)
        data["nedges"] = tensor([problem.edges.shape[1]])
        data["atomic_numbers_full"], data["batch_full"] = data["atomic_numbers"], data["batch"]
        torch.manual_seed(0)
        model = eSCNMDBackbone(
            **SIZES,
            otf_graph=False,
            direct_forces=False,
            regress_forces=forces,
            regress_stress=forces,
            execution_mode=mode,
        )
        readout = torch.randn(SIZES["sphere_channels"]) / len(problem.xyz)
        model.eval().requires_grad_(False).to(device, kind)
        settings = InferenceSettings(
            merge_mole=True, activation_checkpointing=False, external_graph_gen=True
        )
        # Converted layers have the default dtype, and parameters with gradients; fairchem's
        # predictor takes these off, too.
        model = model.prepare_for_inference(self.data, settings).to(device, kind)
        self.model = model.requires_grad_(False)
        self.readout = readout.to(device, kind)
        strain = torch.zeros(3, 3, dtype=kind, device=device)
        self.leaves = [leaf.clone().requires_grad_() for leaf in (data["pos"], strain)]

    def energy(self, xyz: Any, strain: Any) -> Any:
        """Return the energy of strained atoms."""
        from fusedops.compat._force_steps import copied

        data = copied(self.data)
        turn = (strain + strain.T) / 2
        data["pos"] = xyz + xyz @ turn
        data["cell"] = self.data["cell"] + self.data["cell"] @ turn
        return (self.model(data)["node_embedding"][:, 0] @ self.readout).sum()

    def energy_and_gradients(self) -> tuple[Any, ...]:
        """Return the energy, and its gradients by positions and strain."""
        import torch

        energy = self.energy(*self.leaves)
        return energy.detach(), *torch.autograd.grad(energy, self.leaves)

    def steps(self) -> Steps:
        """Return functions that compute the step, and each of its parts in all layers."""
        import torch

        leaves = self.leaves
        steps: Steps = {
            FORWARD: torch.no_grad()(lambda: (self.energy(*leaves),)),
            BOTH: self.energy_and_gradients,
        }
        if self.data["edge_index"].shape[1] > MANY[leaves[0].device.type]:
            return steps
        blocks = list(self.model.blocks)
        parts = {
            "degree embedding": [self.model.edge_degree_embedding],
            "messages": [block.edge_wise for block in blocks],
            "nodes": [block.atom_wise for block in blocks],
        }
        calls: dict[Any, tuple[Any, Any]] = {}

        def note(module: Any, given: Any, options: Any, _: Any) -> None:
            calls[module] = given, options

        modules = [module for part in parts.values() for module in part]
        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
        self.energy(*leaves)
        for hook in hooks:
            hook.remove()
        for name, part in parts.items():
            steps |= _part_steps(name, [(module, *calls[module]) for module in part])
        return steps


def _part_steps(name: str, calls: list[tuple[Any, Any, Any]]) -> Steps:
    """Return the forward and the backward pass of some calls of modules."""
    import torch

    inputs: list[Any] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        inputs.append(value.detach().requires_grad_())
        return inputs[-1]

    given = [
        (module, [leaf(value) for value in args], {k: leaf(v) for k, v in options.items()})
        for module, args, options in calls
    ]

    def forward() -> tuple[Any, ...]:
        return tuple(module(*args, **options) for module, args, options in given)

    results = forward()
    cotangents = [torch.ones_like(result) for result in results]
    back = partial(torch.autograd.grad, results, inputs, cotangents, retain_graph=True)
    steps: Steps = {name: torch.no_grad()(forward), backward_of(name): back}
    return steps


def _ours(problem: Atoms, how: str, device: str, dtype: str, backend: BackendName | None) -> Any:
    """Return the model in fairchem's fastest mode by our ops."""
    import fusedops.compat.fairchem as compat

    mode = "umas_fast_pytorch" if device == "cpu" else "umas_fast_gpu"
    compat.register(turbo=True)
    try:
        model = _Model(problem, mode, device, dtype, forces=how == GRAPHS)
    finally:
        compat.unregister()
    return _by_graphs(model) if how == GRAPHS else model


def _by_graphs(model: _Model) -> Served:
    """Return the step of a model with forces and stress by CUDA graphs."""
    import torch

    from fusedops.compat.fairchem import ForceStep

    class Forces(torch.nn.Module):
        """The energy, and its gradients by positions and strain, as fairchem's head finds them."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = model.model

        def forward(self, data: Any) -> dict[str, Any]:
            pos, cell = data["pos"], data["cell"]
            energy = (self.backbone(data)["node_embedding"][:, 0] @ model.readout).sum()
            dpos, dcell = torch.autograd.grad(energy, (pos, cell))
            virial = pos.T @ dpos + cell[0].T @ dcell[0]
            return {"energy": energy, "dpos": dpos, "dstrain": (virial + virial.T) / 2}

    step = ForceStep(Forces().eval())
    return Served(_captured({BOTH: lambda: tuple([x.detach() for x in step(model.data).values()])}))


def _captured(steps: Steps) -> Steps:
    """Return a step that has a graph already: its errors and memory are those of later steps."""
    before = _reserved()
    for _ in range(3):
        steps[BOTH]()
    return {BOTH: memory.holding(steps[BOTH], _reserved() - before)}


def _reserved() -> int:
    """Return the bytes of the GPU that torch's allocator holds, for graphs too."""
    import torch

    if not torch.cuda.is_available():
        return 0
    # Earlier models may lie in reference cycles, whose memory comes free at any time.
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _theirs(mode: str) -> Callable[..., Steps]:
    def prepare(problem: Atoms, device: str) -> Steps:
        return _Model(problem, mode, device, "float32").steps()

    return prepare


for _mode, _devices in (
    ("general", ("cpu", "cuda")),
    ("umas_fast_pytorch", ("cpu", "cuda")),
    ("umas_fast_gpu", ("cuda",)),
):
    peer(_mode, "uma", package="fairchem.core", devices=_devices)(_theirs(_mode))


def uma_md(device: str) -> Step:
    """A step of a simulation: edges, energy, forces and stress of salt and of water."""
    return Step(
        "uma_md",
        fusedops.so2_convolution,
        (
            Case("NaCl", partial(_salt, 5, 5, 1), quick=True),
            Case("NaCl", partial(_salt, 4, 8, 8)),
            Case("water", partial(_water, 333)),
            Case("NaCl", partial(_salt, 5, 10, 25)),
        ),
        (Case("NaCl", _few),),
        1e-4,
        lambda few: _simulated("general", few, "cpu", "float64")[BOTH](),
        partial(_ours_simulated, None),
        device,
        needs=("torch", "scipy", "fairchem-core"),
        hows=(GRAPHS,),
        captured=False,
    )


def uma_md_tf32(device: str) -> Step:
    """The same with torch's switch for TF32, as fairchem's presets have it."""
    return replace(
        uma_md(device), name="uma_md_tf32", tolerance=0.02, ours=partial(_ours_simulated, "tf32")
    )


def _water(molecules: int) -> Atoms:
    """Return molecules of any direction on a shaken grid, 1 g/cm³."""
    rng = np.random.default_rng(0)
    edge, sites = (molecules * 18.015 / 0.60221) ** (1 / 3), int(np.ceil(molecules ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(sites)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    oxygen = (rng.permutation(grid)[:molecules] + 0.5) * edge / sites
    oxygen = oxygen + rng.normal(scale=0.12, size=oxygen.shape)
    half = np.radians(104.52) / 2
    place = 0.9572 * np.array(
        [[0, 0, 0], *([sign * np.sin(half), np.cos(half), 0] for sign in (1, -1))]
    )
    turns = np.linalg.qr(rng.normal(size=(molecules, 3, 3)))[0]
    xyz = (oxygen + place @ turns).reshape(-1, 3)
    return _with_edges(xyz, np.tile([8, 1, 1], molecules), np.eye(3) * edge)


def _force_model(mode: str, device: str, dtype: str, prepared: bool = True) -> Any:
    """Return fairchem's model with its head."""
    import torch
    from fairchem.core.models.uma.escn_md import MLP_EFS_Head, eSCNMDBackbone

    class Forces(torch.nn.Module):
        """A backbone and its head."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = eSCNMDBackbone(**SIMULATED, execution_mode=mode)
            self.head = MLP_EFS_Head(self.backbone, wrap_property=False)

        def forward(self, data: Any) -> Any:
            return self.head(data, self.backbone(data))

    torch.manual_seed(0)
    model = Forces().eval().to(device, getattr(torch, dtype))
    if prepared:
        model.backbone.backend.prepare_model_for_inference(model.backbone)
    return model.eval().requires_grad_(False)


#: Programs of fairchem's share a model of a mode; one of ours may not be among them.
_their_model = functools.cache(_force_model)


def _described(problem: Atoms, device: str, dtype: str) -> Any:
    """Return fairchem's description of atoms, without edges."""
    import ase
    import torch
    from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch

    atoms = ase.Atoms(problem.numbers, problem.xyz, cell=problem.cell, pbc=True)
    atoms.info |= {"charge": 0, "spin": 0}
    keys = {"task_name": "omat", "r_edges": False, "r_data_keys": ["spin", "charge"]}
    data = atomicdata_list_to_batch([AtomicData.from_ase(atoms, **keys)])
    for name in ("pos", "cell"):
        data[name] = data[name].to(getattr(torch, dtype))
    return data.to(device)


def _simulated(
    mode: str, problem: Atoms, device: str, dtype: str = "float32", compiles: bool = False
) -> Steps:
    """Return the step of fairchem's model in a mode, eager or compiled as by its presets."""
    import torch

    if mode == "general" and len(problem.xyz) > MOST:
        raise Unsuited("the general mode has no memory for so many atoms beside the others")
    model, data = _their_model(mode, device, dtype), _described(problem, device, dtype)
    return _forces(torch.compile(model, dynamic=True) if compiles else model, data)


def _forces(model: Any, data: Any) -> Steps:
    """Return the step of a function of data, which it may write to."""
    from fusedops.compat._force_steps import copied

    def step() -> tuple[Any, ...]:
        found = model(copied(data))
        return tuple([found[name].detach() for name in ("energy", "forces", "stress")])

    return {BOTH: step}


def _ours_simulated(
    precision: str | None, problem: Atoms, how: str, device: str, dtype: str, backend: Any
) -> Served:
    """Return the step by `ForceStep`."""
    import fusedops.compat.fairchem as compat

    compat.register(turbo=True, precision=precision)
    try:
        model = _force_model("umas_fast_gpu", device, dtype)
    finally:
        compat.unregister()
    steps = _forces(compat.ForceStep(model), _described(problem, device, dtype))
    return Served(_captured(steps if precision is None else _with_tf32(steps)))


def _with_tf32(steps: Steps) -> Steps:
    """Return steps that are computed with torch's switch for TF32."""
    return {what: _tf32()(step) for what, step in steps.items()}


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


for _mode in ("general", "umas_fast_gpu"):
    peer(_mode, "uma_md", package="fairchem.core", devices=("cuda",))(partial(_simulated, _mode))


@peer("umas_fast_gpu", "uma_md_tf32", package="fairchem.core", devices=("cuda",))
def fast_in_tf32(problem: Atoms, device: str) -> Steps:
    return _with_tf32(_simulated("umas_fast_gpu", problem, device))


@peer("umas_fast_gpu, compiled", "uma_md_tf32", package="fairchem.core", devices=("cuda",))
def compiled_in_tf32(problem: Atoms, device: str) -> Steps:
    return _with_tf32(_simulated("umas_fast_gpu", problem, device, compiles=True))


NITRO = "fairchem.core.models.uma.uma_nitro"


@peer("Nitro", "uma_md", "uma_md_tf32", package=NITRO, devices=("cuda",))
def nitro(problem: Atoms, device: str) -> Steps:
    """Nitro with the weights of the general mode; it computes in TF32 and float16."""
    kernels, model = _nitro(device)
    kernels._USE_GRAPH = True
    kernels.set_force_precision(True)
    data = _described(problem, device, "float32")
    return _captured(_forces(partial(kernels._nitro_forward, model), data))


@functools.cache
def _nitro(device: str) -> tuple[Any, Any]:
    """Return Nitro's module and a model, whose weights are the general mode's."""
    import importlib

    kernels = importlib.import_module(f"{NITRO}._inference")
    theirs = _their_model("general", "cpu", "float32", prepared=False)
    state = {f"module.backbone.{k}": v for k, v in theirs.backbone.named_parameters()}
    state |= {f"module.output_heads.efs.{k}": v for k, v in theirs.head.named_parameters()}
    of = {"backbone": {"dataset_mapping": SIZES["dataset_mapping"]}, "heads": {"efs": {}}}
    model = kernels.UMANitroModel(of, state).to(device).eval().requires_grad_(False)
    # As merging leaves a model; this one has no mixture of experts.
    model._experts = {}
    return kernels, model
