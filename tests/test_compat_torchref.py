"""fusedops.compat.torchref against the sums that TorchRef documents, and against TorchRef itself.

`make peer-tests` runs all tests; where TorchRef is not installed, some are skipped.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import io
import math
import re
import sys
import types
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
import fusedops.compat.torchref as compat  # noqa: E402
from densities import Problem, direct  # noqa: E402
from fusedops.compat import _graphs, _lbfgs, _likelihoods, _replays, _scales  # noqa: E402
from fusedops.density import atom_radius  # noqa: E402
from fusedops.samples import atoms_in, cubes  # noqa: E402

CELL = np.array([[16.0, -2.0, 1.0], [0.0, 15.0, -1.0], [0.0, 0.0, 14.0]])  # Å
SHAPE = (24, 22, 20)
needs_torchref = pytest.mark.skipif(
    not importlib.util.find_spec("torchref"), reason="TorchRef is not installed"
)


@pytest.fixture
def torchref():
    with warnings.catch_warnings():
        # It warns of the threads that it takes, and of packages that it lacks.
        warnings.simplefilter("ignore")
        main = importlib.import_module("torchref.base.electron_density.main")
        importlib.import_module("torchref.base.targets.planarity")
        importlib.import_module("torchref.topology.riding")
    yield main
    compat.unregister()


@pytest.fixture
def in_float64(torchref):
    dtypes = importlib.import_module("torchref").dtypes
    before, dtypes.float = dtypes.float, torch.float64
    yield
    dtypes.float = before


TRICLINIC = np.array([[20.0, 0, 0], [5, 18, 0], [-3, 4, 25]])


def refining(folder, **options):
    """Return TorchRef's refinement of ubiquitin, with simulated amplitudes."""
    importlib.import_module("benches")
    files = importlib.import_module("bench.whole").simulated("1ubi", 3.0)
    module = importlib.import_module("torchref.refinement.lbfgs_refinement")
    model, amplitudes = map(str, files.write(folder))
    return module.LBFGSRefinement(data_file=amplitudes, pdb=model, verbose=0, **options)


@pytest.fixture
def refinement(in_float64, tmp_path):
    return refining(tmp_path)


@pytest.fixture
def model(in_float64):
    """TorchRef's model of ubiquitin in float64, shaken, with restraints."""
    found = importlib.import_module("torchref.model").ModelFT(verbose=0, max_res=3.0)
    found.load_pdb(str(importlib.resources.files("fusedops") / "data/1ubi.pdb"))
    (xyz,) = found.parameters_of_types(("xyz",))
    with torch.no_grad():
        xyz += 0.1 * torch.randn(xyz.shape, generator=torch.Generator().manual_seed(1))
    found.restraints.rebuild_vdw_restraints(found.xyz().detach())
    return found


def atoms(count, anisotropic=False, dtype=torch.float64):
    """Return atoms, of which the first two have Gaussians to clamp."""
    rng = np.random.default_rng(count)
    arrays = atoms_in(CELL, count, rng, anisotropic=anisotropic)
    if not anisotropic:
        arrays[1][:2] = [0.0, -0.4][:count]
    return [torch.tensor(array, dtype=dtype) for array in arrays]


def summed(*atoms, n_sigma=3.0):
    """Return the density by TorchRef's rules: radii, clamped widths, and atoms in spheres."""
    xyz, b, occupancy, A, B = atoms
    radius = atom_radius(b, B, n_sigma=n_sigma).clamp(max=7)
    p = Problem(*(x.detach().numpy() for x in (*atoms, radius)), CELL, SHAPE, None)
    if b.ndim == 1:
        B = (B + b[:, None]).clamp(min=0.4) - b[:, None]
    return direct(p)(xyz, b, occupancy, A, B)


def assert_close(found, expected, tolerance=1e-10):
    """Fail if tensors differ by more than a part of the largest element."""
    atol = tolerance * expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def matrices():
    cell = torch.tensor(CELL)
    return cell.inverse(), cell


def drawn(isotropic, anisotropic=(), **options):
    """Return the density that takes TorchRef's place, in float64."""
    options = {"dtype": torch.float64, **options}
    return compat.build_electron_density(
        SHAPE, "cpu", *isotropic, *matrices(), *anisotropic, **options
    )


def test_isotropic_and_anisotropic_atoms_together():
    isotropic, anisotropic = atoms(9), atoms(7, anisotropic=True)
    leaves = [x.requires_grad_() for kind in (isotropic, anisotropic) for x in kind[:3]]
    expected = summed(*isotropic) + summed(*anisotropic)
    found = drawn(isotropic, anisotropic)
    assert_close(found, expected)
    seed = torch.tensor(np.random.default_rng(1).normal(size=SHAPE))
    gradients = (torch.autograd.grad((rho * seed).sum(), leaves) for rho in (found, expected))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-9)


def test_a_clamped_gaussian_has_no_gradient_by_b():
    xyz, b, occupancy, A, B = atoms(1)
    b = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    rho = drawn([xyz, b, occupancy, A, torch.zeros_like(B)])
    assert rho.abs().max() > 0
    (db,) = torch.autograd.grad(rho.sum(), b)
    assert db.item() == 0


def test_atoms_that_are_not_finite():
    isotropic, anisotropic = atoms(3), atoms(3, anisotropic=True)
    isotropic[1][2] = anisotropic[1][2] = math.nan
    with pytest.raises(ValueError, match=r"b\[2\] is nan; it should be finite"):
        drawn(isotropic)
    with pytest.warns(RuntimeWarning, match="1 of 3 atoms are left out"):
        found = drawn([x[:0] for x in isotropic], anisotropic)
    assert_close(found, summed(*(x[:2] for x in anisotropic)))


def of_one_kind(kind, frac, inv_frac):
    """Return the arguments of a density after grid and device, for atoms with B or with U."""
    none = [x[:0] for x in atoms(1)]
    return [*none, inv_frac, frac, *kind] if kind[1].ndim == 2 else [*kind, inv_frac, frac]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("anisotropic", [False, True], ids=["B", "U"])
def test_gradients_by_the_cell_are_what_differences_say(anisotropic):
    kind = atoms(5, anisotropic)
    seed = torch.tensor(np.random.default_rng(0).normal(size=SHAPE))

    def loss(frac, inv_frac):
        given = of_one_kind(kind, frac, inv_frac)
        return (
            compat.build_electron_density(SHAPE, "cpu", *given, dtype=torch.float64) * seed
        ).sum()

    inv_frac, frac = matrices()
    frac.requires_grad_()
    # Small steps, which take no voxel across a radius.
    steps = {"eps": 1e-8, "rtol": 1e-4}
    assert torch.autograd.gradcheck(lambda frac: loss(frac, frac.inverse()), frac, **steps)
    assert torch.autograd.gradgradcheck(lambda frac: loss(frac, frac.inverse()), frac, **steps)
    inv_frac.requires_grad_()
    assert torch.autograd.gradcheck(lambda inv: loss(frac.detach(), inv), inv_frac, **steps)
    frac, inv_frac = frac.detach(), inv_frac.detach()
    by_frac = torch.func.grad(loss)(frac, inv_frac)
    for differentiate in (contextlib.nullcontext(), torch.no_grad()):
        with differentiate:
            _, tangent = torch.func.jvp(lambda frac: loss(frac, inv_frac), (frac,), (frac,))
        torch.testing.assert_close(tangent, (by_frac * frac).sum())
    with torch.no_grad():
        given = frac.clone().requires_grad_(), inv_frac
        torch.testing.assert_close(loss(*given), loss(frac, inv_frac))


def test_an_atom_that_is_not_finite_in_a_cell_with_a_gradient():
    kind = atoms(3, anisotropic=True)
    kind[1][0, 0] = math.nan
    inv_frac, frac = matrices()
    with pytest.raises(ValueError, match=r"b\[0\] is .*nan"):
        compat.build_electron_density(
            SHAPE, "cpu", *of_one_kind(kind, frac.requires_grad_(), inv_frac), dtype=torch.float64
        )


@pytest.mark.parametrize("which", ["isotropic", "anisotropic", "neither"])
def test_atoms_of_one_kind_may_be_none(which):
    kinds = {"isotropic": atoms(4), "anisotropic": atoms(4, anisotropic=True)}
    given = {name: kind if name == which else [x[:0] for x in kind] for name, kind in kinds.items()}
    none = torch.zeros(SHAPE, dtype=torch.float64)
    expected = none if which == "neither" else summed(*kinds[which])
    assert_close(drawn(*given.values()), expected)
    if which != "anisotropic":
        assert_close(drawn(given["isotropic"]), expected)


def test_the_default_dtype_is_float32():
    if "torchref.config" in sys.modules:
        pytest.skip("TorchRef says which")
    found = drawn(atoms(3), dtype=None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), summed(*atoms(3)), atol=2e-5, rtol=2e-5)


def test_the_settings_of_torchref(monkeypatch, program):
    """Its standard deviations, its dtype, and its wish for plain torch."""
    asked = []
    settings = {"get_sigma_cutoff_ed": lambda: 2.0, "get_float_dtype": lambda: torch.float64}
    program("torchref.config", **settings)
    program("torchref.utils.backends", force_portable=lambda: True)
    density = compat.gaussian_density

    def watched(*args, backend, **options):
        asked.append(backend)
        return density(*args, backend=backend, **options)

    monkeypatch.setattr(compat, "gaussian_density", watched)
    assert_close(drawn(atoms(3), dtype=None), summed(*atoms(3), n_sigma=2.0))
    drawn(atoms(3), force_portable=False)
    assert asked == ["torch", None]


def test_a_radius_is_at_most_torchrefs():
    """Beyond 7 Å an atom of any B is cut."""
    xyz, b, *others = atoms(1)
    kind = xyz, torch.full_like(b, 900.0), *others
    rho = drawn(kind)
    assert_close(rho, summed(*kind))
    assert (rho == 0).any()


def test_the_scatter_adds_to_the_map():
    rng = np.random.default_rng(0)
    wa, wbwc = (torch.tensor(x, dtype=torch.int32) for x in cubes(rng, 5, (9, 8, 7), (3, 3, 3)))
    cube, flat = torch.randn(5, 3, 3, 3), torch.randn(9 * 8 * 7)
    place = (wa[:, :, None, None] + wbwc[:, None]).reshape(-1).long()
    expected = flat.index_add(0, place, cube.reshape(-1))
    found = compat._do_structured_scatter(cube, wa, wbwc, flat, len(flat))
    torch.testing.assert_close(found, expected)


@pytest.fixture
def stand_in(program, monkeypatch):
    """A TorchRef of the version that its functions' arguments tell."""

    def make(**functions):
        for name in [*filter(re.compile(r"torchref\.").match, sys.modules)]:
            monkeypatch.setitem(sys.modules, name, None)
        spec = types.SimpleNamespace()
        for name in ("torchref", "torchref.base", "torchref.base.targets", compat.DENSITY):
            program(name, __path__=[], __spec__=spec)
        for name in ("torchref.base.targets.planarity", f"{compat.DENSITY}.main"):
            program(name, __spec__=spec)
        for name, function in functions.items():
            for module in compat.FUNCTIONS[name]:
                setattr(sys.modules[module], name, function)
        return types.SimpleNamespace(
            targets=sys.modules["torchref.base.targets"],
            planarity=sys.modules["torchref.base.targets.planarity"],
            density=sys.modules[compat.DENSITY],
            main=sys.modules[f"{compat.DENSITY}.main"],
        )

    yield make
    compat.unregister()


def later(real_space_grid, xyz_iso, adp_iso, occ_iso, A_iso, B_iso, inv_frac_matrix, frac_matrix,
          voxel_size, xyz_aniso=None, u_aniso=None, occ_aniso=None, A_aniso=None, B_aniso=None,
          dtype=None):  # fmt: skip
    """TorchRef 0.6."""


def calls():
    return {swap.name: swap.calls for swap in fusedops.compat.swaps()}


def test_register_logs_the_functions_that_it_serves(stand_in, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.4")
    caplog.set_level("INFO", "fusedops")
    stand_in(planarity_math=lambda xyz, plane_groups: None, build_electron_density=later)
    compat.register()
    compat.register()
    served = "torchref 0.6.4: fusedops serves planarity_math, build_electron_density"
    assert caplog.messages == [served]
    assert str(fusedops.info()).endswith(
        "Served in this process:\n"
        "  torchref 0.6.4: planarity_math, calls: 0\n"
        "  torchref 0.6.4: build_electron_density, calls: 0"
    )


def test_a_torchref_without_our_functions_is_a_warning(stand_in, caplog):
    stand_in()
    compat.register()
    assert "fusedops serves nothing" in caplog.text


def test_register_and_unregister(stand_in):
    def planarity_math(xyz, plane_groups):
        """TorchRef's."""

    theirs = stand_in(planarity_math=planarity_math, build_electron_density=later)
    compat.register()
    compat.register()
    for module in (theirs.planarity, theirs.targets):
        assert module.planarity_math.theirs is planarity_math
        assert module.planarity_math.__doc__ == "TorchRef's."
    xyz, planes = fusedops.samples.protein(4, np.random.default_rng(0))
    groups = [(torch.tensor(index), torch.full(index.shape, 0.02)) for index in planes]
    xyz = torch.tensor(xyz)
    found = theirs.targets.planarity_math(xyz, groups)
    assert calls() == {"planarity_math": 1, "build_electron_density": 0}
    torch.testing.assert_close(found, fusedops.planarity_nll(xyz, groups))
    grid = torch.zeros((*SHAPE, 3), dtype=torch.float64)
    kinds = atoms(4), atoms(4, anisotropic=True)
    given = grid, *kinds[0], *matrices(), torch.ones(3), *kinds[1], torch.float64
    rho = theirs.density.build_electron_density(*given)
    expected = summed(*kinds[0]) + summed(*kinds[1])
    assert_close(rho, expected)
    named = dict(zip(inspect.signature(later).parameters, given, strict=True))
    torch.testing.assert_close(theirs.main.build_electron_density(**named), rho)
    assert calls() == {"planarity_math": 1, "build_electron_density": 2}
    for name in ("real_space_grid", "voxel_size"):
        tensor = named[name].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"build_electron_density: {name} requires grad; it"):
            theirs.main.build_electron_density(**{**named, name: tensor})
    compat.unregister()
    assert calls() == {}
    assert theirs.targets.planarity_math is planarity_math
    assert theirs.main.build_electron_density is theirs.density.build_electron_density is later


def test_one_radius_for_all_atoms_stays_torchrefs(stand_in):
    def early(real_space_grid, xyz_iso, radius_angstrom):
        """TorchRef 0.5."""

    def scatter(density_cube, wa, wbwc, density_flat, map_size):
        """TorchRef 0.5.3."""

    def get():
        """TorchRef 0.5."""

    theirs = stand_in(
        build_electron_density=early, _do_structured_scatter=scatter, _get_cpp_scatter=get
    )
    compat.register()
    assert theirs.main.build_electron_density is early
    assert theirs.main._do_structured_scatter.theirs is scatter
    assert theirs.main._get_cpp_scatter() is fusedops.structured_scatter_add


def test_without_torchref(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchref", None)
    with pytest.raises(ImportError, match="torchref"):
        compat.register()


@pytest.mark.gpu
def test_a_lattice_is_read_once_a_matrix():
    matrix = torch.tensor(CELL, device="cuda")
    lattice = compat._lattice(matrix, SHAPE)
    assert compat._lattice(matrix, SHAPE) is lattice
    assert compat._lattice(matrix, (24, 24, 24)).shape == (24, 24, 24)
    matrix *= 2
    assert compat._lattice(matrix, SHAPE) is not lattice


class Losses:
    """As much of TorchRef's LossState as an optimizer's run takes."""

    def __init__(self, **targets):
        self.targets, self.weights, self._losses = targets, dict.fromkeys(targets, 1.0), {}

    def get_effective_weight(self, name):
        return self.weights[name]

    def reset_caches(self):
        pass

    def run(self, optimizer, log=False, nsteps=1, *, context="loss_state.step"):
        accepted = None

        def closure():
            nonlocal accepted
            optimizer.zero_grad()
            loss = self.aggregate()
            loss.backward()
            if not loss.isfinite():
                optimizer.zero_grad()
                return torch.full_like(loss.detach(), torch.inf)
            accepted = loss
            return loss

        for _ in range(nsteps):
            optimizer.step(closure)
        if log:
            self.aggregate(log_values=True)
        return accepted

    def aggregate(self, log_values=False):
        weighted = {name: target for name, target in self.targets.items() if self.weights[name]}
        self._losses = {name: target() for name, target in weighted.items()}
        return sum(self.weights[name] * loss for name, loss in self._losses.items())


def serving(modules):
    """Return `Losses` whose evaluations a graph serves, and a list that grows with each."""
    count = []

    class Served(Losses):
        def aggregate(self, log_values=False):
            found = _replays.aggregate(self, log_values)
            if found is NotImplemented:
                return super().aggregate(log_values)
            count.append(1)
            return found

        def run(self, *args, **kwargs):
            found = _replays.run(self, *args, **kwargs)
            return super().run(*args, **kwargs) if found is NotImplemented else found

    Served.run.theirs = Losses.run
    kept = {"get_float_dtype": lambda: torch.float32, "get_caching_enabled": lambda: True}
    modules("torchref.config", **kept)
    modules("torchref.refinement.loss_state", LossState=Served)
    return Served, count


@pytest.fixture
def losses(program, monkeypatch):
    monkeypatch.setattr(_replays, "_held", {})
    made, count = serving(program)
    again = _replays._Evaluations.again

    def counted(evaluations):
        found = again(evaluations)
        count.extend([1] * (found is not None))
        return found

    monkeypatch.setattr(_replays._Evaluations, "again", counted)
    return made, count


class Again:
    """A graph on a CPU: a replay evaluates anew, and writes where the capture's results are."""

    def __init__(self, evaluations, leaves, weights):
        evaluations._evaluate(leaves, weights)
        self.evaluate = lambda: evaluations._evaluate(leaves, weights)
        self.of, evaluations.graph = evaluations, self

    @torch.enable_grad()
    def replay(self):
        names = "total", "gradients", "losses", "report"
        kept = [getattr(self.of, name) for name in names]
        self.evaluate()
        with torch.no_grad():
            for name, before in zip(names, kept, strict=True):
                new, old = (
                    torch.utils._pytree.tree_leaves(x) for x in (vars(self.of)[name], before)
                )
                for a, b in zip(old, new, strict=True):
                    # There is a report in steps of ours alone.
                    if a is not None:
                        a.copy_(b[...] if a.ndim == 0 else b)
                setattr(self.of, name, before)


@pytest.fixture
def emulated(losses, monkeypatch):
    monkeypatch.setattr(_replays, "_on_gpu", lambda parameters: True)
    capture = lambda self, *given: Again(self, *given) and None  # noqa: E731
    monkeypatch.setattr(_replays._Evaluations, "_capture", capture)
    held = lambda self, *given: self._evaluate(*given) is None  # noqa: E731
    monkeypatch.setattr(_replays._Evaluations, "_is_held", held)
    return losses


def reweighted(state, optimizer, x, y):
    optimizer.register_step_post_hook(lambda *_: state.weights.update(bowl=0.5, valley=2.0))


def replaced(state, optimizer, x, y):
    def move(*_):
        x.data = x.data.clamp(max=0.4).clone()

    optimizer.register_step_post_hook(move)


def masked(state, optimizer, x, y):
    def mask(p):
        p.grad[1:] = 0

    x.register_post_accumulate_grad_hook(mask)


def bounded(state, optimizer, x, y):
    valley = state.targets["valley"]
    state.targets["valley"] = lambda: valley() + (1.05 - y[0]).sqrt()


def frozen(state, optimizer, x, y):
    y.requires_grad_(False)


def undone(state, optimizer, x, y):
    pass


@pytest.mark.parametrize("change", [undone, reweighted, replaced, masked, bounded, frozen])
@pytest.mark.parametrize("log", [False, True])
def test_a_run_by_graphs_is_torchrefs(emulated, change, log):
    """Parameters, the loss that a run returns, and the optimizer's state, which can be saved."""
    make, count = emulated
    found = []
    for kind in (Losses, make):
        x, y, targets = rosenbrock("cpu", torch.float64)
        optimizer = torch.optim.LBFGS([x, y], line_search_fn="strong_wolfe", max_iter=6)
        state = kind(**targets)
        change(state, optimizer, x, y)
        loss = state.run(optimizer, log, nsteps=3)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        kept = torch.load(saved)["state"][0]
        found.append([x.detach(), y.detach(), loss.detach().double(), kept["n_iter"]])
    torch.testing.assert_close(found[1][:3], found[0][:3], rtol=1e-5, atol=1e-6)
    assert found[1][3] == found[0][3]
    assert "step" not in vars(optimizer)
    assert not _replays._running
    assert (len(count) > 10) == (change is not masked)


def test_a_run_by_graphs_has_the_terms_that_a_subclass_adds(emulated):
    make, count = emulated
    found = []
    for kind in (Losses, make):

        class Restrained(kind):
            def aggregate(self, log_values=False):
                return super().aggregate(log_values) + self.extra()

        x, y, targets = rosenbrock("cpu", torch.float64)
        optimizer = torch.optim.LBFGS([x, y], line_search_fn="strong_wolfe", max_iter=6)
        state = Restrained(**targets)
        state.extra = lambda y=y: ((y + 1) ** 2).sum()
        loss = state.run(optimizer, nsteps=3)
        found.append([x.detach(), y.detach(), loss.detach().double()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert len(count) > 10


@pytest.mark.parametrize("fails", [False, True])
def test_computations_are_evaluated_captured_and_replayed(monkeypatch, fails):
    """One that can't be captured is evaluated in every call."""
    evaluated, replayed = [], []

    def capture(compute, device, *, shares):
        assert not shares
        if fails:
            raise RuntimeError("not now")
        graph = types.SimpleNamespace(replay=lambda: replayed.append(1))
        return graph, compute()

    monkeypatch.setattr(_graphs, "captured", capture)
    of = _graphs.Replayed(lambda: evaluated.append(1) or 7, torch.device("cuda"), shares=False)
    assert [of() for _ in range(4)] == [7] * 4
    assert (len(evaluated), len(replayed)) == ((4, 0) if fails else (2, 3))
    on_cpu = _graphs.Replayed(lambda: 7, torch.device("cpu"), shares=False)
    assert [on_cpu() for _ in range(3)] == [7] * 3


def test_a_capture_that_fails_tells_its_own_error(monkeypatch):
    """Where the GPU captures nothing from then on, too, and the stream is the caller's again."""
    modes, current = [], ["the caller's"]

    @contextlib.contextmanager
    def on(stream):
        before, current[:] = current[:], [stream]
        try:
            yield
        finally:
            current[:] = before

    class Graph:
        def pool(self):
            return 1

        def capture_begin(self, pool, capture_error_mode):
            modes.append(capture_error_mode)

        def capture_end(self):
            if len(modes) > 2:
                raise RuntimeError("capture_end failed")

    @contextlib.contextmanager
    def capture(graph, stream, capture_error_mode="global"):
        # As torch's, whose stream stays where the capture doesn't end.
        before, current[:] = current[:], [stream]
        graph.capture_begin(None, capture_error_mode)
        yield
        graph.capture_end()
        current[:] = before

    made = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": lambda device: made,
        "current_stream": lambda device: made,
        "stream": on,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    _graphs._pool.cache_clear()

    def interrupted():
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            _graphs.captured(interrupted, torch.device("cpu"))
    finally:
        _graphs._pool.cache_clear()
    assert current == ["the caller's"]
    assert modes == ["thread_local"] * 3


def test_one_owner_at_a_time_has_graphs():
    with _replays.only_owner(1, []) as first, _replays.only_owner(2, []) as second:
        assert (first, second) == (True, False)
        assert _replays._running
    assert not _replays._running


def rosenbrock(device, dtype=torch.float32):
    """Two parameters, one of two numbers and one of none, and a bowed valley."""
    x = torch.nn.Parameter(torch.tensor([-1.2, 1.0], device=device, dtype=dtype))
    y = torch.nn.Parameter(torch.zeros(3, device=device, dtype=dtype))
    valley = lambda: 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2  # noqa: E731
    return x, y, {"valley": valley, "bowl": lambda: ((y - 2) ** 2).sum()}


class Steps:
    """An optimizer of parameters whose step is a function of the closure."""

    def __init__(self, parameters, step):
        self.param_groups, self.step = [{"params": parameters}], step


def optimized(state, *parameters, nsteps=3):
    optimizer = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")
    state.run(optimizer, nsteps=nsteps)
    return [p.detach().cpu() for p in parameters]


@pytest.mark.parametrize(
    "options", [{}, {"history_size": 3}, {"max_iter": 4, "lr": 0.5}, {"history_size": 1}]
)
def test_steps_of_lbfgs_are_torchs(options):
    """Ours, and ours and torch's in turns, with the states that torch's steps leave and take."""
    states, found = [], []
    for turns in (0, 0, 0), (1, 1, 1), (1, 0, 1), (0, 1, 0):
        x = torch.nn.Parameter(torch.linspace(-1.3, 1.1, 7, dtype=torch.float64))
        y = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        leaves = [x, frozen, y]
        optimizer = torch.optim.LBFGS(leaves, line_search_fn="strong_wolfe", **options)
        evaluations = _replays._Evaluations(None, optimizer)
        evaluations.direction = torch.ones(15, dtype=torch.float64)
        steps = optimizer.step, _lbfgs.step_by(optimizer, evaluations)

        def closure(x=x, y=y, optimizer=optimizer):
            optimizer.zero_grad()
            valley = 100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2
            loss = valley.sum() + ((y - 2) ** 2).sum() + (y.sum() - x.sum()).cos()
            loss.backward()
            return loss

        assert _lbfgs.serves(optimizer)
        for ours in turns:
            steps[ours](closure)
        found.append(torch.cat([p.detach().flatten() for p in leaves]))
        state = optimizer.state[x]
        states.append((state["n_iter"], state["func_evals"], len(state["old_dirs"])))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)
    assert states == states[:1] * 4


def test_other_optimizers_take_their_own_steps():
    x = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.LBFGS([x])
    scheduled = torch.optim.LBFGS([x], line_search_fn="strong_wolfe")
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    mixed = torch.optim.LBFGS([x, torch.nn.Parameter(x.double())], line_search_fn="strong_wolfe")
    adam = torch.optim.Adam([x])
    assert not any(_lbfgs.serves(each) for each in (plain, scheduled, mixed, adam))


def test_losses_on_a_cpu_are_torchrefs(losses):
    make, count = losses
    x, y, targets = rosenbrock("cpu")
    expected = optimized(Losses(**targets), x, y)
    x, y, targets = rosenbrock("cpu")
    torch.testing.assert_close(optimized(make(**targets), x, y), expected, rtol=0, atol=0)
    assert not count


@pytest.mark.gpu
def test_fits_of_scales_by_graphs_are_a_cpus(program):
    bounds = {"SS_HALF_BOUNDS": (1e-3, 1.0), "N_EXP_BOUNDS": (0.5, 10.0)}
    program("torchref.scaling.solvent", **bounds)
    rng = torch.Generator().manual_seed(0)
    arrays = [torch.rand(500, n, generator=rng, dtype=torch.float64) for n in (3, 6, 2, 2, 1, 1)]
    design, squares, F, solvent, s, observed = arrays
    F, solvent = (torch.view_as_complex(10 * x) for x in (F, solvent))

    def fit(device):
        select = types.SimpleNamespace(select=lambda x: x, F=10 * observed[:, 0].to(device))
        scaler = types.SimpleNamespace(_data=types.SimpleNamespace(work=select))
        parts = [x.to(device) for x in (design, squares, s[:, 0].log(), solvent)]
        return _scales._Fit(scaler, _scales._Scale(*parts), F.to(device))

    fits = fit("cpu"), fit("cuda")
    for k in range(4):
        x = np.r_[0.1 * np.arange(9) / (k + 1), -1.0, -2.0, 0.7 + 0.1 * k]
        expected, found = (of(x) for of in fits)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
    assert fits[1].products.graph is not None


@pytest.mark.gpu
def test_no_garbage_is_collected_within_a_capture():
    """A graph in a cycle of references, which Python would destroy there."""
    x = torch.ones(1000, device="cuda")

    def compute():
        if gc.isenabled():
            gc.collect()
        return x * 2

    class Cycle:
        def __init__(self):
            self.graph, _ = _graphs.captured(compute, x.device, before=1)
            self.graph.replay()
            self.cycle = self

    for _ in range(5):
        Cycle()
        graph, y = _graphs.captured(compute, x.device)
        assert gc.isenabled()
    graph.replay()
    torch.testing.assert_close(y, 2 * x)
    with pytest.raises(RuntimeError):
        _graphs.captured(lambda: x.sum().item(), x.device)
    assert gc.isenabled()
    # Torch draws random numbers again.
    assert torch.rand(1, device="cuda") >= 0
    gc.disable()
    try:
        _graphs.captured(compute, x.device)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
def test_an_optimizer_reaches_the_same_by_graphs(losses):
    make, count = losses
    x, y, targets = rosenbrock("cuda")
    expected = optimized(Losses(**targets), x, y)
    x, y, targets = rosenbrock("cuda")
    state = make(**targets)
    assert_close(torch.cat(optimized(state, x, y)), torch.cat(expected), 1e-3)
    assert_close(torch.cat(expected), torch.tensor([1.0, 1, 2, 2, 2]), 1e-3)
    assert len(count) > 10
    assert not _replays._running
    # Out of a run, a loss is the program's own.
    served = len(count)
    assert state.aggregate().grad_fn.name() == "AddBackward0"
    assert len(count) == served
    assert not any(p.requires_grad and p.grad.isnan().any() for p in (x, y))


@pytest.mark.gpu
def test_a_graph_follows_weights_targets_and_flags(losses):
    """Every loss and gradient of a run beside the formula, whatever changes between."""
    make, count = losses
    x, y, targets = rosenbrock("cuda")
    state = make(**targets)
    rng = torch.Generator("cuda").manual_seed(0)

    def step():
        with torch.no_grad():
            for p in (x, y):
                p.copy_(torch.randn(p.shape, generator=rng, device="cuda"))
        loss = state.aggregate()
        leaves = [p for p in (x, y) if p.requires_grad]
        found = torch.autograd.grad(2 * loss, leaves, allow_unused=True)
        kept = {name: value.item() for name, value in state._losses.items()}
        expected = Losses.aggregate(state)
        assert kept == pytest.approx({k: v.item() for k, v in state._losses.items()}, rel=1e-5)
        torch.testing.assert_close(loss.detach(), expected.detach())
        grads = torch.autograd.grad(2 * expected, leaves, allow_unused=True)
        for dx, true in zip(found, grads, strict=True):
            torch.testing.assert_close(dx, true)

    def follow(closure):
        served = []
        for change in (
            lambda: None,
            lambda: state.weights.update(bowl=0.5),
            lambda: state.weights.update(valley=0.0),
            lambda: state.weights.update(valley=1.0),
            lambda: state.targets.update(bowl=lambda: (y**4).sum()),
            lambda: y.requires_grad_(False),
            lambda: y.requires_grad_(True),
            lambda: torch.no_grad()(state.aggregate)(),
            lambda: state.aggregate(log_values=True),
        ):
            change()
            before = len(count)
            for _ in range(4):
                step()
            served.append(len(count) - before)
        assert served == [3] * 9

    state.run(Steps([x, y], follow))


@pytest.mark.gpu
def test_a_loss_before_the_last_has_no_gradient(losses):
    make, count = losses
    x, y, targets = rosenbrock("cuda")
    state = make(**targets)

    def evaluate(closure):
        found = []
        for _ in range(4):
            with torch.no_grad():
                x.add_(0.1), y.add_(0.1)
            found.append(state.aggregate())
        with pytest.raises(RuntimeError, match="backward of a loss before the last"):
            found[-2].backward()
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(found[-1], x, create_graph=True)

    state.run(Steps([x, y], evaluate))
    assert len(count) == 3


@pytest.mark.gpu
def test_a_loss_for_which_the_host_waits_has_no_graph(losses):
    """One warning, right results, and graphs for other losses."""
    make, count = losses
    x, y, targets = rosenbrock("cuda")
    expected = optimized(Losses(**targets), x, y)
    x, y, targets = rosenbrock("cuda")
    bowl = targets["bowl"]
    targets["bowl"] = lambda: bowl() * (1.0 if y[0].item() < 10 else 2.0)
    with pytest.warns(RuntimeWarning, match="the host waits") as told:
        found = optimized(make(**targets), x, y)
    assert len(told) == 1
    assert_close(torch.cat(found), torch.cat(expected), 1e-3)
    assert len(count) == 1  # the loss that told
    (z,) = optimized(make(square=lambda: (x**2).sum()), x)
    torch.testing.assert_close(z, torch.zeros(2), atol=1e-3, rtol=0)
    assert len(count) > 2


@pytest.mark.gpu
def test_nobody_keeps_results_of_a_capture_that_failed(losses):
    """A target that keeps its result while a parameter stays, and one that can't be captured."""
    make, _ = losses
    x, y, _ = rosenbrock("cuda")
    kept = {}

    def keeping():
        if x._version not in kept:
            kept.clear()
            kept[x._version] = (x**2).sum()
        return kept[x._version]

    def refusing():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not now")
        return ((y - 2) ** 2).sum()

    state, found = make(keeping=keeping, refusing=refusing), []

    def evaluate(closure):
        for k in range(5):
            with torch.no_grad():
                x.fill_(k + 1.0), y.fill_(0.0)
            loss = state.aggregate()
            dx, dy = torch.autograd.grad(loss, (x, y))
            found.append((loss.item(), dx.tolist(), dy.tolist()))

    with pytest.warns(RuntimeWarning, match="capturing failed: not now"):
        state.run(Steps([x, y], evaluate))
    assert found == [
        (pytest.approx(2 * k**2 + 12), [2 * k] * 2, [-4] * 3) for k in map(float, range(1, 6))
    ]


@pytest.mark.gpu
def test_parameters_with_hooks_runs_in_runs_and_parameters_in_turn(losses):
    make, count = losses
    x, y, targets = rosenbrock("cuda")
    state = make(**targets)

    def moved(*parameters):
        with torch.no_grad():
            for p in parameters:
                p.add_(0.1)
        found = torch.autograd.grad(state.aggregate(), (x, y))
        expected = torch.autograd.grad(Losses.aggregate(state), (x, y))
        torch.testing.assert_close(found, expected)

    def in_turn(closure):
        for k in range(8):
            moved((x, y)[k % 2])
        assert not count
        for _ in range(4):
            moved(x, y)
        assert len(count) == 4
        served = len(count)
        state.run(Steps([y], lambda closure: [moved(y) for _ in range(4)]))
        assert len(count) == served
        for _ in range(3):
            moved(x, y)
        assert len(count) == served + 2
        hook = x.register_hook(lambda dx: dx / 2)
        for _ in range(3):
            moved(x, y)
        hook.remove()

    state.run(Steps([x, y], in_turn))
    hook, served = x.register_hook(lambda dx: dx / 2), len(count)
    state.run(Steps([x, y], lambda closure: [moved(x, y) for _ in range(4)]))
    hook.remove()
    assert len(count) == served
    assert not _replays._running


@needs_torchref
class TestTorchRef:
    """The installed TorchRef, with its own kernels and ours."""

    @pytest.mark.parametrize("anisotropic", [False, True], ids=["B", "U"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_densities(self, torchref, anisotropic, dtype):
        if "grid_shape" not in inspect.signature(torchref.build_electron_density).parameters:
            pytest.skip("older than 0.7")
        kind, none = atoms(20, anisotropic, dtype), [x[:0] for x in atoms(1, dtype=dtype)]
        leaves = [x.requires_grad_() for x in kind[:3]]
        at = [matrix.to(dtype) for matrix in matrices()]
        given = [*none, *at, *kind] if anisotropic else [*kind, *at]
        seed = torch.tensor(np.random.default_rng(1).normal(size=SHAPE), dtype=dtype)
        results = []
        for registered in (False, True):
            if registered:
                compat.register()
            rho = torchref.build_electron_density(SHAPE, torch.device("cpu"), *given, dtype=dtype)
            results.append([rho, *torch.autograd.grad((rho * seed).sum(), leaves)])
        # Its kernels in float32 have an exponential of their own.
        tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        for theirs, ours in zip(*results, strict=True):
            assert_close(ours, theirs, tolerance)

    @pytest.mark.parametrize("anisotropic", [False, True], ids=["B", "U"])
    def test_derivatives_by_every_tensor(self, torchref, anisotropic):
        """Beside its plain torch: its kernels have no gradients by form factors and matrices."""
        if "grid_shape" not in inspect.signature(torchref.build_electron_density).parameters:
            pytest.skip("older than 0.7")
        kind, (inv_frac, frac) = atoms(6, anisotropic), matrices()
        leaves = [leaf.requires_grad_() for leaf in (*kind, frac, inv_frac)]
        seed = torch.tensor(np.random.default_rng(1).normal(size=SHAPE))
        given, results = of_one_kind(kind, frac, inv_frac), []
        theirs = torchref.build_electron_density
        for density in (theirs, compat.build_electron_density):
            rho = density(
                SHAPE, torch.device("cpu"), *given, dtype=torch.float64, force_portable=True
            )
            first = torch.autograd.grad((rho * seed).sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum((dx * dx).sum() for dx in first), leaves)
            results.append([rho, *first, *second])
        for theirs, ours in zip(*results, strict=True):
            assert_close(ours, theirs, 1e-10)

    def test_planes(self, torchref):
        targets = importlib.import_module("torchref.base.targets")
        xyz, planes = fusedops.samples.protein(20, np.random.default_rng(0))
        sigmas = [torch.full(index.shape, 0.02, dtype=torch.float64) for index in planes]
        groups = [*zip(map(torch.tensor, planes), sigmas, strict=True)]
        results = []
        for registered in (False, True):
            if registered:
                compat.register()
            x = torch.tensor(xyz, requires_grad=True)
            nll = targets.planarity_math(x, groups)
            results.append([nll, *torch.autograd.grad(nll, x)])
        for theirs, ours in zip(*results, strict=True):
            assert_close(ours, theirs, 1e-9)

    @pytest.mark.parametrize("hydrogens", [True, False], ids=["riding", "none"])
    def test_targets_of_geometry(self, model, hydrogens):
        """Every value and gradient, where a target is asked for alone and after the others."""
        if not hydrogens:
            model.restraints._h_topo = None
        combined = importlib.import_module("torchref.refinement.targets.combined")
        targets = {
            **combined.TotalGeometryTarget(model, 0).targets(),
            **combined.TotalADPTarget(model, 0).targets(),
        }
        leaves = model.parameters_of_types(("xyz", "adp"))

        def found():
            values = {name: target() for name, target in targets.items()}
            total = sum((k + 1) * value for k, value in enumerate(values.values()))
            joint = torch.autograd.grad(total, leaves)
            alone = []
            for name, target in targets.items():
                value = target()
                torch.testing.assert_close(value, values[name], rtol=0, atol=0)
                alone += torch.autograd.grad(value, leaves, allow_unused=True)
            return [*values.values(), *joint, *(x for x in alone if x is not None)]

        theirs = found()
        compat.register()
        compat.register()
        ours = found()
        served = calls()
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, 1e-9)
        for name in ("Bond", "Angle", "Torsion", "Chiral", "NonBondedH", "Planarity"):
            assert served[f"{name}Target.forward"] == 2
        assert served["ADPSimilarityTarget.forward"] == served["ADPLocalityTarget.forward"] == 2
        compat.unregister()
        assert not hasattr(type(targets["bond"]).forward, "theirs")
        for one, other in zip(found(), theirs, strict=True):
            assert_close(one, other, 1e-12)

    def test_targets_follow_the_model(self, model):
        """Values are kept for atoms that stay, and made anew for others, and for other contacts."""
        combined = importlib.import_module("torchref.refinement.targets.combined")
        targets = combined.TotalGeometryTarget(model, 0)
        (xyz,) = model.parameters_of_types(("xyz",))
        compat.register()
        with torch.no_grad():
            before = targets["angle"]()
            assert targets["angle"]() is not None
            xyz += 0.1 * torch.randn(xyz.shape, generator=torch.Generator().manual_seed(0))
            assert targets["angle"]() > before
            model.restraints.rebuild_vdw_restraints(model.xyz())
            ours = targets.target_losses()
            compat.unregister()
            for name, value in targets.target_losses().items():
                assert_close(ours[name], value, 1e-9)
        assert targets["bond"]().requires_grad

    def test_statistics_follow_the_model(self, model):
        combined = importlib.import_module("torchref.refinement.targets.combined")
        targets = combined.TotalGeometryTarget(model, 0), combined.TotalADPTarget(model, 0)
        leaves = model.parameters_of_types(("xyz", "adp"))

        def found():
            stats = {k: v for target in targets for k, v in target.stats().items()}
            return {f"{k}/{name}": x.value for k, v in stats.items() for name, x in v.items()}

        for change in (0.0, 0.01, 0.02):
            with torch.no_grad():
                leaves[change == 0.02] += change
            theirs = found()
            compat.register()
            for _ in range(2):
                ours = found()
                assert ours == pytest.approx(theirs, rel=1e-9)
                ours.clear()
            targets[0]["nonbonded"].buffer += 1.0
            assert found()["nonbonded/loss"] > 2 * abs(theirs["nonbonded/loss"])
            targets[0]["nonbonded"].buffer -= 1.0
            compat.unregister()
        compat.register()
        found()
        lengths, angles = model.cell.data.split(3)
        model.cell = type(model.cell)([*(0.9 * lengths).tolist(), *angles.tolist()])
        ours = found()
        compat.unregister()
        assert ours == pytest.approx(found(), rel=1e-9)
        # Restraints are made when they are first asked for.
        compat.register()
        model.ctx.restraints = None
        targets[1]["sigd"].stats()
        assert model.ctx.restraints is None

    def test_statistics_follow_atoms_of_a_programs_own(self, model):
        geometry = importlib.import_module("torchref.refinement.targets.geometry")

        class Swollen(torch.nn.Module):
            def __init__(self, xyz):
                super().__init__()
                self.xyz, self.scale = xyz, 1.0

            def forward(self):
                return self.scale * self.xyz()

        model.xyz = Swollen(model.xyz)
        bond = geometry.BondTarget(model)

        def found():
            values = []
            for model.xyz.scale in (1.0, 1.01):
                values.append(bond.stats()["rms_delta"].value)
            return values

        theirs = found()
        compat.register()
        assert found() == pytest.approx(theirs, rel=1e-9)

    def test_statistics_follow_writes_that_leave_no_trace(self, model):
        """TorchRef's modules are told of them."""
        geometry = importlib.import_module("torchref.refinement.targets.geometry")
        compat.register()
        bond = geometry.BondTarget(model)
        before = bond.stats()["rms_delta"].value
        model.xyz.refinable_params.data.mul_(1.01)
        model.xyz.reset_forward_cache()
        after = bond.stats()["rms_delta"].value
        assert after != pytest.approx(before, rel=1e-3)
        compat.unregister()
        assert after == bond.stats()["rms_delta"].value

    def test_parameters_that_ours_lack_stay_torchrefs(self, model):
        geometry = importlib.import_module("torchref.refinement.targets.geometry")
        targets = [
            geometry.NonBondedHTarget(model, sigma=0.2),
            geometry.NonBondedHTarget(model, buffer=0.1),
            geometry.NonBondedHTarget(model, r_exp=2.0),
            geometry.TorsionTarget(model, w_cis_general=0.1),
        ]
        theirs = [target() for target in targets]
        compat.register()
        torch.testing.assert_close([target() for target in targets], theirs, rtol=0, atol=0)
        assert not calls()["NonBondedHTarget.forward"]
        assert not calls()["TorsionTarget.forward"]
        bond, contacts = geometry.BondTarget(model), model.restraints.restraints["vdw"]
        torch.testing.assert_close(bond(), bond())
        assert calls()["BondTarget.forward"] == 2
        contacts["weights"] = None
        theirs = bond()
        assert calls()["BondTarget.forward"] == 2
        assert theirs.grad_fn.name() == "SumBackward0"

    def test_parts_that_a_subclass_replaces_are_its_own(self, refinement):
        geometry = importlib.import_module("torchref.refinement.targets.geometry")
        model, scaler = refinement.model, refinement.scaler

        class Bonds(geometry.BondTarget):
            def _restraint_group(self, *kind):
                columns = super()._restraint_group(*kind)
                return {name: column[::2] for name, column in columns.items()}

        class Contacts(geometry.NonBondedHTarget):
            def _compute_h_vdw_loss(self, *of):
                return 0 * super()._compute_h_vdw_loss(*of)

        class Twice(geometry.AngleTarget):
            name = "twice"

            def forward(self):
                return 2 * super().forward()

        class Isotropic(type(scaler)):
            def anisotropy_correction(self):
                return torch.ones_like(super().anisotropy_correction())

        class Stronger(type(scaler)):
            def iso_log_scale(self, design=None):
                return super().iso_log_scale(design) + 1

        F, kind = refinement.get_fcalc().detach(), type(scaler)
        with torch.no_grad():
            scaler.U += 0.02

        def found():
            values = [target(model)().detach() for target in (Bonds, Contacts, Twice)]
            for scaler.__class__ in (Isotropic, Stronger):
                values.append(scaler(F).detach())
            scaler.__class__ = kind
            return values

        theirs = found()
        compat.register()
        torch.testing.assert_close(found(), theirs)
        served = "BondTarget", "NonBondedHTarget", "AngleTarget", "ScalerBase"
        assert [calls()[f"{name}.forward"] for name in served] == [0, 0, 1, 0]

    def test_scales_and_solvent(self, refinement):
        """The mask voxel by voxel; and scaled factors, with derivatives of both orders."""
        scaler = refinement.scaler
        with torch.no_grad():
            scaler.U += 0.02 * torch.arange(6)
            scaler.solvent.log_k_solvent.fill_(-1.0)
        F = refinement.get_fcalc().detach().requires_grad_()
        leaves = [F, *scaler.parameters()]
        weights = torch.linspace(-1, 2, len(F), dtype=F.real.dtype)

        def found():
            scaled = scaler(F)
            loss = (weights * scaled.abs()).sum()
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            second = torch.autograd.grad(sum((dx.abs() ** 2).sum() for dx in first), leaves)
            again = torch.autograd.grad((weights * scaler(F).abs()).sum(), leaves)
            with torch.no_grad():
                plain = scaler(F)
            return [scaled, *first, *second, *again, plain]

        theirs, mask = found(), scaler.solvent.get_solvent_mask()
        compat.register()
        ours = found()
        torch.testing.assert_close(scaler.solvent.get_solvent_mask(), mask, rtol=0, atol=0)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, 1e-9)
        assert calls()["ScalerBase.forward"] == 3
        assert calls()["SolventModel.get_solvent_mask"] == 1
        with torch.no_grad():
            scaler.c_iso += 0.1
            ours = scaler(F)
            compat.unregister()
            assert_close(ours, scaler(F))
            # A batch, and another solvent, are TorchRef's.
            others = [(torch.stack([F, 2 * F]),), (F, 0 * F)]
            theirs = [scaler(*arguments) for arguments in others]
            compat.register()
            ours = [scaler(*arguments) for arguments in others]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    @pytest.mark.parametrize("log_k", [-1.0, 2.0])
    def test_fit_of_scales(self, refinement, log_k):
        """The loss and its derivatives are TorchRef's; from any start the end is no higher."""
        scaler, solvent = refinement.scaler, refinement.scaler.solvent
        xray = importlib.import_module("torchref.refinement.targets.xray")
        F = refinement.get_fcalc().detach()
        loss_of = xray.create_xray_target(refinement.reflection_data, None, scaler, mode="ls")
        work, leaves = refinement.reflection_data.work, _scales._parameters(scaler)
        unscaled = work.F.double().square().sum()

        def loss():
            return loss_of(fcalc=F) + scaler.U.square().sum()

        def start():
            scaler.initialize()
            with torch.no_grad():
                solvent.log_k_solvent.fill_(log_k)
                solvent.log_ss_half.fill_(-4.5)
                solvent.log_n_exp.fill_(0.7)

        def amplitudes(x):
            with torch.no_grad():
                for p, part in zip(leaves, x.split([p.numel() for p in leaves]), strict=True):
                    p.copy_(part.view_as(p))
                return work.select(scaler(F)).abs()

        start()
        leaves = _scales._parameters(scaler)
        with torch.no_grad():
            scaler.U += 0.02 * torch.arange(6)
        x = torch.cat([p.detach().flatten() for p in leaves])
        minimum = _scales._Fit(scaler, _scales._constants(scaler, F), F)
        found, gradient, JTJ = minimum(x.numpy())
        expected = torch.autograd.grad(loss(), leaves)
        assert found == pytest.approx(loss().item(), rel=1e-9)
        assert_close(torch.from_numpy(gradient), torch.cat([dx.flatten() for dx in expected]), 1e-9)
        steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
        J = torch.stack([(amplitudes(x + h) - amplitudes(x - h)) / 2e-5 for h in steps], 1)
        amplitudes(x)
        JTJ[minimum.U, minimum.U] -= 2 * np.eye(6)
        assert_close(torch.from_numpy(JTJ), J.T @ J, 1e-7)

        start()
        theirs = scaler.refine_lbfgs(F)
        lowest, shape = (loss() / unscaled).item(), {k: np.shape(v) for k, v in theirs.items()}
        start()
        compat.register()
        ours = scaler.refine_lbfgs(F)
        assert (loss() / unscaled).item() < lowest + 1e-6
        assert calls()["ScalerBase.refine_lbfgs"] == 1
        assert {k: np.shape(v) for k, v in ours.items()} == shape
        assert ours["rwork"][-1] == pytest.approx(refinement.get_rfactor()[0], abs=1e-6)
        again = scaler.refine_lbfgs(F)
        assert again["rwork"] == pytest.approx(ours["rwork"], abs=1e-5)

    def test_errors_of_the_model(self, torchref):
        """Ours are TorchRef's to the last bit, with ties, amplitudes of 0, and NaN."""
        errors = importlib.import_module("torchref.refinement.model_error_estimation.sigma_a")
        rng = np.random.default_rng(0)
        F = 50 * rng.random(3000)
        observed = abs(F + 5 * rng.normal(size=3000))
        F[::3], observed[:20], F[20:40] = 0, np.nan, observed[20:40]
        columns = observed, F, rng.random(3000) < 0.1, rng.integers(1, 3, 3000).astype(float)
        columns += 0.3 * rng.random(3000), rng.random(3000) < 0.5, 3 * rng.random(3000)
        *arguments, sigma = map(torch.from_numpy, columns)
        theirs = errors.estimate_beta(*arguments, sigma_obs=sigma)
        compat.register()
        ours = errors.estimate_beta(*arguments, sigma_obs=sigma)
        torch.testing.assert_close(vars(ours), vars(theirs), rtol=0, atol=0)
        assert calls()["_solve_sigma_a"] == 1
        assert calls()["_segsum"] > 3

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_likelihoods(self, torchref, dtype):
        """Values, gradients and second derivatives, on both sides of every bound."""
        theirs = importlib.import_module("torchref.base.targets.xray_likelihoods")
        rng = torch.Generator().manual_seed(0)
        F, noise = 30 * torch.randn(2, 2000, generator=rng, dtype=dtype)
        observed, variance = (F.abs() + noise / 6).abs(), 1 + noise.abs()
        F[:10], F[10:20], observed[20:30], variance[30:40] = 0, 1e5, 0, 0
        centric, weights = noise > 9, torch.linspace(-1, 1, 2000, dtype=dtype)
        F.requires_grad_()

        def found():
            (alone,) = torch.autograd.grad(nll().sum(), F)
            values = nll()
            (first,) = torch.autograd.grad((weights * values).sum(), F, create_graph=True)
            (second,) = torch.autograd.grad((weights * first).sum(), F)
            return values, alone, first, second

        def nll():
            return theirs.rice_per_refl(observed, F, variance, centric)

        expected = found()
        compat.register()
        for one, other in zip(found(), expected, strict=True):
            assert_close(one[40:], other[40:], 2e-4 if dtype == torch.float32 else 1e-11)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=0.05)
        assert calls()["_rice_body"] == 2
        # Derivatives by other arguments, and amplitudes without flags, are TorchRef's.
        theirs.rice_per_refl(observed, F, variance, None)
        torch.func.grad(lambda F: theirs.rice_math(observed, F, variance, centric))(F.detach())
        variance.requires_grad_()
        (found,) = torch.autograd.grad(nll().sum(), variance)
        assert found.abs().sum() > 0
        assert calls()["_rice_body"] == 2
        # The default dtype is none of the arguments'.
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert nll().dtype == dtype
        finally:
            torch.set_default_dtype(before)

    # torch's own code for forward mode, which the first tangent of a process loads.
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    def test_tails_of_wilsons_distribution(self, torchref):
        theirs = importlib.import_module("torchref.base.wilson_outliers")
        x = torch.linspace(-400, 10, 1000, dtype=torch.float64)
        expected = theirs.log_normal_cdf(x)
        (slope,) = torch.autograd.grad(theirs.log_normal_cdf(x.requires_grad_()).sum(), x)
        compat.register()
        (ours,) = torch.autograd.grad(theirs.log_normal_cdf(x).sum(), x)
        torch.testing.assert_close(ours, slope, rtol=0, atol=0)
        x = x.detach()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            ours = torch.autograd.forward_ad.unpack_dual(theirs.log_normal_cdf(dual)).tangent
        torch.testing.assert_close(ours, slope, rtol=1e-9, atol=0)
        torch.testing.assert_close(theirs.log_normal_cdf(x), expected, rtol=1e-9, atol=1e-9)
        assert calls()["_log_mills_tail"] == 1

    @pytest.mark.parametrize("spread", [1.0, 4.0, 40.0])
    def test_contacts_with_images(self, torchref, spread):
        theirs = importlib.import_module("torchref.topology.nonbonded")
        rng = np.random.default_rng(0)
        combos, atoms = np.repeat(np.arange(27), 60), np.tile(np.arange(60), 27)
        shifts = np.stack(np.meshgrid(*[(-1, 0, 1)] * 3), -1).reshape(-1, 3) @ TRICLINIC
        xyz = spread * rng.random((60, 3))[atoms] + shifts[combos]
        shuffled = rng.permutation(len(xyz))
        columns = xyz.astype(np.float32), atoms, combos
        arguments = [torch.from_numpy(column[shuffled]) for column in columns]
        expected = theirs.find_pairs_kdtree(*arguments, 6.0, 13)
        compat.register()
        ours = theirs.find_pairs_kdtree(*arguments, 6.0, 13)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        assert len(ours[0]) > 50
        assert calls()["find_pairs_kdtree"] == 1
        arguments[0][0] = torch.nan
        with pytest.raises(ValueError, match="finite"):
            theirs.find_pairs_kdtree(*arguments, 6.0, 13)

    @pytest.mark.parametrize("k", [0.0, 0.35, 0.6])
    def test_fits_find_the_solvent(self, refinement, k):
        """First, and again after amplitudes without solvent, whose fit tells nothing of it."""
        scaler, data = refinement.scaler, refinement.reflection_data
        F = refinement.get_fcalc().detach()
        rng = np.random.default_rng(0)
        error = torch.from_numpy(0.1 * rng.normal(size=len(F)) + 0.1j * rng.normal(size=len(F)))
        with torch.no_grad():
            solvent = torch.exp(-60 * scaler._s_half_sq) * scaler.solvent.get_rec_solvent(data.hkl)
            true = (F + error * F.abs() + k * solvent).abs()
            none = (F + error * F.abs()).abs()
        compat.register()
        R = []
        for amplitudes, cold in ((true, True), (none, True), (true, False)):
            data.F.copy_(amplitudes)
            if cold:
                scaler.initialize()
            R.append(scaler.refine_lbfgs(F)["rwork"][-1])
        assert abs(R[2] - R[0]) < 2e-3
        assert R[0] < R[1] + 0.01 < 0.12
        if k:
            assert scaler.solvent.k_solvent().item() == pytest.approx(k, rel=0.2)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_contacts_follow_the_lengths_of_bonds_with_hydrogens(self, model, in_place):
        geometry = importlib.import_module("torchref.refinement.targets.geometry")
        target, hydrogens = geometry.NonBondedHTarget(model), model.restraints.h_topo

        def found():
            results = []
            for factor in (1.2, 1 / 1.2):
                if in_place:
                    hydrogens.h_bond_length.mul_(factor)
                else:
                    hydrogens.h_bond_length = hydrogens.h_bond_length * factor
                hydrogens.reset_cache()
                results += [target().detach(), torch.tensor(target.stats()["loss"].value)]
            return results

        theirs = found()
        assert theirs[0] != theirs[2]
        compat.register()
        torch.testing.assert_close(found(), theirs)

    def test_scales_follow_writes_through_data(self, refinement):
        """TorchRef's scaler keeps no results, so it reads what tells no change of a version."""
        scaler, F = refinement.scaler, refinement.get_fcalc().detach()
        parameters = scaler.U, scaler.c_iso, scaler.solvent.log_k_solvent

        def found():
            results = []
            for p in parameters:
                for change in (0.1, -0.1):
                    p.data += change
                    with torch.no_grad():
                        results.append(scaler(F))
            return results

        theirs = found()
        compat.register()
        for one, other in zip(found(), theirs, strict=True):
            assert_close(one, other)

    @pytest.mark.parametrize("verbose", [0, 1, 3])
    def test_fits_tell_as_much(self, refinement, capsys, verbose):
        scaler, F = refinement.scaler, refinement.get_fcalc().detach()
        scaler.verbose, told = verbose, []
        for registered in (False, True):
            if registered:
                compat.register()
            capsys.readouterr()
            scaler.refine_lbfgs(F, nsteps=2)
            told.append(re.sub(r"-?[0-9.]+(e-?[0-9]+)?", "0", capsys.readouterr().out).split())
        assert told[0] == told[1]
        assert bool(told[0]) == bool(verbose)

    # torch's own code for forward mode, which the first tangent of a process loads.
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    def test_transforms_and_tangents_of_scales(self, refinement):
        scaler, F = refinement.scaler, refinement.get_fcalc().detach()
        forward_ad = torch.autograd.forward_ad

        def by_U(U):
            return torch.func.functional_call(scaler, {"U": U}, (F,)).abs().square().sum()

        def tangent(call, x):
            with forward_ad.dual_level():
                y = call(forward_ad.make_dual(x, torch.ones_like(x)))
                return forward_ad.unpack_dual(y).tangent

        def found():
            U = scaler.U.detach()
            with torch.no_grad():
                several = torch.func.vmap(by_U)(torch.stack([U, U + 0.01]))
            return [
                several,
                torch.func.grad(by_U)(U),
                torch.func.hessian(by_U)(U),
                torch.func.jvp(scaler, (F,), (F,))[1],
                tangent(scaler, F),
                tangent(by_U, U),
                scaler(F).detach(),
            ]

        theirs = found()
        compat.register()
        for one, other in zip(found(), theirs, strict=True):
            assert_close(one, other)
        assert calls()["ScalerBase.forward"] > 0

    @pytest.mark.parametrize("name", ["bond", "torsion", "nonbonded", "planarity", "simu"])
    def test_transforms_of_targets(self, model, monkeypatch, name):
        """TorchRef's own modules transform where they keep no results."""
        combined = importlib.import_module("torchref.refinement.targets.combined")
        monkeypatch.setattr(importlib.import_module("torchref").config.caching, "value", False)
        of = combined.TotalADPTarget if name == "simu" else combined.TotalGeometryTarget
        target = of(model, 0).targets()[name]
        parameter = f"_model.{'adp' if name == 'simu' else 'xyz'}.refinable_params"
        x = dict(target.named_parameters())[parameter].detach()

        def value(x):
            return torch.func.functional_call(target, {parameter: x}, ())

        target()
        theirs = torch.func.grad(value)(x)
        compat.register()
        assert_close(torch.func.grad(value)(x), theirs)
        (own,) = torch.autograd.grad(target(), dict(target.named_parameters())[parameter])
        assert_close(own, theirs, 1e-9)

    def test_fits_that_ours_lack_stay_torchrefs(self, refinement):
        """Another target, a held parameter, numbers that no scale fits, and an own class."""
        scaler, F = refinement.scaler, refinement.get_fcalc().detach()

        class Twice(type(scaler)):
            def forward(self, fcalc, f_sol_override=None):
                return 2 * super().forward(fcalc, f_sol_override)

        compat.register()
        scaler.refine_lbfgs(F, nsteps=1, max_iter=1, scale_target="nll")
        scaler.U.requires_grad_(False)
        scaler.refine_lbfgs(F, nsteps=1, max_iter=1)
        assert not calls()["ScalerBase.refine_lbfgs"]
        scaler.U.requires_grad_(True)
        before = [p.detach().clone() for p in scaler.parameters()]
        scaler.refine_lbfgs(torch.nan * F, nsteps=1)
        torch.testing.assert_close([*scaler.parameters()], before, rtol=0, atol=0)
        scaler.__class__ = Twice
        assert scaler.refine_lbfgs(F)["rwork"][-1] < 0.3
        assert not calls()["ScalerBase.refine_lbfgs"]

    def test_sums_in_place_leave_values_alone(self, model):
        geometry = importlib.import_module("torchref.refinement.targets.geometry")
        bond, angle = geometry.BondTarget(model), geometry.AngleTarget(model)
        compat.register()
        for context in (torch.no_grad(), contextlib.nullcontext()):
            with context:
                total = bond()
                expected = total.item(), angle().item()
                total += angle()
                assert total.item() == pytest.approx(sum(expected))
                assert (bond().item(), angle().item()) == pytest.approx(expected)
        with torch.no_grad():
            part = bond()
            part *= 2
            assert angle().item() == pytest.approx(expected[1])
            assert not angle().requires_grad
        leaves = model.parameters_of_types(("xyz",))
        again = torch.autograd.grad(bond() + angle(), leaves, retain_graph=True)
        assert_close(torch.autograd.grad(total, leaves)[0], again[0])
        compat.unregister()
        assert_close(torch.autograd.grad(bond() + angle(), leaves)[0], again[0], 1e-9)

    @pytest.mark.filterwarnings("ignore:TorchRef")
    def test_inference(self, refinement):
        """Tensors that tell no changes are not kept."""
        theirs = refinement.get_rfactor()
        compat.register()
        for _ in range(2):
            with torch.no_grad():
                refinement.scaler.U += 0.01
            with torch.inference_mode():
                ours = refinement.get_rfactor()
            compat.unregister()
            with torch.no_grad():
                assert refinement.get_rfactor() == pytest.approx(ours, rel=1e-6)
            compat.register()
        assert ours != pytest.approx(theirs, rel=1e-3)

    def test_methods_of_another_version_stay(self, torchref, monkeypatch):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.4")
        compat.register()
        assert not any("." in name for name in calls())

    def test_a_whole_refinement(self, torchref):
        """Its command reaches the same R, and every method serves it."""
        importlib.import_module("benches")
        whole = importlib.import_module("bench.whole")
        step = whole.whole_refinement("cpu")
        problem = step.checks[0].make()
        (theirs,) = step.reference(problem)
        chain = step.ours(problem, "torch", "cpu", "float32", None)
        (ours,) = chain.steps()[whole.FORWARD]()
        # Of a dozen runs of TorchRef's own one ended as far away.
        np.testing.assert_allclose(ours, theirs, atol=3e-3)
        assert calls() == {}

    @pytest.mark.gpu
    def test_a_whole_refinement_by_graphs(self, torchref, monkeypatch):
        """Its command reaches the same R on a GPU, where every gradient is that of its closure."""
        importlib.import_module("benches")
        whole = importlib.import_module("bench.whole")
        state = importlib.import_module("torchref.refinement.loss_state").LossState
        problem = whole.simulated("1ubi", cycles=1)
        (theirs,) = whole._run(problem, "cuda")
        again, errors = _replays._Evaluations.again, []

        @torch.enable_grad()
        def compared(self):
            found = again(self)
            if found is not None:
                # TorchRef keeps results, whose graph the gradients before used up.
                self.state.reset_caches()
                own = state.aggregate.theirs(self.state)
                leaves = [p for g in self.groups for p in g["params"] if p.requires_grad]
                expected = torch.autograd.grad(own, leaves, allow_unused=True)
                true, _ = self.reported(own, dict(zip(leaves, expected, strict=True)).get)
                assert_close(found[1][0], own.detach().double(), 1e-4)
                errors.append(float((found[0] - true).norm() / true.norm()))
            return found

        monkeypatch.setattr(_replays._Evaluations, "again", compared)
        monkeypatch.setattr(_replays, "_held", {})
        compat.register()
        (ours,) = whole._run(problem, "cuda")
        assert len(errors) > 20
        assert all(error < 5e-3 for error in errors)
        # TorchRef's own runs of one cycle differ by as much.
        np.testing.assert_allclose(ours, theirs, atol=4e-3)

    @pytest.mark.gpu
    def test_masks_and_errors_on_a_gpu_are_a_cpus(self, torchref, tmp_path):
        compat.register()
        both = [refining(tmp_path, device=torch.device(device)) for device in ("cpu", "cuda")]
        masks = [each.scaler.solvent.get_solvent_mask() for each in both]
        assert masks[1].is_cuda
        assert not masks[0].all()
        torch.testing.assert_close(masks[1].cpu(), masks[0], rtol=0, atol=0)
        R = [each.get_rfactor() for each in both]
        assert R[1] == pytest.approx(R[0], abs=1e-4)
        for change in (0.0, 0.1, 0.2):
            losses = []
            for each in both:
                with torch.no_grad():
                    each.scaler.c_iso += change
                each.xray_target_work.maintenance()
                losses.append(each.xray_target_work().item())
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert _likelihoods._searches.cache_info().currsize == 1
        counts = calls()
        assert counts["SolventModel.get_solvent_mask"] >= 4
        assert counts["_solve_sigma_a"] >= 6
        assert counts["_rice_body"] >= 6

    def test_masks_and_the_shape_of_a_grid(self, refinement):
        """Both are TorchRef's, and follow other reflections and another grid."""
        data, model = refinement.reflection_data, refinement.model
        subset = type(data.work)
        theirs = [data.work.mask, data.free.mask, model.fft.grid_shape]
        compat.register()
        ours = [data.work.mask, data.free.mask, tuple(refinement.get_fcalc().shape)]
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=0)
        assert calls()["ReflectionSubset.mask"] == 2
        rho = [model.fft.build_density_map(*model.get_iso())]
        model.fft.explicit_gridsize = [2 * n for n in theirs[2]]
        rho.append(model.fft.build_density_map(*model.get_iso()))
        assert [tuple(x.shape) for x in rho] == [theirs[2], tuple(2 * n for n in theirs[2])]
        compat.unregister()
        assert not hasattr(subset.mask, "theirs")
        torch.testing.assert_close(data.work.mask, theirs[0], rtol=0, atol=0)

    def test_structure_factors_of_its_engine(self, torchref):
        """The engine finds our density by itself, and its choice of plain torch stays."""
        context = importlib.import_module("torchref.model.context").ModelContext
        engines = importlib.import_module("torchref.model.sf_fft")
        symmetry = importlib.import_module("torchref.symmetry")
        backends = importlib.import_module("torchref.utils.backends")
        crystal = context(
            cell=symmetry.Cell([20, 22, 24, 90, 90, 90], dtype=torch.float32),
            spacegroup=symmetry.SpaceGroup(
                "P 21 21 21", dtype=torch.float32, device=torch.device("cpu")
            ),
        )
        engine = engines.SfFFT(crystal, max_res=2.0)
        hkl = torch.tensor([[1, 2, 3], [0, 0, 4], [-2, 5, 1]])
        kind = atoms(30, dtype=torch.float32)
        theirs, _ = engine.compute_structure_factors(hkl, *kind)
        compat.register()
        ours, rho = engine.compute_structure_factors(hkl, *kind)
        assert calls()["build_electron_density"] == 1
        assert_close(ours, theirs, 1e-4)
        assert calls()["SfFFT.map_to_structure_factors"] == 1
        # Indices that alias or of 16 bits, and maps of complex numbers or integers, are theirs.
        given = [(hkl, rho), (50 * hkl, rho), (hkl, (1 + 2j) * rho), (hkl.short(), rho)]
        given.append((hkl, (100 * rho).long()))
        for symmetric in (True, False):
            for indices, map in given:
                found = engine.map_to_structure_factors(map, indices, symmetric)
                compat.unregister()
                assert_close(found, engine.map_to_structure_factors(map, indices, symmetric), 1e-5)
                compat.register()
        with backends.use_portable():
            plain, _ = engine.compute_structure_factors(hkl, *kind)
        assert_close(plain, theirs, 1e-4)
