"""The chunked PyTorch form of linear attention against a loop in float64, and that loop against the reference of ai.onnx's op."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from still_graphs.errors import ShapeError
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.meaning import Inputs, empty_state
from tests.still_kernels.linear_attention.inputs import (
    BOUND,
    LAYERS,
    SPLITS,
    Layer,
    Split,
    calls,
    error,
    loop,
    whole,
)


def run(layer: Layer, splits: list[Split], dtype: torch.dtype = torch.float32, in_place: bool = False) -> float:
    """The largest error over all calls, of outputs and states."""
    state = empty_state(2, layer.heads, layer.dim, layer.size, dtype)
    worst = 0.0
    for call in calls(layer, splits, dtype):
        before = state
        output, state = chunked_linear_attention(call.inputs, state, in_place)
        assert (state is before) == in_place and output.dtype == dtype and state.dtype == torch.float32
        worst = max(worst, error(output, call.output), error(state, call.state))
    return worst


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_float32_equals_the_loop(layer: Layer, in_place: bool) -> None:
    assert run(layer, SPLITS, in_place=in_place) <= layer.bound


@pytest.mark.parametrize(
    "splits", [[200], [2, 198], [1] * 40, [1, 2, 3] * 5, [63, 1, 1, 64, 65]], ids=lambda x: "-".join(map(str, x[:5]))
)
@pytest.mark.parametrize("layer", [Layer(), Layer(decay=10)], ids=str)
def test_splits(layer: Layer, splits: list[Split]) -> None:
    assert run(layer, splits) <= BOUND


@pytest.mark.parametrize("layer", [Layer("linear"), Layer(), Layer(decay=10)], ids=str)
def test_bfloat16_inputs(layer: Layer) -> None:
    assert run(layer, [70, 1, [129, 3]], torch.bfloat16) <= 4e-3


def test_a_decay_that_forgets_all_is_no_nan() -> None:
    """RG-LRU's reset, and chunks that begin anew: logarithms of -inf inside a chunk."""
    call = next(iter(calls(Layer("gated", decay=10), [100])))
    assert call.inputs.decay is not None
    call.inputs.decay[:, [5, 17, 64]] = -torch.inf
    call.inputs.decay[:, 30, :, 3] = -torch.inf
    state = torch.randn(2, 6, 10, 7, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(chunked_linear_attention(call.inputs, state), loop(call.inputs, state), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_padding_enters_nothing_to_the_bit() -> None:
    for layer in LAYERS:
        call = next(iter(calls(layer, [[3, 2]])))
        state = torch.randn(2, layer.heads, layer.dim, layer.size, generator=torch.Generator().manual_seed(1))
        _, kept = chunked_linear_attention(replace(call.inputs, new_tokens=torch.tensor([0, 0])), state)
        assert torch.equal(kept, state)
        named = {name: x for name, x in vars(call.inputs).items() if isinstance(x, torch.Tensor)}
        junk = {n: x.nan_to_num(7.0) if n in ("query", "key", "value") else x.nan_to_num(0.3) for n, x in named.items()}
        first, second = (chunked_linear_attention(replace(call.inputs, **x), state) for x in (named, junk))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_flow() -> None:
    call = next(iter(calls(Layer(decay=10), [70])))
    names = ("query", "key", "value", "decay", "beta")
    leaves = {n: getattr(call.inputs, n).double().requires_grad_() for n in names}
    gradients = []
    for form in (chunked_linear_attention, loop):
        output, _ = form(replace(call.inputs, **leaves), empty_state(2, 6, 10, 7, torch.float64))
        gradients.append(torch.autograd.grad(output.square().sum(), list(leaves.values())))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("per_key", [False, True], ids=["per head", "per key"])
def test_the_loop_is_that_of_the_standard_op(rule: str, per_key: bool) -> None:
    """ai.onnx::LinearAttention-27, run by onnx's own evaluator."""
    if not onnx.defs.has("LinearAttention", 27):
        pytest.skip("this onnx has no LinearAttention")
    heads, shared, dim, size, tokens = 3, 2, 4, 5, 6
    width = dim if per_key else 1
    layer = Layer(
        rule, groups=heads, shared=shared, keys=heads, dim=dim, heads=heads, size=size, decay=width, beta=heads
    )
    tensors = {name: x.float() for name, x in whole(layer, 2, tokens).items()}
    state = torch.randn(2, heads, dim, size, generator=torch.Generator().manual_seed(2))
    mine = loop(Inputs(**tensors, update_rule=rule), state)
    feeds = {name: x.reshape(2, tokens, -1).numpy() for name, x in tensors.items()} | {"past_state": state.numpy()}
    order = ("query", "key", "value", "past_state", "decay", "beta")
    node = helper.make_node(
        "LinearAttention",
        [name if name in feeds else "" for name in order],
        ["output", "present_state"],
        q_num_heads=heads * shared,
        kv_num_heads=heads,
        update_rule=rule,
    )
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in feeds.items()]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in node.output]
    graph = helper.make_graph([node], "one", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    output, present = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(mine[0].reshape(2, tokens, -1), output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mine[1], present, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"update_rule": "rwkv"}, "update_rule='rwkv' is unknown; known: linear, gated, delta, gated_delta."),
        ({"update_rule": "gated"}, "takes no beta"),
        ({"decay": None}, "needs decay"),
        ({"beta": torch.ones(2, 5, 4)}, r"beta: expected \[2, 5, 6\] or \[2, 5, 1\], got \[2, 5, 4\]"),
        ({"decay": torch.zeros(2, 5, 6, 7)}, r"decay: expected \[2, 5, 6, 1\] or \[2, 5, 6, 10\], got \[2, 5, 6, 7\]"),
        ({"key": torch.zeros(2, 5, 4, 10)}, "4 key heads do not divide the 6 heads of value"),
        ({"query": torch.zeros(2, 5, 2, 10)}, r"query, key, value: expected \[B, T, HQ, G, D\]"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    call = next(iter(calls(Layer(), [5])))
    with pytest.raises(ShapeError, match=message):
        chunked_linear_attention(replace(call.inputs, **change), empty_state(2, 6, 10, 7))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="state: expected"):
        chunked_linear_attention(call.inputs, empty_state(2, 6, 7, 10))
