"""Triton's interpreter without what it does again and again: half of the time of these tests.

At each call of a jitted function it looks through all of triton.language for what it has to replace, which inside of a kernel is
replaced already; it makes a table of types for each type that it looks up; it computes sums and products of integers twice, to
assert that none overflows, and then does not assert it, as that is for a debugging mode; and it folds values that a kernel reduces by a
function of its own one after the other, where hardware takes halves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """From now on, in this process."""
    patch, lookup, patch_all = interpreter._patch_builtin, interpreter._get_np_dtype, interpreter._patch_lang
    replaced: dict[Any, str] = {}  # of each package, a name that the interpreter replaces
    modules: dict[int, list[Any]] = {}
    known: dict[Any, Any] = {}

    def patch_once(package: Any, builder: Any, scope: Any) -> None:
        name = replaced.get(package)
        if name is not None and not tl.core.is_builtin(getattr(package, name)):
            return  # and will be put back by the scope that replaced it
        if name is None:
            names = (name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None)))
            replaced[package] = next(names, "__name__")
        patch(package, builder, scope)

    def known_dtype(kind: Any) -> Any:
        kind = kind.scalar
        if isinstance(kind, tl.pointer_type):
            return lookup(kind)
        if kind not in known:
            known[kind] = lookup(kind)
        return known[kind]

    def patch_new(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in modules:
            modules[id(names)] = [x for x in names.values() if x is tl or x is tl.core]
        if all(module.static_print is print for module in modules[id(names)]):
            return interpreter._LangPatchScope()  # and will be put back by the scope of the kernel
        return patch_all(function)

    interpreter._patch_lang = patch_new
    interpreter._patch_builtin = patch_once
    interpreter._get_np_dtype = known_dtype
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are asserted: let them be computed"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = _reduce
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)  # below Triton 3.7 by int(), which NumPy 2.5 refuses of an array with one element
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index


def _reduce(self: Any, inputs: Any) -> list[Any]:
    """All along an axis by `combine_fn`, halves by halves."""
    values = [x.handle.data for x in inputs]
    axis = self.axis
    if axis is None:
        values, axis = [value.reshape(-1) for value in values], 0
    while (size := values[0].shape[axis]) > 1:
        halves = [np.split(value, 2, axis) for value in values]
        halves = [self.to_tensor(half[i], x.dtype) for i in range(2) for half, x in zip(halves, inputs, strict=True)]
        found = self.combine_fn.fn(*halves)
        values = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
        assert values[0].shape[axis] == size // 2
    if not self.keep_dims:
        values = [value.squeeze(axis) for value in values]
    elif self.axis is None:
        values = [value.reshape([1] * len(inputs[0].shape)) for value in values]
    return [self.to_tensor(value, x.dtype) for value, x in zip(values, inputs, strict=True)]
