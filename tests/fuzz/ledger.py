"""Counts of calls and checks, and the findings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a call runs."""

    framework: str
    backend: str
    device: str = "cpu"

    @property
    def deferred(self) -> bool:
        """Whether torch's formula is the reference, and comparisons run asynchronously."""
        return self.backend == "triton" or self.device != "cpu"

    def __str__(self) -> str:
        return f"{self.framework}, {self.backend}"


@dataclass
class Finding:
    """A failed check, the smallest description that fails it, and how often it failed."""

    op: str
    place: Place
    check: str
    message: str
    description: dict[str, Any]
    count: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, str(self.place), self.check

    def __str__(self) -> str:
        again = f"--device {self.place.device} --repeat '{json.dumps(self.description)}'"
        return f"{self.message}\n  python -m fuzz {again}"


def size(description: dict[str, Any]) -> tuple[float, int]:
    """Return how large a description is, for the smaller of two."""
    numbers = [v for k, v in description.items() if k != "seed" and isinstance(v, (int, float))]
    return sum(abs(v) for v in numbers), len(json.dumps(description))


@dataclass
class Ledger:
    """The calls, checks and findings of a campaign so far."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    checks: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    examples: int = 0

    def add(self, finding: Finding) -> None:
        known = self.findings.get(finding.key)
        if known is None:
            self.findings[finding.key] = finding
            return
        if size(finding.description) < size(known.description):
            known.description, known.message = finding.description, finding.message
        known.count += finding.count

    def merge(self, other: Ledger) -> None:
        self.calls += other.calls
        self.checks += other.checks
        self.examples += other.examples
        for finding in other.findings.values():
            self.add(finding)

    def report(self) -> str:
        """Return all findings, with one check's findings on many backends together."""
        together: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings.values():
            together.setdefault((finding.op, finding.check), []).append(finding)
        return "\n\n".join(
            f"{op}: {check}: {min(some, key=lambda f: size(f.description))}\n  "
            + "; ".join(f"{f.place} ({f.count})" for f in some)
            for (op, check), some in sorted(together.items())
        )

    def table(self, seconds: float) -> str:
        """Return calls, checks and findings by op and backend, as text."""
        found = Counter((f.op, str(f.place)) for f in self.findings.values())
        rows = [("op", "arrays, backend", "calls", "checks", "findings")]
        for key in sorted({*self.calls, *self.checks}):
            counts = self.calls[key], self.checks[key], found[key]
            rows.append((*key, *(f"{n:,}" for n in counts)))
        counts = self.calls.total(), self.checks.total(), len(self.findings)
        rows.append(("all", f"{self.examples:,} examples", *(f"{n:,}" for n in counts)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if at < 2 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        rate = self.calls.total() / max(seconds, 1e-9)
        return "\n".join([*lines, f"{seconds:.0f} s, {rate:,.0f} calls a second"])
