"""Triton's interpreter without what it does again and again: two thirds of the time of these tests.

At each call of a jitted function it looks through all of triton.language for what it has to replace, which inside of a kernel is
replaced already; it makes a table of types for each type that it looks up; it computes sums and products of integers twice, to
assert that none overflows, and then does not assert it, as that is for a debugging mode; of each value and of each type of blocks it
makes anew what depends on the shape alone; it looks for a common type and shape of operands that have the same, and makes the same
blocks of a number again and again; and it folds values that a kernel reduces by a function of its own one after the other, where
hardware takes halves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_replaced: dict[Any, str] = {}  # of each package, a name that the interpreter replaces


def install() -> None:
    """From now on, in this process."""
    patch, lookup = interpreter._patch_builtin, interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def patch_once(package: Any, builder: Any, scope: Any) -> None:
        name = _replaced.get(package)
        if name is not None and not tl.core.is_builtin(getattr(package, name)):
            return  # and will be put back by the scope that replaced it
        if name is None:
            names = (name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None)))
            _replaced[package] = next(names, "__name__")
        patch(package, builder, scope)

    def known_dtype(kind: Any) -> Any:
        kind = kind.scalar
        if isinstance(kind, tl.pointer_type):
            return lookup(kind)
        if kind not in known:
            known[kind] = lookup(kind)
        return known[kind]

    patch_all, modules = interpreter._patch_lang, {}

    def patch_new(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in modules:
            modules[id(names)] = [x for x in names.values() if x is tl or x is tl.core]
        if all(module.static_print is print for module in modules[id(names)]):
            return interpreter._LangPatchScope()  # and will be put back by the scope of the kernel
        return patch_all(function)

    interpreter._patch_lang = patch_new
    interpreter._patch_attr = _patch_attr
    interpreter._patch_builtin = patch_once
    interpreter._get_np_dtype = known_dtype
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are asserted: let them be computed"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    tl.block_type.__init__ = _block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = _tensor
    interpreter.ReduceOps.generic_reduce = _reduce
    _take_operands_as_they_are()


SAME = {"fp32": float, "int32": int, "int64": int}
"""Types in which operands of one type are computed, and the numbers that become of that type beside them, by name of the type."""


def _take_operands_as_they_are() -> None:
    """Operands of one type and shape need no conversion; a number is made a block of the other operand's type and shape once."""
    find, broadcast, unwrap = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        tl.core._unwrap_if_constexpr,
    )
    numbers: dict[Any, Any] = {}

    def operands(self: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        first, second = type(left), type(right)
        if first is second is tl.tensor:
            if left.shape is right.shape and left.dtype is right.dtype and left.dtype.name in SAME:
                return left, right
        elif first is tl.tensor and second is SAME.get(left.dtype.name):
            key = (right, left.dtype.name, id(left.shape), *args, *kwargs.items())  # shapes are kept: see `_value`
            if key not in numbers:
                numbers[key] = find(self, left, right, *args, **kwargs)[1]
            return left, numbers[key]
        return find(self, left, right, *args, **kwargs)

    def alike(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        same = type(left) is type(right) is tl.tensor and left.shape is right.shape
        return (left, right) if same else broadcast(self, left, right)

    def inner(value: Any) -> Any:
        return value if type(value) in (tl.tensor, int, float, bool, str) else unwrap(value)

    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.broadcast_impl_value = alike
    tl.core._unwrap_if_constexpr = inner


@functools.cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int]:
    """`shape` and `numel` of a type, which nothing changes."""
    return tl.tuple(list(shape)), validate_block_shape(list(shape))


@functools.cache
def _value(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The same of a value."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel = _block(tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape]))
    if not self.shape.values:
        raise TypeError("a block without dimensions")


def _tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _value(tuple(kind.shape.values) if kind.is_block() else ())


_BUILTIN = tl.core.builtin(lambda: None).__code__


def _patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    inner = (
        member.__wrapped__ if member.__code__ is _BUILTIN else member
    )  # without its look whether there is a _semantic

    def replaced(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(package, name, replaced)


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
