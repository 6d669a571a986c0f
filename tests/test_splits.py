"""Halves of messages, which the kernels that make these write for a graph's products."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import fusedops  # noqa: E402
from fusedops._frame import registry  # noqa: E402
from fusedops._frame.registry import primitives  # noqa: E402
from fusedops._kept import Kept, keeping  # noqa: E402
from fusedops.harmonics.op import wigner_d  # noqa: E402
from fusedops.so2.op import columns, orders  # noqa: E402
from gpukern import products  # noqa: E402
from gpukern.precision import EMULATED  # noqa: E402

# Numbers that are infinite, or no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
E, N, C, LMAX = 19, 5, 16, 2


@pytest.fixture
def keeper(monkeypatch):
    """Have products of all sizes be made of halves, in a graph whose kernels write these."""
    monkeypatch.setattr(products, "of_float32", lambda device: EMULATED)
    for name in ("_WORK_IN_GRAPHS", "_WORK_OF_ONE", "LEAST"):
        monkeypatch.setattr(products, name, 1)
    with keeping(made := Kept([], CPU, splits=True)):
        yield made


def wide(*shape):
    """Return numbers of which some lose digits in halves, beside zeros, infinity and NaN."""
    x = torch.randn(shape)
    x[1] *= 1e-20
    x[2] *= 1e25
    x[3, ..., ::3] *= 1e-12
    x[4] = 0
    x[5, ..., 1], x[6, ..., 2] = torch.inf, torch.nan
    return x


def run(name, given, outputs):
    primitive = primitives[name]
    kernel = registry._registered(registry.BACKENDS[0], name, primitive.family)
    a = primitive.Arguments(*[given.get(field) for field in primitive.Arguments._fields])
    y = primitive.Outputs(*[outputs.get(field) for field in primitive.Outputs._fields])
    kernel(a, y)


def assert_split(found, rows, mmax, before=None):
    """Compare halves of orders with splits of an array's (E, M, C)."""
    flat = rows.flatten(1)
    assert len(found) == mmax + 1
    for m, (own, _) in enumerate(orders(LMAX, mmax)):
        matrix = flat[None, :, columns(own, rows.shape[2])]
        want = products.split(matrix, 2, before=None if m else before)
        assert (found[m].shape, found[m].strict) == (want.shape, True)
        torch.testing.assert_close(
            found[m].halves.view(torch.int16), want.halves.view(torch.int16), rtol=0, atol=0
        )
        torch.testing.assert_close(found[m].scales, want.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mmax", [2, 1])
@pytest.mark.parametrize("way", ["forth", "undo"])
def test_rotations_write_halves(way, mmax, keeper):
    torch.manual_seed(0)
    M, ends = sum(own.stop - own.start for own, _ in orders(LMAX, mmax)), 1 + (way == "forth")
    edges = fusedops.Edges(torch.arange(2 * E).reshape(2, E) % N, N)
    wigner = wigner_d(torch.randn(E, 3), LMAX, packed=True)
    scales = torch.ones(E, 1)
    scales[:8, 0] = torch.tensor([1, 1e-20, 1e25, 1e-30, 0, torch.inf, torch.nan, 1])
    out = torch.empty(E, M, ends * C)
    given = {"x": torch.randn(N, 9, C), "wigner": wigner * scales, "edges": edges, "mmax": mmax}
    run("edge_wigner", {**given, "way": way, "scale": 0.5}, {"dmessage": out})
    assert out.isnan().any()
    assert out.isinf().any()
    assert_split(keeper.take(out), out, mmax)


@pytest.mark.parametrize("mmax", [2, 1])
def test_gates_write_halves(mmax, keeper):
    torch.manual_seed(1)
    M = sum(own.stop - own.start for own, _ in orders(LMAX, mmax))
    gates, x, dout = torch.randn(E, LMAX * C), wide(E, M, C), wide(E, M, C).flip(0)
    given = {"gates": gates, "x": x, "lmax": LMAX, "mmax": mmax, "layout": "m"}
    out, dx, dgates = torch.empty(E, M, C), torch.empty(E, M, C), torch.empty(E, LMAX * C)
    run("gate_activation", given, {"out": out})
    assert_split(keeper.take(out), out, mmax)
    run("gate_activation_vjp", {**given, "dout": dout}, {"dx": dx, "dgates": dgates})
    assert keeper.take(dx) is None
    run("gate_activation_vjp", {**given, "dout": dout}, {"dx": dx, "dgates": dgates})
    assert_split(keeper.take(dx, dgates), dx, mmax, before=dgates)


@pytest.mark.parametrize(
    ("more", "outputs"),
    [
        ({"layout": "l"}, ["out"]),
        ({"C": 12}, ["out"]),
        ({"C": 144}, ["out"]),
        ({"dtype": torch.float64}, ["out"]),
        ({}, ["dx"]),
        ({}, ["dgates"]),
    ],
)
def test_other_gates_write_none(more, outputs, keeper):
    """Of l-major rows, of channels without vectors or of several programs, of one cotangent."""
    options = {"layout": "m", "C": C, "dtype": torch.float32, **more}
    gates, x = (
        torch.randn(E, *shape, options["C"], dtype=options["dtype"]) for shape in ((LMAX,), (9,))
    )
    given = {"gates": gates.flatten(1), "x": x, "lmax": LMAX, "mmax": 2, "dout": x}
    made = {"out": x, "dx": x, "dgates": gates.flatten(1)}
    name = "gate_activation" if outputs == ["out"] else "gate_activation_vjp"
    run(name, {**given, "layout": options["layout"]}, {n: made[n].clone() for n in outputs})
    assert not keeper._noted


def test_a_step_of_messages_splits_none(keeper, monkeypatch):
    """Results are those of products whose factors are split before."""
    torch.manual_seed(2)
    x, vectors = torch.randn(N, 9, C), torch.randn(E, 3)
    radial = torch.randn(E, 6 * 2 * C)
    given = [a.requires_grad_() for a in (x, vectors, radial)]
    edges = fusedops.Edges(torch.arange(2 * E).reshape(2, E) % N, N)
    first = [torch.randn(n, k) for n, k in ((5 * C, 6 * C), (4 * C, 8 * C), (2 * C, 4 * C))]
    first[1:] = [w[:, : w.shape[1] // 2] for w in first[1:]]
    second = [torch.randn(n, k) for n, k in ((3 * C, 3 * C), (4 * C, 2 * C), (2 * C, C))]
    splits, split = [], products.split
    monkeypatch.setattr(
        products, "split", lambda x, *a, **k: splits.append(x.shape) or split(x, *a, **k)
    )

    def results():
        matrices = wigner_d(vectors, LMAX, packed=True)
        message = fusedops.node_to_edge_wigner_permute(x, edges, matrices, radial=radial)
        out, gates = fusedops.so2_convolution(message, *first, gate_channels=2 * C)
        out = fusedops.so2_convolution(fusedops.gate_activation(gates, out), *second)
        back = wigner_d(vectors, LMAX).mT
        y = fusedops.permute_wigner_inv_edge_to_node(out, edges, back, N)
        return y, *torch.autograd.grad(y.square().sum(), given)

    def assert_rows_split(count):
        assert sum(shape[1] == E for shape in splits) == count
        splits.clear()

    with fusedops.use_backend("triton"):
        found = results()
        assert_rows_split(0)
        keeper.splits = False
        want = results()
        assert_rows_split(12)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not keeper._noted


def test_a_cotangent_that_others_add_to_is_split_again(keeper):
    """Autograd adds up the cotangents of a message that two layers have."""
    torch.manual_seed(3)
    gates, x = torch.randn(E, LMAX * C), torch.randn(E, 9, C, requires_grad=True)
    weights = [torch.randn(n, k) for n, k in ((3 * C, 3 * C), (4 * C, 2 * C), (2 * C, C))]

    def dx():
        with fusedops.use_backend("triton"):
            out = fusedops.so2_convolution(x, *weights)
            y = fusedops.gate_activation(gates, out) + fusedops.gate_activation(2 * gates, out)
            y.mul_(2)
            return torch.autograd.grad(fusedops.so2_convolution(y, *weights).sum(), x)[0]

    found = dx()
    keeper.splits = False
    torch.testing.assert_close(found, dx(), rtol=0, atol=0)


def test_a_convolution_of_a_part_splits_it(keeper):
    """A part of a gate's rows begins where these begin."""
    torch.manual_seed(4)
    gates, x = torch.randn(E, LMAX * C), torch.randn(E, 9, C)
    weights = [torch.randn(n, k) for n, k in ((3 * C, 3 * C), (4 * C, 2 * C), (2 * C, C))]

    def convolved():
        with fusedops.use_backend("triton"):
            return fusedops.so2_convolution(fusedops.gate_activation(gates, x)[:7], *weights)

    found = convolved()
    keeper.splits = False
    torch.testing.assert_close(found, convolved(), rtol=0, atol=0)


def test_kernels_of_two_dtypes_write_none(keeper):
    """Halves are of numbers of float32."""
    gates, x = torch.randn(E, LMAX * C, dtype=torch.float64), torch.randn(E, 9, C)
    given = {"gates": gates, "x": x, "lmax": LMAX, "mmax": 2, "layout": "m"}
    run("gate_activation", given, {"out": torch.empty(E, 9, C)})
    edges = fusedops.Edges(torch.zeros(2, E, dtype=torch.int64), N)
    given = {"x": torch.randn(N, 9, C), "edges": edges, "mmax": 2, "way": "undo", "scale": 1.0}
    given["wigner"] = torch.randn(E, 35, dtype=torch.float64)
    run("edge_wigner", given, {"dmessage": torch.empty(E, 9, C)})
    assert not keeper._noted
