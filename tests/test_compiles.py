"""Triton's kernels compile, for a GPU that isn't there: its interpreter accepts more than a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fusedops.testing import CASES  # noqa: E402
from gpukern.trimul import plan  # noqa: E402

# A launch compiles its kernel instead, and gives the compiled one to `note`.
LAUNCHES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
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
        elif hasattr(value, "block_shape"):
            block = f"{NAMES[value.base.dtype]}[{', '.join(map(str, value.block_shape))}]"
            # Gluon's descriptors tell their layout.
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            signature[parameter.name] = f"tensordesc<{block}{layout}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            # A launcher's compiled form serves other numbers too.
            assert parameter.do_not_specialize, parameter.name
            assert parameter.do_not_specialize_on_alignment, parameter.name
            signature[parameter.name] = "i64" if launch.wide(value)[0] else "i32"
    of_gluon = self.kernel.is_gluon()
    source = (GluonASTSource if of_gluon else ASTSource)(self.kernel, signature, values, aligned)
    note(self.kernel, triton.compile(source, GPUTarget("cuda", CAPABILITY, 32), self.options))
    # A GPU's launch refuses a constant that isn't what it was, as NaN never is.
    for (name, _), (value, scope) in self.kernel.used_global_vals.items():
        assert scope[name] == value, name


launch.Launcher.__call__ = compile
launch.Launcher.is_new = lambda *_: False


def launched(name, given, outputs=None):
    from fusedops._frame.registry import primitives

    primitive = primitives[name]
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
compiled, kernels = set(), set()


def note(kernel, made):
    assert made.asm["cubin"]
    compiled.add(primitive.name)
    kernels.add((primitive.family, kernel.__name__))


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
    if PRECISION and "precision" in a._fields:
        a = a._replace(precision=PRECISION)
    outputs = [
        output and torch.empty(output[0], dtype=output[1])
        for output in primitive.describe(a)
    ]
    kernel(a, primitive.Outputs._make(outputs))
    if primitive.family == "geometry":
        # Branches for coordinates and B factors, not all of them wanted, meet in one kernel.
        kernel(a, primitive.Outputs(outputs[0], *[None] * (len(outputs) - 1)))
assert compiled == {primitive.name for primitive in cases}, compiled
if PRECISION:
    assert {("so2", "_split"), ("so2", "_multiply")} <= kernels, kernels
print("compiled")
"""


def run(code, tmp_path):
    """Run code that compiles kernels; return what it printed."""
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    settings.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiling(capability, code, tmp_path):
    """Run code that launches kernels, with those compiled instead."""
    return run(f"CAPABILITY = {capability}\n{LAUNCHES}\n{code}", tmp_path)


EMULATED = "from gpukern import precision\nprecision.of_float32 = lambda _: precision.EMULATED\n"
# Products of any size are made of halves.
HALVES = """
PRECISION = "float32"
from gpukern import products
products._WORK = products._WORK_OF_ONE = 0
products.LEAST = 1
products._on_hopper = lambda device: CAPABILITY == 90
products.processors = lambda device: 132
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
    code = f"FAMILIES, DTYPE, PRECISION = {families}, torch.{dtype}, None\n{before}{COMPILE}"
    assert compiling(capability, code, tmp_path) == "compiled\n"


# Primitives of the GPU alone, which have no cases.
OF_TENSORS = """
from fusedops.crystal import Reflections
from fusedops.density import op
from fusedops import _networks


def note(kernel, made):
    print(kernel.__name__)


on = Reflections([[1, 0, 0]], [[9.0, 0, 0], [0, 8, 0], [0, 0, 7]], (4, 4, 4))
for dtype in (torch.float32, torch.float64):
    spectrum, factors = torch.empty(48, 2, dtype=dtype), torch.empty(1, 2, dtype=dtype)
    launched("spectrum_to_factors", {"spectrum": spectrum, "reflections": on})
    launched("factors_to_spectrum", {"factors": factors, "reflections": on})
    for b in (torch.empty(3, dtype=dtype), torch.empty(3, 6, dtype=dtype)):
        widths = torch.empty(3, 5, dtype=dtype)
        launched("atom_radius", {"b": b, "widths": widths, "n_sigma": 3.0})
    x, row = torch.empty(5, 4, 8, dtype=dtype), torch.empty(8, dtype=dtype)
    layer = {"weight": row, "bias": row, "eps": 1e-5}
    launched("layer_silu", {"x": x[:, 0], **layer})
    launched("layer_silu_vjp", {"x": x[:, 0], "dout": x[:, 1], **layer})
    nodes = {"x": x, "weight": x[0, :2], "balance": x[0, :, 0], "lmax": 1, "eps": 1e-5}
    launched("degree_norm", {**nodes, "bias": row, "more": None})
    launched("degree_norm_vjp", {**nodes, "dout": x})
"""


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_tensors_compile(capability, tmp_path):
    compiled = compiling(capability, OF_TENSORS, tmp_path).split()
    kernels = "_gather", "_spread", "_reach", "_reach", "_layer", "_layer", "_degrees", "_degrees"
    assert compiled == [*kernels] * 2


# Kernels that write messages, and halves beside them.
SPLITS = """
from fusedops import Edges
from fusedops._kept import Kept, keeping
from gpukern import products

products.of_float32 = lambda device: products.EMULATED
products._WORK_IN_GRAPHS = products._WORK_OF_ONE = 1
E, C = 4, 128
x, gates = torch.empty(E, 9, C), torch.empty(E, 2 * C)
edges = Edges(torch.zeros(2, E, dtype=torch.int64), E)
given = {"x": x, "wigner": torch.empty(E, 35), "edges": edges, "mmax": 2, "scale": 1.0}
gated = {"gates": gates, "x": x, "dout": x, "lmax": 2, "mmax": 2, "layout": "m"}


def note(kernel, made):
    written = sum("f16" in line or ".b16" in line for line in made.asm["ptx"].splitlines())
    print(kernel.__name__, written > 0 and bool(made.asm["cubin"]))


with keeping(Kept([], torch.device("cpu"), splits=True)):
    both = torch.empty(E, 9, 2 * C)
    launched("edge_wigner", {**given, "way": "forth"}, [None, both, None, None])
    launched("edge_wigner", {**given, "way": "undo"}, [None, x, None, None])
    launched("gate_activation", gated, [x])
    launched("gate_activation_vjp", gated, [gates, x])
"""


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_messages_and_halves_compile(capability, tmp_path):
    kernels = "_edge_kernel", "_edge_kernel", "_gate", "_gate"
    want = "".join(f"{kernel} True\n" for kernel in kernels)
    assert compiling(capability, SPLITS, tmp_path) == want


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
    assert int(compiling(89, ADA, tmp_path)) <= 99 << 10


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
    assert compiling(90, f"SLOTS = {slots}\n{STEP}", tmp_path) == f"b32 {more}v4.b32 v4.b32\n"


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
    assert compiling(90, MIXED, tmp_path) == "3\n"


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
    assert compiling(90, FACTORS, tmp_path) == "True\n"


# Kernels in Gluon for Hopper; nothing interprets them, so only a GPU can check their results.
GLUON = """
import inspect, itertools
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import jit
from triton.experimental.gluon._runtime import GluonASTSource
from gpukern.hopper import SHARED, TILE


def made(kernel, signature, values, aligned, warps=4):
    source = GluonASTSource(jit(kernel), signature, values, aligned)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
    assert made.metadata.shared <= SHARED, made.metadata.shared
    return made.asm["ptx"]
"""

TRIANGLES = """
from gpukern.trimul import hopper, hopper_backward as back, hopper_wide as wide

POINTERS = hopper.POINTERS | back.POINTERS | wide.POINTERS
# Pointers to the dtype of x; all others point to factors.
OWN = "x", "w", "b", "p_w", "p_b", "g_w", "g_b", "o_w", "o_b", "out", "mask", "dout", "dx"


def compile(kernel, warps, output, bf16, none, kinds={}, **constants):
    given, factor = "*bf16" if output else "*fp32", "bf16" if bf16 else "fp16"
    dot = tl.bfloat16 if bf16 else tl.float16
    constants |= dict(H=128, V=8 if output else 4)
    constants |= {} if kernel is wide.pack else dict(EPS=1e-5)
    constants |= {} if kernel in wide.POINTERS else dict(DOT=dot)
    signature, values, aligned = {}, {}, {}
    for at, name in enumerate(inspect.signature(kernel).parameters):
        if name in constants or name in none:
            signature[name], values[at,] = "constexpr", constants.get(name)
        elif name in (*POINTERS[kernel], "mask", "scaling"):
            own = given if name in OWN else f"*{factor}"
            own = "*fp32" if name in ("scaling", "sums", "biases") else own
            signature[name] = "*fp16" if name == "gate" else kinds.get(name, own)
            if name in POINTERS[kernel]:
                aligned[at,] = [["tt.divisibility", 16]]
        elif name == "weights":
            shape = [2 * constants["BH"], wide._CHUNK.value]
            signature[name] = f"tensordesc<{factor}{shape},{TILE!r}>"
        else:
            signature[name] = "i32"
    ptx = made(kernel, signature, values, aligned, warps)
    if kernel is not wide.pack:
        assert "wgmma" in ptx and "movmatrix" in ptx
        # Four edges of a plane are written at once.
        assert "st.global.v2.b32" in ptx or kernel is hopper.finish


for C, biases, output in itertools.product(CHANNELS, *[(False, True)] * 2):
    if C != 128 and biases == output:
        continue
    none = [] if biases else ["mask", "w", "b", "p_b", "g_b", "o_b"]
    none += ["scaling"] if output else []
    common = dict(C=C, LONG=tl.int64 if biases else tl.int32)
    G = C if output else 128
    bf16 = output or (biases and C == 128)
    split = bf16 and (not output or biases != (C == 384))
    kinds = dict(p_w="*fp32") if split else {}
    W, BN = hopper.way_to_finish(C, 128, 2 if output else 4, split)
    compile(hopper.finish, W, output, bf16, none, kinds, OUTPUT=output, W=W, BN=BN, **common)
    for logits in (False, True):
        way = hopper.way_to_project(C, 128, G, logits)
        if way:
            without = none + ([] if logits else ["logits"])
            rest = dict(G=G, OUTPUT=output, W=way.warps, BH=way.block)
            compile(hopper.project, way.warps, output, bf16, without, **rest, **common)
    way = wide.way_to_project_wide(C, 128, G)
    if way:
        without = none + ([] if biases else ["biases"])
        rest = dict(OUTPUT=output, BH=way.block)
        compile(wide.pack, 4, output, bf16, without, C=C, **rest)
        compile(wide.project_wide, 4, output, bf16, without, G=G, SLOTS=way.slots, **rest, **common)
    W = back.way_to_finish_back(C, 128)
    if W:
        compile(back.finish_back, W, output, bf16, none, OUTPUT=output, W=W, **common)
    way = back.way_to_project_back(C, 128, G)
    if way:
        rest = dict(G=G, KEPT=C + 8, W=way.warps, BH=way.block)
        compile(back.project_back, way.warps, output, bf16, none, **rest, **common)
"""

GENERATED = """
from gpukern.generated import hopper

for kernel, aligned in hopper.POINTERS.items():
    constants = dict(H=384, D=3072, SILU=True, SLOTS=hopper.slots(kernel, 384))
    signature, values, attributes = {}, {}, {}
    for at, name in enumerate(inspect.signature(kernel).parameters):
        if name in constants:
            signature[name], values[at,] = "constexpr", constants[name]
        elif name in aligned:
            signature[name] = "*fp32" if name == "sums" else "*bf16"
            attributes[at,] = [["tt.divisibility", 16]]
        elif name in ("hidden", "weight"):
            shape = [hopper.STEP.value if name == "hidden" else hopper.COLUMNS.value, 64]
            signature[name] = f"tensordesc<bf16{shape},{TILE!r}>"
        else:
            signature[name] = "i32"
    ptx = made(kernel, signature, values, attributes)
    assert "wgmma" in ptx and "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
"""

needs_gluon = pytest.mark.skipif(plan.hopper is None, reason="this Triton's Gluon is another")


@pytest.mark.compiles
@needs_gluon
@pytest.mark.parametrize("channels", [(128,), (64, 384)], ids=str)
def test_kernels_of_triangles_for_hopper_compile(channels, tmp_path):
    run(f"CHANNELS = {channels}\n{GLUON}\n{TRIANGLES}", tmp_path)


@pytest.mark.compiles
@needs_gluon
def test_generated_kernels_for_hopper_compile(tmp_path):
    run(f"{GLUON}\n{GENERATED}", tmp_path)


@pytest.mark.parametrize(("capability", "warns"), [((9, 0), True), ((10, 0), False)])
def test_another_gluon_is_a_warning_on_hopper_alone(monkeypatch, recwarn, capability, warns):
    monkeypatch.setattr(plan, "hopper", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert not plan.is_hopper.__wrapped__(torch.device("cuda"))
    assert [str(warned.message)[:10] for warned in recwarn] == ["Triton is "] * warns


@needs_gluon
@pytest.mark.parametrize("D", [64, 1536, 4096, 8448])
@pytest.mark.parametrize("tokens", [1, 4096, 262_144, 1 << 20, 3 << 24])
def test_chunks_hold_all_tokens_by_offsets_of_32_bits(D, tokens):
    from gpukern.generated import hopper

    for kernel, overlap, width in ((hopper.forward, 0, D), (hopper.inputs, 3, 4 * D)):
        for processors in (16, 114, 132):
            chunks, steps = hopper.split(kernel, tokens, D // 32, processors)
            segments = 4 * hopper.CONSUMERS[kernel]
            assert chunks * segments * (16 * steps - overlap) >= tokens
            assert (segments * (16 * steps - overlap) + 16) * width < 2**31
