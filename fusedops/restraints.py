"""Restraints from monomer libraries or a structure itself, and planes from restraint CIFs."""

from __future__ import annotations

import io
import math
import os
import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from fusedops._frame.check import indices, of_shape, positive, refuse, values
from fusedops.structure import (
    _PLANES,
    SIGMA,
    Structure,
    StructureError,
    _alt,
    _gemmi,
    _numbered,
    _read_source,
    check_structure,
    checked_xyz,
)

__all__ = [
    "ModelGeometry",
    "derive_geometry",
    "find_contacts",
    "read_geometry",
    "read_monomers",
    "read_restraints",
]

Restraints = dict[str, dict[str, dict[str, float]]]
"""The planes of components: ``restraints["AMP"]["plan-1"]["N9"]`` is the sigma of an atom, Å."""

_PLANE_ATOM = "_chem_comp_plane_atom."

# Where libraries have their links and modifications.
_LINKS = "links_and_mods.cif", "list/mon_lib_list.cif"

# TorchRef's standard deviations of chiral volumes, Å³, and of differences of B, Å²; and its priors
# of cis peptides, before proline and others.
_CHIRAL_SIGMA, _B_SIGMA = 0.2, 2.0
_CIS_PROLINE, _CIS = 0.05, 0.0005

# The most that bonded atoms are apart beyond their covalent radii, and the longest bond, Å.
_BOND_SLACK, _LONGEST_BOND = 0.4, 4.0
# The least sigmas of derived bonds, Å, and angles, degrees; and the volume of a flat centre, Å³.
_BOND_SIGMA, _ANGLE_SIGMA, _FLAT = 0.02, 2.0, 1.0

# TorchRef's standard deviation of contacts, and its distance of hydrogen bonds, Å.
_CONTACT_SIGMA, _HYDROGEN_BOND = 0.3, 2.85
# The farthest contact, Å: beyond it a list would fill the memory.
_FARTHEST_CONTACT = 50.0
# Labels of alternatives, in the order in which programs take them.
_LABELS = string.ascii_uppercase + string.digits + string.ascii_lowercase
# gemmi's distance of an atom from its image, Å, below which it lies on a special position.
_SPECIAL = 0.8


def read_restraints(path: str | os.PathLike) -> Restraints:
    """Read the planes of components from a restraint CIF, as AceDRG, grade and eLBOW write it.

    Parameters
    ----------
    path : str or path-like
        The file, plain or gzipped.

    Returns
    -------
    dict
        From the components that the file restrains to their planes: a dict from a plane's name to
        a dict from an atom's name to its sigma in Å. A component may have no planes. An atom
        without a number for its sigma gets the default, 0.02 Å.

    Raises
    ------
    StructureError
        The file can't be read, holds no restraints, or has a sigma that isn't positive.
    ImportError
        gemmi isn't installed.

    References
    ----------
    A. A. Vagin et al., "REFMAC5 dictionary: organization of prior chemical knowledge and guidelines
    for its use", Acta Cryst. D60 (2004) 2184-2195.

    Examples
    --------
    >>> text = "data_comp_CO3 loop_ _chem_comp_plane_atom.comp_id _chem_comp_plane_atom.plane_id "
    >>> text += "_chem_comp_plane_atom.atom_id _chem_comp_plane_atom.dist_esd "
    >>> text += " ".join(f"CO3 plan-1 {atom} 0.02" for atom in ("C", "O1", "O2", "O3"))
    >>> with open("CO3.cif", "w") as file:
    ...     _ = file.write(text)
    >>> read_restraints("CO3.cif")
    {'CO3': {'plan-1': {'C': 0.02, 'O1': 0.02, 'O2': 0.02, 'O3': 0.02}}}
    """
    cif = _gemmi().cif
    source = _read_source(path)
    found: Restraints = {}
    try:
        document = cif.read_string(source)
        for block in document:
            for name in _restrained(block):
                found.setdefault(name, {})
            for component, plane, atom, sigma in _plane_atoms(block):
                found.setdefault(component, {}).setdefault(plane, {})[atom] = sigma
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(": ")
        reason = re.sub(r"^\w+:(\d+):\d+\(\d+\)", r"line \1", reason)
        raise StructureError(f"{path}: can't be read as restraints: {reason}") from None
    if not found:
        raise StructureError(
            f"{path}: it holds no restraints; it should have {_PLANE_ATOM}atom_id, which entries "
            "of the Chemical Component Dictionary lack"
        )
    return found


def _restrained(block: Any) -> list[str]:
    """Return the components with restraints of any kind."""
    for name in ("_chem_comp_bond.value_dist", "_chem_comp_atom.type_energy"):
        if block.find_values(name):
            category = name.partition(".")[0]
            return [row.str(0) for row in block.find([f"{category}.comp_id"])]
    return []


def _plane_atoms(block: Any) -> Iterable[tuple[str, str, str, float]]:
    """Yield component, plane, atom and sigma of each row, or raise ValueError for a bad one."""
    names = ("comp_id", "plane_id", "atom_id")
    if not block.find_values(f"{_PLANE_ATOM}atom_id"):
        return
    table = block.find(_PLANE_ATOM, [*names, "?dist_esd"])
    if len(table) == 0:
        raise ValueError(f"{_PLANE_ATOM}atom_id goes with comp_id and plane_id, which it lacks")
    as_number = _gemmi().cif.as_number
    for row in table:
        component, plane, atom = (row.str(k) for k in range(3))
        text = row[3] if row.has(3) else "?"
        sigma = SIGMA if text in ("?", ".") else as_number(text)
        if not 0 < sigma < math.inf:
            raise ValueError(
                f"dist_esd of {component} {plane} {atom} is {text!r}; it should be a positive "
                "number, in Å"
            )
        yield component, plane, atom, sigma


def read_monomers(folder: str | os.PathLike, structure: Structure) -> Restraints:
    """Read the planes of a structure's ligands and modified residues from a monomer library.

    Parameters
    ----------
    folder : str or path-like
        The library's folder, in which ``a/AMP.cif`` describes AMP; CCP4 has it in ``CLIBD_MON``.
    structure : Structure
        Its standard amino acids and nucleotides, and waters, are not looked up:
        `fusedops.structure.planar_groups` knows their planes.

    Returns
    -------
    dict
        As of `read_restraints`, for the residues that the library has.

    Raises
    ------
    StructureError
        There is no such folder, or a file in it can't be read.
    ImportError
        gemmi isn't installed.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> read_monomers(".", read_structure(files("fusedops") / "data/1ubi.pdb"))
    {}
    """
    gemmi = _gemmi()
    check_structure("read_monomers", structure)
    library = _library("read_monomers", folder)
    found: Restraints = {}
    for name in sorted({residue.name for chain in structure.gemmi[0] for residue in chain}):
        info = gemmi.find_tabulated_residue(name)
        # The name becomes part of a file's name.
        known = name in _PLANES or info.is_standard() or info.is_water()
        if known or not name.isalnum():
            continue
        path = library.path(name)
        if os.path.exists(path):
            found |= {key: planes for key, planes in read_restraints(path).items() if key == name}
    return found


def _library(op: str, folder: str | os.PathLike) -> Any:
    """Return gemmi's monomer library of a folder, without monomers yet."""
    if not isinstance(folder, str | os.PathLike):
        refuse(TypeError, op, "folder", f"is a {type(folder).__name__}", "be a path")
    if not os.path.isdir(folder):
        raise StructureError(f"{folder}: there is no such folder; it should be a monomer library")
    library = _gemmi().MonLib()
    library.monomer_dir = os.fspath(folder)
    return library


@dataclass(frozen=True, eq=False)
class ModelGeometry:
    """Restraints of a structure's geometry, and what has none.

    Attributes
    ----------
    columns : dict
        Arguments of `fusedops.Restraints`: bonds, angles, torsions, chirals and b_pairs.
    skipped : collections.Counter
        The number of residues without a description, by name; their atoms have no restraints.
    missing : list of str
        The atoms that descriptions have and the model lacks, such as ``"A/VAL 5/CG1"``: restraints
        that need them are left out. An end of a chain may lack OXT.
    unusable : collections.Counter
        The number of restraints, by kind, that are left out because the library gives no ideal, or
        no sigma above zero, as of torsions that the planes of rings hold.
    warnings : list of str
        gemmi's, of links that the library or the model lacks, and the like; and links to images in
        the crystal, and atoms that the file repeats, which have no restraints.

    Examples
    --------
    >>> from collections import Counter
    >>> ModelGeometry({}, Counter(XYZ=2), ["A/VAL 5/CG1"], Counter(), []).skipped["XYZ"]
    2
    """

    columns: dict[str, dict[str, np.ndarray]]
    skipped: Counter[str]
    missing: list[str]
    unusable: Counter[str]
    warnings: list[str]

    def __repr__(self) -> str:
        counts = {kind: len(columns["indices"]) for kind, columns in self.columns.items()}
        shown = ", ".join([f"{count} {kind}" for kind, count in counts.items()])
        return f"ModelGeometry({shown}; {self.skipped.total()} residues skipped)"


def read_geometry(folder: str | os.PathLike, structure: Structure) -> ModelGeometry:
    """Read the restraints of a structure's geometry from a monomer library.

    Parameters
    ----------
    folder : str or path-like
        The library's folder, in which ``a/ALA.cif`` describes ALA, and ``links_and_mods.cif`` or
        ``list/mon_lib_list.cif`` describes links; CCP4 has it in ``CLIBD_MON``.
    structure : Structure
        From `fusedops.structure.read_structure`. Alternative conformations have restraints each,
        and atoms whose occupancy is zero are restrained as others are.

    Returns
    -------
    ModelGeometry
        Lengths in Å and angles in degrees. Bonds, angles, torsions and chiral volumes are the
        library's, of residues and of links between them, but for the torsions φ and ψ of peptides.
        ω has its ideal at 180°, with a prior probability of 0.05 before proline, and 0.0005 before
        other residues, to be cis. Chiral volumes have a sigma of 0.2 Å³, and the B factors of
        bonded atoms, hydrogens apart, are to be like within 2 Å².

    Raises
    ------
    StructureError
        There is no such folder, a file in it can't be read, or no residue of the structure has a
        description.
    ImportError
        gemmi isn't installed.

    References
    ----------
    F. Long et al., "AceDRG: a stereochemical description generator for ligands", Acta Cryst. D73
    (2017) 112-122.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> structure = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> os.makedirs("h", exist_ok=True)
    >>> text = "data_comp_HOH loop_ _chem_comp_atom.comp_id _chem_comp_atom.atom_id "
    >>> text += "_chem_comp_atom.type_symbol _chem_comp_atom.type_energy HOH O O OH2"
    >>> with open("h/HOH.cif", "w") as file:  # of a library that knows nothing but water
    ...     _ = file.write(text)
    >>> geometry = read_geometry(".", structure)
    >>> geometry.skipped.total(), geometry.columns["bonds"]["indices"].shape
    (76, (0, 2))
    """
    gemmi = _gemmi()
    check_structure("read_geometry", structure)
    library = _library("read_geometry", folder)
    model = _labelled(structure)
    while len(model) > 1:
        del model[len(model) - 1]
    residues = [residue for chain in model[0] for residue in chain]
    names = Counter([residue.name for residue in residues])
    files = [os.path.join(folder, name) for name in _LINKS]
    files = [path for path in files if os.path.exists(path)][:1]
    # The name becomes part of a file's name.
    files += [
        path for name in names if name.isalnum() and os.path.exists(path := library.path(name))
    ]
    for path in files:
        try:
            library.read_monomer_cif(path)
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise StructureError(f"{path}: can't be read as a monomer: {reason}") from None
    known = set(library.monomers)
    if not known.intersection(names):
        shown = ", ".join(sorted(names)[:5])
        raise StructureError(f"{folder}: it has no description of {shown}; it should have one")
    model.setup_entities()
    warnings = io.StringIO()
    try:
        topology = gemmi.prepare_topology(
            model, library, warnings=warnings, ignore_unknown_links=True
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise StructureError(f"{structure.path}: has no topology: {reason}") from None

    # gemmi has numbered the atoms anew, in its order, and its objects of one atom differ.
    atoms = [(atom, residue.name) for chain in model[0] for residue in chain for atom in residue]
    number = dict(zip([atom.serial for atom, _ in atoms], structure._order.tolist(), strict=True))
    unknown = {number[atom.serial] for atom, name in atoms if name not in known}
    prolines = {number[atom.serial] for atom, name in atoms if name == "PRO"}
    unusable: Counter[str] = Counter()
    of_images, links = _links_to_images(topology, model.cell)

    def at_home(kind: str, listed: Iterable[Any]) -> list[Any]:
        return [found for place, found in enumerate(listed) if (kind, place) not in of_images]

    def table(kind: str, atoms: int, rows: Iterable[tuple[Any, ...]]) -> dict[str, np.ndarray]:
        """Return columns of (gemmi's restraint, ideal, sigma, further columns)."""
        found = []
        for restraint, ideal, sigma, *others in rows:
            index = [number[atom.serial] for atom in restraint.atoms]
            if unknown.intersection(index):
                continue
            if math.isfinite(ideal) and 0 < sigma < math.inf:
                found.append((index, ideal, sigma, *others))
            else:
                unusable[kind] += 1
        columns = list(zip(*found, strict=True)) or [(), (), (), (), ()]
        return {
            "indices": np.array(columns[0], np.int64).reshape(-1, atoms),
            "ideals": np.array(columns[1], np.float64),
            "sigmas": np.array(columns[2], np.float64),
            **({} if kind != "torsions" else _periodic(*columns[3:])),
        }

    def torsions() -> Iterable[tuple[Any, ...]]:
        for torsion in at_home("Torsion", topology.torsions):
            of, label = torsion.restr, torsion.restr.label.lower()
            if label == "omega":
                cis = _CIS_PROLINE if number[torsion.atoms[2].serial] in prolines else _CIS
                yield torsion, 180.0, of.esd, 1, cis
            elif label not in ("phi", "psi"):
                yield torsion, of.value, of.esd, max(of.period, 1), 0.0

    def chirals() -> Iterable[tuple[Any, ...]]:
        signs = {gemmi.ChiralityType.Positive: 1.0, gemmi.ChiralityType.Negative: -1.0}
        for centre in at_home("Chirality", topology.chirs):
            volume = signs.get(centre.restr.sign, 0.0) * topology.ideal_chiral_abs_volume(centre)
            yield centre, volume, _CHIRAL_SIGMA

    def gaussian(kind: str, listed: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
        return ((found, found.restr.value, found.restr.esd) for found in at_home(kind, listed))

    columns = {
        "bonds": table("bonds", 2, gaussian("Bond", topology.bonds)),
        "angles": table("angles", 3, gaussian("Angle", topology.angles)),
        "torsions": table("torsions", 4, torsions()),
        "chirals": table("chirals", 4, chirals()),
    }
    hydrogen = np.zeros(len(atoms), bool)
    hydrogen[[number[atom.serial] for atom, _ in atoms if atom.element.is_hydrogen]] = True
    pairs = columns["bonds"]["indices"]
    pairs = pairs[~hydrogen[pairs].any(1)]
    columns["b_pairs"] = {"indices": pairs, "sigmas": np.full(len(pairs), _B_SIGMA)}
    skipped = Counter({name: count for name, count in names.items() if name not in known})
    # Residues at one place share the atoms without alternatives, which one of them lists.
    shared = {
        (chain.name, str(residue.seqid), atom.name)
        for chain in model[0]
        for residue in chain
        for atom in residue
        if not _alt(atom)
    }
    missing = [
        str(lack)
        for lack in topology.find_missing_atoms(False)
        if (lack.chain_name, str(lack.res_id.seqid), lack.atom_name) not in shared
    ]
    told = warnings.getvalue().splitlines()
    for link in links:
        first, second = (structure.labels[number[serial]] for serial in link)
        told.append(f"the link of {first} and an image of {second} has no restraints")
    seen: set[tuple[Any, ...]] = set()
    for chain in model[0]:
        for residue in chain:
            for atom in residue if residue.name in known else ():
                key = chain.name, str(residue.seqid), residue.name, atom.name, atom.altloc
                if key in seen:
                    label = structure.labels[number[atom.serial]]
                    told.append(f"{label} is there again, and has no restraints")
                seen.add(key)
    return ModelGeometry(columns, skipped, missing, unusable, told)


def _links_to_images(
    topology: Any, cell: Any
) -> tuple[set[tuple[str, int]], list[tuple[int, int]]]:
    """Return kinds and places of the restraints of links to images, and the serials of their atoms.

    gemmi lists them with the atoms of the file, which may be anywhere.
    """
    found, links = set(), []
    for link in topology.extras:
        bond = topology.first_bond_in_link(link)
        first, second = bond.atoms if bond else (link.res1[0], link.res2[0])
        if not cell.find_nearest_image(first.pos, second.pos, link.asu).same_asu():
            found |= {(rule.rkind.name, rule.index) for rule in link.link_rules}
            links.append((first.serial, second.serial))
    return found, links


def _periodic(periods: Any, opposite: Any) -> dict[str, np.ndarray]:
    return {"periods": np.array(periods, np.int64), "opposite": np.array(opposite, np.float64)}


def derive_geometry(structure: Structure) -> ModelGeometry:
    """Derive restraints of a structure's geometry from itself, where no monomer library is at hand.

    Two atoms, unless both are hydrogens, are bonded if they are no further apart than their
    covalent radii and 0.4 Å. The ideal of a bond, an angle or a chiral volume is the mean over all
    that are like it in the structure; the sigma is their standard deviation, but at least 0.02 Å,
    2° or 0.2 Å³. Atoms are alike if they are of one element, and bonded to the same elements.

    Parameters
    ----------
    structure : Structure
        From `fusedops.structure.read_structure`, with a geometry worth keeping: of a model of
        better resolution than the data. Alternative conformations have restraints each, which
        share the atoms without alternatives; none joins two of them. Atoms whose occupancy is zero
        are restrained as others are.

    Returns
    -------
    ModelGeometry
        As of `read_geometry`, but without torsions: `fusedops.structure.planar_groups` keeps planes
        flat. Residues without bonds, such as waters, count as skipped. Warnings have the numbers of
        bonds to images in the crystal, of pairs of atoms at one place, and of other residues'
        atoms without bonds, which have no restraints. No description says which atoms a residue
        should have, so none are missing.

    Raises
    ------
    StructureError
        The file's matrices turn its unit cell.
    ImportError
        gemmi isn't installed.

    References
    ----------
    F. Long et al., "AceDRG: a stereochemical description generator for ligands", Acta Cryst. D73
    (2017) 112-122, whose ideals are means over alike atoms in a database; and B. Cordero et al.,
    "Covalent radii revisited", Dalton Trans. (2008) 2832-2838.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> geometry = derive_geometry(read_structure(files("fusedops") / "data/1ubi.pdb"))
    >>> geometry.columns["bonds"]["indices"].shape, geometry.skipped
    ((608, 2), Counter({'HOH': 81}))
    """
    check_structure("derive_geometry", structure)
    _check_axes(structure)
    copy, xyz = _labelled(structure), structure.xyz
    residues = [residue for chain in copy[0] for residue in chain]
    listed = [atom for residue in residues for atom in residue]
    atoms = sorted(listed, key=lambda atom: atom.serial)
    hydrogen = np.array([atom.is_hydrogen() for atom in atoms])
    bonds, warnings = _find_bonds(copy)
    bonds = bonds[~hydrogen[bonds].all(axis=1)]
    bonded = _Bonded([atom.element.name for atom in atoms], [_alt(atom) for atom in atoms], bonds)
    lengths = np.linalg.norm(xyz[bonds[:, 1]] - xyz[bonds[:, 0]], axis=1)
    angles = bonded.rows(2)
    arms = xyz[angles[:, 1:]] - xyz[angles[:, :1]]
    cosines = np.prod(arms, axis=1).sum(-1) / np.linalg.norm(arms, axis=2).prod(-1)
    degrees = np.degrees(np.arccos(np.clip(cosines, -1, 1)))
    centres = bonded.rows(3)
    centres = centres[~hydrogen[centres].any(axis=1)]
    volumes = np.linalg.det(xyz[centres[:, 1:]] - xyz[centres[:, :1]])
    centres[volumes < 0] = centres[volumes < 0][:, [0, 2, 1, 3]]
    centres, volumes = (each[abs(volumes) > _FLAT] for each in (centres, abs(volumes)))
    heavy = bonds[~hydrogen[bonds].any(axis=1)]
    columns = {
        "bonds": {"indices": bonds, **_alike(bonded.kinds(bonds), lengths, _BOND_SIGMA)},
        "angles": {
            "indices": angles[:, [1, 0, 2]],
            **_alike(bonded.kinds(angles), degrees, _ANGLE_SIGMA),
        },
        "chirals": {
            "indices": centres,
            **_alike(bonded.kinds(centres), volumes, _CHIRAL_SIGMA),
        },
        "b_pairs": {"indices": heavy, "sigmas": np.full(len(heavy), _B_SIGMA)},
    }
    lone = [not any(bonded.to[atom.serial] for atom in residue) for residue in residues]
    skipped = Counter(
        [residue.name for residue, alone in zip(residues, lone, strict=True) if alone]
    )
    loose = [
        structure.labels[atom.serial]
        for residue, alone in zip(residues, lone, strict=True)
        for atom in residue
        if not alone and not bonded.to[atom.serial]
    ]
    if loose:
        first = f"{loose[0]} and others" if len(loose) > 1 else loose[0]
        warnings.append(f"{len(loose)} atoms without bonds have no restraints: {first}")
    return ModelGeometry(columns, skipped, [], Counter(), warnings)


def _labelled(structure: Structure, xyz: np.ndarray | None = None) -> Any:
    """Return a numbered copy of gemmi's object, in which every alternative of an atom has a label.

    Some programs leave the main one's blank, as if the atom were common to all.
    """
    copy = _numbered(structure, xyz)
    for chain in copy[0]:
        for residue in chain:
            used = {_alt(atom) for atom in residue}
            if len(used) == 1:
                continue
            several = {atom.name for atom in residue if atom.has_altloc()}
            main = next(label for label in _LABELS if label not in used)
            for atom in residue:
                if atom.name in several and not atom.has_altloc():
                    atom.altloc = main
    return copy


def _check_axes(structure: Structure) -> None:
    """Raise StructureError if a file's matrices turn its unit cell: gemmi finds no neighbours."""
    matrix = structure.gemmi.cell.orth.mat.tolist()
    if np.tril(matrix, -1).any():
        raise StructureError(
            f"{structure.path}: its matrices (SCALE records or _atom_sites) turn the unit cell; a "
            "should be along x and b in the plane of x and y"
        )


def _find_bonds(structure: Any) -> tuple[np.ndarray, list[str]]:
    """Return pairs of serial numbers of bonded atoms, and warnings of pairs that are left out."""
    gemmi = _gemmi()
    search = gemmi.NeighborSearch(structure[0], structure.cell, _LONGEST_BOND).populate()
    contacts = gemmi.ContactSearch(_LONGEST_BOND)
    contacts.setup_atomic_radii(1.0, _BOND_SLACK)
    contacts.ignore = gemmi.ContactSearch.Ignore.Nothing
    contacts.special_pos_cutoff_sq = 0
    pairs, left_out = set(), Counter[str]()
    # An atom meets itself, and its images where it is on a special position.
    itself, other = set(), []
    for found in contacts.find_contacts(search):
        first, second = found.partner1.atom, found.partner2.atom
        if first.serial == second.serial and found.dist < _SPECIAL:
            itself.add((first.serial, found.image_idx))
        else:
            other.append((found, first, second))
    for found, first, second in other:
        i, j = sorted((first.serial, second.serial))
        at_home = {(i, found.image_idx), (j, found.image_idx)} <= itself
        moved = abs(first.pos.dist(second.pos) - found.dist) > 1e-3
        if at_home and not moved and found.image_idx:
            continue  # both atoms' images are the atoms
        # An image by translation alone has the index of the atom.
        if not at_home or moved or (i, j) in pairs:
            left_out["bonds to images in the crystal"] += 1
        elif found.dist == 0:
            left_out["pairs of atoms at one place"] += 1
        else:
            pairs.add((i, j))
    warnings = [f"{count} {what} have no restraints" for what, count in left_out.items()]
    return np.array(sorted(pairs), np.int64).reshape(-1, 2), warnings


class _Bonded:
    """Atoms by element and alternative, with the atoms that each is bonded to."""

    def __init__(self, elements: list[str], alts: list[str], bonds: np.ndarray) -> None:
        self.elements, self.alts = elements, alts
        self.to: list[list[int]] = [[] for _ in elements]
        for i, j in bonds.tolist():
            self.to[i].append(j)
            self.to[j].append(i)

    def rows(self, ends: int) -> np.ndarray:
        """Return all rows of a centre and atoms bonded to it that are of one alternative."""
        rows = [
            (centre, *some)
            for centre, bonded in enumerate(self.to)
            for some in combinations(bonded, ends)
            if len(self.named((centre, *some))) < 2
        ]
        return np.array(rows, np.int64).reshape(-1, 1 + ends)

    def named(self, atoms: Iterable[int]) -> set[str]:
        """Return the alternatives of atoms that have one."""
        return {self.alts[i] for i in atoms} - {""}

    def kinds(self, rows: np.ndarray) -> list[str]:
        """Return a name for each row, which is the same for rows of alike atoms."""
        names = []
        for centre, *ends in rows.tolist():
            alt = min(self.named([centre, *ends]), default="")
            kinds = [self.kind(centre, alt), *sorted([self.kind(i, alt) for i in ends])]
            # Either end of a bond may be its centre.
            names.append(" ".join(kinds if len(ends) > 1 else sorted(kinds)))
        return names

    def kind(self, atom: int, alt: str) -> str:
        """Return an atom's element, and the elements that it is bonded to in an alternative."""
        alt = alt or min(self.named(self.to[atom]), default="")
        bonded = [self.elements[i] for i in self.to[atom] if self.alts[i] in ("", alt)]
        return f"{self.elements[atom]}({','.join(sorted(bonded))})"


def _alike(kinds: list[str], values: np.ndarray, least: float) -> dict[str, np.ndarray]:
    """Return ideals and sigmas: the mean and the standard deviation of values of each kind."""
    _, place, count = np.unique(np.array(kinds, str), return_inverse=True, return_counts=True)
    ideals = (np.bincount(place, values) / count)[place]
    variances = (np.bincount(place, np.square(values - ideals)) / count)[place]
    return {"ideals": ideals, "sigmas": np.maximum(np.sqrt(variances), least)}


def find_contacts(
    structure: Structure,
    bonds: np.ndarray,
    xyz: np.ndarray | None = None,
    *,
    within: float = 6.0,
) -> dict[str, Any]:
    """Find the contacts of atoms that aren't bonded, with those in symmetry's and cells' images.

    Parameters
    ----------
    structure : Structure
        From `fusedops.structure.read_structure`. Hydrogens, and atoms whose occupancy is zero,
        have no contacts; nor have two alternatives with each other.
    bonds : (n, 2) array of int
        Such as ``columns["bonds"]["indices"]`` of `read_geometry`: atoms that up to three bonds
        join are not in contact. An atom that they lack, as of residues that `read_geometry` skips,
        counts as bonded to atoms no further in the file than covalent radii and 0.4 Å, unless it is
        a residue's only one, as of waters and ions. Nor are atoms in contact with images that the
        file links them to.
    xyz : (N, 3) array, optional
        Coordinates in Å in place of the structure's.
    within : float
        The longest distance of a contact, Å: the list serves until atoms have moved by half of
        what this is beyond the sum of two radii.

    Returns
    -------
    dict
        ``contacts`` of `fusedops.Restraints`. The distance is the sum of the elements' van der
        Waals radii, and 2.85 Å for oxygen with nitrogen or oxygen, which may share a hydrogen;
        the sigma is 0.3 Å. A contact in the crystal counts once: where it is listed from both of
        its ends, as an atom's with its own images is, and each where NCS makes copies of the file's
        atoms, it has the weight ½ each time. A weight is divided by the number of operations that
        keep either atom on its special position.

    Raises
    ------
    TypeError, ValueError, IndexError
        An array has another dtype or shape; coordinates aren't finite; `bonds` has an atom that the
        structure lacks; or `within` isn't from 0 to 50 Å.
    StructureError
        The file's matrices turn its unit cell.
    ImportError
        gemmi isn't installed.

    References
    ----------
    A. Bondi, "van der Waals Volumes and Radii", J. Phys. Chem. 68 (1964) 441-451.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.structure import read_structure
    >>> structure = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> bonds = derive_geometry(structure).columns["bonds"]["indices"]
    >>> find_contacts(structure, bonds)["indices"].shape
    (11964, 2)
    """
    gemmi, op = _gemmi(), "find_contacts"
    check_structure(op, structure)
    _check_axes(structure)
    count = len(structure.xyz)
    if xyz is not None:
        xyz = checked_xyz(op, structure, xyz)
    bonds = values(op, "bonds", indices(op, "bonds", bonds))
    of_shape(op, "bonds", bonds, ("n", 2))
    bad = ((bonds < 0) | (bonds >= count)).any(axis=1)
    if bad.any():
        first = int(bad.argmax())
        was = f"is {bonds[first].tolist()}"
        refuse(IndexError, op, f"bonds[{first}]", was, f"be from 0 to {count - 1}")
    if not positive(op, "within", within) <= _FARTHEST_CONTACT:
        should = f"be at most {_FARTHEST_CONTACT:g} Å"
        refuse(ValueError, op, "within", f"is {within!r}", should)
    bonds = np.concatenate([bonds, _unlisted_bonds(structure, bonds)])
    order = structure._order.tolist()
    copy = _labelled(structure, xyz)
    model, cell = copy[0], copy.cell
    atoms = [atom for chain in model for residue in chain for atom in residue]
    search = gemmi.NeighborSearch(model, cell, within).populate(include_h=False)
    contacts = gemmi.ContactSearch(within)
    contacts.ignore = gemmi.ContactSearch.Ignore.Nothing
    contacts.min_occupancy = 1e-9
    # The inverse of an operation of the NCS may not be among the file's.
    contacts.twice = any(not op.given for op in structure.gemmi.ncs)
    pairs = {
        (f.partner1.atom.serial, f.partner2.atom.serial, f.image_idx)
        for f in contacts.find_contacts(search)
    }
    position = np.empty((len(atoms), 3))
    position[order] = [atom.pos.tolist() for atom in atoms]
    table = _images(cell, position, np.array(sorted(pairs), np.int64).reshape(-1, 3), within)
    i, j = table[:, :2].T
    at_home = np.equal(table[:, 2:], 0).all(axis=1)
    pair = i * count + j
    apart = np.where(
        at_home,
        ~np.isin(pair, _joined(bonds, count)),
        ~np.isin(pair, _linked_to_images(copy) @ [[count, 1], [1, count]]),
    )
    fixing = _fixing(cell, position)
    if len(fixing):
        joined = _joined_to_images(bonds, fixing)
        apart &= np.array([row not in joined for row in map(tuple, table.tolist())], bool)
    table, at_home = table[apart], at_home[apart]
    keys, images = np.unique(table[~at_home, 2:], axis=0, return_inverse=True)
    places = np.full(len(table), -1)
    places[~at_home] = images.ravel()
    radii, elements = np.empty(len(atoms)), np.empty(len(atoms), "U2")
    radii[order] = [atom.element.vdw_r for atom in atoms]
    elements[order] = [atom.element.name for atom in atoms]
    i, j = table[:, :2].T
    # An image of an atom on a special position is listed by every operation that makes it.
    times = 1 + np.bincount(fixing[:, 0], minlength=count)
    oxygen, nitrogen = elements == "O", elements == "N"
    shares = (oxygen[i] & (oxygen | nitrogen)[j]) | (nitrogen[i] & oxygen[j])
    return {
        "indices": table[:, :2],
        "distances": np.where(shares, _HYDROGEN_BOND, radii[i] + radii[j]),
        "sigmas": np.full(len(table), _CONTACT_SIGMA),
        "weights": np.where(contacts.twice | (i == j), 0.5, 1.0) / (times[i] * times[j]),
        "images": places,
        "operations": np.array([_operation(cell, *key) for key in keys]).reshape(-1, 3, 4),
    }


def _unlisted_bonds(structure: Structure, bonds: np.ndarray) -> np.ndarray:
    """Return the bonds, by distance, of atoms that have none, and aren't a residue's only one."""
    copy = _labelled(structure)
    several, lone = np.zeros((2, len(structure.xyz)), bool)
    for chain in copy[0]:
        for residue in chain:
            heavy = [atom for atom in residue if not atom.is_hydrogen()]
            if len({atom.name for atom in heavy}) > 1:
                several[[atom.serial for atom in heavy]] = True
    lone |= several
    lone[bonds.ravel()] = False
    # Most models have none, and are not searched.
    found = _find_bonds(copy)[0] if lone.any() else np.empty((0, 2), np.int64)
    return found[lone[found].any(axis=1) & several[found].all(axis=1)]


def _linked_to_images(structure: Any) -> np.ndarray:
    """Return pairs (n, 2) of serial numbers of atoms; the file links the first to images."""
    gemmi = _gemmi()
    pairs = []
    for link in structure.connections:
        first, second = (
            structure[0].find_cra(end, ignore_segment=True).atom
            for end in (link.partner1, link.partner2)
        )
        if first and second and link.type != gemmi.ConnectionType.Hydrog:
            nearest = structure.cell.find_nearest_image(first.pos, second.pos, link.asu)
            if not nearest.same_asu():
                pairs.append((first.serial, second.serial))
    return np.array(pairs, np.int64).reshape(-1, 2)


def _images(cell: Any, xyz: np.ndarray, pairs: np.ndarray, within: float) -> np.ndarray:
    """Return rows (i, j, symmetry, shift by cells) of pairs (i, j, symmetry): all within reach.

    A small cell has several images of a pair within reach. An atom on a special position is its own
    image, and not in contact with itself.
    """
    if not cell.is_crystal():
        return np.column_stack([pairs, np.zeros((len(pairs), 3), np.int64)])
    to_cell, origin, from_cell = _matrices(cell)
    turns, moves = (np.array(each) for each in zip(*_symmetry(cell), strict=True))
    i, j, symmetry = pairs.T
    fractional = xyz @ to_cell.T + origin
    apart = np.einsum("nij,nj->ni", turns[symmetry], fractional[j]) + moves[symmetry]
    apart -= fractional[i]
    nearest = -np.rint(apart)
    reach = np.ceil(within * np.linalg.norm(to_cell, axis=1) + 0.5).astype(int)
    found = []
    for offset in np.ndindex(*(2 * reach + 1)):
        shift = nearest + offset - reach
        distance = np.linalg.norm((apart + shift) @ from_cell.T, axis=1)
        near = (distance <= within) & ((i != j) | (distance > _SPECIAL))
        found.append(np.column_stack([pairs[near], shift[near].astype(np.int64)]))
    return np.concatenate(found)


def _fixing(cell: Any, xyz: np.ndarray) -> np.ndarray:
    """Return rows (i, symmetry, shift by cells) of images of atoms that are the atoms themselves.

    Atoms on special positions have them; the atoms as they are in the file aren't listed.
    """
    rows = [np.empty((0, 5), np.int64)]
    if cell.is_crystal():
        to_cell, origin, from_cell = _matrices(cell)
        fractional = xyz @ to_cell.T + origin
        for symmetry, (turn, move) in enumerate(_symmetry(cell)[1:], 1):
            apart = fractional @ np.transpose(turn) + move - fractional
            shift = -np.rint(apart)
            here = np.linalg.norm((apart + shift) @ from_cell.T, axis=1) <= _SPECIAL
            atoms = np.flatnonzero(here)
            rows.append(
                np.column_stack([atoms, np.full(len(atoms), symmetry), shift[here].astype(int)])
            )
    return np.concatenate(rows)


def _joined_to_images(bonds: np.ndarray, fixing: np.ndarray) -> set[tuple[int, ...]]:
    """Return rows (i, j, symmetry, shift by cells): up to three bonds join i to the image of j.

    The bonds meet in an atom that is its own image.
    """
    bonded = _neighbours(bonds)
    joined = set()
    for middle, *image in fixing.tolist():
        far = {middle: 0}
        for steps in (1, 2, 3):
            for atom in list(far):
                for other in bonded.get(atom, ()):
                    far.setdefault(other, steps)
        joined |= {(i, j, *image) for i in far for j in far if far[i] + far[j] <= 3}
    return joined


def _matrices(cell: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the matrices to fractional coordinates and back, and the fractional origin between.

    SCALE records may shift the origin of the cell.
    """
    to_cell, from_cell = (np.array(t.mat.tolist()) for t in (cell.frac, cell.orth))
    return to_cell, np.array(cell.frac.vec.tolist()), from_cell


def _symmetry(cell: Any) -> list[tuple[Any, Any]]:
    """Return the fractional matrix and vector of all images of a cell, the first itself."""
    images = [(image.mat.tolist(), image.vec.tolist()) for image in cell.images]
    return [(np.eye(3).tolist(), [0.0] * 3), *images]


def _operation(cell: Any, symmetry: int, *shift: int) -> np.ndarray:
    """Return the Cartesian matrix (3, 4) of one of a cell's images, moved by whole cells."""
    to_cell, origin, from_cell = _matrices(cell)
    turn, move = map(np.array, _symmetry(cell)[symmetry])
    move = turn @ origin + move + shift - origin
    return np.column_stack([from_cell @ turn @ to_cell, from_cell @ move])


def _joined(bonds: np.ndarray, atoms: int) -> list[int]:
    """Return i · atoms + j of all atoms i and j that up to three bonds join."""
    near = bonded = _neighbours(bonds)
    for _ in range(2):
        near = {i: found.union(*[bonded[j] for j in found]) for i, found in near.items()}
    return [i * atoms + j for i, found in near.items() for j in found]


def _neighbours(bonds: np.ndarray) -> dict[int, set[int]]:
    bonded: dict[int, set[int]] = {}
    for i, j in bonds.tolist():
        bonded.setdefault(i, set()).add(j)
        bonded.setdefault(j, set()).add(i)
    return bonded
