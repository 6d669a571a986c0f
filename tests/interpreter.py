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
    interpreter._patch_attr = _bind
    # Numbers of a handle have its type, which it would compare.
    interpreter.TensorHandle.__post_init__ = lambda handle: None
    _keep_shapes()
    _keep_types()


def _bind(language, name, function, builder, scope):
    """Let the interpreter serve a function of Triton's language."""
    scope.set_attr(language, name, _bound(function))


#: Operators that would call the language's functions of these names.
_ARITHMETIC = {"tensor.__add__": "add", "tensor.__sub__": "sub", "tensor.__mul__": "mul"}


@functools.cache
def _bound(function):
    """Return the function with the interpreter's semantic, which Triton's wrapper only asks for."""
    from triton.language import core
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(function, "__wrapped__", function)
    if function.__qualname__ in _ARITHMETIC:
        compute = getattr(interpreter_semantic, _ARITHMETIC[function.__qualname__])
        # The last argument asks for no check of overflows.
        return lambda lhs, rhs: compute(lhs, core._unwrap_if_constexpr(rhs), False)

    def call(*args, _semantic=None, **options):
        return function(*args, _semantic=interpreter_semantic, **options)

    return call


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

    blocks, shapes = {}, {}
    block, tensor, equal = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def plain(shape):
        return [size.value if isinstance(size, core.constexpr) else size for size in shape]

    def shape_of(sizes, kind):
        """Return the shape and the number of elements of all tensors of these sizes."""
        if sizes not in shapes:
            made = object.__new__(core.tensor)
            tensor(made, None, kind)
            shapes[sizes] = made.shape, made.numel
        return shapes[sizes]

    def of_block(self, element_ty, shape):
        key = element_ty.name, tuple(plain(shape))
        if key not in blocks:
            block(self, element_ty, shape)
            self.of_tensors, self.with_elements = shape_of(key[1], self), {}
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    scalar = shape_of((), core.int32)

    def of_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = vars(type).get("of_tensors", scalar)

    def equals(self, other):
        if isinstance(other, (list, core.tuple)):
            return core.constexpr(plain(self) == plain(other))
        return equal(self, other)

    def alike(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def with_element(self, element_ty):
        kinds = self.with_elements
        if element_ty.name not in kinds:
            kinds[element_ty.name] = core.block_type(element_ty, self.shape)
        return kinds[element_ty.name]

    core.block_type.__init__, core.block_type.with_element_ty = of_block, with_element
    core.tensor.__init__, core.tuple.__eq__ = of_tensor, equals
    # The interpreter's types are those of the language.
    core.block_type.to_ir = lambda self, builder: self
    semantic.TritonSemantic.broadcast_impl_value = alike


def _keep_types() -> None:
    """Let operands of one type be as they are, and make each constant once."""
    import numpy as np
    from triton.language import core, semantic
    from triton.runtime.interpreter import TensorHandle

    tensor, semantics = core.tensor, semantic.TritonSemantic
    check, convert = semantics.binary_op_type_checking_impl, semantics.to_tensor
    unwrap = core._unwrap_if_constexpr
    floats, integers = {"fp32", "fp64"}, {"int32", "int64"}
    numbers = floats | integers
    plain = numbers | {"int1"}
    unwrapped = {tensor, int, float, bool, str, type(None), core.dtype}
    constants = {}

    def constant(self, value, like):
        sizes = tuple(like.type.shape.values) if like.type.is_block() else ()
        # 0.0 and -0.0 are equal.
        key = repr(value), like.dtype.name, sizes
        if key not in constants:
            made = self.broadcast_impl_value(like, self.scalar_constant(value, like.dtype))[1]
            made.handle.data.flags.writeable = False
            constants[key] = made
        return constants[key]

    def operands(self, lhs, rhs):
        """Give operands one shape; NumPy broadcasts a scalar's number by itself."""
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block() and lhs.type.is_block():
            return lhs, tensor(rhs.handle, lhs.type.with_element_ty(rhs.dtype))
        if not lhs.type.is_block() and rhs.type.is_block():
            return tensor(lhs.handle, rhs.type.with_element_ty(lhs.dtype)), rhs
        return self.broadcast_impl_value(lhs, rhs)

    def suits(value, operand):
        """Return whether a number takes a tensor's type, without a check of its range."""
        if type(operand) is not tensor:
            return False
        name = operand.dtype.name
        return (name in floats and type(value) in (int, float)) or (
            name in integers and type(value) is int and abs(value) < 2**31
        )

    def checked(self, lhs, rhs, *options, **named):
        if type(lhs) is tensor and type(rhs) is tensor:
            kind, other = lhs.dtype, rhs.dtype.name
            moved = options[:1] == (True,) and other in integers and kind.is_ptr()
            if moved or (kind.name == other and other in plain):
                return operands(self, lhs, rhs)
        elif suits(rhs, lhs):
            return lhs, constant(self, rhs, lhs)
        elif suits(lhs, rhs):
            return constant(self, lhs, rhs), rhs
        return check(self, lhs, rhs, *options, **named)

    def computed(name, compute):
        """Return an operation of numbers by NumPy at once; pointers and other types go its way."""
        genuine = getattr(semantics, name)

        def by(self, lhs, rhs, *options, **named):
            lhs, rhs = checked(self, lhs, rhs, True, True)
            if lhs.dtype.name in numbers:
                data = compute(lhs.handle.data, rhs.handle.data)
                return tensor(TensorHandle(data, lhs.dtype), lhs.type)
            return genuine(self, lhs, rhs, *options, **named)

        return by

    def to_tensor(self, x, check_type=True):
        return x if type(x) is tensor else convert(self, x, check_type)

    semantics.binary_op_type_checking_impl, semantics.to_tensor = checked, to_tensor
    for name, compute in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        setattr(semantics, name, computed(name, compute))
    core._unwrap_if_constexpr = lambda x: x if type(x) in unwrapped else unwrap(x)
