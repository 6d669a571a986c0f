"""Small structures in PDB format."""

from __future__ import annotations

import re

import numpy as np

_BACKBONE = {"N": (0, 0, 0), "CA": (1.2, 0, 0), "C": (2.47, 0, 0), "O": (2.47, 1.2, 0)}


def pdb(*residues: str) -> str:
    """Return PDB text of residues such as "ALA 1 N CA.A CB 0 1.5 -2", a peptide chain along x.

    A number is "8", "8A" or "B8" for another chain. An atom's name may have the alternative after a
    dot, and then the atom's coordinates.
    """
    lines: list[str] = []
    for position, residue in enumerate(residues):
        name, number, atoms = residue.split(" ", 2)
        chain, number, icode = re.fullmatch(r"([A-Z]?)(\d+)([A-Z]?)", number).groups()
        listed = re.findall(r"([A-Z][\w']*)(?:\.(\w))?((?: -?\d[\d.]*)*)", atoms)
        for k, (atom, alt, xyz) in enumerate(listed):
            spot = np.add(_BACKBONE.get(atom, (1.2, -1 - k, k % 2)), (3.8 * position, 0, 0))
            x, y, z = map(float, xyz.split() or spot)
            lines.append(
                f"ATOM  {len(lines) + 1:5d}  {atom:<3s}{alt or ' '}{name:>3s} {chain or 'A'}"
                f"{int(number):4d}{icode or ' '}   {x:8.3f}{y:8.3f}{z:8.3f}  1.00 10.00          "
                f"{atom[0]:>2s}\n"
            )
    return "".join(lines)


#: A small molecule with its symmetry's operations, an atom on an inversion, and U.
SMALL = """data_small
_cell_length_a 10.234(2)
_cell_length_b 7.5
_cell_length_c 8.1
_cell_angle_alpha 90
_cell_angle_beta 101.3(1)
_cell_angle_gamma 90
loop_
_symmetry_equiv_pos_as_xyz
x,y,z
-x,y+1/2,-z+1/2
-x,-y,-z
x,-y+1/2,z+1/2
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
_atom_site_U_iso_or_equiv
_atom_site_occupancy
C1 C 0.1234(5) 0.25 0.3 0.021(1) 1
Zn1 Zn 0 0 0 0.03 1.0
O1 O 0.3 0.4 0.1 0.05 0.5
H1 H 0.35 0.45 0.1 0.04 1.0
loop_
_atom_site_aniso_label
_atom_site_aniso_U_11
_atom_site_aniso_U_22
_atom_site_aniso_U_33
_atom_site_aniso_U_12
_atom_site_aniso_U_13
_atom_site_aniso_U_23
C1 0.02 0.03 0.01 0.001 0.002 0.003
"""


def sums_of_small(hkl: np.ndarray) -> np.ndarray:
    """Return structure factors of `SMALL` by gemmi's sums over atoms."""
    import gemmi

    small = gemmi.make_small_structure_from_block(gemmi.cif.read_string(SMALL)[0])
    small.change_occupancies_to_crystallographic()
    calculator = gemmi.StructureFactorCalculatorX(small.cell)
    return np.array([calculator.calculate_sf_from_small_structure(small, h) for h in hkl.tolist()])
