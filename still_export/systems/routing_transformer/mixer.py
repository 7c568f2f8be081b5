"""Routing Transformer's layers: softmax attention to earlier tokens of the same cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.mixers.attention.keyed import Keyed
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.block_attention.cache import RowsLayer
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_export.mixers.projections import rotate, unit_length
from still_export.mixers.roles import PROJECTION, ROUTER
from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.call import block_attention
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.cluster_tokens.meaning import Inputs as ClusterInputs
from still_kernels.cluster_tokens.meaning import cluster_tokens
from still_kernels.cluster_tokens.spec import CLUSTER_TOKENS
from still_kernels.route.meaning import Inputs as RouteInputs
from still_kernels.route.meaning import margins, naive_route, route
from still_kernels.route.spec import ROUTE

MARK = 1e3
"""Added to the logit of the chosen cluster; products of unit vectors are far below."""


@dataclass(frozen=True)
class ClusterKeys(AttentionState):
    """The state of attention, and `clusters` [B, H, N], in at least float32."""

    clusters: Tensor | None = None


class ClusterLayer(RowsLayer):
    """The cache of one layer."""

    of, own_state = ClusterKeys, "clusters"


class ClusterAttention(Keyed):
    """Routing Transformer (arXiv:2003.05997), in a causal reading. A token belongs to the cluster whose centroid has the largest product
    with its query (unit length, before RoPE). It attends to the latest earlier tokens of the same cluster, or to itself if there
    are none.
    """

    specs = (ROUTE,)
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        "means": ROUTER,
    }

    def __init__(self, base: Any, window: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, self.window = base.layer_idx, base.head_dim, window
        self.q_proj, self.v_proj, self.o_proj, self.means = base.q_proj, base.v_proj, base.o_proj, base.means
        self.watch: Callable[[Tensor], Tensor | None] | None = None

    def layer(self, key: Tensor) -> ClusterLayer:
        return ClusterLayer(key.shape[2], key.shape[3], self.cache, 1, (key.shape[2],))

    def clusters(self, unit: Tensor) -> Tensor:
        """Clusters int32 [B, H, T] of unit queries."""
        wide = torch.promote_types(unit.dtype, torch.float32)
        near = torch.einsum("bthd,hcd->bthc", unit.detach().to(wide), self.means.detach().to(wide))
        best = near.topk(2, dim=-1).values.mean(-1, keepdim=True)
        # Exactly one per head is positive: the best one.
        heads, count = near.shape[2:]
        router = torch.eye(heads * count, dtype=wide, device=unit.device)
        inputs = RouteInputs((near - best).flatten(2), router, k=heads, score="sigmoid")
        routing = route(inputs) if self.watch is None else naive_route(inputs, self.watch(margins(inputs)))
        number = torch.arange(heads * count, device=unit.device).view(heads, count)
        chosen = (routing[0][..., None, None] == number).any(2)
        return (near + MARK * chosen.to(wide)).argmax(-1).to(torch.int32)

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        query, value = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.v_proj))
        cluster = self.clusters(
            unit_length(query)
        )  # before RoPE, so that a token's cluster does not depend on its position
        cos, sin = (x[:, :, None] for x in kwargs["position_embeddings"])
        query = rotate(query, cos, sin)
        unit = unit_length(query)

        def attend(inputs: Inputs, state: Any, in_place: bool) -> tuple[Tensor, AttentionState]:
            assert inputs.new_tokens is not None
            cluster_inputs = ClusterInputs(cluster, inputs.new_tokens, state.length, self.window)
            blocks, clusters = cluster_tokens(cluster_inputs, state.clusters)
            past = AttentionState(state.key, state.value, state.length)
            output, present = block_attention(replace(inputs, blocks=blocks), past, in_place)
            return output, ClusterKeys(**{**vars(present), "clusters": clusters})

        output = self.attended(attend, Inputs, (query, unit, value), past_key_values, block_size=1)
        return self.o_proj(output.flatten(2))


class ClusterAttentionMixer(KeysMixer):
    """Layers of type "cluster_attention"; a family's configuration has `window_size`."""

    name = "cluster_attention"
    of_families = True
    as_numbers = "reads chosen tokens, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        own = sizes(config)
        return (
            LayerOp(CLUSTER_TOKENS, {"cluster_window": config.window_size}, own),
            LayerOp(BLOCK_ATTENTION, {"block_size": 1}, own),
        )

    def cache_layer(self, config: Any, index: int) -> ClusterLayer:
        heads = config.num_attention_heads
        return ClusterLayer(heads, head_size(config), config.still.deployment.cache, 1, (heads,))

    def made(self, base: nn.Module, config: Any, index: int) -> Any:
        kind = class_for(base, {"RoutingMixer": ClusterAttention}, "attention to clusters")
        return kind(base, config.window_size)


MIXERS = (ClusterAttentionMixer(),)
