"""The stages of a triangle update that ranks share: kernels on rectangles, beside the formula."""

from __future__ import annotations

import collections

import pytest

torch = pytest.importorskip("torch")

from fusedops._frame.registry import asking  # noqa: E402
from fusedops.trimul.op import end, end_vjp, sides, sides_vjp  # noqa: E402
from places import available  # noqa: E402

#: B, L, M, C, H, and the ranks. On a GPU the last one has as many rows as Hopper's kernels take.
SHAPES = [(2, 3, 5, 6, 6, 3), (2, 3, 8, 6, 6, 3), (2, 9, 8, 16, 8, 2), (1, 0, 4, 4, 2, 2)]
SHAPES += [pytest.param((1, 264, 256, 128, 128, 2), marks=pytest.mark.gpu)]
DTYPES = [
    (torch.float32, "ieee", 2e-5),
    (torch.float16, "fp16", 4e-3),
    (torch.bfloat16, "bf16", 3e-2),
]


def arguments(primitive, shape, dtype, precision, gate, some):
    """Return the arguments of a primitive's call, all arrays given or only the needed ones."""
    B, L, M, C, H, ranks = shape
    sizes = {"B": B, "L": L, "M": M, "C": C, "H": H, "R": 2 * H, "P": ranks}
    sizes |= {"Q": 2 * H // ranks, "G": C if gate == "output" else H}
    torch.manual_seed(0)
    arrays = []
    for name, array in primitive.declared.items():
        if array.optional and not some:
            arrays.append(None)
            continue
        (terms,) = array.shapes
        shown = [f"{t.factor} * {t.name}" if t.factor != "1" else t.name for t in terms]
        value = torch.randn([sizes[size] for size in shown])
        arrays.append((value if name in ("x", "o", "mask") else value / 2).to(dtype))
    # A large eps, of which a wrong scale shows.
    static = {"parts": ranks, "precision": precision, "gate": gate, "eps": 0.3}
    static["scale"] = 0.25 if precision == "fp16" else 1.0
    return [*arrays, *[static[name] for name in primitive.static]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("some", [True, False], ids=["all", "needed"])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize(("dtype", "precision", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("primitive", [sides, sides_vjp, end, end_vjp], ids=lambda p: p.name)
def test_kernels_are_the_formula(primitive, shape, dtype, precision, tolerance, gate, some, device):
    if device == "cpu":
        available("torch", "triton")
    if primitive is sides and gate == "hidden":
        pytest.skip("it has no gate")
    given = arguments(primitive, shape, dtype, precision, gate, some)
    given = [a.to(device) if isinstance(a, torch.Tensor) else a for a in given]
    exact = [a.double() if isinstance(a, torch.Tensor) else a for a in given]
    with asking("triton"):
        # On a GPU the second call replays the first one's launches.
        for _ in range(2 if device == "cuda" else 1):
            got = primitive(*given)
    with asking("torch"):
        want = primitive(*exact)
    for name, a, b in zip(primitive.outputs, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and a.numel():
            assert a.dtype == dtype, name
            error = (a.double() - b).abs().max().item()
            assert error <= tolerance * max(1.0, b.abs().max().item()), name


@pytest.mark.gpu
def test_parts_of_cotangents_are_read_in_their_place(monkeypatch):
    """On Hopper, some lines of a member at a time."""
    monkeypatch.setattr("gpukern.trimul.stages._PAIRS", 1 << 15)
    shape, kind = (2, 264, 256, 128, 128, 2), (torch.bfloat16, "bf16", 3e-2)
    test_kernels_are_the_formula(sides_vjp, shape, *kind, "output", False, "cuda")


def test_offsets_of_a_stage_count_its_channels():
    """No weight tells the channels of o, by which its memory needs more than 32 bits."""
    stages = pytest.importorskip("gpukern.trimul.stages")
    given = collections.namedtuple("Given", ["x", "g_out_weight", "eps", "precision"])
    x = torch.empty(1, 2904, 2904, 8, dtype=torch.bfloat16)
    a = given(x, torch.zeros(8, 8), 1e-5, None)
    assert [str(stages._update(a, H).long) for H in (16, 256)] == ["int32", "int64"]
