"""still::GreedyToken: the likeliest token, for runtimes that would copy all logits to the host to find it."""

from __future__ import annotations

from still_graphs.spec import OpSpec, TensorSpec

GREEDY_TOKEN = OpSpec(
    # Symbols: V tokens of the vocabulary. The first of the likeliest; -1 if a logit is NaN or the
    # largest is infinite.
    name="GreedyToken",
    torch_name="greedy_token",
    inputs=(TensorSpec("logits", ("B", "T", "V"), "T", "activation"),),
    outputs=(TensorSpec("token", ("B", "T"), "int32", "activation"),),
    traced=False,
)
