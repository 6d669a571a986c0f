"""Registers the compiled kernels: NumPy allocates and lays out, Cython works."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern import isa, trimul
from fusedops._frame import memory
from fusedops._frame.registry import register
from fusedops._frame.threads import threads_for
from fusedops.conv import CHUNK
from fusedops.density import SLACK, Lattice, Scatterers, listed
from fusedops.planarity import LANES, NO_PLANE
from fusedops.scatter import PART_BITS, ScatterPlan
from fusedops.wigner import Edges, degree_of, degrees, message_rows

_planarity = isa.load("planarity_cython")
_planarity_of = {
    np.dtype(np.float32): _planarity.planarity["float"],
    np.dtype(np.float64): _planarity.planarity["double"],
}
if _planarity.lanes() != LANES:
    raise ImportError(f"the kernels take blocks of {_planarity.lanes()} planes, not {LANES}")
# Blocks of planes that pay for waking a thread.
_GRAIN = 64

_conv = isa.load("conv_cython")
_BITS = np.dtype(np.uint16)
_conv_name = {_BITS: "bfloat16", np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
# Chunks of tokens, and numbers of a decoding step, that pay for waking a thread.
_CHUNK_GRAIN, _STEP_GRAIN = 2, 1 << 15
# Sums over tokens are formed in at most so many parts.
_PARTS = 64

_wigner = isa.load("wigner_cython")
# Numbers of messages that pay for waking a thread, and shares of the work, for any number of these.
_ROTATION_GRAIN, _SHARES = 1 << 16, 256

_scatter = isa.load("scatter_cython")
_INDEX = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
# Elements of cubes that pay for waking a thread.
_CUBE_GRAIN = 1 << 16

_density = isa.load("density_cython")
_ATOM_BYTES, _NUMBERS, _ROW = _density.sizes()
# Atoms that pay for waking a thread, and slabs of planes of the map, for any number of threads.
_ATOM_GRAIN, _SLABS = 32, 32

_trimul = isa.load("trimul_cython")
_trimul_of = {
    dtype: SimpleNamespace(**{kernel: getattr(_trimul, kernel)[name] for kernel in trimul.KERNELS})
    for dtype, name in _REAL.items()
}


def _run_planarity(xyz: Any, cotangent: Any, planes: Any, fit: str, out: Any) -> float:
    blocks = len(planes.block_ptr) - 1
    threads = threads_for(blocks, _GRAIN)
    return _planarity_of[xyz.dtype](
        np.ascontiguousarray(xyz),
        None if cotangent is None else np.ascontiguousarray(cotangent, dtype=xyz.dtype),
        planes.index,
        planes.weight,
        planes.plane_ptr,
        planes.block_ptr,
        planes.slot,
        planes.reduced,
        planes.reduced_ptr,
        planes.bound,
        planes.per_atom,
        fit == "weighted",
        NO_PLANE,
        out,
        np.empty((0 if out is None else planes.spill, 3), xyz.dtype),
        np.empty((threads, _planarity.scratch_size(planes.largest))),
        np.empty(blocks),
        threads,
    )


@register("planarity_nll", "cython")
def planarity_nll(xyz: Any, planes: Any, fit: str, nll: Any, gradient: Any) -> None:
    value = _run_planarity(xyz, None, planes, fit, gradient)
    if nll is not None:
        nll[...] = planes.constant[0] + value


@register("planarity_gradient_vjp", "cython")
def planarity_gradient_vjp(xyz: Any, cotangent: Any, planes: Any, fit: str, out: Any) -> None:
    _run_planarity(xyz, cotangent, planes, fit, out)


def _rows(array: Any, contiguous: int) -> Any:
    """Return an array that is contiguous in its last axes, a copy where it isn't."""
    if array is None:
        return None
    step = array.itemsize
    for axis in range(array.ndim - 1, -1, -1):
        inner = array.ndim - axis <= contiguous
        if array.strides[axis] != step if inner else array.strides[axis] % array.itemsize:
            return array.copy(order="C")
        step *= array.shape[axis]
    return array


def _scratch(threads: int, channels: int, width: int, dtype: np.dtype) -> np.ndarray:
    real = 8 if dtype.itemsize == 8 else 4
    # A multiple of a cache line for every thread.
    size = -(-real * _conv.scratch_size(channels, width) // 64) * 64
    return np.empty((threads, size), np.int8)


def _arguments(
    x: Any, kernels: Any, state: Any, bias: Any, sequences: Any, activation: str
) -> tuple[tuple[Any, ...], int]:
    """Return what both passes begin with, and how many chunks of tokens there are."""
    chunks = starts = None
    count = x.shape[0] * -(-x.shape[1] // CHUNK)
    if sequences is not None:
        chunks = sequences.chunks
        starts = sequences.cu_seqlens[: sequences.num_sequences + 1]
        count = chunks.size // 2 if len(starts) > 1 else 0
    static = kernels.ndim == 2
    taps = _rows(kernels[None, None] if static else kernels, 2)
    inputs = _rows(x, 1), taps, _rows(state, 3), _rows(bias, 1)
    return (*inputs, static, activation == "silu", chunks, starts, count, CHUNK), count


def _fill_tokenless(states: Any, given: Any, x: Any, sequences: Any) -> None:
    """Pass a state on through sequences without a token, which no chunk owns."""
    if states is None:
        return
    empty = slice(None) if x.shape[1] == 0 else slice(0)
    if sequences is not None:
        empty = np.diff(sequences.cu_seqlens[: sequences.num_sequences + 1]) == 0
    states[empty] = 0 if given is None else given[empty]


@register("dynamic_conv", "cython", bfloat16=True)
def dynamic_conv(
    x: Any,
    kernels: Any,
    state: Any,
    bias: Any,
    sequences: Any,
    activation: str,
    out: Any,
    final: Any,
) -> None:
    _fill_tokenless(final, state, x, sequences)
    arguments, count = _arguments(x, kernels, state, bias, sequences, activation)
    if count and kernels.size:
        threads = threads_for(count, _CHUNK_GRAIN)
        channels, width = kernels.shape[-2:]
        scratch = _scratch(threads, channels, width, x.dtype)
        _conv.forward[_conv_name[x.dtype]](*arguments, out, final, scratch)


@register("dynamic_conv_vjp", "cython", bfloat16=True)
def dynamic_conv_vjp(
    x: Any,
    kernels: Any,
    state: Any,
    bias: Any,
    cotangent: Any,
    final_cotangent: Any,
    sequences: Any,
    activation: str,
    dx: Any,
    dkernels: Any,
    dstate: Any,
    dbias: Any,
) -> None:
    _fill_tokenless(dstate, final_cotangent, x, sequences)
    arguments, count = _arguments(x, kernels, state, bias, sequences, activation)
    static = kernels.ndim == 2
    channels, width = kernels.shape[-2:]
    group = max(1, -(-count // _PARTS))
    parts = -(-count // group)
    dk_sum = np.zeros((parts, width, channels)) if static and dkernels is not None else None
    db_sum = None if dbias is None else np.zeros((parts, channels))
    if dk_sum is None and db_sum is None:
        group, parts = 1, count
    if count and kernels.size:
        threads = threads_for(parts, _CHUNK_GRAIN)
        _conv.backward[_conv_name[x.dtype]](
            *arguments,
            _rows(cotangent, 1),
            _rows(final_cotangent, 3),
            dx,
            None if static else dkernels,
            dstate,
            dk_sum,
            db_sum,
            group,
            _scratch(threads, channels, width, x.dtype),
        )
    if dk_sum is not None:
        _round(dk_sum.sum(0).T, dkernels)
    if db_sum is not None:
        _round(db_sum.sum(0), dbias)


def _round(values: np.ndarray, out: np.ndarray) -> None:
    """Write float64 values in the dtype of `out`, to the nearest; bfloat16 as its bits."""
    with np.errstate(over="ignore"):
        if out.dtype != _BITS:
            out[...] = values
            return
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    out[...] = np.where(np.isnan(values), 0x7FC0, rounded)


@register("dynamic_conv_step", "cython", bfloat16=True)
def dynamic_conv_step(
    x: Any, state: Any, kernels: Any, bias: Any, activation: str, out: Any
) -> None:
    if not state.size:
        return
    static = kernels.ndim == 2
    batch, channels, width = state.shape
    own = _rows(state, 0)
    threads = min(batch, threads_for(state.size, _STEP_GRAIN))
    _conv.step[_conv_name[x.dtype]](
        _rows(x.reshape(batch, channels), 2),
        own,
        _rows(kernels[None] if static else kernels, 3),
        _rows(bias, 1),
        static,
        activation == "silu",
        out.reshape(batch, channels),
        _scratch(threads, channels, width, x.dtype),
    )
    if own is not state:
        state[...] = own


@functools.lru_cache(maxsize=64)
def _places(lmax: int, mmax: int, way: str, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return of every degree where its matrix begins, and its m-major rows.

    The former is the first element that is kept, and the steps to those of the next row of the
    message and of the node, all to be multiplied by the steps of a dense matrix's rows and columns,
    or of a packed one's elements.
    """
    places = np.empty((lmax + 1, 3, 2 if dense else 1), np.int64)
    own_rows = np.zeros((lmax + 1, 2 * mmax + 1), np.int64)
    packed = 0
    for l, (rows, kept, own) in enumerate(degrees(lmax, mmax)):
        size = 2 * l + 1
        row, column = np.eye(2, dtype=int) if dense else ([size], [1])
        own_step, step = np.array((column, row) if way == "back" else (row, column))
        corner = rows.start if dense else packed
        places[l] = corner + kept[0] * own_step, own_step, step
        own_rows[l, : len(own)] = own
        packed += size * size
    return places, own_rows


def _shares(pointers: np.ndarray, nodes: int) -> np.ndarray:
    """Return where shares of the nodes begin that have about as many edges."""
    marks = pointers[-1] * np.arange(1, _SHARES) // _SHARES
    return np.concatenate([[0], np.searchsorted(pointers, marks).clip(max=nodes), [nodes]])


@register("edge_wigner", "cython")
def edge_wigner(
    base: Any,
    x: Any,
    message: Any,
    wigner: Any,
    edges: Edges | None,
    mmax: int,
    way: str,
    scale: float,
    on_x: Any,
    on_message: Any,
    on_wigner: Any,
) -> None:
    lmax, ends = degree_of(wigner), 2 if way == "forth" else 1
    channels = x.shape[2] if x is not None else message.shape[2] // ends
    count = len(wigner)
    wigner = _rows(wigner, 0)
    if edges is not None:
        lists = [getattr(edges, name) for name in edges._fields]
        count = min(count, *[len(lists[i]) for i in (0, 1, 2, 4)])
    else:
        lists = [None] * 6
    if on_x is not None:
        pointers = (lists[5], lists[3])[:ends] if edges else [np.arange(len(on_x) + 1)]
        shares = np.stack([_shares(p, len(on_x)) for p in pointers])
    else:
        shares = count * np.arange(_SHARES + 1)[None] // _SHARES
    places, own = _places(lmax, mmax, way, wigner.ndim == 3)
    width = (lmax + 1) ** 2
    size = width * width if wigner.ndim == 3 else wigner.shape[1]
    steps = np.array(wigner.strides[1:]) // wigner.itemsize
    # Gradients of the matrices are contiguous.
    summed = (width, 1) if wigner.ndim == 3 else (1,)
    threads = threads_for(count * width * channels * ends, _ROTATION_GRAIN)
    # Whole cache lines for every thread.
    factors = np.empty((threads, -(-((2 * lmax + 1) ** 2) // 16) * 16), wigner.dtype)
    offsets = np.empty((threads, -(-4 * (lmax + 1) // 8) * 8), np.intp)
    _wigner.rotate[_REAL[wigner.dtype]](
        _rows(base, 3),
        _rows(x, 3),
        _rows(message, 3),
        wigner if wigner.ndim == 3 else wigner[:, None],
        *lists,
        shares,
        np.stack([places @ steps, places @ summed]),
        own,
        ends,
        count,
        channels,
        message_rows(lmax, mmax),
        scale,
        on_x,
        on_message,
        None if on_wigner is None else on_wigner.reshape(len(on_wigner), size),
        factors,
        offsets,
    )


def _survey(plan: ScatterPlan) -> None:
    """Find the runs of the cubes' rows and the planes of every part, and check the plan."""
    cubes, nx, rows, _ = plan.shape
    first, second = memory.empty((2, cubes, rows), np.dtype(np.int64))
    split = np.empty((cubes, rows), np.int32)
    low, high = np.empty((2, cubes), np.int64)
    spans = np.empty((cubes, nx, 2), np.int32)
    threads = threads_for(plan.wbwc.size, _CUBE_GRAIN)
    ends = np.zeros((threads, 2, (plan.map_size - 1 >> PART_BITS) + 1), np.int64)
    found = first, second, split, low, high, spans, ends
    survey = _scatter.survey[_INDEX[plan.wa.dtype]]
    survey(plan.wa, plan.wbwc, plan.map_size, PART_BITS, *found)
    plan.reach = (low, high) if ends[:, 0].sum() == plan.wa.size else None
    plan.checked()
    plan.lists = _lists(spans, ends)
    plan.runs = first, second, split


def _lists(spans: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return what `ScatterPlan.bins` does, of what a survey has found.

    What a part has of every share comes one after the other, so that their number changes nothing.
    """
    bits = PART_BITS
    while True:
        counts = (ends[:, 0] - ends[:, 1]).cumsum(1) + ends[:, 1]
        # Planes that reach over many parts are better off in larger ones.
        if counts.sum() <= spans.size:
            break
        ends = np.add.reduceat(ends, np.arange(0, ends.shape[2], 2), axis=2)
        bits += 1
    stops = counts.T.cumsum().reshape(-1, len(counts))
    pointers = np.append(0, stops[:, -1])
    planes = np.empty(pointers[-1], np.int64)
    _scatter.fill(spans, bits - PART_BITS, np.subtract(stops.T, counts, order="C"), planes)
    return planes, pointers, 1 << bits


def _move(back: bool, cubes: np.ndarray, grid: np.ndarray, plan: ScatterPlan) -> None:
    if 0 in cubes.shape:
        if not back:
            grid[...] = 0
        return
    if plan.runs is None:
        _survey(plan)
    threads = threads_for(cubes.size, _CUBE_GRAIN)
    move = _scatter.move[_INDEX[plan.wa.dtype], _REAL[cubes.dtype]]
    move(back, plan.wa, plan.wbwc, *plan.bins(), *plan.runs, cubes, grid, threads)


@register("structured_scatter_add", "cython")
def structured_scatter_add(density_cube: Any, plan: ScatterPlan, out: Any) -> None:
    _move(False, np.ascontiguousarray(density_cube), out, plan)


@register("structured_gather", "cython")
def structured_gather(grid: Any, plan: ScatterPlan, out: Any) -> None:
    _move(True, out, np.ascontiguousarray(grid), plan)


def _set_up(
    xyz: np.ndarray, b: np.ndarray, occupancy: np.ndarray, lattice: Lattice, scatterers: Scatterers
) -> tuple[Any, ...]:
    """Return arrays as kernels take them, and what they find out first of every atom."""
    arrays = [np.ascontiguousarray(a) for a in (xyz, b.reshape(len(b), -1), occupancy)]
    amplitudes, widths, radius = (
        np.ascontiguousarray(a, dtype=np.float64) for a in scatterers.arrays(xyz)
    )
    threads = threads_for(len(xyz), _ATOM_GRAIN)
    atoms = np.empty((len(xyz), _ATOM_BYTES), np.int8)
    numbers = np.empty((len(xyz), _NUMBERS, widths.shape[1]), xyz.dtype)
    boxes = np.empty((len(xyz), 3, 2), np.int64)
    _density.set_up[_REAL[xyz.dtype]](
        lattice.shape,
        lattice.step,
        lattice.to_grid,
        lattice.measures[9:12],
        lattice.images,
        *arrays,
        amplitudes,
        widths,
        # One that is infinite stays what it is: of an atom without a density.
        np.where(radius < np.inf, np.minimum(radius, lattice.measures[-1]), radius),
        SLACK,
        threads,
        atoms,
        numbers,
        boxes,
    )
    common = lattice.shape, lattice.step, lattice.images, atoms, numbers
    return common, [*arrays, amplitudes, widths], boxes, threads


def _padded(extent: np.ndarray) -> int:
    """Return the largest of some numbers of voxels, up to a whole vector and one more."""
    return (int(extent.max(initial=1)) // _ROW + 2) * _ROW


@register("gaussian_density", "cython")
def gaussian_density(
    xyz: Any, b: Any, occupancy: Any, lattice: Lattice, scatterers: Scatterers, out: Any
) -> None:
    if not len(xyz):
        out[...] = 0
        return
    common, arrays, boxes, threads = _set_up(xyz, b, occupancy, lattice, scatterers)
    low, high = boxes[..., 0], boxes[..., 1]
    slab = -(-lattice.nx // _SLABS)
    extent = high - low + 1
    most, pitch = _padded(extent[:, :2]), _padded(extent[:, 2])
    scratch = pitch + most + (3 * most + pitch) * common[-1].shape[2]
    _density.splat[_REAL[xyz.dtype]](
        *common,
        b.ndim == 1 and not lattice.oblique,
        arrays[2],
        *listed(low[:, 0], high[:, 0], lattice.nx, slab),
        slab,
        out,
        # Lanes without a voxel are computed too: what was left there may be denormal, and slow.
        np.zeros((threads, scratch), xyz.dtype),
        np.zeros((threads, 2 * most)),
        most,
        pitch,
    )


@register("gaussian_density_vjp", "cython")
def gaussian_density_vjp(
    xyz: Any,
    b: Any,
    occupancy: Any,
    cotangent: Any,
    lattice: Lattice,
    scatterers: Scatterers,
    on_xyz: Any,
    on_b: Any,
    on_occupancy: Any,
) -> None:
    if not len(xyz):
        return
    common, arrays, boxes, threads = _set_up(xyz, b, occupancy, lattice, scatterers)
    extent = boxes[..., 1] - boxes[..., 0] + 1
    most, pitch = _padded(extent[:, :2]), _padded(extent[:, 2])
    G = common[-1].shape[2]
    scratch = most * (4 * G + 2 + pitch) + G * (pitch + 5 * _ROW)
    # What nobody wants is computed all the same: it costs no more than what somebody does.
    outputs = [
        np.empty(like.shape, like.dtype) if given is None else given.reshape(like.shape)
        for given, like in zip((on_xyz, on_b, on_occupancy), arrays[:3], strict=True)
    ]
    _density.splat_vjp[_REAL[xyz.dtype]](
        *common,
        b.ndim == 1 and not lattice.oblique,
        *arrays[1:],
        np.ascontiguousarray(cotangent),
        *outputs,
        np.zeros((threads, scratch), xyz.dtype),
        np.zeros((threads, 2 * most)),
        np.empty((threads, most), np.intp),
        np.empty((threads, -(-10 * G // 8) * 8)),
        most,
        pitch,
    )


@register("triangle_multiplicative_update", "cython")
def triangle_multiplicative_update(x: Any, *args: Any) -> None:
    trimul.forward(_trimul_of[x.dtype], x, *args)


@register("triangle_multiplicative_update_vjp", "cython")
def triangle_multiplicative_update_vjp(x: Any, *args: Any) -> None:
    trimul.backward(_trimul_of[x.dtype], x, *args)
