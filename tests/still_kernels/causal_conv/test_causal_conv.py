"""The PyTorch form of the causal convolution against a loop, and that loop against torch's convolution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import conv1d, pad

from still_graphs.errors import ShapeError
from still_kernels.causal_conv.meaning import Inputs, empty_state, whole_causal_conv
from tests.still_kernels.causal_conv.inputs import LAYERS, SPLITS, Layer, calls, loop
from tests.tolerances import REFERENCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_equals_the_loop(layer: Layer, in_place: bool, dtype: torch.dtype) -> None:
    state = empty_state(2, layer.channels, layer.taps, dtype)
    for call in calls(layer, SPLITS, dtype):
        before = state
        output, state = whole_causal_conv(call.inputs, state, in_place)
        assert (state is before) == in_place and torch.equal(state.double(), call.state)
        torch.testing.assert_close(output.double(), call.output, atol=REFERENCE[dtype], rtol=REFERENCE[dtype])


def test_the_loop_is_a_convolution() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.randn(2, 9, 5, generator=generator), torch.randn(5, 1, 4, generator=generator)
    output, state = loop(Inputs(tokens, weight), empty_state(2, 5, 4))
    expected = conv1d(pad(tokens.transpose(1, 2), (3, 0)), weight, groups=5).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    assert torch.equal(state, tokens[:, -3:].transpose(1, 2))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"activation": "gelu"}, "activation='gelu' is unknown; known: none, silu."),
        ({"weight": torch.zeros(10, 2, 4)}, "a grouped convolution is not covered"),
        ({"weight": torch.zeros(10, 1, 1)}, "at least 2"),
        ({"bias": torch.zeros(3)}, r"bias: expected \[10\], got \[3\]"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    call = next(iter(calls(Layer(), [5])))
    with pytest.raises(ShapeError, match=message):
        whole_causal_conv(replace(call.inputs, **change), empty_state(2, 10, 4))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="state: expected"):
        whole_causal_conv(call.inputs, empty_state(2, 10, 5))
