"""Symmetry and structure factors of maps, which are linear and have no kernels."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fusedops import crystal

from .arrays import common, laid_out, tensor, values
from .checks import REFUSALS, contents
from .density import CELLS
from .problem import Family, Problem

#: x, y, z; -x, y+1/2, -z; -y, x-y, z+1/3; y, x, -z; -x, -y, -z; x+1/2, y+1/2, z; -y, x, z+1/4.
OPERATIONS = np.array(
    [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
        [[-1, 0, 0, 0], [0, 1, 0, 1 / 2], [0, 0, -1, 0]],
        [[0, -1, 0, 0], [1, -1, 0, 0], [0, 0, 1, 1 / 3]],
        [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, -1, 0]],
        [[-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, -1, 0]],
        [[1, 0, 0, 1 / 2], [0, 1, 0, 1 / 2], [0, 0, 1, 0]],
        [[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1 / 4]],
    ]
)
#: Of a sum's absolute terms; a transform adds up in fewer steps than there are voxels.
ROUNDING = {"float64": 1e-14, "float32": 2e-6}
WRONG = {
    "map": np.zeros((3, 4)),
    "operations": [[[0.5, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]],
    "hkl": [[0, 0, 1 << 62]],
    "cell": np.zeros((3, 3)),
    "blur": math.nan,
}


def strategy(compiled: bool) -> dict[str, Any]:
    # The simplest operation is no identity, and the simplest grid fits.
    some = st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 0)), min_size=1, max_size=5)
    return common() | {
        "dtype": st.sampled_from(tuple(ROUNDING)),
        "function": st.sampled_from(("symmetrize", "structure_factors")),
        "grid": st.tuples(*[st.sampled_from((1, 2, 3, 4, 5, 7, 12))] * 3),
        "twelves": st.sampled_from((True, True, False)),
        "operations": some,
        "cell": st.sampled_from(tuple(CELLS)),
        "M": st.sampled_from((0, 1, 2, 17)),
        "blur": st.sampled_from((0.0, 3.0, -20.0)),
        "wrong": st.sampled_from((*[None] * 9, *WRONG)),
    }


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    # Every operation fits a grid of twelves.
    grid = (12, 12, 12) if d["twelves"] else tuple(d["grid"])
    size = math.prod(grid)
    operations, cell = OPERATIONS[d["operations"]], np.array(CELLS[d["cell"]])
    half = (np.array(grid) - 1) // 2
    hkl = rng.integers(-half, half + 1, (d["M"], 3)).astype(d["index"])
    voxels = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 3)
    given: dict[str, Any] = {"operations": operations}
    if d["function"] == "symmetrize":
        moved = (voxels / grid) @ operations[:, :, :3].transpose(0, 2, 1) + operations[
            :, None, :, 3
        ]
        places = np.rint(moved * grid).astype(int)
        fits = np.abs(moved * grid - places).max() < 1e-6
        at = np.ravel_multi_index(tuple((places % grid).transpose(2, 0, 1)), grid)

        def forward(map: np.ndarray) -> np.ndarray:
            return sum(np.bincount(to, map.ravel(), size) for to in at).reshape(grid)

        def adjoint(dy: np.ndarray) -> np.ndarray:
            return sum(dy.ravel()[to] for to in at).reshape(grid)
    else:
        given |= {"hkl": hkl, "cell": cell, "blur": d["blur"]}
        turned = np.einsum("mi,kij->kmj", hkl.astype(int), operations[:, :, :3])
        fits = (np.abs(turned) <= half).all()
        s = hkl @ np.linalg.inv(cell)
        factor = abs(np.linalg.det(cell)) / size * np.exp(d["blur"] / 4 * (s**2).sum(1))
        # In integers, since phases of many turns would lose digits.
        parts = np.lcm.reduce(grid)
        steps = np.einsum("kmj,vj->kmv", np.rint(turned).astype(int), voxels * (parts // grid))
        phases = steps % parts / parts
        phases += (operations[:, :, 3] @ hkl.T)[:, :, None]
        matrix = factor[:, None] * np.exp(2j * np.pi * phases).sum(0)

        def forward(map: np.ndarray) -> np.ndarray:
            return matrix @ map.ravel()

        def adjoint(dy: np.ndarray) -> np.ndarray:
            return (matrix.conj().T @ dy).real.reshape(grid)

    rho = values(rng, grid, d["values"])
    real = d["function"] == "symmetrize"
    cotangent = rng.integers(-8, 9, grid if real else d["M"]) / 8
    if not real:
        cotangent = cotangent * (1 + 2j)

    def own(trial: Any, place: Any) -> None:
        trial.op = name = d["function"]
        dtype, layout = d["dtype"], trial.layout(place)
        op, numpys = getattr(crystal, name), place.framework == "numpy"

        def made(array: np.ndarray, kind: Any = None, layout: str = "plain") -> Any:
            if numpys:
                return laid_out(array.astype(kind or array.dtype), layout)
            torch = sys.modules["torch"]
            return tensor(array, kind and getattr(torch, kind), layout, place.device)

        map = made(rho, dtype, layout)
        kept = dict(given)
        if not real:
            kept["hkl"] = made(hkl, None, layout.replace("repeated", "strided"))
        wrong = d["wrong"] if d["wrong"] in ("map", *kept) else None
        if wrong == "map":
            map = made(WRONG[wrong], dtype)
        elif wrong:
            kept[wrong] = WRONG[wrong]
        trial.ledger.calls[name, str(place)] += 1
        try:
            if d["packed"] and not real and wrong != "map":
                kept = {"hkl": crystal.Reflections(**kept, grid_shape=grid)}
                kept["hkl"] = kept["hkl"].to(place.device)
            before = contents([map, kept])
            if numpys:
                y, pullback = op.vjp(map, **kept)
                (dmap,) = pullback(cotangent.astype(y.dtype))
            else:
                torch = sys.modules["torch"]
                x = map.detach().requires_grad_()
                y = op(x, **kept)
                dy = torch.tensor(cotangent, dtype=y.dtype, device=place.device).requires_grad_()
                (dmap,) = torch.autograd.grad(y, x, dy, create_graph=True)
                (again,) = torch.autograd.grad(dmap, dy, made(rho, dtype))
                y, dmap, again = (a.detach().resolve_conj().cpu().numpy() for a in (y, dmap, again))
        except REFUSALS as error:
            named = str(error).startswith((f"{name}: ", "Reflections: "))
            trial.expect(place, "a refusal", named and (wrong or not fits), f"{error}")
            return
        except Exception as error:
            trial.found(place, f"raised {type(error).__name__}", f"{error}")
            return
        trial.expect(place, "no refusal", not wrong and fits)
        if wrong or not fits:
            return
        trial.expect(place, "arguments changed", contents([map, kept]) == before)
        exact = rho.astype(dtype).astype(float)
        if layout == "repeated":
            exact = np.broadcast_to(exact[:1], exact.shape)
        sizes = np.abs(exact), np.abs(cotangent)
        checks = [("value", y, forward(exact)), ("gradient", dmap, adjoint(cotangent))]
        if not numpys:
            checks.append(("second derivative", again, forward(rho.astype(dtype).astype(float))))
        for check, found, want in checks:
            absolute = sizes[check == "gradient"].sum() * len(operations)
            absolute *= 1 if real else factor.max(initial=0)
            told = found.shape != want.shape or not np.isfinite(found).all()
            told = told or np.abs(found - want).max(initial=0) > ROUNDING[dtype] * absolute
            trial.expect(place, check, not told, f"{found} should be {want}"[:300])

    return Problem(op=None, arrays={}, own=own, differentiable=False)


FAMILY = Family("crystal", strategy, build, backends=("numpy", "torch"))
