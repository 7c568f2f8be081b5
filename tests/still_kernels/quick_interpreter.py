"""Triton's interpreter without what it does again and again: five sixths of the time of these tests.

It describes each value anew: a type, whose shape it checks, and an object for each size in the shape. Here values of one type share these,
so operands that need no conversion are recognized by identity, and constants and their blocks are made once. At each call of a jitted
function it looks through all of triton.language for what it has to replace, which inside of a kernel is replaced already; it makes a table
of types for each type that it looks up; it computes sums and products of integers twice, to assert that none overflows, and then does not
assert it, as that is for a debugging mode; and it folds values that a kernel reduces by a function of its own one after the other, where
hardware takes halves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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
    _share_types()
    _unwrap_at_once()
    _share_constants()
    _compute_at_once()


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


Block = tl.core.block_type
Tensor = tl.core.tensor
Handle = interpreter.TensorHandle
semantic = interpreter.interpreter_semantic


def _zeros(kind: Any) -> Any:
    """A tensor of zeros."""
    return Tensor(Handle(np.zeros(getattr(kind, "shape", (1,)), interpreter._get_np_dtype(kind)), kind.scalar), kind)


def _share_types() -> None:
    """One object for each type of a block, and for the shape that its tensors show; a handle's size is still compared with its type."""
    types: dict[Any, Any] = {}
    make, describe = Block.__init__, Tensor.__init__

    def shared(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (id(element_ty), *[size.value if size.__class__ is tl.constexpr else size for size in shape])
        found = types.get(key)
        if found is None:
            found = types[key] = object.__new__(cls)
            make(found, element_ty, shape)  # which keeps `element_ty`, so that its id is nobody else's
        return found

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        parts = type.__dict__.get("_parts")
        if parts is None:
            describe(self, handle, type)
            type._parts = self.shape, self.numel, self.dtype
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = parts

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        size = dtype.__dict__.get("_size")
        if size is None:
            size = dtype._size = math.inf if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
        if data.itemsize > size:
            raise ValueError(f"{data.dtype} is wider than {dtype}")
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    Block.__new__ = shared
    Block.__init__ = lambda self, element_ty, shape: None
    Tensor.__init__ = init_tensor
    Handle.__init__ = init_handle


def _unwrap_at_once() -> None:
    """Of a tensor or a number there is nothing to unwrap, and what is called from a kernel gets the interpreter's semantics."""
    unwrap = tl.core._unwrap_if_constexpr

    def unwrapped(value: Any) -> Any:
        if value.__class__ is tl.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.tuple) else value

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        own = QUICK.get(name) if place is Tensor else None
        function = getattr(member, "__wrapped__", member)

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(place, name, own or called)

    tl.core._unwrap_if_constexpr = unwrapped
    interpreter._patch_attr = patch


def _share_constants() -> None:
    """Numbers in a kernel, as scalars and as blocks: nothing writes into them."""
    constant, broadcast = semantic.scalar_constant, semantic.broadcast_impl_value
    known: dict[Any, Any] = {}
    blocks: dict[Any, Any] = {}
    pairs: dict[Any, Any] = {}

    def shared(value: Any, dtype: Any) -> Any:
        key = (value.__class__, value, id(dtype))
        found = known.get(key)
        if found is None:
            found = known[key] = constant(value, dtype)
            found.shared = dtype  # whose id stays its own
        return found

    def splat(scalar: Any, like: Any) -> Any:
        if not hasattr(scalar, "shared"):
            kind = like.with_element_ty(scalar.type.scalar)
            return Tensor(semantic.builder.create_splat(kind.to_ir(semantic.builder), scalar.handle), kind)
        key = (id(scalar), id(like))
        found = blocks.get(key)
        if found is None:
            found = broadcast(scalar, _zeros(like))[0]
            found.handle.data.setflags(write=False)
            blocks[key] = found
        return found

    def common(one: Any, other: Any) -> Any:
        """Of two types of blocks, those of one shape."""
        key = (id(one), id(other))
        if key not in pairs:
            pairs[key] = [found.type for found in broadcast(_zeros(one), _zeros(other))]
        return pairs[key]

    def same_shape(left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one is other:
            return left, right
        if one.is_block():
            if not other.is_block():
                return left, splat(right, one)
            if one.shape.values == other.shape.values:
                return left, right
            if len(one.shape.values) == len(other.shape.values):
                return [
                    x
                    if x.type is kind
                    else Tensor(semantic.builder.create_broadcast(x.handle, kind.shape.values), kind)
                    for x, kind in zip((left, right), common(one, other), strict=True)
                ]
        elif other.is_block():
            return splat(left, other), right
        else:
            return left, right
        return broadcast(left, right)

    semantic.scalar_constant, semantic.broadcast_impl_value = shared, same_shape


def _compute_at_once() -> None:
    """Operands of one type need no conversion, nor does a number that was seen beside that type."""
    convert = semantic.cast
    check, equal = semantic.binary_op_type_checking_impl, tl.core.dtype.__eq__
    numbers: dict[Any, Any] = {}
    together: dict[Any, Any] = {}

    def constant(value: Any, beside: Any, *how: bool) -> Any:
        """What `value` becomes beside a tensor; None: the tensor is converted, too."""
        key = (value.__class__, value, id(beside.dtype), *how)
        if key not in numbers:
            scalar = _zeros(beside.dtype)
            left, right = check(scalar, value, *how)
            numbers[key] = right if left is scalar else None
        return numbers[key]

    def checked(
        left: Any,
        right: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        how = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if left.__class__ is Tensor and left.dtype.is_ptr():
            if allow_lhs_ptr and right.__class__ is Tensor and right.dtype.is_int():
                return semantic.broadcast_impl_value(left, right)
        elif left.__class__ is Tensor:
            if right.__class__ is Tensor and not right.dtype.is_ptr():
                if left.dtype is right.dtype and not div_or_mod:
                    return semantic.broadcast_impl_value(left, right)
                key = (id(left.dtype), id(right.dtype), *how)
                if arithmetic_check and key in together:
                    return semantic.broadcast_impl_value(*[cast(x, together[key]) for x in (left, right)])
                found = check(left, right, *how)
                together[key] = found[0].dtype
                return found
            elif right.__class__ in (int, float) and arithmetic_check:
                if (found := constant(right, left, *how)) is not None:
                    return semantic.broadcast_impl_value(left, found)
        return check(left, right, *how)

    def cast(value: Any, kind: Any, rounding: Any = None) -> Any:
        source, kind = value.dtype, kind.scalar
        if source is kind:
            return value
        if rounding is None and source.is_int() and kind.is_int() and kind is not tl.int1:
            data = value.handle.data.astype(interpreter._get_np_dtype(kind))
            return Tensor(Handle(data, kind), value.type.with_element_ty(kind))
        return convert(value, kind, rounding)

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        found, dtype = op(left.data, right.data), left.dtype.scalar
        if found.itemsize > dtype.__dict__.get("_size", 0):
            found = found.astype(interpreter._get_np_dtype(dtype))
        return Handle(found, dtype)

    def expand(self: Any, handle: Any, axis: int) -> Any:
        return Handle(handle.data[(slice(None),) * axis + (None,)], handle.dtype.scalar)

    def splat(self: Any, kind: Any, handle: Any) -> Any:
        data = np.empty(kind.shape.values, interpreter._get_np_dtype(handle.dtype))
        data[...] = handle.data.flat[0]
        return Handle(data, handle.dtype.scalar)

    semantic.binary_op_type_checking_impl, semantic.cast = checked, cast
    interpreter.InterpreterBuilder.binary_op = binary
    interpreter.InterpreterBuilder.create_expand_dims = expand
    interpreter.InterpreterBuilder.create_splat = splat
    tl.core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _operator(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    """A sum, difference or product: overflows are not asserted."""
    compute = getattr(semantic, name)

    def operator(self: Any, other: Any) -> Any:
        if other.__class__ is tl.constexpr:
            other = other.value
        return compute(other, self, False) if swapped else compute(self, other, False)

    return operator


QUICK = {f"__{name}__": _operator(name) for name in ("add", "sub", "mul")}
QUICK |= {f"__r{name}__": _operator(name, swapped=True) for name in ("add", "sub", "mul")}
