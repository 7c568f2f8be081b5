"""From products and rows of weights to MatMulNBits and GatherBlockQuantized, whose weights are rounded when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np
import onnx_ir as ir
import torch

from still_export.errors import UnsupportedError
from still_export.export.weights_file import VIEW
from still_export.models.checkpoint import in_range
from still_export.models.weights import Weight, Weights, value_of
from still_export.quantization.blocks import BlockWeight
from still_export.quantization.policy import HALF, Quantization
from still_export.quantization.quantizers import quantize

DOMAIN = "com.microsoft"
ACCURACY_LEVEL = 4
"""Activations are rounded to 8 bits, block by block. The only level with a kernel for 8-bit weights on CPUs (others dequantize the whole
weight every call: 107 ms in the place of 1.2 for the head of SmolLM2-135M); at 4 bits a step is 3 times as fast as level 0 and a call
of 512 tokens takes twice as long (576 x 1,536, one thread, AVX-512 VNNI, ONNX Runtime 1.31.1)."""

PARTS = ("blocks", "scales", "zero_points")
ROWS = "rows"
"""Suffix of the same bytes in the shape that GatherBlockQuantized reads."""


def quantize_graph(model: ir.Model, weights: Weights, roles: Mapping[str, str], asked: Quantization) -> dict[str, int]:
    """Replace the nodes that read weights which the policy quantizes, in place.

    Args:
        model: From `lower_program`; its initializers have the model's names.
        weights: Values by those names, [N, K].
        roles: By those names.
        asked: Scheme, method, block size.

    Returns:
        Bits of each quantized weight by name.

    Raises:
        UnsupportedError: The block size does not divide a weight, or a weight is read in a way that has no quantized form.
    """
    bits = {name: b for name in weights if (b := asked.bits(roles[name])) is not None}
    for name, count in bits.items():
        inputs = weights[name].shape[1]
        if count != HALF and inputs % asked.block_size:
            raise UnsupportedError(
                f"{name} has {inputs} inputs, which blocks of {asked.block_size} do not divide. "
                "Choose another --quantize-block, or export without --quantize."
            )
    for name, count in bits.items():
        if count == HALF:
            _halve(model, name, weights[name])
        else:
            _Rewriter(model, name, weights[name], count, asked).run()
    model.graph.opset_imports[DOMAIN] = 1
    return bits


def _halve(model: ir.Model, name: str, weight: Weight) -> None:
    """Store a weight in float16 and cast it; ONNX Runtime does so once, when it loads the graph."""
    value = model.graph.initializers[name]
    if value.dtype != ir.DataType.FLOAT:
        return
    stored = ir.Value(name=f"{name}.half", shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT16))

    def read() -> ir.Tensor:
        return ir.Tensor(in_range(name, value_of(weight).detach(), torch.float16).numpy(), name=stored.name)

    stored.const_value = ir.LazyTensor(read, ir.DataType.FLOAT16, ir.Shape(weight.shape), name=stored.name)
    cast = ir.node("Cast", [stored], {"to": int(ir.DataType.FLOAT)}, name=f"{name}.cast")
    cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = f"{name}.value", value.shape, value.type
    model.graph.insert_before(model.graph[0], cast)
    ir.convenience.replace_all_uses_with(value, cast.outputs[0])
    del model.graph.initializers[name]
    model.graph.initializers[f"{name}.half"] = stored


class _Rewriter:
    """Replaces all that reads one weight."""

    def __init__(self, model: ir.Model, name: str, weight: Weight, bits: int, asked: Quantization) -> None:
        self.model, self.name, self.bits, self.asked = model, name, bits, asked
        self.outputs, self.inputs = weight.shape
        self.weight = weight
        self.values: dict[str, ir.Value] = {}

    def run(self) -> None:
        value = self.model.graph.initializers[self.name]
        self._add_parts(value.dtype or ir.DataType.FLOAT)
        for node, index in list(value.uses()):
            if node.op_type == "MatMul" and index == 1:
                self._product(node)
            elif node.op_type == "Transpose":
                for product, _ in list(node.outputs[0].uses()):
                    self._product(product)
                self.model.graph.remove(node, safe=True)
            elif node.op_type == "Gather" and index == 0:
                self._rows(node)
            else:
                raise UnsupportedError(
                    f"{self.name} is read by {node.op_type}, which has no form with quantized weights."
                )
        del self.model.graph.initializers[self.name]
        blocks = self.values["blocks"]
        if not blocks.uses():  # an embedding of its own: what is a view beside a head is the weight itself here
            rows = self.values[ROWS]
            rows.metadata_props.pop(VIEW)
            initializers = self.model.graph.initializers
            del (
                initializers[f"{self.name}.blocks"],
                initializers[f"{self.name}.{ROWS}"],
                initializers[f"{self.name}.scales"],
            )
            for part in (ROWS, "scales"):
                initializers[f"{self.name}.{part}"] = self.values[part]

    def _add_parts(self, dtype: ir.DataType) -> None:
        """Codes, scales and zero points as weights that are rounded together, once, when the first of them is written."""
        blocks, bits = self.inputs // self.asked.block_size, self.bits

        @lru_cache(maxsize=1)
        def rounded() -> BlockWeight:
            values = value_of(self.weight).detach().float().numpy()
            return quantize(values, bits, self.asked.block_size, self.asked.method)

        shapes = {
            "blocks": [self.outputs, blocks, self.asked.block_size * bits // 8],
            "scales": [self.outputs, blocks],
            "zero_points": [self.outputs, -(-blocks * bits // 8)],
        }
        if bits == 8:  # the zero point is the middle
            del shapes["zero_points"]

        def read(part: str) -> np.ndarray:
            blocks = rounded()
            if part == list(shapes)[-1]:
                rounded.cache_clear()
            values = {"blocks": blocks.packed, "scales": blocks.scales, "zero_points": blocks.zero_points}[part]
            assert values is not None
            return values.astype(dtype.numpy()) if part == "scales" else values

        for part, shape in shapes.items():
            self._add(part, shape, dtype if part == "scales" else ir.DataType.UINT8, partial(read, part))

    def _add(
        self, part: str, shape: list[int], dtype: ir.DataType, read: Callable[[], np.ndarray], view: str = ""
    ) -> None:
        name = f"{self.name}.{part}"
        tensor = ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
        if view:
            value.metadata_props[VIEW] = view
        self.model.graph.initializers[name] = value
        self.values[part] = value

    def _product(self, node: ir.Node) -> None:
        self._replace(
            node,
            "MatMulNBits",
            [node.inputs[0], *(self.values[part] for part in PARTS if part in self.values)],
            {
                "K": self.inputs,
                "N": self.outputs,
                "bits": self.bits,
                "block_size": self.asked.block_size,
                "accuracy_level": ACCURACY_LEVEL,
            },
        )

    def _rows(self, node: ir.Node) -> None:
        """Rows of the weight; the head's blocks, where they are tied, in the shape of rows: the same bytes of the file."""
        if self.bits != 8:
            raise UnsupportedError(f"{self.name} is read by rows, which has a form of 8 bits only, not of {self.bits}.")
        value = self.values["blocks"]
        assert value.const_value is not None
        self._add(ROWS, [self.outputs, self.inputs], ir.DataType.UINT8, value.const_value.numpy, f"{self.name}.blocks")
        self._replace(
            node,
            "GatherBlockQuantized",
            [self.values[ROWS], node.inputs[1], self.values["scales"]],
            {"gather_axis": 0, "quantize_axis": 1, "bits": self.bits, "block_size": self.asked.block_size},
        )

    def _replace(self, node: ir.Node, op: str, inputs: list[ir.Value | None], attributes: dict[str, int]) -> None:
        new = ir.node(op, inputs, attributes, domain=DOMAIN, name=node.name)
        old, output = node.outputs[0], new.outputs[0]
        output.name, output.shape, output.type = old.name, old.shape, old.type
        self.model.graph.insert_before(node, new)
        ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
        self.model.graph.remove(node, safe=True)
