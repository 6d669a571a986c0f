"""``python -m fusedops``."""

import sys

from fusedops.cli import main

sys.exit(main())
