"""Show and clear the compiled kernels that Numba and Triton keep on disk.

Show the folders in which Numba and Triton keep compiled kernels of this library. The next calls
compile what --clear removes; kernels of other programs in the same folders stay.
"""

from __future__ import annotations

import argparse

from fusedops import _info
from fusedops.cli.common import CommandError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove them")


def run(args: argparse.Namespace) -> int:
    caches = _info.caches()
    if not caches:
        print("no folder of compiled kernels: neither Numba nor Triton keeps any here")
    for name, (folder, ours) in caches.items():
        size = _info.megabytes(_info.size_of(ours))
        if args.clear:
            try:
                _info.clear(ours)
            except OSError as error:
                raise CommandError(f"{error.filename}: {error.strerror}") from None
        print(f"{name}: {'removed ' * args.clear}{size} in {folder}")
    return 0
