"""Times the Gaussian density, forward and backward, beside its peers and its floor.

    python bench/density.py [--device cuda] [--model FILE] [--json FILE]

Rounds are interleaved in one process and a table of medians is printed, in ms. The floor is five
exponentials for every voxel of every atom's sphere, Σ 4/3 π r³ / voxel volume of them, forward, and
as many backward, at the rate of exponentials measured here. A kernel that finds an exponential from
its neighbours can be faster; bytes take a small part of it. Peers are left out where they are not
installed: the kernels of TorchRef 0.7 (torchref-kernels), and gemmi, which works on the atoms of a
structure, without symmetry, with one thread; there ours have one too, and reach as far as gemmi's
at its cutoff of 1e-5 electrons/Å³.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import (
    COPIES,
    bandwidth,
    exponentials,
    graphed,
    interleaved,
    machine,
    print_table,
    save,
    waiting,
)

import fusedops
from fusedops._registry import Call
from fusedops.density import Lattice, Scatterers, atom_radius, density_vjp
from fusedops.density import density as definition
from fusedops.testing import atoms_in, error

density = fusedops.gaussian_density
GAUSSIANS = 5
UBIQUITIN = Path(__file__).parents[1] / "fusedops/data/1ubi.pdb"


class Atoms:
    """Atoms as `gaussian_density` takes them, in float32, with a cotangent of their map."""

    def __init__(self, arrays: Any, radius: Any, cell: np.ndarray, shape: Any) -> None:
        self.arrays = [np.ascontiguousarray(array, np.float32) for array in arrays]
        self.radius = np.asarray(radius, np.float32)
        self.cell, self.shape = cell, tuple(shape)
        self.lattice = Lattice(cell, shape)
        rng = np.random.default_rng(1)
        self.cotangent = rng.standard_normal(self.shape, dtype=np.float32)
        self.kind = "anisotropic" if self.arrays[1].ndim == 2 else "isotropic"

    @classmethod
    def random(cls, count: int, edge: float, n: int, radius: float | None, kind: str) -> Atoms:
        """Anywhere in a cubic cell; they reach as far as the rule says, unless told."""
        cell, rng = np.diag([edge] * 3), np.random.default_rng(0)
        arrays = atoms_in(cell, count, rng, anisotropic=kind == "anisotropic")
        far = atom_radius(arrays[1], arrays[4]) if radius is None else np.full(count, radius)
        return cls(arrays, far, cell, (n, n, n))

    def floor_ms(self, what: str, rate: float) -> float:
        voxel = abs(float(np.linalg.det(self.cell))) / math.prod(self.shape)
        voxels = 4 / 3 * math.pi * float((self.radius.astype(float) ** 3).sum()) / voxel
        return (2 if "+" in what else 1) * GAUSSIANS * voxels / rate * 1e3

    def forward(self, backend: str | None = None) -> np.ndarray:
        return density(*self.arrays, self.lattice, radius=self.radius, backend=backend)

    def both(self, backend: str | None = None) -> tuple[np.ndarray, ...]:
        value, pullback = density.vjp(
            *self.arrays, self.lattice, radius=self.radius, backend=backend
        )
        return value, *pullback(self.cotangent)


def torchref(atoms: Atoms, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return forward and both passes of TorchRef's native kernels, called without its checks."""
    from torchref_kernels import native

    kernels, threads = native(), fusedops.get_num_threads()
    name = f"sphere_{'aniso' if atoms.kind == 'anisotropic' else 'iso'}"
    bits = f"f{torch.finfo(dtype).bits}"

    def flat(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(dtype).contiguous().view(-1)

    def buffers(*tensors: torch.Tensor) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    inputs = [flat(array) for array in (*atoms.arrays, atoms.radius**2)]
    inputs += [flat(np.linalg.inv(atoms.cell)), flat(atoms.cell)]
    cotangent = flat(atoms.cotangent)

    def forward() -> torch.Tensor:
        out = torch.zeros(math.prod(atoms.shape), dtype=dtype)
        run = getattr(kernels, f"{name}_fwd_{bits}")
        run(*buffers(out, *inputs), *atoms.shape, threads)
        return out.view(atoms.shape)

    def both() -> tuple[torch.Tensor, ...]:
        value = forward()
        gradients = [torch.zeros(array.shape, dtype=dtype) for array in atoms.arrays[:3]]
        run = getattr(kernels, f"{name}_bwd_{bits}")
        run(*buffers(*gradients, cotangent, *inputs), *atoms.shape, threads)
        return value, *gradients

    return forward, both


def on_cpu(rate: float, model: Path) -> list[dict[str, Any]]:
    rows = []
    for kind in ("isotropic", "anisotropic"):
        atoms = Atoms.random(20_000, 60.0, 120, None, kind)
        forward: dict[str, Callable[[], Any]] = {
            "fusedops": atoms.forward,
            "fusedops, Numba": partial(atoms.forward, "numba"),
        }
        training: dict[str, Callable[[], Any]] = {
            "fusedops": atoms.both,
            "fusedops, Numba": partial(atoms.both, "numba"),
        }
        try:
            # Its anisotropic float32 takes many seconds.
            narrow = [torch.float32] if kind == "isotropic" else []
            for dtype in (*narrow, torch.float64):
                name = f"TorchRef, {str(dtype).removeprefix('torch.')}"
                forward[name], training[name] = torchref(atoms, dtype)
                off = max(map(error, training[name](), atoms.both()))
                print(f"{kind}: fusedops and {name} differ by {off:.1e} of an array's largest")
        except ImportError:
            print("TorchRef's kernels are left out: torchref-kernels is not installed.")
        rows.append(row(atoms, f"{kind}, forward", forward, rate, "cpu"))
        rows.append(row(atoms, f"{kind}, forward + backward", training, rate, "cpu"))
    models = dict.fromkeys((UBIQUITIN, model))
    return [*rows, *(row for given in models for row in beside_gemmi(rate, given))]


def beside_gemmi(rate: float, model: Path, spacing: float = 0.66) -> list[dict[str, Any]]:
    """One thread each, with equal atoms, grid and radii; every atom by its isotropic B."""
    try:
        import gemmi
    except ImportError:
        print("gemmi is left out: it is not installed.")
        return []
    from fusedops.maps import scattering_atoms
    from fusedops.structure import read_structure

    structure = read_structure(model)
    for cra in structure.gemmi[0].all():
        cra.atom.aniso = gemmi.SMat33f(0, 0, 0, 0, 0, 0)
    atoms = scattering_atoms(structure)
    if not structure.gemmi.cell.is_crystal() or any(not op.given for op in structure.gemmi.ncs):
        raise SystemExit(f"{model}: a structure with a cell, all of it in the file, is needed")
    structure.gemmi.spacegroup_hm = "P 1"
    calculator = gemmi.DensityCalculatorX()
    calculator.rate, calculator.d_min = 1.5, 3 * spacing
    calculator.blur = atoms.needed_blur(spacing)
    calculator.set_grid_cell_and_spacegroup(structure.gemmi)
    put = partial(calculator.put_model_density_on_grid, structure.gemmi[0])
    put()
    theirs = np.array(calculator.grid)
    # In the order of the file, which scattering_atoms may change.
    radius = np.array([calculator.estimate_radius(cra.atom) for cra in structure.gemmi[0].all()])
    wider = atoms.blurred(calculator.blur)
    arrays = wider.xyz, wider.b, wider.occupancy, wider.amplitudes, wider.widths
    cell = np.array(structure.gemmi.cell.orth.mat.tolist())
    ours = Atoms(arrays, radius[np.argsort(structure._order)], cell, theirs.shape)
    threads = fusedops.get_num_threads()
    fusedops.set_num_threads(1)
    try:
        off = error(ours.forward(), theirs)
        print(f"{model.name}: the maps of fusedops and gemmi differ by {off:.1e} of the largest")
        runs = {"fusedops": ours.forward, "gemmi": put}
        what = f"{ours.kind}, forward, {model.name}, one thread"
        # All threads together have the rate.
        return [row(ours, what, runs, rate / threads, "cpu")]
    finally:
        fusedops.set_num_threads(threads)


def on_gpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    for count, n in ((50_000, 320), (3_000, 128)):
        for kind in ("isotropic", "anisotropic"):
            atoms = Atoms.random(count, 0.52 * n, n, 4.0, kind)
            arrays = [torch.tensor(array, device="cuda") for array in atoms.arrays]
            radius, cotangent = (
                torch.tensor(array, device="cuda") for array in (atoms.radius, atoms.cotangent)
            )
            lattice = atoms.lattice.to("cuda")
            call = Call(definition, (lattice, Scatterers.of(*arrays[3:], radius)), None)
            given = *arrays[:3], cotangent
            steps = {
                "forward": partial(density, *arrays, lattice, radius=radius, on_bad="skip"),
                "backward": partial(call.other, density_vjp, given, (True, True, True)),
            }
            for what, step in steps.items():
                runs = {"fusedops": graphed(step)}
                rows.append(row(atoms, f"{kind}, {what}", runs, rate, "cuda"))
    return rows


def row(
    atoms: Atoms, what: str, runs: dict[str, Callable[[], Any]], rate: float, device: str
) -> dict[str, Any]:
    times = interleaved(runs, waiting(device), rounds=25 if device == "cuda" else 7)
    if device == "cuda":
        times = {name: time_ms / COPIES for name, time_ms in times.items()}
    times["floor"] = atoms.floor_ms(what, rate)
    shape = len(atoms.radius), "×".join(map(str, atoms.shape))
    return {"shape": shape, "dtype": "float32", "what": what, "device": device, "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, default=UBIQUITIN, help="for gemmi too: PDB or mmCIF")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(fusedops.get_num_threads())
    rate = exponentials(arguments.device)
    gpu = arguments.device == "cuda"
    rows = on_gpu(rate) if gpu else on_cpu(rate, arguments.model)
    where = {
        **machine(arguments.device),
        "exponentials_G_s": rate / 1e9,
        "bandwidth_GB_s": bandwidth(arguments.device) / 1e9,
    }
    print_table(where, "atoms, map", rows, "floor")
    save(arguments.json, {**where, "rows": rows})


if __name__ == "__main__":
    main()
