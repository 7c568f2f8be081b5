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
"""Added to the logit of the cluster that was chosen: unit vectors' are far below."""


@dataclass(frozen=True)
class ClusterKeys(AttentionState):
    """The state of attention, and `clusters` [B, H, N], in at least float32."""

    clusters: Tensor | None = None


class ClusterLayer(RowsLayer):
    """What a cache holds of one layer."""

    of, kept = ClusterKeys, "clusters"


class ClusterAttention(Keyed):
    """Routing Transformer (arXiv:2003.05997), in a causal reading of ours: a token's cluster is that of the centroid whose product with its
    query, of unit length and before positions, is largest; it attends to the latest tokens before it of the same cluster, and to itself
    where there is none.
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
        """Of tokens [B, T, H, D], int32 [B, T, H]."""
        wide = torch.promote_types(unit.dtype, torch.float32)
        near = torch.einsum("bthd,hcd->bthc", unit.detach().to(wide), self.means.detach().to(wide))
        best = near.topk(2, dim=-1).values.mean(-1, keepdim=True)
        # One of each head's is positive: these are the best ones.
        heads, count = near.shape[2:]
        router = torch.eye(heads * count, dtype=wide, device=unit.device)
        asked = RouteInputs((near - best).flatten(2), router, k=heads, score="sigmoid")
        went = route(asked) if self.watch is None else naive_route(asked, self.watch(margins(asked)))
        number = torch.arange(heads * count, device=unit.device).view(heads, count)
        told = (went[0][..., None, None] == number).any(2)
        return (near + MARK * told.to(wide)).argmax(-1).to(torch.int32)

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        query, value = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.v_proj))
        cluster = self.clusters(
            unit_length(query)
        )  # before positions, so that a token's cluster does not follow from its place
        cos, sin = (x[:, :, None] for x in kwargs["position_embeddings"])
        query = rotate(query, cos, sin)
        unit = unit_length(query)

        def attend(inputs: Inputs, state: Any, in_place: bool) -> tuple[Tensor, AttentionState]:
            assert inputs.new_tokens is not None
            asked = ClusterInputs(cluster, inputs.new_tokens, state.length, self.window)
            blocks, clusters = cluster_tokens(asked, state.clusters)
            held = AttentionState(state.key, state.value, state.length)
            output, present = block_attention(replace(inputs, blocks=blocks), held, in_place)
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
