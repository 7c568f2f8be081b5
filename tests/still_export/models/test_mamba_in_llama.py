"""Mamba-in-Llama against its formulas in float64: whole, in pieces, steps, ragged rows; as packages; what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import CheckpointError, ConfigError, StillExportError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.mixers.cache import StillCache
from still_export.models.load import load_model
from still_export.package.folder import open_package
from still_export.sources import demand_model
from tests.still_export.in_llama_models import FORMS, InLlamaModel
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, PIECES, STATES, far, ids, pieces
from tests.still_export.proof.plants import with_weights
from tests.still_export.tiny import padded
from tests.still_export.verbs import call


@cache
@torch.no_grad()
def calm(form: str) -> tuple[int, torch.Tensor, Any]:
    """Seed of the first model whose own float32 is near its float64, and the logits and states of the latter."""
    family, changes = FORMS[form]
    for seed in range(16):
        found = linear_model(family, seed=seed, **changes)(ids()).logits
        expected = linear_model(family, seed=seed, **changes).double()(ids())
        if far(found, expected.logits) <= LOGITS / 3:
            return seed, expected.logits, expected.past_key_values
    raise AssertionError(f"{form}: its own float32 loses too much of 16 random models")


def model_of(form: str, **changes: Any) -> InLlamaModel:
    family, own = FORMS[form]
    model: InLlamaModel = linear_model(family, seed=calm(form)[0], **{**own, **changes})
    return model


@torch.no_grad()
@pytest.mark.parametrize("one", [False, True], ids=["two files", "one file"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, one: bool, tmp_path: Path) -> None:
    model_of(form, one=one).save_pretrained(tmp_path)
    ours, (_, expected, seen) = load_model(tmp_path), calm(form)
    assert far(ours(ids(), use_cache=False).logits, expected) <= LOGITS
    if one:  # its projections are taken apart
        return
    for sizes in (PIECES, [1, 2, 3, 2, 1, 127]):
        logits, cache = pieces(ours, ids(), sizes)
        assert far(logits, expected) <= LOGITS, sizes
        for index, states in enumerate(cache.states()):
            if "recurrent_state" in states:
                assert far(states["recurrent_state"], seen.get_recurrent_state(index)) <= STATES
                assert far(states["conv_state"], seen.get_conv_state(index)) <= STATES
    tokens = ids()[:, :24]
    expected = expected[:, :24]
    assert far(pieces(ours, tokens, [1] * 24)[0], expected) <= LOGITS
    rows, mask = padded([tokens[0, :17], tokens[1, :9]])
    rows[mask == 0] = 50  # what stands in the padding enters nothing
    left = StillCache.empty(ours.config)
    ours(rows, attention_mask=mask, past_key_values=left)
    logits = ours(torch.stack([tokens[0, 17:20], tokens[1, 9:12]]), past_key_values=left).logits
    for row, place in enumerate((17, 9)):
        assert far(logits[row], expected[row, place : place + 3]) <= LOGITS
    ours.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["mamba", "mamba2"])
def test_half_precision_errs_as_the_formulas_do(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = model_of(form)
    theirs.tensors = half = {name: x.to(dtype) for name, x in theirs.tensors.items()}
    theirs.save_pretrained(tmp_path)
    found = load_model(tmp_path, dtype=dtype)
    expected = theirs.double()(ids()).logits
    theirs.tensors = half
    narrow = theirs(ids()).logits
    assert narrow is not None and expected is not None
    own = (narrow.double() - expected).norm()
    assert (found(ids(), use_cache=False).logits.double() - expected).norm() <= 1.5 * own


@torch.no_grad()
@pytest.mark.parametrize(
    "form, part",
    [
        *(("mamba", part) for part in ("dt_proj.bias", "dt_proj_down.weight", "B_proj.weight", "D", "q_proj.weight")),
        *(("mamba2", part) for part in ("dt_bias", "conv1d.bias", "A_log", "D", "in_proj.weight", "k_proj.weight")),
    ],
)
def test_every_part_counts(form: str, part: str, tmp_path: Path) -> None:
    model, expected = model_of(form), calm(form)[1]
    model.tensors = {name: x * (0 if name.endswith(f".{part}") else 1) for name, x in model.tensors.items()}
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids(), use_cache=False).logits, expected) > 100 * LOGITS


@pytest.mark.parametrize("one", [False, True], ids=["two files", "one file"])
def test_what_is_said_of_a_folder(one: bool, tmp_path: Path) -> None:
    model_of("mamba2", one=one).save_pretrained(tmp_path)
    check_model(tmp_path)
    said = describe_folder(tmp_path)
    assert said["model"].startswith("mambainllama_mamba2, 3 layers (2 linear, 1 full)")
    assert demand_model(str(tmp_path), "export").model_type.startswith("mambainllama")
    with pytest.raises(UnsupportedModelError, match=r"is a mambainllama\w* model, and linearize takes softmax models"):
        demand_model(str(tmp_path), "linearize")


BAD: list[tuple[str, dict[str, Any], type[StillExportError], str]] = [
    (
        "mamba2",
        {"ssm_cfg": {"ngroups": 4, "d_state": 6, "dt_limit": [0.1, 1]}},
        UnsupportedModelError,
        "has dt_limit; read",
    ),
    (
        "mamba2",
        {"ssm_cfg": {"ngroups": 4, "d_state": 6, "rmsnorm": False}},
        UnsupportedModelError,
        "rmsnorm=False .* True",
    ),
    ("mamba2", {"ssm_cfg": {"ngroups": 3, "d_state": 6}}, ConfigError, "d_inner=24, d_xb=12, .* ngroups=3"),
    ("mamba", {"d_xb": 13}, ConfigError, "d_xb=13"),
    ("mamba", {"ssm_cfg": {"d_state": 3, "proj_z_bias": True}}, UnsupportedModelError, "proj_z_bias=True"),
    ("mamba", {"attn_layers": [3]}, CheckpointError, r"softmax layers \[3\] .* none of its 3"),
    ("mamba", {"n_layer": 2}, UnsupportedModelError, "n_layer=2"),
    (
        "mamba",
        {"rms_norm_eps": 1e-5},
        CheckpointError,
        "rms_norm_eps is 1e-06 in config.json of .* and 1e-05 in mamba_config",
    ),
]


@pytest.mark.parametrize("form, changes, error, message", BAD)
def test_what_is_not_read_is_refused_by_name(
    form: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model_of(form).save_pretrained(tmp_path)
    path = tmp_path / "mamba_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"model_type": "gemma2"},
            UnsupportedModelError,
            "it has mamba_config.json, beside a gemma2 model; covered: llama, mistral",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64},
            UnsupportedModelError,
            "sliding_window=64 .* without a window",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope_type='dynamic'"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
    ],
)
def test_bases_that_are_not_read_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = model_of("mamba")
    model.config |= changes
    model.save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@torch.no_grad()
def test_sizes_that_one_file_leaves_out_are_those_of_the_attention(tmp_path: Path) -> None:
    """transformers writes no values that are the configuration's defaults."""
    model = model_of("mamba", one=True)
    model.config = {name: value for name, value in model.config.items() if name not in ("d_inner", "d_xb", "d_model")}
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids()).logits, calm("mamba")[1]) <= LOGITS


@torch.no_grad()
def test_a_mistral_and_scaled_positions_are_read(tmp_path: Path) -> None:
    """Llama 3.1's table changes the angles of the softmax layers."""
    model = model_of("mamba")
    model.config |= {"model_type": "mistral", "sliding_window": None}
    model.save_pretrained(tmp_path / "a")
    assert far(load_model(tmp_path / "a")(ids()).logits, calm("mamba")[1]) <= LOGITS
    table = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model.config["rope_scaling"] = {"rope_type": "llama3", **table}
    model.save_pretrained(tmp_path / "b")
    assert far(load_model(tmp_path / "b")(ids()).logits, calm("mamba")[1]) > 100 * LOGITS


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if form in ("mamba", "mamba2") else pytest.mark.long)
        for form in FORMS
        if form != "mamba, alone"
    ],
)
def test_a_folder_becomes_a_proven_package(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of(form).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--quiet") == 0
    sizes = ("--lengths", "1,130", "--decode-steps", "8", "--quiet")
    assert call("verify", tmp_path / "package", *sizes) == 0, capsys.readouterr().out

    def planted(weights: dict[str, Any]) -> None:
        name = next(n for n in weights if n.endswith(("layers.2.mamba.dt_bias", "layers.2.mamba.dt_proj.bias")))
        weights[name][..., :2] += 0.5

    with_weights(open_package(tmp_path / "package"), tmp_path / "planted", planted)
    assert call("verify", tmp_path / "planted", *sizes) == 1


@pytest.mark.long
@pytest.mark.parametrize("form", ["mamba", "mamba2"])
def test_a_package_in_half_precision(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of(form).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--dtype", "float16", "--quiet") == 0
    sizes = ("--lengths", "1,65", "--decode-steps", "4", "--quiet")
    assert call("verify", tmp_path / "package", *sizes) == 0, capsys.readouterr().out
