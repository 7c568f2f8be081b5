"""StillAttention: initial parameters, LoLCATs' form, and its op as compilers see it."""

from typing import Any

import pytest
import torch

from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.models import attach_untrained
from still_kernels.hybrid_attention import traced as op
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from tests.still_export.tiny import CHUNK, plain_model, still_model
from tests.tolerances import REFERENCE


def test_fresh_parameters_are_identity_directions_and_open_gates() -> None:
    model = attach_untrained(plain_model("llama"), StillConfig(feature_dim=7))
    attention = model.model.layers[1].self_attn
    assert attention.feature_q_weight.shape == (6, 7, 10)
    assert torch.equal(attention.feature_k_weight[3], torch.eye(7, 10, dtype=torch.float64))
    with torch.no_grad():
        hidden = torch.randn(1, 5, 24, dtype=torch.float64)
        positions = model.model.rotary_emb(hidden, torch.arange(5)[None])
        *_, gate = attention.project(hidden, positions)
    assert gate.min() > 0.999
    shared = attach_untrained(plain_model("llama"), StillConfig(shared_feature_map=True, gate="none"))
    assert shared.model.layers[0].self_attn.feature_q_weight.shape == (1, 10, 10)
    assert shared.model.layers[0].self_attn.g_proj is None


@pytest.mark.parametrize("local", ["chunked", "sliding"])
def test_lolcats_form(local: str) -> None:
    """LoLCATs in its own terms: factor * exp(s - max) in the window, softmax features of both signs outside, one denominator."""
    factors = [[0.1 + 0.1 * h for h in range(6)]] * 3
    window = 5 if local == "sliding" else None
    model = still_model(
        "llama",
        salient_per_chunk=0,
        feature_map="softmax_pm",
        feature_dim=7,
        gate="none",
        mix_epsilon=1e-12,
        local=local,
        window_size=window,
        window_factors=factors,
    )
    attention: StillAttention = model.model.layers[0].self_attn
    hidden = torch.randn(1, 37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    position = torch.arange(37)
    if local == "chunked":
        near = position[None] // CHUNK >= position[:, None] // CHUNK - 1
    else:
        near = position[None] > position[:, None] - 5
    causal = position[None] <= position[:, None]
    with torch.no_grad():
        positions = model.model.rotary_emb(hidden, position[None])
        query, key, value, _ = attention.project(hidden, positions)
        rows = []
        for head in range(6):
            q, k, v = query[0, :, head], key[0, :, head // 3], value[0, :, head // 3]
            logits = (q @ k.T / 10**0.5).masked_fill(~(near & causal), -torch.inf)
            weights = factors[0][head] * torch.exp(logits - logits.amax(-1, keepdim=True))
            maps = [x @ w[head].T for x, w in ((q, attention.feature_q_weight), (k, attention.feature_k_weight))]
            f_q, f_k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in maps)
            weights = weights + (f_q @ f_k.T).masked_fill(near | ~causal, 0)
            rows.append(weights @ v / weights.sum(-1, keepdim=True))
        expected = attention.o_proj(torch.stack(rows, 1).flatten(1))
        got = attention(hidden, positions)[0][0]
    torch.testing.assert_close(got, expected, rtol=0, atol=REFERENCE[torch.float32])  # factors are float32 in the op


def test_the_op_hands_window_factors_on_as_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values on the host would cost a wait for the device in every layer and step, and no CUDA graph could be captured."""
    factors = (0.5, 1.0, 2.0, 0.25)
    config = HybridAttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        chunk_size=8,
        salient_per_chunk=2,
        window_factor=factors,
        capacity_tokens=64,
    )
    state = HybridAttentionState.empty(config, 1)
    shapes = [(1, 30, heads, 12) for heads in (4, 2, 2, 4)] + [(4, 12, 12)] * 2
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    inputs = Inputs(*tensors, torch.tensor([30]))
    expected, _ = chunked_hybrid_attention(inputs, config, state)
    seen = []

    reading = pytest.MonkeyPatch()

    def kernel(given: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, in_place: bool) -> Any:
        seen.append(given.window_factor)
        reading.undo()  # the kernel of the CPU may
        return chunked_hybrid_attention(given, config, state)

    monkeypatch.setattr(op, "kernel", kernel)
    for name in ("tolist", "item", "__bool__", "__int__"):
        reading.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value was read"))
    try:
        output, _ = op.hybrid_attention(inputs, config, state)
    finally:
        reading.undo()
    assert seen[0].tolist() == list(factors)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("tokens", [1, 30])
def test_the_fake_op_has_the_strides_of_the_real_one(tokens: int) -> None:
    """Compiled models assert them; activations come as views of [B, H, T, D]."""
    config = HybridAttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=12, chunk_size=8, salient_per_chunk=2, capacity_tokens=64
    )
    state = HybridAttentionState.empty(config, 2)
    tensors = [torch.randn(2, heads, tokens, 12).transpose(1, 2) for heads in (4, 2, 2, 4)]
    tensors += [torch.randn(4, 12, 12) for _ in "qk"]
    states = (getattr(state, s.name) for s in HYBRID_ATTENTION.states)
    counts = torch.tensor([tokens, 1])
    arguments = (*tensors, None, counts, state.length, *states, *config.attributes().values())
    for each in (torch.ops.still.hybrid_attention, torch.ops.still.hybrid_attention_):
        torch.library.opcheck(each.default, arguments, test_utils=("test_schema", "test_faketensor"))
