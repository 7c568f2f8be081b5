"""The core launches what the Python launcher launches, of ops with states: same kernels, grids, numbers, pointers and workspace."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from still_graphs.spec import CACHE
from still_kernels.attention import call as attention
from still_kernels.attention.meaning import AttentionState
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.block_attention import call as block_attention
from still_kernels.block_attention.meaning import Inputs as BlockInputs
from still_kernels.causal_conv import call as causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.linear_attention import call as linear_attention
from still_kernels.linear_attention.meaning import Inputs as LinearInputs
from still_kernels.linear_attention.spec import DELTA, GATED
from still_kernels.select_blocks import call as select_blocks
from still_kernels.select_blocks.meaning import Inputs as SelectInputs
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from tests.plugins.launches import NAMES, made

HYBRID = [
    # batch, tokens, capacity tokens, select_scope, overflow, gate, dtype, cache
    (1, 1, 4096, "q_head", "error", "channel", torch.float16, "float"),
    (3, 1, 65536, "kv_group_max", "error", "none", torch.bfloat16, "float"),
    (8, 1, 65536, "q_head", "error", "channel", torch.float16, "float"),
    (12, 1, 65536, "q_head", "error", "none", torch.bfloat16, "float"),  # clusters of two blocks
    (32, 1, 4096, "q_head", "error", "channel", torch.bfloat16, "float"),  # of one
    (1, 1, 4096, "kv_group_max", "error", "channel", torch.float16, "float"),
    (1, 1, 65536, "kv_group_mean", "error", "channel", torch.bfloat16, "float"),  # no clusters
    (2, 1, 4096, "q_head", "error", "channel", torch.float32, "float"),
    (2, 1, 640, "q_head", "fold_oldest", "channel", torch.float16, "float"),
    (2, 2, 4096, "q_head", "error", "channel", torch.float16, "float"),
    (2, 300, 4096, "kv_group_mean", "error", "channel", torch.float16, "float"),
    (1, 2048, 65536, "q_head", "error", "none", torch.float16, "float"),
    (1, 300, 640, "q_head", "fold_oldest", "channel", torch.float32, "float"),
    (1, 20000, 65536, "q_head", "error", "channel", torch.float16, "float"),
    (2, 100, 128, "q_head", "error", "channel", torch.bfloat16, "float"),  # no slot
    (3, 200, 4096, "q_head", "error", "channel", torch.bfloat16, "float"),
    (3, 70, 640, "kv_group_max", "fold_oldest", "none", torch.float16, "float"),
    (1, 1, 65536, "q_head", "error", "channel", torch.float16, "int8"),
    (2, 300, 4096, "kv_group_max", "error", "none", torch.bfloat16, "int8"),
    (1, 300, 640, "q_head", "fold_oldest", "channel", torch.float16, "int8"),
    (3, 200, 4096, "q_head", "error", "channel", torch.float32, "int8"),
]


def config_of(scope: str, overflow: str, gate: str, capacity: int, cache: str) -> HybridAttentionConfig:
    return HybridAttentionConfig(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        chunk_size=64,
        salient_per_chunk=4
        if overflow == "error"
        else 32,  # as kernels compiled ahead have room for, where that counts
        select_scope=scope,
        gate=gate,
        capacity_tokens=capacity,
        overflow=overflow,
        mix_epsilon=1e-5,
        cache=None if cache == CACHE.default else cache,
    )


def call_tensors(case: Any, config: HybridAttentionConfig) -> dict[str, torch.Tensor]:
    """Inputs of a call by the op's names, without data."""
    batch, tokens, _, _, _, gate, dtype, _ = case
    lead, counts = (batch, tokens), made(batch, kind=torch.int32)
    state = HybridAttentionState.empty(config, batch, dtype, "meta")
    tensors = {
        "query": made(*lead, 8, 64, kind=dtype),
        "key": made(*lead, 2, 64, kind=dtype),
        "value": made(*lead, 2, 64, kind=dtype),
        "feature_q_weight": made(8, 64, 64, kind=dtype),
        "feature_k_weight": made(8, 64, 64, kind=dtype),
        **{f"past_{name}": tensor for name, tensor in state.tensors().items()},
        "past_length": counts,
    }
    if gate == "channel":
        tensors["gate"] = torch.empty_like(tensors["query"])
    return tensors | {"new_tokens": torch.empty_like(counts)}


@pytest.mark.parametrize("case", HYBRID, ids=lambda case: "-".join(map(str, case)))
def test_hybrid_attention(case: Any, mirror: Callable[..., None]) -> None:
    _, _, capacity, scope, overflow, gate, dtype, cache = case
    config = config_of(scope, overflow, gate, capacity, cache)
    tensors = call_tensors(case, config)
    states = {n.removeprefix("past_"): t for n, t in tensors.items() if n.startswith("past_")}
    inputs = Inputs(**{field.name: tensors.get(field.name) for field in dataclasses.fields(Inputs)})

    def run(output: torch.Tensor) -> None:
        launch.launch_hybrid_attention(inputs, config, HybridAttentionState(**states), output)

    variant = dict(
        dtype=NAMES[dtype],
        head_dim=64,
        chunk_size=64,
        feature_rows=64,
        gate=int(gate == "channel"),
        select_scope=scope,
        overflow=overflow,
        cache=cache,
        count_dtype="int32",
    )
    mirror("HybridAttention", tensors, config.attributes(), variant, run=run)


ATTENTION = [
    # batch, tokens, heads, rows of the state, dtype, cache
    (1, 1, 6, 4096, torch.float16, "float"),
    (8, 1, 6, 65536, torch.bfloat16, "float"),
    (1, 1, 2, 0, torch.float32, "float"),
    (2, 10, 6, 4096, torch.float16, "float"),
    (2, 11, 6, 4096, torch.float16, "float"),
    (1, 2048, 6, 65536, torch.float32, "float"),
    (3, 200, 6, 4096, torch.float16, "float"),
    (8, 1, 6, 65536, torch.float16, "int8"),
    (3, 200, 6, 4096, torch.float32, "int8"),
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: "-".join(map(str, case)))
def test_attention(case: Any, mirror: Callable[..., None]) -> None:
    batch, tokens, heads, rows, dtype, cache = case
    sides = {"query": heads, "key": 2, "value": 2}
    tensors = {name: made(batch, tokens, n, 64, kind=dtype) for name, n in sides.items()}
    tensors |= {name: made(batch, kind=torch.int32) for name in ("past_length", "new_tokens")}
    state = AttentionState.empty(batch, 2, 64, rows, dtype, "meta", cache)
    state = dataclasses.replace(state, length=tensors["past_length"])
    tensors |= {f"past_{name}": tensor for name, tensor in state.tensors().items()}
    inputs = AttentionInputs(*(tensors.get(n) for n in ("query", "key", "value", "new_tokens")))

    def run(output: torch.Tensor) -> None:
        attention.launch_attention(inputs, state, output)

    variant = dict(dtype=NAMES[dtype], head_dim=64, cache=cache, count_dtype="int32")
    mirror("Attention", tensors, {CACHE.name: cache}, variant, run=run)


BLOCKS = [
    # batch, tokens, heads, rows of the cache, dtype
    (1, 1, 32, 262144, torch.float16),
    (3, 8, 6, 16384, torch.bfloat16),
    (2, 9, 4, 16384, torch.float32),
    (1, 5000, 32, 16384, torch.float16),
]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: "-".join(map(str, case)))
def test_select_blocks(case: tuple[int, int, int, int, torch.dtype], mirror: Callable[..., None]) -> None:
    batch, tokens, heads, rows, dtype = case
    new, past = (made(batch, kind=torch.int32) for _ in range(2))
    query, key = (made(batch, tokens, n, 128, kind=dtype) for n in (heads, 2))
    inputs = SelectInputs(query, key, new, past)
    sums = made(batch, 2, rows // 16, 128, kind=torch.float32)
    attributes = {a.name: a.default for a in SELECT_BLOCKS.attributes}
    tensors = {"query": query, "key": key, "new_tokens": new, "past_length": past, "past_key_sum": sums}
    variant = dict(dtype=NAMES[dtype], group=1 << (heads // 2 - 1).bit_length(), count_dtype="int32")
    blocks = {"blocks": made(batch, tokens, 2, 128, kind=torch.int32)}

    def run(blocks: torch.Tensor) -> None:
        select_blocks.launch_select_blocks(inputs, sums, blocks)

    mirror("SelectBlocks", tensors, attributes, variant, blocks, run)


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: "-".join(map(str, case)))
def test_block_attention(case: tuple[int, int, int, int, torch.dtype], mirror: Callable[..., None]) -> None:
    batch, tokens, heads, rows, dtype = case
    new, past = (made(batch, kind=torch.int32) for _ in range(2))
    query, key, value = (made(batch, tokens, n, 128, kind=dtype) for n in (heads, 2, 2))
    blocks = made(batch, tokens, 2, 128, kind=torch.int32)
    caches = [made(batch, 2, rows, 128, kind=dtype) for _ in "kv"]
    state = AttentionState(caches[0], caches[1], past)
    inputs = BlockInputs(query, key, value, new, blocks, 64)
    tensors = {"query": query, "key": key, "value": value, "blocks": blocks, "new_tokens": new, "past_length": past}
    tensors |= {"past_key": caches[0], "past_value": caches[1]}

    def run(output: torch.Tensor) -> None:
        block_attention.launch_block_attention(inputs, state, output)

    variant = dict(dtype=NAMES[dtype], count_dtype="int32")
    mirror("BlockAttention", tensors, {"block_size": 64}, variant, run=run)


LINEAR = [
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


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: "-".join(map(str, case)))
def test_linear_attention(case: Any, mirror: Callable[..., None]) -> None:
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
    inputs = LinearInputs(**fields, update_rule=rule, scale=0.25 if rule == "gated" else 0.0)  # type: ignore[arg-type]

    def run(output: torch.Tensor) -> None:
        linear_attention.launch_linear_attention(inputs, tensors["past_recurrent_state"], output)

    sizes = {"head_dim": 64, "value_dim": 48, "shared": shared, "per_key": int(decay > 1)}
    variant = dict(dtype=NAMES[dtype], **sizes, update_rule=rule, count_dtype="int32")
    attributes = {"update_rule": rule, "scale": inputs.scale}
    mirror("LinearAttention", tensors, attributes, variant, run=run)


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
def test_causal_conv(case: Any, mirror: Callable[..., None]) -> None:
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
    inputs = ConvInputs(**fields, activation=activation)  # type: ignore[arg-type]

    def run(output: torch.Tensor) -> None:
        causal_conv.launch_causal_conv(inputs, tensors["past_conv_state"], output)

    variant = dict(dtype=NAMES[dtype], taps=taps, activation=activation, bias=int(bias), count_dtype="int32")
    mirror("CausalConv", tensors, {"activation": activation}, variant, run=run)
