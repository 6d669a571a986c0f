"""Raise a clear ImportError if torch is missing; modules that need torch import this first."""

from fusedops._host.packages import how_to_install, import_error

if reason := import_error("torch"):
    raise ImportError(
        "fusedops.nn, pairs, compat and distributed need torch, and "
        f"{reason}: {how_to_install('fusedops[torch]')}"
    )
