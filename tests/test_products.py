"""Products of float32 on tensor cores: digits, range, Inf and NaN, layouts, parts of sums.

Kernels are interpreted, or run on a GPU with ``pytest -m gpu``.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpukern.precision import EMULATED, of_float32  # noqa: E402
from gpukern.products import LEAST, multiply_halves, split  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and of_float32(torch.device("cuda", 0)) != EMULATED:
        pytest.skip("this GPU multiplies float32 itself")
    return request.param


def wide(*shape, device, decades=60):
    x = torch.randn(*shape, device=device)
    return x * 10 ** (decades * (torch.rand(*shape, device=device) - 0.5))


def one_huge(*shape, device):
    x = torch.randn(*shape, device=device)
    x[..., shape[-2] // 2, shape[-1] // 2] = 1e30
    return x


def with_zeros(*shape, device):
    x = torch.randn(*shape, device=device)
    x[..., ::3, :] = 0
    x[..., ::5] = 0
    return x


def cancelling(*shape, device):
    """Factors whose products all but cancel, with others like them."""
    x = torch.ones(shape, device=device) + 1e-4 * torch.randn(*shape, device=device)
    x[..., ::2] *= -1
    return x


FACTORS = {
    "normal": lambda *shape, device: torch.randn(*shape, device=device),
    "positive": lambda *shape, device: torch.rand(*shape, device=device),
    "of 60 decades": wide,
    "of 12 decades": lambda *shape, device: wide(*shape, device=device, decades=12),
    "near the least": lambda *shape, device: torch.randn(*shape, device=device) * 1e-19,
    "near the most": lambda *shape, device: torch.randn(*shape, device=device) * 1e17,
    "one huge": one_huge,
    "zeros": with_zeros,
    "cancelling": cancelling,
}
LAYOUTS = {
    "rows": lambda a: a.contiguous(),
    "columns": lambda a: a.mT.contiguous().mT,
    "every second": lambda a: torch.stack([a, a], 3).flatten(2)[..., ::2],
}


def errors(product, a, b):
    """Return errors of a product in norm, and of each element to Σ |a b|."""
    want, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (product.double() - want).abs()
    # Float32 has no less than its least number.
    error = (error - 2.0**-126 * a.shape[-1]).clamp(min=0)
    norm = float(want.norm())
    return float(error.norm()) / norm if norm else 0.0, float(
        (error / most.clamp(min=1e-300)).max()
    )


def product_of_halves(a, b, **options):
    out = a.new_full((len(a), a.shape[1], b.shape[2]), torch.nan)
    multiply_halves(split(a, 2), split(b, 1), out, **options)
    return out


@pytest.mark.parametrize("K", [LEAST, 600, pytest.param(8192, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", FACTORS)
def test_errors_are_at_most_twice_those_of_float32(kind, K, device):
    """In norm and for each element; float32's own error is that of torch's product, or its unit."""
    if K == 8192 and device == "cpu":
        pytest.skip("takes the interpreter minutes")
    torch.manual_seed(K)
    a, b = (FACTORS[kind](2, *shape, device=device) for shape in ((72, K), (K, 136)))
    if kind in ("of 60 decades", "one huge"):
        # Products stay in the range of float32.
        b = torch.randn_like(b)
    own = errors(a @ b, a, b)
    for found, by_torch in zip(errors(product_of_halves(a, b), a, b), own, strict=True):
        assert found <= 2 * max(by_torch, 2.0**-24), (found, by_torch)


@pytest.mark.parametrize("layout_of_b", LAYOUTS)
@pytest.mark.parametrize("layout_of_a", LAYOUTS)
def test_any_layout_and_odd_sizes(layout_of_a, layout_of_b, device):
    """Lines of halves end with zeros."""
    torch.manual_seed(1)
    for M, K, N in ((72, 48, 40), (33, 51, 29)):
        a, b = torch.randn(3, M, K, device=device), torch.randn(3, K, N, device=device)
        found = product_of_halves(LAYOUTS[layout_of_a](a), LAYOUTS[layout_of_b](b))
        assert max(errors(found, a, b)) < 5e-7


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_inf_and_nan_are_where_ieee_puts_them(device):
    torch.manual_seed(2)
    a, b = torch.randn(1, 64, 64, device=device), torch.randn(1, 64, 64, device=device)
    a[0, 3, 5], a[0, 7, 1], a[0, 9, 9], b[0, 2, 8] = torch.inf, torch.nan, 3e37, -torch.inf
    want = (a.double() @ b.double()).float()
    torch.testing.assert_close(product_of_halves(a, b), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_product_is_scaled_and_added(device):
    torch.manual_seed(3)
    a, b = torch.randn(2, 40, 24, device=device), torch.randn(2, 24, 16, device=device)
    # Rows of an output that has a gap behind each.
    room = torch.randn(2, 40, 20, device=device)
    before = room.clone()
    multiply_halves(split(a, 2), split(b, 1), room[..., :16], factor=-0.5, add=True)
    torch.testing.assert_close(room[..., :16], before[..., :16] - 0.5 * (a @ b))
    assert torch.equal(room[..., 16:], before[..., 16:])


@pytest.mark.parametrize("kind", ["normal", "of 60 decades"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_parts_of_a_sum_are_a_batch(layout, kind, device):
    """The last part is shorter: nothing behind the matrices is read."""
    torch.manual_seed(4)
    room = torch.full((1, 1100, 40), torch.nan, device=device)
    room[:, :1000] = FACTORS[kind](1, 1000, 40, device=device)
    a, b = LAYOUTS[layout](room)[:, :1000], torch.randn(1, 1000, 24, device=device)
    left, right = split(a, 1, parts=3).mT, split(b, 1, parts=3)
    sums = torch.full((3, 40, 24), torch.nan, device=device)
    multiply_halves(left, right, sums)
    assert errors(sums.sum(0), a[0].T, b[0])[1] < 2e-7
