"""Launches Triton kernels with little overhead."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.runtime import driver

from fusedops._ahead import ahead, compilers
from fusedops._frame.check import promoted
from gpukern import tape

#: Versions of Triton whose Gluon compiles our kernels. Gluon is experimental: another version may
#: have another Gluon, or none.
GLUON = "3.6", "3.7", "3.8", "3.9"

# Bytes of shared memory that large tiles take. H100 and B200 have 227 KiB, A100 has 163, and other
# GPUs have 99.
_SHARED = 210 << 10


def has_gluon() -> bool:
    """Return whether this Triton's Gluon compiles our kernels."""
    return ".".join(triton.__version__.split(".")[:2]) in GLUON


def kernel_of_any_size(function: Any, aligned: Sequence[str] = (), jit: Any = triton.jit) -> Any:
    """Compile a function for all sizes and alignments, which change from call to call.

    The pointers named in `aligned` are multiples of 16 bytes in every call. `jit` may be Gluon's.
    """
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation is inspect.Parameter.empty and name not in aligned
    ]
    return jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def wide(*integers: int) -> tuple[bool, ...]:
    """Return, for a key, which arguments a kernel takes in 64 bits."""
    return tuple([not -(2**31) <= n < 2**31 for n in integers])


def power(n: int, least: int = 1) -> int:
    """Return the power of 2 that is at least n and `least`.

    Triton's own function takes 30 µs, as it serves kernels too.
    """
    return max(least, 1 << (n - 1).bit_length())


def begin_vectors(arrays: Sequence[Any]) -> bool:
    """Return whether a kernel may be compiled for arrays that begin with a vector of 16 bytes."""
    aligned = not any([array is not None and array.data_ptr() % 16 for array in arrays])
    # On HIP, specializing a pointer fixes more than its alignment.
    return aligned and torch.version.hip is None


@functools.cache
def processors(device: Any) -> int:
    """Return the number of multiprocessors; two for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_small(device: Any) -> bool:
    """Return whether a GPU has less shared memory for a program than large tiles take."""
    if device.type != "cuda":
        return False
    found = driver.active.utils.get_device_properties(device.index)
    return bool(found["max_shared_mem"] < _SHARED)


def rows_of(array: Any) -> Any:
    """Return a tensor with contiguous rows of edges or nodes, a copy where they aren't."""
    if array is None:
        return None
    inner = array[0] if array.shape[0] else array
    return array if inner.is_contiguous() else array.contiguous()


def in_one_dtype(kernel: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Have a kernel compute in the dtype to which the arrays promote."""

    def run(a: Any, y: Any) -> None:
        arrays = [value for value in a if isinstance(value, torch.Tensor)]
        dtype = promoted(arrays)
        outputs = [out for out in y if out is not None]
        if all([array.dtype == dtype for array in (*arrays, *outputs)]):
            kernel(a, y)
            return
        made = [out if out is None else torch.empty_like(out, dtype=dtype) for out in y]
        cast = [value.to(dtype) if isinstance(value, torch.Tensor) else value for value in a]
        kernel(a._make(cast), y._make(made))
        for out, value in zip(y, made, strict=True):
            if out is not None:
                out.copy_(value)

    return run


class Launcher:
    """A Triton kernel whose compiled forms are found by a short key.

    Triton's own launch works out a specialization from every argument, which takes longer than a
    small kernel does. The kernels here specialize on nothing but pointer types, the width of
    integers, and constants, so that a key of those finds the compiled form.
    """

    def __init__(
        self, kernel: Any, warps: int, registers: int | None = None, stages: int | None = None
    ) -> None:
        self.kernel = kernel
        self.options = {"num_warps": warps}
        if stages is not None:
            self.options["num_stages"] = stages
        # Only NVIDIA's compiler takes a limit.
        if registers is not None and torch.version.cuda is not None:
            self.options["maxnreg"] = registers
        # This needs no bound, as Triton keeps every compiled kernel too: keys hold numbers that a
        # model fixes, such as channels and degrees, and no size that changes from call to call.
        self._compiled: dict[Any, Any] = {}

    def __call__(self, programs: int, key: tuple[Any, ...], *args: Any) -> None:
        """Launch `programs` of the kernel; `key` holds all that `args` may be compiled for."""
        compiled = self._compiled.get(key)
        if compiled is None:
            threads = ahead(_device(args)) if self.is_new(key) else None
            if threads is not None:
                given = tuple(map(_without_memory, args))
                threads.begin((id(self), key), lambda: self.compile(given))
                return
            # It stays None under TRITON_INTERPRET=1, where there is nothing to compile.
            compiled = self._compiled[key] = self.kernel[(programs,)](*args, **self.options)
        else:
            compiled[(programs, 1, 1)](*args)
        recorder = tape.recording()
        if recorder is not None:
            recorder.launch(compiled, programs, args)

    def is_new(self, key: tuple[Any, ...]) -> bool:
        """Return whether the next launch compiles; nothing does under TRITON_INTERPRET=1."""
        return key not in self._compiled and isinstance(self.kernel, triton.JITFunction)

    def compile(self, args: Sequence[Any]) -> None:
        """Compile the form for arguments, and its launcher, for the next launch to find."""
        # Triton keeps kernels by the thread's device, and makes a launcher when it is asked for.
        with torch.cuda.device(_device(args)):
            _ = self.kernel.warmup(*args, grid=(1,), **self.options).run


def _device(args: Sequence[Any]) -> Any:
    return next(value.device for value in args if isinstance(value, torch.Tensor))


def _without_memory(value: Any) -> Any:
    """Return an argument for which a kernel is compiled alike, and which keeps no memory."""
    if isinstance(value, torch.Tensor):
        return value.new_empty(0)
    if hasattr(value, "block_shape"):
        return dataclasses.replace(value, base=value.base.new_empty(0))
    return value


#: A launch to come: the kernel, the number of programs, the key, and the arguments.
Launch = tuple[Launcher, int, tuple[Any, ...], tuple[Any, ...]]


def launch_all(launches: Sequence[Launch]) -> None:
    """Launch kernels one after the other, but compile the new ones side by side before."""
    new = [(kernel, args) for kernel, _, key, args in launches if kernel.is_new(key)]
    if len(new) > 1 and ahead(_device(new[0][1])) is None:
        with compilers() as threads:
            for _ in threads.map(lambda launch: launch[0].compile(launch[1]), new):
                pass
    for kernel, programs, key, args in launches:
        kernel(programs, key, *args)
