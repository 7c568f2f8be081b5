"""A quantized weight in a graph: initializers whose values are made when written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from still_export.errors import UnsupportedError
from still_export.graph.quantization.forms import EXACT, Form
from still_export.graph.quantization.policy import DEQUANTIZED, Quantization
from still_export.graph.quantization.quantizers import float8, quantize, quantize_outputs, relative_error
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.super_blocks import SuperBlocks
from still_export.models.read.weights import Deferred, Weight, is_coded, narrow_value_of
from still_graphs.edits import put_in_place, store


class StoredWeight:
    """A weight [N, K] in its form, made once for all its parts. `rounded` receives its error if a source's codes are rounded again."""

    def __init__(
        self, name: str, weight: Weight, form: Form, policy: Quantization, role: str, rounded: dict[str, float]
    ) -> None:
        self.name, self.form, self.policy, self.role, self.rounded = name, form, policy, role, rounded
        self.outputs, self.inputs = weight.shape
        self.dtype = ir.DataType.FLOAT
        self._made: BlockWeight | None = None

    @property
    def made(self) -> BlockWeight:
        """Its blocks, cached until `forget`."""
        if self._made is None:
            base, bits = self.form.base, self.form.bits
            assert base is not None
            if self.form.method == EXACT:
                assert isinstance(base, Deferred) and base.blocks is not None
                made = base.blocks.read().split(self.policy.block_of(bits, self.inputs))
                positive = self.policy.layout.nodes == DEQUANTIZED
                self._made = made.with_positive_scales(self.dtype.numpy()) if positive else made
            else:
                values = narrow_value_of(base).detach()
                if self.form.codes is not None:
                    self._made = self.form.codes
                elif self.policy.float8:
                    self._made = float8(values, self.policy.block_of(bits, self.inputs))
                elif bits == 8 and not self.policy.layout.blocks_of_eight:
                    self._made = quantize_outputs(values)
                else:
                    zero_points = self.policy.layout.zero_points
                    self._made = quantize(values, bits, self.policy.block_size, zero_points)
                if self.form.half_scales:
                    self._made = self._with_half_scales(self._made)
                if is_coded(base):
                    self.rounded[self.name] = relative_error(self._made, values)
        return self._made

    def _with_half_scales(self, made: BlockWeight) -> BlockWeight:
        with np.errstate(over="ignore"):
            scales = made.scales.astype(np.float16)
        if not np.isfinite(scales).all():
            raise UnsupportedError(
                f"{self.name} has weights up to {np.abs(made.dequantized()).max():.3g}, whose scales half precision cannot hold. "
                "Export with --no-native, whose scales are float32."
            )
        return replace(made, scales=scales)

    @property
    def super_blocks(self) -> SuperBlocks:
        """The source's K-quants, for a form that copies them."""
        base = self.form.base
        assert isinstance(base, Deferred) and base.super_blocks is not None
        return base.super_blocks

    def forget(self) -> None:
        self._made = None

    @property
    def blocks(self) -> int:
        """Blocks of each output."""
        return int(self.inputs // self.policy.block_of(self.form.bits, self.inputs))

    @property
    def scale_type(self) -> ir.DataType:
        """Type of its scales in the file."""
        return ir.DataType.FLOAT16 if self.form.half_scales and self.dtype == ir.DataType.FLOAT else self.dtype

    @property
    def rank(self) -> int:
        """Columns of its pairs in `inner`."""
        return sum(int(pair.a.shape[0]) for pair in self.form.pairs)


def store_values(
    model: ir.Model, name: str, shape: list[int], dtype: ir.DataType, read: Callable[[], np.ndarray]
) -> ir.Value:
    """An initializer whose values are made when written."""
    tensor = ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)
    return store(model.graph, tensor)


def cast_value(model: ir.Model, stored: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A stored weight cast to another type; ONNX Runtime casts once, at load."""
    return at_start(model, ir.node("Cast", [stored], {"to": int(dtype)}, name=f"{stored.name}.cast"), stored, dtype)


def at_start(model: ir.Model, node: ir.Node, stored: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The result of a node over the `stored` weight, of the same shape, placed first in the graph."""
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{stored.name}.value", stored.shape, ir.TensorType(dtype)
    model.graph.insert_before(model.graph[0], node)
    return output


def replace_nodes(model: ir.Model, nodes: list[ir.Node], values: list[ir.Value]) -> None:
    """Replace the results of `nodes` by `values` under the same names; a Transpose with no other reader is removed."""
    for node, value in zip(nodes, values, strict=True):
        old, weight = node.outputs[0], node.inputs[1] if node.op_type == "MatMul" else None
        put_in_place(old, value)
        model.graph.remove(node, safe=True)
        turned = weight.producer() if weight is not None else None
        if turned is not None and turned.op_type == "Transpose" and not turned.outputs[0].uses():
            model.graph.remove(turned, safe=True)


def as_words(rows: np.ndarray) -> np.ndarray:
    """Bytes of each row, filled up with 0 to whole words, as int32 with the first byte lowest."""
    rows = rows.reshape(len(rows), -1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).view("<i4")
