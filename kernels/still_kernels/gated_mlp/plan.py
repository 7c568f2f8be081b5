"""The launches of still::GatedMlp: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.gated_mlp import GATED_MLP
from still_kernels.dense_matmul.plan import FEW, GROUP_ROWS, INNER, span
from still_kernels.plan import Branch, Launch, Plan, Region

PLAN = Plan(
    GATED_MLP,
    key={
        "dtype": "dtype",
        "aligned": "M % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        "whole": f"M % {INNER} == 0 and I % {INNER} == 0",
        "span": span("I"),  # of the second product
        "gated_span": span("2 * M"),
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("gated_outputs", "gated_rows", "gated_block", "few_outputs", "row_block", "output_block"),
    workspace=(Region("rows", "T", ("tokens", "I"), f"not ({FEW})"), Region("middle", "T", ("tokens", "M"))),
    arguments={"M": "tokens", "N": "M", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            FEW,
            (
                Launch("few_gated", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(M, gated_outputs)", "1")),
                Launch("few_down", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(I, few_outputs)", "1")),
            ),
            (
                Launch("norm", ("tokens", "1", "1")),
                Launch("many_gated", ("ceil_div(tokens, gated_rows) * ceil_div(M, gated_block)", "1", "1")),
                Launch("many_down", ("ceil_div(tokens, row_block) * ceil_div(I, output_block)", "1", "1")),
            ),
        ),
    ),
)
"""Numbers of kernels are M rows, N numbers between and K inputs."""
