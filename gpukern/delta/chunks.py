"""The gated delta rule on the GPU in chunks of tokens, by products of matrices.

With γ the sums of g within a chunk, Γ_ts = exp(γ_t - γ_s) for s ≤ t, O = tril(k kᵀ Γ, -1) and S the
state before the chunk, the values that the state misses are m = (1 + O β)⁻¹ (v - exp(γ) k S), and
the values that tokens write are β m. The cotangents of these are w = (1 + Oᵀ β)⁻¹ du, with
du = scale (q kᵀ Γ)ᵀ dout + exp(γ_C - γ) k dS. Each is an array without the state plus a response
times the state. All chunks find these two side by side. A walk goes along a sequence with some
columns of the state, and another one back with its cotangent. Then all chunks find outputs, or
gradients, side by side again.

Products of less than 64 rows aside, the left factor of each is loaded, and products are transposed
for it. Hopper's asynchronous instructions take a computed factor from registers, to which the
assembler of CUDA 12 writes too early (https://github.com/triton-lang/triton/pull/11781).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.delta.op import LEAST_GATE

LEAST = tl.constexpr(LEAST_GATE)
#: Parameters of kernels that are numbers, not pointers.
NUMBERS = "sequences", "tokens"


@triton.jit
def sequence_of(number, starts, tokens):
    """Return a sequence's batch, and where it begins and ends in there."""
    if starts is None:
        return number, number * 0, number * 0 + tokens
    else:
        # Clipped, so that no bad number reaches outside of the arrays.
        begin = tl.minimum(tl.maximum(tl.load(starts + number), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(starts + number + 1), begin), tokens)
        return number * 0, begin, end


@triton.jit
def _chunk(
    number, starts, chunks, sequences, tokens, C: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return a chunk's first token, where it ends, and its row among the states.

    `Sequences` lists chunks of PARTS times C tokens.
    """
    if chunks is None:
        each = tl.cdiv(tokens, C)
        sequence = number // each
        begin = sequence * tokens
        first, end = begin + number % each * C, begin + tokens
    else:
        listed = chunks + number // PARTS * 2
        sequence = tl.minimum(tl.maximum(tl.load(listed), 0), sequences - 1)
        _, begin, end = sequence_of(sequence, starts, tokens)
        first = tl.minimum(tl.maximum(tl.load(listed + 1), begin), end) + number % PARTS * C
    return first, tl.minimum(first + C, end), begin // C + sequence + (first - begin) // C


@triton.jit
def _tokens(
    starts, chunks, sequences, tokens, TILES: tl.constexpr, HV: tl.constexpr, C: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return a program's tile of values and head, and its chunk, its tokens, and which are live."""
    program = tl.program_id(0)
    head = (program // TILES % HV).to(tl.int64)
    number = (program // (TILES * HV)).to(tl.int64)
    first, end, row = _chunk(number, starts, chunks, sequences, tokens, C, PARTS)
    t = first + tl.arange(0, C)
    return program % TILES, head, first, end, row, t, t < end


@triton.jit
def _rows(x, t, live, head, column, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Load some columns of a head's rows of an array (tokens, HEADS, SIZE)."""
    at = x + (t * HEADS + head)[:, None] * SIZE + column[None, :]
    return tl.load(at, mask=live[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _store_rows(x, value, t, live, head, column, HEADS: tl.constexpr, SIZE: tl.constexpr):
    at = x + (t * HEADS + head)[:, None] * SIZE + column[None, :]
    mask = live[:, None] & (column < SIZE)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _tile(states, row, head, key, value, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Return pointers to a part of a state in an array (rows, HV, K, V)."""
    return states + (row * HV + head) * (K * V) + key.to(tl.int64)[:, None] * V + value[None, :]


@triton.jit
def _state(states, row, live, head, key, value, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Load a part of a chunk's state."""
    there = ((key < K) & live)[:, None] & (value < V)[None, :]
    return tl.load(_tile(states, row, head, key, value, HV, K, V), mask=there, other=0.0)


@triton.jit
def _gates(gates, t, live, first, end, head, HV: tl.constexpr):
    """Load a chunk's γ, and the last one, which tokens past the end have too."""
    total = tl.load(gates + (end - 1) * HV + head, mask=first < end, other=0.0)
    return tl.where(live, tl.load(gates + t * HV + head, mask=live, other=0.0), total), total


@triton.jit
def _decays(passed, i, TRANSPOSED: tl.constexpr, FLOAT: tl.constexpr):
    """Return Γ of differences of γ, or its transpose; the other triangle is zero."""
    row, column = i[:, None], i[None, :]
    inside = row <= column if TRANSPOSED else row >= column
    # Infinity before the exponential, which would overflow for tokens to come.
    return tl.exp(tl.where(inside, passed, float("-inf")).to(FLOAT))


@triton.jit
def _add(a, b, total, PRECISION: tl.constexpr):
    """Return the product of two matrices plus a third one."""
    return tl.dot(a, b, total, PRECISION, out_dtype=total.dtype)


@triton.jit
def _inverse(matrix, i, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a triangular matrix, but for its diagonal.

    Blocks on the diagonal are inverted, of 2, 4, ... rows, each from two inverted blocks.
    """
    row, column = i[:, None], i[None, :]
    inverse = tl.where(row == column, 1.0, 0.0).to(matrix.dtype)
    LEVELS: tl.constexpr = SIZE.bit_length() - 1
    for level in tl.static_range(LEVELS):
        part = tl.where((row >> level) ^ (column >> level) == 1, matrix, 0.0)
        if level == 0:
            inverse -= part
        else:
            part = tl.dot(inverse, part, input_precision=PRECISION)
            inverse -= tl.dot(part, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _gate(g, live, FLOAT: tl.constexpr):
    """Load gates; one below the least number's logarithm would swallow others in a sum."""
    value = tl.load(g, mask=live, other=0.0).to(FLOAT)
    return tl.where(value < LEAST, LEAST, value)


def solve(
    q, k, g, beta, starts, chunks, gates, solved, mixed,
    sequences, tokens,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FLOAT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write γ and (1 + O β)⁻¹; or (1 + Oᵀ β)⁻¹, and its product with scale (q kᵀ Γ)ᵀ.

    t are the tokens of the chunk's first half, u those of its second.
    """
    H: tl.constexpr = HV // GROUP
    HALF: tl.constexpr = C // 2
    BACK: tl.constexpr = mixed is not None
    head = (tl.program_id(0) % HV).to(tl.int64)
    number = (tl.program_id(0) // HV).to(tl.int64)
    first, end, _ = _chunk(number, starts, chunks, sequences, tokens, C, PARTS)
    i = tl.arange(0, HALF)
    t, u = first + i, first + HALF + i
    t_live, u_live = t < end, u < end
    t_gamma = _gate(g + t * HV + head, t_live, gates.dtype.element_ty)
    u_gamma = _gate(g + u * HV + head, u_live, gates.dtype.element_ty)
    u_gamma = tl.cumsum(u_gamma, 0) + tl.sum(t_gamma, 0)
    t_gamma = tl.cumsum(t_gamma, 0)
    tl.store(gates + t * HV + head, t_gamma, mask=t_live)
    tl.store(gates + u * HV + head, u_gamma, mask=u_live)
    t_beta = tl.load(beta + t * HV + head, mask=t_live, other=0.0).to(FLOAT)
    u_beta = tl.load(beta + u * HV + head, mask=u_live, other=0.0).to(FLOAT)
    # Rows are earlier tokens than columns in the transpose, and later ones without it.
    if BACK:
        t_decays = _decays(t_gamma[None, :] - t_gamma[:, None], i, True, FLOAT)
        u_decays = _decays(u_gamma[None, :] - u_gamma[:, None], i, True, FLOAT)
        decays = tl.exp((u_gamma[None, :] - t_gamma[:, None]).to(FLOAT))
    else:
        t_decays = _decays(t_gamma[:, None] - t_gamma[None, :], i, False, FLOAT)
        u_decays = _decays(u_gamma[:, None] - u_gamma[None, :], i, False, FLOAT)
        decays = tl.exp((u_gamma[:, None] - t_gamma[None, :]).to(FLOAT))
    of_t, of_u = tl.zeros([HALF, HALF], FLOAT), tl.zeros([HALF, HALF], FLOAT)
    of_both = tl.zeros([HALF, HALF], FLOAT)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        t_keys = _rows(k, t, t_live, head // GROUP, key, H, K).to(DOT)
        u_keys = _rows(k, u, u_live, head // GROUP, key, H, K).to(DOT)
        of_t = _add(t_keys, tl.trans(t_keys), of_t, PRECISION)
        of_u = _add(u_keys, tl.trans(u_keys), of_u, PRECISION)
        if BACK:
            of_both = _add(t_keys, tl.trans(u_keys), of_both, PRECISION)
        else:
            of_both = _add(u_keys, tl.trans(t_keys), of_both, PRECISION)
    of_t = _inverse(of_t * t_decays * t_beta[None, :], i, HALF, PRECISION)
    of_u = _inverse(of_u * u_decays * u_beta[None, :], i, HALF, PRECISION)
    if BACK:
        of_both = tl.dot(of_both * decays * u_beta[None, :], of_u, input_precision=PRECISION)
        of_both = -tl.dot(of_t, of_both, input_precision=PRECISION)
    else:
        of_both = tl.dot(of_both * decays * t_beta[None, :], of_t, input_precision=PRECISION)
        of_both = -tl.dot(of_u, of_both, input_precision=PRECISION)
    _store_blocks(solved, of_t, of_u, of_both, t, u, t_live, u_live, head, i, HV, C, BACK)
    if BACK:
        t_mixed, u_mixed = tl.zeros([HALF, HALF], FLOAT), tl.zeros([HALF, HALF], FLOAT)
        both = tl.zeros([HALF, HALF], FLOAT)
        for start in range(0, K, KEYS):
            key = start + tl.arange(0, KEYS)
            t_keys = _rows(k, t, t_live, head // GROUP, key, H, K).to(DOT)
            u_keys = _rows(k, u, u_live, head // GROUP, key, H, K).to(DOT)
            t_queries = tl.trans(_rows(q, t, t_live, head // GROUP, key, H, K).to(DOT))
            u_queries = tl.trans(_rows(q, u, u_live, head // GROUP, key, H, K).to(DOT))
            t_mixed = _add(t_keys, t_queries, t_mixed, PRECISION)
            u_mixed = _add(u_keys, u_queries, u_mixed, PRECISION)
            both = _add(t_keys, u_queries, both, PRECISION)
        of_t, of_u, of_both = of_t.to(DOT), of_u.to(DOT), of_both.to(DOT)
        t_mixed = (SCALE * t_mixed * t_decays).to(DOT)
        u_mixed = (SCALE * u_mixed * u_decays).to(DOT)
        both = tl.dot(of_t, (SCALE * both * decays).to(DOT), input_precision=PRECISION)
        both = _add(of_both, u_mixed, both, PRECISION)
        t_mixed = tl.dot(of_t, t_mixed, input_precision=PRECISION)
        u_mixed = tl.dot(of_u, u_mixed, input_precision=PRECISION)
        _store_blocks(mixed, t_mixed, u_mixed, both, t, u, t_live, u_live, head, i, HV, C, BACK)


@triton.jit
def _store_blocks(
    matrix, of_t, of_u, of_both, t, u, t_live, u_live, head, i,
    HV: tl.constexpr, C: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Store a triangular matrix of two halves of a chunk."""
    HALF: tl.constexpr = C // 2
    nothing = tl.zeros([HALF, HALF], of_t.dtype)
    _store_rows(matrix, of_t, t, t_live, head, i, HV, C)
    _store_rows(matrix, of_u, u, u_live, head, HALF + i, HV, C)
    if UPPER:
        _store_rows(matrix, of_both, t, t_live, head, HALF + i, HV, C)
        _store_rows(matrix, nothing, u, u_live, head, i, HV, C)
    else:
        _store_rows(matrix, of_both, u, u_live, head, i, HV, C)
        _store_rows(matrix, nothing, t, t_live, head, HALF + i, HV, C)


def prepare(
    k, x, gates, starts, chunks, solved, mixed, response, found,
    sequences, tokens,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FLOAT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write m without a state, x being v, or w, x being dout; and the response to a state."""
    H: tl.constexpr = HV // GROUP
    _, head, first, end, _, t, live = _tokens(starts, chunks, sequences, tokens, 1, HV, C, PARTS)
    i = tl.arange(0, C)
    gamma, total = _gates(gates, t, live, first, end, head, HV)
    since, rest = tl.exp(gamma.to(FLOAT)), tl.exp((total - gamma).to(FLOAT))
    factor = rest if mixed is not None else -since
    matrix = _rows(solved, t, live, head, i, HV, C).to(DOT)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        keys = factor[:, None] * _rows(k, t, live, head // GROUP, key, H, K).to(FLOAT)
        rows = tl.dot(matrix, keys.to(DOT), input_precision=PRECISION)
        _store_rows(response, rows, t, live, head, key, HV, K)
    if mixed is not None:
        matrix = _rows(mixed, t, live, head, i, HV, C).to(DOT)
    for start in range(0, V, VALUES):
        value = start + tl.arange(0, VALUES)
        rows = _rows(x, t, live, head, value, HV, V).to(DOT)
        rows = tl.dot(matrix, rows, input_precision=PRECISION)
        _store_rows(found, rows, t, live, head, value, HV, V)


def walk(
    q, k, dout, gates, beta, response, found, given, starts, states, final,
    tokens,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    C: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr,
    FLOAT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk along a sequence with columns of its state, and add the state's part to m.

    With dout the walk goes back with the state's cotangent, and adds its part to w. States are kept
    as the walk enters chunks. STEPS chunks are given to the interpreter, which can't turn a number
    into a range.
    """
    H: tl.constexpr = HV // GROUP
    TILES: tl.constexpr = (V + VALUES - 1) // VALUES
    key = tl.arange(0, KEYS)
    value = VALUES * (tl.program_id(0) % TILES) + tl.arange(0, VALUES)
    head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    sequence = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    batch, begin, end = sequence_of(sequence, starts, tokens)
    begin += batch * tokens
    end += batch * tokens
    there = (key < K)[:, None] & (value < V)[None, :]
    S = tl.zeros([KEYS, VALUES], FLOAT)
    if given is not None:
        first_state = _tile(given, sequence, head, key, value, HV, K, V)
        S = tl.load(first_state, mask=there, other=0.0).to(FLOAT)
    count = tl.cdiv(end - begin, C)
    i = tl.arange(0, C)
    for step in range(count if STEPS is None else STEPS):
        number = step if dout is None else count - 1 - step
        first = begin + number * C
        t = first + i
        live = (t >= begin) & (t < end)
        if states is not None:
            entered = _tile(states, begin // C + sequence + number, head, key, value, HV, K, V)
            inside = there & (number >= 0) & (number < count)
            tl.store(entered, S.to(states.dtype.element_ty), mask=inside)
        stop = tl.minimum(first + C, end)
        gamma, total = _gates(gates, t, live, tl.maximum(first, begin), stop, head, HV)
        b = tl.load(beta + t * HV + head, mask=live, other=0.0).to(FLOAT)
        rows = _rows(found, t, live, head, value, HV, V).to(FLOAT)
        across = _rows(response, t, live, head, key, HV, K).to(DOT)
        rows += tl.dot(across, S.to(DOT), input_precision=PRECISION)
        _store_rows(found, rows, t, live, head, value, HV, V)
        since, rest = tl.exp(gamma.to(FLOAT)), tl.exp((total - gamma).to(FLOAT))
        factor = b * rest if dout is None else -b * since
        rows = (factor[:, None] * rows).to(DOT)
        keys = _rows(k, t, live, head // GROUP, key, H, K).to(DOT)
        S = _add(tl.trans(keys), rows, S * tl.exp(total.to(FLOAT)), PRECISION)
        if dout is not None:
            rows = _rows(dout, t, live, head, value, HV, V).to(FLOAT)
            rows = (SCALE * since[:, None] * rows).to(DOT)
            queries = _rows(q, t, live, head // GROUP, key, H, K).to(DOT)
            S = _add(tl.trans(queries), rows, S, PRECISION)
    if final is not None:
        last_state = _tile(final, sequence, head, key, value, HV, K, V)
        tl.store(last_state, S.to(final.dtype.element_ty), mask=there)


def read(
    q, k, gates, beta, missed, states, starts, chunks, out,
    sequences, tokens,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FLOAT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the values that a chunk's tokens read, some columns of them."""
    H: tl.constexpr = HV // GROUP
    TILES: tl.constexpr = (V + VALUES - 1) // VALUES
    tile, head, first, end, row, t, live = _tokens(
        starts, chunks, sequences, tokens, TILES, HV, C, PARTS
    )
    i, value = tl.arange(0, C), VALUES * tile + tl.arange(0, VALUES)
    # Transposed, as all products here: see the module's docstring.
    across, attention = tl.zeros([VALUES, C], FLOAT), tl.zeros([C, C], FLOAT)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        queries = tl.trans(_rows(q, t, live, head // GROUP, key, H, K).to(DOT))
        keys = _rows(k, t, live, head // GROUP, key, H, K).to(DOT)
        S = _state(states, row, first < end, head, key, value, HV, K, V)
        across = _add(tl.trans(S.to(DOT)), queries, across, PRECISION)
        attention = _add(keys, queries, attention, PRECISION)
    gamma, _ = _gates(gates, t, live, first, end, head, HV)
    b = tl.load(beta + t * HV + head, mask=live, other=0.0).to(FLOAT)
    decays = b[:, None] * _decays(gamma[None, :] - gamma[:, None], i, True, FLOAT)
    attention = (attention * decays).to(DOT)
    rows = tl.trans(_rows(missed, t, live, head, value, HV, V).to(DOT))
    across *= tl.exp(gamma.to(FLOAT))[None, :]
    rows = _add(rows, attention, across, PRECISION)
    _store_rows(out, SCALE * tl.trans(rows), t, live, head, value, HV, V)


def gradients(
    q, k, gates, beta, dout, missed, pulled, states, dstates, starts, chunks,
    dq, dk, dv, dg, dbeta,
    sequences, tokens,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FLOAT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a chunk's cotangents; dq and dk of every head of v."""
    H: tl.constexpr = HV // GROUP
    _, head, first, end, row, t, live = _tokens(starts, chunks, sequences, tokens, 1, HV, C, PARTS)
    i = tl.arange(0, C)
    gamma, total = _gates(gates, t, live, first, end, head, HV)
    b = tl.load(beta + t * HV + head, mask=live, other=0.0).to(FLOAT)
    dattention, doverlap = tl.zeros([C, C], FLOAT), tl.zeros([C, C], FLOAT)
    db = tl.zeros([C], FLOAT)
    for start in range(0, V, VALUES):
        value = start + tl.arange(0, VALUES)
        do = _rows(dout, t, live, head, value, HV, V).to(DOT)
        m = _rows(missed, t, live, head, value, HV, V).to(DOT)
        w = _rows(pulled, t, live, head, value, HV, V).to(DOT)
        dattention = _add(do, tl.trans(m), dattention, PRECISION)
        doverlap = _add(w, tl.trans(m), doverlap, PRECISION)
        w = w.to(FLOAT)
        db += tl.sum(m.to(FLOAT) * w, 1)
        if dv is not None:
            _store_rows(dv, b[:, None] * w, t, live, head, value, HV, V)
    if dbeta is not None:
        tl.store(dbeta + t * HV + head, db.to(dbeta.dtype.element_ty), mask=live)
    decays = b[None, :] * _decays(gamma[:, None] - gamma[None, :], i, False, FLOAT)
    dattention = (SCALE * dattention * decays).to(DOT)
    doverlap = -b[:, None] * doverlap * decays
    doverlap = tl.where(i[:, None] == i[None, :], 0.0, doverlap).to(DOT)
    since = tl.exp(gamma.to(FLOAT))[None, :]
    rest = (b * tl.exp((total - gamma).to(FLOAT)))[None, :]
    # Cotangents of γ, and of its last.
    dgamma, dlast, dtotal = tl.zeros([C], FLOAT), tl.zeros([C], FLOAT), tl.zeros([KEYS], FLOAT)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        # Transposed, as all products here: see the module's docstring.
        from_state = tl.zeros([KEYS, C], FLOAT)
        known, written = tl.zeros([KEYS, C], FLOAT), tl.zeros([KEYS, C], FLOAT)
        for start_of_values in range(0, V, VALUES):
            value = start_of_values + tl.arange(0, VALUES)
            do = _rows(dout, t, live, head, value, HV, V).to(DOT)
            m = _rows(missed, t, live, head, value, HV, V).to(DOT)
            w = _rows(pulled, t, live, head, value, HV, V).to(DOT)
            S = _state(states, row, first < end, head, key, value, HV, K, V)
            dS = _state(dstates, row, first < end, head, key, value, HV, K, V)
            dtotal += tl.sum(S.to(FLOAT) * dS.to(FLOAT), 1)
            from_state = _add(S.to(DOT), tl.trans(do), from_state, PRECISION)
            known = _add(S.to(DOT), tl.trans(w), known, PRECISION)
            written = _add(dS.to(DOT), tl.trans(m), written, PRECISION)
        queries = tl.trans(_rows(q, t, live, head // GROUP, key, H, K).to(DOT))
        keys = tl.trans(_rows(k, t, live, head // GROUP, key, H, K).to(DOT))
        found = _add(keys, tl.trans(dattention), SCALE * since * from_state, PRECISION)
        dgamma += tl.sum(queries.to(FLOAT) * found, 0)
        if dq is not None:
            _store_rows(dq, tl.trans(found), t, live, head, key, HV, K)
        written *= rest
        dlast += tl.sum(keys.to(FLOAT) * written, 0)
        written = _add(queries, dattention, written, PRECISION)
        written = _add(keys, doverlap, written, PRECISION)
        known = _add(keys, tl.trans(doverlap), -b[None, :] * since * known, PRECISION)
        dgamma += tl.sum(keys.to(FLOAT) * (known - written), 0)
        if dk is not None:
            _store_rows(dk, tl.trans(written + known), t, live, head, key, HV, K)
    if dg is not None:
        last = tl.sum(dlast, 0) + tl.exp(total.to(FLOAT)) * tl.sum(dtotal, 0)
        found = tl.cumsum(dgamma, 0, reverse=True) + last
        tl.store(dg + t * HV + head, found.to(dg.dtype.element_ty), mask=live)
