"""still::ClusterTokens: of each token the latest ones before it that are of its cluster."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import CAPACITY, COUNTS

CLUSTER_TOKENS = OpSpec(
    # `blocks` are for BlockAttention with blocks of one token: of each head the positions of the `cluster_window` latest tokens before a
    # token that have its cluster, or its own position where there is none; ascending, -1 where there are fewer, and at padding.
    name="ClusterTokens",
    torch_name="cluster_tokens",
    inputs=(TensorSpec("cluster", ("B", "T", "HK"), "int32", "activation"), *COUNTS),
    # In place: rows are gathered before they are written, and what is written is read from the writer's output.
    states=(StateSpec("clusters", ("B", "HK", "N"), "float32", CAPACITY),),
    outputs=(TensorSpec("blocks", ("B", "T", "HK", "cluster_window"), "int32", "activation"),),
    attributes=(AttributeSpec("cluster_window", 64),),
)
