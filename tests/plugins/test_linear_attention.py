"""The native CPU kernels of still::LinearAttention and still::CausalConv, in ONNX Runtime; the cases are those of the bodies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from still_kernels.linear_attention.meaning import empty_state
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from tests.still_graphs import test_causal_conv as conv
from tests.still_graphs import test_linear_attention as body
from tests.still_graphs.node_model import StatefulNode, session
from tests.still_kernels.causal_conv.inputs import LAYERS as CONV_LAYERS
from tests.still_kernels.causal_conv.inputs import Layer as ConvLayer
from tests.still_kernels.linear_attention.inputs import LAYERS, SPLITS, Layer, Split, calls

WIDE = [
    Layer(dim=64, size=128),
    Layer("linear", groups=1, keys=1, dim=33, size=40, shared=2),
    Layer(decay=96, dim=96, size=20),
]
"""Whole vectors and rests of them; one query group and key head for all."""


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", [*LAYERS, *WIDE], ids=str)
def test_kernel_equals_the_loop(library: str, layer: Layer, in_place: bool) -> None:
    body.check(layer, SPLITS, in_place=in_place, library=library, threads=2)


@pytest.mark.parametrize("splits", [[2, 198], [1] * 12, [1, 2, 3, 4] * 3, [32, 33, 31, 64]], ids=lambda x: str(x[:3]))
@pytest.mark.parametrize("layer", [Layer(), Layer(decay=10)], ids=str)
def test_splits(library: str, layer: Layer, splits: list[Split]) -> None:
    body.check(layer, splits, library=library)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_instruction_sets(
    library: str,
    dtype: torch.dtype,
) -> None:
    bound = None if dtype == torch.float32 else 1e-3
    body.check(Layer(dim=24, size=40), [70, 1, [1, 9], 3], dtype, bound=bound, library=library)
    conv.check(ConvLayer(70, bias=True), dtype, library=library)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", [*CONV_LAYERS, ConvLayer(200, 4, True)], ids=str)
def test_convolution_equals_the_loop(library: str, layer: ConvLayer, in_place: bool) -> None:
    conv.check(layer, in_place=in_place, library=library, threads=2)


def test_threads_change_no_bit(library: str) -> None:
    layer, runs = Layer(dim=24, size=40), []
    for threads in (1, 2, 2):
        state = empty_state(2, layer.heads, layer.dim, layer.size)
        node = StatefulNode(LINEAR_ATTENTION, body.layer_model(layer), state, True, library=library, threads=threads)
        runs.append([node(feeds(call), call.output.float()) for call in calls(layer, [70, 1, [3, 40]])])
    for others in runs[1:]:
        for first, second in zip(runs[0], others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def feeds(call: Any) -> dict[str, torch.Tensor]:
    return {t.name: x for t in LINEAR_ATTENTION.inputs if (x := getattr(call.inputs, t.name)) is not None}


def test_a_decay_that_forgets_all_is_no_nan(library: str) -> None:
    for layer in (Layer("gated"), Layer("gated", decay=10)):
        call = next(iter(calls(layer, [100])))
        assert call.inputs.decay is not None
        decay = call.inputs.decay.clone()
        decay[:, [5, 17, 64]] = -torch.inf
        node = StatefulNode(LINEAR_ATTENTION, body.layer_model(layer), empty_state(2, 6, 10, 7), False, library=library)
        output, state = node(feeds(replace(call, inputs=replace(call.inputs, decay=decay))), call.output.float())
        assert bool(output.isfinite().all()) and bool(state.isfinite().all())


@pytest.mark.parametrize("pieces", [[40], [1] * 40], ids=["chunks", "steps"])
def test_states_fade_to_zero(library: str, pieces: list[Split]) -> None:
    """Not to denormal numbers, which processors are slow with; the caller's own arithmetic keeps them."""
    layer = Layer("gated")
    node = StatefulNode(
        LINEAR_ATTENTION, body.layer_model(layer), torch.full((2, 6, 10, 7), 1e-30), False, library=library, threads=1
    )
    for call in calls(layer, pieces):
        nothing = replace(
            call.inputs,
            value=0 * call.inputs.value,
            decay=torch.full_like(call.inputs.decay, -0.5),  # type: ignore[arg-type]
        )
        _, state = node(feeds(replace(call, inputs=nothing)), call.output.float())
    assert not state.any()
    assert np.float32(1e-39) * np.float32(0.5) > 0


def test_roundings_of_a_constant_decay_do_not_add_up(library: str) -> None:
    """As Lightning attention has it, of each head another: products of a factor that errs by 1e-7 would err by as much at each token."""
    layer, state = Layer("gated"), empty_state(2, 6, 10, 7)
    node = StatefulNode(LINEAR_ATTENTION, body.layer_model(layer), state, False, library=library, threads=1)
    (call,) = calls(layer, [1000])
    rates = torch.logspace(-3.4, -0.9, 12).view(2, 1, 6, 1)
    value = torch.rand(call.inputs.value.shape, generator=torch.Generator().manual_seed(3))
    alike = {
        "key": torch.ones_like(call.inputs.key),
        "value": value,
        "decay": -rates.expand(2, 1000, 6, 1).contiguous(),
    }
    _, state = node(feeds(replace(call, inputs=replace(call.inputs, **alike))), call.output.float())
    left = torch.exp(-rates.double() * torch.arange(999, -1, -1).view(1, -1, 1, 1))
    exact = (left * value.double()).sum(1)
    assert (state.double() / exact[:, :, None] - 1).abs().max() < 4e-6


def test_the_kernels_take_the_nodes(library: str, tmp_path: Path) -> None:
    for name, model in (("LinearAttention", body.layer_model(Layer())), ("CausalConv", conv.layer_model(ConvLayer()))):
        path = str(tmp_path / f"{name}.onnx")
        session(model, save=path, library=library)
        assert [n.op_type for n in onnx.load(path).graph.node] == [name]


@pytest.mark.parametrize("counts", [[5, -1], [5, 6], [5, 2**62]], ids=str)
def test_wrong_counts_are_refused(library: str, counts: list[int]) -> None:
    node = StatefulNode(LINEAR_ATTENTION, body.layer_model(Layer()), empty_state(2, 6, 10, 7), False, library=library)
    call = next(iter(calls(Layer(), [5])))
    with pytest.raises(Exception, match="LinearAttention: sequence 1 has past_length 0 and new_tokens"):
        node(feeds(call) | {"new_tokens": torch.tensor(counts)}, call.output.float())
