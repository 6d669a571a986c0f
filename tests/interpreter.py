"""Triton's interpreter, in a quarter of its time."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os


def hasten() -> None:
    """Let the interpreter skip useless work.

    Without this it patches its language anew whenever a kernel calls a function, computes whether
    integers overflow, which it never reports, and computes properties of types again and again.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # Another Triton, whose interpreter stays slow.
    builder = interpreter.interpreter_builder
    patched = set()
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def patch_once(function):
        if function.__module__ not in patched:
            patched.add(function.__module__)
            return patch(function)

    def restore_after_a_launch(scope):
        patched.clear()
        restore(scope)

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_after_a_launch
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    _keep_shapes()


def _once_a_name(function):
    """Return a function of a type that is computed once for all types of a name."""
    found = {}

    @functools.wraps(function)
    def of(kind):
        if kind.name not in found:
            found[kind.name] = function(kind)
        return found[kind.name]

    return of


def _keep_shapes() -> None:
    """Let blocks of one shape share it, and compare shapes without making another."""
    from triton.language import core, semantic

    blocks, tensors = {}, {}
    block, equal = core.block_type.__init__, core.tuple.__eq__
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def plain(shape):
        return [size.value if isinstance(size, core.constexpr) else size for size in shape]

    def of_block(self, element_ty, shape):
        key = element_ty.name, tuple(plain(shape))
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    def of_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        self.shape, self.numel = tensors[sizes]

    tensor, core.tensor.__init__ = core.tensor.__init__, of_tensor

    def equals(self, other):
        if isinstance(other, (list, core.tuple)):
            return core.constexpr(plain(self) == plain(other))
        return equal(self, other)

    def alike(self, lhs, rhs):
        shapes = [one.type.shape.values if one.type.is_block() else None for one in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tuple.__eq__ = of_block, equals
    semantic.TritonSemantic.broadcast_impl_value = alike
