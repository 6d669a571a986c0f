"""Constants that kernels of several files use."""

from __future__ import annotations

import triton.language as tl

# 1 / (1 + exp(-x)) in four instructions, with an error of two roundings.
LOGISTIC = tl.constexpr(
    """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"""
)

# Beside factors in bfloat16, a gate is kept in fp16 times ONE, so that gates down to 2e-9 have all
# digits.
ONE = tl.constexpr(2.0**15)
