"""A gated short convolution, replacing a family's module: output = C * conv(B * x)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from still_export.errors import UnsupportedModelError
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs
from still_kernels.causal_conv.spec import CAUSAL_CONV

COVERED = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")


class ShortConv(FixedStateModule):
    """The convolution with its projections."""

    weight_roles: ClassVar[dict[str, str]] = {
        "in_proj.weight": PROJECTION,
        "out_proj.weight": PROJECTION,
        "conv.weight": NORM,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        if type(base).__name__ not in COVERED:
            raise UnsupportedModelError(
                f"{type(base).__name__} is no short convolution that is covered: {', '.join(COVERED)}."
            )

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states, new_tokens, layer = self.begin(hidden_states, past_key_values)
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        mixed, columns = causal_conv(
            Inputs(before * x, self.conv.weight, self.conv.bias, new_tokens), states["conv_state"]
        )
        if layer is not None:
            layer.store({"conv_state": columns})
        return self.out_proj(after * mixed)


class ShortConvMixer(FixedStatesMixer):
    name = "short_conv"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": config.conv_L_cache - 1}),)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return ShortConv(base, self.ops(config, index))
