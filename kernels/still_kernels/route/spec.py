"""still::Route: the experts of each token, and their weights."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

ROUTE = OpSpec(
    # Symbols: I channels, E experts. All in float32: score = softmax or sigmoid of input router^T; the k experts of the largest
    # score + bias are chosen, the largest first, the lower index first if equal; weight = their scores without the bias,
    # divided by (their sum + epsilon) with `normalize`, times `scaling`. With groups of neighbouring experts the candidates are those of
    # the `top_groups` groups with the largest sum of their two best. A softmax over the chosen logits is "softmax", normalized.
    name="Route",
    torch_name="route",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("router", ("E", "I"), "T", "weight"),
        TensorSpec("bias", ("E",), "float32", "weight", optional=True),
    ),
    outputs=(
        TensorSpec("expert", ("B", "T", "k"), "int32", "activation"),
        TensorSpec("weight", ("B", "T", "k"), "float32", "activation"),
    ),
    attributes=(
        AttributeSpec("k", 1),
        AttributeSpec("score", "softmax", ("softmax", "sigmoid")),
        AttributeSpec("normalize", 0),
        AttributeSpec("epsilon", 0.0),
        AttributeSpec("scaling", 1.0),
        AttributeSpec("groups", 1),
        AttributeSpec("top_groups", 1),
    ),
)
