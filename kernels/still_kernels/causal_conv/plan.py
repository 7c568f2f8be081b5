"""The launches of still::CausalConv: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_kernels.plan import Branch, Check, Launch, Plan

DECODE = "T <= 8"
"""So few tokens that one program of a channel takes them all, and the state with them."""

PLAN = Plan(
    CAUSAL_CONV,
    key={
        "dtype": "dtype",
        "taps": "K",
        "activation": "activation",
        "bias": "has(bias)",
        "aligned": "C % 8 == 0",  # loads of 16 bytes
        "count_dtype": "count_dtype",
    },
    constants=("token_block", "channel_block", "commit_block", "step_block"),
    checks=(
        Check(
            "dim(weight, 0) == C",
            "weight has taps of {dim(weight, 0)} channels, input C={C}; a grouped convolution is not covered.",
        ),
        Check("K >= 2 and P == K - 1", "K={K} taps need K - 1 columns of state, at least 1; it has P={P}."),
    ),
    arguments={"T": "T", "C": "C"},
    steps=(
        Branch(
            DECODE,
            (Launch("step", ("ceil_div(C, step_block)", "B", "1")),),
            (
                Launch("conv", ("ceil_div(T, token_block)", "ceil_div(C, channel_block)", "B")),
                Launch("commit", ("ceil_div(C, commit_block)", "B", "1")),
            ),
        ),
    ),
)
