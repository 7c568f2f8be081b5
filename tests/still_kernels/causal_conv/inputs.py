"""Calls of still::CausalConv: layers, splits, and what a loop over tokens makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_kernels.causal_conv.meaning import Inputs, empty_state

Split = int | list[int]
SPLITS: list[Split] = [5, 1, 1, [2, 7], [0, 3], [1, 2], [3, 0], [0, 0], 16, 2, 1]
"""Around the K - 1 columns of the state: pieces of 1, 2, 3 tokens, rows without tokens."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer."""

    channels: int = 10
    taps: int = 4
    bias: bool = False
    activation: str = "silu"


LAYERS = [Layer(), Layer(bias=True, activation="none"), Layer(37, 3, True), Layer(6, 7, activation="none"), Layer(5, 2)]


@dataclass(frozen=True)
class Call:
    """One call: padded inputs with NaN where there is no token, and what must come out."""

    inputs: Inputs
    output: Tensor
    state: Tensor


def loop(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and state of one token after the other."""
    output, present = torch.zeros_like(inputs.input), state.clone()
    bias = 0 if inputs.bias is None else inputs.bias
    for row, count in enumerate(inputs.counts().tolist()):
        for t in range(count):
            latest = torch.cat((present[row], inputs.input[row, t, :, None]), dim=1)  # [C, K]
            sums = (latest * inputs.weight[:, 0]).sum(1) + bias
            output[row, t] = silu(sums) if inputs.activation == "silu" else sums
            present[row] = latest[:, 1:]
    return output, present


def calls(layer: Layer, splits: Sequence[Split], dtype: torch.dtype = torch.float32, batch: int = 2) -> Iterator[Call]:
    """The calls that `splits` (tokens of all rows, or of each) make of random tokens; outputs in float64 arithmetic."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weight = normal(layer.channels, 1, layer.taps)
    bias = normal(layer.channels) if layer.bias else None
    state = empty_state(batch, layer.channels, layer.taps, torch.float64)
    for split in splits:
        new = torch.tensor(split if isinstance(split, list) else [split] * batch)
        tokens = normal(batch, max(int(new.max()), 1), layer.channels)
        wide = Inputs(tokens.double(), weight.double(), None if bias is None else bias.double(), new, layer.activation)
        output, state = loop(wide, state)
        tokens[torch.arange(tokens.shape[1]) >= new[:, None]] = torch.nan
        yield Call(Inputs(tokens, weight, bias, new, layer.activation), output, state)
