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
