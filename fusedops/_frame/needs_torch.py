"""Imported before torch by modules that need it: an ImportError that says so if it is missing."""

from fusedops._frame.registry import how_to_install, import_error

if reason := import_error("torch"):
    raise ImportError(
        "fusedops.nn, pairs, compat and distributed need torch, and "
        f"{reason}: {how_to_install('fusedops[torch]')}"
    )
