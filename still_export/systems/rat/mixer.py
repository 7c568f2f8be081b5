"""RAT's layers: a scan inside chunks and softmax attention to their ends, built from still::LinearAttention and still::StridedAttention;
and the local attention layers of its hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.keyed import KeyedAttention
from still_export.mixers.attention.mixer import KeysMixer
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import WithFixedStates, class_for, states_of
from still_export.mixers.hybrid_attention.window import WindowModule, window_of
from still_export.mixers.layers import head_size
from still_export.mixers.projections import rotate
from still_export.mixers.roles import PROJECTION
from still_export.mixers.windowed_attention.mixer import WindowedAttentionMixer
from still_kernels.attention.meaning import AttentionState
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs as ScanInputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from still_kernels.strided_attention.meaning import Inputs, strided_attention
from still_kernels.strided_attention.spec import STRIDED_ATTENTION


class StridedLayer(WithFixedStates[AttentionState], AttentionLayer):
    """One row per `row_tokens` tokens."""

    def __init__(self, scan: Sequence[LayerOp], row_tokens: int, heads: int, dim: int, cache: str | None) -> None:
        super().__init__(scan, heads, dim, cache)
        self.row_tokens = row_tokens

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> AttentionState:
        return super().empty(batch, -(-columns // self.row_tokens), dtype, device)

    def grown(self, state: AttentionState, columns: int) -> AttentionState:
        return super().grown(state, -(-columns // self.row_tokens))


class Rat(KeyedAttention):
    """RAT (arXiv:2507.04416): h := g h + (1 - g) x in each channel of keys and values, restarted from 0 at each chunk.

    Args:
        scan: The op of the scan.
        row_tokens: Tokens of a chunk.
    """

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys(("in_proj.weight", "out_proj.weight"), PROJECTION)

    def __init__(self, base: Any, scan: Sequence[LayerOp], row_tokens: int) -> None:
        nn.Module.__init__(self)  # the projections have other names
        self.layer_idx, self.head_dim = base.layer_idx, base.head_dim
        self.head_count, self.groups = base.heads, base.groups
        self.in_proj, self.out_proj, self.input_norm = base.in_proj, base.out_proj, base.input_norm
        self.gate_bias = base.gate_bias
        self.scan, self.row_tokens = tuple(scan), row_tokens

    def layer(self, key: Tensor) -> StridedLayer:
        return StridedLayer(self.scan, self.row_tokens, key.shape[2], self.head_dim, self.cache)

    def scanned(self, gate: Tensor, x: Tensor, first: Tensor, cache: Any) -> Tensor:
        """Scan both halves of `x` [B, T, 2 C] with the same gate logits `gate` [B, T, C]; `first` [B, T, 1] marks starts of chunks."""
        before, new_tokens, layer = states_of(cache, self.layer_idx, self.scan, x)
        decay = (-softplus(-gate)).masked_fill(first, -torch.inf)
        one = x.new_ones(1, 1, 1, 1).expand(*x.shape[:2], 1, 1)
        inputs = ScanInputs(
            one[:, :, None],
            one,
            (x * torch.cat(((-gate).sigmoid(),) * 2, -1)).to(x.dtype)[..., None],
            torch.cat((decay, decay), -1)[..., None],
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, state = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store({"recurrent_state": state})
        return output.flatten(2)

    def mix(self, hidden: Tensor, position_embeddings: Any, past_key_values: Any) -> Tensor:
        cos, sin, first = position_embeddings[:3]
        width, few = self.head_count * self.head_dim, self.groups * self.head_dim
        out, value, gate, query, key = self.in_proj(hidden).split((width, width, width, few, few), dim=-1)
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32)) + self.gate_bias
        # Groups are assigned to heads in turn.
        query, key = (torch.cat((x,) * (self.head_count // self.groups), -1) for x in (query, key))
        value, key = self.scanned(gate, torch.cat((value, key), -1), first, past_key_values).chunk(2, -1)
        query, key, value = (x.unflatten(-1, (self.head_count, self.head_dim)) for x in (query, key, value))
        query, key = (rotate(x, cos[:, :, None], sin[:, :, None]) for x in (query, key))
        sizes = {"row_tokens": self.row_tokens}
        output = self.attended(strided_attention, Inputs, (query, key, value), past_key_values, **sizes)
        return self.out_proj(out.sigmoid() * output.flatten(2))


class LocalAttention(WindowModule):
    """The local attention layers of RAT's hybrid: softmax over the latest tokens, with their own positions."""

    weight_roles: ClassVar[dict[str, str]] = Rat.weight_roles

    def __init__(self, base: Any, window: HybridAttentionConfig) -> None:
        nn.Module.__init__(self)  # the projections have other names
        self.layer_idx, self.head_dim = base.layer_idx, window.head_dim
        self.in_proj, self.out_proj, self.input_norm = base.in_proj, base.out_proj, base.input_norm
        self.still, self.watch = window, None

    def mix(self, hidden: Tensor, position_embeddings: Any, past_key_values: Any) -> Tensor:
        cos, sin = (x[:, :, None] for x in position_embeddings[3:])
        value, query, key = self.in_proj(hidden).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        query, key = (rotate(x, cos, sin) for x in (query, key))
        return self.out_proj(self.windowed(query, key, value, past_key_values).flatten(2))


class LocalAttentionMixer(WindowedAttentionMixer):
    name = "rat_window"

    def module(self, base: nn.Module, config: Any, index: int) -> Any:
        kind = class_for(base, {"RatLocal": LocalAttention}, "local attention")
        return kind(base, window_of(config, config.sliding_window))


class StridedAttentionMixer(KeysMixer):
    """Layers of type "strided_attention"; a family's configuration has `row_tokens`."""

    name = "strided_attention"
    of_families = True
    as_numbers = "keeps chunks' ends, which are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim = config.num_attention_heads, head_size(config)
        scan = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": 2 * heads * dim, "D": 1, "V": 1})
        sizes = {"H": heads, "HK": heads, "D": dim}
        return scan, LayerOp(STRIDED_ATTENTION, {"row_tokens": config.row_tokens}, sizes)

    def cache_layer(self, config: Any, index: int) -> StridedLayer:
        scan, _ = self.ops(config, index)
        return StridedLayer(
            (scan,), config.row_tokens, config.num_attention_heads, head_size(config), config.still.deployment.cache
        )

    def made(self, base: nn.Module, config: Any, index: int) -> Rat:
        kind = class_for(base, {"RatMixer": Rat}, "strided attention")
        return kind(base, self.ops(config, index)[:1], config.row_tokens)


MIXERS = (StridedAttentionMixer(), LocalAttentionMixer())
