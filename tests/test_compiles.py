"""Triton's kernels compile, for a GPU that isn't there: its interpreter accepts more than a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from fusedops.testing import CASES

# A launch compiles its kernel instead, and gives the compiled one to `note`.
LAUNCHES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor
from fusedops._frame import registry
from gpukern import launch

NAMES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1", torch.int32: "i32",
    torch.int64: "i64", torch.bfloat16: "bf16", torch.float16: "fp16",
}


def compile(self, programs, key, *args):
    signature, values, aligned = {}, {}, {}
    for at, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], values[at,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{NAMES[value.dtype]}"
            if not parameter.do_not_specialize_on_alignment:
                aligned[at,] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{NAMES[value.base.dtype]}[{block}]>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            # A launcher's compiled form serves other numbers too.
            assert parameter.do_not_specialize, parameter.name
            assert parameter.do_not_specialize_on_alignment, parameter.name
            signature[parameter.name] = "i64" if launch.wide(value)[0] else "i32"
    source = ASTSource(self.kernel, signature, values, aligned)
    note(self.kernel, triton.compile(source, GPUTarget("cuda", CAPABILITY, 32), self.options))
    # A GPU's launch refuses a constant that isn't what it was, as NaN never is.
    for (name, _), (value, scope) in self.kernel.used_global_vals.items():
        assert scope[name] == value, name


launch.Launcher.__call__ = compile
launch.Launcher.is_new = lambda *_: False


def launched(name, given, outputs=None):
    from fusedops._frame.primitive import primitives

    primitive = primitives()[name]
    kernel = registry._registered(registry.BACKENDS[0], name, primitive.family)
    a = primitive.Arguments(*[given.get(field) for field in primitive.Arguments._fields])
    if outputs is None:
        outputs = [out and torch.empty(out[0]) for out in primitive.describe(a)]
    kernel(a, primitive.Outputs(*outputs))
"""

COMPILE = """
import numpy as np
from fusedops import _catalogue, testing
from fusedops.density import op as density

# As of many atoms on a GPU.
density._is_ordered = lambda xyz: True
compiled = set()


def note(kernel, made):
    assert made.asm["cubin"]
    compiled.add(primitive.name)


cases = _catalogue.typical(testing.CASES)
cases = {key: case for key, case in cases.items() if key.family in FAMILIES}
for primitive, case in cases.items():
    kernel = registry._registered(registry.BACKENDS[0], primitive.name, primitive.family)
    arrays, others = case.make()
    # Two Gaussians are the same loop as five, which takes the compiler twice the time.
    arrays = [
        a if a is None or not name.endswith(("amplitudes", "widths")) else a[:, :2]
        for name, a in zip(primitive.arrays, arrays)
    ]
    values = [
        torch.tensor(v, dtype=DTYPE if v.dtype.kind == "f" else None)
        if isinstance(v, np.ndarray)
        else v
        for v in (*arrays, *others)
    ]
    a = primitive.Arguments._make(values)
    outputs = [
        output and torch.empty(output[0], dtype=output[1])
        for output in primitive.describe(a)
    ]
    kernel(a, primitive.Outputs._make(outputs))
    if primitive.family == "geometry":
        # Branches for coordinates and B factors, not all of them wanted, meet in one kernel.
        kernel(a, primitive.Outputs(outputs[0], *[None] * (len(outputs) - 1)))
assert compiled == {primitive.name for primitive in cases}, compiled
print("compiled")
"""


def compiling(capability, code, tmp_path):
    """Run code that launches kernels, with those compiled instead."""
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    settings.pop("TRITON_INTERPRET", None)
    code = f"CAPABILITY = {capability}\n{LAUNCHES}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True
    )


EMULATED = "from gpukern import precision\nprecision.of_float32 = lambda _: precision.EMULATED\n"
# Products of any size are made of halves.
HALVES = """
from gpukern import products
products._WORK = products._WORK_OF_ONE = 0
products.LEAST = 1
from gpukern.attention import triton as attention
attention._LEAST = 0
from gpukern.trimul import plan
plan.FEW = 0
"""
SMALL = tuple(sorted({case.primitive.family for case in CASES} - {"trimul"}))
# The formula serves attention in float64.
OF_FLOAT64 = tuple(family for family in SMALL if family != "attention")


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("families", "dtype", "capability", "before"),
    [
        (SMALL, "float32", 90, ""),
        (OF_FLOAT64, "float64", 80, ""),
        (("trimul", "so2", "attention"), "float32", 90, EMULATED + HALVES),
        (("so2", "delta", "generated", "attention"), "float32", 100, EMULATED + HALVES),
        (("trimul", "generated"), "float32", 80, EMULATED),
    ],
    ids=["hopper", "float64 on ampere", "halves", "halves on blackwell", "emulated on ampere"],
)
def test_kernels_compile(families, dtype, capability, before, tmp_path):
    code = f"FAMILIES, DTYPE = {families}, torch.{dtype}\n{before}{COMPILE}"
    done = compiling(capability, code, tmp_path)
    assert done.stdout == "compiled\n", done.stderr


# The update of float32 with factors of TF32, of which large tiles take 164 KiB, by arrays of the
# CPU that pass for a GPU's.
ADA = """
from gpukern.trimul import forward, plan

most = {}


def note(kernel, made):
    most[kernel.__name__] = made.metadata.shared


torch.Tensor.is_cuda = property(lambda self: True)
torch.version.cuda = "12.8"
plan.is_small = lambda device: True
N, C = 128, 128
given = {"x": torch.empty(1, N, N, C), "eps": 1e-5, "direction": "outgoing", "gate": "output"}
given |= {f"{kind}_in_weight": torch.empty(2 * C, C) for kind in "pg"}
given |= {f"{kind}_out_weight": torch.empty(C, C) for kind in "pg"}
given |= {"precision": "tf32", "max_memory": 0}
launched("triangle_multiplicative_update", given)
assert {"project", "product", "finish"} <= {*most}, most
print(max(most.values()))
"""


@pytest.mark.compiles
def test_triangles_fit_in_the_shared_memory_of_ada(tmp_path):
    """A program of sm_86, sm_89 and sm_120 has 99 KiB at most."""
    done = compiling(89, ADA, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 99 << 10


STEP = """
import re

loads = []


def note(kernel, made):
    loads.extend(re.findall(r"ld\\.global\\S*?((?:v\\d\\.)?b\\d+)", made.asm["ptx"]))


x, taps = torch.empty(2, 512, dtype=torch.bfloat16), torch.empty(2, 512, 4, dtype=torch.bfloat16)
given = {"x": x, "state": taps, "kernels": taps, "slots": SLOTS, "activation": "silu"}
launched("dynamic_conv_step", given, [torch.empty_like(x)])
print(*sorted(loads))
"""


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("slots", "more"), [("None", ""), ("torch.zeros(2, dtype=torch.int64)", "b64 ")]
)
def test_a_decoding_step_loads_vectors(slots, more, tmp_path):
    """A lane loads two tokens, and their taps and states in vectors, once each."""
    done = compiling(90, f"SLOTS = {slots}\n{STEP}", tmp_path)
    assert done.stdout == f"b32 {more}v4.b32 v4.b32\n", done.stderr


MIXED = """
count = 0


def note(kernel, made):
    global count
    count += bool(made.asm["cubin"])


B, T, D, W = 1, 8, 128, 4
for own, others, final, wants_x in (
    ("bfloat16", "float32", None, True),
    ("float32", "float64", "float32", True),
    ("bfloat16", "bfloat16", "float32", False),
):
    x = torch.empty(B, T, D, dtype=getattr(torch, own))
    kernels = torch.empty(B, T, D, W, dtype=x.dtype)
    state = torch.empty(B, D, W, dtype=getattr(torch, others))
    given = {"x": x, "kernels": kernels, "initial_state": state, "dout": x, "activation": "silu"}
    given["dfinal_state"] = final and torch.empty(B, D, W, dtype=getattr(torch, final))
    launched("dynamic_conv_vjp", given, [x if wants_x else None, kernels, state, None])
print(count)
"""


@pytest.mark.compiles
def test_a_gradient_of_mixed_dtypes_compiles(tmp_path):
    """Pointers of several types meet in one kernel, where no branch may change a name's type."""
    done = compiling(90, MIXED, tmp_path)
    assert done.stdout == "3\n", done.stderr


# In PTX a factor in registers stands in braces, and one in shared memory is an address.
FACTORS = """
import re

torch.Tensor.is_cuda = property(lambda self: True)
torch.version.cuda = "12.8"
factors = []


def note(kernel, made):
    found = re.findall(r"wgmma\\.mma_async\\S+ {[^}]*},\\s*(.)", made.asm["ptx"])
    assert "{" not in found, kernel.__name__
    factors.extend(found)


for K, V in ((128, 128), (96, 256)):
    sizes = {"q": (2, K), "k": (2, K), "v": (2, V), "g": (2,), "beta": (2,), "dout": (2, V)}
    given = {n: torch.empty(1, 128, *s, dtype=torch.bfloat16) for n, s in sizes.items()}
    for name in ("gated_delta_rule", "gated_delta_rule_vjp"):
        launched(name, given | {"scale": 1.0})
print(len(factors) > 0)
"""


@pytest.mark.compiles
def test_no_factor_of_the_delta_rule_is_in_registers(tmp_path):
    """The assembler of CUDA 12 writes to such registers too early."""
    done = compiling(90, FACTORS, tmp_path)
    assert done.stdout == "True\n", done.stderr
