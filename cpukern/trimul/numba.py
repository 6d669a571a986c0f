"""The steps of a triangle multiplicative update between its products, in Numba.

Rows have channels last; planes have channels first, and positions last, along which loops run. A
kernel takes a block of positions and adds its sums over the block to `sums`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from cpukern.jit import jit
from cpukern.trimul import update
from cpukern.vectors_numba import sigmoid
from fusedops._frame.registry import register


@jit
def _statistics(row, eps):
    """Return the mean, and 1 over the standard deviation."""
    mean = var = 0.0
    for value in row:
        mean += value
    mean /= len(row)
    for value in row:
        var += (value - mean) ** 2
    return mean, 1 / math.sqrt(var / len(row) + eps)


@jit
def normalize_rows(x, weight, bias, eps, out):
    for r in range(len(x)):
        mean, scale = _statistics(x[r], eps)
        for c in range(x.shape[1]):
            out[r, c] = (x[r, c] - mean) * scale * weight[c] + bias[c]


@jit
def _plane_statistics(planes, eps):
    """Return every position's mean over the channels, and 1 over the standard deviation."""
    mean, scale = np.zeros(planes.shape[1]), np.zeros(planes.shape[1])
    for plane in planes:
        for p in range(len(plane)):
            mean[p] += plane[p]
    mean /= len(planes)
    for plane in planes:
        for p in range(len(plane)):
            scale[p] += (plane[p] - mean[p]) ** 2
    for p in range(len(scale)):
        scale[p] = 1 / math.sqrt(scale[p] / len(planes) + eps)
    return mean, scale


@jit
def normalize_planes(o, weight, bias, eps, out):
    size = o.shape[2]
    for b in range(len(o)):
        mean, scale = _plane_statistics(o[b], eps)
        for c in range(o.shape[1]):
            plane, to = o[b, c], out[c, b * size : (b + 1) * size]
            for p in range(size):
                to[p] = (plane[p] - mean[p]) * scale[p] * weight[c] + bias[c]


@jit
def gate_planes(values, value_bias, gates, gate_bias, mask, out):
    batch, sides, channels, size = out.shape
    for b in range(batch):
        where = slice(b * size, (b + 1) * size)
        m = mask[where]
        for side in range(sides):
            for c in range(channels):
                to, v, g = out[b, side, c], values[side, c, where], gates[side, c, where]
                bv, bg = value_bias[side, c], gate_bias[side, c]
                for p in range(size):
                    to[p] = (v[p] + bv) * sigmoid(g[p] + bg) * m[p]


@jit
def gate_rows(values, value_bias, gates, gate_bias):
    for r in range(len(values)):
        v, g = values[r], gates[r]
        for c in range(len(v)):
            v[c] = (v[c] + value_bias[c]) * sigmoid(g[c] + gate_bias[c])


@jit
def gate_rows_back(dout, values, value_bias, gates, gate_bias, sums):
    for r in range(len(values)):
        by, v, g = dout[r], values[r], gates[r]
        for c in range(len(v)):
            s = sigmoid(g[c] + gate_bias[c])
            g[c] = by[c] * (v[c] + value_bias[c]) * s * (1 - s)
            v[c] = by[c] * s
            sums[0, c] += v[c]
            sums[1, c] += g[c]


@jit
def gate_planes_back(dout, values, value_bias, gates, gate_bias, mask, dmask, sums):
    batch, sides, channels, size = dout.shape
    for b in range(batch):
        where = slice(b * size, (b + 1) * size)
        m, dm = mask[where], dmask[where]
        for side in range(sides):
            for c in range(channels):
                by, v, g = dout[b, side, c], values[side, c, where], gates[side, c, where]
                bv, bg = value_bias[side, c], gate_bias[side, c]
                dvalue = dgate = 0.0
                for p in range(size):
                    s = sigmoid(g[p] + bg)
                    ds = by[p] * (v[p] + bv)
                    if len(dm):
                        dm[p] += ds * s
                    v[p] = by[p] * m[p] * s
                    g[p] = ds * m[p] * s * (1 - s)
                    dvalue += v[p]
                    dgate += g[p]
                sums[0, side, c] += dvalue
                sums[1, side, c] += dgate


@jit
def normalize_planes_back(o, weight, eps, dout, first, do, sums):
    _, channels, size = o.shape
    for b in range(len(o)):
        mean, scale = _plane_statistics(o[b], eps)
        total, along = np.zeros(size), np.zeros(size)
        for c in range(channels):
            plane, by = o[b, c], dout[c, b * size : (b + 1) * size]
            dweight = dbias = 0.0
            for p in range(size):
                product = by[p] * ((plane[p] - mean[p]) * scale[p])
                total[p] += weight[c] * by[p]
                along[p] += weight[c] * product
                dweight += product
                dbias += by[p]
            sums[0, c] += dweight
            sums[1, c] += dbias
        for p in range(size):
            total[p] /= channels
            along[p] *= scale[p] / channels
        for c in range(first, first + do.shape[1]):
            plane, by = o[b, c], dout[c, b * size : (b + 1) * size]
            to = do[b, c - first]
            for p in range(size):
                left = weight[c] * by[p] - total[p]
                to[p] = scale[p] * (left - (plane[p] - mean[p]) * along[p])


@jit
def normalize_rows_back(x, weight, eps, dout, dx, sums):
    channels = x.shape[1]
    for r in range(len(x)):
        row, to = x[r], dx[r]
        mean, scale = _statistics(row, eps)
        total = along = 0.0
        for c in range(channels):
            to[c] += dout[r, c]
            y = (row[c] - mean) * scale
            sums[0, c] += to[c] * y
            sums[1, c] += to[c]
            total += weight[c] * to[c]
            along += weight[c] * to[c] * y
        total /= channels
        along /= channels
        for c in range(channels):
            y = (row[c] - mean) * scale
            to[c] = scale * (weight[c] * to[c] - total - y * along)


@register("triangle_multiplicative_update", "numba", tensors=True)
def triangle_multiplicative_update(a: Any, y: Any, *, tensors: bool = False) -> None:
    update.forward(sys.modules[__name__], a, y, tensors=tensors)


@register("triangle_multiplicative_update_vjp", "numba", tensors=True)
def triangle_multiplicative_update_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    update.backward(sys.modules[__name__], a, y, tensors=tensors)
