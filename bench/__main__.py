"""``python -m bench``: as `fusedops bench`, or tables, history or commands, if named first."""

import importlib
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    # The installed package comes before the checkout's, which may have no compiled kernels.
    checkout = sys.path.pop(0)
    if find_spec("fusedops") is None:
        sys.path.insert(0, checkout)
    if sys.argv[1:2] and sys.argv[1] in ("tables", "history", "commands"):
        sys.exit(importlib.import_module(f"bench.{sys.argv[1]}").main(*sys.argv[2:]))
    from fusedops.cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
