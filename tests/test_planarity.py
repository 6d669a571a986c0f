"""The planarity restraint's definition and its properties, on the reference and the kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedops
from contract import unaligned
from fusedops.planarity.op import gradient_vjp, nll
from fusedops.planarity.plan import SCATTERED
from places import interpreted

pytestmark = interpreted

BACKENDS = ("cython", "numba", "numpy")
fits = pytest.mark.parametrize("fit", ["uniform", "weighted"])
everywhere = pytest.mark.parametrize("backend", [*BACKENDS, "torch", "triton"])


def results(backend, arrays, planes, fit, device="cpu"):
    """Return value, gradient, and the gradient's own derivative along the second array."""
    if backend in ("torch", "triton"):
        torch = pytest.importorskip("torch")
        pytest.importorskip(backend)
        planes = planes.to(device)
        arrays = [torch.from_numpy(array).to(device) for array in arrays]
    with fusedops.use_backend(backend):
        found = [*nll(arrays[0], planes, fit), *gradient_vjp(*arrays, planes, fit)]
    return [np.asarray(out if device == "cpu" else out.cpu()) for out in found]


SHAPES = {
    "tetrahedron": np.array([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]),
    "triangle": np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]),
    "huge": np.array([[0.0, 0, 0], [1e150, 0, 0], [0, 1e150, 1e150], [1e200, 1, 1]]),
    "tiny": np.array([[0.0, 0, 0], [1e-200, 0, 0], [0, 1e-200, 1e-200], [1e-190, 1e-30, 1e-30]]),
}


@everywhere
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_shape_gives_nan(backend, shape, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        xyz = SHAPES[shape].astype(dtype)
        planes = fusedops.Planes([(np.arange(len(xyz))[None], [0.1])])
        outputs = results(backend, (xyz, np.ones_like(xyz)), planes, "uniform")
    assert all(np.isfinite(out).all() for out in outputs)
    gradient = outputs[1]
    assert np.abs(gradient.sum(0)).max() <= 1e-6 * max(1, np.abs(gradient).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_planes_of_one_size_are_sorted_by_their_first_atom(backend):
    """Equal ones keep their order, so that the layout is the same for every backend."""
    groups = [
        ([[9, 8, 7, 6]], [0.1]),
        ([[5, 9, 3], [2, 8, 9]], [0.2, 0.3]),
        ([[9, 4, 2], [1, 2, 3]], [0.4, 0.5]),
    ]
    with fusedops.use_backend(backend):
        planes = fusedops.Planes(groups)
    assert planes.index.tolist() == [1, 2, 3, 2, 8, 9, 9, 4, 2, 5, 9, 3, 9, 8, 7, 6]
    np.testing.assert_allclose(planes.weight**-0.5, [0.5, 0.3, 0.4, 0.2, 0.1], rtol=1e-15)


@everywhere
@fits
def test_scattered_atoms_have_the_same_gradient(backend, fit, monkeypatch):
    """All of them sum rows then, where others get theirs from a plane."""
    rng = np.random.default_rng(4)
    arrays = rng.normal(size=(2, 60, 3))
    index = np.concatenate([rng.permutation(50)[:40], rng.integers(0, 60, 20)]).reshape(12, 5)
    sigma, planes = rng.uniform(0.1, 1, 12), []
    for scattered in (10**6, 1):
        monkeypatch.setattr("fusedops.planarity.plan.SCATTERED", scattered)
        with fusedops.use_backend("numpy"):
            planes.append(fusedops.Planes([(index, sigma)]))
    assert planes[0].spill < planes[1].spill == 60
    assert (planes[1].slot >= 0).all()
    for here, there in zip(*(results(backend, arrays, p, fit) for p in planes), strict=True):
        np.testing.assert_array_equal(there, here)


LAYOUTS = {"C": np.asarray, "F": np.asfortranarray, "unaligned": unaligned}
GROUP = st.tuples(
    st.sampled_from([0, 1, 2, 15, 16, 17, 40]),
    st.sampled_from([3, 4, 5, 9, 20]),
    st.sampled_from(["plane", "column", "atom"]),
    st.sampled_from(["int32", "int64", ">i8", "int16"]),
    st.sampled_from(["float32", "float64", "int64", "longdouble"]),
    st.sampled_from(list(LAYOUTS)),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(GROUP, max_size=5),
    st.integers(1, 60),
    st.sampled_from([1, SCATTERED // 20]),
    st.integers(0, 2**32 - 1),
)
def test_compiled_packing_is_the_definition(groups, atoms, step, seed):
    rng = np.random.default_rng(seed)
    given = []
    for planes, n, sigmas, dtype, real, layout in groups:
        index = rng.integers(0, atoms, (planes, n)) * (1 if dtype == "int16" else step)
        index = LAYOUTS[layout](index.astype(dtype))
        shape = {"plane": (planes,), "column": (planes, 1), "atom": (planes, n)}[sigmas]
        sigma = (10 * rng.uniform(0.1, 2, shape)).astype(real)
        given.append((index, LAYOUTS[layout](sigma)))
    packed = []
    for backend in BACKENDS:
        with fusedops.use_backend(backend):
            packed.append(fusedops.Planes(given, num_atoms=atoms * step))
    want = packed.pop()
    for planes in packed:
        for field in want._fields:
            got, expected = getattr(planes, field), getattr(want, field)
            assert got.dtype == expected.dtype
            if field == "constant":
                # A sum of logarithms, in another order.
                np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-12)
            else:
                np.testing.assert_array_equal(got, expected)
        assert planes.sizes() == want.sizes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("planes", [1, 3, 4])
def test_sigmas_are_read_by_rank(planes, backend):
    """Sigmas (P,) and (P, 1) belong to planes, even where P is n, the number of atoms."""
    rng = np.random.default_rng(planes)
    xyz, index = rng.normal(size=(16, 3)), rng.permutation(16)[: 4 * planes].reshape(planes, 4)
    sigma = rng.uniform(0.1, 1, planes)
    each = np.repeat(sigma[:, None], 4, 1)
    want, column, atoms = (
        fusedops.planarity_nll(xyz, [(index, own)], backend=backend)
        for own in (sigma, sigma[:, None], each)
    )
    assert column == want
    assert atoms == pytest.approx(want, rel=1e-13)
    if planes == 4:
        turned = fusedops.planarity_nll(xyz, [(index, each.T)], backend=backend)
        assert turned != pytest.approx(want)
    column, atoms = (
        fusedops.plane_deviations(xyz, [(index, own)], fit="weighted")[0]
        for own in (sigma[:, None], each)
    )
    np.testing.assert_allclose(column, atoms, rtol=1e-9)


XYZ = np.zeros((4, 3))
BAD = {
    "not a pair": ([[[0, 1, 2]]], "should be a pair"),
    "index too large": (
        [([[0, 1, 4]], [1])],
        r"plane_groups\[0\] indices\[0, 2\] is 4; it should be from 0 to 3",
    ),
    "indices flat": ([([0, 1, 2], [1])], r"indices has shape \(3,\)"),
    "sigma text": ([([[0, 1, 2]], ["a"])], "sigmas has dtype"),
    "ragged": ([([[0, 1, 2], [0, 1]], [1, 1])], r"plane_groups\[0\] indices is ragged"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_planes_are_named(name):
    groups, message = BAD[name]
    op = fusedops.planarity_nll
    for function in (op, op.vjp, op.explain):
        with pytest.raises((TypeError, ValueError, IndexError), match=message):
            function(XYZ, groups)


# Values to put into indices or sigmas (0, 1) of a group, and the error.
WRONG = {
    "negative": ([(0, 1, (2, 1), -1)], "[1] indices[2, 1] is -1;"),
    "too large": ([(0, 0, (3, 0), 50)], "[0] indices[3, 0] is 50;"),
    "far too large": ([(0, 1, (0, 3), 2**33)], "[1] indices[0, 3] is 8589934592;"),
    "zero": ([(1, 0, 2, 0)], "[0] sigmas[2] is 0.0;"),
    "NaN": ([(1, 1, (4, 3), np.nan)], "[1] sigmas[4, 3] is nan;"),
    "infinite": ([(1, 0, 0, np.inf)], "[0] sigmas[0] is inf;"),
    "vast": ([(1, 1, (1, 1), 1e200)], "[1] sigmas[1, 1] is 1e+200;"),
    "tiny": ([(1, 1, (1, 1), 1e-200)], "[1] sigmas[1, 1] is 1e-200;"),
    "first of three": (
        [(0, 0, (0, 0), -1), (1, 1, 0, -2), (1, 0, 4, -1)],
        "[0] sigmas[4] is -1.0;",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRONG)
def test_every_packing_names_the_first_bad_value(name, backend):
    rng = np.random.default_rng(11)
    given = [rng.integers(0, 50, (5, n)) for n in (6, 4)], [np.ones(5), np.ones((5, 4))]
    values, message = WRONG[name]
    for which, group, at, value in values:
        given[which][group][at] = value
    with fusedops.use_backend(backend), pytest.raises((IndexError, ValueError)) as raised:
        fusedops.Planes(list(zip(*given, strict=True)), num_atoms=50)
    assert str(raised.value).startswith(f"Planes: plane_groups{message} it should be")


def test_no_number_of_atoms_lets_an_index_overflow():
    with pytest.raises(IndexError, match="is 34359738368; it should be from 0 to 2147483646"):
        fusedops.Planes([([[0, 1, 2**35]], [1])], num_atoms=2**40)


def test_planes_of_more_atoms_than_there_are():
    planes = fusedops.Planes([([[0, 1, 4]], [1])])
    with pytest.raises(IndexError, match="plane_groups has index 4; it should be below 4"):
        fusedops.planarity_nll(XYZ, planes)


def test_iterators_are_served(square):
    xyz, groups = square
    (index, sigma) = groups[0]
    assert len(fusedops.plane_deviations(xyz, zip([index], [sigma], strict=True))) == 1
    value = fusedops.planarity_nll(xyz, zip([index], [sigma], strict=True))
    assert value == fusedops.planarity_nll(xyz, groups)
    with pytest.raises(TypeError, match="plane_groups is a Planes; it should be a sequence"):
        fusedops.plane_deviations(xyz, fusedops.Planes(groups))
