"""Times the planarity restraint, value and gradient, beside its peers and its floors.

    python bench/planarity.py [--device cuda] [--json FILE]

Rounds are interleaved in one process and a table of medians is printed, in ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from timing import COPIES, bandwidth, graphed, interleaved, machine, save, waiting

import fusedops
from fusedops._registry import Call
from fusedops.planarity import nll
from fusedops.testing import protein


def workload(planes: int, dtype: Any = np.float32) -> tuple[np.ndarray, list[Any]]:
    """Return coordinates and groups of about that many planes."""
    xyz, indices = protein(max(1, round(planes / 1.4375)), np.random.default_rng(planes))
    return xyz.astype(dtype), [(index, np.full(len(index), 0.02)) for index in indices]


def eigh_nll(xyz: torch.Tensor, groups: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The peer: eager torch, `eigh` of the covariance with the normal held fixed."""
    total = xyz.new_zeros(())
    for index, sigma in groups:
        x = xyz[index]
        r = x - x.mean(1, keepdim=True)
        with torch.no_grad():
            normal = torch.linalg.eigh(r.mT @ r)[1][..., :1]
        z = (r @ normal)[..., 0] / sigma[:, None]
        total = total + (0.5 * z**2 + sigma[:, None].log() + 0.918938533).sum()
    return total


def torch_step(
    xyz: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], Any]:
    leaf = xyz.clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        loss(leaf).backward()

    return step


def launch_only() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an autograd.Function that launches one empty kernel each way."""
    import triton

    @triton.jit
    def empty(x):
        pass

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            empty[(1,)](x)
            return x.new_empty(())

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            empty[(1,)](x)
            return torch.empty_like(x)

    return Empty.apply


def floor_bytes(xyz: np.ndarray, planes: fusedops.Planes) -> int:
    """Return what must move: coordinates and gradient, indices, weights and where planes begin."""
    return 2 * xyz.nbytes + 4 * planes.num_entries + 12 * planes.num_planes


def measure(device: str, sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    rate = bandwidth(device)
    wait = waiting(device)
    for size in sizes:
        xyz, groups = workload(size)
        packed = fusedops.Planes(groups)
        there = torch.tensor(xyz, device=device)
        peers = [
            (torch.tensor(i, device=device), torch.tensor(s, device=device).to(there.dtype))
            for i, s in groups
        ]
        planes = packed.to(device)
        ours = torch_step(there, lambda x, p=planes: fusedops.planarity_nll(x, p))
        runs = {"torch tensors": ours}
        if device == "cuda":
            runs["in a CUDA graph"] = graphed(
                torch_step(there, lambda x, p=planes: fusedops.planarity_nll(x, p))
            )
            bound = Call(nll, (planes, "uniform"), None)
            runs["its kernels, in a CUDA graph"] = graphed(
                lambda c=bound, x=there: c((x,), (True, True))
            )
            runs["empty kernels"] = torch_step(there, launch_only())
        else:
            for backend in ("cython", "numba"):
                runs[backend] = lambda b=backend, x=xyz, p=packed: fusedops.planarity_nll.vjp(
                    x, p, backend=b
                )[1](1.0)
            runs["list of arrays"] = lambda x=xyz, g=groups: fusedops.planarity_nll.vjp(x, g)[1](
                1.0
            )
        if device == "cpu" or size < 100_000:
            runs["torch eager eigh"] = torch_step(there, lambda x, g=peers: eigh_nll(x, g))
        times = interleaved(runs, wait)
        if device == "cuda":
            for name in times:
                times[name] /= COPIES if "graph" in name else 1
        times["byte floor"] = floor_bytes(xyz, packed) / rate * 1e3
        rows.append(
            {
                "planes": packed.num_planes,
                "atoms": len(xyz),
                "device": device,
                "bandwidth_GB_s": rate / 1e9,
                "ms": times,
            }
        )
    return rows


def overhead() -> dict[str, float]:
    """Return what calls on a dozen atoms take, in µs: all of it is overhead."""
    xyz, groups = workload(1)
    planes = fusedops.Planes(groups)
    leaf = torch.tensor(xyz, requires_grad=True)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.new_empty(())

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent * ctx.saved_tensors[0]

    def numpy_both() -> None:
        fusedops.planarity_nll.vjp(xyz, planes)[1](1.0)

    runs = {
        "NumPy, value": lambda: fusedops.planarity_nll(xyz, planes),
        "NumPy, value and gradient": numpy_both,
        "torch, forward": lambda: fusedops.planarity_nll(leaf, planes),
        "torch, forward and backward": torch_step(
            torch.tensor(xyz), lambda x: fusedops.planarity_nll(x, planes)
        ),
        "empty autograd.Function, forward": lambda: Nothing.apply(leaf),
        "empty autograd.Function, both": torch_step(torch.tensor(xyz), Nothing.apply),
    }
    return {name: 1e3 * time_ms for name, time_ms in interleaved(runs, lambda: None).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(fusedops.get_num_threads())
    sizes = [602, 20_200, 606_000] if arguments.device == "cuda" else [500, 5_000, 100_000]
    rows = measure(arguments.device, sizes)
    where = machine(arguments.device)
    table = Table(title=", ".join(f"{key} {value}" for key, value in where.items()))
    for column in ("planes", "atoms", "what", "ms", "over floor"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        for name, time_ms in row["ms"].items():
            table.add_row(
                str(row["planes"]),
                str(row["atoms"]),
                name,
                f"{time_ms:.4f}",
                f"{time_ms / row['ms']['byte floor']:.1f}",
            )
        table.add_section()
    Console(width=100).print(table)
    report = {**where, "rows": rows}
    if arguments.device == "cpu":
        report["overhead_us"] = overhead()
        for name, time_us in report["overhead_us"].items():
            print(f"{name:<34}{time_us:6.1f} µs")
    save(arguments.json, report)


if __name__ == "__main__":
    main()
