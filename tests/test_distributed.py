"""Modules under torch's wrappers for many processes, which move and free their parameters."""

from __future__ import annotations

import copy
import pathlib
import warnings

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from formulas import randomized  # noqa: E402
from fusedops.nn import (  # noqa: E402
    DynamicShortConvolution,
    PairBlock,
    TriangleAttention,
    TriangleMultiplicativeUpdate,
)
from worlds import world_of  # noqa: E402

PROCESSES = 2

MODULES = {
    "convolution": (lambda: DynamicShortConvolution(8, 4, generator_reduction=2), (4, 6, 8)),
    "triangle": (lambda: TriangleMultiplicativeUpdate(8, 4, bias=True), (4, 1, 5, 5, 8)),
    "attention": (lambda: TriangleAttention(8, 4, 2, False), (4, 1, 5, 5, 8)),
    "block": (lambda: PairBlock(8, 0.0, 4, 2), (4, 5, 5, 8)),
}
# `fully_shard` of torch 2.6 needs a GPU.
SHARDS = hasattr(torch.cpu.Stream, "record_event")
WRAPPERS = ["ddp", "fully_shard"] if SHARDS else ["ddp"]


def wrapped(module: torch.nn.Module, wrapper: str) -> torch.nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(module)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)


def example(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    return randomized(make()).to(dtype), torch.randn(3, *shape, dtype=dtype)


def train(module: torch.nn.Module, steps: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x in steps:
        optimizer.zero_grad()
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().mean().backward()
        optimizer.step()


def work(folder: str) -> None:
    """Train every module in every wrapper, and leave its parameters in `folder`."""
    for name in MODULES:
        for wrapper in WRAPPERS:
            module, steps = example(name, torch.float64)
            # Of torch's warnings, only the one about views concerns our modules.
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*returned a view tensor")
                train(wrapped(module, wrapper), steps.chunk(PROCESSES, 1)[distributed.get_rank()])
            state = {
                key: value.full_tensor() if hasattr(value, "full_tensor") else value
                for key, value in module.state_dict().items()
            }
            if distributed.get_rank() == 0:
                torch.save(state, f"{folder}/{name}-{wrapper}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("distributed")
    world_of("gloo", PROCESSES).run("test_distributed", "work", folder=str(folder))
    return folder


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MODULES)
def test_training_is_that_of_one_process(folder, name, wrapper):
    module, steps = example(name, torch.float64)
    before = copy.deepcopy(module.state_dict())
    train(module, steps)
    found = torch.load(folder / f"{name}-{wrapper}")
    for key, want in module.state_dict().items():
        torch.testing.assert_close(found[key], want, rtol=0, atol=1e-13)
        assert not torch.equal(want, before[key])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_results_are_no_views_and_storages_keep_their_freedom(name, dtype):
    module, steps = example(name, dtype)
    x = steps[0].requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    assert not out._is_view()
    assert out.is_contiguous()
    for tensor in (x, *module.parameters()):
        assert tensor.untyped_storage().resizable()
