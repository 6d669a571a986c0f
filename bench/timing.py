"""What the benches share: interleaved timing, CUDA graphs, and the machine they ran on."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fusedops

#: Steps in one CUDA graph, whose own launch then counts for little.
COPIES = 10


def timed(run: Callable[[], Any], wait: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats * 1e3


def interleaved(
    runs: dict[str, Callable[[], Any]],
    wait: Callable[[], None],
    seconds: float = 4.0,
    rounds: int = 25,
) -> dict[str, float]:
    """Return the median time of every run, in ms, taken in turns."""
    repeats = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        wait()
        repeats[name] = max(1, min(100, int(seconds / rounds / (timed(run, wait, 1) / 1e3))))
    taken = [
        {name: timed(run, wait, repeats[name]) for name, run in runs.items()} for _ in range(rounds)
    ]
    return {name: statistics.median(each[name] for each in taken) for name in runs}


def waiting(device: str) -> Callable[[], None]:
    """Return what waits for a device's work."""
    return torch.cuda.synchronize if device == "cuda" else (lambda: None)


def graphed(step: Callable[[], Any], copies: int = COPIES) -> Callable[[], None]:
    """Return the replay of a CUDA graph that holds several steps, one after the other."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            step()
    return graph.replay


def both(function: Callable[..., Any], *arrays: torch.Tensor) -> Callable[[], None]:
    """Return forward and backward of a function of leaves."""
    leaves = [array.clone().requires_grad_() for array in arrays]
    cotangent = torch.randn_like(function(*arrays))

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(cotangent)

    return run


def print_table(
    where: dict[str, Any], size: str, rows: list[dict[str, Any]], floor: str = "byte floor"
) -> None:
    """Print every row's times in ms, and over its floor; `size` says what a shape is."""
    table = Table(title=", ".join(f"{key} {value}" for key, value in where.items()))
    for column in (size, "dtype", "pass", "what", "ms", "over floor"):
        table.add_column(column, justify="right" if column in ("ms", "over floor") else "left")
    for each in rows:
        for name, time_ms in each["ms"].items():
            table.add_row(
                ", ".join(map(str, each["shape"])),
                each["dtype"],
                each["what"],
                name,
                f"{time_ms:.4f}",
                f"{time_ms / each['ms'][floor]:.2f}",
            )
        table.add_section()
    Console(width=110).print(table)


def bandwidth(device: str) -> float:
    """Return bytes read and written a second by a large copy."""
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, waiting(device))
    return 2 * source.nbytes / (times["copy"] * 1e-3)


def exponentials(device: str) -> float:
    """Return float32 exponentials a second: of torch in a cache, or from registers on a GPU."""
    if device == "cpu":
        x, y = torch.randn(2, 2**20)
        times = interleaved({"exp": lambda: torch.exp(x, out=y)}, waiting(device))
        return x.numel() / (times["exp"] * 1e-3)
    import triton
    import triton.language as tl

    @triton.jit
    def repeated(x, ROUNDS: tl.constexpr):
        i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
        value = tl.load(x + i)
        for _ in range(ROUNDS):
            value = tl.exp2(-value)
        tl.store(x + i, value)

    x = torch.rand(2**23, device=device)
    times = interleaved({"exp2": lambda: repeated[(x.numel() // 1024,)](x, 512)}, waiting(device))
    return 512 * x.numel() / (times["exp2"] * 1e-3)


def processor() -> str:
    """Return the processor's name and the instruction set that the kernels use on it."""
    level = fusedops.info().instruction_set
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {level}"


def machine(device: str) -> dict[str, Any]:
    """Return where and with which versions something is measured."""
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": fusedops.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def save(path: Path | None, report: dict[str, Any]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
