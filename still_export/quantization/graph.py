"""From products and rows of weights to MatMulNBits and GatherBlockQuantized, whose weights are rounded when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np
import onnx_ir as ir
import torch

from still_export.errors import UnsupportedError
from still_export.export.lower import lazy_tensor
from still_export.export.weights_file import VIEW
from still_export.models.blocks import BlockWeight
from still_export.models.checkpoint import in_range
from still_export.models.weights import Deferred, Pair, Weight, Weights, value_of
from still_export.quantization.forms import EXACT, Form, form_of
from still_export.quantization.policy import HALF, Quantization
from still_export.quantization.quantizers import quantize

DOMAIN = "com.microsoft"
ACCURACY_LEVEL = 4
"""Activations are rounded to 8 bits, block by block. The only level with a kernel for 8-bit weights on CPUs (others dequantize the whole
weight every call: 107 ms in the place of 1.2 for the head of SmolLM2-135M); at 4 bits a step is 3 times as fast as level 0 and a call
of 512 tokens takes twice as long (576 x 1,536, one thread, AVX-512 VNNI, ONNX Runtime 1.31.1)."""

ROWS = "rows"
"""Suffix of a weight's codes in the shape that GatherBlockQuantized reads."""


def quantize_graph(
    model: ir.Model, weights: Weights, roles: Mapping[str, str], asked: Quantization
) -> dict[str, tuple[int | None, str]]:
    """Replace the nodes that read weights which the policy quantizes, in place.

    Args:
        model: From `lower_program`; its initializers have the model's names.
        weights: Values by those names, [N, K].
        roles: By those names.
        asked: Scheme, method, block size, LoRA.

    Returns:
        Bits (None: the pairs alone) and method of each quantized weight by name.

    Raises:
        UnsupportedError: The block size does not divide a weight, or a weight is read in a way that has no quantized form.
    """
    forms = {
        name: form for name, weight in weights.items() if (form := form_of(weight, roles[name], asked)) is not None
    }
    for name, form in forms.items():
        inputs = weights[name].shape[1]
        if form.bits != HALF and form.base is not None and inputs % asked.block_size:
            raise UnsupportedError(
                f"{name} has {inputs} inputs, which blocks of {asked.block_size} do not divide. "
                "Choose another --quantize-block, or export without --quantize."
            )
    sums: dict[ir.Value, ir.Value] = {}
    for name, form in forms.items():
        if form.bits == HALF:
            _halve(model, name, weights[name])
        else:
            _Rewriter(model, name, weights[name], form, asked, sums).run()
    model.graph.opset_imports[DOMAIN] = 1
    return {name: (form.bits if form.base is not None else None, form.method) for name, form in forms.items()}


def _halve(model: ir.Model, name: str, weight: Weight) -> None:
    """Store a weight in float16 and cast it."""
    value = model.graph.initializers[name]
    if value.dtype != ir.DataType.FLOAT:
        return
    half = Deferred(weight.shape, torch.float16, lambda: in_range(name, value_of(weight).detach(), torch.float16))
    stored = _initializer(model, f"{name}.half", lazy_tensor(f"{name}.half", half))
    ir.convenience.replace_all_uses_with(value, _cast(model, stored, ir.DataType.FLOAT))
    del model.graph.initializers[name]


def _initializer(model: ir.Model, name: str, tensor: ir.LazyTensor) -> ir.Value:
    shape = ir.Shape(list(tensor.shape))
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.initializers[name] = value
    return value


def _cast(model: ir.Model, stored: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A stored weight in another type; ONNX Runtime casts once, when it loads the graph."""
    cast = ir.node("Cast", [stored], {"to": int(dtype)}, name=f"{stored.name}.cast")
    output = cast.outputs[0]
    output.name, output.shape, output.type = f"{stored.name}.value", stored.shape, ir.TensorType(dtype)
    model.graph.insert_before(model.graph[0], cast)
    return output


class _Rewriter:
    """Replaces all that reads one weight. `sums` are the sums over blocks of what products read, shared by those that read it."""

    def __init__(
        self,
        model: ir.Model,
        name: str,
        weight: Weight,
        form: Form,
        asked: Quantization,
        sums: dict[ir.Value, ir.Value],
    ) -> None:
        self.model, self.name, self.form, self.asked, self.sums = model, name, form, asked, sums
        self.outputs, self.inputs = weight.shape
        self.values: dict[str, ir.Value] = {}

    def run(self) -> None:
        value = self.model.graph.initializers.pop(self.name)
        self.dtype = value.dtype or ir.DataType.FLOAT
        uses = [(node, index) for node, index in value.uses()]
        by_rows = all(node.op_type == "Gather" for node, _ in uses)  # an embedding without a head
        if self.form.base is not None:
            self._add_blocks(self.form.base, ROWS if by_rows else "blocks")
        for i, pair in enumerate(self.form.pairs):
            self._add_pair(i, pair)
        for node, index in uses:
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

    def _add_blocks(self, base: Weight, codes: str) -> None:
        """Codes, scales, zero points and offsets as weights that are made together, once, when the first of them is written."""
        form, blocks = self.form, self.inputs // self.asked.block_size
        code_shape = [self.outputs, blocks, self.asked.block_size * form.bits // 8]
        half = form.half_scales and self.dtype == ir.DataType.FLOAT
        scale_type = ir.DataType.FLOAT16 if half else self.dtype
        parts: dict[str, tuple[list[int], ir.DataType, Callable[[BlockWeight], np.ndarray | None]]] = {
            codes: (
                code_shape if codes != ROWS else [self.outputs, self.inputs],
                ir.DataType.UINT8,
                lambda w: w.packed if codes != ROWS else w.packed.reshape(self.outputs, -1),
            ),
            "scales": ([self.outputs, blocks], scale_type, lambda w: w.scales),
        }
        if form.zero_points:
            shape = [self.outputs, -(-blocks * form.bits // 8)]
            parts["zero_points"] = (shape, ir.DataType.UINT8, lambda w: w.zero_points)
        if form.offsets:
            parts["offsets"] = (
                [blocks, self.outputs],
                self.dtype,
                lambda w: None if w.offsets is None else w.offsets.T,
            )

        @lru_cache(maxsize=1)
        def made() -> BlockWeight:
            if form.method == EXACT:
                assert isinstance(base, Deferred) and base.blocks is not None
                return base.blocks.read()
            return quantize(value_of(base).detach().float().numpy(), form.bits, self.asked.block_size, form.method)

        def read(part: str) -> np.ndarray:
            values = parts[part][2](made())
            assert values is not None
            if part == list(parts)[-1]:
                made.cache_clear()
            return np.ascontiguousarray(values.astype(parts[part][1].numpy()))

        for part, (shape, dtype, _) in parts.items():
            self._add(part, shape, dtype, partial(read, part))
        if half:
            self.values["scales"] = _cast(self.model, self.values["scales"], self.dtype)

    def _add_pair(self, i: int, pair: Pair) -> None:
        """LoRA's matrices, the scale in the second."""
        rank, dtype = pair.a.shape[0], self.dtype.numpy()
        self._add(f"lora_a{i}", [self.inputs, rank], self.dtype, lambda: _thin(value_of(pair.a).t(), dtype))
        self._add(
            f"lora_b{i}", [rank, self.outputs], self.dtype, lambda: _thin(value_of(pair.b).t() * pair.scale, dtype)
        )

    def _add(self, part: str, shape: list[int], dtype: ir.DataType, read: Callable[[], np.ndarray]) -> None:
        name = f"{self.name}.{part}"
        tensor = ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)
        self.values[part] = _initializer(self.model, name, tensor)

    def _product(self, node: ir.Node) -> None:
        """The sum of the products with blocks, with offsets and with LoRA's pairs, as far as the form has them."""
        read, old = node.inputs[0], node.outputs[0]
        assert read is not None
        terms = []
        if self.form.base is not None:
            inputs = [read, *(self.values[p] for p in ("blocks", "scales", "zero_points") if p in self.values)]
            attributes = {
                "K": self.inputs,
                "N": self.outputs,
                "bits": self.form.bits,
                "block_size": self.asked.block_size,
                "accuracy_level": ACCURACY_LEVEL,
            }
            terms.append(self._node(node, "MatMulNBits", inputs, "blocks", attributes, DOMAIN))
        if self.form.offsets:
            terms.append(self._node(node, "MatMul", [self._block_sums(node, read), self.values["offsets"]], "offsets"))
        for i in range(len(self.form.pairs)):
            inner = self._node(node, "MatMul", [read, self.values[f"lora_a{i}"]], f"lora_a{i}")
            terms.append(self._node(node, "MatMul", [inner, self.values[f"lora_b{i}"]], f"lora_b{i}"))
        total = terms[0]
        for i, term in enumerate(terms[1:]):
            total = self._node(node, "Add", [total, term], f"sum{i}")
        total.name, total.shape, total.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, total, replace_graph_outputs=True)
        self.model.graph.remove(node, safe=True)

    def _block_sums(self, node: ir.Node, read: ir.Value) -> ir.Value:
        if read not in self.sums:
            name, block = f"block_sums.{self.inputs}", self.asked.block_size
            matrix = self.model.graph.initializers.get(name)
            if matrix is None:
                ones = partial(np.kron, np.eye(self.inputs // block), np.ones((block, 1)))
                shape, dtype = ir.Shape([self.inputs, self.inputs // block]), self.dtype
                tensor = ir.LazyTensor(
                    lambda: ir.Tensor(ones().astype(dtype.numpy()), name=name), dtype, shape, name=name
                )
                matrix = _initializer(self.model, name, tensor)
            self.sums[read] = self._node(node, "MatMul", [read, matrix], "block_sums")
        return self.sums[read]

    def _rows(self, node: ir.Node) -> None:
        """Rows of the weight; the head's blocks, where they are tied, in the shape of rows: the same bytes of the file."""
        old = node.outputs[0]
        if ROWS not in self.values:
            blocks = self.values["blocks"]
            assert blocks.const_value is not None
            values = blocks.const_value.numpy
            self._add(ROWS, [self.outputs, self.inputs], ir.DataType.UINT8, lambda: values().reshape(self.outputs, -1))
            self.values[ROWS].metadata_props[VIEW] = f"{self.name}.blocks"
        attributes = {"gather_axis": 0, "quantize_axis": 1, "bits": self.form.bits, "block_size": self.asked.block_size}
        inputs = [self.values[ROWS], node.inputs[1], self.values["scales"]]
        new = self._node(node, "GatherBlockQuantized", inputs, ROWS, attributes, DOMAIN)
        new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self.model.graph.remove(node, safe=True)

    def _node(
        self,
        before: ir.Node,
        op: str,
        inputs: list[ir.Value | None] | list[ir.Value],
        part: str,
        attributes: dict[str, int] | None = None,
        domain: str = "",
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes or {}, domain=domain, name=f"{before.name}.{part}")
        node.outputs[0].name = f"{before.name}.{part}"
        self.model.graph.insert_before(before, node)
        return node.outputs[0]


def _thin(matrix: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(matrix.detach().float().numpy().astype(dtype))
