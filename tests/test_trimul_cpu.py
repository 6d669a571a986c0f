"""The CPU kernels of the triangle multiplicative update: blocks, threads and memory."""

from __future__ import annotations

import functools
import weakref
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import fusedops
from cpukern import isa, products
from cpukern.trimul import update as on_cpu
from fusedops import triangle_multiplicative_update
from fusedops._host import memory, threads
from fusedops.samples import pair
from fusedops.testing import error
from places import HAS_TORCH, available, needs_torch

if HAS_TORCH:
    import torch

directions = pytest.mark.parametrize("direction", ["outgoing", "incoming"])
gates = pytest.mark.parametrize("gate", ["output", "hidden"])
#: Both of each, where the steps of one don't meet the steps of the other.
ways = pytest.mark.parametrize(
    ("direction", "gate"), [("outgoing", "output"), ("incoming", "hidden")]
)
small_parts = pytest.mark.filterwarnings(
    "ignore:triangle_multiplicative_update. max_memory is:RuntimeWarning"
)


@pytest.fixture(scope="module")
def backend():
    """One backend: all cut an update up by the same code. Tests with `exact` run on each."""
    return available("numpy", "numba" if isa.why_not() else "cython")[1]


@pytest.fixture(autouse=True)
def with_bfloat16(monkeypatch):
    """Multiply bfloat16 by oneDNN's reference where this processor has no vectors for it."""
    monkeypatch.setattr(on_cpu, "has_bfloat16", lambda: True)


def update(shape, dtype="float32", gate="output", **options):
    arrays = pair(*shape, np.random.default_rng(0), gate=gate, biases=True, **options)
    return {name: a.astype(dtype) for name, a in arrays.items() if a is not None}


def solve(arrays, backend, **options):
    """Return the update, alone and with o, and all gradients."""
    alone = triangle_multiplicative_update(**arrays, **options, backend=backend)
    out, pullback = triangle_multiplicative_update.vjp(**arrays, **options, backend=backend)
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    return alone, out, *pullback(cotangent)


def of_tensors(arrays, backend, dtype="float32", **options):
    """Return the update of tensors and all gradients, as tensors."""
    kind = getattr(torch, dtype)
    given = {name: torch.as_tensor(a).to(kind).requires_grad_() for name, a in arrays.items()}
    out = triangle_multiplicative_update(**given, **options, backend=backend)
    cotangent = torch.as_tensor(np.random.default_rng(1).normal(size=out.shape)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, [*given.values()], cotangent)


def same(results, others):
    for got, want in zip(results, others, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (1, 2, 8, 8), (0, 3, 4, 5), (1, 0, 4, 5)], ids=str)
@pytest.mark.parametrize("mask", [None, False])
@gates
@directions
def test_one_block_equals_the_loops(exact, monkeypatch, direction, gate, mask, shape):
    arrays = update(shape, gate=gate, mask=mask)
    asked, one_block = [], on_cpu._Update.is_small

    def small(u):
        asked.append(one_block(u))
        return asked[-1]

    monkeypatch.setattr(on_cpu._Update, "is_small", small)
    results = solve(arrays, exact, direction=direction, gate=gate)
    assert asked == [True] * 3
    monkeypatch.setattr(on_cpu._Update, "is_small", lambda _: False)
    same(results, solve(arrays, exact, direction=direction, gate=gate))


@pytest.fixture(params=["with threadpoolctl", "without"])
def blas(request, monkeypatch, two_threads_for_blas):
    if request.param == "without":
        monkeypatch.setattr(threads, "_blas", lambda: None)


def on_threads(work):
    """Return the results of work on one thread, two and three."""
    try:
        for count in (1, 2, 3):
            fusedops.set_num_threads(count)
            yield work(count)
    finally:
        fusedops.set_num_threads(None)


@small_parts
@pytest.mark.parametrize("shape", [(2, 33, 17, 16), (1, 65, 8, 5), (300, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("limit", [None, 300_000])
@ways
def test_the_thread_count_changes_no_bit(backend, blas, direction, gate, limit, shape):
    arrays = update(shape, gate=gate, mask=False)
    options = {"direction": direction, "gate": gate, "max_memory": limit}
    first, *others = on_threads(lambda count: solve(arrays, backend, **options))
    for result in others:
        same(result, first)


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@gates
def test_the_thread_count_changes_no_bit_of_tensors(backend, gate, dtype):
    pytest.importorskip("threadpoolctl")
    arrays = update((2, 33, 17, 16), gate=gate, mask=False)
    before = torch.get_num_threads()

    def solved(count):
        torch.set_num_threads(count)
        results = of_tensors(arrays, backend, dtype, gate=gate)
        assert torch.get_num_threads() == count
        return results

    try:
        first, *others = on_threads(solved)
    finally:
        torch.set_num_threads(before)
    for result in others:
        assert all(torch.equal(*pair) for pair in zip(result, first, strict=True))


@small_parts
@pytest.mark.parametrize("N", [17, 33])
@directions
def test_a_tile_of_one_column_is_read_in_its_place(backend, direction, N):
    """With a gradient o is whole, and its tiles have gaps between their rows."""
    arrays = update((1, N, 16, 17), "float64")
    got = solve(arrays, backend, direction=direction, max_memory=1 << 16)
    want = solve(arrays, "numpy", direction=direction)
    assert all(error(*both) < 1e-10 for both in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(1, 9, 4, 4), (1, 33, 4, 4)], ids=str)
@pytest.mark.usefixtures("two_threads_for_blas")
def test_blas_gets_its_threads_back(backend, monkeypatch, shape):
    def counts():
        return [library["num_threads"] for library in threads._blas().info()]

    inside, genuine = [], on_cpu._Update.projected
    before, arrays = counts(), update(shape)
    assert set(before) == {2}
    monkeypatch.setattr(
        on_cpu._Update, "projected", lambda *args: inside.extend(counts()) or genuine(*args)
    )
    solve(arrays, backend)
    assert set(inside) == {1}
    assert counts() == before
    # The call fails.
    monkeypatch.setattr(on_cpu._Update, "projected", None)
    with pytest.raises(TypeError):
        solve(arrays, backend)
    assert counts() == before


@pytest.fixture
def most(monkeypatch):
    """Return a function that returns the peak bytes of temporaries since its last call.

    Temporaries that aren't counted are as small as a mask or a weight.
    """
    now = [0, 0]

    def left(size):
        now[0] -= size

    def empty(shape, dtype):
        array = np.empty(shape, dtype)
        now[0] += array.nbytes
        now[1] = max(now)
        weakref.finalize(array, left, array.nbytes)
        return array

    def most():
        peak, now[1] = now[1], now[0]
        return peak

    monkeypatch.setattr(on_cpu, "memory", SimpleNamespace(empty=empty, SMALL=memory.SMALL))
    return most


def check_peaks(most, limit, prepare):
    """Check that a limit holds, and that the work takes more without it."""
    peaks = []
    for bound in (None, limit):
        work = prepare(bound)
        most()
        work()
        peaks.append(most())
    assert peaks[1] <= limit < peaks[0]


@small_parts
@directions
@gates
def test_temporaries_stay_below_the_limit(backend, most, gate, direction):
    arrays = update((2, 96, 12, 10), gate=gate, mask=True)
    options = {"direction": direction, "gate": gate, "backend": backend}
    cotangent = np.random.default_rng(1).normal(size=arrays["x"].shape)
    op = functools.partial(triangle_multiplicative_update, **arrays, **options)
    pullback = functools.partial(triangle_multiplicative_update.vjp, **arrays, **options)
    for limit in (1 << 19, 1 << 20, 1 << 21):
        check_peaks(most, limit, lambda bound: lambda: op(max_memory=bound))
    check_peaks(
        most, 1 << 20, lambda bound: functools.partial(pullback(max_memory=bound)[1], cotangent)
    )


@needs_torch
@small_parts
@gates
def test_temporaries_of_bfloat16_stay_below_the_limit(backend, most, gate):
    arrays = update((2, 64, 12, 10), gate=gate, mask=True)
    tensors = {name: torch.tensor(a).bfloat16() for name, a in arrays.items()}
    tensors["x"].requires_grad_()
    options = {"gate": gate, "backend": backend}
    op = functools.partial(triangle_multiplicative_update, **tensors, **options)
    check_peaks(most, 1 << 18, lambda bound: lambda: op(max_memory=bound))
    check_peaks(most, 1 << 18, lambda bound: op(max_memory=bound).float().sum().backward)


@small_parts
@directions
def test_less_memory_takes_a_little_longer(backend, monkeypatch, direction):
    """Parts are tiles and strips: half of the memory takes at most three times the work."""
    N, C, H = 64, 4, 8
    work = {"projected": 0, "ended": 0}

    def counted(self, room, xn, *rest, real=on_cpu._Update.projected):
        work["projected"] += len(xn) * len(rest[0]) / (4 * H * N**2)
        return real(self, room, xn, *rest)

    def ended(self, room, xn, o, real=on_cpu._Update.ended):
        work["ended"] += len(xn) / N**2
        return real(self, room, xn, o)

    monkeypatch.setattr(on_cpu._Update, "projected", counted)
    monkeypatch.setattr(on_cpu._Update, "ended", ended)
    arrays = update((1, N, C, H))
    cotangent = np.random.default_rng(1).normal(size=arrays["x"].shape).astype("f4")
    forwards, backwards = [], []
    for limit in (None, *(1 << power for power in range(20, 9, -1))):
        options = {"direction": direction, "max_memory": limit, "backend": backend}
        work["projected"] = 0
        triangle_multiplicative_update(**arrays, **options)
        forwards.append(work["projected"])
        _, back = triangle_multiplicative_update.vjp(**arrays, **options)
        work["projected"] = work["ended"] = 0
        back(cotangent)
        backwards.append(work["ended"])
        # Once if there is memory to keep the logits.
        assert work["projected"] == pytest.approx(1 if limit is None else 2)
    assert forwards[0] == backwards[0] == pytest.approx(1)
    for counts in (forwards, backwards):
        assert all(after <= 3 * max(before, 1) for before, after in pairwise(counts))
    # At worst, left and right are made for every row and column of the smallest tiles, and in the
    # backward the steps after the products repeat for every channel.
    assert forwards[-1] <= 2 * N / 16
    assert backwards[-1] <= H


@needs_torch
@pytest.mark.parametrize("rounded", ["highest", "medium"])
@ways
def test_products_by_torch_have_the_digits_of_float32(
    backend, direction, gate, rounded, monkeypatch
):
    """Torch may round the factors of its own products; ours are asked for by `precision`."""
    assert products.of_tensors(np.dtype("float32"), 8) is products.ByNumpy
    monkeypatch.setattr(products, "_WORTH", 0)
    arrays = update((1, 40, 24, 20), dtype="float64", gate=gate, mask=True)
    options = {"direction": direction, "gate": gate}
    _, *exact = solve(arrays, backend, **options)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(rounded)
    try:
        assert products.of_tensors(np.dtype("float32"), 8) is (
            products.ByNumpy if rounded == "medium" else products.InFloat32
        )
        found = of_tensors(arrays, backend, **options)
    finally:
        torch.set_float32_matmul_precision(before)
    for got, want in zip(found, exact, strict=True):
        # A few hundred roundings of 6e-8, and a LayerNorm that magnifies them.
        assert np.abs(got.numpy() - want).max() <= 2e-5 * np.abs(want).max()


def check_bfloat16(backend, tolerance, shape=(2, 40, 24, 20), gate="output", precision=None, **of):
    arrays = update(shape, dtype="float64", gate=gate, mask=True)
    arrays = {name: torch.as_tensor(a).bfloat16() for name, a in arrays.items()}
    exact = of_tensors(arrays, "torch", "float64", gate=gate, **of)
    found = of_tensors(arrays, backend, "bfloat16", gate=gate, precision=precision, **of)
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= tolerance * want.norm()


@needs_torch
@pytest.mark.parametrize("shape", [(2, 7, 24, 20), (2, 40, 24, 20), (1, 0, 8, 8)], ids=str)
@pytest.mark.parametrize("precision", [None, "ieee"])
@gates
@directions
def test_bfloat16_is_rounded_as_asked(exact, direction, gate, precision, shape):
    """A result alone is off by 1.7e-3, and by as much for o, which is kept.

    Cotangents, in which much cancels, take a few times that; up to ten roundings are in one if
    asked for.
    """
    tolerance = 8e-3 if precision == "ieee" or exact == "numba" else 1.5e-2
    check_bfloat16(exact, tolerance, shape, gate, precision, direction=direction)


@needs_torch
def test_torch_without_onednn_multiplies_bfloat16_itself(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert products.has_bfloat16.__wrapped__()


@needs_torch
@pytest.mark.parametrize("shape", [(2, 7, 24, 20), (2, 40, 24, 20)], ids=str)
def test_bfloat16_without_vectors_for_it_is_computed_in_float32(backend, monkeypatch, shape):
    monkeypatch.setattr(on_cpu, "has_bfloat16", lambda: False)
    for product in ("dot", "matmul"):
        monkeypatch.setattr(products.InBfloat16, product, None)
    check_bfloat16(backend, 8e-3, shape)
