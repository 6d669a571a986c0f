"""The memory of the triangle update's kernels for GPUs: the limit holds, and few passes meet it."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import fusedops  # noqa: E402
from allocated import peak  # noqa: E402
from fusedops.trimul.op import trimul, trimul_vjp  # noqa: E402
from gpukern.trimul import backward, forward, products  # noqa: E402

#: Bytes of o, in the tests without a GPU.
PLANE = 4 * 768 * 768 * 8


@pytest.fixture
def launched(monkeypatch):
    """Return the kernels launched, in order; none of them runs."""
    found = []
    for module in (forward, backward, products):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **how: found.append(kernel))
    return found


def arguments(limit, N=768, C=8, H=8, gate="output"):
    G = C if gate == "output" else H
    shapes = (1, N, N, C), (1, N, N), (C,), (C,), (2 * H, C), (2 * H,), (2 * H, C), (2 * H,)
    shapes += (H,), (H,), (C, H), (C,), (G, C), (G,)
    return [torch.empty(shape) for shape in shapes], ("outgoing", gate, "ieee", 1e-5, limit)


def peak_of(work, primitive, arguments, outputs):
    a, y = primitive.Arguments._make(arguments), primitive.Outputs._make(outputs)
    given = [t for t in (*a, *y) if isinstance(t, torch.Tensor)]
    with torch.no_grad():
        return peak(lambda: work(a, y), *given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("planes", [12, 8, 5, 4])
@pytest.mark.parametrize("gate", ["output", "hidden"])
def test_the_limit_holds(launched, gate, planes):
    """A limit of a few times o is met, in training and without a gradient."""
    limit = int(planes * PLANE)
    arrays, static = arguments(limit, gate=gate)
    out, hidden = torch.empty_like(arrays[0]), torch.empty(1, 8, 768, 768)
    work = forward.triangle_multiplicative_update
    assert peak_of(work, trimul, (*arrays, *static), (out, None)) <= limit
    work = backward.triangle_multiplicative_update_vjp
    outputs = [torch.empty_like(array) for array in arrays]
    for o in (hidden, None):
        a = *arrays, o, out, *static
        assert peak_of(work, trimul_vjp, a, outputs) <= limit
        # Without a cotangent of x, no memory of a result holds another before.
        if planes > 4:
            assert peak_of(work, trimul_vjp, a, [None, *outputs[1:]]) <= limit


def test_less_memory_takes_no_more_passes(launched):
    """A backward in parts launches as many programs over rows as parts, not as their square."""
    counts = []
    for limit in (100 * PLANE, int(5 * PLANE), int(4 * PLANE)):
        launched.clear()
        arrays, static = arguments(limit)
        a = trimul_vjp.Arguments._make(
            (*arrays, torch.empty(1, 8, 768, 768), torch.empty_like(arrays[0]), *static)
        )
        update = backward.Update(a)
        need = functools.partial(backward._need, update, a, a.x, False)
        update.divide(need, 1)
        work = backward.triangle_multiplicative_update_vjp
        peak_of(work, trimul_vjp, a, [torch.empty_like(array) for array in arrays])
        counts.append((len(launched), len(update.lines), len(update.channels)))
    (whole, *ones), *others = counts
    assert ones == [1, 1]
    for launches, lines, channels in others:
        assert min(lines, channels) > 1
        assert launches <= whole * lines + 2 * channels


@pytest.mark.gpu
@pytest.mark.parametrize("planes", [8, 5, 4])
def test_the_limit_holds_on_a_gpu(planes):
    N, C = 1024, 128
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        made = torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)
        return (made * shape[-1] ** -0.5).requires_grad_()

    x = draw(1, N, N, C)
    weights = {name: draw(2 * C, C) for name in ("p_in_weight", "g_in_weight")}
    weights |= {name: draw(C, C) for name in ("p_out_weight", "g_out_weight")}
    limit = int(planes * 2 * N * N * C)
    leaves = [x, *weights.values()]
    want = None
    for bound in (None, limit, limit):
        out = fusedops.triangle_multiplicative_update(x, **weights, max_memory=bound)
        cotangent = torch.ones_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = torch.autograd.grad(out, leaves, cotangent)
        torch.cuda.synchronize()
        results = sum(t.numel() * t.itemsize for t in found)
        if bound is not None:
            # Places of the allocator are multiples of 2 MiB.
            assert torch.cuda.max_memory_allocated() - before - results <= limit + (64 << 20)
            for got, exact in zip(found, want, strict=True):
                assert (got - exact).norm() <= 2e-2 * exact.norm()
        want = want or [t.float() for t in found]
