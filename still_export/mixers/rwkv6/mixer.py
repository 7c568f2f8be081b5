"""The layers of RWKV-5 and RWKV-6, replacing a family's modules.

A token reads the state before its own write, and its own key and value with a bonus: r S + (r . u k) v, then S := w S + k v^T. This is the
gated rule on keys, values and decays of the previous token, which are computed from the two tokens that the layer stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, relu, silu

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import FEED_FORWARD, GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION

MIXED = "wkvrg"


class MixingModule(FixedStateModule):
    """A module with token shift. RWKV-5's weights are the token's own share, RWKV-6's that of the previous token."""

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.ranks: Sequence[int] | None = base.ranks

    def share(self, name: str) -> Tensor:
        """Share of the previous token, [1, 1, C]."""
        share: Tensor = getattr(self, f"x_{name}")
        return 1 - share if self.ranks is None else share

    def shift(self, x: Tensor, state: Tensor, new_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the previous token of each token of x [B, T, C], the state after the call)."""
        columns = state.shape[-1]
        taps = x.new_tensor([*[0.0] * (columns - 1), 1.0, 0.0]).expand(x.shape[-1], 1, columns + 1)
        return causal_conv(ConvInputs(x, taps.contiguous(), None, new_tokens, "none"), state)


class ChannelMix(MixingModule):
    """The squared relu of shifted tokens, gated."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys((f"{x}.weight" for x in ("key", "value", "receptance")), FEED_FORWARD),
        **dict.fromkeys(("x_k", "x_r"), NORM),
    }

    def forward(self, hidden: Tensor, cache: Any) -> Tensor:
        states, new_tokens, layer = self.begin(hidden, cache)
        before, column = self.shift(hidden, states["conv_state"], new_tokens)
        if layer is not None:
            layer.store({"conv_state": column})
        key, gate = (hidden + (before - hidden) * self.share(name) for name in "kr")
        inner: Tensor = self.value(relu(self.key(key)).square())
        return self.receptance(gate).sigmoid() * inner


class TimeMix(MixingModule):
    """The rule, with its projections, the norm of each head and the gate."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys((f"{x}.weight" for x in ("receptance", "key", "value", "gate", "output")), PROJECTION),
        **dict.fromkeys(
            (f"{x}.weight" for x in ("mix_in", *(f"mix_{n}" for n in MIXED), "decay_in", "decay_out")), GATE
        ),
        **dict.fromkeys((*(f"x_{x}" for x in ("all", *MIXED)), "time_faaaa", "time_decay"), NORM),
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads = base.heads

    def mixed(self, hidden: Tensor, before: Tensor) -> dict[str, Tensor]:
        """Inputs of the projections, from tokens [B, T, C] and previous tokens."""
        off = before - hidden
        if self.ranks is None:
            return {name: hidden + off * self.share(name) for name in "kvrg"}
        shares = torch.tanh(self.mix_in(hidden + off * self.x_all)).unflatten(-1, (len(MIXED), -1)).unbind(-2)
        more = zip(MIXED, shares, strict=True)
        return {n: hidden + off * (self.share(n) + getattr(self, f"mix_{n}")(part)) for n, part in more}

    def forward(self, hidden: Tensor, cache: Any) -> Tensor:
        states, new_tokens, layer = self.begin(hidden, cache)
        past = states["conv_state"].transpose(1, 2)  # [B, 2, C], the two tokens before the call
        before, columns = self.shift(hidden, states["conv_state"], new_tokens)
        # One token more than the call has, the one before it.
        mixed = self.mixed(torch.cat((past[:, 1:], hidden), 1), torch.cat((past[:, :1], before), 1))
        wide = torch.promote_types(hidden.dtype, torch.float32)

        def of_heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1))

        key, value = (of_heads(getattr(self, name)(mixed[name[0]])) for name in ("key", "value"))
        query, gate = self.receptance(mixed["r"][:, 1:]), self.gate(mixed["g"][:, 1:])
        query, decay = of_heads(query), self.time_decay.to(wide)
        if self.ranks is None:
            decay = decay.expand(*query.shape[:2], -1, -1)
        else:
            low = self.decay_out(torch.tanh(self.decay_in(mixed["w"][:, :-1])))
            decay = of_heads(decay + low.to(wide))
        inputs = Inputs(
            query.unsqueeze(3),
            key[:, :-1],
            value[:, :-1],
            -decay.exp(),
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, state = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"conv_state": columns, "recurrent_state": state})
        key, value = key[:, 1:].to(wide), value[:, 1:].to(wide)
        own = (query.to(wide) * key * self.time_faaaa.to(wide)).sum(-1, keepdim=True) * value
        rows = output.squeeze(3).to(wide) + own
        rows = layer_norm(rows, rows.shape[-1:], eps=self.ln_x.eps)
        scale, shift = (of_heads(x).to(wide) for x in (self.ln_x.weight, self.ln_x.bias))
        rows = (rows * scale + shift).to(hidden.dtype).flatten(2)
        return self.output(rows * silu(gate))


MODULES: dict[str, type[MixingModule]] = {"Rwkv6TimeMix": TimeMix, "Rwkv6ChannelMix": ChannelMix}


class Rwkv6Mixer(FixedStatesMixer):
    """Layers of type "rwkv6": in the family's `layer_types`, "linear_attention" mixes tokens and "conv" mixes channels."""

    name = "rwkv6"
    modules, what = MODULES, "RWKV-5 and RWKV-6"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        channels = config.layer_types[index] == "conv"
        shift = LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": 1 if channels else 2})
        if channels:
            return (shift,)
        sizes = {"H": config.num_attention_heads, "D": config.head_dim, "V": config.head_dim}
        return shift, LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes)
