"""NAtS-L's layers: chunks go to softmax attention or to a gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.keyed import Keyed
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.cache_layer import part_of
from still_export.mixers.fixed import WithFixedStates, class_for
from still_export.mixers.gated_delta_net.mixer import FlaGatedDeltaNet
from still_export.mixers.layers import head_size
from still_export.mixers.projections import needs_gradients, unit_length
from still_export.mixers.roles import GATE, ROUTER
from still_kernels.attention.meaning import AttentionState
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.kept_attention.meaning import Inputs, KeptState, kept_attention
from still_kernels.kept_attention.spec import KEPT_ATTENTION
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs as RuleInputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from still_kernels.route.meaning import Inputs as RouteInputs
from still_kernels.route.meaning import margins, naive_route, route
from still_kernels.route.spec import ROUTE
from still_kernels.routed_attention.meaning import Inputs as RoutedInputs
from still_kernels.routed_attention.meaning import RoutedState, routed_attention
from still_kernels.routed_attention.spec import ROUTED_ATTENTION, ROUTED_CHUNK


class RoutedLayer(WithFixedStates[AttentionState], AttentionLayer):
    """Keys and values of the selected chunks and the open one, with only as many rows as needed; and the other states."""

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> AttentionState:
        return super().empty(batch, _whole(columns), dtype, device)

    def grown(self, state: AttentionState, columns: int) -> AttentionState:
        chunks, new, least = self.second_mixer.tensors.get("kept_chunks"), self.new_tokens, _whole(columns)
        if chunks is not None and new is not None and new.numel():
            least = min(least, ROUTED_CHUNK * (int(chunks.max()) + 1) + int(new.max()))
        return super().grown(state, least)

    def store(self, state: AttentionState) -> None:
        """Store the state; if many chunks of a prompt were dropped, without their rows."""
        if self.progress.grows and not torch.compiler.is_compiling() and state.rows > 2 * ROUTED_CHUNK:
            rows = ROUTED_CHUNK * (int(self.second_mixer.tensors["kept_chunks"].max()) + 1)
            if state.rows > 2 * rows:
                state = replace(state, key=state.key[:, :, :rows].clone(), value=state.value[:, :, :rows].clone())
        super().store(state)


def _whole(columns: int) -> int:
    """`columns` rounded up to whole chunks."""
    return -(-columns // ROUTED_CHUNK) * ROUTED_CHUNK


class NatsAttention(FlaGatedDeltaNet, Keyed):
    """NAtS-L (arXiv:2602.03681): the mean hidden state of each chunk of 64 tokens decides whether later tokens find it by softmax attention
    or in the state of a gated delta rule. Both use the same queries, keys and values. Inside a chunk both see it.
    """

    specs = (ROUTE,)
    weight_roles: ClassVar[dict[str, str]] = {
        **FlaGatedDeltaNet.weight_roles,
        "nats_layer.weight": ROUTER,
        "nats_out_weights_layer.weight": GATE,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp], config: Any) -> None:
        super().__init__(base, ops)
        self.routes, self.keep_decay = config.routes, int(config.keep_decay)
        self.softmax_heads, self.softmax_dim = config.num_attention_heads, head_size(config)
        self.watch: Callable[[Tensor], Tensor | None] | None = None

    def layer(self, key: Tensor) -> RoutedLayer:
        return RoutedLayer(self.ops, key.shape[2], key.shape[3], self.cache)

    def chosen(self, hidden: Tensor, before: Tensor, past: Tensor, new_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (whether the chunk that ends at each token goes to softmax, int32 [B, T, R]; decisions of open chunks so far)."""
        first, second = self.nats_layer(hidden).detach().unflatten(-1, (self.routes, 2)).unbind(-1)
        begins = (past[:, None] + torch.arange(hidden.shape[1], device=hidden.device)) % ROUTED_CHUNK == 0
        wide = torch.promote_types(hidden.dtype, torch.float32)
        decay = torch.zeros_like(first, dtype=wide).masked_fill(begins[..., None], -torch.inf)[..., None]
        value = (first - second)[..., None]
        one = torch.ones_like(value[:, :, :1])
        sums, after = linear_attention(
            RuleInputs(one[..., None], one, value, decay, new_tokens=new_tokens, update_rule="gated", scale=1.0), before
        )
        mean = sums[:, :, :, 0, 0].to(wide) / ROUTED_CHUNK
        # Exactly one of each pair is positive: the best one; ties go to softmax.
        scores = torch.cat((mean, -mean), -1)
        router = torch.eye(2 * self.routes, dtype=wide, device=mean.device)
        inputs = RouteInputs(scores, router, k=self.routes, score="sigmoid")
        routing = route(inputs) if self.watch is None else naive_route(inputs, self.watch(margins(inputs)))
        softmax = (routing[0][..., None] == torch.arange(self.routes, device=mean.device)).any(-2)
        return softmax.to(torch.int32), after

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states, new_tokens, fixed = self.begin(hidden_states, cache_params)
        attention = part_of(cache_params, self.layer_idx, RoutedLayer)
        past = torch.zeros_like(new_tokens) if attention is None or attention.length is None else attention.length
        mixed, gate, b, a = self.project(hidden_states)
        (query, key, value), columns = self.convolved(mixed, states["conv_state"], new_tokens)
        softmax, decisions = self.chosen(hidden_states, states["recurrent_state"], past, new_tokens)
        shares = self.nats_out_weights_layer(query).unflatten(-1, (self.softmax_heads, 2)).softmax(-1)

        wide = torch.promote_types(b.dtype, torch.float32)
        rows = [x.unflatten(-1, (self.heads, -1)) for x in (query, key, value)]
        assert a is not None and gate is not None
        rule = RoutedInputs(
            unit_length(rows[0]),
            unit_length(rows[1]),
            rows[2],
            self.decay(a)[..., 0],
            self.step_size(b).to(wide),
            softmax,
            new_tokens,
            past,
            self.keep_decay,
        )

        linear, after = routed_attention(rule, RoutedState(states["routed_state"], states["chunk_state"]))

        def attend(inputs: Inputs, state: AttentionState, in_place: bool) -> tuple[Tensor, AttentionState]:
            before = KeptState(state.key, state.value, states["kept_chunks"])
            own = in_place and not needs_gradients(inputs.query)
            output, (keys, values, kept_chunks) = kept_attention(inputs, before, own)
            if fixed is not None:
                fixed.store(
                    {
                        "conv_state": columns,
                        "recurrent_state": decisions,
                        **after._asdict(),
                        "kept_chunks": kept_chunks,
                    }
                )
            return output, replace(state, key=keys, value=values, length=past + new_tokens)

        heads = tuple(x.unflatten(-1, (self.softmax_heads, -1)) for x in (query, key, value))
        more = {"keep": softmax, "past_length": past, "chunk_size": ROUTED_CHUNK}
        output = self.attended(attend, Inputs, self.padded(*heads), cache_params, **more)
        size = heads[2].shape[-1]
        found = linear.flatten(2).unflatten(-1, (self.softmax_heads, size)), output[..., :size]
        normed = self.o_norm(*found, shares, gate.unflatten(-1, (self.softmax_heads, size)))
        return self.o_proj(normed.flatten(2))

    def padded(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed tensors, padded to the longer of keys and values; the scale stays that of keys."""
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query = query * (self.softmax_dim / query.shape[-1]) ** 0.5
        query, key, value = (pad(x, (0, self.softmax_dim - x.shape[-1])) for x in (query, key, value))
        return query, key, value


class RoutedAttentionMixer(KeysMixer):
    """Layers of type "routed_attention"; a family's configuration has `routes` and `keep_decay`."""

    name = "routed_attention"
    of_families = True
    as_numbers = "keeps chosen chunks, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        rule = {"H": heads, "D": dim, "V": size, "R": config.routes}
        channels = {"C": heads * (2 * dim + size), "P": config.linear_conv_kernel_dim - 1}
        # The partial decision of an open chunk is the state of a gated rule with one number per route.
        decision = LayerOp(
            LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": config.routes, "D": 1, "V": 1}
        )
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, channels),
            decision,
            LayerOp(ROUTED_ATTENTION, {"keep_decay": int(config.keep_decay)}, rule),
            LayerOp(KEPT_ATTENTION, {"chunk_size": ROUTED_CHUNK}, {**sizes(config), "R": config.routes}),
        )

    def cache_layer(self, config: Any, index: int) -> RoutedLayer:
        cache_sizes = config.num_attention_heads, head_size(config), config.still.deployment.cache
        return RoutedLayer(self.ops(config, index), *cache_sizes)

    def made(self, base: nn.Module, config: Any, index: int) -> Any:
        kind = class_for(base, {"FlaRouted": NatsAttention}, "routed attention")
        return kind(base, self.ops(config, index), config)


MIXERS = (RoutedAttentionMixer(),)
