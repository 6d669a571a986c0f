"""Realistic molecules, grids and pair representations for tests, benches and the demo."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedops.density.op import COMPONENTS
from fusedops.trimul.op import ARRAYS
from fusedops.wigner.rows import message_rows

if TYPE_CHECKING:
    from fusedops.structure import Structure

__all__ = ["atoms_in", "backbone", "convolved", "cubes", "pair", "protein", "ubiquitin"]


def protein(
    residues: int, rng: np.random.Generator, *, noise: float = 0.02
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a chain of flat peptides with side chains, for planarity.

    Parameters
    ----------
    residues : int
        The number of peptides; every fourth residue carries a carboxylate, every eighth a
        six-membered ring, every sixteenth an indole.
    rng : numpy.random.Generator
        The source of directions and noise.
    noise : float
        Standard deviation in Å of every coordinate.

    Returns
    -------
    xyz : array (N, 3), float64
        Coordinates in Å.
    indices : list of array (P, n), int64
        The atoms of the planes, an array for every size n. Neighbouring peptides share a Cα.

    Examples
    --------
    >>> import numpy as np
    >>> xyz, indices = protein(16, np.random.default_rng(0))
    >>> xyz.shape, [index.shape for index in indices]
    ((102, 3), [(16, 5), (4, 4), (2, 6), (1, 9)])
    """

    def frames(count: int) -> tuple[np.ndarray, np.ndarray]:
        along, across = rng.normal(size=(2, count, 3))
        along /= np.linalg.norm(along, axis=1, keepdims=True)
        across -= (along * across).sum(1, keepdims=True) * along
        return along, across / np.linalg.norm(across, axis=1, keepdims=True)

    def placed(origin: np.ndarray, shape: np.ndarray) -> np.ndarray:
        along, across = frames(len(origin))
        return origin[:, None] + np.einsum("ak,kpi->pai", shape, np.stack([along, across]))

    angle = np.deg2rad(60.0 * np.arange(6))
    ring = 1.39 * np.stack([np.cos(angle), np.sin(angle)], 1) + [2.9, 0.0]
    indole = np.concatenate([ring, [[0.9, 1.9], [-0.3, 1.2], [0.2, 0.0]]])
    carboxylate = np.array([[0.0, 0.0], [1.52, 0.0], [2.1, 1.06], [2.1, -1.06]])
    peptide = np.array([[0.0, 0.0], [1.42, 0.58], [1.6, 1.8], [2.43, -0.33]])

    along, across = frames(residues)
    alpha = np.concatenate([np.zeros((1, 3)), np.cumsum(3.8 * along, axis=0)])
    backbone = alpha[:-1, None] + np.einsum("ak,kpi->pai", peptide, np.stack([along, across]))
    atoms = [backbone.reshape(-1, 3), alpha[-1:]]
    indices: list[np.ndarray] = [4 * np.arange(residues)[:, None] + [0, 1, 2, 3, 4]]
    at = 4 * residues + 1
    for shape, period in ((carboxylate, 4), (ring, 8), (indole, 16)):
        side = placed(alpha[:-1:period], shape)
        atoms.append(side.reshape(-1, 3))
        indices.append(at + np.arange(side[..., 0].size).reshape(side.shape[:2]))
        at += side[..., 0].size
    xyz = np.concatenate(atoms)
    return xyz + noise * rng.normal(size=xyz.shape), indices


def backbone(residues: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    """Return a chain of peptides with Cβ atoms and restraints of all kinds, for geometry.

    Parameters
    ----------
    residues : int
        The number of peptides, from which on there is a Cβ at every inner Cα.
    rng : numpy.random.Generator
        The source of coordinates and ideals.

    Returns
    -------
    xyz : array (5 * residues, 3), float64
        Coordinates in Å.
    restraints : dict
        The arguments of `fusedops.Restraints`.

    Examples
    --------
    >>> import fusedops, numpy as np
    >>> xyz, restraints = backbone(16, np.random.default_rng(0))
    >>> len(xyz), fusedops.Restraints(**restraints).counts
    (80, (79, 124, 46, 15, 705, 79))
    """
    chain = protein(residues, rng, noise=0.05)[0][: 4 * residues + 1]
    alpha = 4 * np.arange(residues)[:, None]
    inner = alpha[1:]
    beta = 4 * residues + np.arange(1, residues)[:, None]
    carbon, nitrogen = chain[inner + 1] - chain[inner], chain[inner - 1] - chain[inner]
    side = 0.6 * np.cross(nitrogen, carbon) - carbon - nitrogen
    side *= 1.53 / np.linalg.norm(side, axis=-1, keepdims=True)
    xyz = np.concatenate([chain, (chain[inner] + side)[:, 0]])

    def near(number: float, spread: float, count: int) -> np.ndarray:
        return number + spread * rng.normal(size=count)

    peptide = [[0, 1], [1, 2], [1, 3], [3, 4]]
    bonds = np.concatenate([*[alpha + ends for ends in peptide], np.hstack([inner, beta])])
    corners = [[0, 1, 2], [0, 1, 3], [2, 1, 3], [1, 3, 4]]
    angles = np.concatenate(
        [
            *[alpha + corner for corner in corners],
            inner + [-1, 0, 1],
            *[np.hstack([inner + end, inner, beta]) for end in (-1, 1)],
            np.hstack([inner, inner + 1, beta])[:, [1, 0, 2]],
        ]
    )
    omega = alpha + [0, 1, 3, 4]
    others = np.concatenate([inner + [-1, 0, 1, 3], inner + [-3, -1, 0, 1]])
    torsions = np.concatenate([omega, others])
    free = np.ones(len(others))
    tight = np.ones(residues)
    chirals = np.hstack([inner, inner - 1, inner + 1, beta])
    atoms = len(xyz)
    contacts = np.concatenate(
        [
            np.stack([np.arange(atoms - k), np.arange(k, atoms)], 1)
            for k in range(5, 15)
            if k < atoms
        ]
        or [np.empty((0, 2), np.int64)]
    )
    turn = np.array([[0.0, -1, 0, 1.5], [1, 0, 0, -0.5], [0, 0, 1, 0.8]])
    images = np.where(np.arange(len(contacts)) % 7, -1, 0)
    return xyz, {
        "bonds": {"indices": bonds, "ideals": near(1.45, 0.05, len(bonds)), "sigmas": 0.05},
        "angles": {"indices": angles, "ideals": near(112.0, 8, len(angles)), "sigmas": 8.0},
        "torsions": {
            "indices": torsions,
            "ideals": np.append(180 * tight, near(-60.0, 10, len(free))),
            "sigmas": np.append(15 * tight, 25 * free),
            "periods": np.append(tight, 3 * free).astype(np.int64),
            "opposite": np.append(0.05 * tight, 0 * free),
        },
        "chirals": {
            "indices": chirals,
            "ideals": np.where(np.arange(len(chirals)) % 5, near(2.5, 0.1, len(chirals)), 0.0),
            "sigmas": 0.3,
        },
        "contacts": {
            "indices": contacts,
            "distances": near(3.4, 0.3, len(contacts)),
            "sigmas": 0.8,
            "weights": np.where(images < 0, 1.0, 0.5),
            "images": images,
            "operations": turn[None],
        },
        "b_pairs": {"indices": bonds, "sigmas": 2.0},
    }


def ubiquitin() -> Structure:
    """Return the structure of ubiquitin, 1UBI, from the package's data.

    Returns
    -------
    fusedops.structure.Structure

    Examples
    --------
    >>> ubiquitin().xyz.shape
    (683, 3)
    """
    from fusedops.structure import read_structure

    data = importlib.resources.files("fusedops") / "data/1ubi.pdb"
    with importlib.resources.as_file(data) as path:
        return read_structure(path)


def atoms_in(
    cell: np.ndarray, count: int, rng: np.random.Generator, *, anisotropic: bool = False
) -> tuple[np.ndarray, ...]:
    """Return atoms like a protein's, as arguments of `fusedops.gaussian_density`.

    Parameters
    ----------
    cell : (3, 3) array
        The cell, Å; the atoms lie in it and around it.
    count : int
        The number of atoms.
    rng : numpy.random.Generator
        The source of positions, B and elements.
    anisotropic : bool
        Whether `b` is U instead of B.

    Returns
    -------
    xyz, b, occupancy, amplitudes, widths : array, float64

    Examples
    --------
    >>> import numpy as np
    >>> atoms = atoms_in(np.diag([9.0, 11.0, 13.0]), 4, np.random.default_rng(0))
    >>> [array.shape for array in atoms]
    [(4, 3), (4,), (4,), (4, 5), (4, 5)]
    """
    xyz = rng.uniform(-0.5, 1.5, (count, 3)) @ cell.T
    # Carbon, and a heavier scatterer with a negative constant.
    table = np.array(
        [
            [[2.31, 1.02, 1.5886, 0.865, 0.2156], [20.8439, 10.2075, 0.5687, 51.6512, 0.0]],
            [[6.9053, 5.2034, 1.4379, 1.5863, -0.1], [1.4679, 22.2151, 0.2536, 56.172, 0.0]],
        ]
    )
    amplitudes, widths = table[rng.integers(0, 2, count)].transpose(1, 0, 2)
    b = rng.uniform(10, 40, count)
    if anisotropic:
        factor = 0.2 * rng.normal(size=(count, 3, 3))
        U = factor @ factor.transpose(0, 2, 1) + 0.15 * np.eye(3)
        b = np.stack([U[:, i, j] for i, j in COMPONENTS], 1)
    return xyz, b, rng.uniform(0.3, 1, count), amplitudes, widths


def convolved(
    rng: np.random.Generator,
    edges: int,
    lmax: int,
    mmax: int,
    channels: int,
    width: int,
    gates: int,
    *,
    radial: bool = True,
    bias: bool = True,
) -> dict[str, np.ndarray]:
    """Return messages and the weights of an SO(2) convolution, by name.

    Parameters
    ----------
    rng : numpy.random.Generator
        The source of the numbers.
    edges, lmax, mmax : int
        The number of messages, and their largest degree and order.
    channels, width, gates : int
        The channels of messages and of the result, and the number of gates.
    radial, bias : bool
        Whether there are radial functions and a bias.

    Returns
    -------
    dict of str to array, float64
        Arguments of `fusedops.so2_convolution`.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = convolved(np.random.default_rng(0), 5, 2, 1, 8, 4, 8)
    >>> arrays["message"].shape, arrays["weight_m1"].shape, arrays["radial"].shape
    ((5, 7, 8), (16, 16), (5, 40))
    """
    shapes: dict[str, tuple[int, ...]] = {
        "message": (edges, message_rows(lmax, mmax), channels),
        "weight_m0": (gates + (lmax + 1) * width, (lmax + 1) * channels),
    }
    functions = lmax + 1
    for m in range(1, mmax + 1):
        degrees = lmax + 1 - m
        shapes[f"weight_m{m}"] = 2 * degrees * width, degrees * channels
        functions += degrees
    if bias:
        shapes["bias"] = shapes["weight_m0"][:1]
    if radial:
        shapes["radial"] = edges, functions * channels
    return {
        name: rng.normal(size=shape) / (np.sqrt(max(shape[1], 1)) if "weight" in name else 1.0)
        for name, shape in shapes.items()
    }


def cubes(
    rng: np.random.Generator, count: int, grid: tuple[int, int, int], cube: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets of cubes around points of a periodic grid, as in TorchRef.

    Parameters
    ----------
    rng : numpy.random.Generator
        The source of the points.
    count : int
        The number of cubes.
    grid, cube : (int, int, int)
        The numbers of voxels along each edge.

    Returns
    -------
    wa : array (count, cube[0]), int64
        Offsets of the planes of every cube.
    wbwc : array (count, cube[1], cube[2]), int64
        Offsets within a plane.

    Examples
    --------
    >>> import numpy as np
    >>> wa, wbwc = cubes(np.random.default_rng(0), 5, (8, 9, 10), (3, 4, 2))
    >>> wa.shape, wbwc.shape
    ((5, 3), (5, 4, 2))
    """
    sizes = np.array(grid)[:, None]
    centre = rng.integers(0, sizes, (3, count))
    x, y, z = (
        (c[:, None] + np.arange(m) - m // 2) % n for c, m, n in zip(centre, cube, grid, strict=True)
    )
    return x * (grid[1] * grid[2]), y[:, :, None] * grid[2] + z[:, None]


def pair(
    B: int,
    N: int,
    C: int,
    H: int,
    rng: np.random.Generator,
    *,
    gate: str = "output",
    mask: bool | None = None,
    norms: bool = True,
    biases: bool = False,
    D: int | None = None,
) -> dict[str, np.ndarray | None]:
    """Return a pair representation (B, N, N, C) and the weights of the triangle update, by name.

    Parameters
    ----------
    B, N, C, H : int
        Batch size, residues, channels of the pair representation, channels of left and right.
    rng : numpy.random.Generator
        The source of the numbers, which every dtype represents exactly.
    gate : {"output", "hidden"}
        As in `fusedops.triangle_multiplicative_update`.
    mask : bool, optional
        True for a mask of zeros and ones, which hides the last row and column; False for a mask of
        arbitrary numbers; None for no mask.
    norms, biases : bool
        Whether the LayerNorms have weights and biases; whether projections and gates have biases.
    D : int, optional
        Channels of the output; C by default.

    Returns
    -------
    dict of str to array or None, float64
        In the order of the update's arrays.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = pair(1, 5, 4, 3, np.random.default_rng(0))
    >>> arrays["x"].shape, arrays["p_in_weight"].shape, arrays["mask"]
    ((1, 5, 5, 4), (6, 4), None)
    """
    D = C if D is None else D
    gated = D if gate == "output" else H
    shapes: dict[str, tuple[int, ...]] = {"x": (B, N, N, C)}
    if norms:
        for name, n in (("norm_in", C), ("norm_out", H)):
            shapes |= {f"{name}_weight": (n,), f"{name}_bias": (n,)}
    for name, shape in (
        ("p_in", (2 * H, C)),
        ("g_in", (2 * H, C)),
        ("p_out", (D, H)),
        ("g_out", (gated, C)),
    ):
        shapes[f"{name}_weight"] = shape
        if biases:
            shapes[f"{name}_bias"] = shape[:1]
    arrays: dict[str, np.ndarray | None] = dict.fromkeys(ARRAYS)
    for name, sizes in shapes.items():
        values = rng.normal(size=sizes)
        if name.startswith("norm"):
            values = 0.3 * values + name.endswith("weight")
        arrays[name] = exact(values / (np.sqrt(sizes[1]) if len(sizes) == 2 else 1.0))
    if mask is not None:
        values = rng.uniform(size=(B, N, N))
        values = np.round(0.3 + values) if mask else exact(2 * values)
        if mask and N > 1:
            values[:, -1] = values[:, :, -1] = 0.0
        arrays["mask"] = values
    return arrays


def exact(array: np.ndarray, step: float = 1 / 32) -> np.ndarray:
    """Return an array rounded to 8 bits, which every dtype represents exactly."""
    return step * np.clip(np.round(array / step), -255, 255)
