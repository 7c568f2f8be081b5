"""Modules whose tokens read a part of the token before, as RWKV's do."""

from __future__ import annotations

import math

from torch import Tensor

from still_export.mixers.fixed import FixedStateModule
from still_kernels.causal_conv.meaning import Inputs
from still_kernels.causal_conv.traced import causal_conv
from still_kernels.rank_one_attention.meaning import Inputs as RankOneInputs

LEAST_DECAY = -math.exp(-0.5)
"""What the logarithm of a decay of RWKV-7 is more than."""


class ShiftedModule(FixedStateModule):
    """A module whose tokens read a part of the token before."""

    def shift(self, x: Tensor, state: Tensor, new_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The token before less each token of x [B, T, C], and the state after the call."""
        taps = x.new_tensor([1.0, -1.0]).expand(x.shape[-1], 1, 2)
        return causal_conv(Inputs(x, taps.contiguous(), None, new_tokens, "none"), state)


def rank_one_inputs(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, moved: Tensor, rate: Tensor, new_tokens: Tensor
) -> RankOneInputs:
    """What RWKV-7's rule gives to the op, which reads the state behind its decay; the model reads it before.

    Args:
        query, key, value: [B, T, H, D].
        decay: Its logarithm, [B, T, H, D], float32.
        moved: Keys of unit length whose values in the state move at `rate`, both [B, T, H, D], float32.
    """
    back, forth = (-moved * (-decay).exp()).to(value.dtype), (moved * rate).to(value.dtype)
    return RankOneInputs(query, key, value, decay, back, forth, new_tokens)
