"""Kernels compiled side by side."""

import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from fusedops._ahead import _Ahead, ahead, compiling_ahead  # noqa: E402
from fusedops.compat._graphs import compile_ahead  # noqa: E402
from gpukern import launch  # noqa: E402

CPU = torch.device("cpu")


class Compiled:
    """Stands for a compiled kernel."""

    def __init__(self, grids):
        self.grids = grids

    def __getitem__(self, grid):
        return lambda *_: self.grids.append(grid)


def add_one(x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < count) + 1, mask=at < count)


@pytest.fixture
def launcher():
    names = ["x", "count"]
    options = {"do_not_specialize": names, "do_not_specialize_on_alignment": names}
    return launch.Launcher(JITFunction(add_one, **options), 1)


def test_launches_of_new_kernels_compile_them_once(launcher, monkeypatch):
    compiled, grids = [], []
    monkeypatch.setattr(launch.Launcher, "compile", lambda self, args: compiled.append(args))
    x = torch.zeros(16, 64, dtype=torch.float16)
    tile = TensorDescriptor.from_tensor(x, [16, 16])
    launcher._compiled["there",] = Compiled(grids)
    with compiling_ahead(CPU):
        for key in ("a", "b", "a", "there"):
            launcher(3, (key,), tile, x, 64, 16)
        launch.launch_all([(launcher, 1, (key,), (tile, x, 64, 16)) for key in "abcd"])
    assert len(compiled) == 4
    for described, found, *others in compiled:
        assert (found.dtype, found.numel(), others) == (x.dtype, 0, [64, 16])
        assert (described.base.numel(), described.shape) == (0, tile.shape)
        assert described.block_shape == tile.block_shape
    assert grids == [(3, 1, 1)]


def test_compilers_leave_filters_of_warnings_as_they_were(launcher, monkeypatch):
    """The first of two leaves the block of its own filters while the second is in one."""
    entered, left = [threading.Event() for _ in range(2)], threading.Event()

    def compile(self, args):
        n = args[1]
        assert n == 0 or entered[0].wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            entered[n].set()
            assert (left if n else entered[1]).wait(60)
        left.set()

    monkeypatch.setattr(launch.Launcher, "compile", compile)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: None)
    before, x = list(warnings.filters), torch.zeros(1)
    launch.launch_all([(launcher, 1, (n,), (x, n)) for n in range(2)])
    assert warnings.filters == before


def test_all_threads_of_a_stream_compile_ahead():
    found = []
    with compiling_ahead(CPU):
        # As autograd's.
        thread = threading.Thread(target=lambda: found.append(ahead(CPU)))
        thread.start()
        thread.join()
        assert found == [ahead(CPU)] != [None]
        assert ahead(torch.device("meta")) is None
    assert ahead(CPU) is None


def test_a_cpu_has_nothing_to_compile():
    compile_ahead(lambda: pytest.fail("evaluated"), CPU)


@pytest.mark.gpu
def test_a_computation_after_its_kernels(launcher):
    device, block = torch.device("cuda", 0), 128
    x, seen = torch.zeros(1000, device=device), []

    def compute():
        launcher(8, (device, block), x, 1000, block)

    def computed():
        seen.append(torch.rand(2, device=device))
        compute()
        raise ValueError("the computation's own")

    state = torch.cuda.get_rng_state()
    compile_ahead(computed, device)
    assert seen
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert ahead(device) is None
    made = dict(launcher.kernel.device_caches[0][0])
    assert len(made) == 1
    assert (x == 0).all()
    compute()
    assert (x == 1).all()
    # The launch has found the kernel.
    assert dict(launcher.kernel.device_caches[0][0]) == made


@pytest.mark.gpu
def test_another_stream_launches(launcher):
    device, block = torch.device("cuda", 0), 128
    x = torch.zeros(1000, device=device)
    torch.cuda.synchronize()

    def compute():
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            launcher(8, (device, block), x, 1000, block)

    compile_ahead(compute, device)
    assert (x == 1).all()


@pytest.mark.gpu
def test_launches_that_only_compile_are_on_no_tape(monkeypatch):
    """A first call while kernels compile records none, and later calls have results."""
    import fusedops
    from gpukern.conv import triton as conv

    begun, begin = [], _Ahead.begin
    monkeypatch.setattr(_Ahead, "begin", lambda self, *a: begun.append(a) or begin(self, *a))
    for value in vars(conv).values():
        for made in value.values() if isinstance(value, dict) else [value]:
            if isinstance(made, launch.Launcher):
                monkeypatch.setattr(made, "_compiled", {})
    device = torch.device("cuda", 0)
    x, kernels = torch.randn(1, 48, 24, device=device), torch.randn(1, 48, 24, 3, device=device)
    want = fusedops.dynamic_conv(x.cpu(), kernels.cpu())
    compile_ahead(lambda: fusedops.dynamic_conv(x, kernels), device)
    for _ in range(3):
        torch.testing.assert_close(fusedops.dynamic_conv(x, kernels).cpu(), want)
    assert begun
