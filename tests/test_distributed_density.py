"""A map of which every rank has a slab, and its structure factors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

import fusedops  # noqa: E402
from fusedops import Lattice, crystal, gaussian_density  # noqa: E402
from fusedops.distributed import share  # noqa: E402
from fusedops.samples import atoms_in  # noqa: E402
from replicated import bounds  # noqa: E402
from worlds import device, on_ranks  # noqa: E402

CELL, SHAPE = np.array([[9.0, 3.0, -4.0], [0.0, 8.0, 3.0], [0.0, 0.0, 7.0]]), (9, 8, 6)
#: Planes of two and three ranks: numbers that differ, and a rank without a plane.
PLANES = {"uneven": {2: (4, 5), 3: (2, 4, 3)}, "empty": {2: (0, 9), 3: (5, 0, 4)}}
kinds = pytest.mark.parametrize("anisotropic", [False, True], ids=["iso", "aniso"])


def atoms(anisotropic):
    """Return the same atoms on every rank: arrays with gradients, and form factors."""
    found = atoms_in(CELL, 7, np.random.default_rng(0), anisotropic=anisotropic)
    tensors = [torch.tensor(array, device=device()) for array in found]
    return [array.requires_grad_() for array in tensors[:3]], tensors[3:]


def slab_of(sizes):
    return Lattice(CELL, SHAPE).to(device()).slab(*bounds(sizes))


@kinds
@pytest.mark.parametrize("planes", PLANES)
@on_ranks
def test_gradients_of_shared_atoms_are_the_whole_maps(planes, anisotropic):
    """First and second derivatives of a sum of squares, on every rank."""
    leaves, factors = atoms(anisotropic)
    sizes = PLANES[planes][dist.get_world_size()]
    shared = share(*leaves, group=dist.group.WORLD)
    found = []
    for given, lattice, ranks in (
        (shared, slab_of(sizes), dist.get_world_size()),
        (leaves, Lattice(CELL, SHAPE).to(device()), 1),
    ):
        map = gaussian_density(*given, *factors, lattice, radius=2.3, on_bad="skip")
        first = torch.autograd.grad(map.square().sum(), leaves, create_graph=True)
        # All ranks have these gradients, so the loss of each is a part of their function.
        along = sum(g.square().sum() for g in first) / ranks
        found.append([*first, *torch.autograd.grad(along, leaves)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@on_ranks
def test_structure_factors_of_a_map_that_no_rank_has():
    """The example of the docs, as it stands there."""
    page = (Path(__file__).parent.parent / "docs" / "many-gpus.md").read_text(encoding="utf-8")
    (example,) = [text for text in re.findall(r"```py\n(.*?)```", page, re.S) if "rfft2" in text]
    leaves, factors = atoms(False)
    hkl = torch.tensor([[1, 0, 0], [0, 2, 1], [-2, 1, 2], [3, -1, 0], [0, 0, 0]], device=device())
    cell, lattice = torch.tensor(CELL, device=device()), Lattice(CELL, SHAPE).to(device())
    target = torch.arange(1.0, 6.0, device=device(), dtype=torch.float64)
    names = {"torch": torch, "dist": dist, "fusedops": fusedops, "fd": fusedops.distributed}
    names |= dict(zip(("xyz", "b", "occupancy"), leaves, strict=True))
    names |= dict(zip(("amplitudes", "widths"), factors, strict=True))
    names |= {"lattice": lattice, "hkl": hkl, "observed": target, "group": dist.group.WORLD}
    names["volume"] = torch.linalg.det(cell).abs()
    exec(example, names)

    whole = gaussian_density(*leaves, *factors, lattice, on_bad="skip")
    want = crystal.structure_factors(whole, hkl, cell)
    torch.testing.assert_close(names["F"], want[names["own"]])
    got = torch.autograd.grad(names["loss"], leaves)
    wanted = torch.autograd.grad((want.abs() - target).square().sum(), leaves)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
