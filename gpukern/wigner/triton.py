"""Edge Wigner operations on the GPU: a program per edge or per node, and block of channels.

Rows of a degree lie in registers; matrices are read element by element, and stay in cache. High
degrees have loops over rows of their matrices, as code for every element would compile for minutes,
and a launch each. By edge,
a program reads the rows of the edge's ends, turns them and writes the message. By node, it walks
over the node's edges, from the sorted lists, and sums the rows that it turns back: nothing is added
atomically. The gradient of the matrices is formed where the message is read anyway, apart for each
end and block of channels; a third kernel adds up these parts and writes the zeros around the
blocks.

Factors of messages, radial functions, are multiplied in as a message is read or written, up to a
degree whose rows are in registers together; above, a kernel of SO(2) convolutions does it.

Bytes of M rows and C channels, once each: forth, E·M·2C out; its gradient, E·M·2C in; back, E·M·C
in; its gradient, E·M·C in and out. Nodes and matrices are small beside these.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.so2.op import orders
from fusedops.wigner.rows import degree_of, degrees, function_rows, message_rows
from gpukern.launch import (
    Launch,
    Launcher,
    begin_vectors,
    kernel_of_any_size,
    launch_all,
    power,
    wide,
)
from gpukern.products import Orders, orders_to_keep, write_orders
from gpukern.so2.triton import scale_messages, unscale_messages

# Channels that a program takes, and elements of a warp's tile of edges and channels.
_CHANNELS, _TILE = 128, 128
# Bounds of nodes, and the channels of a node's program below each, so that tiles have more edges.
_FEW = (600, 16), (4096, 32)
# The nodes from which on their programs form the gradients of matrices and factors.
_WITH_PRODUCTS = 600
# Rows of a node that a program has in registers.
_ROWS = 9
# The same, and the width of its tile, if it forms the gradient of the matrices too.
_ROWS_WITH_DOTS, _WIDTH_WITH_DOTS = 5, 64
# Elements of a degree's matrix that are unrolled together, without and with that gradient.
_ELEMENTS, _ELEMENTS_WITH_DOTS = 32, 64
# Elements of the matrices' gradient that a program writes.
_PLACED = 512
# Where vectors are loaded, rows are a multiple of so many elements.
_UNIT = 8


@triton.jit
def _within(index, count):
    """Return an index clamped to [0, count), so that a bad index reads within the array."""
    return tl.minimum(tl.maximum(index, 0), count - 1)


@triton.jit
def _element(l, i, j, row, column, PACKED: tl.constexpr, BACK: tl.constexpr):
    """Return the place of the matrix element that joins a message's row i and a node's row j."""
    if PACKED:
        if BACK:
            return l * (2 * l - 1) * (2 * l + 1) // 3 + j * (2 * l + 1) + i
        else:
            return l * (2 * l - 1) * (2 * l + 1) // 3 + i * (2 * l + 1) + j
    else:
        return (l * l + i) * row + (l * l + j) * column


@triton.jit
def _position(l, m, LMAX: tl.constexpr):
    """Return the m-major row of coefficient (l, m), as `fusedops.wigner.m_major_order`."""
    a = tl.maximum(m, -m)
    return (a - 1) * (2 * LMAX + 2 - a) + tl.where(m > 0, LMAX + 1, 2 * (LMAX + 1) - a) + l - a


@triton.jit
def _function(l, m, LMAX: tl.constexpr):
    """Return the radial function of rows (l, ±m), as `fusedops.wigner.rows.functions_of`."""
    return m * (LMAX + 1) - m * (m - 1) // 2 + l - m


@triton.jit
def _slots(EDGES: tl.constexpr):
    """Return the numbers of a tile's edges. One is no tensor, which compiles and runs faster."""
    if EDGES == 1:
        return 0
    else:
        return tl.arange(0, EDGES)[:, None]


@triton.jit
def _hidden(count, edges):
    """Return a number of rows that the compiler doesn't know, since it unrolls loops that it can.

    Unrolled, degrees up to 6 compile for a minute.
    """
    return count + tl.minimum(edges, 0)


@triton.jit
def _load_matrix(
    matrix, start, live, row, column,
    l: tl.constexpr, MMAX: tl.constexpr, SOME: tl.constexpr, PACKED: tl.constexpr,
    BACK: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Load the elements of degree l in SOME of the message's kept rows, from `start` on."""
    LOW: tl.constexpr = l - MMAX if l > MMAX else 0
    found = ()
    for i in tl.static_range(SOME):
        # Past the last row there may be another degree's elements, even NaN.
        there = live & (LOW + start + i <= 2 * l - LOW)
        for j in tl.static_range(2 * l + 1):
            at = matrix + _element(l, LOW + start + i, j, row, column, PACKED, BACK)
            found = found + (tl.load(at, mask=there, other=0.0).to(FLOAT),)
    return found


@triton.jit
def _load_rows(
    rows, c, live, C: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Load a node's rows, of every tile of channels."""
    found = ()
    for tile in tl.static_range(TILES):
        for row in tl.static_range(COUNT):
            at = tile * WIDTH + c
            value = tl.load(rows + row * C + at, mask=(at < C) & live, other=0.0)
            found = found + (value.to(FLOAT),)
    return found


@triton.jit
def _load_message(
    message, start, c, live, l: tl.constexpr, SOME: tl.constexpr, LMAX: tl.constexpr,
    MMAX: tl.constexpr, ENDS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Load SOME kept rows of degree l, from `start` on, of every tile of channels."""
    LOWEST: tl.constexpr = -(MMAX if l > MMAX else l)
    found = ()
    for tile in tl.static_range(TILES):
        for i in tl.static_range(SOME):
            at = tile * WIDTH + c
            m = LOWEST + start + i
            row = message + _position(l, m, LMAX) * ENDS * C
            there = (at < C) & live & (m <= -LOWEST)
            found = found + (tl.load(row + at, mask=there, other=0.0).to(FLOAT),)
    return found


@triton.jit
def _load_factors(
    factors, c, live, l: tl.constexpr, MOST: tl.constexpr, LMAX: tl.constexpr,
    ENDS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Load the factors of degree l, of orders up to MOST and of every tile of channels."""
    found = ()
    for tile in tl.static_range(TILES):
        for m in tl.static_range(MOST + 1):
            at = tile * WIDTH + c
            place = factors + _function(l, m, LMAX) * ENDS * C + at
            found = found + (tl.load(place, mask=(at < C) & live, other=0.0).to(FLOAT),)
    return found


@triton.jit
def _times(rows, factors, MOST: tl.constexpr, TILES: tl.constexpr):
    """Return the rows of orders -MOST to MOST times their factors."""
    found = ()
    for tile in tl.static_range(TILES):
        for i in tl.static_range(2 * MOST + 1):
            factor = factors[tile * (MOST + 1) + (i - MOST if i > MOST else MOST - i)]
            found = found + (rows[tile * (2 * MOST + 1) + i] * factor,)
    return found


@triton.jit
def _store_on_factors(
    dfactors, sent, turned, c, live, factor, l: tl.constexpr, MOST: tl.constexpr,
    LMAX: tl.constexpr, ENDS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Store the products of a message's rows and the rows turned, summed over ±m."""
    ROWS: tl.constexpr = 2 * MOST + 1
    for tile in tl.static_range(TILES):
        for m in tl.static_range(MOST + 1):
            total = sent[tile * ROWS + MOST + m] * turned[tile * ROWS + MOST + m]
            if m > 0:
                total += sent[tile * ROWS + MOST - m] * turned[tile * ROWS + MOST - m]
            at = tile * WIDTH + c
            place = dfactors + _function(l, m, LMAX) * ENDS * C + at
            total = (factor * total).to(dfactors.dtype.element_ty)
            tl.store(place, total, mask=(at < C) & live)


@triton.jit
def _dots(
    sent, inputs, l: tl.constexpr, SOME: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, EDGES: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Return the products of a message's rows and a node's, summed over the channels of a lane."""
    found = ()
    for i in tl.static_range(SOME):
        for j in tl.static_range(2 * l + 1):
            total = sent[i] * inputs[FIRST + j]
            for tile in tl.static_range(1, TILES):
                total += sent[tile * SOME + i] * inputs[tile * STEP + FIRST + j]
            if LANE > 1:
                total = tl.sum(tl.reshape(total, (EDGES, WIDTH // LANE, LANE)), 2)
            found = found + (total,)
    return found


@triton.jit
def _store_dots(
    part, dots, live, count, EDGES: tl.constexpr, LANES: tl.constexpr, FLOAT: tl.constexpr
):
    """Store the sums over lanes of `count` values, in rounds of LANES: lane k stores the k-th.

    At every level a lane keeps one of two values, and gives the other to the lane that keeps it, so
    that the number of values halves with the number of lanes left to sum.
    """
    LEVELS: tl.constexpr = LANES.bit_length() - 1
    MISSING: tl.constexpr = -len(dots) % LANES
    lane = tl.arange(0, LANES)[None, :]
    values = dots
    for _value in tl.static_range(MISSING):
        values = values + (tl.zeros([EDGES, LANES], FLOAT),)
    for level in tl.static_range(LEVELS):
        partner = tl.broadcast_to(lane ^ (1 << level), [EDGES, LANES])
        odd = (lane & (1 << level)) != 0
        halved = ()
        for k in tl.static_range(len(values) // 2):
            kept = tl.where(odd, values[2 * k + 1], values[2 * k])
            given = tl.where(odd, values[2 * k], values[2 * k + 1])
            halved = halved + (kept + tl.gather(given, partner, 1),)
        values = halved
    for k in tl.static_range(len(values)):
        at = k * LANES + lane
        tl.store(part + at, values[k], mask=live & (at < count))


@triton.jit
def _factor(scale, FLOAT: tl.constexpr):
    """Return a float64 that comes as its bits, since a float argument is a float32."""
    return scale.to(tl.float64, bitcast=True).to(FLOAT)


@triton.jit
def _edge_rows(
    start, inputs, matrix, message, factors, dmessage, dfactors, live, c, factor,
    l: tl.constexpr, SOME: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, EDGES: tl.constexpr, LANE: tl.constexpr,
    ENDS: tl.constexpr, FLOAT: tl.constexpr, HAS_FACTORS: tl.constexpr,
    WANT_MESSAGE: tl.constexpr, WANT_WIGNER: tl.constexpr, WANT_FACTORS: tl.constexpr,
):  # fmt: skip
    """Write SOME rows of degree l, from `start` on, of one end.

    Return the lanes' products, and the rows.
    """
    K: tl.constexpr = 2 * l + 1
    MOST: tl.constexpr = MMAX if l > MMAX else l
    dots = ()
    sent = ()
    turned = ()
    made = ()
    if HAS_FACTORS:
        scales = _load_factors(factors, c, live, l, MOST, LMAX, ENDS, C, WIDTH, TILES, FLOAT)
    if WANT_WIGNER or WANT_FACTORS:
        sent = _load_message(
            message, start, c, live, l, SOME, LMAX, MMAX, ENDS, C, WIDTH, TILES, FLOAT
        )
    if WANT_WIGNER:
        if HAS_FACTORS:
            scaled = _times(sent, scales, MOST, TILES)
        else:
            scaled = sent
        dots = _dots(scaled, inputs, l, SOME, 0, K, WIDTH, TILES, EDGES, LANE)
    if WANT_MESSAGE or WANT_FACTORS:
        for tile in tl.static_range(TILES):
            for i in tl.static_range(SOME):
                total = matrix[i * K] * inputs[tile * K]
                for j in tl.static_range(1, K):
                    total += matrix[i * K + j] * inputs[tile * K + j]
                turned = turned + (total,)
    if WANT_MESSAGE:
        if HAS_FACTORS:
            written = _times(turned, scales, MOST, TILES)
        else:
            written = turned
        for tile in tl.static_range(TILES):
            for i in tl.static_range(SOME):
                at = tile * WIDTH + c
                m = start + i - MOST
                place = dmessage + _position(l, m, LMAX) * ENDS * C + at
                total = factor * written[tile * SOME + i]
                made = made + (total,)
                total = total.to(dmessage.dtype.element_ty)
                tl.store(place, total, mask=(at < C) & live & (m <= MOST))
    if WANT_FACTORS:
        _store_on_factors(
            dfactors, sent, turned, c, live, factor, l, MOST, LMAX, ENDS, C, WIDTH, TILES
        )
    return dots, made


@triton.jit
def _edge_degree(
    x, message, matrix, factors, dmessage, dfactors, part, e, first, second, edges, live, c,
    row, column, factor,
    l: tl.constexpr, SOME: tl.constexpr, OFFSETS: tl.constexpr, ROWS: tl.constexpr,
    FUNCTIONS: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, EDGES: tl.constexpr, LANE: tl.constexpr,
    ENDS: tl.constexpr, PACKED: tl.constexpr, BACK: tl.constexpr, FLOAT: tl.constexpr,
    HAS_FACTORS: tl.constexpr, WANT_MESSAGE: tl.constexpr, WANT_WIGNER: tl.constexpr,
    WANT_FACTORS: tl.constexpr,
):  # fmt: skip
    """Write the rows of degree l, and return them, if they are taken at once.

    The lanes' products of both ends are returned before, or stored too.
    """
    K: tl.constexpr = 2 * l + 1
    KEPT: tl.constexpr = (OFFSETS[l + 1] - OFFSETS[l]) // K
    # Few rows are taken at once, with a copy of the code for each; many, some at a time.
    WHOLE: tl.constexpr = SOME == KEPT
    TURNS: tl.constexpr = WANT_MESSAGE or WANT_FACTORS
    found = ()
    made = ()
    if WHOLE and TURNS:
        elements = _load_matrix(matrix, 0, live, row, column, l, MMAX, SOME, PACKED, BACK, FLOAT)
    for h in tl.static_range(ENDS):
        # The target first; its channels come last.
        node = first if h == 0 else second
        half = e * ROWS * ENDS * C + (ENDS - 1 - h) * C
        of = e * FUNCTIONS * ENDS * C + (ENDS - 1 - h) * C
        rows = x + (node * (LMAX + 1) * (LMAX + 1) + l * l) * C
        inputs = _load_rows(rows, c, live, C, WIDTH, TILES, K, FLOAT)
        if WHOLE:
            if not TURNS:
                elements = ()
            dots, rows_made = _edge_rows(
                0, inputs, elements, message + half, factors + of, dmessage + half,
                dfactors + of, live, c, factor, l, SOME, LMAX, MMAX, C, WIDTH, TILES, EDGES,
                LANE, ENDS, FLOAT, HAS_FACTORS, WANT_MESSAGE, WANT_WIGNER, WANT_FACTORS,
            )  # fmt: skip
            found = found + (dots,)
            made = made + rows_made
        else:
            start = 0
            while start < _hidden(KEPT, edges):
                elements = ()
                if WANT_MESSAGE:
                    elements = _load_matrix(
                        matrix, start, live, row, column, l, MMAX, SOME, PACKED, BACK, FLOAT
                    )
                dots, _ = _edge_rows(
                    start, inputs, elements, message + half, factors, dmessage + half,
                    dfactors, live, c, factor, l, SOME, LMAX, MMAX, C, WIDTH, TILES, EDGES,
                    LANE, ENDS, FLOAT, False, WANT_MESSAGE, WANT_WIGNER, False,
                )  # fmt: skip
                if WANT_WIGNER:
                    _store_dots(
                        part + h * OFFSETS[LMAX + 1] + OFFSETS[l] + start * K, dots, live,
                        (KEPT - start) * K, EDGES, WIDTH // LANE, FLOAT,
                    )  # fmt: skip
                start += SOME
            found = found + ((),)
    return found, made


def _edge_kernel(
    x, message, wigner, factors, source, target, dmessage, dfactors, parts, halves, scales,
    nodes, edges, blocks, scale, w_edge, w_row, w_column,
    LOW: tl.constexpr, HIGH: tl.constexpr, SOME: tl.constexpr, OFFSETS: tl.constexpr,
    ROWS: tl.constexpr, FUNCTIONS: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr,
    C: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, EDGES: tl.constexpr,
    LANE: tl.constexpr, ENDS: tl.constexpr, OWN: tl.constexpr, PACKED: tl.constexpr,
    BACK: tl.constexpr,
    FLOAT: tl.constexpr, HAS_FACTORS: tl.constexpr, WANT_MESSAGE: tl.constexpr,
    WANT_WIGNER: tl.constexpr, WANT_FACTORS: tl.constexpr, PLACES: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    """Write an edge's rows of the degrees from LOW to HIGH - 1.

    Halves of orders are written, too, where STARTS has more than one entry.
    """
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    c = (block * WIDTH * TILES + tl.arange(0, WIDTH))[None, :]
    e = program // blocks * EDGES + _slots(EDGES)
    live = e < edges
    factor = _factor(scale, FLOAT)
    first = e
    second = e
    if not OWN:
        first = _within(tl.load(target + e, mask=live, other=0), nodes)
        if ENDS == 2:
            second = _within(tl.load(source + e, mask=live, other=0), nodes)
    # An edge's parts, of both ends, lie one after the other.
    part = parts + (block * edges + e) * ENDS * OFFSETS[LMAX + 1]
    first_dots = ()
    second_dots = ()
    made = ()
    for l in tl.static_range(LOW, HIGH):
        dots, rows_made = _edge_degree(
            x, message, wigner + e * w_edge, factors, dmessage, dfactors, part, e, first,
            second, edges, live, c, w_row, w_column, factor, l, SOME[l], OFFSETS, ROWS, FUNCTIONS,
            LMAX, MMAX, C, WIDTH, TILES, EDGES, LANE, ENDS, PACKED, BACK, FLOAT, HAS_FACTORS,
            WANT_MESSAGE, WANT_WIGNER, WANT_FACTORS,
        )  # fmt: skip
        made = made + rows_made
        first_dots = first_dots + dots[0]
        if ENDS == 2:
            second_dots = second_dots + dots[1]
    if len(STARTS) > 1:
        own = tl.reshape(e + tl.zeros([EDGES, 1], tl.int64), [EDGES])
        write_orders(made, halves, scales, own, edges, c, live & (c < C), PLACES, STARTS, C)
    if WANT_WIGNER:
        COUNT: tl.constexpr = len(first_dots)
        part += OFFSETS[LOW]
        _store_dots(part, first_dots, live, COUNT, EDGES, WIDTH // LANE, FLOAT)
        if ENDS == 2:
            part += OFFSETS[LMAX + 1]
            _store_dots(part, second_dots, live, COUNT, EDGES, WIDTH // LANE, FLOAT)


@triton.jit
def _node_rows(
    start, message, matrix, factors, dfactors, live, c, factor, sums, inputs, row, column,
    l: tl.constexpr, SOME: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
    LMAX: tl.constexpr, MMAX: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, EDGES: tl.constexpr, LANE: tl.constexpr, ENDS: tl.constexpr,
    PACKED: tl.constexpr, BACK: tl.constexpr, FLOAT: tl.constexpr, HAS_FACTORS: tl.constexpr,
    WANT_WIGNER: tl.constexpr, WANT_FACTORS: tl.constexpr,
):  # fmt: skip
    """Return the sums over rows of degree l with SOME rows of edges added, and lanes' products."""
    K: tl.constexpr = 2 * l + 1
    MOST: tl.constexpr = MMAX if l > MMAX else l
    sent = _load_message(message, start, c, live, l, SOME, LMAX, MMAX, ENDS, C, WIDTH, TILES, FLOAT)
    elements = _load_matrix(matrix, start, live, row, column, l, MMAX, SOME, PACKED, BACK, FLOAT)
    if WANT_FACTORS:
        turned = ()
        for tile in tl.static_range(TILES):
            for i in tl.static_range(SOME):
                total = elements[i * K] * inputs[tile * STEP + FIRST]
                for j in tl.static_range(1, K):
                    total += elements[i * K + j] * inputs[tile * STEP + FIRST + j]
                turned = turned + (total,)
        _store_on_factors(
            dfactors, sent, turned, c, live, factor, l, MOST, LMAX, ENDS, C, WIDTH, TILES
        )
    if HAS_FACTORS:
        scales = _load_factors(factors, c, live, l, MOST, LMAX, ENDS, C, WIDTH, TILES, FLOAT)
        scaled = _times(sent, scales, MOST, TILES)
    else:
        scaled = sent
    grown = ()
    for tile in tl.static_range(TILES):
        for j in tl.static_range(K):
            total = sums[tile * STEP + FIRST + j]
            for i in tl.static_range(SOME):
                total += elements[i * K + j] * scaled[tile * SOME + i]
            grown = grown + (total,)
    dots = ()
    if WANT_WIGNER:
        dots = _dots(scaled, inputs, l, SOME, FIRST, STEP, WIDTH, TILES, EDGES, LANE)
    return grown, dots


def _node_kernel(
    base, x, message, wigner, factors, source_ptr, by_source, target_ptr, by_target, dx,
    dfactors, parts,
    nodes, edges, listed, blocks, scale, w_edge, w_row, w_column,
    LOW: tl.constexpr, HIGH: tl.constexpr, SOME: tl.constexpr, OFFSETS: tl.constexpr,
    ROWS: tl.constexpr, FUNCTIONS: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr,
    C: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, EDGES: tl.constexpr,
    LANE: tl.constexpr, ENDS: tl.constexpr, OWN: tl.constexpr, PACKED: tl.constexpr,
    BACK: tl.constexpr, FLOAT: tl.constexpr, HAS_BASE: tl.constexpr, HAS_FACTORS: tl.constexpr,
    WANT_WIGNER: tl.constexpr, WANT_FACTORS: tl.constexpr,
):  # fmt: skip
    """Write a node's rows of the degrees from LOW to HIGH - 1."""
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    node = program // blocks
    factor = _factor(scale, FLOAT)
    c = (block * WIDTH * TILES + tl.arange(0, WIDTH))[None, :]
    STEP: tl.constexpr = HIGH * HIGH - LOW * LOW
    COUNT: tl.constexpr = OFFSETS[HIGH] - OFFSETS[LOW]
    # Runs of several degrees have few rows.
    WHOLE: tl.constexpr = HIGH - LOW > 1 or SOME[LOW] * (2 * LOW + 1) == COUNT
    inputs = ()
    if WANT_WIGNER or WANT_FACTORS:
        rows = x + (tl.minimum(node, nodes - 1) * (LMAX + 1) * (LMAX + 1) + LOW * LOW) * C
        inputs = _load_rows(rows, c, True, C, WIDTH, TILES, STEP, FLOAT)
    sums = ()
    for _row in tl.static_range(TILES * STEP):
        sums = sums + (tl.zeros([EDGES, WIDTH], FLOAT),)
    for h in tl.static_range(ENDS):
        slots = _slots(EDGES)
        if OWN:
            k = node
            end = node + 1
            ahead = k + slots
        else:
            pointers = target_ptr if h == 0 else source_ptr
            order = by_target if h == 0 else by_source
            known = node < listed
            k = tl.load(pointers + node, mask=known, other=0)
            k = tl.minimum(tl.maximum(k, 0), edges)
            end = tl.load(pointers + node + 1, mask=known, other=0)
            end = tl.minimum(end, edges)
            ahead = tl.load(order + k + slots, mask=k + slots < end, other=0)
        while k < end:
            live = k + slots < end
            if not OWN and WANT_WIGNER:
                ahead = tl.load(order + k + slots, mask=k + slots < end, other=0)
            e = _within(ahead, edges)
            k += EDGES
            if not OWN and not WANT_WIGNER:
                # The next edges' numbers load during the work on these. With the gradient of the
                # matrices, other work hides the load, and registers are scarce.
                ahead = tl.load(order + k + slots, mask=k + slots < end, other=0)
            sent = message + (e * ROWS * ENDS + (ENDS - 1 - h)) * C
            of = (e * FUNCTIONS * ENDS + (ENDS - 1 - h)) * C
            part = parts + ((block * edges + e) * ENDS + h) * OFFSETS[LMAX + 1] + OFFSETS[LOW]
            if WHOLE:
                grown = ()
                dots = ()
                for l in tl.static_range(LOW, HIGH):
                    more = _node_rows(
                        0, sent, wigner + e * w_edge, factors + of, dfactors + of, live, c,
                        factor, sums, inputs, w_row, w_column, l, SOME[l], l * l - LOW * LOW, STEP,
                        LMAX, MMAX, C, WIDTH, TILES, EDGES, LANE, ENDS, PACKED, BACK, FLOAT,
                        HAS_FACTORS, WANT_WIGNER, WANT_FACTORS,
                    )  # fmt: skip
                    grown = grown + more[0]
                    dots = dots + more[1]
                if WANT_WIGNER:
                    _store_dots(part, dots, live, COUNT, EDGES, WIDTH // LANE, FLOAT)
                # `grown` is in order of degrees and tiles, `sums` of tiles and degrees.
                sums = ()
                for tile in tl.static_range(TILES):
                    for l in tl.static_range(LOW, HIGH):
                        for j in tl.static_range(2 * l + 1):
                            sums = sums + (
                                grown[(l * l - LOW * LOW) * TILES + tile * (2 * l + 1) + j],
                            )
            else:
                start = 0
                while start < _hidden(COUNT // STEP, edges):
                    sums, dots = _node_rows(
                        start, sent, wigner + e * w_edge, factors, dfactors, live, c, factor,
                        sums, inputs, w_row, w_column, LOW, SOME[LOW], 0, STEP, LMAX, MMAX, C,
                        WIDTH, TILES, EDGES, LANE, ENDS, PACKED, BACK, FLOAT, False, WANT_WIGNER,
                        False,
                    )  # fmt: skip
                    if WANT_WIGNER:
                        _store_dots(
                            part + start * STEP, dots, live, COUNT - start * STEP, EDGES,
                            WIDTH // LANE, FLOAT,
                        )  # fmt: skip
                    start += SOME[LOW]
    for tile in tl.static_range(TILES):
        at = tile * WIDTH + c
        for row in tl.static_range(STEP):
            place = (node * (LMAX + 1) * (LMAX + 1) + LOW * LOW + row) * C + at
            total = factor * tl.sum(sums[tile * STEP + row], 0)[None, :]
            if HAS_BASE:
                total += tl.load(base + place, mask=at < C, other=0.0).to(FLOAT)
            tl.store(dx + place, total.to(dx.dtype.element_ty), mask=at < C)


def _place_kernel(
    parts, dwigner, edges, count, scale,
    OFFSETS: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr, PARTS: tl.constexpr,
    ENDS: tl.constexpr, PACKED: tl.constexpr, BACK: tl.constexpr, FLOAT: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Write the sums of parts at their elements of the matrices, and zero elsewhere."""
    at = tl.program_id(0).to(tl.int64) * PLACED + tl.arange(0, PLACED)
    N: tl.constexpr = (LMAX + 1) * (LMAX + 1)
    SIZE: tl.constexpr = (LMAX + 1) * (2 * LMAX + 1) * (2 * LMAX + 3) // 3
    EACH: tl.constexpr = SIZE if PACKED else N * N
    e = at // EACH
    within = (at % EACH).to(tl.int32)
    first = tl.full([PLACED], -1, tl.int32)
    for l in tl.static_range(LMAX + 1):
        low = l * (2 * l - 1) * (2 * l + 1) // 3
        if PACKED:
            row = (within - low) // (2 * l + 1)
            column = (within - low) % (2 * l + 1)
            here = (within >= low) & (row < 2 * l + 1)
        else:
            row = within // N - l * l
            column = within % N - l * l
            here = (row >= 0) & (row < 2 * l + 1) & (column >= 0) & (column < 2 * l + 1)
        i = column if BACK else row
        j = row if BACK else column
        here = here & (i >= l - MMAX) & (i <= l + MMAX)
        kept = i - (l - MMAX if l > MMAX else 0)
        first = tl.where(here, OFFSETS[l] + kept * (2 * l + 1) + j, first)
    found = (at < count) & (first >= 0)
    total = tl.zeros([PLACED], FLOAT)
    for part in tl.static_range(PARTS):
        # Parts are in order of blocks of channels, then edges, then ends.
        at_part = (part // ENDS * edges + e) * ENDS + part % ENDS
        total += tl.load(parts + at_part * OFFSETS[LMAX + 1] + first, mask=found, other=0.0)
    total = total * _factor(scale, FLOAT)
    tl.store(dwigner + at, total.to(dwigner.dtype.element_ty), mask=at < count)


def _launchers(function: Any, aligned: tuple[str, ...]) -> dict[bool, Launcher]:
    """Return launchers by whether features are aligned for vector loads."""
    return {
        vector: Launcher(kernel_of_any_size(function, aligned if vector else ()), 1)
        for vector in (False, True)
    }


_by_edge = _launchers(_edge_kernel, ("x", "message", "factors", "dmessage", "dfactors", "halves"))
_by_node = _launchers(_node_kernel, ("base", "x", "message", "factors", "dx", "dfactors"))
_place = Launcher(kernel_of_any_size(_place_kernel), 4)


def _aligned(channels: int, features: tuple[Any, ...]) -> bool:
    return not channels % _UNIT and begin_vectors(features)


def _runs(lmax: int, rows: int) -> list[tuple[int, int]]:
    """Return runs of degrees whose rows go together: the first degree, and the next run's."""
    found = [(0, 1)]
    for l in range(1, lmax + 1):
        low, _ = found[-1]
        if (l + 1) ** 2 - low**2 > rows:
            found.append((l, l + 1))
        else:
            found[-1] = low, l + 1
    return found


def _tiling(block: int, float64: bool, most: int, vector: bool) -> tuple[int, int, int, int]:
    """Return a tile's channels, up to `most`, a program's tiles and edges, and a lane's channels.

    One load brings a lane's channels: sums over them need no other lane, and every lane would round
    in its own way.
    """
    elements = _TILE // 2 if float64 else _TILE
    width = min(most, elements, power(block, 16))
    tiles = max(1, -(-block // width))
    return width, tiles, elements // width, elements // 32 if vector else 1


@functools.lru_cache(maxsize=64)
def _layout(lmax: int, mmax: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many rows of each degree are taken at once, and the offsets of degrees.

    Up to `most` elements are taken at once. A degree's offset is the number of elements kept of the
    matrices of lower degrees; the last offset counts all degrees.
    """
    some, offsets = [], [0]
    for l in range(lmax + 1):
        kept, size = 2 * min(l, mmax) + 1, 2 * l + 1
        times = -(-kept // max(1, most // size))
        some.append(-(-kept // times))
        offsets.append(offsets[-1] + kept * size)
    return tuple(some), tuple(offsets)


@functools.lru_cache(maxsize=64)
def _places(lmax: int, mmax: int, ends: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the places of each order's rows among rows of degrees, and where orders begin.

    A degree has the rows of the target first, whose channels come last.
    """
    found = [own * ends + end for _, _, own in degrees(lmax, mmax) for end in reversed(range(ends))]
    starts = [0, *[own.stop * ends for own, _ in orders(lmax, mmax)]]
    return tuple(np.argsort(np.concatenate(found)).tolist()), tuple(starts)


def _by_steps(a: Any, y: Any) -> None:
    """Rotate, and multiply messages by factors apart."""
    dx, dmessage, dwigner, dfactors = y
    lmax = degree_of(a.wigner)
    width = a.message.shape[2] if a.x is None else (1 + (a.way == "forth")) * a.x.shape[2]
    shape = a.wigner.shape[0], message_rows(lmax, a.mmax), width
    dtype = promoted((a.base, a.x, a.message, a.wigner, a.factors))
    scaled = turned = None
    if a.message is not None and (dx is not None or dwigner is not None):
        scaled = torch.empty(shape, dtype=dtype, device=a.wigner.device)
        scale_messages(a.message, a.factors, scaled, lmax, a.mmax)
    if dmessage is not None or dfactors is not None:
        turned = torch.empty(shape, dtype=dtype, device=a.wigner.device)
    edge_wigner(
        a._replace(message=scaled, factors=None), y._replace(dmessage=turned, dfactors=None)
    )
    if dmessage is not None:
        scale_messages(turned, a.factors, dmessage, lmax, a.mmax)
    if dfactors is not None:
        unscale_messages(turned, a.message, a.factors, None, dfactors, lmax, a.mmax)


@register("edge_wigner", "triton")
def edge_wigner(a: Any, y: Any) -> None:
    base, x, message, wigner, factors, edges, mmax, way, scale = a
    dx, dmessage, dwigner, dfactors = y
    lmax = degree_of(wigner)
    some, offsets = _layout(lmax, mmax, _ELEMENTS)
    if factors is not None and any([n < 2 * min(l, mmax) + 1 for l, n in enumerate(some)]):
        _by_steps(a, y)
        return
    float64 = promoted((base, x, message, wigner, factors)) == torch.float64
    base, x, message, factors = (
        a if a is None else a.contiguous() for a in (base, x, message, factors)
    )
    packed, back = wigner.ndim == 2, way == "back"
    if packed:
        wigner = wigner.contiguous()
        strides = wigner.shape[1], 0, 0
    else:
        # Within a matrix, elements are found by 32 bits, which saves registers.
        if max(wigner.stride()[1:]) * 2 * wigner.shape[1] >= 2**31:
            wigner = wigner.contiguous()
        w_edge, *within = wigner.stride()
        strides = w_edge, *(reversed(within) if back else within)
    ends = 2 if way == "forth" else 1
    channels = x.shape[2] if x is not None else message.shape[2] // ends
    nodes = 0 if x is None else x.shape[0]
    source = target = by_source = source_ptr = by_target = target_ptr = wigner
    listed, count = 0, wigner.shape[0]
    if edges is not None:
        lists = edges.tensors_here()
        source, target = lists.source, lists.target
        by_source, source_ptr = lists.by_source, lists.source_ptr
        by_target, target_ptr = lists.by_target, lists.target_ptr
        # Edges may claim wrong sizes; reads stay within the arrays.
        listed = min(source_ptr.numel(), target_ptr.numel()) - 1
        count = min(count, *[a.numel() for a in (source, target, by_source, by_target)])
    # The gradients of matrices and factors are products of messages and nodes.
    products = dwigner is not None or dfactors is not None
    summed = 0 if dx is None else dx.shape[0]
    by_edge = dmessage is not None or (products and (dx is None or summed < _WITH_PRODUCTS))
    by_node = products and not by_edge and nodes > 0
    dots_by_node = by_node and dwigner is not None
    kind = tl.float64 if float64 else tl.float32
    vector = _aligned(channels, (base, x, message, factors, dx, dmessage, dfactors))
    (bits,) = struct.unpack("q", struct.pack("d", scale))
    some_by_node, _ = _layout(lmax, mmax, _ELEMENTS_WITH_DOTS if dots_by_node else _ELEMENTS)
    functions = function_rows(lmax, mmax)
    constants = offsets, message_rows(lmax, mmax), functions, lmax, mmax, channels
    layout = ends, edges is None, packed, back, kind
    most = next((few for bound, few in _FEW if summed < bound and not by_node), _CHANNELS)
    block, node_block = [min(of, max(1, channels)) for of in (_CHANNELS, most)]
    blocks, node_blocks = -(-channels // block), -(-channels // node_block)
    tile = _tiling(block, float64, _CHANNELS, vector)
    parts = None
    if dwigner is not None:
        parts = wigner.new_empty(
            (blocks, count, ends, offsets[-1]),
            dtype=torch.float64 if float64 else torch.float32,
        )

    runs, own = _runs(lmax, _ROWS_WITH_DOTS if by_node else _ROWS), Orders()
    # Convolutions take messages of several orders, and a program has all rows of an edge at once.
    if dmessage is not None and mmax and not float64 and count == len(dmessage):
        if len(runs) == blocks == tile[1] == 1 and some[lmax] == 2 * min(lmax, mmax) + 1:
            own = orders_to_keep(dmessage, _places(lmax, mmax, ends), channels)
    launches: list[Launch] = []

    def launch(kernel: Launcher, programs: int, given: Any, integers: Any, *constants: Any) -> None:
        arrays = [wigner if array is None else array for array in given]
        key = wigner.device, *[a.dtype for a in arrays], wide(*integers), *constants
        launches.append((kernel, programs, key, (*arrays, *integers, *constants)))

    scaled = factors is not None
    for low, high in runs:
        if by_edge and count and channels and nodes:
            launch(
                _by_edge[vector],
                -(-count // tile[2]) * blocks,
                (x, message, wigner, factors, source, target, dmessage, dfactors, parts, *own[:2]),
                (nodes, count, blocks, bits, *strides),
                low, high, some, *constants, *tile, *layout, scaled, dmessage is not None,
                dwigner is not None, dfactors is not None,
                *own.layout,
            )  # fmt: skip
        if dx is not None and dx.numel():
            lists = source_ptr, by_source, target_ptr, by_target
            small = by_node and high**2 - low**2 <= _ROWS_WITH_DOTS
            width = _WIDTH_WITH_DOTS if small else _CHANNELS
            shape = _tiling(node_block, float64, width, vector)
            launch(
                _by_node[vector],
                summed * node_blocks,
                (base, x, message, wigner, factors, *lists, dx, dfactors, parts),
                (nodes, count, listed, node_blocks, bits, *strides),
                low, high, some_by_node, *constants, *shape, *layout, base is not None,
                scaled, dots_by_node, by_node and dfactors is not None,
            )  # fmt: skip
    if dwigner is not None and dwigner.numel():
        launch(
            _place,
            -(-dwigner.numel() // _PLACED),
            (parts, dwigner),
            (count, dwigner.numel(), bits),
            offsets, lmax, mmax, blocks * ends, ends, packed, back, kind, _PLACED,
        )  # fmt: skip
    launch_all(launches)
    own.note(dmessage)
