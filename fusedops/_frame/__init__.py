"""The code that all ops share: choice of backends, calls and their derivatives."""

from __future__ import annotations

from typing import Any

from fusedops._frame import hook


def _load_bridge() -> Any:
    # A statement, because torch.compile traces it before and after the first time.
    from fusedops._frame import bridge

    return bridge


hook.bridge = _load_bridge
