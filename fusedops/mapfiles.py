"""Maps beside the one that is calculated: a CCP4 map to match, labels, and an MTZ file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fusedops import maps
from fusedops._frame.check import positive, real, refuse
from fusedops.maps import MapGrid
from fusedops.structure import Structure, StructureError, _gemmi

__all__ = [
    "MapTarget",
    "check_mtz_name",
    "check_reflections",
    "largest_spacing",
    "read_map",
    "set_labels",
    "target_grid",
    "write_mtz",
]

_LABELS, _LABEL_LENGTH = 10, 80
_SPELLINGS = {"Å": "A", "²": "^2", "³": "^3", "σ": "sigma"}
# 32 bits hold a map to 1e-7 of its sum: this factor leaves three digits of a reflection.
_LARGEST_SHARPENING = 1e4


@dataclass(frozen=True, eq=False)
class MapTarget:
    """A CCP4 map that another map should match, voxel by voxel.

    Attributes
    ----------
    path : str
        The file it was read from.
    grid : MapGrid
        The whole unit cell, from its origin on.
    start : tuple of int
        The first voxel of the file, counted from the cell's origin.
    rho : (nx, ny, nz) float32 array
        The voxels that the file holds.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> atoms = maps.scattering_atoms(ubiquitin).blurred(30.0)
    >>> ccp4 = maps.density_map(atoms, maps.crystal_grid(ubiquitin, 1.0))
    >>> maps.write_map("density.ccp4", ccp4)
    >>> target = read_map("density.ccp4")
    >>> target.grid.shape, target.start, round(target.correlation(ccp4.grid.array), 6)
    ((54, 48, 30), (0, 0, 0), 1.0)
    """

    path: str
    grid: MapGrid
    start: tuple[int, int, int]
    rho: np.ndarray = field(repr=False)

    def part(self, ccp4: Any) -> Any:
        """Return the voxels of a map of the whole cell that the file holds.

        Parameters
        ----------
        ccp4 : gemmi.Ccp4Map
            From `fusedops.maps.density_map`, on `grid`.

        Returns
        -------
        gemmi.Ccp4Map
            With the extent, and the place in space, of the file.

        Examples
        --------
        >>> from importlib.resources import files
        >>> from fusedops.structure import read_structure
        >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
        >>> atoms = maps.scattering_atoms(ubiquitin).blurred(30.0)
        >>> ccp4 = maps.density_map(atoms, maps.crystal_grid(ubiquitin, 1.0))
        >>> maps.write_map("density.ccp4", ccp4)
        >>> read_map("density.ccp4").part(ccp4).grid.shape
        (54, 48, 30)
        """
        gemmi = _gemmi()
        whole, grid = ccp4.grid.array, self.grid
        part = gemmi.Ccp4Map()
        part.grid.set_size(*self.rho.shape)
        x, y, z = (
            np.arange(first, first + n) % edge
            for first, n, edge in zip(self.start, self.rho.shape, grid.shape, strict=True)
        )
        # Plane by plane, in the order of memory: a large map allows no copies.
        for to, at in zip(part.grid.array.T, z, strict=True):
            to[:] = whole.T[at][np.ix_(y, x)]
        part.grid.set_unit_cell(grid.cell)
        part.grid.spacegroup = ccp4.grid.spacegroup
        part.update_ccp4_header(2)
        for axis in range(3):
            part.set_header_i32(5 + axis, self.start[axis])
            part.set_header_i32(8 + axis, grid.shape[axis])
            part.set_header_float(50 + axis, grid.shift[axis])
        return part

    def correlation(self, rho: np.ndarray) -> float | None:
        """Return Pearson's correlation of the file with another map.

        Parameters
        ----------
        rho : (nx, ny, nz) array
            On the same voxels, as `part` returns them.

        Returns
        -------
        float or None
            Over the voxels with numbers in both maps; None if one of the maps is constant there.

        Examples
        --------
        >>> grid = maps.box_grid(np.zeros((1, 3)), spacing=1.0, margin=2.0)
        >>> rho = np.arange(125.0).reshape(5, 5, 5)
        >>> MapTarget("x.map", grid, (0, 0, 0), rho).correlation(3 - 2 * rho)
        -1.0
        """
        # Plane by plane, in the order of memory: a large map allows no copy in 64 bits.
        planes = [*zip(self.rho.T, rho.T, strict=True)]
        count, total = 0, np.zeros(2)
        least, most = np.full(2, math.inf), np.full(2, -math.inf)
        for plane in planes:
            pair = _both(*plane)
            count += pair.shape[1]
            total += pair.sum(axis=1)
            least = np.minimum(least, pair.min(axis=1, initial=math.inf))
            most = np.maximum(most, pair.max(axis=1, initial=-math.inf))
        if not (least < most).all():
            return None
        products = np.zeros((2, 2))
        for plane in planes:
            off = _both(*plane) - (total / count)[:, None]
            products += off @ off.T
        (aa, ab), (_, bb) = products
        return float(ab / math.sqrt(aa * bb))


def _both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the voxels with numbers in both planes, (2, N) float64."""
    there = np.isfinite(a) & np.isfinite(b)
    return np.stack([a[there], b[there]]).astype(np.float64)


def read_map(path: str | os.PathLike) -> MapTarget:
    """Read a CCP4 or MRC map, of a whole unit cell or of a part, with axes in any order.

    Parameters
    ----------
    path : str or path-like
        The file, plain or gzipped.

    Returns
    -------
    MapTarget

    Raises
    ------
    StructureError
        The file can't be read, or its header has no unit cell, a space group that doesn't go with
        the grid, a skew transformation, or two places for the first voxel.

    Notes
    -----
    The first voxel is where the words NSTART say or, if these are zero, where ORIGIN says, as in
    MRC files of 2014 [1]_.

    References
    ----------
    .. [1] A. Cheng et al., "MRC2014: Extensions to the MRC format header for electron
       cryo-microscopy and tomography", J. Struct. Biol. 192 (2015) 146-150.

    Examples
    --------
    >>> read_map("none.map")
    Traceback (most recent call last):
    fusedops.structure.StructureError: none.map: No such file or directory
    """
    gemmi = _gemmi()
    try:
        ccp4 = gemmi.read_ccp4_map(os.fspath(path))
        ccp4.setup(math.nan, gemmi.MapSetup.ReorderOnly)
    except (OSError, RuntimeError, ValueError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error).removesuffix(f": {path}")
        if isinstance(error, FileNotFoundError):
            reason = os.strerror(2)
        elif os.path.isdir(path):
            reason = "is a folder"
        raise StructureError(f"{path}: {reason}") from None
    cell, spacegroup = ccp4.grid.unit_cell, ccp4.grid.spacegroup
    a, b, c, *_ = cell.parameters
    shape = tuple(ccp4.header_i32(word) for word in (8, 9, 10))
    if not min(a, b, c, *shape) > 0 or not cell.volume > 1e-3 * a * b * c:
        raise StructureError(
            f"{path}: its header has the cell {maps._list(cell.parameters)} and "
            f"{', '.join(map(str, shape))} voxels along its edges; it should have a cell"
        )
    if ccp4.has_skew_transformation():
        raise StructureError(f"{path}: its header has a skew transformation, which isn't served")
    if spacegroup and spacegroup.number == 1:
        spacegroup = None
    if spacegroup and not _fits(spacegroup, shape):
        raise StructureError(
            f"{path}: its {', '.join(map(str, shape))} voxels don't go with its space group "
            f"{spacegroup.xhm()}"
        )
    start = tuple(ccp4.header_i32(word) for word in (5, 6, 7))
    shift = tuple(ccp4.header_float(word) for word in (50, 51, 52))
    grid = MapGrid(cell, spacegroup, shape)
    place = grid.matrix @ np.divide(start, shape)
    if not any(shift) or (any(start) and np.allclose(place, shift, rtol=0, atol=0.01)):
        shift = (0.0, 0.0, 0.0)
    elif any(start) or spacegroup:
        raise StructureError(
            f"{path}: its header puts the first voxel at {maps._list(place)} Å by NSTART and at "
            f"{maps._list(shift)} Å by ORIGIN; they should agree, or one be zero"
        )
    return MapTarget(os.fspath(path), replace(grid, shift=shift), start, ccp4.grid.array)


def _fits(spacegroup: Any, shape: Sequence[int]) -> bool:
    factors = spacegroup.operations().find_grid_factors()
    return all(n % factor == 0 for n, factor in zip(shape, factors, strict=True))


def target_grid(target: MapTarget, structure: Structure) -> MapGrid:
    """Return the grid of a map with the symmetry that a structure needs on it.

    Parameters
    ----------
    target : MapTarget
        From `read_map`.
    structure : Structure
        If the map has no symmetry, but the unit cell of the structure, the structure's space group
        counts: the map then holds all of its copies.

    Returns
    -------
    MapGrid

    Raises
    ------
    StructureError
        The map is a crystal's, with another unit cell than the structure's.
    MemoryError
        The whole map doesn't fit into memory.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> grid = maps.crystal_grid(ubiquitin, 1.0)
    >>> target = MapTarget("x.map", replace(grid, spacegroup=None), (0, 0, 0), np.zeros(grid.shape))
    >>> target_grid(target, ubiquitin).spacegroup.xhm()
    'P 21 21 21'
    """
    grid = target.grid
    maps.check_memory(math.prod(grid.shape))
    try:
        cell = maps.unit_cell(structure)
    except StructureError:
        if grid.spacegroup:
            raise
        return grid
    if cell is None:
        return grid
    same = grid.cell.is_similar(cell, 0.01, 1.0)
    if grid.spacegroup and not same:
        raise StructureError(
            f"{target.path}: its unit cell, {maps._list(grid.cell.parameters)}, isn't that of "
            f"{structure.path}, {maps._list(cell.parameters)}"
        )
    group = structure.gemmi.find_spacegroup()
    whole = target.start == (0, 0, 0) and not any(grid.shift)
    if same and whole and not grid.spacegroup and group and _fits(group, grid.shape):
        return replace(grid, spacegroup=group)
    return grid


def largest_spacing(grid: MapGrid) -> float:
    """Return the largest distance of neighbouring planes of voxels, Å.

    Parameters
    ----------
    grid : MapGrid

    Returns
    -------
    float

    Examples
    --------
    >>> grid = maps.box_grid(np.zeros((1, 3)), spacing=0.5, margin=2.0)
    >>> largest_spacing(grid)
    0.5
    """
    return float((1 / np.linalg.norm(np.linalg.inv(grid.matrix), axis=1) / grid.shape).max())


def set_labels(ccp4: Any, lines: Sequence[str]) -> None:
    """Replace the labels in the header of a map.

    Parameters
    ----------
    ccp4 : gemmi.Ccp4Map
        Label k is its ``header_str(57 + 20 * k)``.
    lines : sequence of str
        At most 10. Labels are ASCII, of 80 characters: longer lines are cut, Å becomes A.

    Raises
    ------
    ValueError
        There are more than 10 lines.

    Examples
    --------
    >>> import gemmi
    >>> ccp4 = gemmi.Ccp4Map()
    >>> ccp4.grid = gemmi.FloatGrid(4, 4, 4)
    >>> ccp4.update_ccp4_header(2)
    >>> set_labels(ccp4, ["voxels of 0.5 Å"])
    >>> ccp4.header_str(57).rstrip()
    'voxels of 0.5 A'
    """
    if len(lines) > _LABELS:
        raise ValueError(f"lines: {len(lines)}; there should be at most {_LABELS}")
    ccp4.set_header_i32(56, len(lines))
    for k in range(_LABELS):
        line = lines[k] if k < len(lines) else ""
        ccp4.set_header_str(57 + 20 * k, _ascii(line)[:_LABEL_LENGTH].ljust(_LABEL_LENGTH))


def _ascii(text: str) -> str:
    for letter, spelling in _SPELLINGS.items():
        text = text.replace(letter, spelling)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text.encode("ascii", "replace").decode()


def check_mtz_name(path: str | os.PathLike) -> None:
    """Raise `fusedops.structure.StructureError` if an MTZ file can't be written to `path`.

    Parameters
    ----------
    path : str or path-like
        ``.mtz``, in a folder that exists.

    Examples
    --------
    >>> check_mtz_name("calc.hkl")
    Traceback (most recent call last):
    fusedops.structure.StructureError: calc.hkl: name it .mtz
    """
    maps._check_name(path, ".mtz", "name it .mtz")


def check_reflections(
    path: str | os.PathLike, grid: MapGrid, resolution: float, blur: float
) -> None:
    """Raise `fusedops.structure.StructureError` if a map lacks reflections that `path` needs.

    Parameters
    ----------
    path, grid, resolution, blur
        See `write_mtz`.

    Examples
    --------
    >>> grid = maps.box_grid(np.zeros((1, 3)), spacing=1.0, margin=9.0)
    >>> check_reflections("calc.mtz", grid, resolution=2.5, blur=70.0)
    """
    resolution = positive("write_mtz", "resolution", resolution)
    if not 0 <= real("write_mtz", "blur", blur) < math.inf:
        refuse(ValueError, "write_mtz", "blur", f"is {blur}", "be a finite number from 0 on")
    limit = 2 * largest_spacing(grid)
    if resolution < limit * (1 - 1e-6):
        raise StructureError(
            f"{path}: voxels {limit / 2:.4g} Å apart hold no reflections beyond {limit:.4g} Å; the "
            f"resolution is {resolution:g} and should be at least that, or the spacing smaller"
        )
    most = 4 * resolution**2 * math.log(_LARGEST_SHARPENING)
    if blur > most:
        raise StructureError(
            f"{path}: a blur of {blur:.4g} Å² leaves too little of the reflections at "
            f"{resolution:.4g} Å for 32 bits; it should be at most {most:.4g} Å², or the "
            "resolution lower"
        )


def write_mtz(
    path: str | os.PathLike,
    ccp4: Any,
    grid: MapGrid,
    resolution: float,
    *,
    blur: float = 0.0,
    lines: Sequence[str] = (),
) -> int:
    """Write the structure factors of a map of a whole cell, or box, as an MTZ file.

    Parameters
    ----------
    path : str or path-like
        See `check_mtz_name`.
    ccp4 : gemmi.Ccp4Map
        As `fusedops.maps.density_map` returns it.
    grid : MapGrid
        The map's.
    resolution : float
        The smallest d of a reflection, Å.
    blur : float
        The increase of all B in the map, Å², which is taken back out.
    lines : sequence of str
        Where the map is from, for the file's history.

    Returns
    -------
    int
        The number of reflections: of the asymmetric unit of reciprocal space, without F(000) and
        systematic absences. Columns are H, K, L, FC (electrons, or Å for electron scattering) and
        PHIC (degrees, by the origin of the coordinates).

    Raises
    ------
    StructureError
        The grid holds no such reflections, 32 bits don't hold them under the blur, or the file
        can't be written.

    Notes
    -----
    Voxels alias reflections from beyond the grid. With the default blur of ``fusedops density``, R
    against direct summation is 0.006 % up to three spacings for ubiquitin, and 0.3 % up to two.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> grid = maps.crystal_grid(ubiquitin, 1.0)
    >>> ccp4 = maps.density_map(maps.scattering_atoms(ubiquitin).blurred(72.0), grid)
    >>> write_mtz("calc.mtz", ccp4, grid, 3.0, blur=72.0)
    1423
    """
    gemmi = _gemmi()
    check_mtz_name(path)
    check_reflections(path, grid, resolution, blur)
    if tuple(ccp4.grid.shape) != tuple(grid.shape):
        was = f"has shape {tuple(grid.shape)}"
        refuse(ValueError, "write_mtz", "grid", was, f"be the map's, {tuple(ccp4.grid.shape)}")
    maps.check_memory(ccp4.grid.point_count)
    asu = gemmi.transform_map_to_f_phi(ccp4.grid, half_l=True).prepare_asu_data(
        dmin=resolution, unblur=blur
    )
    if not len(asu.miller_array):
        raise StructureError(f"{path}: its cell has no reflections to {resolution:g} Å")
    # A box begins elsewhere than at the origin of the coordinates.
    at = np.linalg.solve(grid.matrix, grid.origin - grid.cell.orth.vec.tolist())
    if at.any():
        asu.value_array[:] *= np.exp(2j * np.pi * (asu.miller_array @ at))
    mtz = gemmi.Mtz(with_base=False)
    mtz.spacegroup = ccp4.grid.spacegroup
    mtz.set_cell_for_all(grid.cell)
    mtz.title = "fusedops density"
    mtz.history = [_ascii(line)[:_LABEL_LENGTH] for line in lines]
    mtz.add_dataset("calculated")
    for label, kind in zip(["H", "K", "L", "FC", "PHIC"], "HHHFP", strict=True):
        mtz.add_column(label, kind)
    mtz.set_data(asu)
    mtz.update_reso()
    maps._write(path, mtz.write_to_file)
    return int(mtz.nreflections)
