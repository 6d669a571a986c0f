"""Layers of equivariant networks on the GPU: normalizations by kernels, and products by torch.

A normalization is one kernel, as is its gradient by features: a block of rows is read once, and its
sums stay in registers, so that bytes are the features in and out, and the cotangents in. Products
read and write the rows of nodes where they lie.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from fusedops._frame.registry import register
from gpukern.activations import silu, silu_slope
from gpukern.launch import (
    Launcher,
    begin_vectors,
    in_one_dtype,
    kernel_of_any_size,
    power,
    rows_of,
    wide,
)

# Numbers of a program, and its warps.
_NUMBERS, _WARPS = 2048, 4


def _layer(
    x, weight, bias, dout, out, rows, x_row, dout_row,
    C: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr,
    FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write SiLU of a block's normalized rows, or pull their cotangents, if there are any, back."""
    e = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    c = tl.arange(0, SIZE)[None, :]
    if ALIGNED:
        x_row, dout_row = x_row // 4 * 4, dout_row // 4 * 4
    column, live = c < C, (e < rows) & (c < C)
    h = tl.load(x + e * x_row + c, mask=live, other=0.0).to(FLOAT)
    h = tl.where(column, h - tl.sum(h, 1)[:, None] / C, 0.0)
    scale = 1 / tl.sqrt(tl.sum(h * h, 1)[:, None] / C + EPS)
    w = tl.load(weight + c, mask=column, other=0.0).to(FLOAT)
    b = tl.load(bias + c, mask=column, other=0.0).to(FLOAT)
    unit = h * scale
    if dout is not None:
        g = tl.load(dout + e * dout_row + c, mask=live, other=0.0).to(FLOAT)
        g = g * silu_slope(unit * w + b) * w
        along = tl.sum(g * unit, 1)[:, None] / C
        y = scale * (g - tl.sum(g, 1)[:, None] / C - unit * along)
    else:
        y = silu(unit * w + b)
    tl.store(out + e * C + c, y.to(out.dtype.element_ty), mask=live)


def _degrees(
    x, weight, bias, more, balance, dout, out, x_node, more_node, dout_node,
    C: tl.constexpr, LMAX: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    EPS: tl.constexpr, FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a node's normalized features, or pull their cotangents, if there are any, back."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, SIZE)[None, :]
    if ALIGNED:
        x_node, more_node, dout_node = x_node // 4 * 4, more_node // 4 * 4, dout_node // 4 * 4
    degree = tl.zeros([ROWS, 1], tl.int32)
    for l in tl.static_range(1, LMAX + 1):
        degree += (row >= l * l).to(tl.int32)
    first, column = row == 0, c < C
    there = row < (LMAX + 1) * (LMAX + 1)
    live = there & column
    h = tl.load(x + n * x_node + row * C + c, mask=live, other=0.0).to(FLOAT)
    mean = tl.sum(tl.sum(tl.where(first, h, 0.0), 1), 0) / C
    h = tl.where(first & column, h - mean, h)
    share = tl.load(balance + row, mask=there, other=0.0).to(FLOAT) / C
    scale = 1 / tl.sqrt(tl.sum(tl.sum(h * h * share, 1), 0) + EPS)
    w = tl.load(weight + degree * C + c, mask=live, other=0.0).to(FLOAT)
    if dout is not None:
        g = tl.load(dout + n * dout_node + row * C + c, mask=live, other=0.0).to(FLOAT) * w
        along = tl.sum(tl.sum(g * h, 1), 0) * scale * scale * scale
        y = g * scale - h * share * along
        mean = tl.sum(tl.sum(tl.where(first, y, 0.0), 1), 0) / C
        y = tl.where(first, y - mean, y)
    else:
        shift = tl.load(bias + c, mask=column, other=0.0).to(FLOAT)
        if more is not None:
            shift += tl.load(more + n * more_node + c, mask=column, other=0.0).to(FLOAT)
        y = h * scale * w + tl.where(first, shift, 0.0)
    size = (LMAX + 1) * (LMAX + 1) * C
    tl.store(out + n * size + row * C + c, y.to(out.dtype.element_ty), mask=live)


@functools.cache
def _launcher(kernel: Any, aligned: bool) -> Launcher:
    names = ("x", "weight", "bias", "more", "dout", "out") if aligned else ()
    return Launcher(kernel_of_any_size(kernel, names), _WARPS)


def _launch(
    kernel: Any, programs: int, arrays: Any, rows: tuple[int, ...], strides: Any, *constants: Any
) -> None:
    """Launch a kernel, which reads rows in vectors where they may be."""
    given = [array for array in arrays if array is not None]
    aligned = begin_vectors(given) and not any([n % 4 for n in (constants[0], *strides)])
    integers = *rows, *strides
    exact = arrays[-1].dtype == torch.float64
    constants = *constants, tl.float64 if exact else tl.float32, aligned
    kinds = [a if a is None else a.dtype for a in arrays]
    key = given[0].device, *kinds, wide(*integers), constants
    _launcher(kernel, aligned)(programs, key, *arrays, *integers, *constants)


def _stride(array: Any) -> int:
    return 0 if array is None else array.stride(0)


def _normalize_rows(a: Any, dout: Any, out: Any) -> None:
    (E, C), size = a.x.shape, power(a.x.shape[1])
    if not E * C:
        return
    x, dout = rows_of(a.x), rows_of(dout)
    arrays = x, a.weight.contiguous(), a.bias.contiguous(), dout, out
    R = max(1, _NUMBERS // size)
    constants = C, R, size, a.eps
    _launch(_layer, -(-E // R), arrays, (E,), (_stride(x), _stride(dout)), *constants)


def _normalize_nodes(a: Any, given: tuple[Any, Any, Any], out: Any) -> None:
    """Launch the kernel; `given` are bias, more and dout."""
    N, M, C = a.x.shape
    if not N * C:
        return
    bias, more, dout = given
    x, more, dout = map(rows_of, (a.x, more, dout))
    weight, balance = a.weight.contiguous(), a.balance.contiguous()
    bias = None if bias is None else bias.contiguous()
    arrays, strides = (x, weight, bias, more, balance, dout, out), map(_stride, (x, more, dout))
    _launch(_degrees, N, arrays, (), tuple(strides), C, a.lmax, power(M), power(C), a.eps)


@register("layer_silu", "triton")
def layer_silu(a: Any, y: Any) -> None:
    _normalize_rows(a, None, y.out)


@register("layer_silu_vjp", "triton")
def layer_silu_vjp(a: Any, y: Any) -> None:
    _normalize_rows(a, a.dout, y.dx)


@register("degree_norm", "triton")
def degree_norm(a: Any, y: Any) -> None:
    _normalize_nodes(a, (a.bias, a.more, None), y.out)


@register("degree_norm_vjp", "triton")
def degree_norm_vjp(a: Any, y: Any) -> None:
    _normalize_nodes(a, (None, None, a.dout), y.dx)


@register("row_linear", "triton")
@in_one_dtype
def row_linear(a: Any, y: Any) -> None:
    if y.out is not None:
        torch.bmm(a.x.transpose(0, 1), a.weight.mT, out=y.out.transpose(0, 1))
        if a.bias is not None:
            y.out[:, 0].add_(a.bias)
    if y.gates is not None:
        given = a.x[:, 0], a.gate_weight.T
        if a.gate_bias is None:
            torch.mm(*given, out=y.gates)
        else:
            torch.addmm(a.gate_bias, *given, out=y.gates)


@register("row_linear_vjp", "triton")
@in_one_dtype
def row_linear_vjp(a: Any, y: Any) -> None:
    if a.dout is None:
        y.dx.zero_()
    else:
        torch.bmm(a.dout.transpose(0, 1), a.weight, out=y.dx.transpose(0, 1))
    if a.dgates is not None:
        y.dx[:, 0].addmm_(a.dgates, a.gate_weight)
