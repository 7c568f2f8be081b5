"""still::AddRmsNorm: a sum and its norm, for runtimes that compile and launch separately what lies between two products."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

ADD_RMS_NORM = OpSpec(
    # Symbols: I numbers of a token. sum = input + residual, rounded; without a residual it is the input.
    # output = sum / sqrt(mean(sum^2) + epsilon) * weight.
    name="AddRmsNorm",
    torch_name="add_rms_norm",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("residual", ("B", "T", "I"), "T", "activation", optional=True),
        TensorSpec("norm_weight", ("I",), "T", "weight"),
    ),
    outputs=(
        TensorSpec("sum", ("B", "T", "I"), "T", "activation"),
        TensorSpec("output", ("B", "T", "I"), "T", "activation"),
    ),
    attributes=(AttributeSpec("norm_epsilon", 1e-5),),
    traced=False,
)
