"""Triton's interpreter, in half of its time."""

from __future__ import annotations

import dataclasses
import importlib.util
import os


def hasten() -> None:
    """Let the interpreter leave out what it does in vain.

    That is to patch its language anew whenever a kernel calls a function, and to compute whether
    integers overflow, of which it says nothing.
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
