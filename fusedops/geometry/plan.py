"""Restraints, checked and laid out once, atom by atom."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fusedops._frame.arrays import grouped
from fusedops._frame.check import (
    add_device,
    refuse,
    size,
    values,
)
from fusedops._frame.packed import Packed

MOST_ATOMS = 2**31 - 1
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

# The von Mises distribution's concentrations 1/σ², from nearly uniform to a σ of 0.6°.
_LEAST_KAPPA, _MOST_KAPPA = 1e-3, 1e4
#: ln((1 - p) / p) where p is zero: it makes the other conformation impossible for any κ.
NEVER = 1e5


class Kind(NamedTuple):
    """A kind of restraint: atoms of each, and columns by name, with those that may be left out."""

    atoms: int
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()


#: The kinds in the order of `geometry_nll`'s result, and of everything in `Restraints`.
KINDS = {
    "bonds": Kind(2, ("ideals", "sigmas")),
    "angles": Kind(3, ("ideals", "sigmas")),
    "torsions": Kind(4, ("ideals", "sigmas"), ("periods", "opposite")),
    "chirals": Kind(4, ("ideals", "sigmas")),
    "contacts": Kind(2, ("distances", "sigmas"), ("weights", "images", "operations")),
    "b_pairs": Kind(2, ("sigmas",)),
}
CONTACTS, B_PAIRS = 4, 5
_COUNTS = tuple([f"num_{kind}" for kind in KINDS])


@np.errstate(all="ignore")
def _power(sigma: np.ndarray) -> np.ndarray:
    """Return 1/σ⁴, or zero where it isn't finite and positive."""
    power = (1 / sigma) ** 4
    return np.where((sigma > 0) & (power < np.inf), power, 0.0)


# Good numbers of a column in words, and their test.
_SHOULD: dict[str, tuple[str, Any]] = {
    "ideals": ("finite", np.isfinite),
    "distances": ("finite", np.isfinite),
    "operations": ("finite", np.isfinite),
    "sigmas": ("positive, and neither σ nor 1/σ⁴ infinite", lambda s: _power(s) > 0),
    "periods": ("from 0 to 360", lambda n: (n >= 0) & (n <= 360)),
    "opposite": ("at least 0, and below 1", lambda p: (p >= 0) & (p < 1)),
    "weights": ("finite, and at least 0", lambda w: (w >= 0) & (w < np.inf)),
}


class Restraints(Packed):
    r"""Restraints of a model's geometry and B factors, checked and laid out once for many calls.

    Parameters
    ----------
    bonds : dict, optional
        ``indices`` (n, 2), ``ideals`` and ``sigmas`` (n,), Å.
    angles : dict, optional
        ``indices`` (n, 3), the vertex in the middle; ``ideals`` and ``sigmas`` (n,), degrees.
    torsions : dict, optional
        ``indices`` (n, 4); ``ideals`` and ``sigmas`` (n,), degrees, with the sign of IUPAC;
        ``periods`` (n,) integers up to 360, by default 1: a torsion of period n has n ideals in a
        turn;
        ``opposite`` (n,), by default 0: the prior probability of the torsion 180° from the ideal,
        such as 0.05 for the cis peptide before a proline.
    chirals : dict, optional
        ``indices`` (n, 4), the centre first; ``ideals`` (n,), the volumes
        :math:`(x_1 - x_0) \cdot (x_2 - x_0) \times (x_3 - x_0)`, Å³, or 0 for a centre of either
        hand, whose volume's size is to be 2.5 Å³; ``sigmas`` (n,), Å³.
    contacts : dict, optional
        ``indices`` (n, 2); ``distances`` (n,), the shortest without repulsion, and ``sigmas`` (n,),
        Å; ``weights`` (n,), by default 1, such as ½ for a contact that is listed from both ends;
        ``images`` (n,) integers, places in ``operations`` (m, 3, 4), Cartesian matrices
        :math:`(R, t)` that put the second atom at :math:`R x + t`, Å; -1 leaves it where it is.
    b_pairs : dict, optional
        ``indices`` (n, 2), atoms of like B; ``sigmas`` (n,), Å².
    num_atoms : int, optional
        The number of atoms that indices must stay below.

    Attributes
    ----------
    num_bonds, num_angles, num_torsions, num_chirals, num_contacts, num_b_pairs : int
        The number of restraints of each kind.
    bound : int
        One more than the largest index: the least number of atoms that coordinates must have.
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.

    Raises
    ------
    TypeError, ValueError, IndexError
        If an array has the wrong dtype, shape, device or value, or a restraint has an atom twice;
        the message names it.

    Notes
    -----
    Arrays are NumPy's, lists, or torch tensors on one device, on which the object then lives;
    indices are int32 or int64. A number stands for n equal ones. The arrays are copied, so later
    changes to them have no effect. Memory grows with the largest index.

    Examples
    --------
    >>> import fusedops
    >>> restraints = fusedops.Restraints(
    ...     bonds={"indices": [[0, 1], [1, 2]], "ideals": [1.46, 1.53], "sigmas": 0.02},
    ...     angles={"indices": [[0, 1, 2]], "ideals": 111.0, "sigmas": 2.7},
    ... )
    >>> restraints.num_bonds, restraints.num_angles, restraints.bound
    (2, 1, 3)
    """

    # index: the atoms of all restraints, kind after kind; ideal: lengths, radians, volumes and
    # distances; weight: 1/σ², κ, or w/4σ⁴. Of torsions: phase (n, 2), the ideal's cosine and sine,
    # so that kernels need no angle; period; and log_odds of the ideal against its opposite. Of
    # contacts: image, the row of operations, the first of which is the identity. Atom i has the
    # elements of entries, places in index, from entry_ptr[i] to entry_ptr[i + 1]: a restraint
    # writes a row for each of its atoms, and the atom sums its rows. constant: the terms without
    # coordinates, summed for every kind.
    _fields = (
        "index",
        "ideal",
        "weight",
        "phase",
        "period",
        "log_odds",
        "image",
        "operations",
        "entry_ptr",
        "entries",
        "constant",
    )
    _sizes = (*_COUNTS, "bound")
    _given = ("bonds",)

    def __init__(
        self,
        *,
        bonds: Mapping[str, Any] | None = None,
        angles: Mapping[str, Any] | None = None,
        torsions: Mapping[str, Any] | None = None,
        chirals: Mapping[str, Any] | None = None,
        contacts: Mapping[str, Any] | None = None,
        b_pairs: Mapping[str, Any] | None = None,
        num_atoms: int = MOST_ATOMS,
    ) -> None:
        num_atoms = min(size("Restraints", "num_atoms", num_atoms), MOST_ATOMS)
        given = bonds, angles, torsions, chirals, contacts, b_pairs
        devices: dict[str, str] = {}
        tables = [
            _table(kind, columns, num_atoms, devices)
            for kind, columns in zip(KINDS, given, strict=True)
        ]
        device = next(iter(devices.values()), "cpu")
        self._hold(device, **_packing(*tables))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of restraints of each kind."""
        return tuple([getattr(self, name) for name in _COUNTS])

    def __repr__(self) -> str:
        total = sum(self.counts)
        return f"Restraints({total} restraints, {self.bound} atoms, on {self.device})"


def _table(
    kind: str, columns: Any, num_atoms: int, devices: dict[str, str]
) -> dict[str, np.ndarray]:
    """Return the checked columns of restraints of a kind, and add devices of tensors by name."""
    atoms, needs, may = KINDS[kind]
    if columns is None:
        columns = {"indices": np.empty((0, atoms), np.int32), **dict.fromkeys(needs, 1.0)}
    if not isinstance(columns, Mapping):
        was = f"is a {type(columns).__name__}"
        refuse(TypeError, "Restraints", kind, was, f"be a dict of indices, {', '.join(needs)}")
    for name in columns:
        if name not in ("indices", *needs, *may):
            known = ", ".join(["indices", *needs, *may])
            refuse(ValueError, "Restraints", kind, f"has {str(name)[:40]!r}", f"have {known}")
    for name in ("indices", *needs):
        if columns.get(name) is None:
            refuse(ValueError, "Restraints", kind, f"has no {name}", "have them")
    if (columns.get("images") is None) != (columns.get("operations") is None):
        refuse(ValueError, "Restraints", kind, "has images or operations", "have both or none")
    found = {}
    for name, value in columns.items():
        if value is not None:
            of = f"{kind}[{name!r}]"
            found[name] = values("Restraints", of, value)
            add_device("Restraints", devices, of, value)
    index = found["indices"]
    of = f"{kind}['indices']"
    if isinstance(columns["indices"], (list, tuple)) and not index.size:
        index = found["indices"] = index.astype(np.int64)
    if index.dtype.kind != "i":
        refuse(TypeError, "Restraints", of, f"has dtype {index.dtype}", "be int32 or int64")
    if index.shape != (len(index) if index.ndim else 0, atoms):
        refuse(ValueError, "Restraints", of, f"has shape {index.shape}", f"be (n, {atoms})")
    _check(of, index, (index >= 0) & (index < num_atoms), f"from 0 to {num_atoms - 1}", IndexError)
    count, operations = len(index), found.pop("operations", None)
    for name, column in found.items():
        if name != "indices":
            found[name] = _numbers(f"{kind}[{name!r}]", name, column, count)
    if operations is not None:
        of = f"{kind}['operations']"
        if operations.shape[1:] != (3, 4):
            refuse(ValueError, "Restraints", of, f"has shape {operations.shape}", "be (m, 3, 4)")
        operations = _numbers(of, "operations", operations.ravel(), operations.size).reshape(-1, 12)
        images = found["images"]
        good = (images >= -1) & (images < len(operations))
        should = f"from -1 to {len(operations) - 1}, a place in operations"
        _check(f"{kind}['images']", images, good, should, IndexError)
        found["operations"] = operations
    # An atom may meet its own image.
    own = found.get("images", np.full(count, -1)) < 0
    same = [index[:, i] == index[:, j] for i, j in itertools.combinations(range(atoms), 2)]
    twice = own & np.logical_or.reduce(same)
    _check(f"{kind}['indices']", index, ~twice, "of different atoms", ValueError)
    return found


def _numbers(of: str, name: str, column: np.ndarray, count: int) -> np.ndarray:
    """Return a column's numbers, one for each of `count` restraints."""
    integers = name in ("periods", "images")
    if column.dtype.kind not in ("i" if integers else "fi"):
        should = "be int32 or int64" if integers else "be float32 or float64"
        refuse(TypeError, "Restraints", of, f"has dtype {column.dtype}", should)
    if column.shape not in ((), (count,)):
        should = f"be ({count},), or a number"
        refuse(ValueError, "Restraints", of, f"has shape {column.shape}", should)
    column = np.broadcast_to(column.astype(np.int64 if integers else np.float64), (count,))
    if name in _SHOULD:
        should, test = _SHOULD[name]
        _check(of, column, test(column), should, ValueError)
    return column


def _check(
    of: str, column: np.ndarray, good: np.ndarray, should: str, error: type[Exception]
) -> None:
    """Raise an error that names the first bad element, or row, of a column."""
    if not good.all():
        at = tuple([int(i) for i in np.argwhere(~good)[0]])
        place = ", ".join(map(str, at))
        raise error(f"Restraints: {of}[{place}] is {column[at]}; it should be {should}")


def _packing(
    bonds: dict[str, np.ndarray],
    angles: dict[str, np.ndarray],
    torsions: dict[str, np.ndarray],
    chirals: dict[str, np.ndarray],
    contacts: dict[str, np.ndarray],
    b_pairs: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Return the fields and sizes of `Restraints` of checked columns."""
    radians = {"ideals": np.deg2rad, "sigmas": np.deg2rad}
    angles = {name: radians.get(name, np.asarray)(column) for name, column in angles.items()}
    torsions = {name: radians.get(name, np.asarray)(column) for name, column in torsions.items()}
    tables = bonds, angles, torsions, chirals, contacts, b_pairs
    counts = [len(table["indices"]) for table in tables]
    index = np.concatenate([table["indices"].ravel() for table in tables]).astype(np.int32)
    if len(index) >= MOST_ATOMS:
        raise ValueError(
            f"Restraints: the restraints have {len(index)} indices; they should have fewer than "
            f"{MOST_ATOMS}"
        )
    kappa = np.clip(1 / torsions["sigmas"] ** 2, _LEAST_KAPPA, _MOST_KAPPA)
    none = np.zeros(len(kappa))
    opposite = torsions.get("opposite", none)
    weights = contacts.get("weights", np.ones(len(contacts["sigmas"])))
    gaussian = [np.log(table["sigmas"]) + HALF_LOG_2PI for table in tables]
    # The prior of the ideal torsion, and the von Mises distribution's norm.
    gaussian[2] = _log_bessel(kappa) + 2 * HALF_LOG_2PI - np.log1p(-opposite)
    gaussian[4] = weights * gaussian[4]
    bound = int(index.max(initial=-1)) + 1
    entries, entry_ptr = grouped(index, bound)
    images = contacts.get("images", np.full(len(weights), -1))
    identity = np.eye(3, 4).reshape(1, 12)
    with np.errstate(divide="ignore"):
        log_odds = np.minimum(np.log1p(-opposite) - np.log(opposite), NEVER)
    return {
        "index": index,
        "ideal": np.concatenate(
            [
                *[table["ideals"] for table in (bonds, angles, torsions, chirals)],
                contacts["distances"],
                np.zeros(counts[5]),
            ]
        ),
        "weight": np.concatenate(
            [
                bonds["sigmas"] ** -2,
                angles["sigmas"] ** -2,
                kappa,
                chirals["sigmas"] ** -2,
                0.25 * weights * contacts["sigmas"] ** -4,
                b_pairs["sigmas"] ** -2,
            ]
        ),
        "phase": np.stack([np.cos(torsions["ideals"]), np.sin(torsions["ideals"])], 1),
        "period": np.maximum(torsions.get("periods", none), 1).astype(np.int32),
        "log_odds": log_odds,
        "image": (images + 1).astype(np.int32),
        "operations": np.concatenate([identity, contacts.get("operations", np.empty((0, 12)))]),
        "entry_ptr": entry_ptr.astype(np.int64),
        "entries": entries.astype(np.int32),
        "constant": np.array([np.sum(terms) for terms in gaussian]),
        **dict(zip(_COUNTS, counts, strict=True)),
        "bound": bound,
    }


def _log_bessel(kappa: np.ndarray) -> np.ndarray:
    """Return ln(I₀(κ) exp(-κ)), by its asymptotic series where exp(κ) might overflow."""
    few = np.minimum(kappa, 500.0)
    x = 1 / (8 * np.maximum(kappa, 500.0))
    series = 1 + x * (1 + x * (4.5 + x * (37.5 + x * 459.375)))
    near = np.log(np.i0(few)) - few
    return np.where(kappa < 500, near, np.log(series) - 0.5 * np.log(2 * np.pi * kappa))
