"""torch.func over every op: derivatives of derivatives, batches, and empty ones."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from contract import EXAMPLES, function_of, tensor, total, tuple_of  # noqa: E402
from fusedops.wigner import wigner_d  # noqa: E402

# torch.func.jvp compiles scripts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(params=EXAMPLES, ids=str)
def p(request):
    return request.param.problem("tiny")


def arrays_of(p):
    return tuple(tensor(p.arguments[name]) for name in p.leaves)


def vectors(p):
    rng = np.random.default_rng(2)
    return tuple(tensor(rng.normal(size=p.arguments[name].shape)) for name in p.leaves)


def gradient_of(loss, arrays):
    return torch.func.grad(loss, argnums=tuple(range(len(arrays))))


def along(gradients, directions):
    return sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))


def test_vjp_pulls_back_after_its_transform(p):
    leaves, cotangents = arrays_of(p), tuple(map(tensor, p.cotangents))
    for leaf in leaves:
        leaf.requires_grad_()

    def function(*leaves):
        # Squares, since a linear op has no second derivative.
        return tuple(out.square() for out in tuple_of(function_of(p)(*leaves)))

    _, pullback = torch.func.vjp(function, *leaves)
    want = torch.autograd.grad(function(*leaves), leaves, cotangents, create_graph=True)
    for _ in range(2):
        got = pullback(cotangents)
        torch.testing.assert_close(got, want)
    # The tensors outside have a derivative of the pullback.
    found = [
        torch.autograd.grad(along(of, vectors(p)), leaves, materialize_grads=True)
        for of in (got, want)
    ]
    torch.testing.assert_close(*found)


def test_the_pullback_of_a_gradient_after_its_transform(p):
    """Arrays of a transform that has ended require no grad, and have a gradient nonetheless."""
    arrays, v = arrays_of(p), vectors(p)
    gradient = gradient_of(total(p), arrays)
    want = torch.func.vjp(lambda *x: torch.func.vjp(gradient, *x)[1](v), *arrays)[0]
    torch.testing.assert_close(torch.func.vjp(gradient, *arrays)[1](v), want)


def test_hessians(p):
    """By a step along two directions, since a Hessian has a row for each number."""
    x, *others = arrays_of(p)
    directions = torch.stack([vectors(p)[0], x.cos()])

    def loss(step):
        return total(p)(x + torch.tensordot(step, directions, 1), *others)

    step = torch.tensor([0.01, -0.02], dtype=torch.float64)
    want = torch.autograd.functional.hessian(loss, step)
    gradient, forward = torch.func.grad(loss), torch.func.jacfwd(loss)
    for hessian in (
        *(torch.func.hessian(loss), torch.func.jacrev(gradient)),
        *(torch.func.jacrev(forward), torch.func.jacfwd(forward)),
    ):
        torch.testing.assert_close(hessian(step), want)
    batch = torch.stack([step, 1.25 * step])
    torch.testing.assert_close(torch.vmap(torch.func.jacrev(gradient))(batch)[0], want)


def test_third_derivatives(p):
    def by_func(f, arrays):
        return gradient_of(f, arrays)(*arrays)

    def by_autograd(f, arrays):
        return torch.autograd.grad(f(*arrays), arrays, create_graph=True, materialize_grads=True)

    def third(gradients, arrays):
        def first(*arrays):
            return along(gradients(total(p), arrays), vectors(p)).sin()

        return gradients(lambda *arrays: along(gradients(first, arrays), vectors(p)), arrays)

    leaves = tuple(a.clone().requires_grad_() for a in arrays_of(p))
    want = [gradient.detach() for gradient in third(by_autograd, leaves)]
    torch.testing.assert_close(list(third(by_func, arrays_of(p))), want)


@pytest.mark.parametrize("p", {e.op: e for e in EXAMPLES}.values(), ids=str, indirect=True)
def test_tangents_of_tangents(p):
    """Torch switches tangents off in a rule for them, those of outer transforms too."""
    arrays, t, loss = arrays_of(p), vectors(p), total(p)

    def slope(f):
        return lambda *x: torch.func.jvp(f, x, t)[1]

    def pulled(f):
        return lambda *x: along(gradient_of(f, x)(*x), t)

    second = slope(slope(loss))
    torch.testing.assert_close(second(*arrays), pulled(pulled(loss))(*arrays))
    torch.testing.assert_close(slope(second)(*arrays), pulled(second)(*arrays))


def test_compiled_tangents():
    x, t = torch.randn(2, 1, 4, 2, dtype=torch.float64).unbind()
    kernels = torch.randn(2, 3, dtype=torch.float64)

    def push(x, t):
        return torch.func.jvp(
            lambda x: fusedops.dynamic_conv(x, kernels, activation="silu"), (x,), (t,)
        )[1]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(push, backend="aot_eager")(x, t), push(x, t))


def test_a_batch_of_no_arrays(p):
    function, arrays = function_of(p), arrays_of(p)
    shapes = [(0, *cotangent.shape) for cotangent in p.cotangents]
    for at, moved in ((0, False), (-1, True)):
        nothing = [a.new_zeros((*a.shape, 0) if moved else (0, *a.shape)) for a in arrays]
        outs = tuple_of(torch.vmap(function, in_dims=at)(*nothing))
        assert [out.shape for out in outs] == shapes
        assert {out.dtype for out in outs} == {torch.float64}
    nothing = [a.new_zeros((0, *a.shape)) for a in arrays]

    def loss(*arrays):
        return torch.stack([out.sum() for out in tuple_of(function(*arrays))]).sum()

    gradients = torch.vmap(gradient_of(loss, arrays))(*nothing)
    assert [g.shape for g in gradients] == [a.shape for a in nothing]


def test_a_jacobian_without_rows(p):
    x, *others = arrays_of(p)

    def no_rows(x):
        return tuple_of(function_of(p)(x, *others))[0].reshape(-1)[:0]

    assert torch.func.jacrev(no_rows)(x).shape == (0, *x.shape)


def test_the_jacobian_of_no_edges():
    edges = torch.zeros(0, 3, dtype=torch.float64)
    assert torch.func.jacrev(lambda v: wigner_d(v, 1))(edges).shape == (0, 4, 4, 0, 3)
