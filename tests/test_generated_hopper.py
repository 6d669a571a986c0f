"""Kernels for Hopper compile; nothing interprets them, so only a GPU can check their results."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpukern.trimul import plan  # noqa: E402

if plan.hopper is None:
    pytest.skip("this Triton's Gluon is another", allow_module_level=True)

from gpukern.generated import hopper  # noqa: E402

COMPILE = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from gpukern.generated import hopper as hopper
from triton.experimental.gluon import jit
from gpukern.hopper import SHARED, TILE

for kernel, aligned in hopper.POINTERS.items():
    constants = dict(H=384, D=3072, SILU=True, SLOTS=hopper.slots(kernel, 384))
    signature, values, attributes = {}, {}, {}
    for at, name in enumerate(inspect.signature(kernel).parameters):
        if name in constants:
            signature[name], values[at,] = "constexpr", constants[name]
        elif name in aligned:
            signature[name] = "*fp32" if name == "sums" else "*bf16"
            attributes[at,] = [["tt.divisibility", 16]]
        elif name in ("hidden", "weight"):
            shape = [hopper.STEP.value if name == "hidden" else hopper.COLUMNS.value, 64]
            signature[name] = f"tensordesc<bf16{shape},{TILE!r}>"
        else:
            signature[name] = "i32"
    source = GluonASTSource(jit(kernel), signature, values, attributes)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
    assert made.metadata.shared <= SHARED, made.metadata.shared
    ptx = made.asm["ptx"]
    assert "wgmma" in ptx and "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
print("compiled")
"""


@pytest.mark.compiles
def test_kernels_compile(tmp_path):
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    settings.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=settings, capture_output=True, text=True
    )
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize("D", [64, 1536, 4096, 8448])
@pytest.mark.parametrize("tokens", [1, 4096, 262_144, 1 << 20, 3 << 24])
def test_chunks_hold_all_tokens_by_offsets_of_32_bits(D, tokens):
    for kernel, overlap, width in ((hopper.forward, 0, D), (hopper.inputs, 3, 4 * D)):
        for processors in (16, 114, 132):
            chunks, steps = hopper.split(kernel, tokens, D // 32, processors)
            segments = 4 * hopper.CONSUMERS[kernel]
            assert chunks * segments * (16 * steps - overlap) >= tokens
            assert (segments * (16 * steps - overlap) + 16) * width < 2**31
