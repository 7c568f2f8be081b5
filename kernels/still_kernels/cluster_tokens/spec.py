"""still::ClusterTokens: for each token, the latest earlier tokens of its cluster."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import CAPACITY, COUNTS

CLUSTER_TOKENS = OpSpec(
    # `blocks` are inputs of BlockAttention with blocks of one token. For each head they have the positions of the `cluster_window` latest
    # earlier tokens of the token's cluster, or the token's own position if there are none. They ascend; -1 fills missing ones and padding.
    name="ClusterTokens",
    torch_name="cluster_tokens",
    inputs=(TensorSpec("cluster", ("B", "T", "HK"), "int32", "activation"), *COUNTS),
    # In place: rows are gathered before they are written; written values are read from the writer's output.
    states=(StateSpec("clusters", ("B", "HK", "N"), "float32", CAPACITY),),
    outputs=(TensorSpec("blocks", ("B", "T", "HK", "cluster_window"), "int32", "activation"),),
    attributes=(AttributeSpec("cluster_window", 64),),
)
