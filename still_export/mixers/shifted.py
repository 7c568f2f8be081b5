"""Modules whose tokens read a part of the token before, as RWKV's do."""

from __future__ import annotations

import math

from torch import Tensor

from still_export.mixers.causal_conv.op import causal_conv
from still_export.mixers.fixed import FixedStateModule
from still_kernels.causal_conv.meaning import Inputs

LEAST_DECAY = -math.exp(-0.5)
"""What the logarithm of a decay of RWKV-7 is more than."""


class ShiftedModule(FixedStateModule):
    """A module whose tokens read a part of the token before."""

    def shift(self, x: Tensor, state: Tensor, new_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The token before less each token of x [B, T, C], and the state after the call."""
        taps = x.new_tensor([1.0, -1.0]).expand(x.shape[-1], 1, 2)
        return causal_conv(Inputs(x, taps.contiguous(), None, new_tokens, "none"), state)
