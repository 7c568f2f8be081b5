"""Triton's interpreter without what it does again and again: two thirds of the time of these tests.

At each call of a jitted function it looks through all of triton.language for what it has to replace, which inside of a kernel is
replaced already; it makes a table of types for each type that it looks up; it computes sums and products of integers twice, to
assert that none overflows, and then does not assert it, as that is for a debugging mode; of each value and of each type of blocks it
makes anew what depends on the shape alone; of each sum, choice, conversion or load it finds out anew what becomes of such operands,
and makes the same blocks of a number again and again; and it folds values that a kernel reduces by a function of its own one after the
other, where hardware takes halves.
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
    _take_as_they_are()
    _learn_operations()
    _learn_moves()


def _take_as_they_are() -> None:
    """Blocks of one shape need no conversion, tensors and numbers no unwrapping; a number is made a tensor once."""
    broadcast, unwrap = TritonSemantic.broadcast_impl_value, tl.core._unwrap_if_constexpr
    make, numbers = TritonSemantic.to_tensor, {}
    plain = (tl.tensor, int, float, bool, str)

    def alike(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        same = type(left) is type(right) is tl.tensor and left.shape is right.shape
        return (left, right) if same else broadcast(self, left, right)

    def inner(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        if type(value) is tl.tensor:
            return value
        if type(value) not in (int, float):
            return make(self, value, check_type)
        key = (type(value), value)
        if key not in numbers:
            numbers[key] = make(self, value)
        return numbers[key]

    TritonSemantic.to_tensor = to_tensor
    TritonSemantic.broadcast_impl_value = alike
    tl.core._unwrap_if_constexpr = inner


EXACT = {"int1", "int32", "int64", "fp32"}
"""Types that numpy computes in as they are. Of others (tests/still_kernels/interpreter16.py) the interpreter decides each time."""

OPERATIONS: dict[str, tuple[Any, tuple[bool, ...]]] = {
    "add": (np.add, (True, True)),
    "sub": (np.subtract, (False, False)),
    "mul": (np.multiply, ()),
    "less_than": (np.less, ()),
    "less_equal": (np.less_equal, ()),
    "greater_than": (np.greater, ()),
    "greater_equal": (np.greater_equal, ()),
    "equal": (np.equal, ()),
    "not_equal": (np.not_equal, ()),
    "and_": (np.bitwise_and, ()),
    "or_": (np.bitwise_or, ()),
    "minimum": (np.minimum, ()),
    "maximum": (np.maximum, ()),
}
"""What the interpreter computes each with, and whether either operand may be a pointer."""

MEMBERS = {"__add__": "add", "__sub__": "sub", "__mul__": "mul"}
"""Operators of tensors that go through a function of the language, which would be replaced as they are."""


class Recipe:
    """What an operation on operands of two types and shapes comes to, learnt from the interpreter the first time."""

    def __init__(self, operands: tuple[Any, Any], parts: tuple[Any, Any], compute: Any, result: Any) -> None:
        # Recipes are found by the identity of types and shapes, which therefore have to stay.
        self.kept = [(x.dtype, x.shape) for x in operands if type(x) is tl.tensor]
        self.left, self.right = (interpreter._get_np_dtype(part.dtype) for part in parts)
        self.compute = compute
        self.type, self.dtype, self.shape, self.numel = result.type, result.dtype, result.shape, result.numel
        self.numbers = tuple(
            None
            if type(operand) is tl.tensor
            else part.handle.data.reshape(-1)[:1].astype(interpreter._get_np_dtype(part.dtype))
            for operand, part in zip(operands, parts, strict=True)
        )
        """Of an operand that is a number: what became of it."""
        self.given = tuple(None if type(x) is not tl.tensor else x.handle.data.dtype for x in operands)

    def takes(self, left: Any, right: Any) -> bool:
        """The interpreter keeps truth values as numbers here and there."""
        first, second = self.given
        return (first is None or left.handle.data.dtype is first) and (
            second is None or right.handle.data.dtype is second
        )

    def __call__(self, left: Any, right: Any) -> Any:
        first, second = self.numbers
        first = left.handle.data if first is None else first
        second = right.handle.data if second is None else second
        if first.dtype is not self.left:
            first = first.astype(self.left)
        if second.dtype is not self.right:
            second = second.astype(self.right)
        return self.made_of(self.compute(first, second))

    def made_of(self, data: Any) -> Any:
        """A tensor like the result."""
        handle = _new(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, self.dtype, {}
        found = _new(tl.tensor)
        found.handle, found.type, found.dtype = handle, self.type, self.dtype
        found.shape, found.numel = self.shape, self.numel
        return found


class Move(Recipe):
    """What becomes of blocks that no arithmetic is done with: `compute` makes the values of theirs."""

    def __init__(self, blocks: tuple[Any, ...], compute: Any, result: Any) -> None:
        self.kept = [(x.dtype, x.shape) for x in blocks]
        self.given = tuple(x.handle.data.dtype for x in blocks)
        self.compute = compute
        self.type, self.dtype, self.shape, self.numel = result.type, result.dtype, result.shape, result.numel
        again, wanted = compute(*(x.handle.data for x in blocks)), result.handle.data
        assert again.dtype == wanted.dtype and again.shape == wanted.shape, (again, wanted)
        assert np.array_equal(again, wanted, equal_nan=again.dtype.kind == "f"), (again, wanted)

    def takes_all(self, *blocks: Any) -> bool:
        """As of `takes`."""
        return all([x.handle.data.dtype is kind for x, kind in zip(blocks, self.given, strict=True)])


def offset_by(width: int) -> Any:
    """A sum of pointers to elements of so many bytes and offsets."""
    return lambda pointers, offsets: pointers + width * offsets.astype(np.uint64)


_new = object.__new__


def _learn_operations() -> None:
    """Of operands in exact types the interpreter is asked once what becomes of them; their numbers are converted once."""
    find, known = TritonSemantic.binary_op_type_checking_impl, interpreter._get_np_dtype
    scalar = {float: "fp32", int: "int32", bool: "int1"}

    def learnt(name: str) -> Any:
        compute, pointers = OPERATIONS[name]
        slow = getattr(TritonSemantic, name)
        recipes: dict[Any, Any] = {}
        missing = object()

        def learn(self: Any, left: Any, right: Any, *more: Any, **named: Any) -> tuple[Recipe | None, Any]:
            result = slow(self, left, right, *more, **named)
            kinds = [x.dtype.name if type(x) is tl.tensor else scalar.get(type(x), "") for x in (left, right)]
            is_pointer = [type(x) is tl.tensor and x.dtype.is_ptr() for x in (left, right)]
            how, numbers = compute, EXACT
            if name == "add" and is_pointer[0]:
                how, kinds = offset_by(max(1, left.dtype.element_ty.primitive_bitwidth // 8)), kinds[1:]
                numbers = {"int32", "int64"}
            elif any(is_pointer):
                return None, result
            parts = find(self, left, right, *pointers)
            same = parts[0].dtype == parts[1].dtype or is_pointer[0]
            if not numbers.issuperset(kinds) or not same or parts[1].dtype.name not in EXACT:
                return None, result
            recipe = Recipe((left, right), parts, how, result)
            if any(given and given != known(x.dtype) for given, x in zip(recipe.given, (left, right), strict=True)):
                return None, result
            again, wanted = recipe(left, right).handle.data, result.handle.data
            assert again.dtype == known(result.dtype) and again.shape == wanted.shape, (name, again, wanted)
            assert np.array_equal(again, wanted, equal_nan=again.dtype.kind == "f"), (name, again, wanted)
            return recipe, result

        def operation(self: Any, left: Any, right: Any, *more: Any, **named: Any) -> Any:
            key = (
                (id(left.dtype), id(left.shape)) if type(left) is tl.tensor else (type(left), left),
                (id(right.dtype), id(right.shape)) if type(right) is tl.tensor else (type(right), right),
            )
            recipe = recipes.get(key, missing)
            if recipe is missing:
                recipes[key], result = learn(self, left, right, *more, **named)
                return result
            if recipe is None or not recipe.takes(left, right):
                return slow(self, left, right, *more, **named)
            return recipe(left, right)

        return operation

    for name in OPERATIONS:
        setattr(TritonSemantic, name, learnt(name))


def _says_what_it_is(x: Any) -> bool:
    """Whether `x` is a block in an exact type, by its type and by its values."""
    if type(x) is not tl.tensor or not x.type.is_block() or x.dtype.name not in EXACT:
        return False
    data = x.handle.data
    return data.dtype == interpreter._get_np_dtype(x.dtype) and data.shape == tuple(x.type.shape.values)


def _learn_moves() -> None:
    """As of operations, of loads, choices, conversions and new dimensions."""
    load, choose, convert = TritonSemantic._load_legacy, TritonSemantic.where, TritonSemantic.cast
    expand, memory, missing = tl.tensor.__getitem__, interpreter._interpreter, object()
    loads: dict[Any, Move | None] = {}
    choices: dict[Any, Move | None] = {}
    casts: dict[Any, Move | None] = {}
    indices: dict[Any, Move | None] = {}

    def loaded(self: Any, pointer: Any, mask: Any, other: Any, *more: Any) -> Any:
        """Of blocks with a mask of their shape and a number, which is always the same tensor (`to_tensor`)."""
        if mask is None or other is None:
            return load(self, pointer, mask, other, *more)
        key = id(pointer.dtype), id(pointer.shape), id(mask.dtype), id(mask.shape), id(other)
        move = loads.get(key, missing)
        if move is missing:
            result, move = load(self, pointer, mask, other, *more), None
            masked = _says_what_it_is(mask) and mask.dtype.name == "int1" and mask.shape is pointer.shape
            if masked and not other.type.is_block() and other.dtype.name in EXACT and _says_what_it_is(result):
                kind = result.handle.data.dtype
                if pointer.dtype.element_ty == result.dtype and kind.kind != "b":
                    rest = np.full(result.handle.data.shape, other.handle.data, dtype=kind)
                    move = Move((pointer, mask), lambda at, which: memory.load(at, which, rest, kind), result)
                    move.kept.append(other)
            loads[key] = move
            return result
        if move is None or mask.handle.data.dtype is not move.given[1]:
            return load(self, pointer, mask, other, *more)
        return move.made_of(move.compute(pointer.handle.data, mask.handle.data))

    def chosen(self: Any, condition: Any, x: Any, y: Any) -> Any:
        """Of blocks of one shape and type, or one and a number."""
        if type(x) is not tl.tensor:
            return choose(self, condition, x, y)
        other = (id(y.dtype), id(y.shape)) if type(y) is tl.tensor else (type(y), y)
        key = id(condition.dtype), id(condition.shape), id(x.dtype), id(x.shape), other
        move = choices.get(key, missing)
        if move is missing:
            result, move = choose(self, condition, x, y), None
            plain = all(map(_says_what_it_is, (condition, x, result)))
            if plain and condition.dtype.name == "int1" and x.dtype is result.dtype:
                if type(y) is not tl.tensor:
                    number = np.array([y], dtype=result.handle.data.dtype)
                    if number[0] == y:
                        move = Move((condition, x), lambda which, this: np.where(which, this, number), result)
                elif _says_what_it_is(y) and y.dtype is result.dtype:
                    move = Move((condition, x, y), np.where, result)
            choices[key] = move
            return result
        if move is None or not move.takes_all(condition, x, *((y,) if type(y) is tl.tensor else ())):
            return choose(self, condition, x, y)
        if type(y) is tl.tensor:
            return move.made_of(np.where(condition.handle.data, x.handle.data, y.handle.data))
        return move.made_of(move.compute(condition.handle.data, x.handle.data))

    def converted(self: Any, x: Any, kind: Any, *more: Any) -> Any:
        """To its own type, or from a number's type to another's."""
        if x.dtype is kind:
            return x
        if more:
            return convert(self, x, kind, *more)
        key = id(x.dtype), id(x.shape), id(kind)
        move = casts.get(key, missing)
        if move is missing:
            result, move = convert(self, x, kind), None
            if result is not x and _says_what_it_is(x) and _says_what_it_is(result) and result.dtype.name != "int1":
                into = result.handle.data.dtype
                move = Move((x,), lambda data: data.astype(into), result)
                move.kept.append(kind)
            casts[key] = move
            return result
        if move is None or not move.takes_all(x):
            return convert(self, x, kind)
        return move.made_of(move.compute(x.handle.data))

    def indexed(self: Any, at: Any, **named: Any) -> Any:
        """Whole, with dimensions of one between; numpy writes it alike."""
        plain = type(at) is tuple and all(part is None or part == WHOLE for part in at)
        key = (id(self.dtype), id(self.shape), tuple([part is None for part in at])) if plain else None
        move = indices.get(key, missing) if plain else None
        if move is missing:
            result, move = expand(self, at, _semantic=interpreter.interpreter_semantic), None
            if _says_what_it_is(self) and _says_what_it_is(result):
                move = Move((self,), lambda data: data[at], result)
            indices[key] = move
            return result
        if move is None or not move.takes_all(self):
            return expand(self, at, _semantic=interpreter.interpreter_semantic)
        return move.made_of(self.handle.data[at])

    TritonSemantic._load_legacy, TritonSemantic.where, TritonSemantic.cast = loaded, chosen, converted
    _replacements["__getitem__"] = indexed


WHOLE = slice(None)
_replacements: dict[str, Any] = {}
"""Members of tensors that need no look at what they are given."""


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


def _operator(name: str) -> Any:
    def operator(self: Any, other: Any, **_: Any) -> Any:
        operate = getattr(interpreter.interpreter_semantic, name)
        return operate(self, tl.core._unwrap_if_constexpr(other), True)

    return operator


def _patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    if package is tl.tensor and name in MEMBERS:
        scope.set_attr(package, name, _operator(MEMBERS[name]))
        return
    if package is tl.tensor and name in _replacements:
        scope.set_attr(package, name, _replacements[name])
        return
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
