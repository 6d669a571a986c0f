"""Building blocks of kernels for Hopper's tensor cores, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from gpukern.constants import LOGISTIC

# Its name since Triton 3.7, and before.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Its name since Triton 3.8, or before.
load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared

# Bytes of shared memory that a program can have.
SHARED = 232448
# Registers of a thread of a consumer, and of the warp that fills the ring.
REGISTERS = gl.constexpr((240, 24))
# The layout of a matrix of 16 bits in shared memory.
TILE = gl.NVMMASharedLayout(128, 16)

_SAME = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def sigmoid(x):
    return gl.inline_asm_elementwise(LOGISTIC, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def as_held(x):
    """Return numbers in float32 that registers hold in their own dtype until here."""
    if x.dtype == gl.float32:
        return x
    else:
        return gl.inline_asm_elementwise(_SAME, "=r,r", [x], x.dtype, False, 2).to(gl.float32)


@gluon.jit
def anew(x):
    """Hide a number from the compiler, which then computes with it just where it is used."""
    if x.dtype == gl.int64:
        return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], x.dtype, False, 1)
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 1)
