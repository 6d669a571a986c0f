"""Read a structure, find its planar groups and write it back, through gemmi."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import math
import os
import re
import secrets
import zlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fusedops._frame.check import of_shape, refuse, values
from fusedops._host.packages import how_to_install

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType

__all__ = ["PlanarGroups", "Structure", "StructureError", "planar_groups", "read_structure"]

SIGMA = 0.02
"""Standard deviation of an atom from its plane, Å."""

PEPTIDE_BOND_LIMIT = 2.0
"""Longest C-N distance that counts as a peptide bond, Å.

The bond is 1.33 Å long; atoms two bonds apart are at least 2.2 Å apart and atoms that are not
bonded more than 3 Å, so this accepts any distorted model and never bridges a gap in the chain.
gemmi's limit is 1.5 * 1.341 = 2.01 Å.
"""

CELL_NAMES = ("a", "b", "c", "alpha", "beta", "gamma")
"""The names of a unit cell's six numbers."""

FARTHEST = 1e6
"""Largest coordinate, Å: no structure is a tenth of a millimetre large, and at this distance 32
bits resolve only 0.06 Å."""

_SIDE_CHAINS = {
    "ARG": ("guanidinium", "CD NE CZ NH1 NH2"),
    "ASN": ("amide", "CB CG OD1 ND2"),
    "ASP": ("carboxylate", "CB CG OD1 OD2"),
    "GLN": ("amide", "CG CD OE1 NE2"),
    "GLU": ("carboxylate", "CG CD OE1 OE2"),
    "HIS": ("ring", "CB CG ND1 CD2 CE1 NE2"),
    "PHE": ("ring", "CB CG CD1 CD2 CE1 CE2 CZ"),
    "TRP": ("ring", "CB CG CD1 CD2 NE1 CE2 CE3 CZ2 CZ3 CH2"),
    "TYR": ("ring", "CB CG CD1 CD2 CE1 CE2 CZ OH"),
}
_BASES = {
    "A": "C1' N9 C8 N7 C5 C6 N6 N1 C2 N3 C4",
    "C": "C1' N1 C2 O2 N3 C4 N4 C5 C6",
    "G": "C1' N9 C8 N7 C5 C6 O6 N1 C2 N2 N3 C4",
    "T": "C1' N1 C2 O2 N3 C4 O4 C5 C7 C6",
    "U": "C1' N1 C2 O2 N3 C4 O4 C5 C6",
}
_PLANES = _SIDE_CHAINS | {
    sugar + base: ("base", atoms) for base, atoms in _BASES.items() for sugar in ("", "D")
}


class StructureError(ValueError):
    """A structure file that can't be read, or a structure that can't be written as asked."""


def _gemmi() -> ModuleType:
    if importlib.util.find_spec("gemmi") is None:
        raise ImportError(f"structure files need gemmi: {how_to_install('gemmi')}")
    import gemmi

    return gemmi


@dataclass(frozen=True, eq=False)
class Structure:
    """Atoms of the first model of a structure file, in the order of the file.

    Attributes
    ----------
    path : str
        The file it was read from.
    xyz : (N, 3) float64 array
        Coordinates in Å, hydrogens and every alternative conformation included.
    labels : list of str
        One per atom: ``"A/LEU 8 CD1"``, with the insertion code after the number and the
        label of the alternative conformation after a dot: ``"A/LEU 8A CD1.B"``. Atoms of a small
        molecule have the file's labels: ``"C1"``.
    gemmi : gemmi.Structure
        gemmi's object, with all models.

    Examples
    --------
    >>> from importlib.resources import files
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> ubiquitin.labels[0], ubiquitin.xyz[0].tolist()
    ('A/MET 1 N', [27.343, 24.294, 2.683])
    """

    path: str
    xyz: np.ndarray
    labels: list[str]
    gemmi: Any
    # gemmi gathers the atoms of each residue, which the file may interleave with another's:
    # gemmi's k-th atom is number _order[k] in the file.
    _order: np.ndarray
    _source: bytes
    _kind: str

    def __repr__(self) -> str:
        return f"Structure({self.path!r}, {len(self.xyz)} atoms)"

    def check_writable(self, path: str | os.PathLike) -> None:
        """Raise `StructureError` if this structure can't be written to `path`.

        Parameters
        ----------
        path : str or path-like
            ``.pdb``, ``.ent``, ``.cif`` or ``.mmcif``, each also with ``.gz``.

        Raises
        ------
        StructureError
            The suffix is none of these, the folder is missing or read-only, or the structure
            doesn't fit into the PDB format (more than 99,999 atoms, chain names longer than
            one character, residue names longer than three).

        Examples
        --------
        >>> from importlib.resources import files
        >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
        >>> ubiquitin.check_writable("flat.xyz")
        Traceback (most recent call last):
        fusedops.structure.StructureError: flat.xyz: name it .pdb, .ent, .cif or .mmcif (or .gz)
        """
        kind = _kind_of_name(path)
        check_target(path)
        if kind == "PDB" and self._kind != "PDB" and (reason := _why_not_pdb(self.gemmi)):
            raise StructureError(f"{path}: can't be written as PDB: {reason}; use .cif")

    def write(self, path: str | os.PathLike, xyz: np.ndarray) -> None:
        """Write the structure with new coordinates.

        In the format of the input, only the coordinates that differ change, of atoms in the first
        model, and everything else in the file stays. In the other format, gemmi decides which
        contents are carried over. The file appears complete or not at all.

        Parameters
        ----------
        path : str or path-like
            ``.pdb``, ``.ent``, ``.cif`` or ``.mmcif``, each also with ``.gz``.
        xyz : (N, 3) array
            New coordinates in Å, in the order of `Structure.xyz`.

        Raises
        ------
        StructureError
            As `check_writable`, or a coordinate doesn't fit into a column of the PDB format.
        ValueError
            `xyz` has another shape, or isn't finite.

        Examples
        --------
        >>> import tempfile
        >>> from importlib.resources import files
        >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ubiquitin.write(f"{folder}/moved.pdb.gz", ubiquitin.xyz + [1.0, 0.0, 0.0])
        ...     moved = read_structure(f"{folder}/moved.pdb.gz")
        >>> print(moved.xyz[0] - ubiquitin.xyz[0])
        [1. 0. 0.]
        """
        xyz = np.asarray(xyz, dtype=np.float64)
        if xyz.shape != self.xyz.shape:
            raise ValueError(f"xyz: shape {xyz.shape}, expected {self.xyz.shape}")
        if not np.isfinite(xyz).all():
            raise ValueError("xyz: not finite")
        self.check_writable(path)
        kind = _kind_of_name(path)
        if kind == "PDB" and np.any((xyz < -999.9994) | (xyz > 9999.9994)):
            raise StructureError(f"{path}: a coordinate doesn't fit into the PDB format; use .cif")
        if kind == self._kind:
            moved = _moved_pdb if kind == "PDB" else _moved_mmcif
            content = moved(self._source, self.xyz, xyz)
        else:
            try:
                content = _converted(self.gemmi.clone(), xyz[self._order], kind)
            except UnicodeDecodeError as error:
                raise StructureError(
                    f"{path}: can't be written as {kind}: {self.path} holds the byte "
                    f"{error.object[error.start]:#x}, which should be UTF-8"
                ) from None
        if str(path).lower().endswith(".gz"):
            content = gzip.compress(content, compresslevel=6, mtime=0)
        with replacing(path) as draft, open(draft, "xb") as file:
            file.write(content)


def read_structure(path: str | os.PathLike | BinaryIO) -> Structure:
    """Read a PDB, mmCIF or small-molecule CIF file, plain or gzipped, whatever its name.

    Parameters
    ----------
    path : str, path-like or binary file
        The file; or one that is open, such as ``sys.stdin.buffer``, which is read to its end.

    Returns
    -------
    Structure
        The atoms of the first model, hydrogens included, in the order of the file; xyz is
        (N, 3) float64 in Å.

    Raises
    ------
    StructureError
        The file is missing, empty, truncated, neither PDB nor CIF, or holds no atoms, or a
        coordinate that isn't finite or is beyond 1,000,000 Å. The message, one line, names the
        file and the fault.
    ImportError
        gemmi isn't installed.

    Notes
    -----
    A small-molecule CIF (core dictionary) gives one molecule, ``UNL 1`` of chain A. Occupancies of
    atoms on special positions are divided by the number of operations that keep them in place, as
    they are in macromolecular files, and U is turned to Cartesian axes.

    References
    ----------
    M. Wojdyr, "GEMMI: A library for structural biology", J. Open Source Softw. 7 (2022) 4200.

    Examples
    --------
    >>> from importlib.resources import files
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> ubiquitin.xyz.shape, ubiquitin.labels[1]
    ((683, 3), 'A/MET 1 CA')
    """
    gemmi = _gemmi()
    source = _read_source(path)
    path = _name(path)
    if re.match(rb"(?:\s|#[^\n]*\n)*data_", source, re.IGNORECASE):
        kind = "mmCIF"
    elif re.search(rb"^(?:HEADER|CRYST1|REMARK|MODEL |ATOM|HETATM)", source, re.MULTILINE):
        kind = "PDB"
    else:
        raise StructureError(f"{path}: neither PDB nor mmCIF")
    try:
        if kind == "PDB":
            _, serials, rows = _pdb_rows(source)
            model = gemmi.read_pdb_string(source)
        else:
            block = _atom_block(gemmi.cif.read_string(source))
            if _is_small(block):
                kind = "small-molecule CIF"
                model = _small_structure(block)
                _, rows, _ = _atoms(model[0])
                serials = list(range(1, 1 + len(rows)))
            else:
                _check_columns(block)
                _, serials, rows = _mmcif_rows(block)
                model = gemmi.make_structure_from_block(block)
                _name_spacegroup(model, block)
        if len(rows) == 0:
            raise ValueError("it holds no atoms")
        gemmi_serials, gemmi_xyz, gemmi_labels = _atoms(model[0])
        order = _file_order(gemmi_serials, serials)
        if not np.allclose(gemmi_xyz, rows[order], rtol=0, atol=1e-6, equal_nan=True):
            raise ValueError("its atoms can't be told apart by their serial numbers")
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0].rstrip(": ")
        reason = re.sub(r"^\w+:(\d+):\d+\(\d+\)", r"line \1", reason)
        raise StructureError(f"{path}: can't be read as {kind}: {reason}") from None

    xyz = np.empty_like(gemmi_xyz)
    xyz[order] = gemmi_xyz
    labels = [gemmi_labels[k] for k in np.argsort(order)]
    if kind == "small-molecule CIF":
        labels = [label.rpartition(" ")[2] for label in labels]
    if not np.isfinite(xyz).all():
        bad = labels[int(np.argmin(np.isfinite(xyz).all(axis=1)))]
        raise StructureError(f"{path}: the coordinates of {bad} are not finite numbers")
    if np.abs(xyz).max() > FARTHEST:
        bad = int(np.abs(xyz).max(axis=1).argmax())
        raise StructureError(
            f"{path}: the coordinates of {labels[bad]} are {xyz[bad].tolist()}; they should be "
            f"within {FARTHEST:,.0f} Å"
        )
    return Structure(path, xyz, labels, model, order, source, kind)


@dataclass(frozen=True, eq=False)
class PlanarGroups:
    """Planar groups of a structure, in the format of `fusedops.planarity_nll`.

    Attributes
    ----------
    groups : list of (indices, sigmas)
        One entry per group size n, ascending: indices (P, n) int64 into `Structure.xyz` and
        sigmas (P,) float64 in Å, or (P, n) if restraints give atoms of a plane different ones.
    labels : list of list of str
        Parallel to `groups`, one per plane: ``"A/PHE 45 ring"``, ``"A/LEU 8 - A/THR 9 peptide"``;
        ``" alt B"`` follows if the plane belongs to one alternative conformation.
    waters : int
        Water molecules, which have no planes.
    skipped : collections.Counter
        The number of residues without known planes, by name.
    incomplete : list of str
        The labels of side chains and bases, or of their conformers, whose planes are left out
        because the model lacks atoms of them.

    Examples
    --------
    >>> from importlib.resources import files
    >>> planes = planar_groups(read_structure(files("fusedops") / "data/1ubi.pdb"))
    >>> planes.count, planes.labels[0][0]
    (103, 'A/GLN 2 amide')
    """

    groups: list[tuple[np.ndarray, np.ndarray]]
    labels: list[list[str]]
    waters: int
    skipped: Counter[str]
    incomplete: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        skipped = self.skipped.total()
        return f"PlanarGroups({self.count} planes, {self.waters} waters, {skipped} skipped)"

    @property
    def count(self) -> int:
        """Number of planes of all sizes."""
        return sum(map(len, self.labels))


def planar_groups(
    structure: Structure,
    *,
    sigma: float = SIGMA,
    restraints: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> PlanarGroups:
    """Find the planar groups of proteins, nucleic acids and ligands by residue and atom names.

    - Peptide planes: CA, C and O of a residue, N and CA of the next in the chain, if C and N
      are bonded (closer than ``PEPTIDE_BOND_LIMIT``), in modified residues too.
    - C-terminal carboxylates: CA, C, O and OXT.
    - Side chains of ARG, ASN, ASP, GLN, GLU, HIS, PHE, TRP and TYR, with the atom that they are
      attached to.
    - Bases of A, C, G, T, U, DA, DC, DG, DT and DU, with their substituents and C1'.
    - The planes that `restraints` gives to a residue, in place of a side chain or base above. Atoms
      that the model lacks are left out, as in REFMAC5, if four remain.

    Hydrogens belong to no plane, nor do atoms that repeat a name in their residue. Each alternative
    conformation that occurs among the atoms of a plane gives a plane of its own. Atoms without one
    belong to all of these planes, also across two residues at the same position. Any other plane
    that lacks an atom is left out, and of a side chain or a base listed as incomplete.

    Parameters
    ----------
    structure : Structure
        As `read_structure` returns it; distances are measured on its xyz.
    sigma : float
        The standard deviation of atoms from the planes that are known here, Å.
    restraints : mapping, optional
        As `fusedops.restraints.read_restraints` returns it: from residue names to planes, each from
        atom names to sigmas in Å.

    Returns
    -------
    PlanarGroups
        Indices (P, n) int64 and sigmas (P,) or (P, n) float64 in Å per group size, labels, counts
        of skipped residues, and planes that lack atoms.

    Raises
    ------
    ValueError
        `sigma` isn't a positive number.
    ImportError
        gemmi isn't installed.

    Notes
    -----
    The default of sigma is the value that the CCP4 Monomer Library [1]_ gives to each atom of each
    plane, as in REFMAC5; bond lengths and angles of the same groups are in [2]_ and [3]_. The
    guanidinium of ARG includes CD, which newer versions of the library put into a plane with HE.
    The peptide plane of five atoms, which also keeps omega at 0 or 180 degrees, is the one of
    the customary SHELXL [4]_ restraint ``FLAT_* 0.5 O CA N_+ C CA_+``, where 0.5 is a chiral
    volume in Å³, not a distance.

    References
    ----------
    .. [1] A. A. Vagin et al., "REFMAC5 dictionary: organization of prior chemical knowledge and
       guidelines for its use", Acta Cryst. D60 (2004) 2184-2195.
    .. [2] R. A. Engh and R. Huber, "Accurate bond and angle parameters for X-ray protein structure
       refinement", Acta Cryst. A47 (1991) 392-400.
    .. [3] R. A. Engh and R. Huber, "Structure quality and target parameters", International Tables
       for Crystallography F (2001) 382-392.
    .. [4] G. M. Sheldrick, "A short history of SHELX", Acta Cryst. A64 (2008) 112-122.

    Examples
    --------
    >>> from importlib.resources import files
    >>> planes = planar_groups(read_structure(files("fusedops") / "data/1ubi.pdb"))
    >>> [indices.shape for indices, _ in planes.groups]
    [(20, 4), (79, 5), (1, 6), (2, 7), (1, 8)]
    >>> planes.labels[-1], planes.waters, planes.skipped
    (['A/TYR 59 ring'], 81, Counter())
    """
    gemmi = _gemmi()
    check_structure("planar_groups", structure)
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma: {sigma!r}; it should be a positive number, in Å")
    restraints = restraints or {}
    hydrogens = _hydrogens(structure) if restraints else set()
    xyz = structure.xyz
    # Two definitions may list the same atoms in another order.
    planes: dict[frozenset[int], _Plane] = {}
    skipped: Counter[str] = Counter()
    incomplete: list[str] = []
    waters = 0
    for chain in _positions(structure):
        for left, right in pairwise(chain):
            for before, after in product(left, right):
                atoms = before.find(["CA", "C", "O"]) + after.find(["N", "CA"])
                for plane, alt in _conformers(atoms):
                    if math.dist(xyz[plane[1]], xyz[plane[3]]) < PEPTIDE_BOND_LIMIT:
                        before.linked = after.linked = True
                        label = f"{before.label} - {after.label} peptide{alt}"
                        planes.setdefault(frozenset(plane), _Plane(plane, label, [sigma] * 5))
        for residue in (residue for position in chain for residue in position):
            info = gemmi.find_tabulated_residue(residue.name)
            known: list[tuple[str, Mapping[str, float]]] = []
            if info.is_amino_acid() or residue.linked:
                known.append(("C-terminus", dict.fromkeys(["CA", "C", "O", "OXT"], sigma)))
            given = restraints.get(residue.name)
            if given is None and residue.name in _PLANES:
                what, names = _PLANES[residue.name]
                known.append((what, dict.fromkeys(names.split(), sigma)))
                incomplete += residue.incomplete(what, names.split())
            for what, sigmas in known:
                residue.add_planes(planes, what, sigmas)
            fits = given == {}
            for what, sigmas in (given or {}).items():
                there = {
                    name: width
                    for name, width in sigmas.items()
                    if name in residue.atoms and hydrogens.isdisjoint(residue.atoms[name].values())
                }
                if len(there) >= 4:
                    fits |= residue.add_planes(planes, what, there)
            if info.is_water():
                waters += 1
            elif not known and not fits:
                skipped[residue.name] += 1

    by_size: dict[int, list[_Plane]] = {}
    for each in sorted(planes.values(), key=lambda plane: len(plane.atoms)):
        by_size.setdefault(len(each.atoms), []).append(each)
    return PlanarGroups(
        [
            (np.array([plane.atoms for plane in group], dtype=np.int64), _sigmas(group))
            for group in by_size.values()
        ],
        [[plane.label for plane in group] for group in by_size.values()],
        waters,
        skipped,
        incomplete,
    )


@dataclass(slots=True)
class _Plane:
    atoms: tuple[int, ...]
    label: str
    sigmas: list[float]


def _sigmas(planes: list[_Plane]) -> np.ndarray:
    sigmas = np.array([plane.sigmas for plane in planes])
    return sigmas[:, 0].copy() if (sigmas == sigmas[:, :1]).all() else sigmas


def _hydrogens(structure: Structure) -> set[int]:
    atoms = (atom for chain in structure.gemmi[0] for residue in chain for atom in residue)
    numbered = zip(structure._order.tolist(), atoms, strict=True)
    return {number for number, atom in numbered if atom.element.is_hydrogen}


@dataclass(slots=True)
class _Residue:
    label: str
    name: str
    atoms: dict[str, dict[str, int]]
    linked: bool = False

    def find(self, names: Iterable[str]) -> list[dict[str, int]]:
        return [self.atoms.get(name, {}) for name in names]

    def add_planes(
        self, planes: dict[frozenset[int], _Plane], what: str, sigmas: Mapping[str, float]
    ) -> bool:
        """Add the conformers of a plane, and return whether there is one."""
        found = list(_conformers(self.find(sigmas)))
        for atoms, alt in found:
            plane = _Plane(atoms, f"{self.label} {what}{alt}", list(sigmas.values()))
            planes.setdefault(frozenset(atoms), plane)
        return bool(found)

    def incomplete(self, what: str, names: Iterable[str]) -> list[str]:
        """Return the labels of the conformers of a plane that lack an atom."""
        atoms = self.find(names)
        alts = set().union(*atoms) - {""} or {""}
        lacking = [alt for alt in sorted(alts) if not all(alt in a or "" in a for a in atoms)]
        return [f"{self.label} {what}" + (f" alt {alt}" if alt else "") for alt in lacking]


def _positions(structure: Structure) -> Iterator[list[list[_Residue]]]:
    """Yield each chain as a list of positions, each a list of the residues that share it."""
    numbers = iter(structure._order.tolist())
    for chain in structure.gemmi[0]:
        positions = []
        for _, residues in groupby(chain, key=lambda residue: str(residue.seqid)):
            position = []
            for residue in residues:
                atoms: dict[str, dict[str, int]] = {}
                for atom, number in zip(residue, numbers, strict=False):
                    atoms.setdefault(atom.name, {}).setdefault(_alt(atom), number)
                position.append(_Residue(_residue_label(chain, residue), residue.name, atoms))
            if len(position) > 1:
                _share_common_atoms(position)
            positions.append(position)
        yield positions


def _share_common_atoms(position: list[_Residue]) -> None:
    """Give alternative residues at one position the common atoms that only one of them lists."""
    common = {
        name: {"": alts[""]}
        for residue in position
        for name, alts in residue.atoms.items()
        if "" in alts
    }
    for residue in position:
        # A residue without alternative atoms is a separate molecule with the same number.
        if any(alt for alts in residue.atoms.values() for alt in alts):
            residue.atoms = common | residue.atoms


def _conformers(atoms: list[dict[str, int]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the complete planes among `atoms`, each a dict from alternative to index."""
    for alt in sorted(set().union(*atoms)):
        plane = tuple(alts.get(alt, alts.get("", -1)) for alts in atoms)
        if -1 not in plane:
            yield plane, f" alt {alt}" if alt else ""


def _alt(atom: Any) -> str:
    return atom.altloc if atom.has_altloc() else ""


def _residue_label(chain: Any, residue: Any) -> str:
    return f"{chain.name}/{residue.name} {residue.seqid}"


def _atoms(model: Any) -> tuple[list[int], np.ndarray, list[str]]:
    """Return the serial numbers, xyz (N, 3) and labels of a model's atoms in gemmi's order."""
    serials, xyz, labels = [], [], []
    for chain in model:
        for residue in chain:
            prefix = _residue_label(chain, residue)
            for atom in residue:
                serials.append(atom.serial)
                xyz.append(atom.pos.tolist())
                alt = _alt(atom)
                labels.append(f"{prefix} {atom.name}.{alt}" if alt else f"{prefix} {atom.name}")
    return serials, np.array(xyz).reshape(-1, 3), labels


def _numbered(structure: Structure, xyz: np.ndarray | None = None) -> Any:
    """Return a copy of gemmi's object, with the atoms' numbers as serials, and new coordinates."""
    gemmi = _gemmi()
    copy = structure.gemmi.clone()
    atoms = (atom for chain in copy[0] for residue in chain for atom in residue)
    for atom, number in zip(atoms, structure._order.tolist(), strict=True):
        atom.serial = number
        if xyz is not None:
            atom.pos = gemmi.Position(*xyz[number])
    return copy


def check_structure(op: str, structure: Any) -> None:
    """Raise TypeError unless an argument is a `Structure`.

    Parameters
    ----------
    op : str
        The function that the error names.
    structure : object

    Examples
    --------
    >>> check_structure("f", "x.pdb")
    Traceback (most recent call last):
    TypeError: f: structure is a str; it should be a Structure, as read_structure returns it
    """
    if not isinstance(structure, Structure):
        was = f"is a {type(structure).__name__}"
        refuse(TypeError, op, "structure", was, "be a Structure, as read_structure returns it")


def checked_xyz(op: str, structure: Structure, xyz: Any) -> np.ndarray:
    """Return coordinates in place of a structure's, or raise ValueError if they can't be.

    Parameters
    ----------
    op : str
        The function that errors name.
    structure : Structure
    xyz : (N, 3) array

    Examples
    --------
    >>> from importlib.resources import files
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> checked_xyz("f", ubiquitin, ubiquitin.xyz + 1.0)[0].tolist()
    [28.343, 25.294, 3.683]
    """
    return _coordinates(op, xyz, structure.xyz.shape)


def _coordinates(op: str, xyz: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return coordinates of a shape in float64, or raise if they aren't real, finite and near."""
    xyz = values(op, "xyz", xyz)
    if xyz.dtype.kind not in "fiu":
        refuse(TypeError, op, "xyz", f"has dtype {xyz.dtype}", "be real numbers")
    of_shape(op, "xyz", xyz, shape)
    bad = ~(abs(xyz) <= FARTHEST).all(axis=1)
    if bad.any():
        first = int(bad.argmax())
        was = f"is {xyz[first].tolist()}"
        refuse(ValueError, op, f"xyz[{first}]", was, f"be finite, and within {FARTHEST:,.0f} Å")
    return xyz.astype(np.float64)


def _file_order(gemmi_serials: list[int], file_serials: list[int]) -> np.ndarray:
    """Return, for each atom in gemmi's order, its number in the file's order."""
    if len(gemmi_serials) != len(file_serials):
        raise ValueError(f"of {len(file_serials)} atom records {len(gemmi_serials)} are readable")
    order = np.empty(len(gemmi_serials), dtype=np.int64)
    order[np.argsort(gemmi_serials, kind="stable")] = np.argsort(file_serials, kind="stable")
    return order


def _name(path: str | os.PathLike | BinaryIO) -> str:
    name = path if isinstance(path, str | os.PathLike) else getattr(path, "name", "stream")
    return str(name)


def _read_source(path: str | os.PathLike | BinaryIO) -> bytes:
    try:
        if not isinstance(path, str | os.PathLike):
            source = path.read() if hasattr(path, "read") else None
            if not isinstance(source, bytes):
                kind = "in text mode" if isinstance(source, str) else f"a {type(path).__name__}"
                raise TypeError(f"path is {kind}; it should be a path, or a file opened as 'rb'")
        elif Path(path).is_char_device():  # /dev/zero never ends
            raise StructureError(f"{path}: is a device")
        else:
            source = Path(path).read_bytes()
        if source.startswith(b"\x1f\x8b"):
            source = gzip.decompress(source)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"broken gzip data: {error}"
        raise StructureError(f"{_name(path)}: {reason}") from None
    if not source.strip():
        raise StructureError(f"{_name(path)}: the file is empty")
    return source.removeprefix(b"\xef\xbb\xbf")


def _pdb_rows(source: bytes) -> tuple[list[int], list[int], np.ndarray]:
    """Return line numbers, serial numbers and xyz (N, 3) of the first model's atom records."""
    lines, serials, xyz = [], [], []
    for number, line in enumerate(source.splitlines()):
        record = line[:6].rstrip().upper()
        if record in (b"ENDMDL", b"END"):
            break
        if record[:4] not in (b"ATOM", b"HETA"):
            continue
        # gemmi silently reads a column that holds no number as zero.
        try:
            xyz.append([float(line[30:38]), float(line[38:46]), float(line[46:54])])
        except ValueError:
            raise ValueError(f"line {number + 1} holds no coordinates") from None
        lines.append(number)
        serials.append(_hybrid36(line[6:11]))
    return lines, serials, np.array(xyz).reshape(-1, 3)


def _hybrid36(text: bytes) -> int:
    """Return a PDB serial number (A0000 follows 99999), or 0 if the text is none, as gemmi does."""
    try:
        return int(text, 36) - 10 * 36**4 + 10**5 if text[:1].isalpha() else int(text)
    except ValueError:
        return 0


def _atom_block(document: Any) -> Any:
    with_atoms = (b for b in document if b.find_values("_atom_site.id") or _is_small(b))
    return next(with_atoms, document[0])


def _is_small(block: Any) -> bool:
    """Return whether a block has the fractional coordinates of the core dictionary."""
    names = "_atom_site_fract_x", "_atom_site.fract_x"
    return not block.find_values("_atom_site.id") and any(map(block.find_values, names))


def _small_structure(block: Any) -> Any:
    """Return the atoms of a small molecule, in gemmi's form for macromolecules."""
    gemmi = _gemmi()
    small = gemmi.make_small_structure_from_block(block)
    if not small.cell.is_crystal():
        raise ValueError("it has no unit cell, which fractional coordinates need")
    small.change_occupancies_to_crystallographic()
    residue = gemmi.Residue()
    residue.name, residue.seqid, residue.het_flag = "UNL", gemmi.SeqId("1"), "H"
    # U of a CIF is along the edges of the reciprocal cell, in units of their lengths.
    edges = np.diag(small.cell.reciprocal().parameters[:3])
    axes = gemmi.Mat33((np.array(small.cell.orth.mat.tolist()) @ edges).tolist())
    for serial, site in enumerate(small.sites, 1):
        atom = gemmi.Atom()
        atom.name, atom.element, atom.serial = site.label, site.element, serial
        atom.pos, atom.occ, atom.charge = site.orth(small.cell), site.occ, site.charge
        # gemmi reads a U that the file lacks as zero.
        u_iso = site.u_iso or math.nan
        if site.aniso.nonzero():
            U = site.aniso.transformed_by(axes)
            atom.aniso = gemmi.SMat33f(*U.elements_pdb())
            u_iso = U.trace() / 3
        atom.b_iso = 8 * math.pi**2 * u_iso
        residue.add_atom(atom)
    chain, model, structure = gemmi.Chain("A"), gemmi.Model(1), gemmi.Structure()
    chain.add_residue(residue)
    model.add_chain(chain)
    structure.add_model(model)
    structure.name, structure.cell = small.name, small.cell
    structure.info = gemmi.InfoMap({"_entry.id": small.name})
    if small.spacegroup:
        structure.spacegroup_hm = small.spacegroup.xhm()
    else:
        structure.spacegroup_hm = "; ".join(small.symops) or small.spacegroup_hm
    return structure


def _name_spacegroup(model: Any, block: Any) -> None:
    """Give a model the name of its space group where gemmi doesn't look for it."""
    gemmi, string = _gemmi(), _gemmi().cif.as_string
    name, hall = [
        string(block.find_value(f"_space_group.name_{kind}") or "?") for kind in ("H-M_alt", "Hall")
    ]
    if model.spacegroup_hm or not (name or hall):
        return
    if not name:
        group = None
        with contextlib.suppress(RuntimeError, ValueError):
            group = gemmi.find_spacegroup_by_ops(gemmi.symops_from_hall(hall))
        name = group.xhm() if group else hall
    model.spacegroup_hm = name
    model.setup_cell_images()


def spacegroup_number(structure: Structure) -> str | None:
    """Return the number of a CIF's space group, if it has one."""
    if structure._kind == "PDB":
        return None
    cif = _gemmi().cif
    block = _atom_block(cif.read_string(structure._source))
    names = "_symmetry.Int_Tables_number", "_space_group.IT_number"
    values = [block.find_value(of) for name in names for of in (name, name.replace(".", "_"))]
    return next((text for value in values if (text := cif.as_string(value or "?"))), None)


def _check_columns(block: Any) -> None:
    """Raise ValueError if a table of atoms lacks a column that gemmi needs to read atoms."""
    required = "id type_symbol label_alt_id label_asym_id Cartn_x Cartn_y Cartn_z"
    names = [f"_atom_site.{name}" for name in required.split()]
    missing = [name for name in names if not block.find_values(name)]
    if 0 < len(missing) < len(names):
        raise ValueError(f"its atoms lack {', '.join(missing)}")


def _mmcif_rows(block: Any) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Return table rows, serial numbers and xyz (N, 3) of the first model's atoms."""
    cif = _gemmi().cif
    models = list(block.find_values("_atom_site.pdbx_PDB_model_num"))
    columns = [list(block.find_values(f"_atom_site.Cartn_{axis}")) for axis in "xyz"]
    xyz = np.array([[cif.as_number(value) for value in column] for column in columns]).T
    serials = [int(s) if s.isdigit() else 0 for s in block.find_values("_atom_site.id")]
    rows = np.arange(len(xyz))
    if models:
        rows = np.flatnonzero(np.array(models) == models[0])
    return rows, [serials[row] for row in rows], xyz[rows]


def cell_texts(structure: Structure) -> tuple[str, list[str]]:
    """Return the record of a structure's unit cell in its file, and the text of its six numbers.

    The text is needed because gemmi silently ignores a cell that lacks a number.

    Parameters
    ----------
    structure : Structure

    Returns
    -------
    str
        The PDB record, or the mmCIF category.
    list of str
        In the order of `CELL_NAMES`; empty where a number is missing.

    Examples
    --------
    >>> from importlib.resources import files
    >>> cell_texts(read_structure(files("fusedops") / "data/1ubi.pdb"))
    ('CRYST1', ['50.840', '42.770', '28.950', '90.00', '90.00', '90.00'])
    """
    if structure._kind == "PDB":
        found = re.findall(rb"^CRYST1.*", structure._source, re.MULTILINE | re.IGNORECASE)
        line = found[-1].decode("latin-1") if found else ""
        ends = (6, 15, 24, 33, 40, 47, 54)
        return "CRYST1", [line[start:end].strip() for start, end in pairwise(ends)]
    block = _atom_block(_gemmi().cif.read_string(structure._source.decode("latin-1")))
    names = [f"length_{edge}" for edge in "abc"] + [f"angle_{angle}" for angle in CELL_NAMES[3:]]
    values = [
        block.find_value(f"_cell.{name}") or block.find_value(f"_cell_{name}") or "?"
        for name in names
    ]
    # An uncertainty may follow a number: 10.234(2).
    texts = [re.sub(r"\(\d+\)$", "", value.strip("'\"")) for value in values]
    return "_cell", ["" if text in ("?", ".") else text for text in texts]


def check_numbers(structure: Structure) -> None:
    """Raise `StructureError` if an atom's occupancy or B is no number, or its B isn't read.

    gemmi would silently read zero from a PDB file, and 20 Å² for a B that an mmCIF file lacks. Of
    anisotropic values it reads U, and no B.

    Parameters
    ----------
    structure : Structure

    Examples
    --------
    >>> from importlib.resources import files
    >>> check_numbers(read_structure(files("fusedops") / "data/1ubi.pdb"))
    """
    if structure._kind != "PDB":
        _check_b(structure)
        return
    lines = structure._source.splitlines()
    for number in _pdb_rows(structure._source)[0]:
        line = lines[number]
        for name, text in (("occupancy", line[54:60]), ("B", line[60:66])):
            # If the line ends before the column, gemmi takes a default.
            try:
                float(text or b"1")
            except ValueError:
                raise StructureError(
                    f"{structure.path}: line {number + 1} has {text.decode('latin-1')!r} for "
                    f"{name}; it should be a number"
                ) from None


def _check_b(structure: Structure) -> None:
    """Raise `StructureError` if an atom of an mmCIF file has no B, or a CIF has anisotropic B."""
    block = _atom_block(_gemmi().cif.read_string(structure._source))
    for u, b in (("_atom_site_anisotrop.U", "[1][1]"), ("_atom_site_aniso_U", "_11")):
        names = [name + b for name in (u, u[:-1] + "B")]
        has = [bool(block.find_values(name)) for name in names]
        if has == [False, True]:
            raise StructureError(f"{structure.path}: it has {names[1]}; it should have {names[0]}")
    if structure._kind != "mmCIF":
        return
    column = list(block.find_values("_atom_site.B_iso_or_equiv"))
    for place, row in enumerate(_mmcif_rows(block)[0].tolist()):
        if not column or column[row] in ("?", "."):
            raise StructureError(
                f"{structure.path}: {structure.labels[place]} has no B (_atom_site.B_iso_or_equiv)"
            )


def _moved_pdb(source: bytes, old: np.ndarray, new: np.ndarray) -> bytes:
    lines = source.splitlines(keepends=True)
    numbers, _, _ = _pdb_rows(source)
    for k in np.flatnonzero((new != old).any(axis=1)):
        line = lines[numbers[k]]
        lines[numbers[k]] = line[:30] + b"%8.3f%8.3f%8.3f" % tuple(new[k]) + line[54:]
    return b"".join(lines)


def _moved_mmcif(source: bytes, old: np.ndarray, new: np.ndarray) -> bytes:
    # gemmi's strings are UTF-8, but files needn't be; latin-1 keeps every byte.
    document = _gemmi().cif.read_string(source.decode("latin-1"))
    block = _atom_block(document)
    rows, _, _ = _mmcif_rows(block)
    for axis, name in enumerate("xyz"):
        column = block.find_values(f"_atom_site.Cartn_{name}")
        for k in np.flatnonzero(new[:, axis] != old[:, axis]).tolist():
            column[int(rows[k])] = f"{new[k, axis]:.3f}"
    return document.as_string(_gemmi().cif.Style.Pdbx).encode("latin-1")


def _converted(structure: Any, xyz: np.ndarray, kind: str) -> bytes:
    gemmi = _gemmi()
    atoms = (atom for chain in structure[0] for residue in chain for atom in residue)
    for atom, position in zip(atoms, xyz.tolist(), strict=True):
        atom.pos = gemmi.Position(*position)
    if kind == "mmCIF":
        structure.setup_entities()
        return structure.make_mmcif_document().as_string().encode()
    options = gemmi.PdbWriteOptions()
    options.preserve_serial = True
    return structure.make_pdb_string(options).encode()


def _kind_of_name(path: str | os.PathLike) -> str:
    name = os.fspath(path).lower().removesuffix(".gz")
    if name.endswith((".pdb", ".ent")):
        return "PDB"
    if name.endswith((".cif", ".mmcif")):
        return "mmCIF"
    raise StructureError(f"{path}: name it .pdb, .ent, .cif or .mmcif (or .gz)")


def _why_not_pdb(structure: Any) -> str | None:
    for model in structure:
        if (atoms := model.count_atom_sites()) > 99_999:
            return f"{atoms:,} atoms are more than 99,999"
        for chain in model:
            if len(chain.name) > 1:
                return f"the chain name {chain.name!r} is longer than one character"
            for residue in chain:
                if len(residue.name) > 3:
                    return f"the residue name {residue.name!r} is longer than three characters"
                if long := [atom.name for atom in residue if len(atom.name) > 4]:
                    return f"the atom name {long[0]!r} is longer than four characters"
                if not -999 <= residue.seqid.num <= 9999:
                    return f"the residue number {residue.seqid.num} is longer than four characters"
    return None


def check_target(path: str | os.PathLike) -> None:
    """Raise `StructureError` if no file can be written to `path`.

    Parameters
    ----------
    path : str or path-like

    Examples
    --------
    >>> check_target(".")
    Traceback (most recent call last):
    fusedops.structure.StructureError: .: is a folder
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise StructureError(f"{path}: is a folder")
    if not os.path.isdir(folder):
        raise StructureError(f"{path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StructureError(f"{path}: no permission to write in {folder}")
    if not os.path.exists(target):
        return
    # The new file replaces the old one; a device must not be replaced.
    if not os.path.isfile(target):
        raise StructureError(f"{path}: is no regular file")
    if not os.access(target, os.W_OK):
        raise StructureError(f"{path}: no permission to write it")


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """Yield the name of a new file, which replaces `path` once it is written.

    Parameters
    ----------
    path : str or path-like

    Yields
    ------
    str

    Raises
    ------
    StructureError
        The file can't be written; the old file at `path` is unchanged.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/map.ccp4") as draft:
    ...         _ = Path(draft).write_bytes(b"all of it")
    ...     os.listdir(folder)
    ['map.ccp4']
    """
    target = os.path.realpath(path)
    draft = f"{target}.{secrets.token_hex(4)}.tmp"
    try:
        yield draft
        os.replace(draft, target)
    except OSError as error:
        raise StructureError(f"{path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)
