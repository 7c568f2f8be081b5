"""STILL models of every family against the plain model and against themselves."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.mixers.cache import StillCache, empty_states
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.mixers.layers import FULL, WINDOWED, Deployment
from still_export.models import FAMILIES, attach_untrained, forward_with_state
from still_export.models.build import still_family_config
from still_export.models.load import load_model
from tests.still_export.tiny import CHUNK, MIXED, family_config, padded, plain_model, random_ids, still_model
from tests.tolerances import REFERENCE

DOUBLE = REFERENCE[torch.float64]
PLAIN = {"qwen3_moe": 1e-6}
"""Where the plain model itself rounds: transformers' router computes in float32 in a model of any type."""
EXACT = dict(mix_epsilon=0.0, chunk_size=CHUNK)
families = pytest.mark.parametrize("family", FAMILIES)
layers = pytest.mark.parametrize("layer_types", [None, MIXED], ids=["hybrid", "mixed"])


@families
def test_full_selection_is_the_plain_model(family: str) -> None:
    """k = C keeps every token in softmax, so projections, norms, biases and positions must be the family's own."""
    plain = plain_model(family)
    still = attach_untrained(plain, StillConfig(salient_per_chunk=CHUNK, **EXACT))
    ids = random_ids(2, 5 * CHUNK + 3)
    assert sum(isinstance(m, StillAttention) for m in still.modules()) == (2 if family == "gemma3_text" else 3)
    with torch.no_grad():
        torch.testing.assert_close(still(ids).logits, plain(ids).logits, rtol=0, atol=PLAIN.get(family, DOUBLE))


@families
@layers
def test_untrained_attention_is_the_plain_model_within_two_chunks(
    family: str, layer_types: tuple[str, ...] | None
) -> None:
    plain = plain_model(family)
    still = attach_untrained(plain, StillConfig(salient_per_chunk=2, layer_types=layer_types, **EXACT))
    ids = random_ids(2, 2 * CHUNK + 9)
    with torch.no_grad():
        ours, base = still(ids).logits, plain(ids).logits
    torch.testing.assert_close(ours[:, : 2 * CHUNK], base[:, : 2 * CHUNK], rtol=0, atol=PLAIN.get(family, DOUBLE))
    assert (ours[:, 2 * CHUNK :] - base[:, 2 * CHUNK :]).abs().max() > 1e-4  # else the linear part is not there


@families
@layers
def test_pieces_equal_the_whole(family: str, layer_types: tuple[str, ...] | None) -> None:
    model = still_model(family, layer_types=layer_types)
    ids = random_ids(2, 60)
    pieces = ids.split([1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 2 * CHUNK, 2], dim=1)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = StillCache.empty(model.config)
        by_pieces = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)
    torch.testing.assert_close(by_pieces, whole, rtol=0, atol=DOUBLE)


@layers
def test_state_function_equals_the_model(layer_types: tuple[str, ...] | None) -> None:
    """forward_with_state: ragged pieces, capacity-sized states of constant shape, logits of each row's last token."""
    model = still_model("qwen3", layer_types=layer_types)
    rows = [random_ids(1, n, seed=n)[0] for n in (41, 17, 30)]
    pieces = [(19, 0, 8), (9, 17, 8), (13, 0, 14)]  # tokens of each row in each call; some bring none
    with torch.no_grad():
        states = empty_states(model.config, 3, torch.float64, capacity=48)
        shapes = [{n: t.shape for n, t in layer.items()} for layer in states]
        length = torch.zeros(3, dtype=torch.int64)
        for piece in pieces:
            new = torch.tensor(piece)
            part = [row[int(seen) : int(seen) + n] for row, seen, n in zip(rows, length, piece, strict=True)]
            ids, _ = padded(part, columns=max(piece) + 2)
            last, following = forward_with_state(model, ids, new, length, states)
            every, _ = forward_with_state(model, ids, new, length, states, keep=0)
            length = length + new
            states = following
            assert [{n: t.shape for n, t in layer.items()} for layer in states] == shapes
            for i, n in enumerate(piece):
                if n:
                    expected = model(rows[i][None, : int(length[i])], use_cache=False).logits[0]
                    torch.testing.assert_close(every[i, :n], expected[-n:], rtol=0, atol=DOUBLE)
                    torch.testing.assert_close(last[i, 0], expected[-1], rtol=0, atol=DOUBLE)


@families
def test_save_and_load(family: str, tmp_path: Path) -> None:
    model = still_model(family, torch.float32, layer_types=MIXED, overflow="fold_oldest", capacity_tokens=40)
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits
        for again in (AutoModelForCausalLM.from_pretrained(tmp_path), load_model(tmp_path)):
            assert type(again) is type(model)
            assert again.config.still == model.config.still
            assert [type(x.self_attn) for x in again.model.layers] == [type(x.self_attn) for x in model.model.layers]
            assert torch.equal(again(ids).logits, expected)
    assert AutoConfig.from_pretrained(tmp_path).model_type == f"still_{family}"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tied: bool, tmp_path: Path) -> None:
    plain = plain_model("llama", torch.float32, tie_word_embeddings=tied)
    model = attach_untrained(plain, StillConfig(chunk_size=CHUNK))
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert torch.equal(again.lm_head.weight, plain.lm_head.weight)
    assert (
        model.model.embed_tokens.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    )  # shared, not copied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    """k = 0: no selection that rounding could flip. Logits stay within the dtype of the same weights in float32."""
    low = still_model("qwen3", dtype, salient_per_chunk=0)
    ids = random_ids(2, 45)
    with torch.no_grad():
        got = low(ids)
        states = got.past_key_values.states()[0]
        cache = StillCache.empty(low.config)
        pieces = torch.cat([low(x, past_key_values=cache).logits for x in ids.split([30, 15], 1)], 1)
        expected = low.float()(ids).logits
    assert (
        got.logits.dtype == dtype and states["window_key"].dtype == dtype and states["kv_state"].dtype == torch.float32
    )
    scale = expected.abs().max()
    torch.testing.assert_close(got.logits.float() / scale, expected / scale, rtol=0, atol=REFERENCE[dtype])
    torch.testing.assert_close(pieces.float() / scale, expected / scale, rtol=0, atol=REFERENCE[dtype])


def test_gradients_reach_gates_and_feature_maps() -> None:
    model = still_model("llama").train()
    ids, mask = padded([random_ids(1, 43)[0], random_ids(1, 20)[0]])
    labels = torch.where(mask == 1, ids, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), name
        if "g_proj" in name or "feature_" in name:
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ("mistral", {"sliding_window": 16}, "sliding_window=16"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        ("gemma3_text", {"query_pre_attn_scalar": 12}, "scales its logits"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("llama", {"head_dim": 9}, "head_dim=9"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_uncovered_attention_is_refused(family: str, changes: dict, words: str) -> None:
    values = {**family_config(family).to_dict(), **changes}
    with pytest.raises((UnsupportedModelError, ConfigError), match=words):
        FAMILIES[family].still_model(still_family_config(FAMILIES[family], values, StillConfig()))


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_layers_with_a_window_keep_it(family: str) -> None:
    """As the plain model over more tokens than the window, at once, in pieces and one by one; with a token more or less it is another."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None}
    if family == "gemma3_text":
        window = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    plain, ids = plain_model(family, **window), random_ids(2, 61)
    still = attach_untrained(plain, StillConfig(layer_types=("full_attention",) * 3))
    kinds = [WINDOWED if kind == "sliding_attention" else FULL for kind in plain.config.layer_types]
    assert list(still.config.still.layer_types) == kinds and WINDOWED in kinds
    cache, cuts = StillCache.empty(still.config), (0, 7, 30, 31, 61)
    with torch.no_grad():
        right = plain(ids, use_cache=False).logits
        parts = [still(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in pairwise(cuts)]
        for found in (still(ids, use_cache=False).logits, torch.cat(parts, 1)):
            torch.testing.assert_close(found, right, rtol=0, atol=PLAIN.get(family, DOUBLE))
        for other in (8, 10):
            changed = plain_model(family, **{**window, "sliding_window": other})
            wrong = attach_untrained(changed, StillConfig(layer_types=("full_attention",) * 3))
            assert (wrong(ids, use_cache=False).logits - right).abs().max() > 1e-3


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
        (
            "llama",
            {"rope_parameters": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        ),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}),
        ("mistral", {"sliding_window": 100}),
    ],
    ids=["linear", "llama3", "yarn", "a window as wide as the capacity"],
)
def test_scaled_positions_and_a_wide_window(family: str, changes: dict) -> None:
    plain, room = plain_model(family, **changes), Deployment(capacity_tokens=100)
    still = attach_untrained(plain, StillConfig(salient_per_chunk=CHUNK, deployment=room, **EXACT))
    ids = random_ids(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(still(ids).logits, plain(ids).logits, rtol=0, atol=DOUBLE)


def test_attach_refuses_other_models() -> None:
    model = still_model("llama")
    with pytest.raises(ConfigError, match="already"):
        attach_untrained(model)
    plain = plain_model("llama")
    plain.config.model_type = "gemma"
    with pytest.raises(UnsupportedModelError, match=r"gemma.*llama, mistral"):
        attach_untrained(plain)
    with pytest.raises(ConfigError, match="layer_types has 2 entries"):
        attach_untrained(plain_model("llama"), StillConfig(layer_types=("full_attention",) * 2))


def test_attention_modules_with_other_parts_are_refused() -> None:
    from still_export.models.families.support import check_attention

    module = plain_model("llama").model.layers[0].self_attn
    check_attention(module, "layers.0.self_attn", 10)
    module.sinks = torch.nn.Parameter(torch.zeros(6))
    with pytest.raises(UnsupportedModelError, match="sinks"):
        check_attention(module, "layers.0.self_attn", 10)


def test_linear_layers_that_a_checkpoint_holds_as_one(tmp_path: Path) -> None:
    """Phi-3's: read from files they are those of the model in memory; of another size they are refused by name."""
    plain = plain_model("phi3", torch.float32)
    plain.save_pretrained(tmp_path)
    expected, found = attach_untrained(plain), load_model(tmp_path, attach_untrained=True)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))
    tensors = {**plain.state_dict(), "model.layers.1.mlp.gate_up_proj.weight": torch.zeros(86, 24)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.gate_up_proj.weight has 86 outputs, config.json demands 88"
    ):
        load_model(tmp_path, attach_untrained=True)


def test_the_text_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """Gemma 3's published folders; what belongs to images is left out."""
    plain = plain_model("gemma3_text", torch.float32)
    text = {**plain.config.to_dict(), "model_type": "gemma3_text"}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"language_{name.replace('model.', 'model.model.', 1)}": x for name, x in plain.state_dict().items()}
    images = {"vision_tower.a.weight": torch.zeros(2), "multi_modal_projector.b": torch.zeros(3)}
    tensors = {name: x for name, x in tensors.items() if "lm_head" not in name} | images
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found, ids = load_model(tmp_path, attach_untrained=True), random_ids(1, 2 * CHUNK)
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
