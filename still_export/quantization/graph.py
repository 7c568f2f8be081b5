"""From products and rows of weights to MatMulNBits and GatherBlockQuantized, whose weights are rounded when they are written.

Weights that the same value is multiplied with, in blocks of one kind, are one product, whose result is split: at a step's sizes a node
costs more than its numbers. What MatMulNBits has no place for, offsets of blocks and LoRA's pairs, is one more product of two thin
matrices for all of them: `inner` [K, R] sums blocks and holds the first matrices of the pairs, `outer` [R, N] the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import numpy as np
import onnx_ir as ir
import torch

from still_export.errors import UnsupportedError
from still_export.export.graph_edits import CONTRIB, add_node, put_in_place, store
from still_export.export.lower import lazy_tensor
from still_export.export.weights_file import VIEW
from still_export.models.blocks import BlockWeight
from still_export.models.checkpoint import in_range
from still_export.models.weights import Deferred, Weight, Weights, value_of
from still_export.quantization.forms import EXACT, ROWS, SUMS, TOGETHER, Form, form_of
from still_export.quantization.policy import HALF, Quantization
from still_export.quantization.quantizers import quantize

ACCURACY_LEVEL = 4
"""Activations are rounded to 8 bits, block by block. The only level with a kernel for 8-bit weights on CPUs (others dequantize the whole
weight every call: 107 ms in the place of 1.2 for the head of SmolLM2-135M); at 4 bits a step is 3 times as fast as level 0 and a call
of 512 tokens takes twice as long (576 x 1,536, one thread, AVX-512 VNNI, ONNX Runtime 1.31.1)."""


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
    groups: dict[tuple[object, ...], list[tuple[_Quantized, ir.Node]]] = {}
    gathers: list[tuple[_Quantized, ir.Node]] = []
    for name, form in forms.items():
        if form.bits == HALF:
            _halve(model, name, weights[name])
            continue
        weight = _Quantized(name, weights[name], form, asked)
        products, rows = _readers(model, weight)
        alone = name if form.base is None or len(products) + len(rows) > 1 else ""
        for node in products:
            kind = (id(node.inputs[0]), alone, form.bits, form.zero_points, form.half_scales, weight.dtype)
            groups.setdefault(kind, []).append((weight, node))
        gathers += [(weight, node) for node in rows]
    for group in groups.values():
        _Product(model, list(dict.fromkeys(weight for weight, _ in group))).write([node for _, node in group])
    for weight, node in gathers:  # after the products: rows of a tied embedding are the head's blocks
        _write_rows(model, weight, node)
    model.graph.opset_imports[CONTRIB] = 1
    return {name: (form.bits if form.base is not None else None, form.method) for name, form in forms.items()}


def _readers(model: ir.Model, weight: _Quantized) -> tuple[list[ir.Node], list[ir.Node]]:
    """The products and the Gathers that read a weight, which is taken out of the graph."""
    value = model.graph.initializers.pop(weight.name)
    weight.dtype = value.dtype or ir.DataType.FLOAT
    products: list[ir.Node] = []
    rows: list[ir.Node] = []
    for node, index in [(node, index) for node, index in value.uses()]:
        if node.op_type == "MatMul" and index == 1:
            products.append(node)
        elif node.op_type == "Transpose":
            products += [product for product, _ in node.outputs[0].uses()]
        elif node.op_type == "Gather" and index == 0:
            rows.append(node)
        else:
            raise UnsupportedError(
                f"{weight.name} is read by {node.op_type}, which has no form with quantized weights."
            )
    return products, rows


def _halve(model: ir.Model, name: str, weight: Weight) -> None:
    """Store a weight in float16 and cast it."""
    value = model.graph.initializers[name]
    if value.dtype != ir.DataType.FLOAT:
        return
    half = Deferred(weight.shape, torch.float16, lambda: in_range(name, value_of(weight).detach(), torch.float16))
    stored = store(model.graph, lazy_tensor(f"{name}.half", half))
    ir.convenience.replace_all_uses_with(value, _cast(model, stored, ir.DataType.FLOAT))
    del model.graph.initializers[name]


def _cast(model: ir.Model, stored: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A stored weight in another type; ONNX Runtime casts once, when it loads the graph."""
    cast = ir.node("Cast", [stored], {"to": int(dtype)}, name=f"{stored.name}.cast")
    output = cast.outputs[0]
    output.name, output.shape, output.type = f"{stored.name}.value", stored.shape, ir.TensorType(dtype)
    model.graph.insert_before(model.graph[0], cast)
    return output


class _Quantized:
    """A weight [N, K] in its form, made once for all that is stored of it."""

    def __init__(self, name: str, weight: Weight, form: Form, asked: Quantization) -> None:
        self.name, self.form, self.asked = name, form, asked
        self.outputs, self.inputs = weight.shape
        self.dtype = ir.DataType.FLOAT
        self._made: BlockWeight | None = None

    @property
    def made(self) -> BlockWeight:
        """Its blocks, kept until `forget`."""
        if self._made is None:
            base = self.form.base
            assert base is not None
            if self.form.method == EXACT:
                assert isinstance(base, Deferred) and base.blocks is not None
                self._made = base.blocks.read()
            else:
                values = value_of(base).detach().float().numpy()
                self._made = quantize(values, self.form.bits, self.asked.block_size, self.form.method)
        return self._made

    def forget(self) -> None:
        self._made = None

    @property
    def scale_type(self) -> ir.DataType:
        """Of its scales in the file."""
        return ir.DataType.FLOAT16 if self.form.half_scales and self.dtype == ir.DataType.FLOAT else self.dtype

    @property
    def rank(self) -> int:
        """Columns that its pairs have in `inner`."""
        return sum(int(pair.a.shape[0]) for pair in self.form.pairs)


class _Product:
    """One value times weights of one kind, side by side."""

    def __init__(self, model: ir.Model, weights: list[_Quantized]) -> None:
        self.model, self.weights = model, weights
        self.name = TOGETHER.join(weight.name for weight in weights)
        first = weights[0]
        self.form, self.asked, self.dtype, self.inputs = first.form, first.asked, first.dtype, first.inputs
        self.outputs = sum(weight.outputs for weight in weights)
        self.offsets = any(weight.form.offsets for weight in weights)
        self.left: set[str] = set()

    def write(self, nodes: list[ir.Node]) -> None:
        """Replace `nodes`, one of each weight, or all of the single one."""
        if len(self.weights) == 1:
            for node in nodes:
                _replace(self.model, [node], [self._result(node)])
            return
        total = self._result(nodes[0])
        widths = [weight.outputs for weight in self.weights]
        sizes = store(self.model.graph, ir.tensor(widths, dtype=ir.DataType.INT64, name=f"{total.name}.sizes"))
        split = ir.node("Split", [total, sizes], {"axis": -1}, num_outputs=len(nodes), name=f"{total.name}.split")
        self.model.graph.insert_before(nodes[0], split)
        _replace(self.model, nodes, list(split.outputs))

    def _result(self, node: ir.Node) -> ir.Value:
        read = node.inputs[0]
        assert read is not None
        terms = []
        if self.form.base is not None:
            attributes = {
                "K": self.inputs,
                "N": self.outputs,
                "bits": self.form.bits,
                "block_size": self.asked.block_size,
                "accuracy_level": ACCURACY_LEVEL,
            }
            inputs = [read, *(value for part, value in self.values.items() if part not in ("inner", "outer"))]
            terms.append(add_node(self.model.graph, node, "MatMulNBits", inputs, "blocks", attributes, CONTRIB))
        if "inner" in self.values:
            inner = add_node(self.model.graph, node, "MatMul", [read, self.values["inner"]], "inner")
            terms.append(add_node(self.model.graph, node, "MatMul", [inner, self.values["outer"]], "outer"))
        return terms[0] if len(terms) == 1 else add_node(self.model.graph, node, "Add", terms, "sum")

    @cached_property
    def values(self) -> dict[str, ir.Value]:
        """What is stored, by part: blocks, scales, zero_points as MatMulNBits reads them; inner and outer."""
        first, form, blocks = self.weights[0], self.form, self.inputs // self.asked.block_size
        found: dict[str, ir.Value] = {}
        if form.base is not None:
            codes = [self.outputs, blocks, self.asked.block_size * form.bits // 8]
            found["blocks"] = self._stored("blocks", codes, ir.DataType.UINT8, self._side_by_side(lambda w: w.packed))
            scale_type = first.scale_type
            scales = self._stored("scales", [self.outputs, blocks], scale_type, self._side_by_side(lambda w: w.scales))
            found["scales"] = scales if scale_type == self.dtype else _cast(self.model, scales, self.dtype)
            if form.zero_points:
                shape, read = [self.outputs, -(-blocks * form.bits // 8)], self._side_by_side(lambda w: w.zero_points)
                found["zero_points"] = self._stored("zero_points", shape, ir.DataType.UINT8, read)
        rank = sum(weight.rank for weight in self.weights) + (blocks if self.offsets else 0)
        if rank:
            found["inner"] = self._stored_inner(rank)
            found["outer"] = self._stored("outer", [rank, self.outputs], self.dtype, partial(self._outer, rank))
        self.left = {part for part in found if part != "inner"}
        return found

    def _stored_inner(self, rank: int) -> ir.Value:
        if any(weight.rank for weight in self.weights):
            return self._stored("inner", [self.inputs, rank], self.dtype, self._inner)
        name = f"{SUMS}.{self.inputs}"
        known = self.model.graph.initializers.get(name)
        return known or _store(self.model, name, [self.inputs, rank], self.dtype, self._as_dtype(self._inner))

    def _as_dtype(self, read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        return lambda: np.ascontiguousarray(read().astype(self.dtype.numpy()))

    def _side_by_side(self, part: Callable[[BlockWeight], np.ndarray | None]) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            parts = [part(weight.made) for weight in self.weights]
            return np.concatenate([values for values in parts if values is not None])

        return read

    def _inner(self) -> np.ndarray:
        """Sums over blocks, and the first matrices of the pairs, [K, R]."""
        columns = []
        if self.offsets:
            columns.append(np.kron(np.eye(self.inputs // self.asked.block_size), np.ones((self.asked.block_size, 1))))
        pairs = [pair for weight in self.weights for pair in weight.form.pairs]
        return np.concatenate([*columns, *(_float(value_of(pair.a).t()) for pair in pairs)], axis=1)

    def _outer(self, rank: int) -> np.ndarray:
        """Offsets, and the second matrices of the pairs with their scale, each at the columns of its weight, [R, N]."""
        outer = np.zeros((rank, self.outputs), np.float32)
        column, row = 0, self.inputs // self.asked.block_size if self.offsets else 0
        for weight in self.weights:
            part = slice(column, column + weight.outputs)
            if weight.form.offsets:
                offsets = weight.made.offsets
                assert offsets is not None
                outer[: offsets.shape[1], part] = offsets.T
            for pair in weight.form.pairs:
                size = int(pair.a.shape[0])
                outer[row : row + size, part] = _float(value_of(pair.b).t() * pair.scale)
                row += size
            column += weight.outputs
        return outer

    def _stored(self, part: str, shape: list[int], dtype: ir.DataType, read: Callable[[], np.ndarray]) -> ir.Value:
        def values() -> np.ndarray:
            found = np.ascontiguousarray(read().astype(dtype.numpy()))
            self.left.discard(part)
            if not self.left:  # the last that was made of the blocks
                for weight in self.weights:
                    weight.forget()
            return found

        return _store(self.model, f"{self.name}.{part}", shape, dtype, values)


def _write_rows(model: ir.Model, weight: _Quantized, node: ir.Node) -> None:
    """Rows of a weight; the head's blocks, where they are tied, in the shape of rows: the same bytes of the file."""
    name, initializers = weight.name, model.graph.initializers
    if f"{name}.{ROWS}" not in initializers:
        head = initializers.get(f"{name}.blocks")
        shape = [weight.outputs, weight.inputs * weight.form.bits // 8]
        if head is None:
            blocks = [weight.outputs, weight.inputs // weight.asked.block_size]
            _store(model, f"{name}.{ROWS}", shape, ir.DataType.UINT8, lambda: weight.made.packed.reshape(shape))
            scales = _store(model, f"{name}.scales", blocks, weight.scale_type, partial(_last_scales, weight))
            if weight.scale_type != weight.dtype:
                _cast(model, scales, weight.dtype)
        else:
            assert head.const_value is not None
            values = head.const_value.numpy
            rows = _store(model, f"{name}.{ROWS}", shape, ir.DataType.UINT8, lambda: values().reshape(shape))
            rows.metadata_props[VIEW] = f"{name}.blocks"
    scales = initializers[f"{name}.scales"]
    casts = [use.outputs[0] for use, _ in scales.uses() if use.op_type == "Cast"]
    attributes = {"gather_axis": 0, "quantize_axis": 1, "bits": weight.form.bits, "block_size": weight.asked.block_size}
    inputs = [initializers[f"{name}.{ROWS}"], node.inputs[1], casts[0] if casts else scales]
    _replace(model, [node], [add_node(model.graph, node, "GatherBlockQuantized", inputs, ROWS, attributes, CONTRIB)])


def _last_scales(weight: _Quantized) -> np.ndarray:
    """The scales of a weight whose codes are written before them, so that it can go."""
    scales = np.ascontiguousarray(weight.made.scales.astype(weight.scale_type.numpy()))
    weight.forget()
    return scales


def _store(
    model: ir.Model, name: str, shape: list[int], dtype: ir.DataType, read: Callable[[], np.ndarray]
) -> ir.Value:
    """An initializer whose values are made when they are written."""
    tensor = ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)
    return store(model.graph, tensor)


def _replace(model: ir.Model, nodes: list[ir.Node], values: list[ir.Value]) -> None:
    """Let `values` stand where the results of `nodes` did, under their names; a Transpose that only they read goes with them."""
    for node, value in zip(nodes, values, strict=True):
        old, weight = node.outputs[0], node.inputs[1] if node.op_type == "MatMul" else None
        put_in_place(old, value)
        model.graph.remove(node, safe=True)
        turned = weight.producer() if weight is not None else None
        if turned is not None and turned.op_type == "Transpose" and not turned.outputs[0].uses():
            model.graph.remove(turned, safe=True)


def _float(matrix: torch.Tensor) -> np.ndarray:
    return matrix.detach().float().numpy()
