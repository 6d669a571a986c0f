"""Constants that kernels of several files use."""

from __future__ import annotations

import triton.language as tl

# 1 / (1 + exp(-x)) in four instructions, with an error of two roundings.
LOGISTIC = tl.constexpr(
    """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"""
)

# What one is in a gate that is kept in fp16 beside factors in bfloat16, so that those near zero
# have all digits: down to 2e-9.
ONE = tl.constexpr(2.0**15)
