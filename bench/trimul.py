"""Times the triangle multiplicative update, forward and backward, beside torch and its floors.

    python bench/trimul.py [--device cuda] [--json FILE]

Rounds are interleaved in one process and a table of medians is printed, in ms. On a GPU the shapes
are those of the gpu-mode benchmark: in float32 with fp16 products and the gate on the hidden
channels, and in bfloat16 with the gate on the output. The byte floor counts x and the output once,
and left, right, o and the gate, written and read, in the dtype of the products; the FLOP floor is
at the rate of a large product, measured here. A backward pass counts twice. Peak memory is what a
pass takes at most besides its arguments, results included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
from torch.nn import functional as F

import fusedops

op = fusedops.triangle_multiplicative_update
HIDDEN = 128
SHAPES = (
    *((256, 2, 128), (768, 1, 128), (256, 2, 384), (512, 1, 128)),
    *((1024, 1, 128), (768, 1, 384), (1024, 1, 384)),
)
SMALL = ((64, 1, 128), (128, 1, 128))


class Update:
    """An outgoing update of random numbers, with norms but without biases of projections."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        gate: str,
        dtype: torch.dtype,
        device: str,
        precision: Any,
    ) -> None:
        N, B, C = shape
        H, G = HIDDEN, C if gate == "output" else HIDDEN
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            numbers = torch.randn(sizes, generator=generator, device=device) * scale
            return numbers.to(dtype)

        self.x = normal(B, N, N, C)
        self.names = (
            *("norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight"),
            *("norm_out_weight", "norm_out_bias", "p_out_weight", "g_out_weight"),
        )
        self.weights = (
            *(normal(C) + 1, normal(C)),
            *(normal(2 * H, C, scale=C**-0.5), normal(2 * H, C, scale=C**-0.5)),
            *(normal(H) + 1, normal(H)),
            *(normal(C, H, scale=H**-0.5), normal(G, C, scale=C**-0.5)),
        )
        self.shape, self.gate, self.precision = shape, gate, precision

    def ours(self, x: torch.Tensor, *weights: torch.Tensor, backend: Any = None) -> torch.Tensor:
        named = dict(zip(self.names, weights, strict=True))
        return op(x, gate=self.gate, precision=self.precision, backend=backend, **named)

    def eager(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """The peer: plain torch."""
        w, b, p, g, v, c, q, last = weights
        n = F.layer_norm(x, x.shape[-1:], w, b)
        left, right = (F.linear(n, p) * F.linear(n, g).sigmoid()).chunk(2, -1)
        o = F.layer_norm(torch.einsum("bikh,bjkh->bijh", left, right), (HIDDEN,), v, c)
        s = F.linear(n, last).sigmoid()
        return F.linear(o, q) * s if self.gate == "output" else F.linear(o * s, q)

    def floors_ms(self, passes: int, bytes_rate: float, flop_rate: float) -> dict[str, float]:
        N, B, C = self.shape
        rows, width = B * N * N, 2 if self.precision == "fp16" else self.x.itemsize
        G = C if self.gate == "output" else HIDDEN
        moved = rows * (2 * C * self.x.itemsize + 2 * width * (3 * HIDDEN + G))
        flops = 2 * rows * (C * (4 * HIDDEN + G) + N * HIDDEN + HIDDEN * C)
        return {
            "byte floor": passes * moved / bytes_rate * 1e3,
            "FLOP floor": passes * flops / flop_rate * 1e3,
        }


def products(device: str, dtype: torch.dtype) -> float:
    """Return the FLOP a second of a large product."""
    n = 8192 if device == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    times = interleaved({"product": lambda: a @ b}, waiting(device))
    return 2 * n**3 / (times["product"] * 1e-3)


def peak_MB(step: Callable[[], Any]) -> float:
    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def on_cpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    flops = products("cpu", torch.float32)
    for N in (64, 128, 256):
        update = Update((N, 1, 128), "output", torch.float32, "cpu", None)
        arrays = update.x, *update.weights
        functions = {
            "fusedops": update.ours,
            "fusedops, Numba": partial(update.ours, backend="numba"),
            "torch eager": update.eager,
        }
        with torch.no_grad():
            forward = {name: partial(f, *arrays) for name, f in functions.items()}
            rows.append(row(update, "forward", forward, 1, rate, flops, "cpu"))
        training = {name: both(f, *arrays) for name, f in functions.items()}
        rows.append(row(update, "forward + backward", training, 3, rate, flops, "cpu"))
    return rows


def on_gpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    flops = {dtype: products("cuda", dtype) for dtype in (torch.float16, torch.bfloat16)}
    for shape in (*SMALL, *SHAPES):
        for gate, dtype, precision in (
            ("hidden", torch.float32, "fp16"),
            ("output", torch.bfloat16, None),
        ):
            update = Update(shape, gate, dtype, "cuda", precision)
            arrays = update.x, *update.weights
            factors = torch.bfloat16 if precision is None else torch.float16
            with torch.no_grad():
                forward = {"fusedops": partial(update.ours, *arrays)}
                if precision is None:
                    forward["torch eager"] = partial(update.eager, *arrays)
                peaks = {name: peak_MB(step) for name, step in forward.items()}
                runs = {name: graphed(step) for name, step in forward.items()}
                found = row(update, "forward", runs, 1, rate, flops[factors], "cuda")
                rows.append({**found, "peak_MB": peaks})
                if shape in SMALL:
                    found = row(update, "forward, eager", forward, 1, rate, flops[factors], "cuda")
                    rows.append(found)
                del runs
            if precision is None:
                training = {"fusedops": both(update.ours, *arrays)}
                training["torch eager"] = both(update.eager, *arrays)
                peaks = {name: peak_MB(step) for name, step in training.items()}
                what = "forward + backward, eager"
                found = row(update, what, training, 3, rate, flops[factors], "cuda")
                rows.append({**found, "peak_MB": peaks})
            torch.cuda.empty_cache()
    return rows


def row(
    update: Update,
    what: str,
    runs: dict[str, Callable[[], Any]],
    passes: int,
    rate: float,
    flops: float,
    device: str,
) -> dict[str, Any]:
    times = interleaved(runs, waiting(device))
    if device == "cuda" and "eager" not in what:
        times = {name: time_ms / COPIES for name, time_ms in times.items()}
    times.update(update.floors_ms(passes, rate, flops))
    kind = str(update.x.dtype).removeprefix("torch.")
    what = f"{what}, gate {update.gate}"
    shape = update.shape
    return {"shape": shape, "dtype": kind, "what": what, "device": device, "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(fusedops.get_num_threads())
    rate = bandwidth(arguments.device)
    rows = on_gpu(rate) if arguments.device == "cuda" else on_cpu(rate)
    where = {**machine(arguments.device), "bandwidth_GB_s": rate / 1e9}
    print_table(where, "N, B, C", rows)
    save(arguments.json, {**where, "rows": rows})


if __name__ == "__main__":
    main()
