"""The core launches of still::LinearAttention and still::CausalConv what the Python launcher launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from still_kernels.causal_conv import meaning as causal_conv
from still_kernels.causal_conv.plan import Variant as ConvVariant
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention import meaning as linear_attention
from still_kernels.linear_attention.plan import Variant
from still_kernels.linear_attention.spec import DELTA, GATED, LINEAR_ATTENTION
from tests.plugins.test_launches import NAMES, fake_compiler, mirror  # noqa: F401  # fixtures

launch = pytest.importorskip("still_kernels.linear_attention.call")
conv_launch = pytest.importorskip("still_kernels.causal_conv.call")

CASES = [
    # batch, tokens, update_rule, size of decay, size of beta, query heads of a state, dtype
    (1, 1, "gated_delta", 1, 6, 1, torch.float16),
    (2, 8, "gated_delta", 64, 1, 1, torch.bfloat16),
    (2, 9, "gated_delta", 1, 6, 1, torch.bfloat16),
    (1, 40000, "gated_delta", 1, 6, 1, torch.float16),
    (1, 300, "gated_delta", 64, 1, 2, torch.float32),
    (1, 300, "gated", 64, 0, 1, torch.float16),
    (1, 300, "gated", 1, 0, 3, torch.float16),
    (1, 300, "delta", 0, 1, 1, torch.float16),
    (1, 300, "linear", 0, 0, 1, torch.float32),
    (3, 200, "gated_delta", 1, 6, 1, torch.bfloat16),
    (3, 1, "gated", 1, 0, 1, torch.float16),
]


def made(*shape: int, kind: torch.dtype) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=kind, device="meta")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_linear_attention(case: Any, mirror: Callable[..., None]) -> None:  # noqa: F811
    batch, tokens, rule, decay, beta, shared, dtype = case
    lead = (batch, tokens)
    tensors = {
        "query": made(*lead, 2, shared, 64, kind=dtype),
        "key": made(*lead, 3, 64, kind=dtype),
        "value": made(*lead, 6, 48, kind=dtype),
        **({"decay": made(*lead, 6, decay, kind=torch.float32)} if rule in GATED else {}),
        **({"beta": made(*lead, beta, kind=torch.float32)} if rule in DELTA else {}),
        "new_tokens": made(batch, kind=torch.int32),
        "past_recurrent_state": made(batch, 6, 64, 48, kind=torch.float32),
    }
    fields = {name: tensors.get(name) for name in ("query", "key", "value", "decay", "beta", "new_tokens")}
    inputs = linear_attention.Inputs(**fields, update_rule=rule, scale=0.25 if rule == "gated" else 0.0)  # type: ignore[arg-type]

    def run(output: torch.Tensor) -> None:
        launch.launch_linear_attention(inputs, tensors["past_recurrent_state"], output)

    sizes = {"head_dim": 64, "value_dim": 48, "shared": shared, "per_key": int(decay > 1)}
    variant = Variant(NAMES[dtype], **sizes, update_rule=rule, count_dtype="int32")
    attributes = {"update_rule": rule, "scale": inputs.scale}
    mirror(LINEAR_ATTENTION, tensors, run, variant, attributes)


@pytest.mark.parametrize(
    "case",
    [
        # batch, tokens, taps, activation, bias, dtype
        (1, 1, 4, "silu", False, torch.float16),
        (2, 300, 3, "none", True, torch.bfloat16),
        (3, 200, 4, "silu", True, torch.float32),
        (3, 2, 7, "none", False, torch.float16),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_causal_conv(case: Any, mirror: Callable[..., None]) -> None:  # noqa: F811
    batch, tokens, taps, activation, bias, dtype = case
    lead = (batch, tokens)
    tensors = {
        "input": made(*lead, 200, kind=dtype),
        "weight": made(200, 1, taps, kind=dtype),
        **({"bias": made(200, kind=dtype)} if bias else {}),
        "new_tokens": made(batch, kind=torch.int32),
        "past_conv_state": made(batch, 200, taps - 1, kind=dtype),
    }
    fields = {name: tensors.get(name) for name in ("input", "weight", "bias", "new_tokens")}
    inputs = causal_conv.Inputs(**fields, activation=activation)  # type: ignore[arg-type]

    def run(output: torch.Tensor) -> None:
        conv_launch.launch_causal_conv(inputs, tensors["past_conv_state"], output)

    variant = ConvVariant(NAMES[dtype], taps, activation, int(bias), count_dtype="int32")
    mirror(CAUSAL_CONV, tensors, run, variant, {"activation": activation})
