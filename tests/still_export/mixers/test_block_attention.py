"""Softmax layers that read chosen blocks, without training: against softmax, against the formulas, in pieces, as a package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.cache import StillCache
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL, SELECTED
from still_export.mixers.registry import mixer_of
from still_export.models import attach_untrained
from still_export.models.load import load_model
from tests.still_export.tiny import behind_padding, plain_model, random_ids
from tests.still_export.verbs import call
from tests.still_kernels.block_attention.inputs import Layer, attended, chosen

SMALL: dict[str, Any] = dict(
    block_size=8, mean_stride=2, mean_length=4, top_blocks=5, init_blocks=1, local_blocks=2, dense_length=24
)


def selected(family: str = "qwen3", **changes: Any) -> tuple[Any, Any]:
    """A random model in float64, and the same whose first and last layers read chosen blocks."""
    plain = plain_model(family, torch.float64)
    layers = plain.config.num_hidden_layers
    types = tuple(SELECTED if i in (0, layers - 1) else FULL for i in range(layers))
    return plain, attach_untrained(plain, StillConfig(layer_types=types, **{**SMALL, **changes}))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_all_blocks_are_softmax(family: str) -> None:
    plain, ours = selected(family, top_blocks=40)
    ids = random_ids(2, 150)
    expected = plain(ids, use_cache=False).logits
    cache = StillCache.empty(ours.config)
    found = torch.cat([ours(piece, past_key_values=cache).logits for piece in ids.split([70, 1, 79], dim=1)], dim=1)
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()
    fewer = selected(family)[1](ids, use_cache=False).logits
    assert (fewer - expected).abs().max() > 1e-3 * expected.abs().max()  # five blocks of 19 are another model


@torch.no_grad()
def test_layers_are_their_formula_in_any_split() -> None:
    _, ours = selected()
    module, heads = ours.model.layers[0].self_attn, ours.config
    hidden = torch.randn(1, 130, heads.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    turn = ours.model.rotary_emb(hidden, torch.arange(130)[None])
    query, key, value = (x[0] for x in module.project_heads(hidden, turn))
    choice = {name: n for name, n in heads.still.block_choice().items() if name != "block_slots"}
    layer = Layer(heads.num_attention_heads, heads.num_key_value_heads, module.head_dim, choice=choice)
    expected = module.o_proj(attended(layer, query, key, value, chosen(layer, query, key)[0]).flatten(1))
    assert (module(hidden, turn)[0][0] - expected).abs().max() <= 1e-9


@torch.no_grad()
def test_pieces_steps_and_padding() -> None:
    _, ours = selected()
    ids = random_ids(2, 60)
    expected = ours(ids, use_cache=False).logits
    cache = StillCache.empty(ours.config)
    steps = torch.cat([ours(piece, past_key_values=cache).logits for piece in ids.split(1, dim=1)], dim=1)
    assert (steps - expected).abs().max() <= 1e-9
    for found, right in behind_padding(ours, ids, expected, (57, 33)):
        assert (found - right).abs().max() <= 1e-9


@pytest.mark.long
def test_a_model_is_stored_exported_and_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, ours = selected()
    ours.float().save_pretrained(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config.still == ours.config.still
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--quiet") == 0
    given = ("--lengths", "1,100", "--decode-steps", "4", "--quiet")
    assert call("verify", tmp_path / "package", *given) == 0, capsys.readouterr().out


def test_what_is_not_covered() -> None:
    with pytest.raises(ConfigError, match="block_size=9 must be a multiple of mean_stride=2"):
        selected(block_size=9)
    with pytest.raises(ConfigError, match="--cache int8: layer 0 reads chosen blocks"):
        attach_untrained(plain_model("llama"), StillConfig.from_dict({"layer_types": [SELECTED] * 3, "cache": "int8"}))
    config = selected()[1].config
    with pytest.raises(UnsupportedModelError, match="selected_blocks are not served"):
        mixer_of(config, 0).paged(config, 0, 1, 0)


@pytest.mark.long
def test_near_ties_of_blocks_are_no_faults_and_faults_no_near_ties(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float16 some tokens read other blocks than in float32, where their scores nearly tie; a channel of queries that is 5% larger
    makes some read others that do not tie."""
    _, ours = selected(top_blocks=6)
    ours.float().save_pretrained(tmp_path / "model")
    package, given = (
        tmp_path / "package",
        ("--lengths", "1,240,250,251,252,253,254,255,256", "--decode-steps", "24", "--quiet"),
    )
    assert call("export", tmp_path / "model", "-o", package, "--dtype", "float16", "--quiet") == 0
    assert call("verify", package, *given) == 0, capsys.readouterr().out
    found = json.loads((package / "verify/report.json").read_text())["selections"]
    assert found["compared"] > 1000 and found["near_ties"] > 0 == found["wrong"]
    with torch.no_grad():
        ours.model.layers[0].self_attn.q_norm.weight[0] *= 1.05
    ours.save_pretrained(tmp_path / "other")
    assert call("verify", package, "--model", tmp_path / "other", *given) == 1
    found = json.loads((package / "verify/report.json").read_text())["selections"]
    assert found["wrong"] > 0
