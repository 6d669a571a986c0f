"""Structured scatter and gather between cubes around atoms and one map.

The definitions of the two operations, which are adjoint to each other, and the public ops.
"""

from __future__ import annotations

from typing import Any

from fusedops._frame.arrays import ArrayT, add_at, cast, int64, wide, zeros
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.scatter.plan import ScatterPlan, read_plan


def _offsets(plan: ScatterPlan, like: Any) -> Any:
    """Return the offset of every element in the map, (C · nx · ny · nz,)."""
    if plan.device == "cpu":
        plan.checked()
    fields = plan.fields_like(like)
    return (int64(fields.wa)[:, :, None, None] + fields.wbwc[:, None]).reshape(-1)


def _scatter_formula(a: Any) -> tuple[Any]:
    plan, values = a.plan, wide(a.density_cube).reshape(-1)
    out = zeros(values, (plan.map_size,))
    add_at(out, _offsets(plan, values), values)
    return (cast(out, a.density_cube),)


def _gather_formula(a: Any) -> tuple[Any]:
    return (a.grid[_offsets(a.plan, a.grid)].reshape(a.plan.shape),)


def _scatter_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    return Call(gather, dy.map, a.plan, out=wanted)


def _gather_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    return Call(scatter, dy.density_cube, a.plan, out=wanted)


_SIZES: dict[str, Any] = {
    "C, nx, ny, nz": lambda a: a.plan.shape,
    "map_size": lambda a: a.plan.map_size,
}

scatter = Primitive(
    "structured_scatter_add",
    family="scatter",
    arrays={"density_cube": "(C, nx, ny, nz)"},
    static={"plan": ScatterPlan},
    sizes=_SIZES,
    outputs={"map": "(map_size)"},
    formula=_scatter_formula,
    pullback=_scatter_pullback,
)
gather = Primitive(
    "structured_gather",
    family="scatter",
    arrays={"grid": "(map_size)"},
    static={"plan": ScatterPlan},
    sizes=_SIZES,
    outputs={"density_cube": "(C, nx, ny, nz)"},
    formula=_gather_formula,
    pullback=_gather_pullback,
)


@op(scatter)
def structured_scatter_add(
    density_cube: ArrayT,
    wa: ScatterPlan | ArrayT,
    wbwc: ArrayT | None = None,
    map_size: int | None = None,
    *,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return a map with the elements of cubes added, each at its offset.

    .. math:: \mathrm{out}[\mathrm{wa}_{ci} + \mathrm{wbwc}_{cjk}] \mathrel{+}=
              \mathrm{density\_cube}_{cijk}

    Parameters
    ----------
    density_cube : array or tensor (C, nx, ny, nz), float32 or float64; in torch 16 bits too
        A cube of values around each of C atoms, in the units of the map.
    wa : array or tensor (C, nx), int32 or int64, or ScatterPlan
        Offsets of the planes of every cube; or a plan made once for many calls, which takes the
        place of the next two arguments too.
    wbwc : array or tensor (C, ny, nz), int32 or int64
        Offsets within a plane. Rows that are contiguous in the map are added as vectors.
    map_size : int
        The number of elements of the map.

    Returns
    -------
    array or tensor (map_size,)
        In the dtype of `density_cube`.

    Raises
    ------
    IndexError
        If an element lies outside of the map, before anything is written.

    Notes
    -----
    The gradient is `structured_gather`. Values are summed in the order of the cubes: on the CPU for
    any number of threads, and on a GPU if all cubes are boxes of one periodic grid whose last axis
    is contiguous in the map. Otherwise the order changes from run to run on a GPU, unless
    ``torch.use_deterministic_algorithms`` asks for a fixed one. Index tensors on a GPU are checked
    when first used and after every write to them, which waits for the GPU; inside of a CUDA graph
    `wa` should be a `ScatterPlan`. A backward pass has the index arrays of its call: ``vjp`` and
    autograd keep copies of NumPy's arrays, and autograd raises if tensors have changed.

    References
    ----------
    The operation and its arguments follow TorchRef.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> cube = np.array([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> wa, wbwc = np.array([[1]]), np.array([[[0, 1], [1, 2]]])
    >>> fusedops.structured_scatter_add(cube, wa, wbwc, 5).tolist()
    [0.0, 1.0, 5.0, 4.0, 0.0]
    """
    name = "structured_scatter_add"
    plan = read_plan(name, wa, wbwc, map_size, "density_cube", density_cube)
    return to_run((density_cube, plan), "map")


@op(gather)
def structured_gather(
    grid: ArrayT,
    wa: ScatterPlan | ArrayT,
    wbwc: ArrayT | None = None,
    *,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return cubes of elements read from a map.

    .. math:: \mathrm{out}_{cijk} = \mathrm{grid}[\mathrm{wa}_{ci} + \mathrm{wbwc}_{cjk}]

    Parameters
    ----------
    grid : array or tensor (map_size,), float32 or float64; in torch 16 bits too
        The map, flat.
    wa : array or tensor (C, nx), int32 or int64, or ScatterPlan
        Offsets of the planes of every cube; or a plan, which takes the place of wbwc too.
    wbwc : array or tensor (C, ny, nz), int32 or int64
        Offsets within a plane.

    Returns
    -------
    array or tensor (C, nx, ny, nz)
        In the dtype of `grid`.

    Raises
    ------
    IndexError
        If an element lies outside of the map.

    Notes
    -----
    The gradient is `structured_scatter_add`, whose notes hold here too.

    References
    ----------
    See `structured_scatter_add`, whose adjoint this is.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> wa, wbwc = np.array([[0, 2]]), np.array([[[0, 1], [1, 2]]])
    >>> fusedops.structured_gather(np.arange(5.0), wa, wbwc).tolist()
    [[[[0.0, 1.0], [1.0, 2.0]], [[2.0, 3.0], [3.0, 4.0]]]]
    """
    name = "structured_gather"
    given = isinstance(wa, ScatterPlan)
    plan = read_plan(name, wa, wbwc, None if given else grid.shape[0], "grid", grid)
    return to_run((grid, plan), "density_cube")
