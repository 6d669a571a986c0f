"""Tests that need a real GPU; run with ``pytest -m gpu``."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from contract import EXAMPLES, capture, close, derivatives  # noqa: E402
from fusedops._frame import primitive as primitives  # noqa: E402
from fusedops.delta.examples import attention  # noqa: E402
from fusedops.planarity.op import nll  # noqa: E402
from fusedops.samples import atoms_in, pair, protein  # noqa: E402
from fusedops.testing import CASES, TOLERANCE, check, error  # noqa: E402
from fusedops.trimul.op import ARRAYS  # noqa: E402
from fusedops.wigner import wigner_d  # noqa: E402
from fusedops.wigner.op import edge_wigner  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:triangle_multiplicative_update. max_memory:RuntimeWarning"),
]


def example(residues, dtype=torch.float32, device="cuda"):
    xyz, indices = protein(residues, np.random.default_rng(residues))
    planes = fusedops.Planes([(index, np.full(len(index), 0.02)) for index in indices])
    return torch.tensor(xyz, dtype=dtype, device=device, requires_grad=True), planes.to(device)


def equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# One case of every primitive.
DAILY = ("chain-uniform", "jet", "uma", "l2-dense", "torchref", "protein-iso", "openfold")
DAILY += ("delta", "delta-step")


def matrix():
    """Yield every case, backend and dtype, but few of the kernels that take seconds to compile."""
    for case, backend, dtype in product(CASES, ("triton", "torch"), TOLERANCE):
        few = case.name.startswith(("l3", "l4")) and case.name not in ("l3-m2-back", "l4-m4-forth")
        slow = case.primitive is edge_wigner and not case.name.startswith("uma")
        if not (backend == "triton" and slow and (few or dtype != "float32")):
            daily = case.name in DAILY and backend == "triton" and dtype == "float32"
            marks = [pytest.mark.quick] * daily
            yield pytest.param(case, backend, dtype, marks=marks, id=f"{case}-{backend}-{dtype}")


@pytest.mark.parametrize(("case", "backend", "dtype"), list(matrix()))
def test_agrees_with_the_reference(case, backend, dtype):
    check(case, "torch", backend, dtype, device="cuda")


@pytest.mark.quick
def test_triton_is_the_first_choice():
    xyz, planes = example(4)
    explanation = fusedops.planarity_nll.explain(xyz, planes)
    assert explanation.backend == "triton", str(explanation)
    assert fusedops.info().gpus


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_second_derivatives(example):
    """The second pass is of a known kind."""
    p = example.problem("tiny")
    want = derivatives(p, "torch", 2)
    for _ in range(2):
        for got, expected in zip(derivatives(p, None, 2, "cuda"), want, strict=True):
            close(p, got, expected, times=64)


def test_six_hundred_thousand_planes_over_three_million_atoms():
    xyz, planes = example(480_000)
    assert planes.num_planes > 600_000
    assert len(xyz) > 3_000_000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = fusedops.planarity_nll(xyz, planes)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28
    value, gradient = nll(xyz.detach().cpu().numpy(), planes.to("cpu"), "uniform")
    assert error(loss.item(), value) < 1e-6
    assert error(xyz.grad.cpu(), gradient) < 1e-6


@pytest.mark.quick
def test_mixed_devices():
    xyz, planes = example(4)
    with pytest.raises(ValueError, match="plane_groups is on cpu; it should be on cuda:0"):
        fusedops.planarity_nll(xyz, planes.to("cpu"))
    with pytest.raises(ValueError, match="plane_groups is on cuda:0; it should be on cpu"):
        fusedops.planarity_nll(xyz.detach().cpu(), planes)
    with pytest.raises(ValueError, match="plane_groups is on cuda:0; it should be on cpu"):
        fusedops.planarity_nll(xyz.detach().cpu().numpy(), planes)
    with pytest.raises(fusedops.BackendUnavailable, match="cython  it runs on the CPU"):
        fusedops.planarity_nll(xyz, planes, backend="cython")
    with pytest.raises(IndexError, match="it should be below 5"):
        fusedops.planarity_nll(xyz.detach()[:5], planes)


def test_planes_from_cuda_tensors():
    xyz, planes = example(5)
    _, indices = protein(5, np.random.default_rng(5))
    groups = [
        (torch.tensor(i, device="cuda"), torch.full((len(i),), 0.02, device="cuda"))
        for i in indices
    ]
    built = fusedops.Planes(groups)
    assert built.device == "cuda:0"
    value = fusedops.planarity_nll(xyz, built)
    torch.testing.assert_close(value, fusedops.planarity_nll(xyz, planes))


def convolution(tokens, channels=64, width=4, dtype=torch.float32, batch=1):
    """Return the leaves x and kernels."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    shapes = (batch, tokens, channels), (batch, tokens, channels, width)
    return [
        torch.randn(shape, generator=generator, dtype=dtype, device="cuda", requires_grad=True)
        for shape in shapes
    ]


@pytest.mark.quick
@pytest.mark.parametrize(("B", "T"), [(3, 333), (70, 1)])
@pytest.mark.parametrize(
    ("D", "H", "dtype", "activation", "biased"),
    [
        (128, 40, torch.bfloat16, "silu", False),
        (64, 384, torch.float16, None, True),
        # Some programs begin with the last tile of a block of channels.
        (1536, 192, torch.bfloat16, "silu", True),
    ],
)
def test_generated_kernels_on_hopper(B, T, D, H, dtype, activation, biased, monkeypatch):
    """In parts of the tokens, with sequences that begin within a tile, or are one token."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for Hopper")
    from gpukern.generated import triton as generated

    for name in ("_MANY", "_FEW"):
        monkeypatch.setattr(generated, name, 1)
    monkeypatch.setattr(generated._Call, "over_taps", None)
    shapes = (B, T, D), (B, T, H), (4 * D, H), (4 * D,), (D,), (B, T, D)
    arrays = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    arrays[2] /= H**0.5

    def run(kind, **options):
        *leaves, conv_bias, dout = (array.to(kind) for array in arrays)
        for leaf in leaves:
            leaf.requires_grad_()
        out = fusedops.dynamic_conv_generated(
            *leaves, conv_bias=conv_bias if biased else None, activation=activation, **options
        )
        return [out, *torch.autograd.grad(out, leaves, dout)]

    for got, want in zip(run(dtype), run(torch.float64, backend="torch"), strict=True):
        assert (got - want).norm() <= torch.finfo(dtype).eps / 2 * want.norm()


def requested_bytes():
    """Return a function of the most bytes that are asked for from now on.

    The allocator's own figure counts free places of up to 1 MiB more, which it leaves unsplit.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return lambda: torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def test_a_strided_projection_is_read_in_place():
    projected = torch.randn(2, 1000, 3 * 512, device="cuda", dtype=torch.bfloat16)
    x = projected[..., 512:1024]
    kernels = torch.randn(2, 1000, 512, 4, device="cuda", dtype=torch.bfloat16)
    want = fusedops.dynamic_conv(x.contiguous(), kernels)
    requested = requested_bytes()
    out = fusedops.dynamic_conv(x, kernels)
    assert requested() <= out.nbytes + 1024
    assert torch.equal(out, want)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(fusedops.dynamic_conv(transposed, kernels), want)


@pytest.mark.large
def test_more_than_two_to_the_31_taps():
    tokens, channels = 2**19 + 100, 1024
    assert tokens * channels * 4 > 2**31
    x, kernels = convolution(tokens, channels, dtype=torch.bfloat16)
    out = fusedops.dynamic_conv(x, kernels)
    dx, dkernels = torch.autograd.grad(out, (x, kernels), torch.ones_like(out))
    # Compare the last tokens alone, with the inputs before them as their state.
    tail = slice(tokens - 1024, tokens)
    state = x.detach()[:, tokens - 1028 : tokens - 1024].mT.contiguous()
    end, taps = (a.detach()[:, tail].clone().requires_grad_() for a in (x, kernels))
    want = fusedops.dynamic_conv(end, taps, initial_state=state)
    want_dx, want_dkernels = torch.autograd.grad(want, (end, taps), torch.ones_like(want))
    torch.testing.assert_close(out[:, tail], want)
    torch.testing.assert_close(dx[:, tail], want_dx)
    torch.testing.assert_close(dkernels[:, tail], want_dkernels)


def test_no_memory_but_the_outputs_is_used():
    x, kernels = convolution(4096, 512, dtype=torch.bfloat16)
    requested = requested_bytes()
    out = fusedops.dynamic_conv(x, kernels, activation="silu")
    gradients = torch.autograd.grad(out, (x, kernels), out.detach())
    used = out.nbytes + sum(gradient.nbytes for gradient in gradients)
    assert requested() <= used + 2**16


def test_packed_sequences_are_read_again_when_they_change():
    x, kernels = convolution(10)
    cu_seqlens = torch.tensor([0, 4, 10], device="cuda")
    first = fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 6
    second = fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens)
    assert not torch.equal(first, second)
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 4, 10], device="cuda")
        assert torch.equal(fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens), first)
        cu_seqlens[1] = 6
        assert torch.equal(fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens), second)
    cu_seqlens = torch.tensor([0, 11], device="cuda")
    with pytest.raises(ValueError, match="cu_seqlens ends at 11; it should end at 10"):
        fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens)


def test_what_was_read_from_a_tensor_stays_with_it(tmp_path):
    import copy

    x, kernels = convolution(10)
    cu_seqlens = torch.tensor([0, 3, 10], device="cuda")
    cu_seqlens[1] = 4
    fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens)
    other = copy.deepcopy(cu_seqlens)
    other[1] = 6
    want = fusedops.dynamic_conv(x, kernels, cu_seqlens=fusedops.Sequences(other))
    assert torch.equal(fusedops.dynamic_conv(x, kernels, cu_seqlens=other), want)
    torch.save(cu_seqlens, tmp_path / "saved.pt")
    assert torch.equal(torch.load(tmp_path / "saved.pt"), cu_seqlens)
    cu_seqlens.data = other
    assert torch.equal(fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens), want)


def graph_on_gpu(nodes=40, count=300, lmax=2, channels=32, dtype=torch.float32, device="cuda"):
    """Return features, edges and matrices of random directions, with two leaves: all but edges."""
    generator = torch.Generator(device).manual_seed(count)
    index = torch.randint(nodes, (2, count), generator=generator, device=device)
    vectors = torch.randn(count, 3, generator=generator, device=device)
    shape = nodes, (lmax + 1) ** 2, channels
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    wigner = wigner_d(vectors, lmax)
    return x.requires_grad_(), fusedops.Edges(index, nodes), wigner.requires_grad_()


def forth_and_back(x, edges, wigner):
    message = fusedops.node_to_edge_wigner_permute(x, edges, wigner)
    half = message[..., : x.shape[2]] * message[..., x.shape[2] :]
    return fusedops.permute_wigner_inv_edge_to_node(half, edges, wigner, transpose=True)


@pytest.mark.large
def test_more_than_two_to_the_31_elements_of_messages():
    nodes, count, channels = 100, 2**20, 128
    assert count * 9 * 2 * channels > 2**31
    x, edges, wigner = graph_on_gpu(nodes, count, 2, channels, torch.bfloat16)
    message = fusedops.node_to_edge_wigner_permute(x, edges, wigner)
    dx, dwigner = torch.autograd.grad(message, (x, wigner), message.detach())
    # Compare the last edges alone.
    tail = slice(count - 1000, count)
    ends = [array[tail] for array in edges.tensors_here()[:2]]
    few = fusedops.Edges(torch.stack(ends), nodes)
    matrices = wigner.detach()[tail].clone().requires_grad_()
    want = fusedops.node_to_edge_wigner_permute(x, few, matrices)
    torch.testing.assert_close(message[tail], want)
    (want_dwigner,) = torch.autograd.grad(want, matrices, want.detach())
    torch.testing.assert_close(dwigner[tail], want_dwigner)
    # Features turned there and back are multiplied by the number of their node's edges.
    degree = sum(torch.bincount(end, minlength=nodes) for end in edges.tensors_here()[:2])
    want = x.detach().float() * degree[:, None, None]
    assert error(dx.float().cpu(), want.cpu()) < 0.01


def test_edges_are_sorted_where_they_are_and_read_again_when_they_change():
    x, edges, wigner = graph_on_gpu()
    index = torch.stack(edges.tensors_here()[:2])
    here = fusedops.Edges(index.cpu(), 40)
    for name, there in zip(edges._fields, edges.tensors_here(), strict=True):
        assert there.is_cuda
        assert np.array_equal(there.cpu().numpy(), getattr(here, name))
    first = fusedops.node_to_edge_wigner_permute(x, index, wigner)
    assert torch.equal(first, fusedops.node_to_edge_wigner_permute(x, here.to("cuda"), wigner))
    index[0, 0] = (index[0, 0] + 1) % 40
    assert not torch.equal(fusedops.node_to_edge_wigner_permute(x, index, wigner), first)


def busy():
    """Keep the GPU from any further work for a tenth of a second."""
    torch.cuda._sleep(200_000_000)


def test_bad_edges_are_found_without_waiting_and_touch_no_other_memory():
    x, edges, wigner = graph_on_gpu()
    index = torch.stack(edges.tensors_here()[:2])
    index[1, 7], index[0, 9] = 40, -(2**40)
    message = r"edge_index\[0, 9\] is -1099511627776; it should be in \[0, 40\)"
    busy()
    fusedops.node_to_edge_wigner_permute(x, index, wigner)
    torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(IndexError, match=message):
            fusedops.node_to_edge_wigner_permute(x, index, wigner)
    busy()
    bad = fusedops.Edges(index, 40)
    for wait in (bad.check, lambda: bad.to("cpu")):
        with pytest.raises(IndexError, match=message):
            wait()
    # An error that was seen is not told again.
    good = edges.tensors_here().source.expand(2, -1)
    fusedops.Edges(good, 40)
    given = torch.ones(300, 9, 4, device="cuda")
    busy()
    unseen = fusedops.Edges(index, 40)
    found = fusedops.permute_wigner_inv_edge_to_node(given, unseen, wigner)
    assert torch.isfinite(found).all()
    with pytest.raises(IndexError, match=message):
        fusedops.Edges(good, 40)
    fusedops.Edges(good, 40).check()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_edges_of_a_gpu_are_made_without_waiting():
    index = torch.randint(2000, (2, 60_000), device="cuda")
    fusedops.Edges(index, 2000).check()
    try:
        torch.cuda.set_sync_debug_mode("error")
        edges = fusedops.Edges(index, 2000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    edges.check()


def test_edges_are_copies_and_leave_nothing_behind():
    import gc

    from fusedops._frame.bridge.tensors import packed_read

    x, edges, wigner = graph_on_gpu()
    index = torch.stack(edges.tensors_here()[:2])
    copied = fusedops.Edges(index, 40)
    want = fusedops.node_to_edge_wigner_permute(x, copied, wigner)
    fusedops.node_to_edge_wigner_permute(x, index, wigner)
    index.zero_()
    assert torch.equal(fusedops.node_to_edge_wigner_permute(x, copied, wigner), want)
    before = len(packed_read)
    del index
    gc.collect()
    assert len(packed_read) == before - 1


@pytest.mark.large
def test_matrices_with_strides_beyond_two_to_the_31():
    wide = torch.zeros(3 * 2**30 + 16, dtype=torch.float16, device="cuda")
    wigner = wide.as_strided((1, 4, 4), (4, 2**30, 1))
    wigner.copy_(torch.eye(4))
    x = torch.randn(2, 4, 8, device="cuda")
    edges = fusedops.Edges(torch.tensor([[0], [1]], device="cuda"), 2)
    message = fusedops.node_to_edge_wigner_permute(x, edges, wigner)
    assert torch.equal(message[0, :, :8], x[0, [0, 2, 3, 1]])


def test_edges_that_lie_lead_nowhere_on_a_gpu():
    x, edges, wigner = (a if isinstance(a, fusedops.Edges) else a.detach() for a in graph_on_gpu())
    message = torch.randn(300, 9, 64, device="cuda")
    given = edges.tensors_here()
    wild = given._replace(
        **{name: getattr(given, name) + 10**6 for name in ("source", "target")},
        **{name: getattr(given, name) - 10**6 for name in ("by_source", "by_target")},
    )
    static = fusedops.Edges.from_tensors(wild, edges.sizes()), 2, "forth", 1.0
    with fusedops.use_backend("triton"):
        _, dmessage, *_ = edge_wigner(
            None, x, None, wigner, None, *static, out=(None, True, None, None)
        )
        out = True, None, True, None
        dx, _, dwigner, _ = edge_wigner(None, x, message, wigner, None, *static, out=out)
    torch.cuda.synchronize()
    for result in (dmessage, dx):
        assert torch.isfinite(result).all()
    assert dwigner.shape == wigner.shape


def atoms_on_gpu(count=500, anisotropic=False):
    cell = np.array([[30.0, 2.0, -3.0], [0.0, 28.0, 1.0], [0.0, 0.0, 26.0]])
    arrays = atoms_in(cell, count, np.random.default_rng(count), anisotropic=anisotropic)
    xyz, b, occupancy, *table = (torch.tensor(a, device="cuda").float() for a in arrays)
    lattice = fusedops.Lattice(cell, (60, 50, 52)).to("cuda")
    return [a.requires_grad_() for a in (xyz, b, occupancy)], table, lattice


def map_and_gradients(atoms, table, lattice, on_bad="skip"):
    rho = fusedops.gaussian_density(*atoms, *table, lattice, on_bad=on_bad)
    return rho.detach(), *torch.autograd.grad(rho.square().sum(), atoms)


def same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5 * b.abs().max().item())


def cubes_on_gpu(dtype=torch.int64):
    at = torch.randint(0, 40, (300, 3), device="cuda")
    x, y, z = ((at[:, d, None] + torch.arange(9, device="cuda")) % 40 for d in range(3))
    return (x * 1600).to(dtype), (y[:, :, None] * 40 + z[:, None]).to(dtype)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_offsets_on_the_gpu_are_checked_and_read_once():
    wa, wbwc = cubes_on_gpu(torch.int32)
    cubes = torch.randn(300, 9, 9, 9, device="cuda")
    fusedops.structured_scatter_add(cubes, wa, wbwc, 40**3)
    torch.cuda.set_sync_debug_mode(2)
    try:
        fusedops.structured_scatter_add(cubes, wa, wbwc, 40**3)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    wbwc[7, 1, 2] = 40**3
    with pytest.raises(IndexError, match=r"wbwc\[7, 1, 2\]"):
        fusedops.structured_scatter_add(cubes, wa, wbwc, 40**3)


@pytest.mark.quick
def test_deterministic_sums_of_maps():
    atoms, table, lattice = atoms_on_gpu()
    plan = fusedops.ScatterPlan(*cubes_on_gpu(), 40**3)
    cubes = torch.randn(300, 9, 9, 9, device="cuda")

    def run():
        rho = fusedops.gaussian_density(*atoms, *table, lattice, on_bad="skip").detach()
        return rho, fusedops.structured_scatter_add(cubes, plan)

    fast = run()
    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    same(first, fast)


# dtype of x and of the rest, precision, gate, direction, B, N, C, H, and max_memory: N a multiple
# of eight or not, C and H of one block and of several, and many rows of many channels.
TRIANGLES = {
    "float32-output": ("float32", None, "output", "outgoing", (2, 37, 24, 40)),
    "ieee-output": ("float32", "ieee", "output", "outgoing", (2, 37, 24, 40)),
    "float32-wide": ("float32", None, "output", "incoming", (1, 72, 136, 136)),
    "float32-hidden": ("float32", None, "hidden", "incoming", (1, 64, 32, 32)),
    "fp16-output": ("float32", "fp16", "output", "incoming", (1, 72, 128, 128)),
    "fp16-hidden": ("float32", "fp16", "hidden", "outgoing", (2, 131, 9, 11)),
    "bf16-output": ("float32", "bf16", "output", "incoming", (2, 45, 40, 136)),
    "bfloat16-output": ("bfloat16", None, "output", "outgoing", (1, 64, 128, 128)),
    "bfloat16-hidden": ("bfloat16", None, "hidden", "incoming", (1, 257, 136, 24)),
    "in-parts": ("bfloat16", None, "output", "incoming", (2, 72, 32, 32), 2**20),
}


def triangle(dtype, precision, gate, direction, shape, max_memory=None):
    """Return an update as a function of arrays by name, leaves as given to it, and a cotangent."""
    rng = np.random.default_rng(shape[1])
    arrays = pair(*shape, rng, gate=gate, mask=False, biases=True)
    kind = {"device": "cuda", "dtype": getattr(torch, dtype)}
    leaves = {name: torch.tensor(array, **kind) for name, array in arrays.items()}
    cotangent = torch.tensor(rng.normal(size=arrays["x"].shape), **kind)

    def update(**arrays):
        return fusedops.triangle_multiplicative_update(
            **arrays, direction=direction, precision=precision, gate=gate, max_memory=max_memory
        )

    return update, {name: leaf.requires_grad_() for name, leaf in leaves.items()}, cotangent


def triangle_and_gradients(update, leaves, cotangent):
    out = update(**leaves)
    return out.detach(), *torch.autograd.grad(out, [*leaves.values()], cotangent)


@pytest.mark.parametrize("N", [64, 128])
@pytest.mark.parametrize("gate", ["output", "hidden"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", None), ("float32", "fp16"), ("bfloat16", None)]
)
def test_a_small_triangle_takes_three_launches(monkeypatch, dtype, precision, gate, N):
    from torch.profiler import ProfilerActivity, profile

    # Filling the output with NaN would be one more launch.
    monkeypatch.setattr(primitives, "poison", False)
    update, leaves, _ = triangle(dtype, precision, gate, "outgoing", (1, N, 128, 128))
    with torch.no_grad():
        for _ in range(2):
            update(**leaves)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            update(**leaves)
    on_gpu = torch.autograd.DeviceType.CUDA
    launched = [event.name for event in profiler.events() if event.device_type == on_gpu]
    assert 1 <= len(launched) <= 3, launched


@pytest.mark.parametrize("N", [250, 256])
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "fp16"), ("float32", "ieee"), ("bfloat16", None)]
)
def test_updates_of_many_channels_are_replayed(monkeypatch, fresh_plans, dtype, precision, N):
    from gpukern import tape

    recorded, replays = tape._recorded, []

    def noted(*args):
        replays.append(recorded(*args))
        return replays[-1]

    monkeypatch.setattr(tape, "_recorded", noted)
    update, leaves, cotangent = triangle(dtype, precision, "output", "outgoing", (1, N, 384, 128))
    want = triangle_and_gradients(update, leaves, cotangent)
    elsewhere = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    got = triangle_and_gradients(update, elsewhere, cotangent)
    assert replays
    assert None not in replays
    equal(got, want)


@pytest.mark.parametrize("N", [32, 264])
def test_the_last_gate_and_weight_keep_their_digits(N):
    """Other factors are bfloat16, which would give these two errors of 1.6e-3."""
    update, leaves, _ = triangle("float32", "bf16", "output", "outgoing", (1, N, 128, 128))
    with torch.no_grad():
        # Now o is one and the bias alone makes the gate, so that other roundings don't matter.
        leaves["norm_out_weight"].zero_()
        leaves["norm_out_bias"].fill_(1.0)
        leaves["g_out_weight"].zero_()
        exact = {name: leaf.double() for name, leaf in leaves.items()}
        got = update(**leaves)
        want = fusedops.triangle_multiplicative_update(**exact, backend="torch")
    assert (got - want).norm() < 5e-4 * want.norm()


@pytest.mark.parametrize("N", [250, 256])
def test_memory_of_triangles(N):
    """A forward needs arrays of the size of x for the result, left, right and o.

    A backward also keeps the sides and logits, o and the last layer's cotangents at once.
    """
    update, leaves, cotangent = triangle("bfloat16", None, "output", "outgoing", (1, N, 128, 128))
    del leaves["mask"]
    size = leaves["x"].nbytes

    def peak(run):
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / size

    with torch.no_grad():
        assert peak(lambda: update(**leaves)) < 4.2
    assert peak(lambda: triangle_and_gradients(update, leaves, cotangent)) < 12


# A tensor exceeds 2**31 elements by its batches or its residues, in channels of x or
# in channels of left and right.
@pytest.mark.large
@pytest.mark.parametrize(
    ("dtype", "precision", "gate", "direction", "shape"),
    [
        ("bfloat16", None, "output", "outgoing", (4100, 64, 128, 32)),
        ("bfloat16", None, "hidden", "incoming", (1, 2904, 64, 128)),
        ("bfloat16", None, "output", "outgoing", (1, 2904, 128, 128)),
        ("float32", "fp16", "hidden", "outgoing", (2060, 64, 16, 128)),
        ("float32", None, "output", "incoming", (1, 2904, 16, 128)),
    ],
)
def test_more_than_two_to_the_31_elements_of_triangles(dtype, precision, gate, direction, shape):
    """The last residues of the last batch, all others masked, are updated as if they were alone."""
    B, N, C, H = shape
    assert B * N * N * max(C, 2 * H) > 2**31
    few = 40
    update, leaves, cotangent = triangle(dtype, precision, gate, direction, (1, few, C, H))
    want = triangle_and_gradients(update, leaves, cotangent)
    end = slice(B - 1, B), slice(N - few, N), slice(N - few, N)
    x, mask, there = (
        torch.zeros((B, N, N, *a.shape[3:]), dtype=a.dtype, device="cuda")
        for a in (leaves["x"], leaves["mask"], cotangent)
    )
    x.normal_()
    for whole, part in ((x, leaves["x"]), (mask, leaves["mask"]), (there, cotangent)):
        whole[end] = part.detach()
    everything = {**leaves, "x": x.requires_grad_(), "mask": mask}
    del leaves["mask"]
    torch.cuda.reset_peak_memory_stats()
    out = update(**everything)
    out_end, asked = out[end].detach().clone(), [everything[name] for name in leaves]
    (dx, *dweights) = torch.autograd.grad(out, asked, there)
    assert torch.cuda.max_memory_allocated() < 60e9
    got = out_end, dx[end].clone(), *dweights
    want = want[0], want[1], *want[3:]
    # Another order of sums may round a number of 16 bits to its neighbour, and these
    # differences remain where LayerNorms' gradients cancel; a wrong index errs by far more.
    allowed = {"fp16": 1e-2, None: 5e-2 if dtype == "bfloat16" else 1e-4}[precision]
    for a, b in zip(got, want, strict=True):
        assert error(a.double().cpu(), b.double().cpu()) < allowed
    dx[end] = 0.0
    assert not dx.any()


# Like TRIANGLES, with enough rows for Hopper's own kernels, and the kernels expected: forward, in a
# backward with the mask's cotangent, and in one without.
PROJECT, WIDE, FINISH = ["project"], ["project_wide"], ["finish"]
BOTH, BACK = PROJECT + FINISH, ["project", "finish_back", "project_back"]
IN_PARTS = ["finish_back"] * 4 + ["project"] * 4 + ["project_back"] * 4
APART = ["finish_back"] * 8 + ["project_back"] * 8
F32, F16, BF16, OUT, IN = "float32", "float16", "bfloat16", "outgoing", "incoming"
MANY_TRIANGLES = {
    "fp16-hidden": (BOTH, PROJECT * 2, BACK, F32, "fp16", "hidden", OUT, (1, 264, 128, 128)),
    "fp16-output": (WIDE + FINISH, WIDE, [], F32, "fp16", "output", IN, (1, 264, 384, 128)),
    "bfloat16-incoming": (BOTH, PROJECT * 2, BACK, BF16, None, "output", IN, (1, 256, 128, 128)),
    "bfloat16-output": (BOTH, [], [], BF16, None, "output", OUT, (2, 200, 128, 128)),
    "bfloat16-two": (BOTH, PROJECT * 2, BACK * 2, BF16, None, "output", OUT, (2, 256, 64, 128)),
    "bfloat16-hidden": (BOTH, PROJECT, BACK, BF16, None, "hidden", IN, (1, 272, 64, 64)),
    "bf16-output": (BOTH, PROJECT * 2, BACK, F32, "bf16", "output", OUT, (1, 264, 128, 128)),
    "bf16-wide": (WIDE + FINISH, WIDE, [], F32, "bf16", "hidden", OUT, (1, 264, 384, 128)),
    "bfloat16-narrow": (WIDE + FINISH, WIDE, [], BF16, None, "hidden", OUT, (1, 264, 384, 64)),
    "float16-output": (BOTH, PROJECT, BACK, F16, None, "output", IN, (1, 264, 64, 64)),
    "fp16-in-parts": (
        *(PROJECT * 4 + FINISH * 2, [], APART),
        *(F32, "fp16", "output", OUT, (1, 512, 64, 128), 3 << 26),
    ),
    "bfloat16-in-parts": (
        *(BOTH * 2, PROJECT * 24, IN_PARTS * 2),
        *(BF16, None, "output", IN, (2, 512, 128, 128), 5 << 26),
    ),
    "float16-in-parts": (
        *(BOTH, PROJECT * 12, IN_PARTS),
        *(F16, None, "hidden", OUT, (1, 512, 64, 64), 5 << 25),
    ),
}


@pytest.mark.parametrize("inputs", ["normal", "large mean", "Cauchy"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.large) if name == "bfloat16-in-parts" else name
        for name in MANY_TRIANGLES
    ],
)
def test_triangles_of_many_rows(monkeypatch, fresh_plans, variant, masked, inputs):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    from gpukern.trimul import plan

    launched = []
    launcher = plan._launcher

    def note(kernel, *how):
        if kernel in plan.ON_HOPPER and kernel.__name__ != "pack":
            launched.append(kernel.__name__)
        return launcher(kernel, *how)

    monkeypatch.setattr(plan, "_launcher", note)
    forward, with_mask, without, *given = MANY_TRIANGLES[variant]
    dtype, precision, gate, direction, shape, *limits = given
    rng = np.random.default_rng(shape[1])
    # A mask with gaps comes with biases; without a mask, the norms are ones.
    arrays = pair(*shape, rng, gate=gate, mask=masked or None, norms=masked, biases=masked)
    if inputs == "large mean":
        arrays["x"] = arrays["x"] + 1e3
    elif inputs == "Cauchy":
        arrays["x"] = np.clip(2 * rng.standard_cauchy(arrays["x"].shape), -6e4, 6e4)
    kind = getattr(torch, dtype)
    leaves = {
        name: torch.tensor(a, device="cuda", dtype=kind).requires_grad_()
        for name, a in arrays.items()
        if a is not None
    }
    of_mask = masked and inputs == "normal"
    if masked:
        leaves["mask"].requires_grad_(of_mask)
    asked = [name for name, leaf in leaves.items() if leaf.requires_grad]
    # The gradient by the mask of a pair that it removes is large: rows of zeros have no variance.
    generator = torch.Generator("cuda").manual_seed(shape[1])
    cotangent = torch.randn(leaves["x"].shape, device="cuda", generator=generator) / 8
    cotangent = cotangent.to(kind)
    options = {"gate": gate, "direction": direction}
    limited = {"precision": precision, "max_memory": limits[0] if limits else None}
    out = fusedops.triangle_multiplicative_update(**leaves, **options, **limited)
    assert launched == forward
    launched.clear()
    got = out.detach(), *torch.autograd.grad(out, [leaves[name] for name in asked], cotangent)
    assert launched == (with_mask if of_mask else without)
    exact = {name: leaf.detach().double() for name, leaf in leaves.items()}
    for name in asked:
        exact[name].requires_grad_()
    wanted = fusedops.triangle_multiplicative_update(**exact, **options, backend="torch")
    arguments = [exact[name] for name in asked]
    want = wanted.detach(), *torch.autograd.grad(wanted, arguments, cotangent.double())
    limit = 5e-3 if "bf" in variant else 1e-3
    names = "out", *asked
    for name, one, other in zip(names, got, want, strict=True):
        assert one.isfinite().all()
        off = (one.double() - other).norm() / other.norm()
        assert off < (limit if name == "out" else 2 * limit), (name, off)


def planarity_step():
    xyz, planes = example(2000)
    direction = torch.randn_like(xyz)

    def run():
        loss = fusedops.planarity_nll(xyz, planes)
        (gradient,) = torch.autograd.grad(loss, xyz, create_graph=True)
        (turned,) = torch.autograd.grad(gradient, xyz, direction)
        return loss.detach(), gradient.detach(), turned

    return run, [xyz]


def convolution_step():
    x, kernels = convolution(500, channels=72)
    bias = torch.randn(72, device="cuda", requires_grad=True)
    static = torch.randn(72, 4, device="cuda", requires_grad=True)
    cu_seqlens = torch.tensor([0, 7, 7, 300, 500], device="cuda")
    state = torch.randn(4, 72, 4, device="cuda", requires_grad=True)
    states = torch.randn(500, 72, 4, device="cuda")
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}

    def run():
        decoded = states.clone()
        with torch.no_grad():
            step = fusedops.dynamic_conv_step(x[0], decoded, kernels[0], activation="silu")
        results = [step, decoded]
        for taps in (kernels, static):
            outputs = fusedops.dynamic_conv(x, taps, bias=bias, activation="silu", **options)
            loss = outputs[0].square().sum() + outputs[1].sum()
            results += [*outputs, *torch.autograd.grad(loss, (x, taps, bias, state))]
        return [result.detach() for result in results]

    return run, [x, state, states]


def attention_on_gpu(*sizes, dtype=torch.float32, **options):
    """Return the leaves q, k, v, g, beta and the initial state, and the other arguments."""
    given = attention(np.random.default_rng(0), *sizes, raw=True, **options)
    leaves = [
        torch.tensor(given.pop(name), dtype=dtype, device="cuda", requires_grad=True)
        for name in ("q", "k", "v", "g", "beta", "initial_state")
    ]
    if "cu_seqlens" in given:
        given["cu_seqlens"] = torch.tensor(given["cu_seqlens"], device="cuda")
    return leaves, given | {"output_final_state": True}


def attention_and_gradients(leaves, given, **options):
    *tokens, state = leaves
    outputs = fusedops.gated_delta_rule(*tokens, initial_state=state, **given, **options)
    loss = sum(out.square().sum() for out in outputs)
    return [result.detach() for result in (*outputs, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_very_many_tokens(packed):
    leaves, given = attention_on_gpu(3, 17000, 1, 16, 8, dtype=torch.float64, packed=packed)
    got = attention_and_gradients(leaves, given)
    want = attention_and_gradients(leaves, given, backend="torch")
    for one, other in zip(got, want, strict=True):
        assert error(one.cpu(), other.cpu()) < 1e-10


def attention_step():
    leaves, given = attention_on_gpu(4, 300, 2, 24, 40, packed=True)
    states = torch.randn(300, 4, 24, 40, device="cuda")

    def run():
        decoded = states.clone()
        with torch.no_grad():
            token = [leaf[0] for leaf in leaves[:5]]
            step = fusedops.gated_delta_rule_step(*token, decoded)
        return [step, decoded, *attention_and_gradients(leaves, given)]

    return run, [leaves[0], leaves[5], states]


def rotation_step():
    x, edges, wigner = graph_on_gpu()
    index = torch.stack([edges.tensors_here()[0], edges.tensors_here()[1]])

    def run():
        results = []
        for graph in (edges, index):
            message = fusedops.node_to_edge_wigner_permute(x, graph, wigner)
            grads = torch.autograd.grad(message.square().sum(), (x, wigner), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), (x, wigner))
            results += [message, *grads, *second]
        return [result.detach() for result in [*results, forth_and_back(x, edges, wigner)]]

    return run, [x]


def training_step():
    """A step of training through forces."""
    _, edges, _ = graph_on_gpu()
    vectors = torch.randn(edges.num_edges, 3, device="cuda", requires_grad=True)
    x = torch.randn(edges.num_nodes, 9, 32, device="cuda", requires_grad=True)

    def run():
        energy = forth_and_back(x, edges, wigner_d(vectors, 2)).square().sum()
        (forces,) = torch.autograd.grad(energy, vectors, create_graph=True)
        return forces.detach(), *torch.autograd.grad(forces.square().sum(), (x, vectors))

    return run, [x, vectors]


def refinement_step(anisotropic, on_bad="skip"):
    atoms, table, lattice = atoms_on_gpu(anisotropic=anisotropic)
    return partial(map_and_gradients, atoms, table, lattice, on_bad), [atoms[0]]


def triangle_step(*variant):
    update, leaves, cotangent = triangle(*variant)
    return partial(triangle_and_gradients, update, leaves, cotangent), [leaves["x"], cotangent]


#: Functions that return a run and the tensors that it depends on. The runs of EXACT compute
#: in an order that never changes.
EXACT = {
    "planarity": planarity_step,
    "convolution": convolution_step,
    "attention": attention_step,
    "rotations": rotation_step,
    "training": training_step,
    **{name: partial(triangle_step, *variant) for name, variant in TRIANGLES.items()},
}
ROUNDED = {
    "isotropic": partial(refinement_step, False),
    "anisotropic": partial(refinement_step, True),
    "isotropic and clamped": partial(refinement_step, False, "clamp"),
    "anisotropic and clamped": partial(refinement_step, True, "clamp"),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", EXACT)
def test_no_synchronisation_and_the_same_bits_every_time(name):
    run, _ = EXACT[name]()
    first = run()
    for _ in range(5):
        torch.cuda.set_sync_debug_mode(2)
        try:
            again = run()
        finally:
            torch.cuda.set_sync_debug_mode(0)
        equal(again, first)


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_a_cuda_graph_replays_new_numbers(name):
    run, changing = (EXACT | ROUNDED)[name]()
    graph, captured = capture(run)
    with torch.no_grad():
        for tensor in changing:
            tensor += 0.1 * torch.randn_like(tensor)
    graph.replay()
    (equal if name in EXACT else same)(captured, run())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
@pytest.mark.parametrize("name", ["planarity", "convolution", "rotations"])
def test_the_second_gpu(name):
    """Tensors of another GPU than the current one have the bits of the current one's."""
    results = []
    for device in range(2):
        with torch.cuda.device(device):
            torch.manual_seed(0)
            run, _ = EXACT[name]()
        results.append(run())
    assert {result.device.index for result in results[1]} == {1}
    equal(*([result.cpu() for result in found] for found in results))


@pytest.fixture
def compilations(monkeypatch):
    """Return a list that grows by a kernel's name whenever one is compiled."""
    import triton

    names = []

    def note(*, fn, **_):
        names.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return names


def planarity_of_size(residues, skip):
    xyz, planes = example(residues)
    padded = torch.zeros(len(xyz) + skip, 3, device="cuda")
    padded[skip:] = xyz.detach()
    leaf = padded[skip:].requires_grad_()
    (gradient,) = torch.autograd.grad(fusedops.planarity_nll(leaf, planes), leaf, create_graph=True)
    torch.autograd.grad(gradient.sum(), leaf)


def convolution_of_size(tokens, skip, batch):
    x, kernels = convolution(tokens + skip, channels=72, batch=batch)
    wide = torch.zeros(batch, tokens, 72 + skip, device="cuda")
    wide[..., skip:] = x.detach()[:, skip:]
    strided = wide[..., skip:].requires_grad_()
    out = fusedops.dynamic_conv(strided, kernels[:, skip:], activation="silu")
    want = fusedops.dynamic_conv(
        x.detach()[:, skip:].clone(), kernels.detach()[:, skip:].clone(), activation="silu"
    )
    torch.testing.assert_close(out.detach(), want)
    torch.autograd.grad(out.sum(), (strided, kernels))


def attention_of_size(tokens, skip, batch):
    leaves, given = attention_on_gpu(batch, tokens, 2, 24, 40)
    want = attention_and_gradients(leaves, given)
    apart = [torch.zeros(*leaf.shape[:-1], leaf.shape[-1] + skip, device="cuda") for leaf in leaves]
    views = [wide[..., skip:] for wide in apart]
    for view, leaf in zip(views, leaves, strict=True):
        view.copy_(leaf.detach())
    got = attention_and_gradients([view.requires_grad_() for view in views], given)
    equal(got, want)


def rotation_of_size(nodes, count, skip):
    x, edges, wigner = graph_on_gpu(nodes, count)
    padded = torch.zeros(x.numel() + skip, device="cuda")
    padded[skip:] = x.detach().flatten()
    leaf = padded[skip:].view(x.shape).requires_grad_()
    loss = forth_and_back(leaf, edges, wigner).square().sum()
    got = torch.autograd.grad(loss, (leaf, wigner))
    want = torch.autograd.grad(forth_and_back(x, edges, wigner).square().sum(), (x, wigner))
    for a, b in zip(got, want, strict=True):
        assert error(a.cpu(), b.cpu()) < 1e-6


def triangle_of_size(dtype, precision, channels, B, N, skip):
    shape = B, N, channels, channels
    update, leaves, cotangent = triangle(dtype, precision, "hidden", "outgoing", shape)
    want = triangle_and_gradients(update, leaves, cotangent)
    x = leaves["x"]
    padded = torch.zeros(x.numel() + skip, dtype=x.dtype, device="cuda")
    padded[skip:] = x.detach().flatten()
    leaves["x"] = padded[skip:].view(x.shape).requires_grad_()
    got = triangle_and_gradients(update, leaves, cotangent)
    equal(got, want)


# Sizes of a triangle that kernels may be compiled for: N a multiple of eight or not, and many rows.
TRIANGLE_SIZES = [
    [(1, N, 0) for N in (72, 73, 256, 257)],
    [(1, 65, 0), (3, 80, 1), (2, 127, 3), (1, 128, 8), (5, 100, 0), (2, 200, 1), (1, 300, 0)],
]
#: A run, sizes for which it may compile kernels, and others.
SIZES = {
    "planarity": (planarity_of_size, [(16, 0)], product((1, 7, 33, 64), (0, 1, 3))),
    "convolution": (
        *(convolution_of_size, [(16, 0, 2), (16, 1, 1)]),
        product((1, 3, 17, 64, 65, 1000), (0, 1, 2, 5), (1, 3)),
    ),
    # Token by token, and in chunks.
    "attention": (
        *(attention_of_size, [(16, 0, 2), (40, 0, 2)]),
        product((1, 64, 65, 1000), (0, 1, 4), (3,)),
    ),
    "rotations": (
        *(rotation_of_size, [(16, 16, 0), (16, 16, 1)]),
        product((1, 7, 64), (1, 3, 32, 1000), (0, 1, 2)),
    ),
    "triangle": (partial(triangle_of_size, "float32", None, 16), *TRIANGLE_SIZES),
    "triangle-fp16": (partial(triangle_of_size, "float32", "fp16", 16), *TRIANGLE_SIZES),
    "triangle-bfloat16": (partial(triangle_of_size, "bfloat16", None, 16), *TRIANGLE_SIZES),
    "triangle-many": (
        *(partial(triangle_of_size, "bfloat16", None, 64), [(1, 256, 0), (2, 192, 0)]),
        [(1, 264, 0), (2, 200, 1), (1, 272, 8)],
    ),
}


@pytest.mark.parametrize(("run", "known", "others"), SIZES.values(), ids=SIZES)
def test_other_sizes_and_alignments_compile_nothing_new(run, known, others, compilations):
    for size in known:
        run(*size)
    compilations.clear()
    for size in others:
        run(*size)
    assert not compilations


def test_what_is_compiled_is_seen(compilations):
    """Taps are wider than in any other test, so that kernels must be compiled."""
    x, kernels = convolution(5, channels=8, width=23)
    fusedops.dynamic_conv(x.detach(), kernels.detach())
    assert compilations


def triangles_of_size(dtype, precision, gate, B, N):
    """Return the arrays of an update."""
    _, leaves, _ = triangle(dtype, precision, gate, "outgoing", (B, N, 24, 40))
    return [*leaves.values()]


def updated(precision, gate, *arrays):
    named = dict(zip(ARRAYS, arrays, strict=True))
    return fusedops.triangle_multiplicative_update(**named, precision=precision, gate=gate)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("op", "make", "sizes", "allowed"),
    [
        (
            partial(fusedops.dynamic_conv, activation="silu"),
            partial(convolution, dtype=torch.bfloat16, batch=2),
            [(7,), (130,), (300,)],
            1e-2,
        ),
        (fusedops.planarity_nll, example, [(30,), (40,), (77,)], 1e-5),
        (forth_and_back, graph_on_gpu, [(5, 9), (40, 300), (33, 77)], 1e-5),
        *(
            (
                partial(updated, precision, gate),
                partial(triangles_of_size, dtype, precision, gate),
                [(2, 40), (3, 33), (5, 24)],
                allowed,
            )
            for dtype, precision, gate, allowed in (
                ("float32", "fp16", "hidden", 5e-3),
                ("bfloat16", None, "output", 2e-2),
            )
        ),
    ],
    ids=["convolution", "planarity", "rotations", "triangle-fp16", "triangle-bfloat16"],
)
def test_under_compile_and_autocast(op, make, sizes, allowed):
    def function(x, *others):
        return op(2 * x, *others).sin()

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, dynamic=True)
    for size in sizes:
        arguments = make(*size)
        leaves = [a for a in arguments if isinstance(a, torch.Tensor)]
        got = torch.autograd.grad(fast(*arguments).sum(), leaves)
        want = torch.autograd.grad(function(*arguments).sum(), leaves)
        for a, b in zip(got, want, strict=True):
            assert error(a.double().cpu(), b.double().cpu()) < allowed
    for dtype in (torch.bfloat16, torch.float32):
        cast = [a.detach().to(dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
        with torch.autocast("cuda", torch.float16):
            out = op(*cast)
        # The loss of planarity is a number of float32.
        assert out.dtype == (dtype if out.ndim else torch.float32)
        assert torch.equal(out, op(*cast))
