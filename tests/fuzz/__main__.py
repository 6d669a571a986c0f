"""``python -m fuzz``: see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import json
import sys
import time

from fusedops.testing import poisoned_outputs

from .campaign import FAMILIES, campaign, examine, places, resolve
from .ledger import Ledger


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="how long; 60 without --calls")
    parser.add_argument("--calls", type=int, help="until so many calls are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", action="append", choices=sorted(FAMILIES), default=[])
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--leaks", action="store_true", help="watch memory instead")
    parser.add_argument("--repeat", metavar="JSON", help="examine one description")
    asked = parser.parse_args()
    names = asked.op or list(FAMILIES)
    started = time.monotonic()
    if asked.repeat:
        ledger, description = Ledger(), json.loads(asked.repeat)
        where = places(asked.backend, asked.device)
        with poisoned_outputs():
            resolve([examine(description, where, ledger)], ledger)
        seconds = time.monotonic() - started
    elif asked.leaks:
        from .leaks import leaks

        ledger = leaks(names, asked.backend, asked.calls or 10_000, say=_say)
        seconds = time.monotonic() - started
    else:
        ledger, seconds = campaign(
            seconds=asked.seconds or (float("inf") if asked.calls else 60.0),
            calls=asked.calls or sys.maxsize,
            seed=asked.seed,
            names=names,
            backends=asked.backend,
            device=asked.device,
            workers=asked.workers,
            say=_say,
        )
    if ledger.findings:
        print(ledger.report(), end="\n\n")
    print(ledger.table(seconds))
    return 1 if ledger.findings else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
