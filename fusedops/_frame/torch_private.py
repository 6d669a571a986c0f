"""The private names of torch that the frame uses, as torch 2.13 has them.

Where another torch lacks a name, a public one takes its place; without any, its use raises.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any


class _Private:
    """Private names of torch, found once in a process."""

    def __init__(self, torch: Any) -> None:
        def find(path: str, instead: Any = None) -> Any:
            """Return an object of torch, or the public one in its place."""
            try:
                return operator.attrgetter(path)(torch)
            except AttributeError:
                return _missing(torch, path) if instead is None else instead

        #: Whether torch.func transforms; how many modes see operations; how deep dual numbers are.
        self.transforming = find("_C._are_functorch_transforms_active")
        self.dispatch_modes = find("_C._len_torch_dispatch_stack")
        self.dual_level = functools.partial(
            getattr, torch.autograd.forward_ad, "_current_level", -1
        )
        self.after_autograd = find("_C._after_autograd_keyset")
        self.has_forward_mode = find("_C._is_fwd_grad_enabled", lambda: True)
        self.set_forward_mode = find("autograd.forward_ad._set_fwd_grad_enabled")
        self.is_deterministic = find(
            "_C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
        )
        #: The function by which torch.compile traces frames here, or None.
        self.frame_callback = find(
            "_C._dynamo.eval_frame.get_eval_frame_callback",
            lambda: torch.compiler.is_compiling() or None,
        )

        #: The wrappers of torch.func, and the batches of cotangents that autograd makes.
        self.without_transforms = find("_C._DisableFuncTorch")
        self.is_wrapped = find("_C._functorch.is_functorch_wrapped_tensor")
        self.is_mapped = find("_C._functorch.is_batchedtensor")
        self.inside = find("_C._functorch.get_unwrapped")
        self.alive = find("_C._functorch.unwrap_if_dead")
        self.transforms = find("_C._functorch.get_interpreter_stack")
        self.vmap = find("_C._functorch.TransformType.Vmap")
        self.dispatch_keys = find("_C._dispatch_keys")
        self.dispatch_key = find("_C._parse_dispatch_key")
        self.add_batch_dim = find("_add_batch_dim")
        self.remove_batch_dim = find("_remove_batch_dim")

        #: Whether the backward pass that runs goes on to a node; without it, it may.
        self.will_run = find("_C._will_engine_execute_node", lambda node: True)
        #: Comparisons of tensors' kinds in one step.
        self.guards = find("_C._dynamo.guards.TensorGuards")
        #: The line search of torch.optim.LBFGS, if it is there.
        search = sys.modules.get("torch.optim.lbfgs")
        self.strong_wolfe: Any = getattr(search, "_strong_wolfe", None)
        self.current_device = find("_C._cuda_getDevice", torch.cuda.current_device)
        #: A quarter of the time of torch.empty_strided.
        self.empty_strided_cuda = find(
            "_C._dynamo.guards._empty_strided_cuda",
            lambda shape, strides, dtype: torch.empty_strided(
                shape, strides, dtype=dtype, device="cuda"
            ),
        )


def _missing(torch: Any, path: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"torch {torch.__version__} has no torch.{path}, which fusedops needs here"
        )

    return call


@functools.cache
def private() -> _Private:
    """Return the private names; torch must have been imported."""
    return _Private(sys.modules["torch"])
