"""Products of float32 on tensor cores: digits, range, Inf and NaN, layouts, parts of sums.

Kernels are interpreted, or run on a GPU with ``pytest -m gpu``.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import fusedops
from fusedops import samples
from fusedops._catalogue import typical
from fusedops.testing import CASES, check, error

torch = pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

from fusedops._kept import Kept, keeping  # noqa: E402
from gpukern import products  # noqa: E402
from gpukern.precision import EMULATED, of_float32  # noqa: E402
from gpukern.products import (  # noqa: E402
    LEAST,
    Factor,
    multiply,
    multiply_halves,
    split,
    split_blocks,
    split_by_most,
    split_for_both,
    sum_over_rows,
)
from gpukern.trimul.plan import Types  # noqa: E402
from gpukern.trimul.products import products as multiply_emulated  # noqa: E402


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
    "near the least": lambda *shape, device: torch.randn(*shape, device=device) * 1e-17,
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


def of_different_rows(*shape, device):
    """Rows and columns whose numbers are alike within each, over nine decades."""
    x = torch.randn(*shape, device=device)
    x *= 10 ** (-9 * torch.rand(shape[-2], 1, device=device))
    return x * 10 ** (-9 * torch.rand(shape[-1], device=device))


# Factors of which halves don't serve some blocks.
FALLING_BACK = "of 60 decades", "of 12 decades", "one huge", "of different rows"


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("kind", [*FACTORS, "of different rows"])
def test_errors_of_blocks_are_at_most_twice_those_of_float32(kind, sums, device):
    """In norm and for each element, of products and of sums over rows."""
    torch.manual_seed(9)
    make = FACTORS.get(kind, of_different_rows)
    a, b = (make(1, *shape, device=device) for shape in ((200, 136), (136, 150)))
    if kind in ("of 60 decades", "one huge"):
        b = torch.randn_like(b)
    out = a.new_full((1, 200, 150), torch.nan)
    left, right = split_blocks(a[0]), split(b, 1)
    if sums:
        left, right = split_blocks(a[0].T.contiguous()).mT, split_blocks(b[0])
    multiply_halves(left, right, out)
    own = errors(a @ b, a, b)
    # Six products of bfloat16 have the last error.
    least = (4 + 17**0.5) * 2.0**-24 if kind in FALLING_BACK and device == "cuda" else 2.0**-23
    for found, by_torch in zip(errors(out, a, b), own, strict=True):
        assert found <= max(2 * by_torch, least), (found, by_torch)


@pytest.mark.parametrize("exponent", [-53, -54, -55, -57, -59])
def test_two_small_blocks_keep_their_low_digits(exponent, device):
    """Their largest numbers are just above and below the least that halves serve."""
    torch.manual_seed(10)
    a, b = (
        (1 + torch.rand(64, n, device=device)) * torch.randn(64, n, device=device).sign()
        for n in (40, 24)
    )
    out = torch.full((1, 40, 24), torch.nan, device=device)
    small = 2.0**exponent
    multiply_halves(split_blocks(a * small).mT, split_blocks(b * small), out)
    assert errors((out / small / small)[0], a.T, b)[0] < 4e-7


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
    left, right = split_blocks(a[0]).mT, split_blocks(b[0])
    sums = torch.full((3, 40, 24), torch.nan, device=device)
    multiply_halves(left, right, sums, parts=3)
    assert errors(sums.sum(0), a[0].T, b[0])[1] < 2e-7


@pytest.mark.parametrize("K", [65, 130, 200])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_product_without_matrices_is_a_sum_of_parts(layout, K, device):
    """The last parts may be shorter, or have no terms; terms need not be multiples of eight."""
    torch.manual_seed(6)
    a, b = torch.randn(1, K, 40, device=device), torch.randn(1, K, 24, device=device)
    left, right = split(LAYOUTS[layout](a), 1), split(b, 1)
    for parts in (1, 3, 5):
        sums = torch.full((parts, 40, 24), torch.nan, device=device)
        multiply_halves(left.mT, right, sums, parts=parts)
        assert errors(sums.sum(0), a[0].T, b[0])[1] < 3e-7


@pytest.mark.parametrize("sizes", [(37, 8, 24, 16), (5, 3, 7, 9), (90, 16, 2000, 40)], ids=str)
def test_columns_of_another_matrix_come_first(sizes, device):
    rows, ahead, terms, width = sizes
    first, x = torch.randn(rows, ahead, device=device), torch.randn(rows, terms, device=device)
    both = torch.cat([first, x], 1)
    found, expected = split(x[None], 2, before=first), split(both[None], 2)
    assert torch.equal(found.halves, expected.halves)
    assert torch.equal(found.scales, expected.scales)
    assert found[2:] == expected[2:]
    weight, bias = (torch.randn(n, width, device=device) for n in ((ahead + terms), 1))
    # Behind the result's columns are others.
    out = torch.full((rows, width + 3), torch.nan, device=device)
    for dtype in (torch.float32, torch.float64):
        given = [a.to(dtype) for a in (x, first, weight, bias[0])]
        to = out.to(dtype)
        multiply(to[:, :width], Factor(*given[:2], summed=False), given[2], "ieee", given[3])
        expected = both.double() @ weight.double() + bias
        assert error(to[:, :width].cpu(), expected.cpu()) < 1e-6
        assert to[:, width:].isnan().all()


def test_one_scale_serves_a_product_whose_largest_number_is_known(device):
    """Places behind a matrix's columns have zeros."""
    torch.manual_seed(7)
    a, b, c = (torch.randn(2, n, 37, device=device) for n in (33, 35, 29))
    a[1] *= 1e-20
    room, most = a.new_zeros(2, 33, 40), torch.zeros(2, dtype=torch.int32, device=device)
    found = room[..., :35]
    multiply_halves(split(a, 2), split(b.mT, 1), found, most=most)
    assert torch.equal(most.view(torch.float32), found.abs().amax((1, 2)))
    out = a.new_full((2, 33, 29), torch.nan)
    weights = c[..., :35].mT
    multiply_halves(split_by_most(found, most), split(weights, 1), out)
    for product, x, w in zip(out, found, weights, strict=True):
        assert errors(product, x, w)[0] < 2e-7


@pytest.mark.skipif(products.hopper is None, reason="this Triton's Gluon is another")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_hopper_leaves_rows_that_halves_do_not_serve(parts, add, monkeypatch):
    """Another kernel writes them, and nothing else."""
    monkeypatch.setattr(products, "_on_hopper", lambda device: True)
    monkeypatch.setattr(products, "_hopper_launcher", lambda aligned: lambda *args: None)
    torch.manual_seed(8)
    rows = 130 if parts < 3 else 900
    a, b = torch.randn(rows, 136), torch.randn(rows, 150)
    a[100, 3], b[3, 140] = 1e-20, 1e-25
    if parts == 3:
        # Parts of five blocks, of which only the second has a bad one.
        a, b = a.roll(400, 0), b.roll(400, 0)
    if parts == 1:
        left, right = split_blocks(a.T), split(b[None], 1)
        lost = torch.zeros(136, 150, dtype=torch.bool)
        lost[:64], lost[:, 128:] = True, True
        lost, want = lost[None], (a.T @ b)[None]
    else:
        left, right = split_blocks(a).mT, split_blocks(b)
        lost = torch.zeros(parts, 136, 150, dtype=torch.bool)
        # Blocks of 64 rows and 128 columns, and parts of 128 or 320 rows.
        lost[parts - 2, :128], lost[parts - 2, :, 128:] = True, True
        size = 128 if parts == 2 else 320
        each = zip(a.split(size), b.split(size), strict=True)
        want = torch.stack([x.T @ y for x, y in each])
    out = torch.full(want.shape, 7.0)
    multiply_halves(left, right, out, parts=parts, add=add)
    assert (out[~lost] == 7).all()
    torch.testing.assert_close(out[lost], want[lost] + 7 * add, rtol=1e-5, atol=1e-4)


def test_a_frozen_weight_is_split_once_for_a_graph(monkeypatch):
    """There smaller products are made of halves, too."""
    cpu, splits, split = torch.device("cpu"), [], products.split
    monkeypatch.setattr(products, "of_float32", lambda device: EMULATED)
    monkeypatch.setattr(products, "_WORK_OF_ONE", 0)
    monkeypatch.setattr(products, "_WORK_IN_GRAPHS", 0)
    monkeypatch.setattr(
        products, "split", lambda x, *a, **k: splits.append(x.shape) or split(x, *a, **k)
    )
    a, weight = torch.randn(20, 64), torch.randn(30, 64)
    keeper = Kept([weight], cpu)

    def multiplied():
        out = torch.empty(20, 30)
        products.multiply(out, products.Factor(a, summed=False), weight.T, "float32")
        return out

    with keeping(keeper):
        for _ in range(2):
            torch.testing.assert_close(multiplied(), a @ weight.T)
        assert sorted(splits) == [(1, 20, 64), (1, 20, 64), (1, 64, 30)]
        weight.mul_(2)
        assert keeper.changed()
        keeper.renew()
        torch.testing.assert_close(multiplied(), a @ weight.T)
    splits.clear()
    multiplied()
    assert not splits


@pytest.mark.parametrize("terms", [96, 320])
def test_halves_that_only_both_products_repay(terms, monkeypatch):
    """Rows, and a sum over rows, share halves of a factor; a product alone makes none."""
    monkeypatch.setattr(products, "of_float32", lambda device: EMULATED)
    monkeypatch.setattr(products, "_WORK", 0)
    torch.manual_seed(9)
    rows, columns = 512, 128
    a, b = torch.randn(rows, terms), torch.randn(rows, columns)
    weight, out = torch.randn(terms, columns), torch.empty(rows, columns)
    factor, other = Factor(a), Factor(b)
    multiply(out, factor, weight, "float32")
    assert not factor.ready
    split_for_both(factor, columns, "float32")
    assert factor.ready == (terms == 320)
    multiply(out, factor, weight, "float32")
    sums = sum_over_rows(factor, other, "float32")
    assert other.ready == (terms == 320)
    assert max(*errors(out, a, weight)[:1], *errors(sums, a.T, b)[:1]) < 5e-7


@pytest.mark.gpu
@pytest.mark.parametrize("K", [1, 128, 4096])
@pytest.mark.parametrize(
    ("kind", "scale"), [("normal", 1), ("positive", 1), ("of 12 decades", 1), ("normal", 1e-18)]
)
def test_six_products_of_bfloat16_have_the_digits_of_float32(kind, scale, K):
    """As in small updates; tensor cores cut sums off, at random, and more often with more terms.

    Float32's own products have up to 14 and 76 units here, of 128 and 4,096 terms.
    """
    if of_float32(torch.device("cuda", 0)) != EMULATED:
        pytest.skip("this GPU multiplies float32 itself")
    torch.manual_seed(K)
    a, b = (FACTORS[kind](2, *shape, device="cuda") * scale for shape in ((72, K), (K, 136)))
    a[:, 3] = 0
    found = a.new_full((2, 72, 136), torch.nan)
    update = SimpleNamespace(dtype=torch.float32, precision=EMULATED, ours=True, halved=False)
    update.types = Types(tl.float32, tl.float32, EMULATED, True)
    multiply_emulated(update, a, b, found)
    want, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((found.double() - want).abs() <= most * (4 + (K / 8) ** 0.5) * 2**-24 + 2**-126).all()


@pytest.fixture
def everywhere(monkeypatch):
    """Have products of all sizes be made of halves, and sums over rows be made in parts."""
    from gpukern.trimul import forward, plan
    from gpukern.trimul import products as of_triangles

    for module, name in ((products, "_TERMS"), (products, "_SHORT"), (of_triangles, "_SHORT")):
        monkeypatch.setattr(module, name, 16)
    for name in ("_WORK", "_WORK_OF_ONE", "LEAST"):
        monkeypatch.setattr(products, name, 0)
    for module in (products, plan):
        monkeypatch.setattr(module, "of_float32", lambda device: EMULATED)
    monkeypatch.setattr(plan, "FEW", 0)
    # Rows of more than 128 channels are normalized before.
    monkeypatch.setattr(forward, "MANY", 0)


# A gate of hidden channels, and more than 128 channels.
MORE = "trimul hidden-incoming", "trimul wide"


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in typical(CASES).values()
        if case.primitive.family in ("trimul", "so2", "generated")
        and "gate" not in case.primitive.name
    ]
    + [case for case in CASES if f"{case.primitive.family} {case.name}" in MORE],
    ids=str,
)
def test_ops_agree_with_the_reference(case, everywhere):
    """In the interpreter, whose small cases would multiply float32 itself."""
    check(case, "torch", "triton", "float32", alone=False)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "triangle_multiplicative" in case.primitive.name], ids=str
)
def test_triangles_agree_where_torch_multiplies(case, monkeypatch):
    """As in large updates of float32 whose factors aren't rounded."""
    from gpukern.trimul import plan

    monkeypatch.setattr(plan, "FEW", 0)
    check(case, "torch", "triton", "float32", alone=False)


def far(found, want):
    """Return the largest error of tensors in norm."""
    pairs = zip(found, want, strict=True)
    return max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def error_of_triangle(given, device, **options):
    """Return the largest error of a float32 update and of its gradients by all arrays."""
    found, given = {}, {name: a for name, a in given.items() if a is not None}
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = {k: torch.tensor(a, dtype=dtype, device=device) for k, a in given.items()}
        wanted = [leaf.requires_grad_() for leaf in leaves.values()]
        out = fusedops.triangle_multiplicative_update(backend=backend, **options, **leaves)
        dout = torch.linspace(0, 99, out.numel(), dtype=torch.float64, device=device).sin()
        dout = dout.view(out.shape).to(dtype)
        found[dtype] = [out, *torch.autograd.grad(out, wanted, dout)]
    return far(found[torch.float32], found[torch.float64])


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["incoming", "outgoing"])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize(
    ("N", "C", "H"),
    [
        (264, 128, 128),
        (264, 64, 128),
        (264, 192, 192),
        (261, 64, 17),
        (259, 16, 13),
        (257, 136, 33),
    ],
)
def test_a_large_triangle_has_the_digits_of_float32(N, C, H, gate, direction):
    rng = np.random.default_rng(C)
    given = samples.pair(1, N, C, H, rng, gate=gate, mask=True, biases=True)
    assert error_of_triangle(given, "cuda", gate=gate, direction=direction) < 2e-6


SCALED = {
    "row of p_in_weight": ("p_in_weight", slice(3, 4), (1e-24, 1e-30)),
    "row of g_in_weight": ("g_in_weight", slice(3, 4), (1e-24,)),
    "row of p_out_weight": ("p_out_weight", slice(3, 4), (1e-24,)),
    "p_out_weight": ("p_out_weight", slice(None), (1e-23, 1e20)),
    "norm_out_weight": ("norm_out_weight", slice(None), (1e20,)),
    "mask": ("mask", slice(None), (1e-10,)),
    "a place of the mask": ("mask", (0, 1, 2), (1e4,)),
}


@pytest.mark.parametrize("scaled", SCALED)
def test_triangles_with_large_and_small_weights(scaled, everywhere, monkeypatch):
    """Squares of such weights leave float32's range, as no bound of a product may."""
    from gpukern.trimul import backward

    monkeypatch.setattr(backward, "_ALONE", 0)
    name, part, factors = SCALED[scaled]
    for factor in factors:
        given = samples.pair(1, 20, 16, 16, np.random.default_rng(1), mask=True)
        given["norm_in_bias"] = given["norm_in_bias"] * 0.1
        given["mask"] = np.ones((1, 20, 20)) if name == "mask" else given["mask"]
        given[name] = np.array(given[name], float)
        given[name][part] *= factor
        assert error_of_triangle(given, "cpu") < 5e-6, factor


# The interpreter subtracts with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_cotangent_that_is_not_finite_spoils_no_gradient_silently(
    number, everywhere, monkeypatch
):
    """Every number is right or NaN, as one scale serves a plane of pairs."""
    from gpukern.trimul import backward

    monkeypatch.setattr(backward, "_ALONE", 0)
    given = samples.pair(1, 20, 16, 16, np.random.default_rng(1), mask=True)
    found = {}
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = {k: torch.tensor(a, dtype=dtype) for k, a in given.items() if a is not None}
        wanted = [leaf.requires_grad_() for leaf in leaves.values()]
        out = fusedops.triangle_multiplicative_update(backend=backend, **leaves)
        dout = torch.ones_like(out)
        dout[0, 3, 4, 5] = number
        found[dtype] = torch.autograd.grad(out, wanted, dout)
    for ours, true in zip(found[torch.float32], found[torch.float64], strict=True):
        right = ours.isfinite() & true.isfinite()
        torch.testing.assert_close(ours[right].double(), true[right], rtol=1e-3, atol=1e-4)
        assert not (ours.isfinite() & ~true.isfinite()).any()


def error_of_convolution(E, C, D, G, device, change=lambda message: None, **options):
    """Return the largest error of a float32 convolution and of its gradients by all arrays."""
    shapes = [(E, 9, C), (G + 3 * D, 3 * C), (4 * D, 2 * C), (2 * D, C), (G + 3 * D,), (E, 6 * C)]
    names = "message", "weight_m0", "weight_m1", "weight_m2", "bias", "radial"
    found = {}
    numbers = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    change(numbers[0])
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = [a.to(torch.float32).to(dtype).requires_grad_() for a in numbers]
        given = {"gate_channels": G, "backend": backend, **options}
        out = fusedops.so2_convolution(**dict(zip(names, leaves, strict=True)), **given)
        out = out if G else (out,)
        douts = [part.detach().sign() for part in found.get(torch.float64, out)[: len(out)]]
        douts = [dout.to(dtype) for dout in douts]
        found[dtype] = [*out, *torch.autograd.grad(out, leaves, douts)]
    return far(found[torch.float32], found[torch.float64])


@pytest.mark.gpu
def test_a_large_convolution_has_the_digits_of_float32():
    torch.manual_seed(5)
    assert error_of_convolution(20_000, 128, 128, 256, "cuda") < 2e-6


def one_small(message):
    message[3, 4, 5] = 1e-15


@pytest.mark.parametrize("C", [128, 24])
@pytest.mark.parametrize("G", [0, 8])
@pytest.mark.parametrize("change", [lambda message: None, one_small], ids=["normal", "one small"])
def test_blocks_of_a_convolution_have_the_digits_of_float32(change, G, C, everywhere):
    """Halves of messages come from a gradient's kernel if blocks of channels begin with orders."""
    torch.manual_seed(6)
    assert error_of_convolution(70, C, 16, G, "cpu", change) < 1e-6


@pytest.mark.parametrize("radial", [False, True])
@pytest.mark.parametrize("G", [0, 8])
def test_small_edges_of_a_convolution_keep_their_digits(radial, G, everywhere, monkeypatch):
    """Edges near a cutoff, in the forward and in forces, which take no sum over edges."""
    monkeypatch.setattr(products, "split_blocks", None)
    torch.manual_seed(7)
    E, C, D = 70, 16, 8
    sizes = {"m0": (G + 2 * D, 2 * C), "m1": (2 * D, C)}
    weights = [torch.randn(size) / C**0.5 for size in sizes.values()]
    near = 2.0 ** (-torch.arange(E) / 2)
    given = {"message": torch.randn(E, 4, C) * near[:, None, None]}
    if radial:
        given |= {"radial": torch.randn(E, 3 * C), "message": torch.randn(E, 4, C)}
        given["radial"] *= near[:, None]

    def found(dtype, backend):
        arrays = {name: array.to(dtype).requires_grad_() for name, array in given.items()}
        message = arrays.pop("message")
        some = [weight.to(dtype) for weight in weights]
        y = fusedops.so2_convolution(message, *some, **arrays, gate_channels=G, backend=backend)
        y = y if isinstance(y, tuple) else (y,)
        dy = [torch.cos(torch.arange(each.numel())).view_as(each).to(dtype) for each in y]
        dy = [each * near.to(dtype).view(-1, *[1] * (each.ndim - 1)) for each in dy]
        return *y, *torch.autograd.grad(y, [message, *arrays.values()], dy)

    for one, want in zip(
        found(torch.float32, "triton"), found(torch.float64, "torch"), strict=True
    ):
        one, want = one.double().flatten(1), want.flatten(1)
        off = (one - want).norm(dim=1) / want.norm(dim=1)
        assert off.max() < 1e-6


@pytest.mark.gpu
def test_layers_of_many_edges_have_our_products(monkeypatch):
    from fusedops import _products

    torch.manual_seed(0)
    served, ours = [], _products.LinearProducts._linear
    note = staticmethod(lambda *given: served.append(given) or ours(*given))
    monkeypatch.setattr(_products.LinearProducts, "_linear", note)
    x = torch.randn(60_000, 128, device="cuda", requires_grad=True)
    layers = [torch.nn.Linear(128, width, device="cuda") for width in (64, 512)]
    cotangent = torch.randn(60_000, 512, device="cuda")
    for layer in layers:
        with _products.linear_products(x):
            found = layer(x)
        given = cotangent[:, : found.shape[1]]
        first = torch.autograd.grad(found, (x, layer.weight), given)
        exact = layer.double()
        wide = x.detach().double().requires_grad_()
        want = exact(wide)
        wanted = torch.autograd.grad(want, (wide, exact.weight), given.double())
        layer.float()
        # Torch's float32 is off by as much in sums over edges.
        bounds = 5e-7, 5e-7, 2e-6
        for a, b, bound in zip((found, *first), (want, *wanted), bounds, strict=True):
            assert ((a.double() - b).norm() / b.norm()).detach() < bound
    assert len(served) == 1
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    with _products.linear_products(x):
        layers[1](x)
    assert len(served) == 1
