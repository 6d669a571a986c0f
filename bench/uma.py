"""A whole step of UMA: energy, forces and stress of atoms, by fairchem's model with random weights.

fairchem builds the model in each of its modes, from the same seed; ours is its fastest mode with
`fusedops.compat.fairchem`, in eager calls and by `ForceStep`. The edges are given. fairchem's Nitro
isn't among the peers, as it takes the weights of two published models only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import fusedops
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
        from fairchem.core.datasets.atomic_data import AtomicData
        from fairchem.core.models.uma.escn_md import eSCNMDBackbone
        from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

        kind = getattr(torch, dtype)

        def tensor(array: Any, kind: Any = torch.int64) -> Any:
            # fairchem's kernels read rows of edges as if they were contiguous.
            return torch.tensor(np.ascontiguousarray(array), dtype=kind, device=device)

        count = len(problem.xyz)
        of = {
            "pos": tensor(problem.xyz, kind),
            "atomic_numbers": tensor(problem.numbers),
            "cell": tensor(problem.cell, kind)[None],
            "pbc": torch.ones(1, 3, dtype=torch.bool, device=device),
            "natoms": tensor([count]),
            "edge_index": tensor(problem.edges),
            "cell_offsets": tensor(problem.images, kind),
            "nedges": tensor([problem.edges.shape[1]]),
            "charge": tensor([0]),
            "spin": tensor([0]),
            "fixed": torch.zeros(count, dtype=torch.int64, device=device),
            "tags": torch.zeros(count, dtype=torch.int64, device=device),
            "batch": torch.zeros(count, dtype=torch.int64, device=device),
        }
        self.data = AtomicData(**of, sid=[""], dataset=["omat"])
        self.data["atomic_numbers_full"] = of["atomic_numbers"]
        self.data["batch_full"] = of["batch"]
        torch.manual_seed(0)
        model = eSCNMDBackbone(
            **SIZES,
            otf_graph=False,
            direct_forces=False,
            regress_forces=forces,
            regress_stress=forces,
            execution_mode=mode,
        )
        readout = torch.randn(SIZES["sphere_channels"]) / count
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
        self.leaves = [leaf.clone().requires_grad_() for leaf in (of["pos"], strain)]

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
    return Served({BOTH: lambda: tuple([x.detach() for x in step(model.data).values()])})


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


@peer("nitro", "uma", package="fairchem.core.models.uma.uma_nitro", devices=("cuda",))
def nitro(problem: Atoms, device: str) -> Steps:
    """Nitro refuses random weights: it knows its two models by the hashes of their files."""
    raise Unsuited("takes the weights of two published models only")
