"""PolaFormer's, InLine and MirrorLA attention in the place of a family's module. The gated rule keeps means: token n leaves (n - 1) / n of
the state, and what is written has the weight 1 / n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.causal_conv.op import causal_conv
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.linear_attention.op import linear_attention
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION

EPSILON = 1e-6
"""Added to normalizers, as PolaFormer has it."""


class InLineAttention(FixedStateModule):
    """InLine attention (arXiv:2412.06590): weights of a token are q k less their mean, plus 1 / n.

    Args:
        base: The family's module; its submodules and parameters are taken over, not copied.
        ops: Of the layer.
    """

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys((f"{x}_proj.weight" for x in "qkvo"), PROJECTION)
    """Of parameters that are no vectors, by name (mixers/roles.py)."""

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads, self.alpha, self.rectified = base.heads, base.alpha, base.rectified

    def parts(self, query: Tensor, key: Tensor, one: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Queries, two of most kinds, and a key for the rule, of heads [B, T, H, D]; `one` are ones [B, T, H, 1]."""
        if self.rectified:
            query, key = query.relu(), key.relu()
        zero = torch.zeros_like(one)
        queries = torch.cat((query * query.shape[-1] ** -0.5, zero), -1), torch.cat((torch.zeros_like(query), one), -1)
        return queries, torch.cat((key, one), -1)

    def mixed(self, *read: Tensor) -> Tensor:
        """What heads give, of what the rule gives to the queries, [B, T, H, V + 1] each: means of values, and of ones."""
        first, second = read
        return first[..., :-1] + (1 - first[..., -1:]) * second[..., :-1]

    def finish(self, rows: Tensor, beside: Tensor, hidden: Tensor) -> Tensor:
        """What is projected, of `mixed` side by side [B, T, C] and of the values behind the convolution, where there is one."""
        return rows.to(hidden.dtype)

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, position_embeddings: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The call of a decoder layer; `position_embeddings` are numbers of tokens [B, T, 1], from 0 on."""
        assert position_embeddings is not None
        before, new_tokens, layer = self.begin(hidden_states, cache_params)
        after: dict[str, Tensor] = {}
        beside = self.v_proj(hidden_states)
        query, key, value = (
            x.unflatten(-1, (self.heads, -1)) for x in (self.q_proj(hidden_states), self.k_proj(hidden_states), beside)
        )
        one = torch.ones_like(value[..., :1])
        queries, keys = self.parts(query, key, one)
        if "conv_state" in before:
            weight, bias = self.dwc.weight.repeat(self.heads, 1, 1), self.dwc.bias.repeat(self.heads)
            taps = ConvInputs(beside, weight, bias, new_tokens, "none")
            beside, after["conv_state"] = causal_conv(taps, before["conv_state"])
        places = position_embeddings[:, :, None]
        written = torch.cat((value, one), -1)
        inputs = Inputs(
            torch.stack(queries, dim=3),
            keys,
            (written.to(places.dtype) / (places + 1)).to(value.dtype),
            (places / (places + 1)).log().expand(-1, -1, self.heads, -1),
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, after["recurrent_state"] = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store(after)
        rows = self.mixed(*output.to(places.dtype).unbind(3)).flatten(2)
        return self.o_proj(self.finish(rows, beside, hidden_states))


class PolarAttention(InLineAttention):
    """PolaFormer's (arXiv:2501.15061): positive and negative parts to a learned power; half of the values' channels by parts of one sign,
    half by those of different ones; a convolution of the values beside, and a gate."""

    weight_roles: ClassVar[dict[str, str]] = {
        **InLineAttention.weight_roles,
        "g_proj.weight": GATE,
        **dict.fromkeys(("dwc.weight", "power"), NORM),
    }

    def parts(self, query: Tensor, key: Tensor, one: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        power = 1 + self.alpha * self.power.to(wide).sigmoid()
        scale = softplus(self.scale.to(wide)).unflatten(0, (self.heads, -1))

        def signs(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.to(wide) / scale
            return tuple((side.relu() ** power).to(query.dtype) for side in (x, -x))  # type: ignore[return-value]

        (above, below), keys = signs(query), signs(key)
        return (torch.cat((above, below), -1), torch.cat((below, above), -1)), torch.cat(keys, -1)

    def mixed(self, *read: Tensor) -> Tensor:
        half = read[0].shape[-1] // 2
        same, other = (x[..., :-1] / (x[..., -1:] + EPSILON) for x in read)
        return torch.cat((same[..., :half], other[..., half:]), -1)

    def finish(self, rows: Tensor, beside: Tensor, hidden: Tensor) -> Tensor:
        return (rows + beside).to(hidden.dtype) * self.g_proj(hidden)


class MirrorAttention(InLineAttention):
    """MirrorLA's (arXiv:2602.04346) without its modulation: positive parts of reflected queries and keys, weights that sum to 1; the
    reflections are in the projections."""

    def parts(self, query: Tensor, key: Tensor, one: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return (query.relu(),), key.relu()

    def mixed(self, *read: Tensor) -> Tensor:
        return read[0][..., :-1] / (read[0][..., -1:] + EPSILON)


MODULES: dict[str, type[InLineAttention]] = {
    "InLineMixer": InLineAttention,
    "PolarMixer": PolarAttention,
    "MirrorMixer": MirrorAttention,
}
"""By the class that each takes the place of."""


class MeanAttentionMixer(FixedStatesMixer):
    """Layers of type "mean_attention"."""

    name = "mean_attention"
    modules, what = MODULES, "mean attention"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        sizes = {"H": heads, "D": config.key_size, "V": size + 1}
        rule = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes)
        if not config.kernel_size:
            return (rule,)
        taps = {"C": config.hidden_size, "P": config.kernel_size - 1}
        return LayerOp(CAUSAL_CONV, {"activation": "none"}, taps), rule


MIXERS = (MeanAttentionMixer(),)
