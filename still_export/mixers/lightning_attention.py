"""Layers of type "lightning_attention", MiniMax's: the gated rule with a decay that is each head's own and the same for all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from still_export.errors import UnsupportedModelError
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import FixedStateModule, FixedStates, class_for
from still_export.mixers.layers import head_size
from still_export.mixers.linear_attention.op import linear_attention
from still_export.mixers.roles import GATE, PROJECTION
from still_graphs.ops.linear_attention import LINEAR_ATTENTION
from still_kernels.linear_attention import Inputs


class LightningAttention(FixedStateModule):
    """The rule with its projections, norm and gate.

    Head h of H in layer l of L forgets exp(-s) a token, s = 2^(-8 (h + 1) / H) (1 - l / (L - 1 + 1e-5) + 1e-5).

    Args:
        base: The family's module; its submodules are taken over, not copied.
        ops: Of the layer.

    Raises:
        UnsupportedModelError: `base` has another activation.
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
        """The call of a transformers decoder layer. `attention_mask` is not used: the cache knows the sequences' new tokens."""
        states, new_tokens, layer = self.begin(hidden_states, past_key_values)
        heads = silu(self.qkv_proj(hidden_states)).unflatten(-1, (self.heads, 3 * self.dim))
        query, key, value = heads.split(self.dim, dim=-1)
        wide = torch.promote_types(query.dtype, torch.float32)
        decay = -torch.tensor(self.slopes, dtype=wide, device=query.device)[:, None].expand(*query.shape[:3], 1)
        inputs = Inputs(query[:, :, :, None], key, value, decay, new_tokens=new_tokens, update_rule="gated", scale=1.0)
        output, recurrent = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"recurrent_state": recurrent})
        gate = self.output_gate(hidden_states).sigmoid()
        return self.out_proj(gate * self.norm(output.flatten(2))), None


class LightningAttentionMixer(Mixer):
    """Layers of type "lightning_attention"."""

    name = "lightning_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        size = head_size(config)
        sizes = {"H": config.num_attention_heads, "D": size, "V": size}
        return (LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes),)

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(self.ops(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        covered = {"MiniMaxLightningAttention": LightningAttention}
        return class_for(base, covered, "Lightning attention")(base, self.ops(config, index))
