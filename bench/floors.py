"""A machine's highest rates, which make floors: measured beside the kernels, in one run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import fusedops
from bench.timing import interleaved, waiting
from bench.workloads import Work


@dataclass(frozen=True)
class Rates:
    """Bytes moved, operations of a product by dtype, and exponentials, in a second.

    On a CPU all threads work, and kernels compute in float32 whatever dtype they read.
    """

    bytes: float
    flops: dict[str, float]
    exps: float

    def floors_ms(self, work: Work, dtype: str, share: float = 1.0) -> dict[str, float]:
        """Return the least times that a pass's work takes with a share of the machine, in ms."""
        rates = {
            "bytes": (work.bytes, self.bytes),
            "FLOP": (work.flops, self.flops.get(dtype, self.flops["float32"]) * share),
            "exponentials": (work.exps, self.exps * share),
        }
        return {name: 1e3 * count / rate for name, (count, rate) in rates.items() if count}


def measured(device: str, dtypes: set[str], seconds: float, has_torch: bool) -> Rates:
    """Return the rates of a device; a GPU's include products in several dtypes."""
    if device == "cuda":
        return _on_gpu(dtypes | {"float32"}, seconds)
    return _on_cpu(seconds, has_torch)


def _best(runs: Mapping[str, Callable[[], Any]], device: str, seconds: float) -> float:
    """Return the time in seconds of the fastest of several ways to do the same."""
    times = interleaved(runs, waiting(device), seconds)
    return min(timing.ms for timing in times.values()) / 1e3


def _on_cpu(seconds: float, has_torch: bool) -> Rates:
    threads = fusedops.get_num_threads()
    rng = np.random.default_rng(0)
    # One array far larger than a cache, and one that fits in it.
    source = np.zeros(2**27, np.float32)
    target = np.ones_like(source)
    x = rng.standard_normal(2**20, np.float32)
    y = np.empty_like(x)
    n = 2048
    a, b = rng.standard_normal((2, n, n), np.float32)
    c = np.empty_like(a)
    with ThreadPoolExecutor(threads) as pool:

        def split(function: Callable[..., Any], *arrays: np.ndarray) -> Callable[[], Any]:
            parts = list(zip(*(np.array_split(array, threads) for array in arrays), strict=True))
            return lambda: list(pool.map(lambda part: function(*part), parts))

        copies = {"NumPy": split(np.copyto, target, source)}
        exps = {"NumPy": split(np.exp, x, y)}
        products = {"NumPy": functools.partial(np.matmul, a, b, out=c)}
        if has_torch:
            import torch

            s, t, u, v = map(torch.from_numpy, (source, target, x, y))
            factors = [torch.from_numpy(array) for array in (a, b)]
            copies["torch"] = functools.partial(t.copy_, s)
            exps["torch"] = functools.partial(torch.exp, u, out=v)
            products["torch"] = functools.partial(torch.matmul, *factors, out=torch.from_numpy(c))
        bandwidth = 2 * source.nbytes / _best(copies, "cpu", seconds)
        rate = 2 * n**3 / _best(products, "cpu", seconds)
        exponentials = x.size / _best(exps, "cpu", seconds)
    return Rates(bandwidth, {"float32": rate}, exponentials)


def _on_gpu(dtypes: set[str], seconds: float) -> Rates:
    import torch

    source = torch.zeros(2**28, device="cuda")
    copy = functools.partial(torch.empty_like(source).copy_, source)
    bandwidth = 2 * source.nbytes / _best({"copy": copy}, "cuda", seconds)
    del source, copy
    n, rates = 8192, {}
    for dtype in sorted(dtypes):
        factors = torch.randn(2, n, n, device="cuda").to(getattr(torch, dtype))
        product = functools.partial(torch.matmul, *factors)
        rates[dtype] = 2 * n**3 / _best({"product": product}, "cuda", seconds)
    del factors, product
    torch.cuda.empty_cache()
    return Rates(bandwidth, rates, _exponentials_on_gpu(seconds))


def _exponentials_on_gpu(seconds: float) -> float:
    """Return the rate of exponentials of numbers in registers."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def repeated(x, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
        value = tl.load(x + i)
        for _ in range(ROUNDS):
            value = tl.exp2(-value)
        tl.store(x + i, value)

    x = torch.rand(2**23, device="cuda")
    programs = x.numel() // 1024
    best = _best({"exp2": lambda: repeated[(programs,)](x, 512)}, "cuda", seconds)
    return 512 * x.numel() / best
