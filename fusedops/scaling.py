"""Observed amplitudes, bulk solvent, and the scale of structure factors.

The model of the data is F_model = k_total (F_calc + k_mask F_mask). The mask is flat, and fixed
while atoms move a little; both scales are smooth functions of the scattering vectors, and plain
functions of arrays or tensors, through which autograd works.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusedops._frame.arrays import ArrayT, namespace
from fusedops._frame.check import as_array, dtype_name, is_tensor, of_shape, refuse, values
from fusedops.maps import MapGrid, centring
from fusedops.structure import (
    Structure,
    StructureError,
    _gemmi,
    _numbered,
    _read_source,
    check_structure,
    checked_xyz,
)

__all__ = [
    "Amplitudes",
    "Scale",
    "fit_scale",
    "k_mask",
    "k_total",
    "read_amplitudes",
    "solvent_mask",
]

# Columns of a value and its sigma, of macromolecular and core CIF, with the power of the amplitude.
# A CIF may write its names in any case.
_COLUMNS = (
    ("f_meas_au", "f_meas_sigma_au", 1),
    ("f_meas", "f_meas_sigma", 1),
    ("f_meas", "f_sigma", 1),
    ("f_squared_meas", "f_squared_sigma", 2),
    ("intensity_meas", "intensity_sigma", 2),
)
_HKL = "index_h", "index_k", "index_l"
_STATUS = "status", "observed_status", "include_status"
# The share of F_calc beyond which squares of F_mask may overflow in 32 bits.
_LARGEST_MASK = 1e12
# Reflections that were excluded, are systematically absent, or beyond limits of resolution.
_EXCLUDED = ("x", "-", "h", "l")


@dataclass(frozen=True, eq=False)
class Scale:
    """The scale of structure factors to observed amplitudes, by the field's names.

    Attributes
    ----------
    k_overall : float
        The factor of all structure factors.
    U_aniso : (6,) float64 array
        U11, U22, U33, U12, U13, U23 of all atoms together, Å², in Cartesian coordinates.
    k_sol : float
        The density of the solvent, electrons/Å³; 0 without solvent.
    B_sol : float
        The blur of its surface, Å².

    Examples
    --------
    >>> Scale(2.0)
    Scale(k_overall=2.0, U_aniso=array([0., 0., 0., 0., 0., 0.]), k_sol=0.0, B_sol=0.0)
    """

    k_overall: float = 1.0
    U_aniso: np.ndarray = field(default_factory=lambda: np.zeros(6))
    k_sol: float = 0.0
    B_sol: float = 0.0


@dataclass(frozen=True, eq=False)
class Amplitudes:
    """Observed amplitudes of a crystal.

    Attributes
    ----------
    hkl : (M, 3) int32 array
        Miller indices, in the order of the file.
    F : (M,) float64 array
        NaN where the file has no value, or excludes it, or has a negative amplitude or an intensity
        that isn't positive.
    sigma : (M,) float64 array
        Standard deviations; NaN where F is, or where the file has no positive one.
    free : (M,) bool array
        Whether a reflection is kept for R free, by its status. Numbers in ``pdbx_r_free_flag`` have
        no meaning that all programs share, and aren't read.
    negative : int
        The number of reflections whose intensity isn't positive, or whose amplitude is negative.
    cell : gemmi.UnitCell or None
    spacegroup : gemmi.SpaceGroup or None

    Examples
    --------
    >>> import gemmi, numpy as np
    >>> one, no = np.ones(1), np.zeros(1, bool)
    >>> Amplitudes(np.ones((1, 3), np.int32), one, one, no, 0, gemmi.UnitCell(), None)
    Amplitudes(1 reflections, 1 observed, 0 free)
    """

    hkl: np.ndarray
    F: np.ndarray
    sigma: np.ndarray
    free: np.ndarray
    negative: int
    cell: Any
    spacegroup: Any

    def __repr__(self) -> str:
        observed = np.isfinite(self.F).sum()
        return f"Amplitudes({len(self.F)} reflections, {observed} observed, {self.free.sum()} free)"


def read_amplitudes(path: str | os.PathLike) -> Amplitudes:
    """Read observed amplitudes from a CIF of structure factors, of macro- or small molecules.

    Parameters
    ----------
    path : str or path-like
        The file, plain or gzipped: as the Protein Data Bank has it, or a core CIF with a loop of
        reflections.

    Returns
    -------
    Amplitudes
        Amplitudes of the first data block with reflections. Columns with values are preferred to
        columns without, then columns with sigmas, and then amplitudes to intensities, whose square
        roots are taken otherwise.

    Raises
    ------
    StructureError
        The file can't be read, has no reflections, has no column of measured values, or has a value
        that is neither a number nor unknown.
    ImportError
        gemmi isn't installed.

    References
    ----------
    S. R. Hall, F. H. Allen & I. D. Brown, "The crystallographic information file (CIF): a new
    standard archive file for crystallography", Acta Cryst. A47 (1991) 655-685.

    Examples
    --------
    >>> text = "data_NaCl loop_ _refln_index_h _refln_index_k _refln_index_l "
    >>> text += "_refln_F_squared_meas _refln_F_squared_sigma 1 1 1 400.0 8.0 2 0 0 -1.0 2.0"
    >>> with open("NaCl.cif", "w") as file:
    ...     _ = file.write(text)
    >>> amplitudes = read_amplitudes("NaCl.cif")
    >>> amplitudes, amplitudes.negative
    (Amplitudes(2 reflections, 1 observed, 0 free), 1)
    >>> amplitudes.F.tolist(), amplitudes.sigma.tolist()
    ([20.0, nan], [0.2, nan])
    """
    gemmi = _gemmi()
    source = _read_source(path)
    try:
        document = gemmi.cif.read_string(source)
        core = [block for block in document if block.find_values("_refln_index_h")]
        if core:
            blocks = [gemmi.hkl_cif_as_refln_block(core[0])]
        else:
            blocks = [block for block in gemmi.as_refln_blocks(document) if block.default_loop]
        if not blocks:
            raise ValueError("it has no reflections (_refln)")
        block, loop = blocks[0], blocks[0].default_loop
        labels = {label.lower(): label for label in block.column_labels()}

        def texts(name: str) -> list[str]:
            return loop.values[[*labels].index(name) :: loop.width()]

        def column(name: str) -> np.ndarray:
            found = block.make_float_array(labels[name])
            for text in np.array(texts(name))[np.isnan(found)].tolist():
                if text not in (".", "?") and text.lower() != "nan":
                    raise ValueError(f"a {name} is {text}, which is no number")
            return found

        known = [columns for columns in _COLUMNS if columns[0] in labels]
        if not known:
            raise ValueError(f"its reflections have no measured value, but {', '.join(labels)}")
        known.sort(key=lambda columns: columns[1] not in labels)
        arrays = [column(columns[0]) for columns in known]
        first = next((n for n, array in enumerate(arrays) if np.isfinite(array).any()), 0)
        (_, sigma_name, power), values = known[first], arrays[first]
        if not len(values):
            raise ValueError("its loop of reflections is empty")
        absent = [f"_refln.{index}" for index in _HKL if index not in labels]
        if absent:
            raise ValueError(f"its reflections have no {', '.join(absent)}")
        indices = [[gemmi.cif.as_int(text) for text in texts(index)] for index in _HKL]
        for index in _HKL:
            largest = np.nanmax(abs(block.make_float_array(labels[index])), initial=0)
            if largest > np.iinfo(np.int32).max:
                raise ValueError(f"an {index} is {largest:g} in size, beyond 32 bits")
        sigma = np.full(len(values), np.nan)
        if sigma_name in labels:
            sigma = column(sigma_name)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise StructureError(f"{path}: can't be read as reflections: {reason}") from None
    status = np.full(len(values), "o")
    for name in _STATUS:
        if name in labels:
            status = np.array([gemmi.cif.as_string(text).lower() for text in texts(name)])
            break
    values[np.isin(status, _EXCLUDED)] = np.nan
    negative = values <= 0 if power == 2 else values < 0
    values[negative] = np.nan
    F = values ** (1 / power)
    has_sigma = np.isfinite(F) & (sigma > 0)
    sigma = np.where(has_sigma, sigma / (power * F ** (power - 1)), np.nan)
    hkl, free = np.array(indices, np.int32).T, status == "f"
    cell = block.cell if block.cell.is_crystal() else None
    return Amplitudes(hkl, F, sigma, free, int(negative.sum()), cell, block.spacegroup)


def solvent_mask(structure: Structure, grid: MapGrid, xyz: np.ndarray | None = None) -> np.ndarray:
    """Return the flat mask of a crystal's bulk solvent, by gemmi.

    Parameters
    ----------
    structure : Structure
        From `fusedops.structure.read_structure`. Every alternative conformation takes up room;
        hydrogens, and atoms whose occupancy is zero, take up none.
    grid : MapGrid
        From `fusedops.maps.crystal_grid`.
    xyz : (N, 3) array, optional
        Coordinates in Å in place of the structure's.

    Returns
    -------
    (nx, ny, nz) float32 array
        One in the solvent, zero elsewhere, in the whole unit cell: its structure factors, F_mask,
        need no symmetry operations.

    Raises
    ------
    StructureError
        An atom is of an unknown element, whose radius nobody knows.
    ValueError
        The grid is of a box; or coordinates have another shape, aren't finite, or are beyond
        1,000,000 Å.

    Notes
    -----
    Radii, a probe of 1.1 Å and a shrinkage of 0.9 Å are cctbx's.

    References
    ----------
    J.-S. Jiang & A. T. Brünger, "Protein hydration observed by X-ray diffraction", J. Mol. Biol.
    243 (1994) 100-115.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from fusedops.maps import crystal_grid
    >>> from fusedops.structure import read_structure
    >>> ubiquitin = read_structure(files("fusedops") / "data/1ubi.pdb")
    >>> mask = solvent_mask(ubiquitin, crystal_grid(ubiquitin, 0.7))
    >>> round(float(mask.mean()), 2)  # of the volume
    0.15
    """
    gemmi = _gemmi()
    check_structure("solvent_mask", structure)
    _check_grid("solvent_mask", grid)
    if xyz is not None:
        xyz = checked_xyz("solvent_mask", structure, xyz)
    copy = _numbered(structure, xyz)
    atoms = [atom for chain in copy[0] for residue in chain for atom in residue]
    unknown = [atom.serial for atom in atoms if atom.element.atomic_number == 0]
    if unknown:
        first = structure.labels[unknown[0]]
        raise StructureError(f"{structure.path}: {first} is of an unknown element")
    copy.expand_ncs(gemmi.HowToNameCopiedChain.Dup)
    if moves := centring(grid.spacegroup):
        # gemmi's masks leave these copies out, so chains are copied.
        copy.ncs = [_translation(grid.matrix @ move) for move in moves]
        copy.expand_ncs(gemmi.HowToNameCopiedChain.Dup)
    mask = gemmi.FloatGrid()
    mask.set_unit_cell(grid.cell)
    mask.spacegroup = grid.spacegroup
    mask.set_size(*grid.shape)
    gemmi.SolventMasker(gemmi.AtomicRadiiSet.Cctbx).put_mask_on_float_grid(mask, copy[0])
    return np.array(mask.array)


def _translation(move: np.ndarray) -> Any:
    """Return gemmi's operation that copies atoms by a translation in Å."""
    gemmi = _gemmi()
    return gemmi.NcsOp(gemmi.Transform(gemmi.Mat33(), gemmi.Vec3(*move.tolist())))


def _check_grid(op: str, grid: Any) -> None:
    if not isinstance(grid, MapGrid):
        refuse(TypeError, op, "grid", f"is a {type(grid).__name__}", "be a MapGrid of a crystal")
    if grid.spacegroup is None:
        refuse(ValueError, op, "grid", "is of a box", "be of a crystal")


def k_mask(s: ArrayT, k_sol: Any, B_sol: Any) -> ArrayT:
    r"""Return the factor of the mask's structure factors, k_sol exp(-B_sol s²/4).

    Parameters
    ----------
    s : array or tensor (M, 3)
        Scattering vectors in Å⁻¹, ``hkl @ inv(cell)``.
    k_sol, B_sol : float, or array or tensor ()
        See `Scale`. Parameters that are tensors have gradients.

    Returns
    -------
    array or tensor (M,)
        A tensor if an argument is one.

    Raises
    ------
    TypeError, ValueError
        `s` has another shape, or a parameter isn't a real number.

    References
    ----------
    A. Fokine & A. Urzhumtsev, "Flat bulk-solvent model: obtaining optimal parameters", Acta Cryst.
    D58 (2002) 1387-1392: 0.35 electrons/Å³ and 46 Å² on average.

    Examples
    --------
    >>> import numpy as np
    >>> k_mask(np.array([[0, 0, 0], [0, 0.1, 0]]), 0.35, 46.0).round(3).tolist()
    [0.35, 0.312]
    """
    s, k_sol, B_sol = _alike("k_mask", s, k_sol=k_sol, B_sol=B_sol)
    return k_sol * namespace(s).exp(-(B_sol / 4.0) * (s * s).sum(-1))


def k_total(s: ArrayT, k_overall: Any, U_aniso: Any) -> ArrayT:
    r"""Return the factor of all structure factors, k_overall exp(-2π² sᵀ U_aniso s).

    Parameters
    ----------
    s : array or tensor (M, 3)
        See `k_mask`.
    k_overall : float, or array or tensor ()
        See `Scale`. Parameters that are tensors have gradients.
    U_aniso : array or tensor (6,)
        See `Scale`.

    Returns
    -------
    array or tensor (M,)
        A tensor if an argument is one.

    Raises
    ------
    TypeError, ValueError
        `s` or `U_aniso` has another shape, or a parameter isn't a real number.

    References
    ----------
    P. V. Afonine et al., "Bulk-solvent and overall scaling revisited: faster calculations, improved
    results", Acta Cryst. D69 (2013) 625-634.

    Examples
    --------
    >>> import numpy as np
    >>> k_total(np.array([[0, 0, 0], [0, 0.2, 0]]), 2.0, [0, 0.1, 0, 0, 0, 0]).round(3).tolist()
    [2.0, 1.848]
    """
    try:
        given = {f"U_aniso[{k}]": part for k, part in enumerate(U_aniso)}
    except TypeError:
        refuse(TypeError, "k_total", "U_aniso", f"is {U_aniso!r}", "be an array (6,)")
    if len(given) != 6:
        raise ValueError(f"k_total: U_aniso has {len(given)} numbers; it should have 6")
    s, k_overall, *U = _alike("k_total", s, k_overall=k_overall, **given)
    x, y, z = s[:, 0], s[:, 1], s[:, 2]
    products = x * x, y * y, z * z, 2 * x * y, 2 * x * z, 2 * y * z
    exponent = sum(product * part for product, part in zip(products, U, strict=True))
    return k_overall * namespace(s).exp(-2 * math.pi**2 * exponent)


def _alike(op: str, s: Any, **parameters: Any) -> list[Any]:
    """Return scattering vectors and parameters; if one is a tensor, arrays as tensors."""
    given = [s if is_tensor(s) else as_array(op, "s", s)]
    given += [_parameter(op, name, x) for name, x in parameters.items()]
    tensors = [x for x in given if is_tensor(x)]
    if tensors:
        made = functools.partial(namespace(tensors[0]).tensor, device=tensors[0].device)
        given = [made(x) if isinstance(x, np.ndarray) else x for x in given]
    of_shape(op, "s", given[0], ("M", 3))
    return given


def _parameter(op: str, name: str, x: Any) -> Any:
    """Return a parameter that is a number, an array or a tensor of one, or raise an error."""
    if isinstance(x, numbers.Real):
        return x
    x = x if is_tensor(x) else as_array(op, name, x)
    if math.prod(x.shape) != 1:
        refuse(ValueError, op, name, f"has shape {tuple(x.shape)}", "be a number, or of shape ()")
    if not re.match("float|bfloat|u?int", dtype_name(x.dtype)):
        refuse(TypeError, op, name, f"has dtype {dtype_name(x.dtype)}", "be a real number")
    return x.reshape(())


def fit_scale(
    observed: np.ndarray,
    F_calc: np.ndarray,
    hkl: np.ndarray,
    grid: MapGrid,
    F_mask: np.ndarray | None = None,
) -> Scale:
    """Return the scale that fits structure factors to observed amplitudes best, by gemmi.

    Parameters
    ----------
    observed : (M,) array
        Amplitudes; NaN where there is none, as for reflections that are kept free.
    F_calc : (M,) complex array
        Structure factors of the atoms.
    hkl : (M, 3) array of int
        Miller indices.
    grid : MapGrid
        Its cell and space group, which constrains U_aniso.
    F_mask : (M,) complex array, optional
        Structure factors of `solvent_mask`; without them, or if all are zero, there is no solvent.

    Returns
    -------
    Scale
        The least squares of ``k_total * abs(F_calc + k_mask * F_mask)`` and the amplitudes, which
        all weigh the same. Where the best k_sol or B_sol is negative, the data have no solvent to
        fit, and both are zero.

    Raises
    ------
    ValueError
        An array has another shape, or is zero everywhere but for `F_mask`; fewer amplitudes are
        observed than parameters are fitted, or one is negative; `F_mask` is over 1e12 times
        `F_calc`; Miller indices aren't whole; a number isn't finite, other than at reflections
        without an amplitude; a tensor asks for a gradient; or the grid is of a box.
    TypeError
        Amplitudes aren't real, or structure factors aren't numbers.

    References
    ----------
    ``Scaling`` of gemmi, which minimizes by Levenberg-Marquardt. M. Wojdyr, J. Open Source Softw. 7
    (2022) 4200.

    Examples
    --------
    >>> from importlib.resources import files
    >>> import gemmi, numpy as np
    >>> from fusedops.maps import crystal_grid
    >>> from fusedops.structure import read_structure
    >>> grid = crystal_grid(read_structure(files("fusedops") / "data/1ubi.pdb"), 1.0)
    >>> hkl = gemmi.make_miller_array(grid.cell, grid.spacegroup, 3.0)
    >>> rng = np.random.default_rng(0)
    >>> F_calc, F_mask = 100 * (rng.normal(size=(2, len(hkl))) + 1j)
    >>> s = hkl @ np.linalg.inv(grid.matrix)
    >>> U_aniso = [0.02, 0.05, -0.01, 0, 0, 0]
    >>> F_model = k_total(s, 2.0, U_aniso) * (F_calc + k_mask(s, 0.4, 50.0) * F_mask)
    >>> scale = fit_scale(abs(F_model), F_calc, hkl, grid, F_mask)
    >>> round(scale.k_overall, 4), scale.U_aniso.round(4).tolist()
    (2.0, [0.02, 0.05, -0.01, 0.0, 0.0, 0.0])
    >>> round(scale.k_sol, 4), round(scale.B_sol, 2)
    (0.4, 50.0)
    """
    gemmi = _gemmi()
    _check_grid("fit_scale", grid)
    op = "fit_scale"
    given = values(op, "hkl", hkl)
    of_shape(op, "hkl", given, ("M", 3))
    with np.errstate(invalid="ignore"):
        hkl = given.astype(np.int32)
    _none(op, "hkl", given, (hkl != given).any(axis=1), "be whole numbers")
    arrays = {"observed": observed, "F_calc": F_calc}
    if F_mask is not None:
        arrays["F_mask"] = F_mask
    for name, array in arrays.items():
        arrays[name] = array = values(op, name, array)
        kinds, kind = ("fiu", "real") if name == "observed" else ("fiuc", "complex")
        if array.dtype.kind not in kinds:
            refuse(TypeError, op, name, f"has dtype {array.dtype}", f"be {kind} numbers")
        if array.shape != (len(hkl),):
            refuse(ValueError, op, name, f"has shape {array.shape}", f"be ({len(hkl)},), as hkl")
    observed, F_calc, *masks = arrays.values()
    seen = ~np.isnan(observed)
    for name, array in arrays.items():
        _none(op, name, array, seen & ~np.isfinite(array), "be finite")
    _none(op, "observed", observed, observed < 0, "not be negative")
    scaling = gemmi.Scaling(grid.cell, grid.spacegroup)
    scaling.use_solvent = bool(masks)
    if seen.sum() < len(scaling.parameters):
        should = f"have at least {len(scaling.parameters)}, the number of parameters"
        refuse(ValueError, op, "observed", f"has {seen.sum()} amplitudes", should)
    for name in ("observed", "F_calc"):
        if not arrays[name][seen].any():
            refuse(ValueError, op, name, "is zero everywhere", "have other values")
    if masks and not masks[0][seen].any():
        return fit_scale(observed, F_calc, hkl, grid)
    # gemmi computes in 32 bits, and squares.
    unit, unit_calc = (float(abs(array[seen]).max()) for array in (observed, F_calc))
    largest = max([float(abs(mask[seen]).max()) for mask in masks], default=0.0) / unit_calc
    if not largest < _LARGEST_MASK:
        was, should = (
            f"is up to {largest:.3g} times F_calc",
            f"be less than {_LARGEST_MASK:g} times",
        )
        refuse(ValueError, op, "F_mask", was, should)
    of_crystal = grid.cell, grid.spacegroup, np.ascontiguousarray(hkl[seen])
    # gemmi wants a sigma for each amplitude, which carries no weight in its least squares.
    data = np.stack([observed[seen] / unit, np.ones(seen.sum())], axis=1).astype(np.float32)
    F = [
        gemmi.ComplexAsuData(*of_crystal, (factors[seen] / unit_calc).astype(np.complex64))
        for factors in (F_calc, *masks)
    ]
    scaling.prepare_points(F[0], gemmi.ValueSigmaAsuData(*of_crystal, data), *F[1:])
    scaling.fit_isotropic_b_approximately()
    scaling.fit_parameters()
    if masks and min(scaling.k_sol, scaling.b_sol) < 0:
        return fit_scale(observed, F_calc, hkl, grid)
    B = np.array(scaling.b_overall.elements_pdb())
    k_sol, B_sol = (scaling.k_sol, scaling.b_sol) if masks else (0.0, 0.0)
    k_overall = scaling.k_overall * (unit / unit_calc)
    return Scale(k_overall, B / (8 * math.pi**2), k_sol, B_sol)


def _none(op: str, name: str, array: np.ndarray, bad: np.ndarray, should: str) -> None:
    """Raise ValueError about the first bad element of an array, if there is one."""
    if bad.any():
        first = int(bad.argmax())
        refuse(ValueError, op, f"{name}[{first}]", f"is {array[first]}", should)
