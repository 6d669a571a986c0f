"""Structure factors from the half spectrum of a map, and their adjoint, on the GPU.

A program of the first takes some reflections, and walks over the equivalents of each; one of the
second takes some places of the spectrum, and sums the waves that each holds in their order. So
neither is atomic. Bytes: of each equivalent the place, the factor and the value, once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from fusedops._frame.registry import register
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Reflections, or places, of a program.
_BLOCK = 128


def _gather(
    spectrum, factors, at, out, count, operations, size, BLOCK: tl.constexpr, FLOAT: tl.constexpr
):  # fmt: skip
    """Write the sums over equivalents of a factor times a value of the spectrum."""
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = m < count
    real, imaginary = tl.zeros((BLOCK,), FLOAT), tl.zeros((BLOCK,), FLOAT)
    k = 0
    while k < operations:
        e = k * count + m
        place = tl.load(at + e, mask=own, other=0)
        mated = place >= 0
        place = tl.where(mated, place, -1 - place)
        live = own & (place < size)
        s = tl.load(spectrum + 2 * place, mask=live, other=0.0).to(FLOAT)
        t = tl.load(spectrum + 2 * place + 1, mask=live, other=0.0).to(FLOAT)
        t = tl.where(mated, -t, t)
        f = tl.load(factors + 2 * e, mask=own, other=0.0)
        g = tl.load(factors + 2 * e + 1, mask=own, other=0.0)
        real += f * s - g * t
        imaginary += f * t + g * s
        k += 1
    tl.store(out + 2 * m, real.to(out.dtype.element_ty), mask=own)
    tl.store(out + 2 * m + 1, imaginary.to(out.dtype.element_ty), mask=own)


def _spread(
    dF, factors, waves, wave_at, begin, out, places, length, count, operations, size,
    BLOCK: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Write the sums of the waves at places, halves of conjugated factors times cotangents."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = p < places
    first = tl.maximum(tl.load(begin + p, mask=own, other=0), 0)
    held = tl.minimum(tl.load(begin + p + 1, mask=own, other=0), length) - first
    place = tl.load(wave_at + first, mask=own & (held > 0), other=-1)
    real, imaginary = tl.zeros((BLOCK,), FLOAT), tl.zeros((BLOCK,), FLOAT)
    most = tl.max(held, axis=0)
    at = 0
    while at < most:
        live = at < held
        wave = tl.load(waves + first + at, mask=live, other=0)
        mate = wave >= operations * count
        e = tl.where(mate, wave - operations * count, wave)
        live = live & (e >= 0) & (e < operations * count)
        f = tl.load(factors + 2 * e, mask=live, other=0.0)
        g = tl.load(factors + 2 * e + 1, mask=live, other=0.0)
        m = e % count
        s = tl.load(dF + 2 * m, mask=live, other=0.0).to(FLOAT)
        t = tl.load(dF + 2 * m + 1, mask=live, other=0.0).to(FLOAT)
        real += f * s + g * t
        turned = f * t - g * s
        imaginary += tl.where(mate, turned, -turned)
        at += 1
    live = (place >= 0) & (place < size)
    tl.store(out + 2 * place, (0.5 * real).to(out.dtype.element_ty), mask=live)
    tl.store(out + 2 * place + 1, (0.5 * imaginary).to(out.dtype.element_ty), mask=live)


_gathers = Launcher(kernel_of_any_size(_gather), 4)
_spreads = Launcher(kernel_of_any_size(_spread), 4)


def _read(x: Any, reflections: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the fields, the factors in the precision of an array, and a kernel's constants."""
    fields = reflections.tensors_here()
    double = x.dtype == torch.float64
    factors = fields.factors if double else fields.single
    return fields, factors, (_BLOCK, tl.float64 if double else tl.float32)


@register("spectrum_to_factors", "triton")
def spectrum_to_factors(a: Any, y: Any) -> None:
    spectrum, reflections = a
    fields, factors, constants = _read(spectrum, reflections)
    operations, count, _ = factors.shape
    if not count:
        return
    integers = count, operations, len(spectrum)
    key = spectrum.device, spectrum.dtype, wide(*integers), constants
    arrays = spectrum.contiguous(), factors, fields.at, y.factors
    _gathers(-(-count // _BLOCK), key, *arrays, *integers, *constants)


@register("factors_to_spectrum", "triton")
def factors_to_spectrum(a: Any, y: Any) -> None:
    dF, reflections = a
    fields, factors, constants = _read(dF, reflections)
    operations, count, _ = factors.shape
    spectrum, places = y.spectrum.zero_(), len(fields.begin) - 1
    if not places:
        return
    integers = places, len(fields.waves), count, operations, len(spectrum)
    key = dF.device, dF.dtype, wide(*integers), constants
    arrays = dF.contiguous(), factors, fields.waves, fields.wave_at, fields.begin, spectrum
    _spreads(-(-places // _BLOCK), key, *arrays, *integers, *constants)
