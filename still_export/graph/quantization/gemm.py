"""Products with quantized weights, for three hosts: ONNX Runtime's own node, a standard node that dequantizes, this project's kernels.

Weights that multiply the same value in blocks of one kind become one product whose result is split, because a node costs more than a step's
numbers. Offsets and LoRA do not fit the block format. They become one extra low-rank product, `inner` [K, R] times `outer` [R, N]: `inner`
sums blocks and has the first matrices of the pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from still_export.errors import UnsupportedError
from still_export.graph.quantization.forms import CODES, FLOAT8_CODES, K_QUANT, LEAST, MIDDLE, ORDER, SUMS
from still_export.graph.quantization.policy import NODES
from still_export.graph.quantization.stored import (
    StoredWeight,
    as_words,
    at_start,
    cast_value,
    replace_nodes,
    store_values,
)
from still_export.mixers.roles import FEED_FORWARD, GATE, PROJECTION
from still_export.models.read.blocks import BlockWeight, unpack
from still_export.models.read.super_blocks import tile_numbers, tile_words
from still_export.models.read.weights import LORA_A, LORA_B, TOGETHER, value_of
from still_graphs.edits import CONTRIB, add_node, store, typed
from still_graphs.spec import DOMAIN
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from still_kernels.matmul_nbits.spec import MATMUL_NBITS, NUMBERS, SUPER, WORDS

ADAPTED = (PROJECTION, FEED_FORWARD, GATE)
"""Roles of weights that adapters train."""
ACCURACY_LEVEL = 4
"""Activations are rounded to 8 bits, block by block. The only level with a kernel for 8-bit weights on CPUs (others dequantize the whole
weight every call: 107 ms in the place of 1.2 for the head of SmolLM2-135M); at 4 bits a step is 3 times as fast as level 0 and a call
of 512 tokens takes twice as long (576 x 1,536, one thread, AVX-512 VNNI, ONNX Runtime 1.31.1)."""


class Product(ABC):
    """One value times concatenated weights of one kind."""

    domain = ""
    """Domain of its nodes."""
    takes_offsets = False
    """Whether its nodes support offsets."""

    def __init__(self, model: ir.Model, weights: list[StoredWeight]) -> None:
        self.model, self.weights = model, weights
        self.name = TOGETHER.join(weight.name for weight in weights)
        first = weights[0]
        self.form, self.policy, self.dtype, self.inputs = first.form, first.policy, first.dtype, first.inputs
        self.outputs = sum(weight.outputs for weight in weights)
        self.blocks = first.blocks if first.form.base is not None else 0
        self.offsets = any(weight.form.offsets for weight in weights)
        self.sums = self.offsets and not self.takes_offsets  # offsets are in the low-rank product
        self.left: set[str] = set()

    def write(self, nodes: list[ir.Node]) -> None:
        """Replace `nodes`: one of each weight, or all of a single weight."""
        if len(self.weights) == 1:
            for node in nodes:
                replace_nodes(self.model, [node], [self._result(node)])
            return
        first = next(node for node in self.model.graph if node in nodes)  # a reader of one may precede the others
        total = self._result(first)
        widths = [weight.outputs for weight in self.weights]
        sizes = store(self.model.graph, ir.tensor(widths, dtype=ir.DataType.INT64, name=f"{total.name}.sizes"))
        split = ir.node("Split", [total, sizes], {"axis": -1}, num_outputs=len(nodes), name=f"{total.name}.split")
        self.model.graph.insert_before(first, split)
        replace_nodes(self.model, nodes, list(split.outputs))

    @abstractmethod
    def _multiplied(self, node: ir.Node, read: ir.Value) -> ir.Value:
        """The product of `read` and the blocks, inserted before `node`."""

    @abstractmethod
    def _block_parts(self) -> dict[str, ir.Value]:
        """Stored parts of the blocks."""

    def _result(self, node: ir.Node) -> ir.Value:
        read = node.inputs[0]
        assert read is not None
        terms = []
        if self.form.base is not None:
            terms.append(self._multiplied(node, self._ordered(node, read)))
        if "inner" in self.values:
            terms.append(
                self._product_of_two(node, read, self.values["inner"], self.values["outer"], ("inner", "outer"))
            )
        if self.place is not None:
            terms.append(self._product_of_two(node, read, *self.adapter, (LORA_A, LORA_B)))
        total = terms[0]
        for i, term in enumerate(terms[1:]):
            added = add_node(self.model.graph, node, "Add", [total, term], f"sum{i}" if i else "sum")
            total = self._typed(added, read, self.outputs)
        return total

    def _ordered(self, node: ir.Node, read: ir.Value) -> ir.Value:
        """`read` permuted to the order of the blocks' inputs, inserted before `node`."""
        if self.form.order is None:
            return read
        name, known = f"{self.name}.{ORDER}", self.model.graph.initializers
        order = known.get(name) or store(self.model.graph, ir.tensor(self.form.order, name=name))
        found = add_node(self.model.graph, node, "Gather", [read, order], ORDER, {"axis": -1})
        return self._typed(found, read, self.inputs)

    def _product_of_two(
        self, node: ir.Node, read: ir.Value, a: ir.Value, b: ir.Value, parts: tuple[str, str]
    ) -> ir.Value:
        """The product of `read` and both low-rank matrices, inserted before `node`."""
        assert a.shape is not None
        inner = self._typed(add_node(self.model.graph, node, "MatMul", [read, a], parts[0]), read, a.shape[-1])
        return self._typed(add_node(self.model.graph, node, "MatMul", [inner, b], parts[1]), read, self.outputs)

    def _typed(self, value: ir.Value, read: ir.Value, size: int | ir.SymbolicDim) -> ir.Value:
        """`value` with its shape and type set: nothing infers those after our nodes."""
        return value if read.shape is None else typed(value, [*read.shape[:-1], size], self.dtype)

    @property
    def place(self) -> dict[str, Any] | None:
        """The manifest's entry on LoRA pairs that this product accepts at run time; None: none."""
        first = self.weights[0]
        if not first.policy.adapters or first.role not in ADAPTED:
            return None
        names, outputs = zip(*((weight.name, weight.outputs) for weight in self.weights), strict=True)
        return {"weights": list(names), "inputs": self.inputs, "outputs": list(outputs)}

    @cached_property
    def adapter(self) -> tuple[ir.Value, ir.Value]:
        """Graph inputs [K, R] and [R, N], R the ranks of an adapter's pairs; R is 0 without an adapter."""
        rank, zero = f"rank.{self.name}", self.dtype.numpy()
        a = self._input(LORA_A, ir.Shape([self.inputs, rank]), np.zeros((self.inputs, 0), zero))
        return a, self._input(LORA_B, ir.Shape([rank, self.outputs]), np.zeros((0, self.outputs), zero))

    def _input(self, part: str, shape: ir.Shape, default: np.ndarray) -> ir.Value:
        value = store(self.model.graph, ir.tensor(default, dtype=self.dtype, name=f"{self.name}.{part}"))
        value.shape = shape
        self.model.graph.inputs.append(value)
        return value

    @cached_property
    def values(self) -> dict[str, ir.Value]:
        """Stored parts: blocks, `inner` and `outer`."""
        found = self._block_parts() if self.form.base is not None else {}
        if self.sums or self.rank:
            found |= self._thin(found)
        return found

    @property
    def rank(self) -> int:
        """Columns of `inner` that belong to pairs."""
        return sum(weight.rank for weight in self.weights)

    def _thin(self, parts: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """`inner` and `outer`; `parts`: those of the blocks."""
        rank = self.rank + (self.blocks if self.sums else 0)
        outer = self._stored("outer", [rank, self.outputs], self.dtype, self._outer)
        if not self.rank:
            return {"inner": self._stored_sums(), "outer": outer}
        return {"inner": self._stored("inner", [self.inputs, rank], self.dtype, self._inner), "outer": outer}

    def _stored_sums(self) -> ir.Value:
        """The sums over blocks [K, K / block], one for all products of so many inputs."""
        name, shape = f"{SUMS}.{self.inputs}", [self.inputs, self.blocks]
        known = self.model.graph.initializers.get(name)
        return known or store_values(self.model, name, shape, self.dtype, self._as_dtype(self._block_sums))

    def _as_dtype(self, read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        return lambda: np.ascontiguousarray(read().astype(self.dtype.numpy()))

    def _below_each_other(
        self, part: Callable[[BlockWeight], np.ndarray | None], turned: bool = False
    ) -> Callable[[], np.ndarray]:
        """`part` of all weights concatenated along the outputs; `turned`: outputs are the last axis."""

        def read() -> np.ndarray:
            parts = [part(weight.made) for weight in self.weights]
            arrays = [values for values in parts if values is not None]
            values = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]  # a head is large
            return values.T if turned else values

        return read

    def _inner(self) -> np.ndarray:
        """Sums over blocks and the pairs' first matrices, [K, R]."""
        return np.concatenate([*([self._block_sums()] if self.sums else []), self._pairs_inner()], axis=1)

    def _outer(self) -> np.ndarray:
        """Offsets and the pairs' second matrices, [R, N]."""
        return np.concatenate([*([self._offset_rows().T] if self.sums else []), self._pairs_outer()])

    def _block_sums(self) -> np.ndarray:
        return np.kron(np.eye(self.blocks, dtype=np.float32), np.ones((self.policy.block_size, 1), np.float32))

    def _offset_rows(self) -> np.ndarray:
        """Offsets [N, K / block], 0 for weights without."""
        rows = [weight.made.offsets if weight.form.offsets else None for weight in self.weights]
        shapes = ((weight.outputs, self.blocks) for weight in self.weights)
        found = [np.zeros(shape, np.float32) if x is None else x for x, shape in zip(rows, shapes, strict=True)]
        return np.concatenate(found)

    def _pairs_inner(self) -> np.ndarray:
        """First matrices of the pairs, [K, R]."""
        pairs = [pair for weight in self.weights for pair in weight.form.pairs]
        return np.concatenate(
            [np.zeros((self.inputs, 0), np.float32), *(_float(value_of(p.a).t()) for p in pairs)], axis=1
        )

    def _pairs_outer(self) -> np.ndarray:
        """Second matrices of the pairs, scaled, each at its weight's columns, [R, N]."""
        outer = np.zeros((self.rank, self.outputs), np.float32)
        column = row = 0
        for weight in self.weights:
            for pair in weight.form.pairs:
                size = int(pair.a.shape[0])
                outer[row : row + size, column : column + weight.outputs] = _float(value_of(pair.b).t() * pair.scale)
                row += size
            column += weight.outputs
        return outer

    def _stored(self, part: str, shape: list[int], dtype: ir.DataType, read: Callable[[], np.ndarray]) -> ir.Value:
        if part != "inner":
            self.left.add(part)

        def values() -> np.ndarray:
            found = np.ascontiguousarray(read().astype(dtype.numpy(), copy=False))
            self.left.discard(part)
            if not self.left:  # the last part made of the blocks
                for weight in self.weights:
                    weight.forget()
            return found

        return store_values(self.model, f"{self.name}.{part}", shape, dtype, values)


class BlockProduct(Product):
    """com.microsoft::MatMulNBits, whose blocks, scales and zero points are BlockWeight's."""

    domain = CONTRIB

    def _multiplied(self, node: ir.Node, read: ir.Value) -> ir.Value:
        attributes = {
            "K": self.inputs,
            "N": self.outputs,
            "bits": self.form.bits,
            "block_size": self.policy.block_size,
            "accuracy_level": ACCURACY_LEVEL,
        }
        parts = [self.values[part] for part in ("blocks", "scales", "zero_points") if part in self.values]
        return add_node(self.model.graph, node, "MatMulNBits", [read, *parts], "blocks", attributes, CONTRIB)

    def _block_parts(self) -> dict[str, ir.Value]:
        found: dict[str, ir.Value] = {}
        codes = [self.outputs, self.blocks, self.policy.block_size * self.form.bits // 8]
        found["blocks"] = self._stored("blocks", codes, ir.DataType.UINT8, self._below_each_other(lambda w: w.packed))
        scale_type, shape = self.weights[0].scale_type, [self.outputs, self.blocks]
        scales = self._stored("scales", shape, scale_type, self._below_each_other(lambda w: w.scales))
        found["scales"] = scales if scale_type == self.dtype else cast_value(self.model, scales, self.dtype)
        if self.form.zero_points:
            shape, read = [self.outputs, -(-self.blocks * self.form.bits // 8)], lambda w: w.zero_points
            found["zero_points"] = self._stored("zero_points", shape, ir.DataType.UINT8, self._below_each_other(read))
        return found

    def _thin(self, parts: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """With half precision scales, offsets are stored in half precision too, as the values of code 0; ONNX Runtime adds them at load."""
        scale_type = self.weights[0].scale_type
        if not self.offsets or scale_type == self.dtype:
            return super()._thin(parts)
        shape = [self.outputs, self.blocks]
        scales, least = parts["scales"], self._stored(LEAST, shape, scale_type, self._below_each_other(_least))
        middle = store(self.model.graph, ir.tensor(np.array(MIDDLE, self.dtype.numpy()), name=f"{self.name}.middle"))
        middles = self._folded("Mul", [scales, middle], shape, "middles")
        offsets = self._folded("Add", [middles, cast_value(self.model, least, self.dtype)], shape, "offsets")
        shape.reverse()
        thin = {
            "inner": self._stored_sums(),
            "outer": self._folded("Transpose", [offsets], shape, "offset_rows", perm=[1, 0]),
        }
        if self.rank:
            inner = self._stored("inner", [self.inputs, self.rank], self.dtype, self._pairs_inner)
            outer = self._stored("outer", [self.rank, self.outputs], self.dtype, self._pairs_outer)
            rank = self.blocks + self.rank
            thin["outer"] = self._folded("Concat", [thin["outer"], outer], [rank, self.outputs], "outers", axis=0)
            thin["inner"] = self._folded("Concat", [thin["inner"], inner], [self.inputs, rank], "inners", axis=1)
        return thin

    def _folded(self, op: str, inputs: list[ir.Value], shape: list[int], part: str, **attributes: Any) -> ir.Value:
        """A node over constants, after casts of the stored ones."""
        node = ir.node(op, inputs, attributes, name=f"{self.name}.{part}")
        node.outputs[0].name = node.name
        made = inputs[0].producer()
        if made is None:
            self.model.graph.insert_before(self.model.graph[0], node)
        else:
            self.model.graph.insert_after(made, node)
        return typed(node.outputs[0], shape, self.dtype)


class DequantizedProduct(Product):
    """DequantizeLinear over signed codes [K, N] and scales, [K / block, N] or one for each output, [N], before a MatMul.

    Compilers such as TensorRT's keep the codes, and dequantize inside the product's kernel.
    """

    def _multiplied(self, node: ir.Node, read: ir.Value) -> ir.Value:
        return add_node(self.model.graph, node, "MatMul", [read, self.values["weight"]], "blocks")

    def _block_parts(self) -> dict[str, ir.Value]:
        kind = ir.DataType.INT4 if self.form.bits == 4 else ir.DataType.INT8
        block = self.policy.block_of(self.form.bits, self.inputs)
        blocked = self.form.bits == 4 or self.policy.layout.blocks_of_eight
        codes = self._stored(
            CODES, [self.inputs, self.outputs], kind, self._below_each_other(_signed_rows, turned=True)
        )
        shape = [self.blocks, self.outputs] if blocked else [self.outputs]
        read = self._below_each_other(lambda w: w.scales, turned=True)
        scales = self._stored("scales", shape, self.dtype, lambda: read().reshape(shape))
        attributes = {"axis": 0, "block_size": block} if blocked else {"axis": 1}
        node = ir.node("DequantizeLinear", [codes, scales], attributes, name=f"{codes.name}.dequantize")
        return {CODES: codes, "scales": scales, "weight": at_start(self.model, node, codes, self.dtype)}


class PluginProduct(Product):
    """still::MatMulNBits, with BlockWeight's parts in words of four bytes; scales may be half precision."""

    domain, takes_offsets = DOMAIN, True
    op = MATMUL_NBITS.name

    def _multiplied(self, node: ir.Node, read: ir.Value) -> ir.Value:
        graph, rows = self.model.graph, read.shape
        if rows is None or len(rows) not in (2, 3):
            raise UnsupportedError(f"{node.name} multiplies {rows}, not tokens; export without --quantize.")
        single = len(rows) == 2  # values of one token each
        axis = None
        if single:
            axis = store(graph, ir.tensor([1], dtype=ir.DataType.INT64, name=f"{node.name}.axis"))
            read = typed(add_node(graph, node, "Unsqueeze", [read, axis], "row"), [rows[0], 1, rows[1]], self.dtype)
        parts, attributes = self._inputs()
        shape = [rows[0], 1 if single else rows[1], self.outputs]
        found = typed(add_node(graph, node, self.op, [read, *parts], "blocks", attributes, DOMAIN), shape, self.dtype)
        if axis is not None:
            found = typed(add_node(graph, node, "Squeeze", [found, axis], "rows"), [rows[0], self.outputs], self.dtype)
        return found

    def _inputs(self) -> tuple[list[ir.Value | None], dict[str, int]]:
        """The node's stored inputs in order, and its attributes."""
        attributes = {"bits": self.form.bits, "block_size": self.policy.block_size}
        if LEAST in self.values:
            attributes["zero_code"] = 0  # codes start at 0
        return [self.values.get(part) for part in ("blocks", "scales", "zero_points", self._offsets)], attributes

    def _block_parts(self) -> dict[str, ir.Value]:
        words = self.inputs * self.form.bits // 32
        packed = self._below_each_other(lambda w: w.packed)
        found = {"blocks": self._stored("blocks", [self.outputs, words], ir.DataType.INT32, lambda: as_words(packed()))}
        scales, scale_type = self._below_each_other(lambda w: w.scales), self.weights[0].scale_type
        found["scales"] = self._stored("scales", [self.outputs, self.blocks], scale_type, scales)
        if self.form.zero_points:
            words, zero = -(-self.blocks * self.form.bits // 32), self._below_each_other(lambda w: w.zero_points)
            shape = [self.outputs, words]
            found["zero_points"] = self._stored("zero_points", shape, ir.DataType.INT32, lambda: as_words(zero()))
        if self.offsets:
            read = self._offset_rows if self._offsets != LEAST else self._below_each_other(_least)
            found[self._offsets] = self._stored(self._offsets, [self.outputs, self.blocks], scale_type, read)
        return found

    @property
    def _offsets(self) -> str:
        """Name of the offsets added to a block: with half precision scales the value of code 0, as in files."""
        return LEAST if self.offsets and self.weights[0].scale_type != self.dtype else "offsets"


class SuperBlockProduct(PluginProduct):
    """still::MatMulNBits over K-quants as a GGUF file has them."""

    def _inputs(self) -> tuple[list[ir.Value | None], dict[str, int]]:
        blocks = self.weights[0].super_blocks
        attributes = {"bits": blocks.bits, "block_size": blocks.block, "super_block": SUPER}
        return [self.values[K_QUANT[blocks.bits]], self.values["numbers"]], attributes

    def _block_parts(self) -> dict[str, ir.Value]:
        return store_super_blocks(self.model, self.name, self.weights)


def store_super_blocks(model: ir.Model, name: str, weights: Sequence[StoredWeight]) -> dict[str, ir.Value]:
    """Words and numbers of K-quants, weights concatenated along the outputs, by part."""
    bits, supers = weights[0].super_blocks.bits, weights[0].inputs // SUPER
    outputs = sum(weight.outputs for weight in weights)

    def stored(part: str, count: int, dtype: ir.DataType, read: Callable[[np.ndarray, int], np.ndarray]) -> ir.Value:
        def values() -> np.ndarray:
            parts = [read(weight.super_blocks.read(), bits) for weight in weights]
            return np.concatenate(parts) if len(parts) > 1 else parts[0]  # a head is large

        return store_values(model, f"{name}.{part}", [outputs, supers * count], dtype, values)

    return {
        K_QUANT[bits]: stored(K_QUANT[bits], WORDS[bits], ir.DataType.INT32, tile_words),
        "numbers": stored("numbers", NUMBERS[bits], ir.DataType.FLOAT16, tile_numbers),
    }


class Float8Product(PluginProduct):
    """still::DenseMatMul over codes in e4m3."""

    op = DENSE_MATMUL.name

    def _inputs(self) -> tuple[list[ir.Value | None], dict[str, int]]:
        inputs = {"codes": self.values[FLOAT8_CODES], "scales": self.values["scales"]}
        return [inputs.get(name) for name in DENSE_MATMUL.input_names()[1:]], {}

    def _block_parts(self) -> dict[str, ir.Value]:
        packed, scales = (
            self._below_each_other(lambda w: w.packed),
            self._below_each_other(lambda w: w.scales, turned=True),
        )
        shape = [self.outputs, self.inputs // 4]
        codes = self._stored(FLOAT8_CODES, shape, ir.DataType.INT32, lambda: as_words(packed()))
        return {
            FLOAT8_CODES: codes,
            "scales": self._stored("scales", [self.blocks, self.outputs], ir.DataType.FLOAT, scales),
        }


PRODUCTS: dict[str, type[Product]] = dict(zip(NODES, (BlockProduct, DequantizedProduct, PluginProduct), strict=True))
"""By Layout.nodes."""


def _least(weight: BlockWeight) -> np.ndarray:
    """The value of code 0, [N, K / block]; without offsets, the one that makes them 0."""
    offsets = 0 if weight.offsets is None else weight.offsets
    return np.asarray(offsets - MIDDLE * weight.scales)


def _signed_rows(weight: BlockWeight) -> np.ndarray:
    """Codes [N, K] around 0."""
    codes = unpack(weight.packed, weight.bits).reshape(len(weight.packed), -1).astype(np.int16) - (1 << weight.bits - 1)
    return codes.astype(ir.DataType.INT4.numpy() if weight.bits == 4 else np.int8)


def _float(matrix: torch.Tensor) -> np.ndarray:
    return matrix.detach().float().numpy()
