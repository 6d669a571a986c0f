"""Triton's kernels under compute-sanitizer, on a GPU: ``python -m fuzz.sanitized``.

Workers under the sanitizer share tests for a GPU, in random order: every case of every op, second
derivatives, packed and broken indices, and Hopper's own kernels. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILES = "tests/test_gpu.py", "tests/test_matrix.py"
#: Without peaks of memory, graphs, profiles, compilations and waiting, which the sanitizer changes,
#: and without arrays of 2³¹ elements.
TESTS = (
    "(agrees_with_the_reference and triton) or second_derivatives or many_rows "
    "or on_hopper or same_bits or deterministic or lead_nowhere"
)
#: The tests of a process. Under the sanitizer a process takes more of the GPU's memory with every
#: test, up to 140 GB for six updates of 512 × 512 pairs.
AT_ONCE = 6
#: Beginnings of the sanitizer's lines that are no findings.
NOTES = "COMPUTE-SANITIZER", "ERROR SUMMARY", "Target application returned an error"
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.sanitized", description=__doc__)
    parser.add_argument("--tool", default="memcheck", help="or racecheck, initcheck, synccheck")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end before all tests ran")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("-k", default=TESTS, metavar="EXPRESSION", help="these tests")
    asked = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    tests = collected(asked.k)
    random.Random(asked.seed).shuffle(tests)
    watched = [sanitizer, "--tool", asked.tool, "--target-processes", "application-only"]
    watched += ["--print-limit", "20"]
    end = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.workers) as workers:
        paths = []
        for start in range(0, len(tests), AT_ONCE):
            paths.append(Path(folder, str(start)))
            paths[-1].with_suffix(".tests").write_text("\n".join(tests[start : start + AT_ONCE]))
        # The last process has ended before the folder goes.
        list(workers.map(lambda path: run(watched, path, end), paths))
        return told(paths, len(tests))


def run(watched: list[str], path: Path, end: float) -> None:
    """Run a file of tests in a process under the sanitizer, which is killed at the end."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        return
    with path.with_suffix(".out").open("w") as out:
        worker = subprocess.Popen(
            [*watched, "--log-file", f"{path}.log", *PYTEST, "-v", f"@{path}.tests"],
            stdout=out,
            stderr=subprocess.STDOUT,
            # An allocation of its own for every tensor, else the sanitizer sees none.
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            start_new_session=True,
        )
        try:
            worker.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def collected(expression: str) -> list[str]:
    """Return the names of the tests that an expression of pytest's `-k` picks."""
    command = [*PYTEST, "--collect-only", "-q", "-k", expression, *FILES]
    done = subprocess.run(command, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not tests:
        raise SystemExit(done.stdout + done.stderr)
    return tests


def told(paths: list[Path], count: int) -> int:
    """Print the results, and return the exit code."""
    results: collections.Counter[str] = collections.Counter()
    findings: collections.Counter[str] = collections.Counter()
    for path in paths:
        if not path.with_suffix(".out").exists():
            continue
        out = path.with_suffix(".out").read_text()
        results.update(re.findall(r" (PASSED|FAILED|ERROR|SKIPPED)\b.*%\]$", out, re.MULTILINE))
        if " FAILED " in out or "::" not in out:
            print(out[-5000:])
        log = path.with_suffix(".log").read_text() if path.with_suffix(".log").exists() else ""
        # A finding is a line such as "Invalid __global__ read of size 4 bytes", with lines below.
        for block in re.split(r"^=========\s*$", log, flags=re.MULTILINE):
            lines = [line.removeprefix("=========").strip() for line in block.splitlines()]
            lines = [line for line in lines if line and not line.startswith(NOTES)]
            if lines:
                findings["\n  ".join(lines[:3])] += 1
    for finding, times in findings.most_common(20):
        print(f"{times} x {finding}")
    print(f"{dict(results)} of {count} tests; {findings.total()} findings of the sanitizer")
    failed = results["FAILED"] or results["ERROR"] or not results["PASSED"]
    return 1 if findings or failed else 0


if __name__ == "__main__":
    sys.exit(main())
