"""Bad arguments of public functions: the error names them, and nothing changes."""

from __future__ import annotations

import inspect
import re
import warnings

import numpy as np
import pytest

import fusedops
from fusedops._catalogue import families
from fusedops._frame.packed import Packed
from places import HAS_TORCH

if HAS_TORCH:
    import torch


def ones(*shape):
    return np.ones(shape)


WA, WBWC = np.zeros((2, 1), np.int64), np.zeros((2, 1, 3), np.int64)
#: Good arguments of everything public.
RIGHT = {
    fusedops.use_backend: {"name": "numpy"},
    **{function: given for family in families() for function, given in family.arguments().items()},
}
FRAMEWORKS = ("numpy", "torch") if HAS_TORCH else ("numpy",)
OPS = [function for function in RIGHT if hasattr(function, "explain")]
PACKED = [kind.__name__ for kind in Packed.__subclasses__()]

#: Bad values to pass instead, made anew for every call.
JUNK = {
    "None": lambda: None,
    "string": lambda: "abc",
    "bytes": lambda: b"ab",
    "negative": lambda: -1,
    "True": lambda: True,
    "fraction": lambda: 2.5,
    "NaN": lambda: float("nan"),
    "2**62": lambda: 2**62,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,
    "complex": lambda: 1 + 2j,
    "set": lambda: {1, 2},
    "dict": lambda: {"a": 1},
    "generator": lambda: (i for i in (1, 2)),
    "object": object,
    "type": lambda: int,
    "ragged lists": lambda: [[1], [1, 2]],
    "ragged arrays": lambda: [ones(2), ones(3)],
    "masked array": lambda: np.ma.array([1.0, 2.0], mask=[False, True]),
    "array of objects": lambda: np.array([1, None], object),
    "array of strings": lambda: np.array(["a", "b"]),
    "array of bools": lambda: np.ones((2, 2), bool),
    "array of complex": lambda: np.ones((2, 2), complex),
    "array of uint64": lambda: np.ones((2, 2), np.uint64),
    "array of dates": lambda: np.zeros(2, "M8[s]"),
    "array of records": lambda: np.zeros(2, [("a", "f8")]),
    "array of big-endian": lambda: np.zeros((2, 3), ">f8"),
    "array of longdouble": lambda: np.ones((2, 2), np.longdouble),
    "array of 2**62": lambda: np.array([0, 2**62]),
    "huge sizes": lambda: (2, 3, 10**30),
    "array of rank 7": lambda: np.ones((1,) * 7),
    "another's plan": lambda: fusedops.Lattice(np.eye(3), (1, 1, 1)),
}
if HAS_TORCH:
    JUNK |= {
        "list of leaves": lambda: [torch.ones(2, requires_grad=True)],
        "tensor of complex": lambda: torch.ones(2, 2, dtype=torch.complex64),
        "tensor of rank 7": lambda: torch.ones((1,) * 7),
        "sparse tensor": lambda: torch.ones(2, 2).to_sparse(),
        "meta tensor": lambda: torch.ones(2, 2, device="meta"),
        "meta scalar": lambda: torch.ones((), device="meta", dtype=torch.int64),
    }

#: Entries of JUNK that are good values of an argument.
FINE = {
    "cell": {"another's plan"},
    "eps": {"fraction", "2**62"},
    "mask": {"True", "fraction", "NaN", "negative", "2**62"},
    "max_memory": {"2**62"},
    "output_final_state": {"True"},
    "packed": {"True"},
    "transpose": {"True"},
    "copy": {"True"},
    "n_sigma": {"fraction", "2**62"},
    "num_atoms": {"2**62"},
    "radius": {"fraction", "2**62"},
    "rescale_factor": {"negative", "fraction", "2**62"},
    "scale": {"negative", "fraction", "2**62"},
}


def of_framework(framework, value, constant=False):
    """Return a copy of an argument; in torch, its floats and a constant as a tensor."""
    if isinstance(value, list):
        return [tuple(map(np.copy, group)) for group in value]
    if not isinstance(value, np.ndarray):
        return value
    as_tensor = framework == "torch" and (constant or value.dtype == np.float64)
    return torch.from_numpy(value.copy()) if as_tensor else value.copy()


def memory(value):
    """Return an argument's contents in a form that can be compared."""
    if isinstance(value, (list, tuple)):
        return [memory(part) for part in value]
    if HAS_TORCH and isinstance(value, torch.Tensor):
        # Its repr takes longer than a call.
        value = value.numpy()
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)


ARGUMENTS = [
    pytest.param(function, name, framework, id=f"{function.__name__}-{name}-{framework}")
    for function, given in RIGHT.items()
    for name in [*given, *(["backend"] if function in OPS else [])]
    for framework in (FRAMEWORKS if function in OPS else FRAMEWORKS[:1])
]


def raised_by(function, given):
    """Return a call's error or warning, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = function(**given)
            if function is fusedops.use_backend:
                result.__enter__()
        except Exception as error:
            return error


@pytest.mark.parametrize(("function", "argument", "framework"), ARGUMENTS)
def test_junk(function, argument, framework):
    constants = function.primitive.constants if function in OPS else ()
    given = {
        name: of_framework(framework, value, name in constants)
        for name, value in RIGHT[function].items()
    }
    if argument == "n_sigma":
        given["radius"] = None
    assert raised_by(function, given) is None
    if argument != "out":
        given.pop("out", None)
    before = memory(list(given.values()))
    default = inspect.signature(function).parameters[argument].default
    names = "|".join((function.__name__, *PACKED))
    for kind, make in JUNK.items():
        if kind in FINE.get(argument, ()) or (default is None and kind == "None"):
            continue
        error = raised_by(function, {**given, argument: make()})
        assert type(error) in (TypeError, ValueError, IndexError), (kind, error)
        message = str(error)
        assert re.match(rf"({names}): .*\b{argument}\b", message), (kind, message)
        assert len(message) < 300, kind
        assert memory(list(given.values())) == before, kind


COTANGENT = ones(1, 4, 2)
BAD_COTANGENTS = {
    "none": ((), TypeError, "the pullback got 0 cotangents; it should get 2, of out and final_s"),
    "one": ((COTANGENT,), TypeError, "the pullback got 1 cotangents; it should get 2"),
    "three": ((COTANGENT, None, None), TypeError, "the pullback got 3 cotangents; it should get"),
    "string": (("a", None), TypeError, "the cotangent has dtype <U1; it should be float or int"),
    "complex": ((1j * COTANGENT, None), TypeError, "the cotangent has dtype complex128; it shou"),
    "bool": ((COTANGENT > 0, None), TypeError, "the cotangent has dtype bool; it should be float"),
    "objects": ((COTANGENT.astype(object), None), TypeError, "the cotangent has dtype object"),
    "ragged": (([[1], [1, 2]], None), ValueError, "the cotangent is ragged; it should be an array"),
    "masked": ((np.ma.array(COTANGENT), None), TypeError, "the cotangent is a masked array"),
}
if HAS_TORCH:
    tensor = torch.from_numpy(COTANGENT)
    BAD_COTANGENTS["tensor"] = (tensor, None), TypeError, "the cotangent is a torch tensor; it shou"


@pytest.mark.parametrize(
    ("cotangents", "error", "message"), BAD_COTANGENTS.values(), ids=BAD_COTANGENTS
)
def test_what_a_pullback_refuses(cotangents, error, message):
    given = {key: v for key, v in RIGHT[fusedops.dynamic_conv].items() if key != "out"}
    _, pullback = fusedops.dynamic_conv.vjp(**given)
    with pytest.raises(error, match=f"dynamic_conv.vjp: {message}"):
        pullback(*cotangents)


@pytest.mark.parametrize("dtype", ["int64", "float32", "longdouble"])
def test_a_cotangent_may_have_any_real_dtype(dtype):
    _, pullback = fusedops.structured_gather.vjp(ones(2), WA, WBWC)
    assert pullback(np.full((2, 1, 1, 3), 2, dtype))[0].tolist() == [12, 0]


# An output or a state, which is written, and an argument with the same memory.
SHARING = [
    (op, name, "out")
    for op in OPS
    for name, value in RIGHT[op].items()
    if "out" in RIGHT[op] and isinstance(value, np.ndarray) and name != "out"
]
SHARING += [
    (op, name, written)
    for op in OPS
    for written in op.primitive.mutates
    for name, value in RIGHT[op].items()
    if isinstance(value, np.ndarray) and name not in (written, "out")
]


def of_one_memory(*arrays):
    """Return memory, and arrays of 8-byte elements, shaped like others, that all begin in it."""
    memory = np.zeros(max(array.size for array in arrays))
    return memory, *(memory[: a.size].view(a.dtype).reshape(a.shape) for a in arrays)


@pytest.mark.parametrize("index", FRAMEWORKS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("op", "name", "written"), SHARING, ids=[f"{op.__name__}-{n}-{w}" for op, n, w in SHARING]
)
def test_out_shares_memory_with_no_argument(op, name, written, framework, index):
    given = dict(RIGHT[op])
    memory, given[name], given[written] = of_one_memory(given[name], given[written])
    given[name][...] = RIGHT[op][name]
    if written != "out":
        del given["out"]
    before = memory.copy()
    for key, value in given.items():
        if isinstance(value, np.ndarray):
            constant = key in op.primitive.constants
            kind = framework if value.dtype == np.float64 or constant else index
            given[key] = torch.from_numpy(value) if kind == "torch" else value
    first, second = (written, name) if written == "out" else (name, written)
    with pytest.raises(ValueError, match=f"{op.__name__}: {first} shares memory with {second};"):
        op(**given)
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_out_may_lie_beside_an_argument(framework):
    """It may not have an argument's first or last element."""
    memory = torch.ones(70) if framework == "torch" else ones(70)
    x, kernels = memory[20:30].reshape(1, 5, 2), memory[50:54].reshape(2, 2)
    for start in (11, 29, 41, 53):
        with pytest.raises(ValueError, match="out shares memory with"):
            fusedops.dynamic_conv(x, kernels, out=memory[start:][:10].reshape(x.shape))
    assert (memory == 1).all()
    for start in (10, 30, 40):
        fusedops.dynamic_conv(x, kernels, out=memory[start:][:10].reshape(x.shape))
    assert (x == 1).all()


@pytest.mark.parametrize("name", ["wa", "wbwc"])
@pytest.mark.parametrize("make", [fusedops.ScatterPlan, memoryview], ids=lambda make: make.__name__)
def test_out_shares_memory_with_no_view_that_a_plan_has(make, name):
    given = {"wa": WA, "wbwc": WBWC}
    memory, given[name], out = of_one_memory(given[name], ones(2))
    if make is memoryview:
        where = {key: memoryview(array) for key, array in given.items()} | {"map_size": 2}
    else:
        where = {"wa": fusedops.ScatterPlan(**given, map_size=2, copy=False)}
    named = name if make is memoryview else "wa"
    with pytest.raises(ValueError, match=f"out shares memory with {named};"):
        fusedops.structured_scatter_add(ones(2, 1, 1, 3), **where, out=out)
    assert not memory.any()
    apart = fusedops.ScatterPlan(**given, map_size=2)
    fusedops.structured_scatter_add(ones(2, 1, 1, 3), apart, out=out)
    assert out.tolist() == [6, 0]
