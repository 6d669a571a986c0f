"""torch.compile sees one node for every call of an op, and none of its implementation."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from contract import TRACED, as_framework, requests, tuple_of  # noqa: E402
from fusedops.nn import TriangleMultiplicativeUpdate  # noqa: E402
from fusedops.wigner import wigner_d  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def random(*shape):
    # The sizes seed the numbers, so that equal calls give equal tensors.
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def integers(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def tokens(n):
    return random(1, 7 + n, 3), random(1, 7 + n, 3, 4), torch.tensor([0, 2 + n, 7 + n])


def convolve(x, kernels, cu_seqlens):
    return fusedops.dynamic_conv(x, kernels, cu_seqlens=cu_seqlens, activation="silu")


def last_inputs(x, kernels, cu_seqlens):
    options = {"cu_seqlens": cu_seqlens, "output_final_state": True}
    return fusedops.dynamic_conv(x, kernels, **options)[1]


def graph(n):
    return random(6 + n, 9, 4), random(9 + 2 * n, 3), integers(6 + n, 2, 9 + 2 * n)


def rotate(x, vectors, edges):
    return fusedops.node_to_edge_wigner_permute(x, edges, wigner_d(vectors, 2))


def agree(fast, function, arguments, differentiated):
    found = []
    for f in (fast, function):
        leaves = [a.clone().requires_grad_() for a in arguments[:differentiated]]
        out = f(*leaves, *arguments[differentiated:])
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*found)
    with torch.no_grad():
        torch.testing.assert_close(fast(*arguments), function(*arguments))


@pytest.fixture(autouse=True)
def graphs():
    """Count graphs and graph breaks from zero."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return counters


INDEX, SIGMA = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5]]), torch.tensor([0.1, 0.2])


@pytest.mark.parametrize(
    "plane", [(INDEX, SIGMA), ([[0, 1, 2, 3]], [0.1])], ids=["tensors", "lists"]
)
def test_lists_of_planes_are_in_the_graph(plane, graphs):
    """Calls of several sizes stay one graph, forward and backward; test_contract.py has others."""

    def between(xyz):
        return fusedops.planarity_nll(1.25 * xyz, [plane]).cos()

    fast = torch.compile(between, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in (8, 11, 13):
        agree(fast, between, (random(n, 3),), 1)
    # Calls with and without gradients have a graph each, perhaps one more where sizes are equal.
    assert graphs["stats"]["unique_graphs"] <= 4


@torch.library.custom_op("fusedops_tests::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that inductor can't fuse, because its kernels take seconds to compile."""
    return x.clone()


copy.register_fake(torch.empty_like)
copy.register_autograd(lambda context, gradient: copy(gradient))


def together(examples):
    """Return a function of calls, whose leaves are parts of one tensor, and so are the results."""

    def functions(flat, *calls):
        sizes = [leaf.numel() for leaves, _ in calls for leaf in leaves.values()]
        parts, outs = iter(torch.split(copy(1.25 * flat), sizes)), []
        for example, (leaves, others) in zip(examples, calls, strict=True):
            given = {name: next(parts).view(leaf.shape) for name, leaf in leaves.items()}
            outs += tuple_of(example.op(**given, **others))
        return copy(torch.cat([out.reshape(-1) for out in outs])).cos()

    return functions


def test_inductor_takes_every_op(graphs):
    """Compile a call of every op in one graph, and of a few with dynamic shapes, which take long.

    test_contract.py traces every op with dynamic shapes.
    """
    every = list({example.op: example for example in TRACED}.values())
    for examples, sizes in ((every, 1), (every[1::6], 2)):
        torch._dynamo.reset()
        functions = together(examples)
        fast = torch.compile(functions)
        for n in range(sizes):
            calls = []
            for p in (example.of(example.others[n]) for example in examples):
                arguments = as_framework("torch", p)
                calls.append(({name: arguments.pop(name) for name in p.leaves}, arguments))
            leaves = [leaf for group, _ in calls for leaf in group.values()]
            flat = torch.cat([leaf.reshape(-1) for leaf in leaves]).requires_grad_()
            found = []
            for f in (fast, functions):
                out = f(flat, *calls)
                found.append([out, *torch.autograd.grad(out.sum(), flat)])
            torch.testing.assert_close(*found)
    assert not graphs["graph_break"]
    assert graphs["stats"]["unique_graphs"] == 3


CELL = torch.diag(torch.tensor([10.0, 11.0, 12.0]))
TABLE = 1 + random(8, 2).abs(), 5 + random(8, 2).abs()
ATOMS = random(8, 3), 10 + random(8).abs(), torch.ones(8), *TABLE, CELL
CROSSED = {
    "planes": (
        lambda x: fusedops.planarity_nll(x, [(np.array([[0, 1, 2, 3]]), np.array([0.1]))]),
        (random(8, 3),),
        1,
    ),
    "edges": (lambda *a: rotate(*a[:2], fusedops.Edges(a[2], 6)), graph(0), 2),
    "density": (lambda *a: fusedops.gaussian_density(*a, (6, 7, 8)), ATOMS, 3),
}


@pytest.mark.parametrize("name", CROSSED)
def test_what_no_graph_holds_ends_it(name, graphs):
    """Lists and NumPy arrays, constructors and checks of atoms run outside, and nothing else."""
    function, arguments, differentiated = CROSSED[name]
    seen = []

    def graph(module, inputs):
        seen.append(module)
        return module.forward

    agree(torch.compile(function, backend=graph), function, arguments, differentiated)
    assert graphs["graph_break"]
    nodes = [node for module in seen for node in module.graph.nodes]
    # A checkout may lie in a folder of the same name as the package.
    package = f'File "{Path(fusedops.__file__).parent}{os.sep}'
    ours = [node for node in nodes if package in (node.stack_trace or "")]
    names = {getattr(node.target, "__name__", node.op) for node in ours}
    assert names <= {"_node", "getitem", "placeholder"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_boundaries_may_change_in_number_and_place(mode):
    """A raw cu_seqlens is an input of the graph; results have the dtype of x, as without it."""
    fast = torch.compile(last_inputs, backend="aot_eager", dynamic=True, fullgraph=True)
    with mode():
        for starts in ([0, 4, 9], [0, 1, 1, 9], [0, 2, 3, 5, 12]):
            x = random(1, starts[-1], 3).bfloat16().requires_grad_(mode is torch.enable_grad)
            given = x, random(3, 4), torch.tensor(starts)
            torch.testing.assert_close(fast(*given), last_inputs(*given))
            assert convolve(*given).dtype == torch.bfloat16


@pytest.mark.parametrize("fill", [False, True], ids=["returned", "out"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_of_paged_states_is_one_graph(tokens, fill, graphs, monkeypatch):
    """It asks for its backend when it runs."""

    def step(x, state, kernels, slots, positions, out):
        options = {"slots": slots, "positions": positions, "activation": "silu", "out": out}
        return 2 * fusedops.dynamic_conv_step(x, state, kernels, **options)

    fast = torch.compile(step, backend="aot_eager", dynamic=True, fullgraph=True)
    # torch.compile would keep equal sizes equal, so these differ from all others.
    for n, backend in ((7, "torch"), (9, "torch"), (12, "numpy")):
        x, kernels = random(n, tokens, 4).bfloat16(), random(4, 4)
        state, positions = random(20, 4, 5), integers(9, n)
        slots = torch.arange(n) + 1
        slots[0] = -1
        one, other = state.clone(), state.clone()
        outs = [torch.full_like(x, torch.nan) if fill else None for _ in range(2)]
        with requests(monkeypatch) as asked, fusedops.use_backend(backend):
            got = fast(x, one, kernels, slots, positions, outs[0])
        assert [name for _, name in asked] == [backend]
        torch.testing.assert_close(got, step(x, other, kernels, slots, positions, outs[1]))
        assert torch.equal(one, other)
        assert not torch.equal(one, state)
        assert not fill or torch.equal(*outs)
    assert graphs["stats"]["unique_graphs"] == 1


def test_a_run_takes_the_living_packed_argument(monkeypatch):
    """A run of a graph builds a packed argument anew only where none with its tensors lives."""
    x, vectors, index = graph(1)
    call = torch.compile(rotate, backend="aot_eager")
    for edges in (fusedops.Edges(index, 7), fusedops.Edges(index.flip(1), 7)):
        want = rotate(x, vectors, edges)
        torch.testing.assert_close(call(x, vectors, edges), want)
        with monkeypatch.context() as patch:
            patch.setattr(fusedops.Edges, "from_tensors", None)
            torch.testing.assert_close(call(x, vectors, edges), want)
        del edges
    flat = fusedops.Edges.from_tensors(*fusedops.Edges(index, 7).flat()).flat()
    held = fusedops.Edges.holding(*flat)
    assert fusedops.Edges.holding(*flat) is held
    assert fusedops.Edges.holding(flat[0], [8, *flat[1][1:]]) is not held
    assert fusedops.Edges.holding([*flat[0][:-1], flat[0][-1].clone()], flat[1]) is not held


def test_bad_arguments_raise_their_own_errors():
    x, kernels, cu_seqlens = tokens(0)
    fast = torch.compile(convolve, backend="aot_eager")
    with pytest.raises(ValueError, match="cu_seqlens ends at 7; it should end at 6"):
        fast(x[:, :6], kernels[:, :6], cu_seqlens)
    with pytest.raises(ValueError, match="dynamic_conv: kernels has shape"):
        fast(x, kernels[:, :5], cu_seqlens)


class Layers(torch.nn.Module):
    """A layer of a potential that gets its graph as a tensor, and an update of pairs."""

    def __init__(self):
        super().__init__()
        self.update = TriangleMultiplicativeUpdate(8, 5)
        torch.nn.init.normal_(self.update.p_out.weight)

    def forward(self, pair, mask, *graph):
        return self.update(pair, mask), force(*graph)


def force(x, edge_index, vectors):
    wigner, C = wigner_d(vectors, 2), x.shape[2]
    message = fusedops.node_to_edge_wigner_permute(x, edge_index, wigner)
    message = (message[..., :C] * message[..., C:]).tanh()
    return fusedops.permute_wigner_inv_edge_to_node(
        message, edge_index, wigner, x.shape[0], transpose=True
    )


def pairs_and_graph(n):
    x, vectors, edge_index = graph(n)
    pair, mask = random(1, 5 + n, 5 + n, 8), (random(1, 5 + n, 5 + n) > 0).float()
    return pair, mask, x, edge_index, vectors


def test_exported_layers_take_graphs_and_pairs_of_any_size(tmp_path):
    """In AOTInductor's package, too, which runs without Python's compiler."""
    layers = Layers()
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    residues = dict.fromkeys((1, 2), torch.export.Dim("N", min=2, max=512))
    sizes = residues, residues, ({0: nodes}, {1: edges}, {0: edges})
    program = torch.export.export(layers, pairs_and_graph(0), dynamic_shapes=sizes)
    # A package that holds the sizes of a graph warns of a class of torch's own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        to = str(tmp_path / "layer.pt2")
        path = torch._inductor.aoti_compile_and_package(program, package_path=to)
        packaged = torch._inductor.aoti_load_package(path)
    for n in (0, 3, 50):
        given = pairs_and_graph(n)
        want = layers(*given)
        for run in (program.module(), packaged):
            torch.testing.assert_close(run(*given), want)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_batched_cotangents_of_exported_layers():
    *given, vectors = pairs_and_graph(0)
    vectors.requires_grad_()
    run = torch.export.export(Layers(), (*given, vectors)).module()
    _, out = run(*given, vectors)
    batch = random(3, *out.shape)
    options = {"retain_graph": True}
    (got,) = torch.autograd.grad(out, vectors, batch, is_grads_batched=True, **options)
    want = [torch.autograd.grad(out, vectors, row, **options)[0] for row in batch]
    torch.testing.assert_close(got, torch.stack(want))
