"""torch.func over every op: derivatives of derivatives, batches, and empty ones."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from fusedops.wigner import wigner_d  # noqa: E402

# torch.func.jvp compiles scripts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

F64 = torch.float64


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64)


TOKENS, KERNELS = random(1, 4, 2), random(1, 4, 2, 3)
ORDERS = random(2, 2), random(2, 1)
EDGES, NODES, MATRICES = fusedops.Edges([[0, 1, 2], [1, 2, 0]], 3), random(3, 4, 1), random(3, 4, 4)
PLANES = fusedops.Planes([([[0, 1, 2, 3]], [0.5])])
PLAN = fusedops.ScatterPlan([[0, 1]], [[[0, 1]]], 4)
XYZ, B, OCCUPANCY = random(4, 3), 10 + random(4).abs(), random(4)
LATTICE = fusedops.Lattice(np.diag([9.0, 10.0, 11.0]), (4, 5, 4))
SCATTERERS = 1 + random(4, 1).abs(), 5 + random(4, 1).abs(), LATTICE
NORM, PROJECTION, LAST = (random(2), random(2)), (random(4, 2), None), (random(2, 2), None)
WEIGHTS = *NORM, *PROJECTION, *PROJECTION, *NORM, *LAST, *LAST


def square(op):
    """Square a linear op's result, which gives it a second derivative."""
    return lambda x: op(x) ** 2


def draw(xyz, b):
    # The default radius follows from b, which torch.vmap may map over, so give one.
    return fusedops.gaussian_density(xyz, b, OCCUPANCY, *SCATTERERS, radius=3.0, on_bad="skip")


# A function of one tensor for every op, and the tensor's shape.
FUNCTIONS = {
    "tokens": (lambda x: fusedops.dynamic_conv(x, KERNELS, activation="silu"), (1, 4, 2)),
    "kernels": (lambda k: fusedops.dynamic_conv(TOKENS, k, activation="silu"), (2, 3)),
    "planarity": (lambda x: fusedops.planarity_nll(x, PLANES).reshape(1), (4, 3)),
    "forth": (
        square(lambda x: fusedops.node_to_edge_wigner_permute(x, EDGES, MATRICES)),
        (3, 4, 1),
    ),
    "back": (
        square(lambda y: fusedops.permute_wigner_inv_edge_to_node(y, EDGES, MATRICES, 3)),
        (3, 4, 1),
    ),
    "own": (square(lambda y: fusedops.permute_wigner_inv(y, MATRICES)), (3, 4, 1)),
    "degree": (
        square(lambda y: fusedops.edge_degree_scatter(NODES, y, EDGES, MATRICES)),
        (3, 2, 1),
    ),
    "wigner_d": (lambda v: wigner_d(v, 2), (2, 3)),
    "wigner_d-packed": (lambda v: wigner_d(v, 2, packed=True), (2, 3)),
    "so2": (
        lambda y: fusedops.so2_convolution(y, *ORDERS, radial=y[:, :3, 0]),
        (2, 4, 1),
    ),
    "gates": (lambda y: fusedops.gate_activation(y[:, 0], y), (2, 4, 1)),
    "density": (lambda xyz: draw(xyz, B), (4, 3)),
    "density-b": (lambda b: draw(XYZ, 10 + b**2), (4,)),
    "scatter": (square(lambda c: fusedops.structured_scatter_add(c, PLAN)), (1, 2, 1, 2)),
    "gather": (square(lambda g: fusedops.structured_gather(g, PLAN)), (4,)),
    "triangle": (
        lambda z: fusedops.triangle_multiplicative_update(z, "outgoing", None, *WEIGHTS),
        (1, 2, 2, 2),
    ),
}

every_op = pytest.mark.parametrize("name", FUNCTIONS)


@every_op
def test_vjp_pulls_back_after_its_transform(name):
    function, shape = FUNCTIONS[name]
    x = random(*shape).requires_grad_()
    out, pullback = torch.func.vjp(function, x)
    cotangent, other = random(*out.shape), random(*shape)
    (want,) = torch.autograd.grad(function(x), x, cotangent, create_graph=True)
    for _ in range(2):
        (got,) = pullback(cotangent)
        torch.testing.assert_close(got, want)
    # The tensor outside has a derivative of the pullback.
    found = [torch.autograd.grad(g, x, other)[0] for g in (got, want)]
    torch.testing.assert_close(*found)


@every_op
def test_the_pullback_of_a_gradient_after_its_transform(name):
    """Arrays of a transform that has ended require no grad, and have a gradient nonetheless."""
    function, shape = FUNCTIONS[name]
    gradient, x, v = torch.func.grad(loss_of(function)), random(*shape), random(*shape).cos()
    want = torch.func.vjp(lambda x: torch.func.vjp(gradient, x)[1](v)[0], x)[0]
    torch.testing.assert_close(torch.func.vjp(gradient, x)[1](v)[0], want)


def loss_of(function):
    def loss(x):
        y = function(x)
        return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=F64).reshape(y.shape)).sum()

    return loss


@every_op
def test_second_derivatives(name):
    function, shape = FUNCTIONS[name]
    loss, x = loss_of(function), random(*shape)
    want = torch.autograd.functional.hessian(loss, x)
    hessian = torch.func.jacrev(torch.func.grad(loss))
    torch.testing.assert_close(hessian(x), want)
    batch = torch.stack([x, x.flip(0)])
    torch.testing.assert_close(torch.vmap(hessian)(batch)[0], want)


@every_op
def test_third_derivatives(name):
    function, shape = FUNCTIONS[name]
    loss, x = loss_of(function), random(*shape)

    def twice(gradient, x):
        return gradient(lambda x: gradient(loss, x).sin().sum(), x).cos().sum()

    def by_func(f, x):
        return torch.func.grad(f)(x)

    def by_autograd(f, x):
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    leaf = x.clone().requires_grad_()
    want = by_autograd(lambda x: twice(by_autograd, x), leaf)
    torch.testing.assert_close(by_func(lambda x: twice(by_func, x), x), want.detach())


@every_op
def test_tangents_of_tangents(name):
    """Torch switches tangents off in a rule for them, those of outer transforms too."""
    function, shape = FUNCTIONS[name]
    x, t = random(*shape), random(*shape).cos()

    def slope(f):
        return lambda x: torch.func.jvp(f, (x,), (t,))[1]

    second = slope(slope(loss_of(function)))
    want = torch.func.grad(lambda x: (torch.func.grad(loss_of(function))(x) * t).sum())(x)
    torch.testing.assert_close(second(x), (want * t).sum())
    torch.testing.assert_close(slope(second)(x), (torch.func.grad(second)(x) * t).sum())


def test_compiled_tangents():
    function, shape = FUNCTIONS["tokens"]
    x, t = random(*shape), random(*shape).cos()

    def push(x, t):
        return torch.func.jvp(function, (x,), (t,))[1]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(push, backend="aot_eager")(x, t), push(x, t))


@every_op
def test_a_batch_of_no_arrays(name):
    function, shape = FUNCTIONS[name]
    nothing = torch.zeros(0, *shape, dtype=F64)
    out = torch.vmap(function)(nothing)
    assert out.shape == (0, *function(random(*shape)).shape)
    assert out.dtype == F64
    assert torch.vmap(torch.func.grad(loss_of(function)))(nothing).shape == nothing.shape
    moved = torch.zeros(*shape, 0, dtype=F64)
    assert torch.vmap(function, in_dims=-1)(moved).shape == out.shape


@every_op
def test_a_jacobian_without_rows(name):
    function, shape = FUNCTIONS[name]
    jacobian = torch.func.jacrev(lambda x: function(x).reshape(-1)[:0])(random(*shape))
    assert jacobian.shape == (0, *shape)


def test_the_jacobian_of_no_edges():
    edges = torch.zeros(0, 3, dtype=F64)
    assert torch.func.jacrev(lambda v: wigner_d(v, 1))(edges).shape == (0, 4, 4, 0, 3)
