"""The layers of RADLADS, replacing a family's modules: a Qwen's projections, key heads shared by query heads, and the rule of RWKV-6 or
RWKV-7, read after the update. Token shift is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.projections import rotated
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_export.mixers.rwkv7.mixer import LEAST_DECAY, ShiftedModule, rank_one_inputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from still_kernels.rank_one_attention.meaning import rank_one_attention
from still_kernels.rank_one_attention.spec import RANK_ONE_ATTENTION

Turn = tuple[Tensor, Tensor] | None
LEAST_LOG = -5.0
"""Least logarithm of RWKV-6's decay."""
UNIT_SQUARE = 1e-24
"""Added to the squared length of a key before the root."""


class Tokens(NamedTuple):
    """Inputs of a rule: inputs of each projection, by letter; query, key, value [B, T, H, D]; the first layer's values; new tokens [B]."""

    parts: dict[str, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    first: Tensor | None
    new_tokens: Tensor


class QwenRule(ShiftedModule):
    """Shared by both rules: projections, heads, output norm and gate."""

    read: ClassVar[str]
    """The projections, a letter for each."""
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys((f"{x}_proj.weight" for x in "qkvo"), PROJECTION),
        **dict.fromkeys((f"{x}_lora.{i}.weight" for x in "wavg" for i in (0, 2)), GATE),
        **dict.fromkeys(("gate.weight", "mix_in.weight", *(f"mix_{x}.weight" for x in "rkvwg")), GATE),
        **dict.fromkeys((*(f"x_{x}" for x in ("all", *"rkvwag")), "w0", "a0", "v0", "k_k", "k_a", "r_k"), NORM),
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.dim, self.groups, self.balanced = base.dim, base.groups, base.balanced
        self.shifts = any(op.spec is CAUSAL_CONV for op in ops)

    def mixed(self, hidden: Tensor, off: Tensor) -> dict[str, Tensor]:
        """Input of each projection, from tokens [B, T, C] and `off`, the previous tokens minus the tokens."""
        if not hasattr(self, "mix_in"):
            return {name: hidden + off * getattr(self, f"x_{name}") for name in self.read}
        shares = torch.tanh(self.mix_in(hidden + off * self.x_all)).unflatten(-1, (len(self.read), -1)).unbind(-2)
        more = zip(self.read, shares, strict=True)
        return {n: hidden + off * (getattr(self, f"x_{n}") + getattr(self, f"mix_{n}")(part)) for n, part in more}

    def forward(
        self,
        hidden: Tensor,
        past_key_values: Any = None,
        position_embeddings: Turn = None,
        first: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (hidden states [B, T, C], values for later layers). `first`: the first layer's values, [B, T, 0] in the first layer."""
        states, new_tokens, layer = self.begin(hidden, past_key_values)
        after: dict[str, Tensor] = {}
        parts = dict.fromkeys(self.read, hidden)
        if self.shifts:
            off, after["conv_state"] = self.shift(hidden, states["conv_state"], new_tokens)
            parts = self.mixed(hidden, off)
        query, key, value = (
            getattr(self, f"{name}_proj")(parts[part]).unflatten(-1, (-1, self.dim))
            for name, part in (("q", "r"), ("k", "k"), ("v", "v"))
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotated(query, key, position_embeddings)
        key, value = (x.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3) for x in (key, value))
        tokens = Tokens(parts, query, key, value, first, new_tokens)
        output, value, after["recurrent_state"] = self.rule(tokens, states["recurrent_state"])
        if layer is not None:
            layer.store(after)
        rows = output.to(hidden.dtype).flatten(2)
        if hasattr(self, "gate"):
            rows = rows * self.gate(parts["g"]).sigmoid()
        elif hasattr(self, "g_lora"):
            rows = rows * self.g_lora(parts["g"])
        return self.o_proj(rows), value

    def rule(self, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns (output [B, T, H, D] before the gate, values for later layers, state after the call)."""
        raise NotImplementedError

    def heads(self, x: Tensor) -> Tensor:
        """[.., H * D] as [.., H, D]."""
        return x.unflatten(-1, (-1, self.dim))

    def normed(self, output: Tensor) -> Tensor:
        """[B, T, H, D] after each head's norm, if there is one, in at least float32."""
        wide = torch.promote_types(output.dtype, torch.float32)
        if not hasattr(self, "ln_x"):
            return output
        scale, shift = (self.heads(x).to(wide) for x in (self.ln_x.weight, self.ln_x.bias))
        return layer_norm(output.to(wide), output.shape[-1:], eps=self.ln_x.eps) * scale + shift


class QwenRwkv6(QwenRule):
    """The gated rule with a decay per key channel; keys are scaled by 1 - exp(decay) if the state is balanced."""

    read = "rkvwg"

    def rule(self, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        parts, query, key, value, _, new_tokens = tokens
        wide = torch.promote_types(query.dtype, torch.float32)
        decay = self.heads(-(self.w0.to(wide) + self.w_lora(parts["w"]).to(wide)).exp()).clamp_min(LEAST_LOG)
        if self.balanced:
            key = (key.to(wide) * (1 - decay.exp())).to(key.dtype)
        inputs = Inputs(query.unsqueeze(3), key, value, decay, new_tokens=new_tokens, update_rule="gated")
        output, state = linear_attention(inputs, state)
        return self.normed(output.squeeze(3)), None, state


class QwenRwkv7(QwenRule):
    """RWKV-7's rule; values are mixed with the first layer's."""

    read = "rkvwag"

    def rule(self, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        parts, query, key, value, first, new_tokens = tokens
        wide = torch.promote_types(query.dtype, torch.float32)
        if first is not None and first.shape[-1]:
            share = self.heads((self.v0 + self.v_lora(parts["v"])).sigmoid())
            value = value + share * (self.heads(first) - value)
        decay, rate = (
            self.heads((getattr(self, f"{x}0").to(wide) + getattr(self, f"{x}_lora")(parts[x]).to(wide)).sigmoid())
            for x in "wa"
        )
        decay = LEAST_DECAY * decay
        moved = (key * self.heads(self.k_k[0, 0]) if hasattr(self, "k_k") else key).to(wide)
        moved = moved * torch.rsqrt(moved.square().sum(-1, keepdim=True) + UNIT_SQUARE)
        if self.balanced:
            key = (key.to(wide) * (1 - decay.exp() + rate)).to(key.dtype)
        elif hasattr(self, "k_a"):
            key = (key.to(wide) * (1 + (rate - 1) * self.heads(self.k_a[0, 0]).to(wide))).to(key.dtype)
        inputs = rank_one_inputs(query, key, value, decay, moved, rate, new_tokens)
        output, state = rank_one_attention(inputs, state)
        rows = self.normed(output) if hasattr(self, "ln_x") else output * self.dim**-0.5
        if hasattr(self, "r_k"):
            bonus = (query.to(wide) * key.to(wide) * self.r_k.to(wide)).sum(-1, keepdim=True)
            rows = rows + bonus * value.to(wide)
        return rows, value.flatten(2), state


MODULES: dict[str, type[QwenRule]] = {"Rwkv6Attention": QwenRwkv6, "Rwkv7Attention": QwenRwkv7}


class RadladsMixer(FixedStatesMixer):
    """Layers of type "radlads", which the family's `layer_types` call "linear_attention"."""

    name = "radlads"
    modules, what = MODULES, "RWKV in a Qwen"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": config.num_attention_heads, "D": config.head_dim, "V": config.head_dim}
        gated = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 0.0}, sizes)
        rule = LayerOp(RANK_ONE_ATTENTION, {}, sizes) if config.seven else gated
        if not config.token_shift:
            return (rule,)
        return LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": 1}), rule
