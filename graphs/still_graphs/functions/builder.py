"""Builder of ONNX nodes for function bodies: values are names, Python numbers become shared constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from still_graphs.spec import OpSpec

Value: TypeAlias = "str | int | float | Sequence[int] | Sequence[str | int] | None"
"""A value's name, or a constant: int -> int64 scalar, float -> float32 scalar, ints -> int64 vector; None = absent input."""


Writer = Callable[[onnx.NodeProto, int, int, Mapping[str, int]], onnx.FunctionProto]


@dataclass(frozen=True)
class Body:
    """How the body of an op is written.

    Args:
        write: Writes the body from a node, element type, opset and dims; see `still_graphs.functions.function_body`.
        symbols: Required keys of `dims`.
        fused: Writes a body around a single op of another domain.
        runtime: Writes a body for ONNX Runtime only, around its own ops or this project's kernels; returns None for nodes without one.
    """

    write: Writer
    symbols: tuple[str, ...] = ()
    fused: Callable[..., onnx.FunctionProto] | None = None
    runtime: Callable[..., onnx.FunctionProto | None] | None = None


class Scope:
    """Nodes of a function body or of one branch in it. Branches see the values of enclosing scopes."""

    def __init__(self, parent: Scope | None = None, prefix: str = "") -> None:
        self.parent, self.prefix = parent, prefix
        self.root: Scope = self if parent is None else parent.root
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[Any, ...], str] = {}
        self._values: dict[tuple[Any, ...], list[str]] = {}
        self._count = 0

    def fresh(self, hint: str) -> str:
        """A name unused in the function."""
        self.root._count += 1
        return f"{self.root.prefix}{hint}_{self.root._count}"

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """A constant of the scope, shared by equal value.

        Scopes do not share constants. ONNX Runtime merges equal constants of all layers, which its common subexpression elimination needs,
        only where no branch uses them.
        """
        array = np.asarray(list(value) if isinstance(value, range) else value, dtype=dtype)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh("const")
            node = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))
            self.nodes.append(node)
            self._constants[key] = name
        return self._constants[key]

    def name(self, value: Value) -> str:
        """The name of `value`; numbers become constants."""
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return self.constant(value, "bool")
        if isinstance(value, int):
            return self.constant(value)
        if isinstance(value, float):
            return self.constant(value, "float32")
        if all(isinstance(v, int) for v in value):
            return self.constant(list(value))
        return self.shape(*value)

    def __call__(self, op_type: str, *inputs: Value, out: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the output's name. An equal node without a given name is reused."""
        return self.multi(op_type, *inputs, out=[out] if out else 1, **attributes)[0]

    def multi(self, op_type: str, *inputs: Value, out: int | Sequence[str], **attributes: Any) -> list[str]:
        """Add a node with several outputs, named or counted. An equal node with counted outputs is reused."""
        names = [self.name(value) for value in inputs]
        if not isinstance(out, int):
            self.nodes.append(helper.make_node(op_type, names, list(out), **attributes))
            return list(out)
        key = (op_type, tuple(names), repr(sorted(attributes.items())))
        known = self._known(key)
        if known is None:
            known = [self.fresh(op_type.lower()) for _ in range(out)]
            self.nodes.append(helper.make_node(op_type, names, known, **attributes))
            self._values[key] = known
        return known

    def _known(self, key: tuple[Any, ...]) -> list[str] | None:
        """Outputs of an equal node in this scope or an enclosing one."""
        found = self._values.get(key)
        return found if found is not None or self.parent is None else self.parent._known(key)

    def shape(self, *dims: str | int) -> str:
        """A shape from one-element int64 tensors and numbers (0 copies, -1 infers)."""
        if all(isinstance(d, int) for d in dims):
            return self.constant([int(d) for d in dims])
        parts = [self.constant([d]) if isinstance(d, int) else d for d in dims]
        return self("Concat", *parts, axis=0)

    def reshape(self, x: str, *dims: str | int, out: str | None = None) -> str:
        return self("Reshape", x, self.shape(*dims), out=out)

    def dim(self, x: str, axis: int) -> str:
        """One dimension of `x`, int64 [1]."""
        return self("Shape", x, start=axis, end=axis + 1)

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self("Unsqueeze", x, list(axes))

    def cast(self, x: str, dtype: int, out: str | None = None) -> str:
        return self("Cast", x, to=dtype, out=out)

    def wide(self, x: str, dtype: int) -> str:
        """`x` of element type `dtype`, cast to float32."""
        return x if dtype == FLOAT else self.cast(x, FLOAT)

    def narrow(self, dtype: int, out: str, op_type: str, *inputs: Value) -> None:
        """Add a node with a float32 result, and cast the result to `dtype` under the name `out`."""
        result = self(op_type, *inputs, out=out if dtype == FLOAT else None)
        if dtype != FLOAT:
            self.cast(result, dtype, out=out)

    def arange(self, limit: str | int) -> str:
        """0 .. limit - 1, int64; `limit` is a number or a tensor of one element."""
        if isinstance(limit, int):
            return self.constant(range(limit))
        return self("Range", 0, self("Squeeze", limit), 1)

    def all_of(self, *conditions: str) -> str:
        result = conditions[0]
        for condition in conditions[1:]:
            result = self("And", result, condition)
        return result

    def total(self, *terms: Value) -> str:
        result = terms[0]
        for term in terms[1:]:
            result = self("Add", result, term)
        assert isinstance(result, str)
        return result

    def graph(
        self,
        name: str,
        outputs: Sequence[tuple[str, int]],
        inputs: Sequence[tuple[str, int, list[int] | None]] = (),
    ) -> onnx.GraphProto:
        """The scope as a subgraph with outputs (name, element type) and inputs (name, element type, shape)."""
        infos = [helper.make_tensor_value_info(out, dtype, None) for out, dtype in outputs]
        value_infos = [helper.make_tensor_value_info(*value) for value in inputs]
        return helper.make_graph(self.nodes, name, value_infos, infos)

    def function(
        self, spec: OpSpec, node: onnx.NodeProto, imports: Mapping[str, int], shared: str = "new_tokens"
    ) -> onnx.FunctionProto:
        """The scope as the function of `node`, an op of `spec`, in the opsets `imports`.

        Absent inputs and outputs get a dead use, because ONNX Runtime derives a function's schema from its nodes. An absent input becomes
        an absent bound of a Clip of `shared`, a small integer input; nothing reads the result.
        """
        inputs, outputs = (spec.input_names()[: len(node.input)], spec.output_names()[: len(node.output)])
        for name, value in zip(inputs, node.input, strict=True):
            if not value:
                self("Clip", shared, name, None)
        for name, value in zip(outputs, node.output, strict=True):
            if not value:
                self("Identity", shared, out=name)
        opsets = [helper.make_opsetid(*each) for each in imports.items()]
        return helper.make_function(spec.domain, node.op_type, list(inputs), list(outputs), self.nodes, opsets, [])


FLOAT = TensorProto.FLOAT
DOUBLE = TensorProto.DOUBLE
INT64 = TensorProto.INT64
BOOL = TensorProto.BOOL
