"""PolaFormer's, InLine and MirrorLA attention, replacing a family's module. The gated rule computes means: token n keeps (n - 1) / n of the
state and writes with weight 1 / n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import gelu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION

EPSILON = 1e-6
"""Added to normalizers, as in PolaFormer."""


class InLineAttention(FixedStateModule):
    """InLine attention (arXiv:2412.06590): the weight of a token is q k minus the mean of q k, plus 1 / n."""

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys((f"{x}_proj.weight" for x in "qkvo"), PROJECTION)

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads, self.alpha, self.rectified = base.heads, base.alpha, base.rectified

    def parts(self, query: Tensor, key: Tensor, one: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Queries (usually two) and a key for the rule, from heads [B, T, H, D]; `one` is ones [B, T, H, 1]."""
        if self.rectified:
            query, key = query.relu(), key.relu()
        zero = torch.zeros_like(one)
        queries = torch.cat((query * query.shape[-1] ** -0.5, zero), -1), torch.cat((torch.zeros_like(query), one), -1)
        return queries, torch.cat((key, one), -1)

    def written(self, value: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Values that the rule averages, from values [B, T, H, V] and the layer's input."""
        return (value,)

    def convolved(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (input of the convolution, from values [B, T, C]; its weight; its bias)."""
        raise NotImplementedError

    def mixed(self, *read: Tensor) -> Tensor:
        """The heads' output, from the rule's results for the queries, [B, T, H, V + 1] each: means of values, and of ones."""
        first, second = read
        return first[..., :-1] + (1 - first[..., -1:]) * second[..., :-1]

    def finish(self, rows: Tensor, second_input: Tensor, hidden: Tensor) -> Tensor:
        """The input of the output projection, from `mixed` [B, T, C] and the convolved values, if any."""
        return rows.to(hidden.dtype)

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, position_embeddings: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The call of a decoder layer; `position_embeddings` are token numbers [B, T, 1], from 0."""
        assert position_embeddings is not None
        before, new_tokens, layer = self.begin(hidden_states, cache_params)
        after: dict[str, Tensor] = {}
        second_input = self.v_proj(hidden_states)
        query, key, value = (
            x.unflatten(-1, (self.heads, -1))
            for x in (self.q_proj(hidden_states), self.k_proj(hidden_states), second_input)
        )
        one = torch.ones_like(value[..., :1])
        queries, keys = self.parts(query, key, one)
        if "conv_state" in before:
            taps = ConvInputs(*self.convolved(second_input), new_tokens, "none")
            second_input, after["conv_state"] = causal_conv(taps, before["conv_state"])
        places = position_embeddings[:, :, None]
        written = torch.cat((*self.written(value, hidden_states), one), -1)
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
        return self.o_proj(self.finish(rows, second_input, hidden_states))


class ResidualInLine(InLineAttention):
    """InLine with a residual: the latest tokens' values, weighted by channel. A small network, grouped by head, computes the weights from
    the mean of the layer's inputs: of the whole sequence in the paper, of the tokens so far here."""

    weight_roles: ClassVar[dict[str, str]] = {
        **InLineAttention.weight_roles,
        **dict.fromkeys(("residual.0.weight", "residual.2.weight"), GATE),
    }

    def written(self, value: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return value, hidden.unflatten(-1, (self.heads, -1))

    def convolved(self, value: Tensor) -> tuple[Tensor, Tensor, None]:
        """Repeat each channel once for each earlier token; each copy has a single tap of 1."""
        channels = value.shape[-1]
        taps = self.residual[2].weight.shape[0] // channels
        one = torch.eye(taps, dtype=value.dtype, device=value.device).flip(1).repeat(channels, 1)[:, None]
        return value.repeat_interleave(taps, dim=-1), one, None

    def mixed(self, *read: Tensor) -> Tensor:
        first, second = read
        size = first.shape[-1] // 2
        values = first[..., :size] + (1 - first[..., -1:]) * second[..., :size]
        return torch.cat((values, second[..., size:-1]), -1)

    def finish(self, rows: Tensor, second_input: Tensor, hidden: Tensor) -> Tensor:
        values, mean = rows.unflatten(-1, (self.heads, 2, -1)).unbind(3)  # [B, T, H, D]
        first, last = (layer for layer in self.residual if hasattr(layer, "weight"))
        weights = self.by_head(last, gelu(self.by_head(first, mean.to(hidden.dtype))))
        local = second_input.unflatten(-1, (self.heads, values.shape[-1], -1))
        found = (weights.unflatten(-1, local.shape[-2:]) * local).sum(-1)
        return (values + found).flatten(2).to(hidden.dtype)

    def by_head(self, layer: Any, x: Tensor) -> Tensor:
        """A grouped convolution of one token, for heads [B, T, H, D]."""
        weight = layer.weight[..., 0].unflatten(0, (self.heads, -1))  # [H, outputs, D]
        return (x[..., None, :] @ weight.mT)[..., 0, :] + layer.bias.unflatten(0, (self.heads, -1))


class PolarAttention(InLineAttention):
    """PolaFormer's attention (arXiv:2501.15061): positive and negative parts to a learned power. Parts of equal sign weigh half of the
    values' channels, parts of different sign the other half. A convolution of the values is added, and the result is gated."""

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

    def convolved(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return value, self.dwc.weight.repeat(self.heads, 1, 1), self.dwc.bias.repeat(self.heads)

    def mixed(self, *read: Tensor) -> Tensor:
        half = read[0].shape[-1] // 2
        same, other = (x[..., :-1] / (x[..., -1:] + EPSILON) for x in read)
        return torch.cat((same[..., :half], other[..., half:]), -1)

    def finish(self, rows: Tensor, second_input: Tensor, hidden: Tensor) -> Tensor:
        return (rows + second_input).to(hidden.dtype) * self.g_proj(hidden)


class MirrorAttention(InLineAttention):
    """MirrorLA's attention (arXiv:2602.04346) without its modulation: positive parts of reflected queries and keys, weights that sum to 1.
    The reflections are in the projections."""

    def parts(self, query: Tensor, key: Tensor, one: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return (query.relu(),), key.relu()

    def mixed(self, *read: Tensor) -> Tensor:
        return read[0][..., :-1] / (read[0][..., -1:] + EPSILON)


MODULES: dict[str, type[InLineAttention]] = {
    "InLineMixer": InLineAttention,
    "ResidualMixer": ResidualInLine,
    "PolarMixer": PolarAttention,
    "MirrorMixer": MirrorAttention,
}


class MeanAttentionMixer(FixedStatesMixer):
    name = "mean_attention"
    modules, what = MODULES, "mean attention"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        residual = config.kernel_size if config.key_size == size + 1 else 0  # InLine's
        sizes = {"H": heads, "D": config.key_size, "V": (2 if residual else 1) * size + 1}
        rule = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes)
        if not config.kernel_size:
            return (rule,)
        taps = {"C": config.hidden_size * (residual or 1), "P": config.kernel_size - 1}
        return LayerOp(CAUSAL_CONV, {"activation": "none"}, taps), rule


MIXERS = (MeanAttentionMixer(),)
