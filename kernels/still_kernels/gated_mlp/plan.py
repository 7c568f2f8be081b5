"""The launches of still::GatedMlp: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.gated_mlp import GATED_MLP
from still_kernels.dense_matmul.plan import (
    FEW,
    FEW_ROWS,
    GROUP_ROWS,
    INNER,
    by_blocks,
    is_some,
    span,
    split_grid,
    split_regions,
    splits,
)
from still_kernels.plan import Branch, Launch, Matrix, Plan, Region

PARTIAL, ARRIVALS = split_regions("I")

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
    constants=(
        "gated_outputs",
        "few_outputs",
        "split_outputs",
        "split_inputs",
        "split_programs",
        "some_gated_rows",
        "some_gated_outputs",
        "some_rows",
        "some_outputs",
        "gated_rows",
        "gated_block",
        "row_block",
        "output_block",
        "tma",  # 1: kernels of blocks copy by TMA
    ),
    define={"splits": splits("I", "M")},
    workspace=(
        Region("rows", "T", ("tokens", "I"), f"not ({FEW})"),
        Region("middle", "T", (f"max(tokens, {FEW_ROWS})", "M")),
        PARTIAL,
    ),
    persistent=(ARRIVALS,),
    matrices=(
        Matrix("rows", "tokens", "I"),
        Matrix("gate_up", "I", "2 * M"),
        Matrix("middle", "tokens", "M"),
        Matrix("down", "M", "I"),
    ),
    arguments={"M": "tokens", "N": "M", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            FEW,
            (
                Launch("few_gated", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(M, gated_outputs)", "1")),
                Branch(
                    "splits > 1",
                    (Launch("split_down", split_grid("I")),),
                    (Launch("few_down", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(I, few_outputs)", "1")),),
                ),
            ),
            (
                Launch("norm", ("tokens", "1", "1")),
                Branch(
                    is_some("gated_rows", "gated_block", "M"),
                    (by_blocks("some_gated", "some_gated_rows", "some_gated_outputs", "M"),),
                    (by_blocks("many_gated", "gated_rows", "gated_block", "M"),),
                ),
                Branch(
                    is_some("row_block", "output_block", "I"),
                    (by_blocks("some_down", "some_rows", "some_outputs", "I"),),
                    (by_blocks("many_down", "row_block", "output_block", "I"),),
                ),
            ),
        ),
    ),
)
"""Numbers of kernels are M rows, N numbers between and K inputs."""
