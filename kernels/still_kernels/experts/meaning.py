"""The definition of still::Experts: one expert after the other, with the tokens that go to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_graphs.errors import ShapeError
from still_kernels.experts.spec import EXPERTS
from still_kernels.sizes import sizes_of_call
from still_kernels.torch_ops import traced_op


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64.

    rounded: What becomes of the rows that each matrix reads, for runtimes that round them; None: nothing.
    """

    input: Tensor
    expert: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    activation: str = "swiglu"
    rounded: Callable[[Tensor], Tensor] | None = None

    def check(self) -> None:
        """Raise ShapeError naming the tensor or attribute that does not fit."""
        sizes = sizes_of_call(EXPERTS, self)
        rows = sizes["M"] * (2 if self.activation == "swiglu" else 1)
        if sizes["R"] != rows:
            raise ShapeError(f"gate_up: expected {rows} rows for each expert with {self.activation}, got {sizes['R']}.")


def naive_experts(inputs: Inputs) -> Tensor:
    """The weighted sum of the experts of each token, [B, T, I], dtype of input; summed in at least float32."""
    inputs.check()
    wide = torch.promote_types(inputs.input.dtype, torch.float32)
    tokens, shares = inputs.input.flatten(0, 1).to(wide), inputs.weight.flatten(0, 1).to(wide)
    expert = inputs.expert.flatten(0, 1)
    output = torch.zeros_like(tokens)
    rounded = inputs.rounded or (lambda rows: rows)
    for number in expert.unique().tolist():
        token, place = (expert == number).nonzero(as_tuple=True)
        inner = rounded(tokens[token]) @ inputs.gate_up[number].to(wide).T
        if inputs.activation == "swiglu":
            inner = silu(inner[:, ::2]) * inner[:, 1::2]
        else:
            inner = inner.relu().square()
        part = rounded(inner) @ inputs.down[number].to(wide).T
        output = output.index_add(0, token, part * shares[token, place, None])
    return output.view(inputs.input.shape).to(inputs.input.dtype)


@traced_op(EXPERTS, Inputs)
def experts(inputs: Inputs) -> tuple[Tensor]:
    """The same alone in a tuple; one node where a program is traced."""
    return (naive_experts(inputs),)
