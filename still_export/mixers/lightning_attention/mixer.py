"""Lightning attention, replacing modules of MiniMax, TransNormerLLM and MiniCPM-SALA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_export.errors import UnsupportedModelError
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.projections import rotate
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class Lightning(FixedStateModule):
    """Shared by all: head h multiplies its state by exp(-slopes[h]) at each token."""

    slopes: tuple[float, ...]

    def attend(self, hidden: Tensor, cache: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The rule on query [B, T, H, D], key [B, T, HK, D] and value [B, T, H, V]: output [B, T, H, 1, V]."""
        states, new_tokens, layer = self.begin(hidden, cache)
        wide = torch.promote_types(query.dtype, torch.float32)
        decay = -torch.tensor(self.slopes, dtype=wide, device=query.device)[:, None].expand(*query.shape[:3], 1)
        rule: dict[str, Any] = dict(self.ops[0].attributes)
        inputs = Inputs(query[:, :, :, None], key, value, decay, new_tokens=new_tokens, **rule)
        output, recurrent = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"recurrent_state": recurrent})
        return output


class MiniMaxLightning(Lightning):
    """MiniMax: with a norm over all heads and a gate.

    Head h of H in layer l of L has the slope 2^(-8 (h + 1) / H) (1 - l / (L - 1 + 1e-5) + 1e-5).
    """

    weight_roles: ClassVar[dict[str, str]] = {
        "qkv_proj.weight": PROJECTION,
        "out_proj.weight": PROJECTION,
        "output_gate.weight": GATE,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        del self.act_fn
        if type(base.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise UnsupportedModelError(
                f"{type(base).__name__} has the activation {type(base.act_fn).__name__}; only silu is covered."
            )
        self.heads, self.dim = base.num_attention_heads, base.head_dim
        depth = 1 - base.layer_idx / (base.num_hidden_layers - 1 + 1e-5) + 1e-5
        self.slopes = tuple(2 ** (-8 * (h + 1) / self.heads) * depth for h in range(self.heads))

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        heads = silu(self.qkv_proj(hidden_states)).unflatten(-1, (self.heads, 3 * self.dim))
        output = self.attend(hidden_states, past_key_values, *heads.split(self.dim, dim=-1))
        gate = self.output_gate(hidden_states).sigmoid()
        return self.out_proj(gate * self.norm(output.flatten(2))), None


class TransNormer(Lightning):
    """TransNormerLLM: a gate without activation. In some layers each channel of queries and keys becomes a pair, rotated by a learned
    angle.

    Head h in layer l of L has the slope of `slopes_of` times 1 - l / (L - 1) + 1e-5.
    """

    weight_roles: ClassVar[dict[str, str]] = {
        "qkvu_proj.weight": PROJECTION,
        "out_proj.weight": PROJECTION,
        "lrpe.theta": NORM,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads = base.heads
        depth = 1 - base.layer_idx / (base.layers - 1) + 1e-5
        self.slopes = tuple(slope * depth for slope in slopes_of(self.heads))

    def forward(
        self, hidden: Tensor, past_key_values: Any = None, position_embeddings: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The call of a decoder layer; `position_embeddings`: positions of the tokens [B, T, 1]."""
        query, key, value, gate = self.qkvu_proj(hidden).chunk(4, dim=-1)
        query, key, value = (x.unflatten(-1, (self.heads, -1)) for x in (silu(query), silu(key), value))
        if hasattr(self, "lrpe"):
            assert position_embeddings is not None
            angles = position_embeddings[..., None] * self.lrpe.theta.squeeze(1).to(position_embeddings.dtype)
            cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
            query, key = (torch.cat((x * cos, x * sin), dim=-1) for x in (query, key))
        output = self.attend(hidden, past_key_values, query, key, value).flatten(2)
        return self.out_proj(gate * self.norm(output))


class SalaLightning(Lightning):
    """MiniCPM-SALA: norms and rotary positions of queries and keys, a norm over all heads, a gate. The slopes are those of `slopes_of`."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        "z_proj.weight": GATE,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.dim, self.heads, self.turned = base.head_dim, base.heads, base.turned
        self.slopes = slopes_of(self.heads)

    def forward(
        self,
        hidden: Tensor,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        if self.turned:
            assert position_embeddings is not None
            cos, sin = (x[:, :, None] for x in position_embeddings)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        value = value.repeat_interleave(self.heads // value.shape[2], dim=2)
        output = self.attend(hidden, past_key_values, query, key, value).flatten(2)
        if hasattr(self, "o_norm"):
            output = self.o_norm(output)
        if hasattr(self, "z_proj"):
            output = output * self.z_proj(hidden).sigmoid()
        return self.o_proj(output)


def slopes_of(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes: 2^(-8 (h + 1) / H). If H is no power of two: those of the next smaller power, then every other one of the next larger
    power."""
    power = 2 ** math.floor(math.log2(heads))
    own = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return (*own, *(2 ** (-4 * (h + 1) / power) for h in range(0, 2 * (heads - power), 2)))


MODULES: dict[str, type[Lightning]] = {
    "MiniMaxLightningAttention": MiniMaxLightning,
    "TransNormerMixer": TransNormer,
    "SalaLightningMixer": SalaLightning,
}


class LightningAttentionMixer(FixedStatesMixer):
    """Layers of type "lightning_attention"; a family's configuration has `lightning_sizes`: H, D, V and the output's scale."""

    name = "lightning_attention"
    modules, what = MODULES, "Lightning attention"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size, scale = config.lightning_sizes(index)
        attributes = {"update_rule": "gated", "scale": scale}
        return (LayerOp(LINEAR_ATTENTION, attributes, {"H": heads, "D": dim, "V": size}),)
