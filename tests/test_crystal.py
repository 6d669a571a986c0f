"""Symmetry and structure factors of maps, against gemmi, direct sums and central differences."""

import functools
import inspect
import itertools
import pickle
import re

import numpy as np
import pytest

import fusedops
from fusedops import crystal, testing
from fusedops._frame import registry
from fusedops.crystal import factors, linear, structure_factors, symmetrize, symmetry

IDENTITY = np.eye(4)[:3]
SCREW = np.array([[-1, 0, 0, 0], [0, 1, 0, 0.5], [0, 0, -1, 0]])
#: -y, x-y, z+1/3: alone it is no group.
THREEFOLD = np.array([[0, -1, 0, 0], [1, -1, 0, 0], [0, 0, 1, 1 / 3]])
OBLIQUE = np.array([[9.0, -1.5, 0.7], [0.0, 8.0, -1.1], [0.0, 0.0, 7.5]])  # Å


def in_double(transform, array, *args, **options):
    return transform(array.astype(np.result_type(array, np.float64)), *args, **options)


@pytest.fixture
def gemmi():
    return pytest.importorskip("gemmi")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def whole(shape, seed=0):
    """Return a map of small integers: their sums are exact in any order."""
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float64)


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


class TestSymmetrize:
    @pytest.mark.parametrize(
        ("group", "shape"),
        [
            ("P 1", (3, 4, 5)),
            ("P 1 21 1", (5, 6, 7)),
            ("C 2 2 21", (4, 6, 8)),
            ("P 31 2 1", (5, 5, 6)),
            ("P 61 2 2", (4, 4, 6)),
            ("R 3 2:H", (6, 6, 9)),
            ("R 3:R", (5, 5, 5)),
            ("I 41/a c d", (8, 8, 8)),
            ("P 41 3 2", (4, 4, 4)),
            ("F d -3 m:2", (8, 8, 8)),
        ],
    )
    def test_against_gemmi(self, gemmi, group, shape):
        group = gemmi.SpaceGroup(group)
        map = whole(shape)
        grid = gemmi.FloatGrid(map.astype(np.float32))
        grid.spacegroup = group
        grid.symmetrize_sum()
        found, pullback = symmetrize.vjp(map, group.operations())
        np.testing.assert_array_equal(found, grid.array)
        matrices = np.array([op.float_seitz() for op in group.operations()])
        np.testing.assert_array_equal(symmetrize(map, matrices), found)
        np.testing.assert_array_equal(symmetrize(map, matrices[:, :3]), found)
        assert not np.shares_memory(found, map)
        # A group has its inverses, so the function is its own adjoint.
        (dmap,) = pullback(map)
        np.testing.assert_array_equal(dmap, found)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_many_planes_and_any_layout(self, monkeypatch, dtype, threads):
        map = whole((6, 4, 8)).astype(dtype)
        expected = symmetrize(map, [IDENTITY, SCREW])
        monkeypatch.setattr(symmetry, "_CHUNK", 64)
        fusedops.set_num_threads(threads)
        try:
            turned = np.asfortranarray(map)[::-1][::-1]
            turned.flags.writeable = False
            found = symmetrize(turned, [IDENTITY, SCREW])
        finally:
            fusedops.set_num_threads(None)
        assert found.dtype == dtype
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize(
        ("shape", "operations", "fitting"),
        [
            ((4, 5, 6), [IDENTITY, SCREW], (4, 6, 6)),
            ((4, 4, 5), [THREEFOLD], (4, 4, 6)),
            ((4, 6, 6), [THREEFOLD], (6, 6, 6)),
            ((7, 3, 3), [IDENTITY[[2, 0, 1]] + [[0, 0, 0, 0.25], [0] * 4, [0] * 4]], (8, 8, 8)),
        ],
    )
    def test_a_grid_that_does_not_fit(self, shape, operations, fitting):
        last = len(operations) - 1
        message = f"map has shape {shape}, and operations[{last}] moves .* such as {fitting}"
        with pytest.raises(ValueError, match=re.sub(r"([()\[\]])", r"\\\1", message)):
            symmetrize(np.zeros(shape), operations)
        symmetrize(np.zeros(fitting), operations)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"map": np.zeros((4, 4))}, r"map has shape \(4, 4\)"),
            ({"map": np.zeros((4, 0, 4))}, r"map has shape \(4, 0, 4\)"),
            ({"map": np.zeros((4, 4, 4), int)}, "map has dtype int64"),
            ({"map": None}, "map is None"),
            ({"operations": 3}, "operations is a int"),
            ({"operations": []}, "operations is empty"),
            ({"operations": ["x,y,z"]}, r"operations\[0\] has dtype"),
            ({"operations": [IDENTITY, np.eye(3)]}, r"operations\[1\] has shape"),
            ({"operations": [2 * IDENTITY]}, r"operations\[0\] has the rotation"),
            ({"operations": [IDENTITY / 2]}, "determinant 1 or -1"),
            ({"operations": [IDENTITY * np.nan]}, "determinant 1 or -1"),
            ({"operations": [IDENTITY + [0, 0, 0, 0.1]]}, "multiples of 1/24"),
            ({"operations": [IDENTITY + [0, 0, 0, np.inf]]}, "multiples of 1/24"),
        ],
    )
    def test_bad_arguments(self, change, message):
        with pytest.raises((TypeError, ValueError), match=f"symmetrize: (.*)?{message}"):
            symmetrize(**{"map": np.zeros((4, 4, 4)), "operations": [IDENTITY], **change})


def all_indices(shape):
    """Return all indices below the Nyquist limit."""
    return np.array(list(itertools.product(*[range(-((n - 1) // 2), (n + 1) // 2) for n in shape])))


def waves(hkl, shape):
    """Return exp(2πi h·x) as (M, nx, ny, nz)."""
    x = np.stack(np.meshgrid(*[np.arange(n) / n for n in shape], indexing="ij"))
    return np.exp(2j * np.pi * np.einsum("mi,ixyz->mxyz", hkl, x))


SHAPES = [(4, 5, 6), (5, 4, 7), (3, 3, 1), (6, 2, 4)]


class TestStructureFactors:
    @pytest.mark.parametrize("blur", [0.0, 12.5])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_sum(self, shape, blur):
        hkl, map = all_indices(shape), random(shape)
        hkl = np.concatenate([hkl, hkl[::2]])
        s = hkl @ np.linalg.inv(OBLIQUE)
        factor = abs(np.linalg.det(OBLIQUE)) / map.size * np.exp(blur * (s**2).sum(1) / 4)
        each = factor[:, None, None, None] * waves(hkl, shape)
        found, pullback = structure_factors.vjp(map, hkl, OBLIQUE, blur=blur)
        assert found.dtype == np.complex128
        np.testing.assert_allclose(found, (each * map).sum((1, 2, 3)), atol=1e-12 * factor.max())
        dF = random((len(hkl), 2)) @ [1, 1j]
        (dmap,) = pullback(dF)
        assert dmap.dtype == np.float64
        expected = np.einsum("m,mxyz->xyz", dF.conj(), each).real
        np.testing.assert_allclose(dmap, expected, atol=1e-11 * factor.max())

    def test_without_scipy(self, monkeypatch):
        shape = (4, 5, 6)
        arguments = random(shape).astype(np.float32), all_indices(shape), OBLIQUE
        expected, pullback = structure_factors.vjp(*arguments)
        (dmap,) = pullback(expected)
        monkeypatch.setattr(factors, "_scipy_fft", lambda: None)
        # As NumPy 1 does.
        for name in ("rfftn", "irfftn"):
            monkeypatch.setattr(np.fft, name, functools.partial(in_double, getattr(np.fft, name)))
        found, pullback = structure_factors.vjp(*arguments)
        assert found.dtype == expected.dtype == np.complex64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())
        assert pullback(found)[0].dtype == np.float32
        np.testing.assert_allclose(pullback(found)[0], dmap, rtol=0, atol=1e-5 * abs(dmap).max())

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_reflections_laid_out_before(self, dtype):
        shape, hkl = (6, 8, 10), all_indices((4, 4, 4))
        map = random(shape).astype(dtype)
        options = {"blur": 3.0, "operations": [IDENTITY, SCREW]}
        reflections = crystal.Reflections(hkl, OBLIQUE, shape, **options)
        expected, one = structure_factors.vjp(map, hkl, OBLIQUE, **options)
        for given in (reflections, pickle.loads(pickle.dumps(reflections))):
            for _ in range(2):
                found, other = structure_factors.vjp(map, given)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(other(found)[0], one(found)[0], strict=True)
        assert reflections.shape == shape
        assert repr(reflections) == "Reflections(27 of a map of 6 × 8 × 10, on cpu)"
        with pytest.raises(AttributeError, match="shape can't be changed"):
            reflections.shape = (1, 1, 1)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"map": np.zeros((4, 4, 4))}, r"\(4, 4, 4\); the Reflections has \(4, 5, 6"),
            ({"cell": OBLIQUE}, "cell, blur and operations belong to it"),
            ({"blur": 1.0}, "cell, blur and operations belong to it"),
            ({"operations": [IDENTITY]}, "cell, blur and operations belong to it"),
            ({"hkl": [[1, 0, 0]]}, "cell is None; it should be given, unless hkl is"),
        ],
    )
    def test_wrong_arguments_beside_reflections(self, change, message):
        given = {"map": np.zeros((4, 5, 6))}
        given["hkl"] = crystal.Reflections([[1, 0, 0]], OBLIQUE, (4, 5, 6))
        with pytest.raises((TypeError, ValueError), match=message):
            structure_factors(**(given | change))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hkl": [[0, 2, 2]]}, r"hkl\[0\] is \(0, 2, 2\); .* equivalents"),
            ({"grid_shape": (4, 5)}, "grid_shape"),
        ],
    )
    def test_no_reflections_of_a_map(self, change, message):
        """An operation turns (0, 2, 2) beyond the limit of the first axis."""
        turn = [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
        given = {"hkl": [[1, 0, 0]], "cell": OBLIQUE, "grid_shape": (4, 5, 6), "operations": [turn]}
        with pytest.raises(ValueError, match=f"Reflections: {message}"):
            crystal.Reflections(**(given | change))

    def test_no_reflections(self):
        found, pullback = structure_factors.vjp(random((4, 4, 4)), np.zeros((0, 3), int), OBLIQUE)
        assert found.shape == (0,)
        np.testing.assert_array_equal(pullback(found)[0], np.zeros((4, 4, 4)))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"map": np.zeros(4)}, r"map has shape \(4,\)"),
            ({"map": np.zeros((2, 2, 2), complex)}, "map has dtype complex128"),
            ({"hkl": [[1, 2]]}, r"hkl has shape \(1, 2\)"),
            ({"hkl": [[1.0, 2, 3]]}, "hkl has dtype float64"),
            ({"hkl": [[0, 1, 0], [0, -3, 1]]}, r"hkl\[1\] is \(0, -3, 1\)"),
            ({"hkl": [[2, 0, 0]]}, r"below half of the map's shape \(4, 5, 6\)"),
            ({"hkl": [[2**62, 0, 0]]}, r"hkl\[0\] is \(4611686018427387904, 0, 0\)"),
            ({"hkl": [[0, 0, 0], [0, 0, -(2**63)]]}, r"hkl\[1\] is"),
            ({"cell": np.eye(2)}, r"cell has shape \(2, 2\)"),
            ({"cell": np.zeros((3, 3))}, "with a volume"),
            ({"blur": np.nan}, "blur is nan"),
            ({"blur": "2"}, "blur is a str; it should be a number"),
            ({"blur": 1e9}, "blur is 1000000000.0; it should be so small"),
        ],
    )
    def test_bad_arguments(self, change, message):
        arguments = {"map": np.zeros((4, 5, 6)), "hkl": [[1, 2, -1]], "cell": OBLIQUE, **change}
        with pytest.raises((TypeError, ValueError), match=f"structure_factors: .*{message}"):
            structure_factors(**arguments)

    def test_bad_cotangents(self):
        _, pullback = structure_factors.vjp(random((4, 4, 4)), [[1, 0, 0]], OBLIQUE)
        with pytest.raises(ValueError, match=r"cotangent has shape \(2,\); it should be \(1,\)"):
            pullback(np.zeros(2))
        _, pullback = symmetrize.vjp(random((4, 4, 4)), [IDENTITY])
        with pytest.raises(TypeError, match="cotangent has dtype complex128"):
            pullback(np.zeros((4, 4, 4), complex))


GROUP = [IDENTITY, THREEFOLD, [[-1, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 1, 2 / 3]]]
HEXAGONAL = np.array([[9.0, -4.5, 0], [0, 4.5 * 3**0.5, 0], [0, 0, 10.5]])  # Å
CALLS = {
    "symmetrize": lambda x: symmetrize(x, GROUP),
    "symmetrize, no group": lambda x: symmetrize(x, [THREEFOLD]),
    "structure_factors": lambda x: structure_factors(
        x, all_indices((3, 3, 6))[::4], HEXAGONAL, blur=5.0
    ),
    "structure_factors, symmetric": lambda x: structure_factors(
        x, all_indices((3, 3, 6))[::4], HEXAGONAL, operations=[IDENTITY, SCREW]
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
class TestTorch:
    def test_values_are_those_of_numpy(self, torch, call):
        for dtype in ("float32", "float64"):
            map = random((3, 3, 6)).astype(dtype)
            found = call(torch.tensor(map))
            expected = call(map)
            assert found.numpy().dtype == expected.dtype
            tolerance = 1e-12 if dtype == "float64" else 1e-5
            np.testing.assert_allclose(found, expected, atol=tolerance * abs(expected).max())

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
    def test_derivatives_of_every_order(self, torch, call):
        map = torch.tensor(random((3, 3, 6)), requires_grad=True)
        batched = {"check_batched_grad": True}
        assert torch.autograd.gradcheck(call, map, check_forward_ad=True, **batched)
        assert torch.autograd.gradgradcheck(call, map, **batched)

    def test_transforms(self, torch, call):
        maps = torch.tensor(random((3, 4, 3, 6)))
        expected = torch.stack([call(map) for map in maps.unbind(1)])
        torch.testing.assert_close(torch.vmap(call, in_dims=1)(maps), expected)

        def size(map):
            return call(map).abs().square().sum()

        gradients = torch.vmap(torch.func.grad(size), in_dims=1)(maps)
        expected = torch.stack([torch.func.grad(size)(map) for map in maps.unbind(1)])
        torch.testing.assert_close(gradients, expected)

    def test_vjp_is_for_arrays(self, torch, call):
        op = symmetrize if "symmetrize" in call.__code__.co_names else structure_factors
        rest = ([IDENTITY],) if op is symmetrize else ([[1, 0, 0]], HEXAGONAL)
        with pytest.raises(TypeError, match="map is a torch tensor; it should be a NumPy array"):
            op.vjp(torch.zeros(3, 3, 6), *rest)
        _, pullback = op.vjp(np.zeros((3, 3, 6)), *rest)
        with pytest.raises(TypeError, match="the cotangent is a torch tensor"):
            pullback(torch.zeros(1))


# The compiler looks at the result's grad.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_they_compile_with_a_graph_break(torch):
    map = torch.tensor(random((3, 3, 6)), requires_grad=True)

    def both(map):
        return 2 * CALLS["structure_factors"](CALLS["symmetrize"](map))

    compiled = torch.compile(both, backend="eager")
    torch.testing.assert_close(compiled(map), both(map))
    compiled(map).abs().sum().backward()
    assert map.grad.abs().sum() > 0


def test_the_formula_for_a_gpu(torch, monkeypatch):
    """On the CPU, tensors are summed and transformed as arrays."""
    map = whole((3, 3, 6))
    monkeypatch.setattr(symmetry, "_CHUNK_ON_GPU", 60)
    for moves in symmetry._passes(*map_key(GROUP), map.shape)[0]:
        expected = symmetry._one_pass(moves, map)
        found = symmetry._one_pass(moves, torch.tensor(map))
        np.testing.assert_array_equal(found, expected)
        assert (expected != map).any()
    # As are structure factors, and their adjoint.
    hkl, cotangent = all_indices((3, 3, 6))[::4], random((14, 2)) @ [1, 1j]
    value, pullback = structure_factors.vjp(map, hkl, HEXAGONAL, blur=5.0)
    check = inspect.unwrap(structure_factors)
    _, function, adjoint = check(torch.tensor(map), hkl, HEXAGONAL, blur=5.0)
    np.testing.assert_allclose(function(torch.tensor(map)), value, atol=1e-12 * abs(value).max())
    (expected,) = pullback(cotangent[: len(hkl)])
    found = adjoint(torch.tensor(cotangent[: len(hkl)]))
    np.testing.assert_allclose(found, expected, atol=1e-12 * abs(expected).max())


def map_key(operations):
    return [array.tobytes() for array in symmetry.read_operations(operations, "symmetrize")]


def test_constants_that_require_grad_are_refused(torch):
    map = torch.zeros(3, 3, 6, dtype=torch.float64)
    cell, operation = (torch.eye(n, requires_grad=True) for n in (3, 4))
    with pytest.raises(ValueError, match="cell requires grad; it is a constant"):
        structure_factors(map, [[1, 0, 0]], cell)
    with pytest.raises(ValueError, match=r"operations\[1\] requires grad; it is a constant"):
        symmetrize(map, [IDENTITY, operation])


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_on_a_gpu(torch, call):
    map = torch.tensor(random((3, 3, 6)), device="cuda", requires_grad=True)
    found = call(map)
    np.testing.assert_allclose(found.detach().cpu(), call(map.detach().cpu()), atol=1e-9)
    assert torch.autograd.gradcheck(call, map)
    assert torch.autograd.gradgradcheck(call, map)


@pytest.mark.gpu
def test_reflections_on_a_gpu(torch):
    """Laid out on the GPU, they are captured in a CUDA graph."""
    map = torch.tensor(random((6, 8, 10)), device="cuda", dtype=torch.float32)
    hkl, options = all_indices((4, 4, 4)), {"operations": [IDENTITY, SCREW]}
    here = crystal.Reflections(hkl, OBLIQUE, (6, 8, 10), **options)
    with pytest.raises(ValueError, match="hkl is on cpu; it should be on cuda"):
        structure_factors(map, here)
    there = here.to(map.device)
    expected = structure_factors(map, there)
    np.testing.assert_allclose(
        expected.cpu(), structure_factors(map.cpu(), here), atol=1e-5 * abs(expected).max().item()
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = structure_factors(map, there)
    map *= 2
    graph.replay()
    torch.testing.assert_close(found, 2 * expected)


WAVES = {
    "group": (300, (8, 10, 12), {"blur": 20.0, "operations": [IDENTITY, SCREW]}),
    "odd": (60, (5, 7, 9), {}),
    # Each place sums many waves.
    "few": (400, (3, 3, 3), {}),
    "none": (0, (4, 5, 6), {}),
}


def reflections_of(name):
    count, shape, options = WAVES[name]
    most = (np.array(shape) - 1) // 2
    hkl = np.random.default_rng(count).integers(-most, most + 1, (count, 3))
    return crystal.Reflections(hkl, OBLIQUE, shape, **options)


def half(on):
    """Return the size of the half spectrum."""
    return on.nx * on.ny * (on.nz // 2 + 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WAVES)
def test_the_kernels_of_a_gpu(torch, name, dtype):
    on, rng = reflections_of(name), np.random.default_rng(0)
    for primitive, size in ((factors.gather, half(on)), (factors.spread, on.num_reflections)):
        pairs = torch.tensor(rng.normal(size=(2, size)), dtype=getattr(torch, dtype)).T
        with fusedops.use_backend("triton"), testing.poisoned_outputs():
            (found,) = primitive(pairs, on)
        (expected,) = primitive.formula(primitive.Arguments(pairs.double(), on))
        assert found.dtype == pairs.dtype
        allowed = testing.TOLERANCE[dtype] * max(1, on.num_reflections**0.5 / 8)
        assert testing.error(found, expected) < allowed


@pytest.mark.parametrize("field", ["at", "waves", "wave_at", "begin"])
def test_fields_that_lie_lead_nowhere(torch, field):
    """The kernels take them for no waves, and touch nothing outside of their arrays."""
    on = reflections_of("odd")
    for wrong in (-(2**40), -3, 2**40):
        fields, sizes = on.flat()
        lie = dict(zip(on._fields, [array.clone() for array in fields], strict=True))
        lie[field][1::5] = wrong
        lying = crystal.Reflections.from_tensors([*lie.values()], sizes)
        for primitive, size, out in (
            (factors.gather, half(on), on.num_reflections),
            (factors.spread, on.num_reflections, half(on)),
        ):
            memory = torch.full((3, out, 2), 7.0)
            with fusedops.use_backend("triton"):
                primitive(torch.ones(size, 2), lying, out=(memory[1],))
            assert (memory[::2] == 7).all()
            assert memory[1].isfinite().all()


@pytest.fixture
def by_kernels(monkeypatch):
    """Let calls of tensors take the way that they take on a GPU, in the interpreter."""
    monkeypatch.setattr(registry, "_is_on_gpu", lambda x: not isinstance(x, np.ndarray))
    monkeypatch.setattr(linear, "_is_for_numpy", lambda x: False)


@pytest.mark.usefixtures("by_kernels")
class TestByKernels:
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    def test_derivatives(self, torch):
        on = reflections_of("odd")
        map = torch.tensor(random(on.shape), requires_grad=True)
        few = crystal.Reflections([[1, 0, -1], [0, 2, 1]], OBLIQUE, (3, 5, 4))
        small = torch.tensor(random((3, 5, 4)), requires_grad=True)
        with fusedops.use_backend("triton"):
            found = structure_factors(map, on)
            (dmap,) = torch.autograd.grad(found.abs().sum(), map)
            modes = {"check_forward_ad": True, "check_batched_grad": True}
            modes["check_batched_forward_grad"] = True
            torch.autograd.gradcheck(lambda map: structure_factors(map, few), small, **modes)
        expected, pullback = structure_factors.vjp(map.detach().numpy(), on)
        np.testing.assert_allclose(found.detach(), expected, atol=1e-12)
        (by_arrays,) = pullback(expected / abs(expected))
        np.testing.assert_allclose(dmap, by_arrays, atol=1e-12)

    def test_results_can_be_written_to(self, torch):
        on = reflections_of("odd")
        map = torch.tensor(random(on.shape), requires_grad=True)
        F = structure_factors(map, on)
        F *= 2
        F[0] = 0
        F.abs().sum().backward()
        with torch.no_grad():
            F = structure_factors(map, on)
        F *= torch.ones((), requires_grad=True)

    def test_a_backward_pass_asks_for_the_forward_passes_backend(self, torch, monkeypatch):
        on, served = reflections_of("odd"), []

        def run(primitive, function, asked, *others):
            served.append(asked)
            return by(primitive, function, asked, *others)

        by = factors._by
        monkeypatch.setattr(factors, "_by", run)
        map = torch.tensor(random(on.shape), requires_grad=True)
        with fusedops.use_backend("torch"):
            F = structure_factors(map, on)
        F.abs().sum().backward()
        assert served == ["torch", "torch"]
