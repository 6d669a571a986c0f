"""The CPU kernels of the triangle multiplicative update: blocks, threads and memory."""

from __future__ import annotations

import importlib.util
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

BACKENDS = [
    pytest.param(
        "cython", marks=pytest.mark.skipif(bool(isa.why_not()), reason="there are no kernels")
    ),
    pytest.param(
        "numba",
        marks=pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="needs numba"),
    ),
]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def with_bfloat16(monkeypatch):
    """Multiply bfloat16 by oneDNN's reference where this processor has no vectors for it."""
    monkeypatch.setattr(on_cpu, "has_bfloat16", lambda: True)


def solve(arrays, backend, **options):
    """Return the update, alone and with o, and all gradients."""
    alone = triangle_multiplicative_update(**arrays, **options, backend=backend)
    out, pullback = triangle_multiplicative_update.vjp(**arrays, **options, backend=backend)
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    return alone, out, *pullback(cotangent)


def update(shape, dtype="float32", gate="output", **options):
    arrays = pair(*shape, np.random.default_rng(0), gate=gate, biases=True, **options)
    return {name: None if a is None else a.astype(dtype) for name, a in arrays.items()}


@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (1, 2, 8, 8), (0, 3, 4, 5), (1, 0, 4, 5)], ids=str)
@pytest.mark.parametrize("mask", [None, False])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_one_block_equals_the_loops(backend, monkeypatch, direction, gate, mask, shape):
    arrays = update(shape, gate=gate, mask=mask)
    asked, one_block = [], on_cpu._Update.is_small

    def small(u):
        asked.append(one_block(u))
        return asked[-1]

    monkeypatch.setattr(on_cpu._Update, "is_small", small)
    results = solve(arrays, backend, direction=direction, gate=gate)
    assert asked == [True] * 3
    monkeypatch.setattr(on_cpu._Update, "is_small", lambda _: False)
    same(results, solve(arrays, backend, direction=direction, gate=gate))


def same(results, others):
    for got, want in zip(results, others, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.fixture(params=["with threadpoolctl", "without"])
def blas(request, monkeypatch, two_threads_for_blas):
    if request.param == "without":
        monkeypatch.setattr(threads, "_blas", lambda: None)


SMALL_PARTS = "ignore:triangle_multiplicative_update. max_memory is:RuntimeWarning"


@pytest.mark.filterwarnings(SMALL_PARTS)
@pytest.mark.parametrize("shape", [(2, 33, 17, 16), (1, 65, 8, 5), (300, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("limit", [None, 300_000])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_the_thread_count_changes_no_bit(backend, blas, direction, gate, limit, shape):
    arrays = update(shape, gate=gate, mask=False)
    results = []
    try:
        for count in (1, 2, 3):
            fusedops.set_num_threads(count)
            options = {"direction": direction, "gate": gate, "max_memory": limit}
            results.append(solve(arrays, backend, **options))
    finally:
        fusedops.set_num_threads(None)
    for result in results[1:]:
        same(result, results[0])


@pytest.mark.filterwarnings(SMALL_PARTS)
@pytest.mark.parametrize("N", [17, 33])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
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

    inside = []

    def watched(*args, real=on_cpu._Update.projected):
        inside.extend(counts())
        return real(*args)

    monkeypatch.setattr(on_cpu._Update, "projected", watched)
    before, arrays = counts(), update(shape)
    assert set(before) == {2}
    solve(arrays, backend)
    assert set(inside) == {1}
    assert counts() == before

    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(on_cpu._Update, "projected", broken)
    with pytest.raises(RuntimeError, match="broken"):
        solve(arrays, backend)
    assert counts() == before


@pytest.fixture
def most(monkeypatch):
    """Return a function that returns the peak bytes of temporaries since its last call."""
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


@pytest.mark.filterwarnings(SMALL_PARTS)
@pytest.mark.parametrize("share", [2, 4, 8])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("gate", ["output", "hidden"])
def test_temporaries_stay_below_the_limit(backend, most, monkeypatch, gate, direction, share):
    """Temporaries that aren't counted here are as small as a mask or a weight."""
    arrays = update((2, 96, 12, 10), gate=gate, mask=True)
    options = {"direction": direction, "gate": gate}
    cotangent = np.random.default_rng(1).normal(size=arrays["x"].shape)
    for training in (False, True):
        peaks = []
        for limit in (None, 1 << 20 if training else (1 << 22) // share):
            if training:
                _, back = triangle_multiplicative_update.vjp(
                    **arrays, **options, max_memory=limit, backend=backend
                )
                most()
                back(cotangent)
            else:
                most()
                triangle_multiplicative_update(
                    **arrays, **options, max_memory=limit, backend=backend
                )
            peaks.append(most())
        assert peaks[1] <= limit < peaks[0]


@pytest.mark.filterwarnings(SMALL_PARTS)
@pytest.mark.parametrize("gate", ["output", "hidden"])
def test_temporaries_of_bfloat16_stay_below_the_limit(backend, most, gate):
    torch = pytest.importorskip("torch")
    arrays = update((2, 96, 12, 10), gate=gate, mask=True)
    tensors = {n: None if a is None else torch.tensor(a).bfloat16() for n, a in arrays.items()}
    tensors["x"].requires_grad_()
    for training in (False, True):
        peaks = []
        for limit in (None, 1 << 19):
            options = {"gate": gate, "max_memory": limit, "backend": backend}
            most()
            out = triangle_multiplicative_update(**tensors, **options)
            if training:
                most()
                out.float().sum().backward()
            peaks.append(most())
        assert peaks[1] <= 1 << 19 < peaks[0]


@pytest.mark.filterwarnings(SMALL_PARTS)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_less_memory_takes_a_little_longer(backend, monkeypatch, direction):
    """Parts are tiles and strips: half of the memory takes at most three times the work."""
    if backend == "numba" and not isa.why_not():
        pytest.skip("both backends cut an update up by the same code")
    N, C, H = 128, 4, 8
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
    for limit in (None, *(1 << power for power in range(22, 9, -1))):
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


def of_tensors(arrays, backend, dtype="float32", **options):
    """Return the update of tensors and all gradients, as tensors."""
    torch = pytest.importorskip("torch")
    given = {
        name: None if a is None else torch.as_tensor(a).to(getattr(torch, dtype)).requires_grad_()
        for name, a in arrays.items()
    }
    out = triangle_multiplicative_update(**given, **options, backend=backend)
    leaves = [tensor for tensor in given.values() if tensor is not None]
    cotangent = torch.as_tensor(np.random.default_rng(1).normal(size=out.shape)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent)


@pytest.mark.parametrize("rounded", ["highest", "medium"])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_products_by_torch_have_the_digits_of_float32(
    backend, direction, gate, rounded, monkeypatch
):
    """Torch may round the factors of its own products; ours are asked for by `precision`."""
    torch = pytest.importorskip("torch")
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


@pytest.mark.parametrize("shape", [(2, 7, 24, 20), (2, 40, 24, 20), (1, 0, 8, 8)], ids=str)
@pytest.mark.parametrize("precision", [None, "ieee"])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_bfloat16_is_rounded_as_asked(backend, direction, gate, precision, shape):
    torch = pytest.importorskip("torch")
    arrays = update(shape, dtype="float64", gate=gate, mask=True)
    arrays = {n: a if a is None else torch.as_tensor(a).bfloat16() for n, a in arrays.items()}
    options = {"direction": direction, "gate": gate}
    exact = of_tensors(arrays, "torch", "float64", **options)
    found = of_tensors(arrays, backend, "bfloat16", precision=precision, **options)
    # Eight binary digits: 1.7e-3 for a result alone, and as much for o, which is kept. Cotangents,
    # in which much cancels, take a few times that; up to ten roundings are in one if asked for.
    tolerance = 8e-3 if precision == "ieee" or backend == "numba" else 1.5e-2
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= tolerance * want.norm()


def test_torch_without_onednn_multiplies_bfloat16_itself(backend, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert products.has_bfloat16.__wrapped__()


@pytest.mark.parametrize("shape", [(2, 7, 24, 20), (2, 40, 24, 20)], ids=str)
def test_bfloat16_without_vectors_for_it_is_computed_in_float32(backend, monkeypatch, shape):
    torch = pytest.importorskip("torch")

    def never(*args):
        raise AssertionError("a product of bfloat16")

    monkeypatch.setattr(on_cpu, "has_bfloat16", lambda: False)
    for product in ("dot", "matmul"):
        monkeypatch.setattr(products.InBfloat16, product, never)
    arrays = update(shape, dtype="float64", mask=True)
    arrays = {n: torch.as_tensor(a).bfloat16() for n, a in arrays.items() if a is not None}
    exact = of_tensors(arrays, "torch", "float64", direction="outgoing", gate="output")
    found = of_tensors(arrays, backend, "bfloat16", direction="outgoing", gate="output")
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= 8e-3 * want.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["output", "hidden"])
def test_the_thread_count_changes_no_bit_of_tensors(backend, gate, dtype):
    torch = pytest.importorskip("torch")
    pytest.importorskip("threadpoolctl")
    arrays = update((2, 33, 17, 16), gate=gate, mask=False)
    results, before = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            fusedops.set_num_threads(count)
            torch.set_num_threads(count)
            results.append(of_tensors(arrays, backend, dtype, gate=gate))
            assert torch.get_num_threads() == count
    finally:
        fusedops.set_num_threads(None)
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))
