"""What only a real GPU can show; run with ``pytest -m gpu``."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from fusedops import _registry  # noqa: E402
from fusedops.conv import conv, conv_vjp  # noqa: E402
from fusedops.planarity import gradient_vjp, nll  # noqa: E402
from fusedops.testing import CASES, atoms_in, check, error, protein  # noqa: E402
from fusedops.wigner import edge_wigner, wigner_d  # noqa: E402

pytestmark = pytest.mark.gpu


def example(residues, dtype=torch.float32, device="cuda"):
    xyz, indices = protein(residues, np.random.default_rng(residues))
    planes = fusedops.Planes([(index, np.full(len(index), 0.02)) for index in indices])
    return torch.tensor(xyz, dtype=dtype, device=device, requires_grad=True), planes.to(device)


def matrix():
    """Every case, backend and dtype; of the kernels that compile for seconds, some."""
    for case in CASES:
        slow = case.primitive is edge_wigner and not case.name.startswith("uma")
        few = case.name.startswith(("l3", "l4")) and case.name not in ("l3-m2-back", "l4-m4-forth")
        for backend in ("triton", "torch") if case.has_kernels else ("torch",):
            for dtype in ("float64", "float32", "bfloat16", "float16"):
                if not (backend == "triton" and slow and (few or dtype != "float32")):
                    yield case, backend, dtype


@pytest.mark.parametrize(("case", "backend", "dtype"), list(matrix()), ids=str)
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


def convolution(tokens, channels=64, width=4, dtype=torch.float32, batch=1):
    """Leaves x and kernels."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    shapes = (batch, tokens, channels), (batch, tokens, channels, width)
    return [
        torch.randn(shape, generator=generator, dtype=dtype, device="cuda", requires_grad=True)
        for shape in shapes
    ]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("static", [False, True])
def test_gradgradcheck_of_the_convolution(static, activation):
    x, kernels = convolution(5, channels=3, width=3, dtype=torch.float64)
    if static:
        kernels = kernels.detach()[0, 0].requires_grad_()
    state = torch.randn(2, 3, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, device="cuda", requires_grad=True)
    cu_seqlens = torch.tensor([0, 1, 5], device="cuda")

    def function(x, kernels, state, bias):
        return fusedops.dynamic_conv(
            x,
            kernels,
            initial_state=state,
            bias=bias,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            activation=activation,
        )

    assert torch.autograd.gradcheck(function, (x, kernels, state, bias))
    assert torch.autograd.gradgradcheck(function, (x, kernels, state, bias))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_convolution_waits_for_nothing_and_has_the_same_bits_every_time():
    x, kernels = convolution(500, channels=72)
    bias = torch.randn(72, device="cuda", requires_grad=True)
    static = torch.randn(72, 4, device="cuda", requires_grad=True)
    cu_seqlens = torch.tensor([0, 7, 7, 300, 500], device="cuda")
    state = torch.randn(4, 72, 4, device="cuda", requires_grad=True)

    def run():
        results = []
        for taps in (kernels, static):
            outputs = fusedops.dynamic_conv(
                x,
                taps,
                bias=bias,
                initial_state=state,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
                activation="silu",
            )
            loss = outputs[0].square().sum() + outputs[1].sum()
            results += [*outputs, *torch.autograd.grad(loss, (x, taps, bias, state))]
        return [result.detach() for result in results]

    first = run()
    for _ in range(3):
        torch.cuda.set_sync_debug_mode(2)
        try:
            again = run()
        finally:
            torch.cuda.set_sync_debug_mode(0)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_a_cuda_graph_replays_the_convolution_and_decodes():
    x, kernels = convolution(130)
    sequences = fusedops.Sequences(torch.tensor([0, 100, 130], device="cuda"))
    state = torch.zeros(130, 64, 4, device="cuda")

    def run():
        out = fusedops.dynamic_conv(x, kernels, cu_seqlens=sequences, activation="silu")
        gradients = torch.autograd.grad(out.square().sum(), (x, kernels))
        with torch.no_grad():
            token = fusedops.dynamic_conv_step(x[0], state, kernels[0], activation="silu")
        return out.detach(), *gradients, token

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x += torch.randn_like(x)
        state.normal_()
    before = state.clone()
    graph.replay()
    after = state.clone()
    state.copy_(before)
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))
    assert torch.equal(state, after)
    assert torch.equal(after, torch.cat([before[..., 1:], x[0].detach()[..., None]], -1))


def test_other_lengths_and_alignments_compile_no_new_convolution():
    from gpukern import conv as kernels_of

    def run(tokens, skip, batch):
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

    def compiled():
        launchers = [*kernels_of._forward.values(), *kernels_of._backward.values()]
        return sum(
            len(cache[0])
            for launcher in launchers
            for cache in launcher.kernel.device_caches.values()
        )

    run(16, 0, 2)
    run(16, 1, 1)
    before = compiled()
    for tokens in (1, 3, 17, 64, 65, 1000):
        for skip in (0, 1, 2, 5):
            for batch in (1, 3):
                run(tokens, skip, batch)
    assert compiled() == before > 0


def test_a_strided_projection_is_read_in_place():
    projected = torch.randn(2, 1000, 3 * 512, device="cuda", dtype=torch.bfloat16)
    x = projected[..., 512:1024]
    kernels = torch.randn(2, 1000, 512, 4, device="cuda", dtype=torch.bfloat16)
    want = fusedops.dynamic_conv(x.contiguous(), kernels)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fusedops.dynamic_conv(x, kernels)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 1024
    assert torch.equal(out, want)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(fusedops.dynamic_conv(transposed, kernels), want)


def test_more_than_two_to_the_31_taps():
    tokens, channels = 2**19 + 100, 1024
    assert tokens * channels * 4 > 2**31
    x, kernels = convolution(tokens, channels, dtype=torch.bfloat16)
    out = fusedops.dynamic_conv(x, kernels)
    dx, dkernels = torch.autograd.grad(out, (x, kernels), torch.ones_like(out))
    # Whole runs from the end, with the inputs before them as their state.
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
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fusedops.dynamic_conv(x, kernels, activation="silu")
    gradients = torch.autograd.grad(out, (x, kernels), out.detach())
    used = out.nbytes + sum(gradient.nbytes for gradient in gradients)
    assert torch.cuda.max_memory_allocated() - before <= used + 2**16


def test_packed_sequences_that_are_on_another_device():
    x, kernels = convolution(10)
    for cu_seqlens in (torch.tensor([0, 10]), fusedops.Sequences([0, 10]), [0, 10]):
        with pytest.raises(ValueError, match="cu_seqlens is on cpu; it should be on cuda:0"):
            fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens)


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


def test_sequences_that_lie_lead_nowhere_on_a_gpu():
    sequences = fusedops.Sequences([0, 2, 75, 80]).to("cuda")
    x, kernels = (a.detach() for a in convolution(20, channels=8))
    state = torch.randn(3, 8, 4, device="cuda")
    call = _registry.Call(conv, (sequences, "silu"), "triton")
    out, final = call((x, kernels, state, None), (True, True))
    gradients = call.other(conv_vjp, (x, kernels, state, None, out, final), (True,) * 3 + (False,))
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()
    assert torch.isfinite(gradients[0]).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_convolution_under_compile_and_autocast():
    torch._dynamo.reset()

    def function(x, kernels):
        return fusedops.dynamic_conv(2 * x, kernels, activation="silu").sin()

    fast = torch.compile(function, fullgraph=True, dynamic=True)
    for tokens in (7, 130, 300):
        x, kernels = convolution(tokens, dtype=torch.bfloat16, batch=2)
        got = torch.autograd.grad(fast(x, kernels).sum(), (x, kernels))
        want = torch.autograd.grad(function(x, kernels).sum(), (x, kernels))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    with torch.autocast("cuda", torch.bfloat16):
        assert fusedops.dynamic_conv(x, kernels).dtype == torch.bfloat16
        assert fusedops.dynamic_conv(x.float(), kernels).dtype == torch.float32


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_the_convolution_on_the_second_gpu():
    x, kernels = convolution(100)
    there = [a.detach().to("cuda:1").requires_grad_() for a in (x, kernels)]
    results = []
    for arrays in ((x, kernels), there):
        cu_seqlens = torch.tensor([0, 30, 100], device=arrays[0].device)
        out = fusedops.dynamic_conv(*arrays, cu_seqlens=cu_seqlens, activation="silu")
        gradients = torch.autograd.grad(out.square().sum(), arrays)
        state = torch.zeros(100, 64, 4, device=arrays[0].device)
        with torch.no_grad():
            token = fusedops.dynamic_conv_step(arrays[0][0], state, arrays[1][0])
        results.append([out, *gradients, token, state])
    for first, second in zip(*results, strict=True):
        assert second.device.index == 1
        assert torch.equal(first.cpu(), second.cpu())


def graph_on_gpu(nodes=40, count=300, lmax=2, channels=32, dtype=torch.float32, device="cuda"):
    """Features, edges and the matrices of random directions, the first and the last leaves."""
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


def test_gradgradcheck_of_the_edge_rotations():
    x, edges, wigner = graph_on_gpu(3, 5, 1, 2, torch.float64)
    wigner = wigner.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: forth_and_back(a[0], edges, a[1]), (x, wigner))
    assert torch.autograd.gradgradcheck(lambda *a: forth_and_back(a[0], edges, a[1]), (x, wigner))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_edge_rotations_wait_for_nothing_and_have_the_same_bits_every_time():
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

    first = run()
    for _ in range(3):
        torch.cuda.set_sync_debug_mode(2)
        try:
            again = run()
        finally:
            torch.cuda.set_sync_debug_mode(0)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_a_cuda_graph_replays_a_training_step_through_forces():
    _, edges, _ = graph_on_gpu()
    vectors = torch.randn(edges.num_edges, 3, device="cuda", requires_grad=True)
    x = torch.randn(edges.num_nodes, 9, 32, device="cuda", requires_grad=True)

    def run():
        energy = forth_and_back(x, edges, wigner_d(vectors, 2)).square().sum()
        (forces,) = torch.autograd.grad(energy, vectors, create_graph=True)
        return forces.detach(), *torch.autograd.grad(forces.square().sum(), (x, vectors))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x += torch.randn_like(x)
        vectors += torch.randn_like(vectors)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


def test_other_graphs_and_alignments_compile_no_new_rotation():
    from gpukern import wigner as kernels_of

    def run(nodes, count, skip):
        x, edges, wigner = graph_on_gpu(nodes, count)
        padded = torch.zeros(x.numel() + skip, device="cuda")
        padded[skip:] = x.detach().flatten()
        leaf = padded[skip:].view(x.shape).requires_grad_()
        loss = forth_and_back(leaf, edges, wigner).square().sum()
        got = torch.autograd.grad(loss, (leaf, wigner))
        want = torch.autograd.grad(forth_and_back(x, edges, wigner).square().sum(), (x, wigner))
        for a, b in zip(got, want, strict=True):
            assert error(a.cpu(), b.cpu()) < 1e-6

    def compiled():
        launchers = [*kernels_of._by_edge.values(), *kernels_of._by_node.values()]
        launchers.append(kernels_of._place)
        return sum(
            len(cache[0])
            for launcher in launchers
            for cache in launcher.kernel.device_caches.values()
        )

    run(16, 16, 0)
    run(16, 16, 1)
    before = compiled()
    for nodes in (1, 7, 64):
        for count in (1, 3, 32, 1000):
            for skip in (0, 1, 2):
                run(nodes, count, skip)
    assert compiled() == before > 0


def test_more_than_two_to_the_31_elements_of_messages():
    nodes, count, channels = 100, 2**20, 128
    assert count * 9 * 2 * channels > 2**31
    x, edges, wigner = graph_on_gpu(nodes, count, 2, channels, torch.bfloat16)
    message = fusedops.node_to_edge_wigner_permute(x, edges, wigner)
    dx, dwigner = torch.autograd.grad(message, (x, wigner), message.detach())
    # The last edges alone.
    tail = slice(count - 1000, count)
    ends = [array[tail] for array in edges.tensors_here()[:2]]
    few = fusedops.Edges(torch.stack(ends), nodes)
    matrices = wigner.detach()[tail].clone().requires_grad_()
    want = fusedops.node_to_edge_wigner_permute(x, few, matrices)
    torch.testing.assert_close(message[tail], want)
    (want_dwigner,) = torch.autograd.grad(want, matrices, want.detach())
    torch.testing.assert_close(dwigner[tail], want_dwigner)
    # What is turned there and back is the sum over a node's edges of itself.
    degree = sum(torch.bincount(end, minlength=nodes) for end in edges.tensors_here()[:2])
    want = x.detach().float() * degree[:, None, None]
    assert error(dx.float().cpu(), want.cpu()) < 0.01
    del message, dx, dwigner
    torch.cuda.empty_cache()


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
    index[1, 7] = 40
    with pytest.raises(IndexError, match=r"edge_index\[1, 7\] is 40; it should be in \[0, 40\)"):
        fusedops.node_to_edge_wigner_permute(x, index, wigner)
    with pytest.raises(ValueError, match="edge_index is on cpu; it should be on cuda:0"):
        fusedops.node_to_edge_wigner_permute(x, here, wigner)


def test_edges_are_copies_and_leave_nothing_behind():
    import gc

    from fusedops._torch import packed_read

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
    few = x[:3].contiguous()
    message = torch.randn(300, 9, 64, device="cuda")
    call = _registry.Call(edge_wigner, (edges, 2, "forth", 1.0), "triton")
    (_, on_message, _) = call((None, few, None, wigner), (False, True, False))
    on_x, _, on_wigner = call((None, few, message, wigner), (True, False, True))
    torch.cuda.synchronize()
    for result in (on_message, on_x, on_wigner):
        assert torch.isfinite(result).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_edge_rotations_under_compile_and_autocast():
    torch._dynamo.reset()
    fast = torch.compile(forth_and_back, fullgraph=True, dynamic=True)
    for nodes, count in ((5, 9), (40, 300), (33, 77)):
        x, edges, wigner = graph_on_gpu(nodes, count)
        got = torch.autograd.grad(fast(x, edges, wigner).sum(), (x, wigner))
        want = torch.autograd.grad(forth_and_back(x, edges, wigner).sum(), (x, wigner))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    with torch.autocast("cuda", torch.bfloat16):
        out = fusedops.node_to_edge_wigner_permute(x.bfloat16(), edges, wigner)
        assert out.dtype == torch.bfloat16
        assert fusedops.node_to_edge_wigner_permute(x, edges, wigner).dtype == torch.float32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_the_edge_rotations_on_the_second_gpu():
    x, edges, wigner = graph_on_gpu()
    there = x.detach().to("cuda:1").requires_grad_(), edges.to("cuda:1"), wigner.detach()
    there = *there[:2], there[2].to("cuda:1").requires_grad_()
    results = []
    for arrays in ((x, edges, wigner), there):
        out = forth_and_back(*arrays)
        results.append([out, *torch.autograd.grad(out.square().sum(), (arrays[0], arrays[2]))])
    for first, second in zip(*results, strict=True):
        assert second.device.index == 1
        assert torch.equal(first.cpu(), second.cpu())


def atoms_on_gpu(count=500, anisotropic=False):
    cell = np.array([[30.0, 2.0, -3.0], [0.0, 28.0, 1.0], [0.0, 0.0, 26.0]])
    arrays = atoms_in(cell, count, np.random.default_rng(count), anisotropic=anisotropic)
    xyz, b, occupancy, *table = (torch.tensor(a, device="cuda").float() for a in arrays)
    lattice = fusedops.Lattice(cell, (60, 50, 52)).to("cuda")
    return [a.requires_grad_() for a in (xyz, b, occupancy)], table, lattice


def map_and_gradients(atoms, table, lattice):
    rho = fusedops.gaussian_density(*atoms, *table, lattice, on_bad="skip")
    return rho.detach(), *torch.autograd.grad(rho.square().sum(), atoms)


def same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("anisotropic", [False, True])
def test_a_cuda_graph_replays_a_step_of_refinement(anisotropic):
    atoms, table, lattice = atoms_on_gpu(anisotropic=anisotropic)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            map_and_gradients(atoms, table, lattice)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = map_and_gradients(atoms, table, lattice)
    with torch.no_grad():
        atoms[0].add_(torch.randn_like(atoms[0]))
    graph.replay()
    same(captured, map_and_gradients(atoms, table, lattice))


def cubes_on_gpu(dtype=torch.int64):
    at = torch.randint(0, 40, (300, 3), device="cuda")
    x, y, z = ((at[:, d, None] + torch.arange(9, device="cuda")) % 40 for d in range(3))
    return (x * 1600).to(dtype), (y[:, :, None] * 40 + z[:, None]).to(dtype)


def test_a_cuda_graph_replays_scatter_and_gather_with_a_plan():
    plan = fusedops.ScatterPlan(*cubes_on_gpu(), 40**3)
    cubes = torch.randn(300, 9, 9, 9, device="cuda")
    weights = torch.randn(40**3, device="cuda")

    def run():
        rho = fusedops.structured_scatter_add(cubes, plan)
        return rho, fusedops.structured_gather(rho * weights, plan)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    cubes.normal_()
    graph.replay()
    same(captured, run())


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


@pytest.mark.parametrize("anisotropic", [False, True])
def test_second_derivatives_of_the_density(anisotropic):
    atoms, table, lattice = atoms_on_gpu(3, anisotropic)
    atoms = [a.detach().double().requires_grad_() for a in atoms]
    table = [a.double() for a in table]
    small = fusedops.Lattice(lattice.to("cpu").step * np.array(lattice.shape), (6, 5, 7)).to("cuda")

    def run(*arrays):
        return fusedops.gaussian_density(*arrays, *table, small, radius=9.0, on_bad="skip")

    assert torch.autograd.gradcheck(run, atoms, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(run, atoms, nondet_tol=1e-12)
