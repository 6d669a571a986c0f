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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_cotangents_through_a_norm(norm, gated, scaled):
    """Sums over rows, in parts as kernels for Hopper make them, agree with autograd."""
    torch = pytest.importorskip("torch")
    from fusedops.trimul.op import Weights
    from gpukern.trimul.backward import through_norm

    few, rows, C, H, G = 3, 7, 6, 2, 5
    make = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(shape, generator=make)

    def behind(y, e, weight, bias, w, b, z):
        """Return parts of sums over rows, and the cotangents of weight, bias, w and b."""
        asked = [a.requires_grad_() for a in (weight, bias, w, b)]
        normed = (y * w + b) if norm else y + 0 * (w + b)
        want = torch.autograd.grad((normed * e) @ weight.T + bias, asked, z)
        z = z if scaling is None else z * scaling
        ones = torch.eye(8)[:1].expand(few, rows, 8)
        kept = torch.cat([y * e, e, ones] if gated else [y, ones], 2)
        return (z.mT @ kept).contiguous(), want

    scaling = torch.tensor(8.0) if scaled else None
    weights, biases = [some(4 * H, C), some(G, C), some(C, H)], [some(4 * H), some(G), some(C)]
    norms = some(C), some(C), some(H), some(H)
    parts, want = [], []
    for weight, bias, which in zip(weights, biases, ((0, 1), (0, 1), (2, 3)), strict=True):
        width = weight.shape[1]
        y = some(few, rows, width)
        e = some(few, rows, width) if gated else torch.ones(few, rows, width)
        z = some(few, rows, len(weight))
        found = behind(y, e, weight, bias, *[norms[at] for at in which], z)
        parts.append(found[0])
        want.append(found[1])
    (dpg, dpg_b, *dnorm), (do, do_b, *more), (de, de_b, *dnorm_out) = want
    pairs, last, end = [weight.detach() for weight in weights]
    in_w, in_b, out_w, out_b = [a.detach() if norm else None for a in norms]
    given = Weights(
        norm_in_weight=in_w,
        norm_in_bias=in_b,
        norm_out_weight=out_w,
        norm_out_bias=out_b,
        p_in_weight=pairs[: 2 * H],
        g_in_weight=pairs[2 * H :],
        g_out_weight=last,
        p_out_weight=end,
    )
    results = Weights(
        p_in_weight=torch.zeros(2 * H, C),
        p_in_bias=torch.zeros(2 * H),
        g_in_weight=torch.zeros(2 * H, C),
        g_in_bias=torch.zeros(2 * H),
        p_out_weight=torch.zeros(C, H),
        p_out_bias=torch.zeros(C),
        g_out_weight=torch.zeros(G, C),
        g_out_bias=torch.zeros(G),
    )
    sums = through_norm(*parts, scaling, given, results)
    found = [
        torch.cat([results.p_in_weight, results.g_in_weight]),
        torch.cat([results.p_in_bias, results.g_in_bias]),
        *(results.p_out_weight, results.p_out_bias, results.g_out_weight, results.g_out_bias),
    ]
    expected = [dpg, dpg_b, de, de_b, do, do_b]
    if norm:
        found += [*sums.norm.sum(0), *sums.norm_out.sum(0)]
        expected += [*[a + b for a, b in zip(dnorm, more, strict=True)], *dnorm_out]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
