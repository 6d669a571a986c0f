"""Planes of ligands and modified residues, from restraint CIFs and monomer libraries."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from typing import Any

from fusedops.structure import (
    _PLANES,
    SIGMA,
    Structure,
    StructureError,
    _gemmi,
    _read_source,
)

__all__ = ["read_monomers", "read_restraints"]

Restraints = dict[str, dict[str, dict[str, float]]]
"""The planes of components: ``restraints["AMP"]["plan-1"]["N9"]`` is the sigma of an atom, Å."""

_PLANE_ATOM = "_chem_comp_plane_atom."


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
    for values in ("_chem_comp_bond.value_dist", "_chem_comp_atom.type_energy"):
        if block.find_values(values):
            category = values.partition(".")[0]
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
    if not os.path.isdir(folder):
        raise StructureError(f"{folder}: there is no such folder; it should be a monomer library")
    gemmi = _gemmi()
    library = gemmi.MonLib()
    library.monomer_dir = os.fspath(folder)
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
