"""TorchRef's densities, structure factors and targets of geometry, by our ops.

TorchRef looks functions up in their modules whenever it calls them. `register` puts ours there,
with the arguments of the installed version: planes for 0.5.1 to 0.7, densities for 0.6.0 to 0.7,
and the scatter for 0.5. Of 0.7 it also replaces functions and methods of its refinement.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops._frame.bridge.modes import has_tangent, watched
from fusedops._frame.bridge.tensors import unwrapped
from fusedops._frame.check import traced
from fusedops._frame.torch_private import private
from fusedops._swaps import Swap, release_of, start, stop
from fusedops.compat import _graphs, _likelihoods, _refinement, _replays, _scales, _start
from fusedops.compat._refinement import asked_for_torch
from fusedops.density import Lattice, atom_radius, gaussian_density
from fusedops.density.op import COMPONENTS, LEAST_WIDTH, OnBad, gaussian_matrices
from fusedops.planarity import planarity_nll
from fusedops.scatter import structured_scatter_add

__all__ = ["build_electron_density", "planarity_math", "register", "unregister"]

#: TorchRef's, Å.
LARGEST_RADIUS = 7.0

#: The lattices of matrices on GPUs, which TorchRef keeps with its cell.
_read = WeakTensorKeyDictionary()

# torch.compile follows the function itself, not the cache that `private` is.
_transforming = private().transforming


def planarity_math(xyz: Any, plane_groups: Sequence[tuple[Any, Any]]) -> Any:
    """Return the negative log-likelihood of planes, summed.

    Parameters
    ----------
    xyz : tensor (N, 3)
        Å.
    plane_groups : list of (indices, sigmas)
        Indices (P, n) of the atoms of P planes, and sigmas (P, n), (P, 1) or (P,) in Å.

    Returns
    -------
    tensor ()
        See `fusedops.planarity_nll`, whose gradient holds the normals fixed, as TorchRef's.

    References
    ----------
    TorchRef 0.7, ``torchref/base/targets/planarity.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.torchref import planarity_math
    >>> xyz = torch.tensor([[0.0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
    >>> planarity_math(xyz, [(torch.tensor([[0, 1, 2, 3]]), torch.full((1, 4), 0.1))])
    tensor(-3.5346)
    """
    return planarity_nll(xyz, plane_groups)


def build_electron_density(
    grid_shape: Sequence[int],
    device: Any,
    xyz_iso: Any,
    adp_iso: Any,
    occ_iso: Any,
    A_iso: Any,
    B_iso: Any,
    inv_frac_matrix: Any,
    frac_matrix: Any,
    xyz_aniso: Any = None,
    u_aniso: Any = None,
    occ_aniso: Any = None,
    A_aniso: Any = None,
    B_aniso: Any = None,
    dtype: Any = None,
    force_portable: bool | None = None,
) -> Any:
    """Return the electron density of isotropic and anisotropic atoms, with TorchRef's arguments.

    Parameters
    ----------
    grid_shape : (int, int, int)
        The voxels along each edge of the cell.
    device : torch.device
        The atoms' device.
    xyz_iso, adp_iso, occ_iso : tensor (N, 3), (N,), (N,)
        Å, B in Å², occupancies; N may be 0.
    A_iso, B_iso : tensor (N, G)
        Amplitudes and widths of the form factors.
    inv_frac_matrix : tensor (3, 3)
        The inverse of `frac_matrix`. Needed only if one of the two requires grad.
    frac_matrix : tensor (3, 3)
        From fractional to Cartesian coordinates, Å.
    xyz_aniso, u_aniso, occ_aniso, A_aniso, B_aniso : tensor, optional
        As the isotropic atoms', with U (N, 6) in Å².
    dtype : torch.dtype, optional
        The dtype of the map; by default TorchRef's, which is float32 unless set.
    force_portable : bool, optional
        Whether plain torch serves the call; by default as ``torchref.utils.use_portable`` says.

    Returns
    -------
    tensor (nx, ny, nz)
        See `fusedops.gaussian_density`. All float tensors have gradients, of any order.

    Notes
    -----
    An atom's radius is as large as TorchRef's: as many standard deviations as
    ``torchref.sigma_cutoff_ed`` says, 3 by default, between 2 and 7 Å. Gaussians of isotropic atoms
    are at least 0.4 Å² wide. An isotropic atom with a number that isn't finite is an error on the
    CPU, and left out on a GPU. An anisotropic atom with such a number, or with a Gaussian of no
    positive width, is left out.

    As in TorchRef's plain torch, and unlike in its kernels, there are gradients by the matrices. If
    a matrix requires grad, every Gaussian becomes an atom of its own, and a number of an atom that
    isn't finite is an error.

    References
    ----------
    TorchRef 0.7, ``torchref/base/electron_density/main.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.torchref import build_electron_density
    >>> cell = 10 * torch.eye(3)
    >>> carbon = torch.tensor([[2.31, 1.02, 1.5886, 0.865, 0.2156]])
    >>> widths = torch.tensor([[20.8439, 10.2075, 0.5687, 51.6512, 0.0]])
    >>> atom = torch.ones(1, 3), torch.full((1,), 20.0), torch.ones(1), carbon, widths
    >>> rho = build_electron_density((20, 20, 20), "cpu", *atom, cell.inverse(), cell)
    >>> print(f"{rho.sum() * 0.5**3:.2f} electrons")
    5.98 electrons
    """
    settings = sys.modules.get("torchref.config")
    n_sigma = getattr(settings, "get_sigma_cutoff_ed", lambda: 3.0)()
    if dtype is None:
        dtype = settings.get_float_dtype() if settings else torch.float32
    if force_portable is None:
        force_portable = asked_for_torch()
    rho = None
    matrices = frac_matrix, inv_frac_matrix
    strained = has_tangent(matrices) or watched(matrices)
    atoms = [(xyz_iso, adp_iso, occ_iso, A_iso, B_iso)]
    if xyz_aniso is not None:
        atoms += [(xyz_aniso, u_aniso, occ_aniso, A_aniso, B_aniso)]
    for kind in atoms:
        if len(kind[0]) > 0:
            xyz, b, occupancy, A, B = (array.to(dtype) for array in kind)
            radius = atom_radius(b, B, n_sigma=n_sigma).clamp(max=LARGEST_RADIUS)
            on_bad: OnBad = "clamp" if b.ndim == 1 else "skip"
            if strained:
                frac, inv_frac = frac_matrix.to(xyz), inv_frac_matrix.to(xyz)
                xyz, b, occupancy, A, B = _strained(xyz, b, occupancy, A, B, frac, inv_frac)
                radius, on_bad = radius.repeat_interleave(len(b) // len(radius)), "raise"
            drawn = gaussian_density(
                xyz,
                b,
                occupancy,
                A,
                B,
                _lattice(frac_matrix, tuple(grid_shape)),
                radius=radius,
                on_bad=on_bad,
                backend="torch" if force_portable else None,
            )
            rho = drawn if rho is None else rho + drawn
    if rho is None:
        return torch.zeros(tuple(grid_shape), dtype=dtype, device=device)
    return rho


def _strained(
    xyz: Any, b: Any, occupancy: Any, A: Any, B: Any, frac: Any, inv_frac: Any
) -> tuple[Any, ...]:
    """Return atoms, one for each Gaussian, that carry the gradients by the cell's matrices.

    A change of the cell makes `frac` F frac, where F was 1. Voxel n is then F (frac n - y) from an
    atom at y = frac inv_frac x. An unchanged cell with a Gaussian at y of the matrix F⁻¹ M F⁻ᵀ has
    the same density there.
    """
    here, eye = frac.detach(), torch.eye(3, dtype=frac.dtype, device=frac.device)
    F = eye + (frac - here) @ here.inverse()
    y = xyz @ inv_frac.T @ here.T
    if b.ndim == 1:
        M = (B + b[:, None]).clamp(min=LEAST_WIDTH)[..., None, None] / 4 * eye
    else:
        M = gaussian_matrices(b, B)
    M = F.inverse() @ M @ F.inverse().T
    U = torch.stack([M[..., i, j] for i, j in COMPONENTS], -1) / (2 * math.pi**2)
    G = A.shape[1]
    each = [array.repeat_interleave(G, 0) for array in (y, occupancy / F.det())]
    return each[0], U.flatten(0, 1), each[1], A.reshape(-1, 1), torch.zeros_like(A).reshape(-1, 1)


def _lattice(matrix: Any, shape: tuple[int, ...]) -> Any:
    """Return the lattice of a cell's matrix; of one on a GPU, which is slow to read, made once."""
    if _transforming():
        matrix = unwrapped("build_electron_density", "frac_matrix", matrix)
        # A transform would wrap the lattice's tensors.
        with private().without_transforms():
            return Lattice(matrix.detach(), shape).to(str(matrix.device))
    if matrix.is_cpu or traced() or matrix.is_inference():
        return Lattice(matrix.detach(), shape).to(str(matrix.device))
    kept = _read.setdefault(matrix, {})
    before, lattice = kept.get(shape, (None, None))
    now = matrix._version, matrix.data_ptr()
    if now != before:
        lattice = Lattice(matrix.detach(), shape).to(str(matrix.device))
        kept[shape] = now, lattice
    return lattice


def _do_structured_scatter(
    density_cube: Any, wa: Any, wbwc: Any, density_flat: Any, map_size: int
) -> Any:
    """Return a flat map with cubes added, as TorchRef 0.5.3 asks for it."""
    return density_flat + structured_scatter_add(density_cube, wa, wbwc, map_size)


def _get_cpp_scatter() -> Any:
    """Return the scatter on the CPU, as TorchRef 0.5 asks for it."""
    return structured_scatter_add


DENSITY = "torchref.base.electron_density"
#: TorchRef's functions, and the modules that its callers take them from.
FUNCTIONS = {
    "planarity_math": ("torchref.base.targets.planarity", "torchref.base.targets"),
    "build_electron_density": (f"{DENSITY}.main", DENSITY),
    "_do_structured_scatter": (f"{DENSITY}.main",),
    "_get_cpp_scatter": (f"{DENSITY}.main",),
}
#: Of TorchRef 0.7, by the module, and the class in it, that has a function.
_PARTS = _refinement, _likelihoods, _scales, _replays, _start
METHODS = {name: method for part in _PARTS for name, method in part.METHODS.items()}
_lock = threading.Lock()


def _served(swap: Swap, theirs: Any) -> Callable[..., Any]:
    """Return our function in the place of TorchRef's, with its arguments."""
    ours: Callable[..., Any] = globals()[swap.name]
    signature = inspect.signature(theirs)

    @swap.counting
    @functools.wraps(theirs)
    def serve(*args: Any, **kwargs: Any) -> Any:
        if "real_space_grid" in signature.parameters:
            bound = signature.bind(*args, **kwargs).arguments
            grid, voxel_size = bound.pop("real_space_grid"), bound.pop("voxel_size")
            for name, value in (("real_space_grid", grid), ("voxel_size", voxel_size)):
                if getattr(value, "requires_grad", False):
                    raise ValueError(
                        f"{swap.name}: {name} requires grad; it should be detached: gradients by "
                        "the cell go through frac_matrix and inv_frac_matrix"
                    )
            return ours(grid_shape=grid.shape[:-1], device=grid.device, **bound)
        return ours(*args, **kwargs)

    serve.theirs = theirs  # type: ignore[attr-defined]
    return serve


def register() -> None:
    """Serve TorchRef's densities, structure factors and restraints by our ops from now on.

    Call it in every process; `fusedops.compat.swaps` then counts calls. A second call changes
    nothing. Functions that a program has imported by name before stay TorchRef's; TorchRef's own
    modules look them up in every call.

    Raises
    ------
    ImportError
        If TorchRef is not installed.

    Notes
    -----
    TorchRef 0.5 has one radius for all atoms, and cubes in place of spheres; its densities stay.
    ``torchref.utils.use_portable`` asks for plain torch, in place of our kernels, too.

    In TorchRef 0.7 the targets of bonds, angles, torsions, chiral volumes and contacts, the latter
    with riding hydrogens, are the values of one call of `fusedops.geometry_nll`, kept while the
    atoms stay. A backward pass through a value frees the graph of all: for the gradient of each
    alone, call each target after the last one's pass, or retain the graph. Targets with other
    parameters than TorchRef's defaults stay TorchRef's. Scales, the solvent mask, likelihoods, B
    restraints and statistics are served too, and the start before the refinement: tables of
    monomers, links and riding hydrogens are TorchRef's, made in less time. Scales are fitted by
    steps of our own, which also look for solvent where TorchRef's don't.
    On a GPU an optimizer's run evaluates its losses by a CUDA graph, which has no second
    derivatives.

    Examples
    --------
    >>> import fusedops.compat.torchref
    >>> fusedops.compat.torchref.register()  # doctest: +SKIP
    """
    importlib.import_module("torchref")
    with _lock:
        places: dict[str, tuple[Any, list[Any]]] = {}
        for name, modules in FUNCTIONS.items():
            found = [importlib.import_module(module) for module in modules if _has(module)]
            theirs = next((getattr(m, name) for m in found if hasattr(m, name)), None)
            if theirs and "radius_angstrom" not in inspect.signature(theirs).parameters:
                places[name] = theirs, found
        for name in METHODS if release_of("torchref") == (0, 7) else ():
            owner = _owner_of(name)
            if owner is not None:
                places[name] = getattr(owner, name.rpartition(".")[2]), [owner]
        for swap in start("torchref", places):
            theirs, found = places[swap.name]
            if hasattr(theirs, "theirs"):
                continue
            served = (
                _method(swap, theirs, *found) if swap.name in METHODS else _served(swap, theirs)
            )
            name = swap.name.rpartition(".")[2]
            for owner in found:
                if getattr(owner, name, None) is theirs:
                    setattr(owner, name, served)


def _owner_of(name: str) -> Any:
    """Return the installed TorchRef's class or module that has a function as ours, or None."""
    module, ours = METHODS[name]
    owner = _class_in(importlib.import_module(module), name) if _has(module) else None
    theirs = getattr(owner, name.rpartition(".")[2], None)
    if theirs is None:
        return None
    function = getattr(theirs, "theirs", theirs)
    function = getattr(function, "fget", function)
    mine = inspect.isclass(owner)  # A method's first argument has another name.
    taken = list(inspect.signature(function).parameters)[mine:]
    parameters = [name for name in inspect.signature(ours).parameters if name != "theirs"]
    return owner if taken == parameters[mine:] else None


def _class_in(module: Any, name: str) -> Any:
    """Return the class of a method's name, or the module of a function's."""
    owner = name.rpartition(".")[0]
    return getattr(module, owner, None) if owner else module


class _Property(property):
    """A property of ours in the place of TorchRef's."""

    theirs: Any


#: What the subclasses of TorchRef's targets replace, and its losses don't read.
_OF_SUBCLASSES = {"name", "stats"}


def _overrides(kind: type, owner: type, name: str) -> bool:
    """Return whether a program's subclass replaces a part that a method of TorchRef's may use."""
    order = kind.__mro__
    between = order[: order.index(owner)] if owner in order else ()
    return any(
        part not in (name, *_OF_SUBCLASSES) and not part.startswith("__") and hasattr(owner, part)
        for each in between
        if not each.__module__.startswith("torchref.")
        for part in vars(each)
    )


def _method(swap: Swap, theirs: Any, owner: Any) -> Any:
    """Return our function in the place of TorchRef's, which serves the calls that ours can't."""
    ours = METHODS[swap.name][1]
    if "theirs" in inspect.signature(ours).parameters:
        ours = functools.partial(ours, theirs=theirs)
    function, name = getattr(theirs, "fget", theirs), swap.name.rpartition(".")[2]
    checked = inspect.isclass(owner)

    @functools.wraps(function)
    def serve(*args: Any, **kwargs: Any) -> Any:
        if checked and args and _overrides(type(args[0]), owner, name):
            return function(*args, **kwargs)
        found = ours(*args, **kwargs)
        if found is NotImplemented:
            return function(*args, **kwargs)
        swap.count()
        return found

    served: Any = serve if function is theirs else _Property(serve)
    served.theirs = theirs
    return served


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def unregister() -> None:
    """Give TorchRef the functions that it had before `register`.

    Without `register` before, nothing changes.

    Examples
    --------
    >>> import fusedops.compat.torchref
    >>> fusedops.compat.torchref.unregister()
    """
    with _lock:
        stop("torchref")
        _graphs._pool.cache_clear()
        _likelihoods._searches.cache_clear()
        for name, modules in FUNCTIONS.items():
            for module in filter(None, map(sys.modules.get, modules)):
                theirs = getattr(getattr(module, name, None), "theirs", None)
                if theirs is not None:
                    setattr(module, name, theirs)
        for name, (place, _) in METHODS.items():
            owner, function = _class_in(sys.modules.get(place), name), name.rpartition(".")[2]
            theirs = getattr(getattr(owner, function, None), "theirs", None)
            if theirs is not None:
                setattr(owner, function, theirs)
