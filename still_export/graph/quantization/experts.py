"""Quantized experts: rounded one at a time, stored as still::ExpertsNBits reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
from torch import Tensor

from still_export.errors import UnsupportedError
from still_export.graph.quantization.forms import EXACT, Form
from still_export.graph.quantization.policy import Quantization
from still_export.graph.quantization.quantizers import quantize, relative_error
from still_export.graph.quantization.stored import as_words, store_values
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.weights import Deferred, Weight, is_coded, narrow_value_of
from still_graphs.edits import put_in_place
from still_kernels.experts.spec import EXPERTS
from still_kernels.experts_nbits.spec import EXPERTS_NBITS

STACKED = 3
"""Dimensions of a stacked expert weight."""
WORD = 4
"""Bytes of a word."""


class StackedWeight:
    """A weight [E, rows, inputs] in blocks, made once for all that is stored of it.

    Raises:
        UnsupportedError: The target's 8 bits have no blocks, which the op has.
    """

    def __init__(self, name: str, weight: Weight, form: Form, policy: Quantization, rounded: dict[str, float]) -> None:
        if form.bits > 4 and not policy.layout.blocks_of_eight:
            raise UnsupportedError(
                f"--to {policy.to} has no experts of {form.bits} bits ({name}). Export with --quantize int4 or --to onnx."
            )
        self.name, self.weight, self.form, self.policy, self.rounded = name, weight, form, policy, rounded
        self.shape: tuple[int, ...] = tuple(weight.shape)
        self._made: list[BlockWeight] = []

    @property
    def made(self) -> list[BlockWeight]:
        """Blocks of each expert, cached until `forget`."""
        if not self._made:
            whole = self.weight
            if isinstance(whole, Deferred) and whole.part is not None:
                read = whole.part
            else:
                read = narrow_value_of(whole).detach().__getitem__
            self._made = [self._one(read, number) for number in range(self.shape[0])]
        return self._made

    def _one(self, read: Callable[[int], Tensor], number: int) -> BlockWeight:
        size = self.policy.block_size
        if self.form.method == EXACT:
            assert isinstance(self.weight, Deferred) and self.weight.blocks is not None
            return self.weight.blocks.read(number).split(size)
        values = read(number)
        made = quantize(values, self.form.bits, size)
        if is_coded(self.weight):  # the largest of the experts
            self.rounded[self.name] = max(self.rounded.get(self.name, 0.0), relative_error(made, values))
        return made

    def stored(self, model: ir.Model, dtype: ir.DataType) -> list[ir.Value | None]:
        """Words of codes, scales, and words of zero points if any; writing the last drops the blocks."""
        experts, rows, inputs = self.shape
        blocks, bits = inputs // self.policy.block_size, self.form.bits

        def add(part: str, columns: int, kind: ir.DataType, read: Callable[[BlockWeight], np.ndarray]) -> ir.Value:
            def values() -> np.ndarray:
                found = np.stack([read(each) for each in self.made])
                if part == "scales":
                    self._made = []
                return found

            return store_values(model, f"{self.name}.{part}", [experts, rows, columns], kind, values)

        codes = add(
            "blocks", inputs * bits // 8 // WORD, ir.DataType.INT32, lambda x: as_words(x.packed.reshape(rows, -1))
        )
        zero = None
        if self.form.zero_points:
            zero = add(
                "zero_points",
                -(-blocks * bits // (8 * WORD)),
                ir.DataType.INT32,
                lambda x: as_words(_there(x.zero_points)),
            )
        scales = add("scales", blocks, dtype, lambda x: x.scales.astype(dtype.numpy()))
        return [codes, scales, zero]


def quantize_experts(model: ir.Model, stacks: Mapping[str, StackedWeight]) -> None:
    """Replace the nodes that read `stacks` (by weight name), in place."""
    for node in [node for node in model.graph if node.op_type == EXPERTS.name and node.domain == EXPERTS.domain]:
        values = node.inputs[-2:]
        found = [stacks.get(str(value.name)) for value in values if value is not None]
        both = [weight for weight in found if weight is not None]
        if len(both) != len(values):
            continue
        first, dtype = both[0], values[0].dtype if values[0] is not None else None
        inputs = list(node.inputs[:-2])
        for weight in both:
            del model.graph.initializers[weight.name]
            inputs += weight.stored(model, dtype or ir.DataType.FLOAT)
        sizes = {"bits": first.form.bits, "block_size": first.policy.block_size}
        attributes = [*node.attributes.values(), *(ir.AttrInt64(name, value) for name, value in sizes.items())]
        made = ir.Node(EXPERTS_NBITS.domain, EXPERTS_NBITS.name, inputs, attributes, num_outputs=1, name=node.name)
        model.graph.insert_before(node, made)
        put_in_place(node.outputs[0], made.outputs[0])
        model.graph.remove(node, safe=True)


def _there(values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return values
