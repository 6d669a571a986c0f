"""The backward around Hopper's kernels, on a CPU: their formulas stand where nothing runs them."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fusedops._frame.registry import asking  # noqa: E402
from fusedops.samples import pair  # noqa: E402
from fusedops.trimul.op import ARRAYS, trimul, trimul_vjp  # noqa: E402
from gpukern.trimul import backward, plan  # noqa: E402
from places import available  # noqa: E402


def standardized(x, eps):
    """Return rows of mean zero and variance one, and the factor of each."""
    x = x - x.mean(-1, keepdim=True)
    factor = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * factor, factor


def behind(v, y, factor):
    """Return the cotangent of rows, from the cotangent of the standardized ones."""
    along = (v * y).mean(-1, keepdim=True)
    return (v - v.mean(-1, keepdim=True) - y * along) * factor


def planes(array, members, channels, rows, step):
    """Return planes as rows of channels: a view from where the array begins."""
    shape, strides = (members, channels, rows), (channels * step, step, 1)
    return array.as_strided(shape, strides, array.storage_offset()).mT


def finish_back(tensors, numbers, constants):
    o, gate, dout, scaling, w, b, p_w, p_b, do, dgate, sums = tensors
    members, rows, plane, do_plane, shift = numbers
    eps, C, H, output = constants[:4]
    y, factor = standardized(planes(o, members, H, rows, plane).float(), eps * 4.0**shift)
    shape = (members, rows, C) if output else (members, H, rows)
    e = gate.view(shape).float() / (1 if gate.dtype == o.dtype else 2**15)
    e = e if output else e.mT
    g = dout.reshape(members, rows, C).float() * (1 if scaling is None else scaling)
    w = torch.ones(H) if w is None else w.float()
    normed = y * w + (0 if b is None else b.float())
    p_w = p_w.float()
    if output:
        value = normed @ p_w.T + (0 if p_b is None else p_b.float())
        dgate.view(members, rows, C).copy_(g * value * e * (1 - e))
        g = g * e
        v = g @ p_w
        kept = (y,)
    else:
        v = g @ p_w
        dgate.view(members, rows, H).copy_(v * normed * e * (1 - e))
        v = v * e
        kept = (y * e,) if b is None else (y * e, e.expand_as(y))
    on = behind(v * w, y, factor) * 2.0**shift
    planes(do, members, H, rows, do_plane).copy_(on)
    ones = torch.ones(members, rows, 8)
    # The last program may have no rows.
    sums.zero_()
    sums[0] = (g.mT @ torch.cat([*kept, ones], -1)).sum(0)


def project_back(tensors, numbers, constants):
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w = tensors[:9]
    dsides, dp, dg, dgate, scaling, dx, kept = tensors[9:]
    members, rows, N, half, plane, dsides_half, dsides_plane, *steps = numbers
    eps, C, H, G = constants[:4]

    def sides(array, half, plane):
        starts = array.storage_offset(), array.storage_offset() + half
        shape, strides = (members, H, rows), (H * plane, plane, 1)
        return [array.as_strided(shape, strides, start).mT for start in starts]

    y, factor = standardized(x.reshape(members, rows, C).float(), eps)
    w = torch.ones(C) if w is None else w.float()
    normed = y * w + (0 if b is None else b.float())
    p = normed @ p_w.float().T + (0 if p_b is None else p_b.float())
    s = (normed @ g_w.float().T + (0 if g_b is None else g_b.float())).sigmoid()
    m = 1.0
    if mask is not None:
        shape = members, rows // N, N
        m = mask.as_strided(shape, steps, mask.storage_offset()).reshape(members, rows, 1).float()
    d = torch.cat(sides(dsides, dsides_half, dsides_plane), -1).float()
    opened = dgate.view(members, rows, G).float()
    dp_now = d * s * m
    dg_now = dp_now * p * (1 - s)
    for to, value in ((dp, dp_now), (dg, dg_now)):
        for side, own in zip(sides(to, half, plane), value.split(H, -1), strict=True):
            side.copy_(own)
    v = dp_now @ p_w.float() + dg_now @ g_w.float() + opened @ o_w.float()
    on = behind(v * w, y, factor)
    dx.view(members, rows, C).copy_(on if scaling is None else on / scaling)
    ones = torch.eye(8)[:1].expand(members, rows, 8)
    kept.view(members, rows, -1).copy_(torch.cat([y, ones], -1))


@pytest.fixture
def emulated(monkeypatch):
    """Have small updates take Hopper's way, and note which of its kernels were asked for."""
    if plan.hopper_backward is None:
        pytest.skip("this Triton's Gluon is another")
    launched = []
    formulas = {
        plan.hopper_backward.finish_back: finish_back,
        plan.hopper_backward.project_back: project_back,
    }
    launch = backward.launch

    def emulate(kernel, programs, tensors, numbers, constants, **how):
        if kernel in formulas:
            launched.append(kernel.__name__)
            formulas[kernel](tensors, numbers, constants)
        else:
            launch(kernel, programs, tensors, numbers, constants, **how)

    new = plan.Update.new

    def poisoned(*arguments, **options):
        return new(*arguments, **options).fill_(math.nan)

    monkeypatch.setattr(plan.Update, "new", poisoned)
    monkeypatch.setattr(backward, "launch", emulate)
    monkeypatch.setattr(plan, "is_hopper", lambda device: True)
    hopper = plan.hopper_backward
    monkeypatch.setattr(hopper, "way_to_finish_back", lambda *sizes: 8)
    monkeypatch.setattr(hopper, "way_to_project_back", lambda *sizes: hopper.Way(8, 32))
    monkeypatch.setattr(backward, "MANY", 1)
    monkeypatch.setattr(backward, "_ALONE", 1)
    return launched


@pytest.mark.parametrize(("saved", "parts"), [(True, 1), (True, 2), (False, 2)])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize(
    ("dtype", "precision", "allowed"),
    [(torch.float32, "fp16", 4e-3), (torch.bfloat16, "bf16", 4e-2)],
    ids=str,
)
def test_cotangents_around_the_kernels(
    monkeypatch, emulated, dtype, precision, allowed, gate, saved, parts
):
    """At once or in parts, with o from the forward or without, cotangents are the formula's."""
    available("torch", "triton")
    B, N, C, H = 1 + saved, 8 * parts, 16, 24
    rng, some = np.random.default_rng(0), saved != (gate == "hidden")
    made = pair(B, N, C, H, rng, gate=gate, mask=some or None, norms=some, biases=some)
    if dtype == torch.float32 and not some:
        # Beyond fp16's range, where o is computed as a mean over edges.
        made["p_in_weight"] *= 100
    arrays = [None if made[name] is None else torch.tensor(made[name]).to(dtype) for name in ARRAYS]
    static = "incoming" if some else "outgoing", gate, precision, 1e-5, 0
    exact = [None if array is None else array.double() for array in arrays]
    dout = torch.tensor(rng.standard_normal((B, N, N, C))).to(dtype)
    with asking("torch"):
        _, o = trimul(*exact, *static)
        want = trimul_vjp(*exact, None, dout.double(), *static)
    a = trimul_vjp.Arguments._make((*arrays, o.to(dtype) if saved else None, dout, *static))
    wanted = [None if array is None else torch.full_like(array, math.nan) for array in arrays]
    y = trimul_vjp.Outputs._make(wanted)._replace(dmask=None)
    y = y if some else y._replace(dx=None)
    if parts > 1:
        # Eight lines, and channels that don't divide H.
        monkeypatch.setattr(plan, "in_parts", lambda *_: [1, 16, 1])
    backward.triangle_multiplicative_update_vjp(a, y)
    assert emulated == (["finish_back"] * parts + ["project_back"] * parts) * B
    for name, one, other in zip(y._fields, y, want, strict=True):
        if one is not None:
            assert (one.double() - other).norm() < allowed * other.norm(), name
