"""That kernels for Hopper compile, which nothing interprets: what they compute needs the GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import inspect, itertools
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from gpukern import trimul_hopper as hopper

sizes = (hopper.project, 128), (hopper.project, 64), (hopper.finish, 128), (hopper.finish, 384)
for (kernel, C), logits, biases, output in itertools.product(sizes, *[(False, True)] * 3):
    given, dot = ("*bf16", tl.bfloat16) if output else ("*fp32", tl.float16)
    vector = 8 if output else 4
    long = tl.int64 if biases else tl.int32
    constants = dict(EPS=1e-5, C=C, H=128, OUTPUT=output, V=vector, DOT=dot, LONG=long)
    if kernel is hopper.project:
        W, BH = hopper.way_to_project(C, 128, 128, logits)
        constants |= dict(G=128, KEPT=C + 8, W=W, BH=BH)
    elif logits:
        continue
    else:
        W, BN = hopper.way_to_finish(C, 128, 16 // vector)
        constants |= dict(W=W, BN=BN)
    none = [] if biases else ["mask", "w", "b", "p_b", "g_b", "o_b"]
    none += [] if logits else ["logits", "kept"]
    signature, values, aligned = {}, {}, {}
    for at, name in enumerate(inspect.signature(kernel).parameters):
        if name in constants or name in none:
            signature[name], values[at,] = "constexpr", constants.get(name)
        elif name in (*hopper.POINTERS[kernel], "mask"):
            # Weights of the projections are rounded before.
            own = name in ("x", "w", "b", "p_b", "g_b", "o_b", "out", "mask")
            own |= name == "p_w" and kernel is hopper.finish
            signature[name] = given if own else "*bf16" if output else "*fp16"
            if name != "mask":
                aligned[at,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = GluonASTSource(hopper.jit(kernel), signature, values, aligned)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": W})
    assert "wgmma" in made.asm["ptx"] and "movmatrix" in made.asm["ptx"]
    assert made.metadata.shared <= hopper.SHARED, made.metadata.shared
    # Four edges of a plane are written at once.
    assert "st.global.v2.b32" in made.asm["ptx"] or kernel is hopper.finish
print("compiled")
"""


def test_kernels_compile(tmp_path):
    import triton

    if not triton.__version__.startswith("3.6."):
        pytest.skip("Gluon of another Triton may be another")
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    settings.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=settings, capture_output=True, text=True
    )
    assert done.stdout == "compiled\n", done.stderr
