"""The properties of still-attention.md, section 5, of the reference and the stateful form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from still_graphs.errors import CapacityError, ConfigError, ShapeError
from still_kernels.hybrid_attention.config import CHOICES, HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from tests.still_kernels.hybrid_attention.definition import hybrid_definition
from tests.tolerances import GOLDEN, REFERENCE

DOUBLE = torch.float64
BASE = dict(
    num_heads=6, num_kv_heads=3, head_dim=10, chunk_size=8, salient_per_chunk=3, feature_dim=7, capacity_tokens=200
)
VARIANTS = [
    {},
    dict(select_scope="kv_group_max"),
    dict(select_scope="kv_group_mean"),
    dict(saliency="released_prefill"),
    dict(profile="released"),
    dict(gate="none"),
    dict(local="sliding"),
    dict(local="sliding", salient_per_chunk=0, window_size=5),
    dict(salient_per_chunk=0),
    dict(window_factor=(0.1, 0.4, 0.9, 1.0, 1.7, 3.0)),
    dict(mix_epsilon=1e-2),
    *[dict(feature_map=name) for name in CHOICES["feature_map"] if name != "identity"],
    *[
        dict(overflow="fold_oldest", capacity_tokens=tokens, select_scope=scope, local=local)
        for tokens, scope, local in (
            (41, "q_head", "chunked"),
            (30, "kv_group_max", "chunked"),
            (41, "q_head", "sliding"),
        )
    ],
    dict(overflow="fold_oldest", capacity_tokens=9),
]


def make_config(**changes: object) -> HybridAttentionConfig:
    return HybridAttentionConfig(**{**BASE, **changes})


def make_inputs(
    config: HybridAttentionConfig, batch: int, tokens: int, dtype: torch.dtype = DOUBLE, seed: int = 0
) -> list:
    """query, key, value, gate and the two feature weights, random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = (batch, tokens, config.num_heads, config.head_dim)
    narrow = (batch, tokens, config.num_kv_heads, config.head_dim)
    weight = (config.num_heads, config.projection_dim, config.head_dim)
    gate = draw(*wide).sigmoid() if config.gate == "channel" else None
    return [draw(*wide), draw(*narrow), draw(*narrow), gate, draw(*weight), draw(*weight)]


def run_in_pieces(
    config: HybridAttentionConfig, inputs: list, pieces: list[int]
) -> tuple[Tensor, HybridAttentionState]:
    """Feed the sequence in calls of the given lengths, repeated until it ends."""
    *activations, q_weight, k_weight = inputs
    batch, tokens = inputs[0].shape[:2]
    state = HybridAttentionState.empty(config, batch, dtype=inputs[0].dtype)
    outputs, start = [], 0
    while start < tokens:
        stop = min(tokens, start + pieces[len(outputs) % len(pieces)])
        part = [None if x is None else x[:, start:stop] for x in activations]
        output, state = chunked_hybrid_attention(Inputs(*part, q_weight, k_weight), config, state)
        outputs.append(output)
        start = stop
    return torch.cat(outputs, dim=1), state


def assert_same_state(a: HybridAttentionState, b: HybridAttentionState, tolerance: float = 1e-10) -> None:
    for name, tensor in a.tensors().items():
        torch.testing.assert_close(
            tensor, b.tensors()[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ["released_a", "released_b"])
def test_reproduces_released_prefill(name: str) -> None:
    path = Path(__file__).parents[2] / "golden" / f"{name}.npz"
    golden = {key: torch.from_numpy(value) for key, value in np.load(path).items()}
    query, key, value = (golden[n].transpose(1, 2) for n in ("query", "key", "value"))
    gate = torch.sigmoid(golden["gate_logits"]).transpose(1, 2)
    weights = []
    for side in ("q", "k"):
        u = golden[f"feature_{side}_householder"]
        u = u / u.norm(dim=-1, keepdim=True)
        reflection = torch.eye(u.shape[-1], dtype=DOUBLE) - 2 * u[:, :, None] * u[:, None, :]
        weights.append(golden[f"feature_{side}_weight"] @ reflection)
    config = HybridAttentionConfig(query.shape[2], key.shape[2], query.shape[3], profile="released")
    expected = golden["output"].transpose(1, 2)
    inputs = [query, key, value, gate, *weights]
    assert (hybrid_definition(Inputs(*inputs), config) - expected).abs().max() < GOLDEN
    for pieces in ([1000], [65, 1, 127]):
        assert (run_in_pieces(config, inputs, pieces)[0] - expected).abs().max() < GOLDEN


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_state_machine_equals_definition(changes: dict) -> None:
    config = make_config(**changes)
    inputs = make_inputs(config, 2, 75)
    expected = hybrid_definition(Inputs(*inputs), config)
    for pieces in ([75], [1], [7], [8], [9], [17], [17, 1, 8, 3]):  # 1, C-1, C, C+1, 2C+1
        output, _ = run_in_pieces(config, inputs, pieces)
        assert (output - expected).abs().max() < REFERENCE[DOUBLE], pieces


@settings(max_examples=40, deadline=None)
@given(
    changes=st.sampled_from(VARIANTS),
    pieces=st.lists(st.integers(1, 26), min_size=1, max_size=4),
    tokens=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_any_split_gives_the_same_state(changes: dict, pieces: list[int], tokens: int, seed: int) -> None:
    config = make_config(**changes)
    inputs = make_inputs(config, 1, tokens, seed=seed)
    whole, state = run_in_pieces(config, inputs, [tokens])
    parts, split_state = run_in_pieces(config, inputs, pieces)
    assert (whole - parts).abs().max() < REFERENCE[DOUBLE]
    assert_same_state(state, split_state)


def test_segments_of_long_calls_join() -> None:
    config = make_config(capacity_tokens=3000)
    inputs = make_inputs(config, 1, 2600)
    whole, state = run_in_pieces(config, inputs, [2600])  # cut inside
    parts, split_state = run_in_pieces(config, inputs, [700, 501])
    assert (whole - parts).abs().max() < REFERENCE[DOUBLE]
    assert_same_state(state, split_state)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_rows_are_independent_and_may_be_empty(changes: dict) -> None:
    """Ragged calls, rows at different phases, NaN in the padding: each row as if alone."""
    config = make_config(**changes)
    lengths = [[13, 0, 1, 22], [1, 9, 0, 3], [0, 30, 1, 8], [17, 2, 1, 0], [1, 1, 0, 1]]
    totals = [sum(call[row] for call in lengths) for row in range(4)]
    inputs = make_inputs(config, 4, max(totals))
    *activations, q_weight, k_weight = inputs
    state = HybridAttentionState.empty(config, 4, dtype=DOUBLE)
    done = [0] * 4
    outputs: list[list[Tensor]] = [[] for _ in range(4)]
    for call in lengths:
        padded = []
        for x in activations:
            if x is None:
                padded.append(None)
                continue
            block = torch.full((4, max(call), *x.shape[2:]), torch.nan, dtype=DOUBLE)
            for row in range(4):
                block[row, : call[row]] = x[row, done[row] : done[row] + call[row]]
            padded.append(block)
        before = state
        output, state = chunked_hybrid_attention(Inputs(*padded, q_weight, k_weight, torch.tensor(call)), config, state)
        for row in range(4):
            outputs[row].append(output[row, : call[row]])
            assert (output[row, call[row] :] == 0).all()
            done[row] += call[row]
            if call[row] == 0:
                for name, tensor in state.tensors().items():
                    assert torch.equal(tensor[row], before.tensors()[name][row]), name
    for row in range(4):
        alone = [None if x is None else x[row : row + 1, : totals[row]] for x in activations]
        expected, alone_state = run_in_pieces(config, [*alone, q_weight, k_weight], [totals[row]])
        assert (torch.cat(outputs[row])[None] - expected).abs().max() < REFERENCE[DOUBLE]
        for name, tensor in alone_state.tensors().items():
            torch.testing.assert_close(state.tensors()[name][row : row + 1], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_without_selection(dtype: torch.dtype) -> None:
    """k = 0, so that no near tie can flip a selection: dtypes differ by rounding alone."""
    config = make_config(salient_per_chunk=0)
    inputs = [None if x is None else x.to(dtype) for x in make_inputs(config, 2, 75)]
    exact = hybrid_definition(Inputs(*[None if x is None else x.to(DOUBLE) for x in inputs]), config)
    output, state = run_in_pieces(config, inputs, [20])
    assert output.dtype == dtype and state.kv_state.dtype == torch.float32
    assert (output.to(DOUBLE) - exact).abs().max() < REFERENCE[dtype]


@pytest.mark.long
@pytest.mark.slow
def test_no_drift_over_65536_steps() -> None:
    """float32 state, token by token at the end, against the definition evaluated in float64 for the last rows."""
    config = HybridAttentionConfig(1, 1, 8, chunk_size=16, salient_per_chunk=0, capacity_tokens=1 << 20)
    tokens = 65_536
    inputs = make_inputs(config, 1, tokens, torch.float32)
    _, state = run_in_pieces(config, inputs, [1])
    exact = [None if x is None else x.to(DOUBLE) for x in inputs]
    _, expected = run_in_pieces(config, exact, [tokens])
    error = (state.kv_state - expected.kv_state).norm() / expected.kv_state.norm()
    assert error < 1e-5, error
    assert abs(float(state.z_state.sum()) / 2 - (tokens - 32)) < 1e-2


def test_capacity_is_exact() -> None:
    config = make_config(capacity_tokens=40)  # 3 promoted chunks
    inputs = make_inputs(config, 1, 41)
    run_in_pieces(config, [None if x is None else (x[:, :40] if x.dim() == 4 else x) for x in inputs], [9])
    with pytest.raises(CapacityError, match="capacity_tokens=40"):
        run_in_pieces(config, inputs, [9])


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(num_heads=5), "not a multiple"),
        (dict(salient_per_chunk=9), "outside 0..chunk_size"),
        (dict(feature_map="np_softmax"), "Did you mean 'np_softmax_pm'"),
        (dict(local="sliding", window_size=5), "salient tokens need"),
        (dict(window_size=5), "no meaning"),
        (dict(window_factor=(1.0,)), "1 values for num_heads=6"),
        (dict(chunk_size=0), "at least 1"),
        (dict(feature_dim=-1), "feature_dim=-1; it must be at least 1"),
        (dict(overflow="fold_min_score"), "overflow='fold_min_score'.*fold_oldest"),
    ],
    ids=str,
)
def test_bad_config(changes: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_config(**changes)


def test_spellings_of_the_specification() -> None:
    assert make_config(local="sliding(5)", salient_per_chunk=0) == make_config(
        local="sliding", window_size=5, salient_per_chunk=0
    )
    factors = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    assert make_config(window_factor=factors).window_factor == (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


def test_a_cache_that_folds_has_room_for_whole_chunks() -> None:
    config = make_config(overflow="fold_oldest", capacity_tokens=41)
    with pytest.raises(ShapeError, match=r"4 salient slots .* multiple of salient_per_chunk=3"):
        HybridAttentionState.empty(config, 1, DOUBLE, slots=4).check(config, 1)


def test_bad_shapes() -> None:
    config = make_config()
    query, key, value, gate, q_weight, k_weight = make_inputs(config, 2, 5)
    state = HybridAttentionState.empty(config, 2, DOUBLE)
    wrong_state = dataclasses.replace(state, z_state=state.z_state[..., :3])
    for arguments in (
        (Inputs(query, key[:, :4], value, gate, q_weight, k_weight), config, state),
        (Inputs(query, key, value, None, q_weight, k_weight), config, state),
        (Inputs(query, key, value, gate, q_weight[:2], k_weight), config, state),
        (Inputs(query, key, value, gate, q_weight, k_weight), config, wrong_state),
        (Inputs(query, key, value, gate, q_weight, k_weight, torch.tensor([6, 1])), config, state),
        (Inputs(query, key, value, gate, q_weight, k_weight, torch.tensor([1])), config, state),
    ):
        with pytest.raises(ShapeError, match="expected"):
            chunked_hybrid_attention(*arguments)
