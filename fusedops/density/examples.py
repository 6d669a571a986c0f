"""Calls of densities, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops import maps
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.density.op import density, density_vjp, density_vjp_vjp
from fusedops.density.plan import Lattice
from fusedops.samples import atoms_in, ubiquitin


def cases() -> list[Case]:
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
                found.append(Case(f"{name}-{kind}", of, made, terms if order else terms // 8))

    found: list[Case] = []
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
    return found


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


def _density(name: str, *leaves: str, **options: Any) -> Example:
    return example(
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
        packs=not leaves,
    )


def examples() -> list[Example]:
    return [
        _density("density-iso", anisotropic=False),
        _density("density-aniso", "amplitudes", "widths", anisotropic=True),
    ]


def arguments() -> Arguments:
    cell = np.diag([5.0, 6.0, 7.0])
    return {
        fusedops.Lattice: {"cell": cell, "grid_shape": (4, 4, 4)},
        fusedops.gaussian_density: {
            "xyz": np.ones((2, 3)),
            "b": 20 * np.ones(2),
            "occupancy": np.ones(2),
            "amplitudes": np.ones((2, 1)),
            "widths": np.ones((2, 1)),
            "cell": cell,
            "grid_shape": (4, 4, 4),
            "radius": np.ones(2),
            "n_sigma": 4.0,
            "on_bad": "raise",
            "out": np.ones((4, 4, 4)),
        },
    }


def _draw(figure: Any) -> None:
    """Ubiquitin shaken by 0.2 Å (black), and where the gradient pulls its atoms (arrows)"""
    structure = ubiquitin()
    grid, atoms = maps.crystal_grid(structure, 2 / 3), maps.scattering_atoms(structure)
    atoms = atoms.blurred(atoms.needed_blur(2 / 3))
    shape, steps = grid.shape, np.diag(grid.matrix) / grid.shape
    home = atoms.xyz % np.diag(grid.matrix)
    moved = home + np.random.default_rng(5).normal(scale=0.2, size=home.shape)
    rest = atoms.b, atoms.occupancy, atoms.amplitudes, atoms.widths, grid.matrix, shape
    true = fusedops.gaussian_density(home, *rest, radius=2.5)
    rho, pullback = fusedops.gaussian_density.vjp(moved, *rest, radius=2.5, wrt=("xyz",))
    off = true - rho
    pull = pullback(off)[0]
    # The plane of voxels with the most atoms.
    z = int(np.bincount(np.rint(home[:, 2] / steps[2]).astype(int)).argmax())
    near = np.flatnonzero(abs(home[:, 2] - z * steps[2]) < 1.2)
    lengths = np.linalg.norm(home[near, None] - home[near], axis=-1)
    bonds = near[np.argwhere(np.triu(lengths < 1.95, 1))]
    panel = figure.subplots()
    x, y = np.arange(shape[0]) * steps[0], np.arange(shape[1]) * steps[1]
    blue, red, green = "#5b8fc9", "#d0463b", "#2e9e5b"
    for values, sigmas, inks in ((true, [2, 4, 6], [blue] * 3), (off, [-3, 3], [red, green])):
        levels = values.std() * np.array(sigmas)
        panel.contour(x, y, values[:, :, z].T, levels, colors=inks, linewidths=0.8)
    for xyz, colour in ((home, "0.7"), (moved, "black")):
        panel.plot(*xyz[bonds, :2].transpose(2, 1, 0), color=colour, linewidth=1.5)
    panel.quiver(*moved[near, :2].T, *pull[near, :2].T, angles="xy", color="C1", width=0.003)
    middle = np.median(home[near], axis=0)
    panel.set(xlim=middle[0] + [-16, 16], ylim=middle[1] + [-9, 9], aspect="equal")
    panel.set(xlabel="x, Å. Blue: the true density. Green: it is 3 σ above the model's; red: below")


pictures = {"gaussian_density": _draw}
