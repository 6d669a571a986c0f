"""What only a real GPU can show; run with ``pytest -m gpu``."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from fusedops import _registry  # noqa: E402
from fusedops.planarity import gradient_vjp, nll  # noqa: E402
from fusedops.testing import CASES, check, error, protein  # noqa: E402

pytestmark = pytest.mark.gpu


def example(residues, dtype=torch.float32, device="cuda"):
    xyz, indices = protein(residues, np.random.default_rng(residues))
    planes = fusedops.Planes([(index, np.full(len(index), 0.02)) for index in indices])
    return torch.tensor(xyz, dtype=dtype, device=device, requires_grad=True), planes.to(device)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference(case, backend, dtype):
    check(case, "torch", backend, dtype, device="cuda")


def test_triton_is_the_first_choice():
    xyz, planes = example(4)
    explanation = fusedops.planarity_nll.explain(xyz, planes)
    assert explanation.backend == "triton", str(explanation)
    assert fusedops.info().gpus


def test_gradcheck_and_gradgradcheck():
    xyz, planes = example(3, torch.float64)
    assert torch.autograd.gradcheck(lambda x: fusedops.planarity_nll(x, planes), (xyz,))
    assert torch.autograd.gradgradcheck(lambda x: fusedops.planarity_nll(x, planes), (xyz,))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_synchronisation_and_the_same_bits_every_time():
    xyz, planes = example(2000)
    direction = torch.randn_like(xyz)

    def run():
        loss = fusedops.planarity_nll(xyz, planes)
        (gradient,) = torch.autograd.grad(loss, xyz, create_graph=True)
        (turned,) = torch.autograd.grad(gradient, xyz, direction)
        return loss.detach(), gradient.detach(), turned

    first = run()
    for _ in range(5):
        torch.cuda.set_sync_debug_mode(2)
        try:
            again = run()
        finally:
            torch.cuda.set_sync_debug_mode(0)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_a_cuda_graph_replays_new_coordinates():
    xyz, planes = example(300)
    static = xyz.detach().clone().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            static.grad = None
            fusedops.planarity_nll(static, planes).backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    static.grad = None
    with torch.cuda.graph(graph):
        loss = fusedops.planarity_nll(static, planes)
        loss.backward()
    with torch.no_grad():
        static += 0.1 * torch.randn_like(static)
    graph.replay()
    fresh = static.detach().clone().requires_grad_()
    want = fusedops.planarity_nll(fresh, planes)
    want.backward()
    assert torch.equal(loss, want)
    assert torch.equal(static.grad, fresh.grad)


def test_other_sizes_and_alignments_compile_nothing_new():
    from gpukern import planarity as kernels

    def run(residues, skip):
        xyz, planes = example(residues)
        padded = torch.zeros(len(xyz) + skip, 3, device="cuda")
        padded[skip:] = xyz.detach()
        leaf = padded[skip:].requires_grad_()
        (gradient,) = torch.autograd.grad(
            fusedops.planarity_nll(leaf, planes), leaf, create_graph=True
        )
        torch.autograd.grad(gradient.sum(), leaf)

    def compiled():
        launchers = kernels._nll, kernels._gradient_vjp, kernels._reduce
        return sum(
            len(cache[0])
            for launcher in launchers
            for cache in launcher.kernel.device_caches.values()
        )

    run(16, 0)
    before = compiled()
    for residues in (1, 7, 33, 64):
        for skip in (0, 1, 3):
            run(residues, skip)
    assert compiled() == before > 0


def test_six_hundred_thousand_planes_over_three_million_atoms():
    xyz, planes = example(480_000)
    assert planes.num_planes > 600_000
    assert len(xyz) > 3_000_000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = fusedops.planarity_nll(xyz, planes)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28
    call = _registry.Call(nll, (planes.to("cpu"), "uniform"), None)
    value, gradient = call((xyz.detach().cpu().numpy(),), (True, True))
    assert error(loss.item(), value) < 1e-6
    assert error(xyz.grad.cpu(), gradient) < 1e-6


def test_a_kernel_touches_no_memory_of_others():
    """Indices that lie about the coordinates are read as no atom, and nothing is written there."""
    xyz, planes = example(50, torch.float64)
    guard = torch.full((3 * len(xyz), 3), 7.0, dtype=torch.float64, device="cuda")
    short = guard[len(xyz) : len(xyz) + 20]
    short.copy_(xyz.detach()[:20])
    for primitive, arrays in ((nll, (short,)), (gradient_vjp, (short, short))):
        call = _registry.Call(primitive, (planes, "uniform"), "triton")
        outputs = call(arrays, primitive.all_wanted)
        assert all(torch.isfinite(output).all() for output in outputs)
    torch.cuda.synchronize()
    assert (guard[: len(xyz)] == 7).all()
    assert (guard[len(xyz) + 20 :] == 7).all()


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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compile_and_autocast():
    xyz, planes = example(30)
    torch._dynamo.reset()
    loss = torch.compile(lambda x, p: 2 * fusedops.planarity_nll(x, p), fullgraph=True)
    for residues in (30, 40, 77):
        xyz, planes = example(residues)
        value = loss(xyz, planes)
        value.backward()
        (want,) = torch.autograd.grad(2 * fusedops.planarity_nll(xyz, planes), xyz)
        torch.testing.assert_close(xyz.grad, want)
    with torch.autocast("cuda", torch.bfloat16):
        assert fusedops.planarity_nll(xyz, planes).dtype == torch.float32
        half = xyz.detach().bfloat16()
        full = fusedops.planarity_nll(half.float(), planes)
        assert fusedops.planarity_nll(half, planes) == full


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_the_second_gpu():
    xyz, planes = example(50, device="cuda:1")
    loss = fusedops.planarity_nll(xyz, planes)
    loss.backward()
    first, first_planes = example(50, device="cuda:0")
    want = fusedops.planarity_nll(first, first_planes)
    want.backward()
    assert loss.item() == want.item()
    assert torch.equal(xyz.grad.cpu(), first.grad.cpu())
