"""Kernels compiled ahead of a computation."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from fusedops import _ahead  # noqa: E402
from fusedops._ahead import ahead, compile_ahead  # noqa: E402
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


@pytest.fixture
def threads(monkeypatch):
    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr(_ahead, "_ahead", _ahead._Ahead(pool, CPU))
        yield pool


def test_launches_of_new_kernels_compile_them_once(launcher, threads, monkeypatch):
    compiled = []
    monkeypatch.setattr(launch.Launcher, "compile", lambda self, args: compiled.append(args))
    x = torch.zeros(16, 64, dtype=torch.float16)
    tile = TensorDescriptor.from_tensor(x, [16, 16])
    for key in ("a", "b", "a"):
        launcher(1, (key,), tile, x, 64, 16)
    launch.launch_all([(launcher, 1, (key,), (tile, x, 64, 16)) for key in "abcd"])
    threads.shutdown()
    assert len(compiled) == 4
    for described, found, *others in compiled:
        assert (found.dtype, found.numel(), others) == (x.dtype, 0, [64, 16])
        assert (described.base.numel(), described.shape) == (0, tile.shape)
        assert described.block_shape == tile.block_shape
    # A kernel that is there is launched.
    grids = []
    launcher._compiled["a",] = Compiled(grids)
    launcher(3, ("a",), x, 64, 16)
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


def test_threads_serve_their_stream_alone(threads):
    assert ahead(CPU).threads is threads
    found = []
    other = SimpleNamespace(type="cpu")
    assert ahead(other) is None
    thread = threading.Thread(target=lambda: found.append(ahead(CPU)))
    thread.start()
    thread.join()
    # As from threads of autograd's.
    assert found == [ahead(CPU)]


def test_a_cpu_has_nothing_to_compile():
    compile_ahead(lambda: pytest.fail("evaluated"), CPU)
    assert ahead(CPU) is None


@pytest.mark.gpu
def test_a_computation_after_its_kernels(launcher, monkeypatch):
    device, block = torch.device("cuda", 0), 128
    x, y = torch.zeros(2, 1000, device=device)
    seen = []

    def compute(x=x):
        launcher(8, (device, block), x, 1000, block)
        return x

    def computed():
        seen.append(torch.rand(2, device=device))
        compute()
        # Another stream's launch isn't one of the computation's.
        thread = threading.Thread(target=compute, args=[y])
        thread.start()
        thread.join()
        raise ValueError("the computation's own")

    state = torch.cuda.get_rng_state()
    compile_ahead(computed, device)
    assert seen
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert ahead(device) is None
    assert (x == 0).all()
    assert (y == 1).all()
    assert (compute() == 1).all()


@pytest.mark.gpu
def test_launches_that_only_compile_are_no_tape(launcher):
    """An op that is met while its kernels are compiled has its results from then on."""
    import fusedops

    device = torch.device("cuda", 0)
    x, kernels = torch.randn(1, 48, 24, device=device), torch.randn(1, 48, 24, 3, device=device)
    want = fusedops.dynamic_conv(x.cpu(), kernels.cpu())
    compile_ahead(lambda: fusedops.dynamic_conv(x, kernels), device)
    for _ in range(3):
        torch.testing.assert_close(fusedops.dynamic_conv(x, kernels).cpu(), want)
