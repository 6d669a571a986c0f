"""Check how the kernels of the Python that runs this were compiled; needs binutils.

A module linked with OpenMP has spinning threads that compete with torch's; a baseline module
with AVX code fails on the old machines that it is built for.
"""

import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "cpukern"
INSTALLED = Path(importlib.util.find_spec("cpukern").origin).parent

OPENMP = re.compile(r"\(NEEDED\).*\[lib(gomp|omp|iomp5)\.so")
# Compilers write no other instructions that begin with v.
AVX = re.compile(r"^\s+[0-9a-f]+:\s+(v\w+ .*|.*%[yz]mm\d.*)", re.MULTILINE)


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def faults(name: str) -> list[str]:
    modules = sorted(INSTALLED.glob(f"{name}[._]*.so"))
    if not modules:
        return [f"{name}: no compiled module in {INSTALLED}"]
    found = []
    for module in modules:
        if OPENMP.search(output("readelf", "--dynamic", module)):
            found.append(f"{module.name}: linked with OpenMP")
        if platform.machine() != "x86_64" or "_v4." in module.name:
            continue
        avx = AVX.search(output("objdump", "--disassemble", "--no-show-raw-insn", module))
        if "_v3." not in module.name and avx:
            found.append(f"{module.name}: an AVX instruction, {avx[1].strip()}")
        # Proof that the search finds AVX where it is.
        if "_v3." in module.name and not avx:
            found.append(f"{module.name}: no AVX instruction found")
    print(f"{name}: {len(modules)} modules checked")
    return found


families = sorted(pyx.parent.name for pyx in SOURCES.glob("*/kernels.pyx"))
found = [fault for name in ("_cpu", *families) for fault in faults(name)]
sys.exit("\n".join(found) or None)
