"""Times the dynamic convolution, forward and backward, beside its peers and its floors.

    python bench/conv.py [--device cuda] [--json FILE]

Rounds are interleaved in one process and a table of medians is printed, in ms.
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

import fusedops
from fusedops._registry import Call
from fusedops.conv import conv, conv_step, conv_vjp

op = fusedops.dynamic_conv
silu = partial(op, activation="silu")
numba = partial(op, backend="numba")


def shifted(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """A peer, to be compiled: W shifted products."""
    width, tokens = kernels.shape[-1], x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
    return sum(kernels[..., w] * padded[:, w : w + tokens] for w in range(width))


def unfolded(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """A peer: eager torch as Jet-Nemotron's own fallback has it."""
    padded = torch.nn.functional.pad(x, (0, 0, kernels.shape[-1] - 1, 0))
    return (padded.unfold(1, kernels.shape[-1], 1) * kernels).sum(-1)


def example(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> Any:
    batch, tokens, channels, width = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = (batch, tokens, channels), (batch, tokens, channels, width)
    return [torch.randn(s, generator=generator, device=device, dtype=dtype) for s in sizes]


def on_cpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    compiled = torch.compile(shifted, dynamic=False)
    for shape in ((1, 2048, 1024, 4), (2, 4096, 1536, 4)):
        x, kernels = example(shape, "cpu", torch.float32)
        half = [array.bfloat16() for array in (x, kernels)]
        out = torch.empty_like(x)
        forward = {
            "fusedops": partial(op, x, kernels),
            "fusedops, out=": partial(op, x, kernels, out=out),
            "fusedops, silu": partial(silu, x, kernels),
            "fusedops, bfloat16": partial(op, *half),
            "fusedops, Numba": partial(numba, x, kernels),
            "torch.compile": partial(compiled, x, kernels),
            "torch eager unfold": partial(unfolded, x, kernels),
        }
        training = {
            "fusedops": both(op, x, kernels),
            "fusedops, silu": both(silu, x, kernels),
            "fusedops, bfloat16": both(op, *half),
            "fusedops, Numba": both(numba, x, kernels),
            "torch.compile": both(compiled, x, kernels),
            "torch eager unfold": both(unfolded, x, kernels),
        }
        rows.append(row(shape, "float32", "forward", forward, 2 + shape[3], x, rate, "cpu"))
        passes = 2 + shape[3] + 3 + 2 * shape[3]
        rows.append(row(shape, "float32", "forward + backward", training, passes, x, rate, "cpu"))
    return rows


def on_gpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    for shape in ((1, 4096, 1536, 4), (8, 4096, 1536, 4)):
        for dtype in (torch.bfloat16, torch.float32):
            x, kernels = example(shape, "cuda", dtype)
            cotangent = torch.randn_like(x)
            forward, backward = {}, {}
            for name, activation in (("fusedops", "none"), ("fusedops, silu", "silu")):
                call = Call(conv, (None, activation), None)
                arrays = (x, kernels, None, None)
                forward[name] = graphed(lambda c=call, a=arrays: c(a, (True, False)))
                arrays = (*arrays, cotangent, None)
                wanted = (True, True, False, False)
                backward[name] = graphed(lambda c=call, a=arrays, w=wanted: c.other(conv_vjp, a, w))
            compiled = torch.compile(shifted, dynamic=False)
            forward["torch.compile"] = graphed(partial(compiled, x, kernels))
            kind = str(dtype).removeprefix("torch.")
            rows.append(row(shape, kind, "forward", forward, 2 + shape[3], x, rate, "cuda"))
            passes = 3 + 2 * shape[3]
            rows.append(row(shape, kind, "backward", backward, passes, x, rate, "cuda"))
            training = {
                "fusedops": both(op, x, kernels),
                "torch.compile": both(compiled, x, kernels),
            }
            passes += 2 + shape[3]
            rows.append(row(shape, kind, "eager, both", training, passes, x, rate, "cuda"))
    return [*rows, *steps(rate)]


def steps(rate: float) -> list[dict[str, Any]]:
    """Decoding: beside a kernel that does nothing, and one that only moves as many bytes."""
    import triton
    import triton.language as tl

    @triton.jit
    def empty(x):
        pass

    @triton.jit
    def move(x, y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

    rows = []
    batch, channels, width = 64, 3072, 4
    for dtype in (torch.bfloat16, torch.float32):
        x, kernels = example((batch, 1, channels, width), "cuda", dtype)
        x, kernels = x[:, 0], kernels[:, 0]
        state = torch.zeros_like(kernels)
        moved = x.numel() * (2 + 3 * width)
        source = torch.zeros(moved // 2, device="cuda", dtype=dtype)
        target = torch.empty_like(source)
        call = Call(conv_step, ("silu",), None)
        programs = -(-source.numel() // 1024)
        runs = {
            "fusedops, silu": graphed(lambda a=(x, state, kernels, None), c=call: c(a, (True,))),
            "an empty kernel": graphed(lambda a=x: empty[(1,)](a)),
            "an empty kernel of 768 programs": graphed(lambda a=x: empty[(768,)](a)),
            "a kernel that moves the bytes": graphed(
                lambda p=programs, s=source, t=target: move[(p,)](s, t, s.numel(), 1024)
            ),
        }
        kind = str(dtype).removeprefix("torch.")
        shape = (batch, 1, channels, width)
        rows.append(row(shape, kind, "step", runs, 2 + 3 * width, x, rate, "cuda"))
    return rows


def row(
    shape: tuple[int, ...],
    dtype: str,
    what: str,
    runs: dict[str, Callable[[], Any]],
    passes: int,
    x: torch.Tensor,
    rate: float,
    device: str,
) -> dict[str, Any]:
    """Measure, with the floor of moving that many arrays like x."""
    times = interleaved(runs, waiting(device))
    if device == "cuda" and not what.startswith("eager"):
        times = {name: time_ms / COPIES for name, time_ms in times.items()}
    times["byte floor"] = passes * x.nbytes / rate * 1e3
    return {"shape": shape, "dtype": dtype, "what": what, "device": device, "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(fusedops.get_num_threads())
    rate = bandwidth(arguments.device)
    rows = on_gpu(rate) if arguments.device == "cuda" else on_cpu(rate)
    where = {**machine(arguments.device), "bandwidth_GB_s": rate / 1e9}
    print_table(where, "B, T, D, W", rows)
    save(arguments.json, {**where, "rows": rows})


if __name__ == "__main__":
    main()
