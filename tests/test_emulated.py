"""Products of float32 on a GPU's tensor cores; run with ``pytest -m gpu``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

from gpukern.precision import EMULATED, of_float32  # noqa: E402
from gpukern.trimul.products import products  # noqa: E402

pytestmark = pytest.mark.gpu

FACTORS = {
    "normal": torch.randn,
    "positive": torch.rand,
    "wide": lambda *shape, **kind: (
        torch.randn(*shape, **kind) * 10 ** (30 * torch.rand(*shape, **kind) - 15)
    ),
    "near the least": lambda *shape, **kind: torch.randn(*shape, **kind) * 1e-18,
}


@pytest.fixture(autouse=True)
def _on_tensor_cores():
    if of_float32(torch.device("cuda", 0)) != EMULATED:
        pytest.skip("this GPU multiplies float32 itself")


def emulated(a, b):
    """Return products of float32 matrices as the sums of products of bfloat16."""
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    update = SimpleNamespace(dtype=torch.float32, precision=EMULATED, ours=True, types=[tl.float32])
    products(update, a, b, out)
    return out


@pytest.mark.parametrize("K", [1, 128, 4096])
@pytest.mark.parametrize("kind", FACTORS)
def test_emulated_products_have_the_digits_and_range_of_float32(kind, K):
    """The bound is of Σ |a b|: float32's own rounding errors, and the tensor cores' sums."""
    torch.manual_seed(K)
    a, b = (FACTORS[kind](2, *shape, device="cuda") for shape in ((72, K), (K, 136)))
    a[:, 3] = 0
    a[:, :, ::2] *= -1 if kind == "normal" else 1
    want, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (emulated(a, b).double() - want).abs()
    assert (error <= most * (4 + K / 256) * 2**-24 + 2**-126).all()


def test_emulated_products_of_inf_and_nan():
    a, b = torch.randn(1, 64, 64, device="cuda"), torch.randn(1, 64, 64, device="cuda")
    a[0, 3, 5], a[0, 7, 1], a[0, 9, 9], b[0, 2, 8] = torch.inf, torch.nan, 3e38, -torch.inf
    want, got = (a.double() @ b.double()).float(), emulated(a, b)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
