"""The hook by which the frame reaches torch: the bridge is imported only once tensors are met."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fusedops._frame.torch_private import private

F = TypeVar("F", bound=Callable[..., Any])

#: Returns ``fusedops._frame.bridge``. The bridge imports all that has this hook, so the package
#: sets it, above both.
bridge: Any = None


@functools.cache
def loaded() -> Any:
    """Return the bridge sooner than an import statement does, where torch traces no Python."""
    return bridge()


def compiling() -> bool:
    """Return whether torch.compile traces this frame, or would trace the frames that it calls."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    return private().frame_callback() is not None


def outside_of_graphs(function: F) -> F:
    """Return a function that torch.compile doesn't trace: a call breaks the graph."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return sys.modules["torch"].compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
