"""still::CausalConv: a convolution over each channel's latest tokens, the short one before linear attention."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec

CAUSAL_CONV = OpSpec(
    # Symbols: C channels, K taps, P = K - 1 columns of the state.
    name="CausalConv",
    torch_name="causal_conv",
    inputs=(
        TensorSpec("input", ("B", "T", "C"), "T", "activation"),
        TensorSpec("weight", ("C", 1, "K"), "T", "weight"),
        TensorSpec("bias", ("C",), "T", "weight", optional=True),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
    ),
    # In place: columns are gathered from the concatenation of past and input, which is a copy.
    states=(StateSpec("conv_state", ("B", "C", "P"), "T"),),
    outputs=(TensorSpec("output", ("B", "T", "C"), "T", "activation"),),
    attributes=(AttributeSpec("activation", "none", ("none", "silu")),),
)
