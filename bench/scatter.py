"""Times the structured scatter and gather, forward and backward, beside peers and floors.

    python bench/scatter.py [--device cuda] [--json FILE]

Rounds are interleaved in one process and a table of medians is printed, in ms. Cubes lie around
random points of a periodic grid; "sorted" ones come in the order of these points. The floor is the
bytes of the cubes, once, and of the map: twice for a scatter, which clears it and writes it, and
once for a gather. Offsets don't count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import (
    COPIES,
    bandwidth,
    both,
    graphed,
    interleaved,
    machine,
    print_table,
    save,
    waiting,
)

import fusedops
from fusedops.testing import _cubes

scatter, gather = fusedops.structured_scatter_add, fusedops.structured_gather


class Cubes:
    """Random cubes of n³ on a grid of m³: float32, int64, or int32 where asked for."""

    def __init__(
        self, count: int, n: int, m: int, device: str, *, ordered: bool = False, index: Any = None
    ) -> None:
        wa, wbwc = _cubes(np.random.default_rng(0), count, (m, m, m), (n, n, n))
        if ordered:
            order = np.argsort(wa[:, n // 2] + wbwc[:, n // 2, n // 2])
            wa, wbwc = wa[order], wbwc[order]
        self.wa, self.wbwc = (torch.tensor(a, device=device, dtype=index) for a in (wa, wbwc))
        self.shape, self.size = (count, n, m), m**3
        self.plan = fusedops.ScatterPlan(self.wa, self.wbwc, self.size)
        self.values = torch.randn(count, n, n, n, device=device)
        # What torch's own functions take.
        self.place = (self.wa[:, :, None, None] + self.wbwc[:, None]).reshape(-1).long()

    def floor_ms(self, what: str, rate: float) -> float:
        cubes, grid = self.values.nbytes, self.size * self.values.itemsize
        forward, back = cubes + 2 * grid, cubes + grid
        moved = {"forward": forward, "gather": back, "forward + backward": forward + back}
        return moved[what.split(", ")[0]] / rate * 1e3

    def index_add(self, values: torch.Tensor) -> torch.Tensor:
        """A peer, with its indices ready."""
        return values.new_zeros(self.size).index_add(0, self.place, values.reshape(-1))

    def index_add_in_place(self) -> torch.Tensor:
        """The same as a program without gradients has it."""
        return self.values.new_zeros(self.size).index_add_(0, self.place, self.values.view(-1))


def on_cpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    for order in ("sorted", "unsorted"):
        cubes = Cubes(20_000, 17, 256, "cpu", ordered=order == "sorted")
        ops: dict[str, Callable[..., Any]] = {
            "fusedops": lambda x, c=cubes: scatter(x, c.wa, c.wbwc, c.size),
            "fusedops, plan": lambda x, c=cubes: scatter(x, c.plan),
            "Numba, plan": lambda x, c=cubes: scatter(x, c.plan, backend="numba"),
        }
        forward = {name: partial(op, cubes.values) for name, op in ops.items()}
        forward["torch index_add_"] = cubes.index_add_in_place
        rows.append(row(cubes, f"forward, {order}", forward, rate, "cpu"))
        del forward
        ops["torch index_add"] = cubes.index_add
        training = {name: both(op, cubes.values) for name, op in ops.items()}
        rows.append(row(cubes, f"forward + backward, {order}", training, rate, "cpu"))
    return rows


def on_gpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    for count, grid in ((50_000, 384), (3_000, 128)):
        for index in (torch.int64, torch.int32):
            cubes = Cubes(count, 17, grid, "cuda", index=index)
            rho = torch.randn(cubes.size, device="cuda")
            forward = {"fusedops": graphed(partial(scatter, cubes.values, cubes.plan))}
            back = {"fusedops": graphed(partial(gather, rho, cubes.plan))}
            if index == torch.int64:
                forward["torch index_add_"] = graphed(cubes.index_add_in_place)
                back["torch take"] = graphed(partial(torch.take, rho, cubes.place))
            kind = str(index).removeprefix("torch.")
            rows.append(row(cubes, f"forward, {kind}", forward, rate, "cuda"))
            rows.append(row(cubes, f"gather, {kind}", back, rate, "cuda"))
            del cubes, forward, back
            torch.cuda.empty_cache()
    return rows


def row(
    cubes: Cubes, what: str, runs: dict[str, Callable[[], Any]], rate: float, device: str
) -> dict[str, Any]:
    times = interleaved(runs, waiting(device))
    if device == "cuda":
        times = {name: time_ms / COPIES for name, time_ms in times.items()}
    times["byte floor"] = cubes.floor_ms(what, rate)
    return {"shape": cubes.shape, "dtype": "float32", "what": what, "device": device, "ms": times}


def preparations(device: str) -> dict[str, float]:
    """Return the time in ms of a plan of 20,000 cubes, with what it finds out in its first use."""
    cubes = Cubes(20_000, 17, 256, device)

    def plan() -> None:
        made = fusedops.ScatterPlan(cubes.wa, cubes.wbwc, cubes.size, copy=False)
        if device == "cpu":
            made.bins()

    return interleaved({"ScatterPlan": plan}, waiting(device), seconds=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(fusedops.get_num_threads())
    rate = bandwidth(arguments.device)
    rows = on_gpu(rate) if arguments.device == "cuda" else on_cpu(rate)
    where = {**machine(arguments.device), "bandwidth_GB_s": rate / 1e9}
    where["preparations_ms"] = preparations(arguments.device)
    print_table(where, "cubes, n, map", rows)
    save(arguments.json, {**where, "rows": rows})


if __name__ == "__main__":
    main()
