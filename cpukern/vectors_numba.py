"""Functions that Numba lacks: the logistic function, short runs as vectors, and prefetches.

A compiler's loop would do most of a short run element by element, after its last whole vector.
"""

from __future__ import annotations

import math

import numba
from llvmlite import ir
from numba.extending import intrinsic

from cpukern.jit import inlined

# Bytes moved at once; most runs are no longer.
_VECTOR = 64
#: The number of elements that `write_ramp` writes.
RAMP = 16


@inlined()
def sigmoid(h):
    """Return the logistic function."""
    return 1 / (1 + math.exp(-h))


@inlined()
def swish(h):
    """Return h σ(h): 0 where h has overflowed to -∞."""
    s = sigmoid(h)
    return s if h == -math.inf else h * s


def _declared(builder, name, result, types):
    """Return a function declared in the module being built."""
    kind, module = ir.FunctionType(result, types), builder.module
    return module.globals.get(name) or ir.Function(module, kind, name)


def _spread(builder, value, lanes):
    """Return a vector with one value in all lanes."""
    vector, i32 = ir.VectorType(value.type, lanes), ir.IntType(32)
    first = builder.insert_element(vector(ir.Undefined), value, i32(0))
    return builder.shuffle_vector(first, first, ir.VectorType(i32, lanes)([0] * lanes))


def _address(context, builder, kind, array, index, vector):
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _vector_moved(add):
    """Return an intrinsic that writes, or adds, the first n elements of a vector."""

    @intrinsic
    def move(typing_context, out, o, values, v, n):
        size, index = out.dtype.bitwidth // 8, numba.types.intp
        lanes = _VECTOR // size

        def generate(context, builder, signature, arguments):
            i32, mask = ir.IntType(32), ir.VectorType(ir.IntType(1), lanes)
            vector = ir.VectorType(context.get_value_type(out.dtype), lanes)
            pointer, kind = vector.as_pointer(), f"v{lanes}f{8 * size}.p0"
            load = f"llvm.masked.load.{kind}", vector, [pointer, i32, mask, vector]
            store = f"llvm.masked.store.{kind}", ir.VoidType(), [vector, pointer, i32, mask]
            load, store = _declared(builder, *load), _declared(builder, *store)
            count = _spread(builder, arguments[4], lanes)
            kept = builder.icmp_signed("<", count.type(list(range(lanes))), count)
            to, source = (
                _address(context, builder, signature.args[k], *arguments[k : k + 2], vector)
                for k in (0, 2)
            )
            value = builder.call(load, [source, i32(size), kept, vector(None)])
            if add:
                old = builder.call(load, [to, i32(size), kept, vector(None)])
                value = builder.fadd(old, value)
            builder.call(store, [value, to, i32(size), kept])
            return context.get_dummy_value()

        return numba.types.void(out, index, values, index, index), generate

    return move


_copy_vector, _add_vector = _vector_moved(add=False), _vector_moved(add=True)


@inlined()
def copy_run(out, o, values, v, n):
    """Write values[v : v + n] to out[o : o + n]."""
    for k in range(0, n, _VECTOR // out.itemsize):
        _copy_vector(out, o + k, values, v + k, n - k)


@inlined()
def add_run(out, o, values, v, n):
    """Add values[v : v + n] to out[o : o + n]."""
    for k in range(0, n, _VECTOR // out.itemsize):
        _add_vector(out, o + k, values, v + k, n - k)


@intrinsic
def write_ramp(typing_context, out, o, start, step):
    """Write start + k step, of float64, to the RAMP elements of out from o on."""
    float64 = numba.types.float64

    def generate(context, builder, signature, arguments):
        start, step = (_spread(builder, value, RAMP) for value in arguments[2:])
        ramp = builder.fadd(start, builder.fmul(step, step.type([float(k) for k in range(RAMP)])))
        vector = ir.VectorType(context.get_value_type(out.dtype), RAMP)
        if vector != ramp.type:
            ramp = builder.fptrunc(ramp, vector)
        to = _address(context, builder, signature.args[0], *arguments[:2], vector)
        builder.store(ramp, to, align=out.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return numba.types.void(out, numba.types.intp, float64, float64), generate


@intrinsic
def _prefetch(typing_context, rows, r, c):
    """Begin to read the cache line of rows[r, c]."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(rows)(context, builder, arguments[0])
        width = builder.extract_value(array.shape, 1)
        at = builder.add(builder.mul(arguments[1], width), arguments[2])
        address = builder.bitcast(builder.gep(array.data, [at]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # The constants mean: for reading, into the nearest cache, data.
        builder.call(function, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    index = numba.types.intp
    return numba.types.void(rows, index, index), generate


@inlined()
def fetch(rows, r, line):
    """Prefetch row r: the processor's own prefetches end with a page, and follow no list."""
    if len(rows):
        for c in range(0, rows.shape[1], line):
            _prefetch(rows, r, c)
