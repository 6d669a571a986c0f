"""Kernels for Hopper compile; nothing interprets them, so only a GPU can check their results."""

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
from triton.experimental import gluon
from gpukern.hopper import SHARED, TILE
from gpukern.trimul import hopper, hopper_backward as back, hopper_wide as wide

POINTERS = hopper.POINTERS | back.POINTERS | wide.POINTERS
# Pointers to the dtype of x; all others point to factors.
OWN = "x", "w", "b", "p_w", "p_b", "g_w", "g_b", "o_w", "o_b", "out", "mask", "dout", "dx"


def compile(kernel, warps, output, bf16, none, kinds={}, **constants):
    given, factor = "*bf16" if output else "*fp32", "bf16" if bf16 else "fp16"
    dot = tl.bfloat16 if bf16 else tl.float16
    constants |= dict(H=128, V=8 if output else 4)
    constants |= {} if kernel is wide.pack else dict(EPS=1e-5)
    constants |= {} if kernel in wide.POINTERS else dict(DOT=dot)
    signature, values, aligned = {}, {}, {}
    for at, name in enumerate(inspect.signature(kernel).parameters):
        if name in constants or name in none:
            signature[name], values[at,] = "constexpr", constants.get(name)
        elif name in (*POINTERS[kernel], "mask", "scaling"):
            own = given if name in OWN else f"*{factor}"
            own = "*fp32" if name in ("scaling", "sums", "biases") else own
            signature[name] = "*fp16" if name == "gate" else kinds.get(name, own)
            if name in POINTERS[kernel]:
                aligned[at,] = [["tt.divisibility", 16]]
        elif name == "weights":
            shape = [2 * constants["BH"], wide._CHUNK.value]
            signature[name] = f"tensordesc<{factor}{shape},{TILE!r}>"
        else:
            signature[name] = "i32"
    source = GluonASTSource(gluon.jit(kernel), signature, values, aligned)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
    assert made.metadata.shared <= SHARED, made.metadata.shared
    if kernel is not wide.pack:
        assert "wgmma" in made.asm["ptx"] and "movmatrix" in made.asm["ptx"]
        # Four edges of a plane are written at once.
        assert "st.global.v2.b32" in made.asm["ptx"] or kernel is hopper.finish


for C, biases, output in itertools.product(CHANNELS, *[(False, True)] * 2):
    if C != 128 and biases == output:
        continue
    none = [] if biases else ["mask", "w", "b", "p_b", "g_b", "o_b"]
    none += ["scaling"] if output else []
    common = dict(C=C, LONG=tl.int64 if biases else tl.int32)
    G = C if output else 128
    bf16 = output or (biases and C == 128)
    split = bf16 and (not output or biases != (C == 384))
    kinds = dict(p_w="*fp32") if split else {}
    W, BN = hopper.way_to_finish(C, 128, 2 if output else 4, split)
    compile(hopper.finish, W, output, bf16, none, kinds, OUTPUT=output, W=W, BN=BN, **common)
    for logits in (False, True):
        way = hopper.way_to_project(C, 128, G, logits)
        if way:
            without = none + ([] if logits else ["logits"])
            rest = dict(G=G, OUTPUT=output, W=way.warps, BH=way.block)
            compile(hopper.project, way.warps, output, bf16, without, **rest, **common)
    way = wide.way_to_project_wide(C, 128, G)
    if way:
        without = none + ([] if biases else ["biases"])
        rest = dict(OUTPUT=output, BH=way.block)
        compile(wide.pack, 4, output, bf16, without, C=C, **rest)
        compile(wide.project_wide, 4, output, bf16, without, G=G, SLOTS=way.slots, **rest, **common)
    W = back.way_to_finish_back(C, 128)
    if W:
        compile(back.finish_back, W, output, bf16, none, OUTPUT=output, W=W, **common)
    way = back.way_to_project_back(C, 128, G)
    if way:
        rest = dict(G=G, KEPT=C + 8, W=way.warps, BH=way.block)
        compile(back.project_back, way.warps, output, bf16, none, **rest, **common)
print("compiled")
"""


@pytest.mark.compiles
@pytest.mark.parametrize("channels", [(128,), (64, 384)], ids=str)
def test_kernels_compile(channels, tmp_path):
    from gpukern.trimul import plan

    if plan.hopper is None:
        pytest.skip("this Triton's Gluon is another")
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    settings.pop("TRITON_INTERPRET", None)
    code = f"CHANNELS = {channels}\n{COMPILE}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True
    )
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize(("capability", "warns"), [((9, 0), True), ((10, 0), False)])
def test_another_gluon_is_a_warning_on_hopper_alone(monkeypatch, recwarn, capability, warns):
    import torch

    from gpukern.trimul import plan

    monkeypatch.setattr(plan, "hopper", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert not plan.is_hopper.__wrapped__(torch.device("cuda"))
    assert [str(warned.message)[:10] for warned in recwarn] == ["Triton is "] * warns
