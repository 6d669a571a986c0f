"""Run the tests of causal-conv1d, flash-linear-attention, vLLM or SGLang on our functions::

    python tests/peer_conv.py causal_conv1d <clone of its repository> [arguments for pytest]
    python tests/peer_conv.py cpp_functions <clone of causal-conv1d> [arguments for pytest]
    python tests/peer_conv.py fla <clone of its repository> [arguments for pytest]
    python tests/peer_conv.py fla_delta <clone of flash-linear-attention> [arguments for pytest]
    python tests/peer_conv.py vllm <clone of its repository> [arguments for pytest]
    python tests/peer_conv.py sglang <clone of its repository> [arguments for pytest]

Nothing of theirs is installed: modules with our functions take the place of the package, beside
causal-conv1d's own references, or only of its compiled functions. Without a GPU the tests run on
the CPU, with fewer tokens, channels, rows and repetitions.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fusedops.compat import causal_conv1d, fla, sglang, vllm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def module(name: str, **contents: Any) -> ModuleType:
    """Return an imported module with the given contents, in packages that are imported, too."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        module(parent)
    made = sys.modules[name] = ModuleType(name)
    made.__path__ = []
    made.__dict__.update(contents)
    return made


def ours(of: ModuleType) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__all__}


def for_causal_conv1d(clone: Path, *, compiled_only: bool = False) -> str:
    """Import ours for causal-conv1d's functions; return the source of its tests."""
    sys.path.insert(0, str(clone))
    package = module("causal_conv1d")
    package.__path__ = [str(clone / "causal_conv1d")]
    module("causal_conv1d.cpp_functions", **ours(causal_conv1d))
    import causal_conv1d.causal_conv1d_interface as interface
    import causal_conv1d.causal_conv1d_varlen as varlen

    for place in (varlen,) if compiled_only else (interface, varlen):
        place.__dict__.update(ours(causal_conv1d))
    source = (clone / "tests/test_causal_conv1d.py").read_text()
    if torch.cuda.is_available():
        return source
    for large, small in {
        '"cuda"': '"cpu"',
        "4096 + 32": "96",
        "4096 + dim + 64": "64 + dim + 64",
        "4096:4096 + dim": "64:64 + dim",
        "batch, 4096": "batch, 64",
        "[2048, 2048 + 16, 4096]": "[64, 80]",
        "batch = 64": "batch = 8",
        "range(10000)": "range(3)",
    }.items():
        source = source.replace(large, small)
    return source


def close(name: str, want: torch.Tensor, got: torch.Tensor, ratio: float) -> None:
    """Raise unless the root mean square of the error is a small part of the value's."""
    error = (want.double() - got.double()).square().mean().sqrt()
    size = want.double().square().mean().sqrt()
    assert error <= 1e-6 or error < ratio * size, f"{name}: error {error:.1e} of {size:.1e}"


def for_fla(clone: Path) -> str:
    """Import ours for flash-linear-attention's functions; return the source of its tests."""
    module("fla.utils", assert_close=close, device=DEVICE)
    contents = {**ours(fla), "fast_causal_conv1d_fn": fla.causal_conv1d}
    module("fla.modules.convolution", **contents)
    # Tests of fla's other backends are skipped unless causal-conv1d is there.
    module("causal_conv1d", causal_conv1d_fn=causal_conv1d.causal_conv1d_fn)
    for name in ("conv", "conv.short_conv", "conv.triton", "conv.triton.ops"):
        module(f"fla.modules.{name}", **contents)
    source = (clone / "tests/modules/test_conv.py").read_text()
    if not torch.cuda.is_available():
        source = source.replace("8192", "512").replace("(4, 1024, 4096", "(4, 1024, 128")
    return source


def for_fla_delta(clone: Path) -> str:
    """Import ours for the gated delta rule of flash-linear-attention; return its tests' source.

    Tests of parts of its kernels, and of its other backends, are left out.
    """

    def gates(g: Any, A_log: Any, dt_bias: Any = None) -> Any:
        g = g.float() if dt_bias is None else g.float() + dt_bias
        return -A_log.exp() * torch.nn.functional.softplus(g)

    flags = ("INTEL_ALCHEMIST", "NPU", "NVIDIA_BLACKWELL", "NVIDIA_HOPPER", "NVIDIA_SM100")
    own = {f"IS_{flag}": False for flag in (*flags, "NVIDIA_SM120")}
    module("fla.utils", assert_close=close, device=DEVICE, **own)
    folder = "fla.ops.gated_delta_rule"
    module(folder, **ours(fla)).__path__ = [str(clone / folder.replace(".", "/"))]
    module(f"{folder}.gate", naive_gdn_gate=gates, fused_gdn_gate=None)
    module(f"{folder}.wy_fast", prepare_wy_repr_bwd=None, recompute_w_u_fwd=None)
    # Groups of heads are left out where another of its backends may serve a call.
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    left_out = "test_gate", "test_prepare_wy", "test_flash_qla", "test_chunk_gated_delta_rule_fwd"
    source = (
        (clone / "tests/ops/test_gdn.py").read_text()
        + f"""
for name in [name for name in globals() if name.startswith({left_out})]:
    del globals()[name]
"""
    )
    if not torch.cuda.is_available():
        source = re.sub(r"\((\d), (1000|1024|1500|2048), ", r"(\1, 150, ", source)
    return source


def for_vllm(clone: Path) -> str:
    """Import ours for vLLM's functions; return the source of its tests."""
    module("vllm.model_executor.layers.mamba.ops.causal_conv1d", **ours(vllm))
    module("vllm.utils.torch_utils", set_random_seed=torch.manual_seed)
    module("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1)
    # A test of speculative decoding is left out where vLLM's own functions for a CPU would run.
    platform = SimpleNamespace(
        device_type=DEVICE,
        is_cuda_alike=lambda: True,
        is_xpu=lambda: False,
        is_cpu=lambda: False,
    )
    module("vllm.platforms", current_platform=platform)
    torch.accelerator.empty_cache = lambda: None
    return fewer((clone / "tests/kernels/mamba/test_causal_conv1d.py").read_text())


def for_sglang(clone: Path) -> str:
    """Import ours for SGLang's functions; return the source of its tests."""
    contents = {**ours(sglang), "PAD_SLOT_ID": -1}
    module("sglang.srt.layers.attention.mamba.causal_conv1d_triton", **contents)
    module("sglang.kernels.ops.mamba.causal_conv1d_triton", **contents)
    module("sglang.srt.utils", get_device=lambda: DEVICE)
    module("sglang.test.test_utils", empty_gpu_cache=lambda: None)
    registered = {f"register_{where}_ci": lambda **options: None for where in ("amd", "cuda")}
    module("sglang.test.ci.ci_register", **registered)
    return fewer((clone / "test/registered/layers/mamba/test_causal_conv1d.py").read_text())


def fewer(source: str) -> str:
    """Return the source of tests with fewer channels for a CPU."""
    if not torch.cuda.is_available():
        for large, small in {"4096 + dim": "64 + dim", "4096 :": "64 :", "4096]": "512]"}.items():
            source = source.replace(large, small)
        source = source.replace("2048", "128")
    return source


if __name__ == "__main__":
    peer, clone, *arguments = sys.argv[1:]
    sources = {
        "causal_conv1d": for_causal_conv1d,
        "cpp_functions": partial(for_causal_conv1d, compiled_only=True),
        "fla": for_fla,
        "fla_delta": for_fla_delta,
        "vllm": for_vllm,
        "sglang": for_sglang,
    }
    source = sources[peer](Path(clone).absolute())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"test_{peer}.py"
        path.write_text(source)
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments, str(path)]))
