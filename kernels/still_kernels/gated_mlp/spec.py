"""still::GatedMlp: a feed-forward layer with its norm and residual and float32 sums, for runtimes that sum in half precision."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

GATED_MLP = OpSpec(
    # Symbols: I inputs, M inner channels. output = input + (silu(gate) * up) @ down, gate and up the halves of norm(input) @ gate_up.
    name="GatedMlp",
    torch_name="gated_mlp",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("norm_weight", ("I",), "T", "weight"),
        TensorSpec("down", ("M", "I"), "T", "weight"),
        TensorSpec("gate_up", ("I", "2*M"), "T", "weight"),
    ),
    outputs=(TensorSpec("output", ("B", "T", "I"), "T", "activation"),),
    attributes=(AttributeSpec("norm_epsilon", 1e-5),),
    traced=False,
)
