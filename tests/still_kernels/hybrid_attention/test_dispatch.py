"""Which kernel a call gets, what is refused, and gradients by recomputation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.hybrid_attention import call as dispatch
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.meaning.whole import whole_hybrid_attention

CONFIG = HybridAttentionConfig(
    num_heads=4, num_kv_heads=2, head_dim=12, chunk_size=8, salient_per_chunk=2, capacity_tokens=64
)


def inputs(tokens: int, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, heads, 12) for heads in (4, 2, 2, 4)] + [(4, 12, 12)] * 2
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


def test_cpu_is_the_chunked_form() -> None:
    tensors, counts = inputs(37), torch.tensor([37, 5])
    state = HybridAttentionState.empty(CONFIG, 2)
    got, present = dispatch.hybrid_attention(Inputs(*tensors, counts), CONFIG, state)
    expected, expected_state = chunked_hybrid_attention(Inputs(*tensors, counts), CONFIG, state)
    assert torch.equal(got, expected)
    assert all(torch.equal(t, expected_state.tensors()[n]) for n, t in present.tensors().items())


def test_gradients_by_recomputation() -> None:
    tensors, counts = inputs(37, requires_grad=True), torch.tensor([37, 5])
    given = Inputs(*tensors, counts, torch.tensor([0.5, 1.0, 2.0, 30.0], requires_grad=True))
    tensors.append(given.window_factor)
    state = HybridAttentionState.empty(CONFIG, 2)
    # What CUDA takes; on the CPU PyTorch differentiates the chunked form directly.
    got, *states = dispatch._Recompute.apply(CONFIG, state, *given.tensors())
    expected, present = dispatch.hybrid_attention(given, CONFIG, state)
    gradient = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(got, expected)
    assert present.length.tolist() == [37, 5]
    assert not any(t.requires_grad for t in (*states, *present.tensors().values()))
    for mine, plain in zip(
        torch.autograd.grad(got, tensors, gradient), torch.autograd.grad(expected, tensors, gradient), strict=True
    ):
        torch.testing.assert_close(mine, plain)
        assert mine.abs().max() > 0


def test_gradients_only_where_wanted() -> None:
    tensors = inputs(20)
    tensors[4].requires_grad_(True)
    got, _ = dispatch.hybrid_attention(Inputs(*tensors), CONFIG, HybridAttentionState.empty(CONFIG, 2))
    got.sum().backward()
    assert tensors[4].grad is not None and all(t.grad is None for t in tensors if t is not tensors[4])


WHOLE = [
    {},
    {"salient_per_chunk": 0},
    {"salient_per_chunk": 8},
    {"select_scope": "kv_group_max"},
    {"select_scope": "kv_group_mean", "overflow": "fold_oldest"},
    {"profile": "released", "saliency": "released_prefill", "phantom_first_chunk": True},
    {"feature_map": "softmax", "feature_dim": 5, "gate": "none"},
    {"feature_map": "relu", "window_factor": (0.5, 1.0, 3.0, 30.0)},
]


@pytest.mark.parametrize("changes", WHOLE, ids=lambda c: ", ".join(c) or "default")
@pytest.mark.parametrize("tokens", [1, 16, 17, 31, 64])
def test_whole_sequences_equal_the_chunked_form(tokens: int, changes: dict[str, object]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value, gate = (random(2, tokens, heads, 12) for heads in (4, 2, 2, 4))
    maps = [random(4, config.projection_dim, 12) for _ in range(2)]
    inputs = [query, key, value, gate if config.gate == "channel" else None, *maps]
    learned = random(4).square().detach().requires_grad_()
    state = HybridAttentionState.empty(config, 2, torch.float64)
    for factor in (None, learned):
        given = Inputs(*inputs, window_factor=factor)
        expected, _ = chunked_hybrid_attention(given, config, state)
        gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        leaves = [t for t in (*inputs, factor) if t is not None]
        wanted = torch.autograd.grad(expected, leaves, gradient, allow_unused=True)
        for got in (
            dispatch.hybrid_attention_whole(given, config),
            dispatch._RecomputeWhole.apply(config, *given.tensors()),  # what CUDA takes
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
            found = torch.autograd.grad(got, leaves, gradient, allow_unused=True)
            for leaf, *pair in zip(leaves, found, wanted, strict=True):
                mine, theirs = (torch.zeros_like(leaf) if g is None else g for g in pair)
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_whole_sequences_compile_once_for_a_layer() -> None:
    """In one graph, and again neither for other numbers nor for another layer's window factors: what CUDA differentiates."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(whole_hybrid_attention, dynamic=False, fullgraph=True, backend=backend)
    for seed in range(2):
        torch.manual_seed(seed)
        tensors = [torch.randn_like(t).requires_grad_() for t in inputs(37)]
        given = Inputs(*tensors, window_factor=torch.rand(4))
        got, expected = compiled(given, CONFIG), whole_hybrid_attention(given, CONFIG)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        gradients = [torch.autograd.grad(x.square().sum(), tensors) for x in (got, expected)]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert len(graphs) == 1


def test_sequences_beyond_the_cache_take_the_chunked_form() -> None:
    config = dataclasses.replace(CONFIG, overflow="fold_oldest", capacity_tokens=40)
    given = Inputs(*inputs(60, requires_grad=True))
    state = HybridAttentionState.empty(config, 2)
    got = dispatch.hybrid_attention_whole(given, config)
    torch.testing.assert_close(got, chunked_hybrid_attention(given, config, state)[0], rtol=0, atol=0)
    assert got.requires_grad
    with pytest.raises(UnsupportedError, match="60 tokens"):
        whole_hybrid_attention(given, config)


@pytest.mark.parametrize(
    ("changes", "dtype", "word"),
    [
        ({"head_dim": 72}, torch.float16, "head_dim=72; the kernels have one of (48, 64, 80, 96, 128, 256)"),
        ({"chunk_size": 16}, torch.float16, "chunk_size=16"),
        ({"chunk_size": 64, "salient_per_chunk": 33}, torch.float16, "salient_per_chunk=33"),
        ({"num_heads": 32, "num_kv_heads": 1}, torch.float16, "32 query heads"),
        ({"local": "sliding"}, torch.float16, "local='sliding'"),
        ({}, torch.float64, "torch.float64"),
    ],
)
def test_refusals_name_what_is_covered(changes: dict, dtype: torch.dtype, word: str) -> None:
    base = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "chunk_size": 64}
    reasons = dispatch.refusals(HybridAttentionConfig(**{**base, **changes}), dtype)
    assert len(reasons) == 1 and word in reasons[0] and "the kernels have" in reasons[0]


def test_covered_layer_has_no_refusal() -> None:
    config = HybridAttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, profile="released")
    assert dispatch.refusals(config, torch.bfloat16) == []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Arguments of the launches that calls would make on a GPU."""
    pytest.importorskip("triton")
    from still_kernels.hybrid_attention import launch

    calls: list[tuple] = []
    monkeypatch.setattr(
        launch, "launch_hybrid_attention", lambda *args, **named: calls.append((*args, *named.values()))
    )
    monkeypatch.setattr(dispatch, "demand_kernel", lambda *_: None)
    return calls


def test_kernels_see_contiguous_tensors_only(launched: list[tuple]) -> None:
    """They take addresses: a transposed state or counts of stride 0 would be read and written elsewhere."""
    state = HybridAttentionState.empty(CONFIG, 2)
    odd = dataclasses.replace(
        state, kv_state=state.kv_state.mT.contiguous().mT, length=torch.zeros(1, dtype=torch.int64).expand(2)
    )
    given = Inputs(*inputs(6), torch.tensor([6]).expand(2))
    _, present = dispatch._triton(given, CONFIG, odd)
    ((seen, _, state, output, *_),) = launched
    found = [t for t in seen.tensors() if t is not None] + [output, *state.tensors().values()]
    assert len(found) == 7 + 1 + 8 and all(t.is_contiguous() for t in (*found, *present.tensors().values()))
    with pytest.raises(ShapeError, match=r"kv_state .* not contiguous"):
        dispatch._triton(given, CONFIG, odd, in_place=True)


def test_factors_first_used_in_inference_can_be_saved_for_gradients() -> None:
    config = dataclasses.replace(CONFIG, window_factor=(0.25, 1.0, 2.0, 3.0))
    with torch.inference_mode():
        factor = Inputs(*inputs(6)).factor(config)
    assert factor is not None and not factor.is_inference()
