"""The density map of a structure: scattering atoms, grids and CCP4 files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import fusedops
from fusedops._frame.check import positive, real, refuse
from fusedops._frame.registry import BackendName
from fusedops._host.limits import available_memory
from fusedops.crystal.symmetry import symmetrize
from fusedops.density import atom_radius, bad_atoms
from fusedops.density.op import COMPONENTS
from fusedops.structure import (
    CELL_NAMES,
    Structure,
    StructureError,
    _coordinates,
    _gemmi,
    cell_texts,
    check_numbers,
    check_structure,
    check_target,
    replacing,
    spacegroup_number,
)

__all__ = [
    "MapGrid",
    "ScatteringAtoms",
    "available_memory",
    "backend_of",
    "box_grid",
    "check_map_name",
    "check_memory",
    "crystal_grid",
    "density_map",
    "scattering_atoms",
    "unit_cell",
    "write_map",
]

BYTES_PER_VOXEL = 8
"""Two maps of 32 bits: the sum, and the part that is added to it."""


@dataclass(frozen=True, eq=False)
class ScatteringAtoms:
    """Atoms with their form factors; `fusedops.gaussian_density` takes the first five fields.

    Attributes
    ----------
    xyz : (N, 3) float64 array
        Å.
    b : (N,) or (N, 6) float64 array
        B in Å²; or U in Å², if at least one atom is anisotropic.
    occupancy : (N,) float64 array
    amplitudes, widths : (N, G) float64 array
        Electrons for X-rays, Å for electrons; Å².
    labels : list of str
        As in `fusedops.structure.Structure`.
    charged : int
        The number of atoms with a charge in the file; form factors ignore charges.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> atoms = scattering_atoms(read_structure(files("fusedops") / "data/1ubi.pdb"))
    >>> atoms.xyz.shape, round(float(atoms.b.max()), 2)
    ((683, 3), 40.0)
    """

    xyz: np.ndarray
    b: np.ndarray
    occupancy: np.ndarray
    amplitudes: np.ndarray
    widths: np.ndarray
    labels: list[str]
    charged: int

    def __repr__(self) -> str:
        kind = "B" if self.b.ndim == 1 else "U"
        return f"ScatteringAtoms({len(self.xyz)} atoms, {kind}, {self.charged} charged)"

    @property
    def least_b(self) -> float:
        """The smallest B of all atoms, Å²; an anisotropic atom counts in its sharpest direction."""
        if self.b.ndim == 1 or not np.isfinite(self.b).all():
            return float(self.b.min())
        return 8 * math.pi**2 * float(np.linalg.eigvalsh(_matrices(self.b)).min())

    def blurred(self, b: float) -> ScatteringAtoms:
        """Return the atoms with all B raised, which blurs the map.

        Parameters
        ----------
        b : float
            The increase of B, Å². Structure factors are multiplied by exp(-b s²), s = sin θ/λ.

        Returns
        -------
        ScatteringAtoms

        Examples
        --------
        >>> from importlib.resources import files
        >>> from fusedops.structure import read_structure
        >>> atoms = scattering_atoms(read_structure(files("fusedops") / "data/1ubi.pdb"))
        >>> atoms.blurred(10.0).least_b - atoms.least_b
        10.0
        """
        more = b if self.b.ndim == 1 else b / (8 * math.pi**2) * np.array([1, 1, 1, 0, 0, 0])
        return replace(self, b=self.b + more)

    def needed_blur(self, spacing: float) -> float:
        """Return the increase of B that voxels need to resolve the sharpest atom, Å².

        Parameters
        ----------
        spacing : float
            The distance between voxels, Å.

        Returns
        -------
        float
            At least 0.

        Notes
        -----
        The rule is REFMAC5's and gemmi's: every B is at least 8π² spacing² / 1.1.

        Examples
        --------
        >>> from importlib.resources import files
        >>> from fusedops.structure import read_structure
        >>> atoms = scattering_atoms(read_structure(files("fusedops") / "data/1ubi.pdb"))
        >>> atoms.least_b, round(atoms.needed_blur(0.5), 2)
        (0.0, 17.94)
        """
        spacing = positive("needed_blur", "spacing", spacing)
        return max(0.0, 8 * math.pi**2 * spacing**2 / 1.1 - self.least_b)

    def radius(self, n_sigma: float = 4.0) -> np.ndarray:
        """Return the radius of each atom, Å, or raise if one has no density.

        Parameters
        ----------
        n_sigma : float
            See `fusedops.density.atom_radius`.

        Returns
        -------
        (N,) float64 array

        Raises
        ------
        StructureError
            An atom's B or occupancy isn't finite, or B isn't positive.

        Examples
        --------
        >>> from importlib.resources import files
        >>> from fusedops.structure import read_structure
        >>> atoms = scattering_atoms(read_structure(files("fusedops") / "data/1ubi.pdb"))
        >>> atoms.blurred(20.0).radius()[:3].tolist()
        [3.75, 4.25, 4.0]
        """
        with np.errstate(invalid="ignore"):
            radius = atom_radius(self.b, self.widths, n_sigma=n_sigma)
        arrays = self.xyz, self.b, self.occupancy, self.amplitudes, self.widths
        bad = bad_atoms(*arrays, np.zeros(len(radius)))
        if bad.any():
            first = int(bad.argmax())
            name = "B" if self.b.ndim == 1 else "U"
            raise StructureError(
                f"{self.labels[first]} has no density: its {name} is {self.b[first].tolist()} Å² "
                f"and its occupancy {self.occupancy[first]:g} (atoms like it: {bad.sum()}); a blur "
                "makes sharp atoms wider"
            )
        return radius


def scattering_atoms(structure: Structure, *, electron: bool = False) -> ScatteringAtoms:
    """Return the atoms of a structure with their form factors.

    The result has all atoms of the first model, with the file's occupancies: hydrogens and
    alternative conformations too and, at the end, copies by strict non-crystallographic symmetry
    that the file leaves out. Crystal symmetry is left to `density_map`.

    Parameters
    ----------
    structure : Structure
        As `fusedops.structure.read_structure` returns it.
    electron : bool
        Whether to take form factors for electron scattering (cryo-EM), five Gaussians [2]_, instead
        of X-rays, four Gaussians and a constant, which is a Gaussian of width 0 [1]_.

    Returns
    -------
    ScatteringAtoms
        In the order of ``structure.xyz``, and in its units.

    Raises
    ------
    StructureError
        An atom's element is unknown, or has no form factor in the table; or its B, U or occupancy
        isn't finite.

    Notes
    -----
    Form factors are those of neutral atoms, as by default in gemmi.

    References
    ----------
    .. [1] International Tables for Crystallography C (1992), table 6.1.1.4.
    .. [2] International Tables for Crystallography C, table 4.3.2.2; Peng et al., Acta Cryst. A52
       (1996) 257-276.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> atoms = scattering_atoms(read_structure(files("fusedops") / "data/1ubi.pdb"))
    >>> atoms.b.shape, atoms.amplitudes.shape
    ((683,), (683, 5))
    >>> [round(float(electrons)) for electrons in atoms.amplitudes.sum(1)[:4]]
    [7, 6, 6, 8]
    """
    _gemmi()
    check_structure("scattering_atoms", structure)
    check_numbers(structure)
    order = structure._order
    count = len(order)
    numbers, charges = np.empty((2, count), dtype=np.int64)
    occupancy, U = np.empty(count), np.empty((count, 6))
    b: np.ndarray = np.empty(count)
    elements: dict[int, tuple[Any, int]] = {}
    listed = (atom for chain in structure.gemmi[0] for residue in chain for atom in residue)
    for k, atom in zip(order.tolist(), listed, strict=True):
        numbers[k] = atom.element.atomic_number
        elements.setdefault(atom.element.atomic_number, (atom.element, k))
        b[k], occupancy[k], charges[k] = atom.b_iso, atom.occ, atom.charge
        U[k] = atom.aniso.elements_pdb()
    for name, array in (("occupancy", occupancy), ("B", b), ("U", U)):
        finite = np.isfinite(array.reshape(count, -1)).all(axis=1)
        if not finite.all():
            bad = int(finite.argmin())
            raise StructureError(
                f"{structure.path}: the {name} of {structure.labels[bad]} is "
                f"{array[bad].tolist()}; it should be finite"
            )
    # gemmi keeps 32 bits; rounding restores the few digits of the file.
    b, occupancy, U = np.round(b, 6), np.round(occupancy, 6), np.round(U, 6)
    anisotropic = (U != 0).any(axis=1)
    if anisotropic.any():
        U[~anisotropic] = b[~anisotropic, None] / (8 * math.pi**2) * [1, 1, 1, 0, 0, 0]
        b = U

    factors = {
        number: _form_factor(element, electron, f"{structure.path}: {structure.labels[first]}")
        for number, (element, first) in elements.items()
    }
    table = np.array([factors[number] for number in numbers.tolist()])
    amplitudes, widths = table.swapaxes(0, 1)
    atoms = ScatteringAtoms(
        structure.xyz,
        b,
        occupancy,
        amplitudes,
        widths,
        structure.labels,
        charged=int((charges != 0).sum()),
    )
    return _with_copies(atoms, [op.tr for op in structure.gemmi.ncs if not op.given])


def _form_factor(element: Any, electron: bool, label: str) -> tuple[list[float], list[float]]:
    table = element.c4322 if electron else element.it92
    if element.atomic_number == 0:
        raise StructureError(f"{label} is of an unknown element")
    if table is None:
        kind = "electrons" if electron else "X-rays"
        raise StructureError(f"{label}: no form factor of {element.name} for {kind} is tabulated")
    if electron:
        return table.a, table.b
    return [*table.a, table.c], [*table.b, 0.0]


def _with_copies(atoms: ScatteringAtoms, transforms: list[Any]) -> ScatteringAtoms:
    if not transforms:
        return atoms
    xyz, b = [atoms.xyz], [atoms.b]
    for transform in transforms:
        turn = np.array(transform.mat.tolist())
        xyz.append(atoms.xyz @ turn.T + transform.vec.tolist())
        if atoms.b.ndim == 1:
            b.append(atoms.b)
        else:
            turned = turn @ _matrices(atoms.b) @ turn.T
            b.append(np.stack([turned[:, i, j] for i, j in COMPONENTS], axis=1))
    times = 1 + len(transforms)
    return ScatteringAtoms(
        np.concatenate(xyz),
        np.concatenate(b),
        np.tile(atoms.occupancy, times),
        np.tile(atoms.amplitudes, (times, 1)),
        np.tile(atoms.widths, (times, 1)),
        atoms.labels * times,
        atoms.charged * times,
    )


def _matrices(U: np.ndarray) -> np.ndarray:
    return U[:, [[0, 3, 4], [3, 1, 5], [4, 5, 2]]]


@dataclass(frozen=True, eq=False)
class MapGrid:
    """The positions of a map's voxels.

    Attributes
    ----------
    cell : gemmi.UnitCell
        The unit cell of a crystal, or the box.
    spacegroup : gemmi.SpaceGroup or None
        None for a box.
    shape : tuple of int
        Voxels along each edge of the cell.
    start : tuple of int
        The first voxel, counted from the origin of the coordinates.
    shift : tuple of float
        The position that voxels are counted from, Å: ORIGIN in the header of an MRC file.

    Examples
    --------
    >>> grid = box_grid(np.array([[0.0, 0.0, 0.0]]), spacing=0.5, margin=2.0)
    >>> grid.shape, grid.origin.tolist(), grid.memory
    ((9, 9, 9), [-2.0, -2.0, -2.0], 5832)
    """

    cell: Any
    spacegroup: Any
    shape: tuple[int, int, int]
    start: tuple[int, int, int] = (0, 0, 0)
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def matrix(self) -> np.ndarray:
        """The matrix (3, 3) from fractional to Cartesian coordinates, Å."""
        return np.array(self.cell.orth.mat.tolist())

    @property
    def origin(self) -> np.ndarray:
        """The position of the first voxel, (3,), Å."""
        first = self.matrix @ np.divide(self.start, self.shape)
        return self.cell.orth.vec.tolist() + first + self.shift

    @property
    def memory(self) -> int:
        """Bytes that `density_map` needs."""
        return BYTES_PER_VOXEL * math.prod(self.shape)

    @property
    def largest_radius(self) -> float:
        """The largest radius of an atom, Å; see `fusedops.Lattice`."""
        return fusedops.Lattice(self.matrix, self.shape).largest_radius


def unit_cell(structure: Structure) -> Any:
    """Return the unit cell of a structure's file, without regard to matrices in the file.

    Parameters
    ----------
    structure : Structure
        As `fusedops.structure.read_structure` returns it.

    Returns
    -------
    gemmi.UnitCell or None
        None if the file has no cell, or a placeholder: all edges are 0, or all are 1 Å.

    Raises
    ------
    StructureError
        A number is missing, an edge is shorter than 1 Å, or the angles are impossible.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> unit_cell(read_structure(files("fusedops") / "data/1ubi.pdb")).parameters
    (50.84, 42.77, 28.95, 90.0, 90.0, 90.0)
    """
    where, texts = cell_texts(structure)
    numbers = [_float(text) for text in texts]
    if not any(texts) or numbers[:3] in ([0.0] * 3, [1.0] * 3):
        return None
    for name, text, number in zip(CELL_NAMES, texts, numbers, strict=True):
        edge = name in "abc"
        if not (1 <= number < math.inf if edge else 0 < number < 180):
            should = "a number of at least 1, in Å" if edge else "between 0° and 180°"
            raise StructureError(
                f"{structure.path}: {name} of the unit cell ({where}) is {text!r}; it should be "
                f"{should}"
            )
    cell = _gemmi().UnitCell(*numbers)
    a, b, c, *angles = numbers
    if not cell.volume > 1e-3 * a * b * c:
        raise StructureError(
            f"{structure.path}: the angles of the unit cell ({where}) are {_list(angles)}; they "
            "should be those of a cell with a volume: below 360° together, and each below the sum "
            "of the others"
        )
    return cell


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def crystal_grid(structure: Structure, spacing: float) -> MapGrid:
    """Return a grid for the unit cell of a structure.

    Parameters
    ----------
    structure : Structure
        As `fusedops.structure.read_structure` returns it.
    spacing : float
        The largest distance of neighbouring planes of voxels, Å. The space group and fast Fourier
        transforms may need more planes.

    Returns
    -------
    MapGrid

    Raises
    ------
    ValueError
        `spacing` isn't a positive number.
    StructureError
        The file's unit cell is missing, impossible or in conflict with its matrices (SCALE); or
        its space group is unknown or incompatible with the cell.
    MemoryError
        The map doesn't fit into memory.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> crystal_grid(read_structure(files("fusedops") / "data/1ubi.pdb"), 0.5).shape
    (108, 90, 60)
    """
    gemmi = _gemmi()
    check_structure("crystal_grid", structure)
    spacing = positive("crystal_grid", "spacing", spacing)
    model, path = structure.gemmi, structure.path
    cell = unit_cell(structure)
    if cell is None:
        raise StructureError(f"{path}: it has no unit cell")
    _check_matrices(structure, cell)
    if not model.spacegroup_hm and (number := spacegroup_number(structure)) not in (None, "1"):
        raise StructureError(f"{path}: its space group has the number {number}, and no name")
    spacegroup = model.find_spacegroup() if model.spacegroup_hm else gemmi.SpaceGroup("P 1")
    if spacegroup is None:
        raise StructureError(f"{path}: the space group {model.spacegroup_hm!r} is unknown")
    if not cell.is_compatible_with_spacegroup(spacegroup):
        raise StructureError(
            f"{path}: the space group {spacegroup.xhm()} doesn't go with the unit cell "
            f"{_list(cell.parameters)}"
        )
    # gemmi finds the size by allocating a grid; a grid of bytes is the smallest.
    check_memory(cell.volume / spacing / spacing / spacing)
    grid = gemmi.Int8Grid()
    grid.set_unit_cell(cell)
    grid.spacegroup = spacegroup
    grid.set_size_from_spacing(spacing, gemmi.GridSizeRounding.Up)
    check_memory(grid.point_count)
    return MapGrid(cell, spacegroup, tuple(grid.shape))


def _check_matrices(structure: Structure, cell: Any) -> None:
    """Raise StructureError if the file has a matrix that disagrees with its unit cell.

    Maps can't store such a matrix, and gemmi calls a cell with one incompatible with every space
    group.
    """
    told = structure.gemmi.cell
    # gemmi takes the file's matrix in place of its own only if they differ by more than this.
    if not told.explicit_matrices or (
        told.frac.mat.approx(cell.frac.mat, 1e-4) and told.frac.vec.approx(cell.frac.vec, 1e-6)
    ):
        return
    records, of = "SCALE records", "CRYST1"
    if structure._kind == "mmCIF":
        records, of = "_atom_sites.fract_transf_matrix", "_cell"
    ours, theirs = (np.array(each.orth.mat.tolist()) for each in (cell, told))
    if np.allclose(ours.T @ ours, theirs.T @ theirs, rtol=1e-2, atol=1):
        raise StructureError(
            f"{structure.path}: the {records} turn or shift the unit cell; a map has its first "
            "voxel at the origin, a along x and b in the plane of x and y"
        )
    raise StructureError(
        f"{structure.path}: the {records} disagree with {of}: they are those of edges of "
        f"{_list(np.linalg.norm(theirs, axis=0))} Å, and the unit cell has "
        f"{_list(np.linalg.norm(ours, axis=0))} Å; correct either, or delete the {records}"
    )


def _list(values: Any) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def box_grid(xyz: np.ndarray, spacing: float, margin: float) -> MapGrid:
    """Return a grid for a box around atoms, with voxels at multiples of the spacing.

    Parameters
    ----------
    xyz : (N, 3) array
        Å.
    spacing : float
        The distance between voxels, Å.
    margin : float
        The least distance from an atom to the edge of the box, Å. Density that reaches further
        wraps around to the other side.

    Returns
    -------
    MapGrid

    Raises
    ------
    TypeError, ValueError
        `xyz` has another dtype or shape, no atoms, or a coordinate that isn't finite or is beyond
        1,000,000 Å; `spacing` isn't a positive number; or `margin` is negative or isn't finite.
    MemoryError
        The map doesn't fit into memory.

    Examples
    --------
    >>> grid = box_grid(np.array([[0.2, 5.0, 10.0]]), spacing=0.5, margin=4.0)
    >>> grid.shape, grid.start
    ((18, 17, 17), (-8, 2, 12))
    """
    gemmi = _gemmi()
    op = "box_grid"
    spacing, margin = positive(op, "spacing", spacing), real(op, "margin", margin)
    if not 0 <= margin < math.inf:
        refuse(ValueError, op, "margin", f"is {margin!r}", "be a number of at least 0")
    xyz = _coordinates(op, xyz, ("N", 3))
    if not len(xyz):
        refuse(ValueError, op, "xyz", "has no atoms", "have at least one")
    low = np.floor((xyz.min(0) - margin) / spacing)
    shape = np.ceil((xyz.max(0) + margin) / spacing) - low + 1
    check_memory(shape.prod())
    cell = gemmi.UnitCell(*(shape * spacing), 90, 90, 90)
    (nx, ny, nz), (x, y, z) = shape.astype(int).tolist(), low.astype(int).tolist()
    return MapGrid(cell, None, (nx, ny, nz), (x, y, z))


def density_map(
    atoms: ScatteringAtoms,
    grid: MapGrid,
    *,
    radius: Any = None,
    n_sigma: float = 4.0,
    backend: BackendName | None = None,
    parts: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> Any:
    """Return the density of atoms as a map, with the crystal's symmetry applied.

    Parameters
    ----------
    atoms : ScatteringAtoms
        The atoms of the asymmetric unit, from `scattering_atoms`.
    grid : MapGrid
        From `crystal_grid` or `box_grid`.
    radius : float, optional
        One radius for all atoms, Å.
    n_sigma : float
        See `fusedops.gaussian_density`.
    backend : str, optional
        The backend that must serve the call.
    parts : int
        The number of shares that the atoms are split into; each costs an addition of two maps.
    advance : function
        Called after each part.

    Returns
    -------
    gemmi.Ccp4Map
        Its ``grid.array`` (nx, ny, nz) has 32 bits. Units are electrons/Å³, or 1/Å² for electron
        scattering; 1/Å² is a potential of 47.88 V.

    Raises
    ------
    BackendUnavailable
        If `backend` can't serve the call.

    Notes
    -----
    The map of the asymmetric unit is summed over the operations of the space group, as in gemmi's
    DensityCalculator. This presumes reduced occupancies for atoms on special positions.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> atoms = scattering_atoms(ubiquitin).blurred(30.0)
    >>> ccp4 = density_map(atoms, crystal_grid(ubiquitin, 1.0))
    >>> ccp4.grid.shape, float(ccp4.grid.array.max()) > 1
    ((54, 48, 30), True)
    """
    gemmi = _gemmi()
    ccp4 = gemmi.Ccp4Map()
    ccp4.grid.set_size(*grid.shape)
    ccp4.grid.set_unit_cell(grid.cell)
    ccp4.grid.spacegroup = grid.spacegroup or gemmi.SpaceGroup("P 1")
    total = ccp4.grid.array.T
    *arrays, cell, shape = _arguments(atoms, grid)
    part = total if parts == 1 else np.empty(shape, np.float32)
    for share in np.array_split(np.arange(len(atoms.xyz)), parts):
        xyz, b, occupancy, amplitudes, widths = (array[share] for array in arrays)
        fusedops.gaussian_density(
            xyz,
            b,
            occupancy,
            amplitudes,
            widths,
            cell,
            shape,
            radius=radius,
            n_sigma=n_sigma,
            out=part,
            backend=backend,
        )
        if part is not total:
            total += part
        advance()
    if grid.spacegroup and centring(grid.spacegroup):
        summed = symmetrize(np.ascontiguousarray(total.T), grid.spacegroup.operations())
        total.T[...] = summed
    elif grid.spacegroup:
        ccp4.grid.symmetrize_sum()
    ccp4.update_ccp4_header(2)
    for axis, start in enumerate(grid.start):
        ccp4.set_header_i32(5 + axis, start)
    return ccp4


def centring(spacegroup: Any) -> list[list[float]]:
    """Return the translations of a centred P 1, such as C 1, in units of the cell's edges.

    gemmi takes each group of number 1 for P 1.
    """
    if spacegroup.number != 1:
        return []
    moves = [np.divide(op.tran, op.DEN).tolist() for op in spacegroup.operations()]
    return [move for move in moves if any(move)]


def _arguments(atoms: ScatteringAtoms, grid: MapGrid) -> tuple[Any, ...]:
    """Return the arguments of `fusedops.gaussian_density` for a map (nz, ny, nx).

    gemmi's maps are contiguous along x, the op's along the last axis. Cartesian axes are reversed
    too, so that an orthogonal cell keeps its diagonal matrix.
    """
    xyz = (atoms.xyz - grid.origin)[:, ::-1]
    b = atoms.b if atoms.b.ndim == 1 else atoms.b[:, [2, 1, 0, 5, 4, 3]]
    arrays = xyz, b, atoms.occupancy, atoms.amplitudes, atoms.widths
    cell = grid.matrix[::-1, ::-1]
    return *(array.astype(np.float32) for array in arrays), cell, grid.shape[::-1]


def backend_of(
    atoms: ScatteringAtoms, grid: MapGrid, backend: BackendName | None = None
) -> str | None:
    """Return the name of the backend that serves `density_map`.

    Parameters
    ----------
    atoms, grid, backend
        See `density_map`.

    Returns
    -------
    str

    Raises
    ------
    BackendUnavailable
        If `backend` can't serve the call.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> atoms = scattering_atoms(ubiquitin).blurred(30.0)
    >>> backend_of(atoms, crystal_grid(ubiquitin, 1.0), "numpy")
    'numpy'
    """
    *arrays, cell, shape = _arguments(atoms, grid)
    # One atom tells the backend; all would be checked once more.
    first = (array[:1] for array in arrays)
    return fusedops.gaussian_density.explain(*first, cell, shape, backend=backend).backend


def check_map_name(path: str | os.PathLike) -> None:
    """Raise `fusedops.structure.StructureError` if a map can't be written to `path`.

    Parameters
    ----------
    path : str or path-like
        ``.ccp4``, ``.map`` or ``.mrc``, in a folder that exists.

    Examples
    --------
    >>> check_map_name("density.png")
    Traceback (most recent call last):
    fusedops.structure.StructureError: density.png: name it .ccp4, .map or .mrc
    """
    _check_name(path, (".ccp4", ".map", ".mrc"), "name it .ccp4, .map or .mrc")


def _check_name(path: str | os.PathLike, endings: str | tuple[str, ...], should: str) -> None:
    if not os.fspath(path).lower().endswith(endings):
        raise StructureError(f"{path}: {should}")
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise StructureError(f"{path}: gemmi takes names in UTF-8") from None
    check_target(path)


def write_map(path: str | os.PathLike, ccp4: Any) -> None:
    """Write a map; the file appears complete or not at all.

    Parameters
    ----------
    path : str or path-like
        See `check_map_name`.
    ccp4 : gemmi.Ccp4Map
        As `density_map` returns it.

    Raises
    ------
    StructureError
        The file can't be written.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> atoms = scattering_atoms(ubiquitin).blurred(30.0)
    >>> ccp4 = density_map(atoms, crystal_grid(ubiquitin, 1.0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_map(f"{folder}/density.ccp4", ccp4)
    ...     os.path.getsize(f"{folder}/density.ccp4")  # 54 × 48 × 30 voxels and a header
    312384
    """
    check_map_name(path)
    _write(path, ccp4.write_ccp4_map)


def _write(path: str | os.PathLike, write: Callable[[str], None]) -> None:
    """Write a file by a method of gemmi's; it appears complete or not at all."""
    with replacing(path) as draft:
        try:
            write(draft)
        except RuntimeError as error:
            raise StructureError(f"{path}: {error}") from None


def check_memory(voxels: float) -> None:
    """Raise MemoryError if a map of so many voxels doesn't fit into memory.

    Parameters
    ----------
    voxels : float
        The number of voxels.

    Raises
    ------
    MemoryError
        The map doesn't fit; the message has the memory that it needs, and the memory available.

    Examples
    --------
    >>> check_memory(1000)
    """
    needed, there = BYTES_PER_VOXEL * voxels, available_memory()
    if there is not None and needed > there:
        raise MemoryError(
            f"a map of {voxels:,.0f} voxels needs {needed / 1e9:,.1f} GB of memory and "
            f"{there / 1e9:,.1f} GB are available; make the spacing larger"
        )
