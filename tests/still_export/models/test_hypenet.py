"""HypeNet against its formulas in float64: whole, in pieces, steps, ragged rows; as packages; what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.mixers.cache import StillCache
from still_export.models.load import load_model
from still_export.package.folder import open_package
from tests.still_export.hype_models import FORMS, HypeModel
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, PIECES, STATES, far, ids, pieces
from tests.still_export.proof.plants import with_weights
from tests.still_export.tiny import padded
from tests.still_export.verbs import call


@cache
@torch.no_grad()
def calm(form: str) -> tuple[int, torch.Tensor, Any]:
    """Seed of the first model whose own float32 is near its float64, and the logits and states of the latter."""
    for seed in range(16):
        found = linear_model("hypenet", seed=seed, **FORMS[form])(ids()).logits
        expected = linear_model("hypenet", seed=seed, **FORMS[form]).double()(ids())
        if far(found, expected.logits) <= LOGITS / 3:
            return seed, expected.logits, expected.past_key_values
    raise AssertionError(f"{form}: its own float32 loses too much of 16 random models")


def model_of(form: str, **changes: Any) -> HypeModel:
    model: HypeModel = linear_model("hypenet", seed=calm(form)[0], **{**FORMS[form], **changes})
    return model


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, tmp_path: Path) -> None:
    model_of(form).save_pretrained(tmp_path)
    ours, (_, expected, seen) = load_model(tmp_path), calm(form)
    assert far(ours(ids(), use_cache=False).logits, expected) <= LOGITS
    for sizes in (PIECES, [1, 2, 3, 2, 1, 127]):
        logits, cache = pieces(ours, ids(), sizes)
        assert far(logits, expected) <= LOGITS, sizes
        for index, states in enumerate(cache.states()):
            if "recurrent_state" in states:
                assert far(states["recurrent_state"], seen.get_recurrent_state(index)) <= STATES
    tokens, expected = ids()[:, :24], expected[:, :24]
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
def test_half_precision_errs_as_the_formulas_do(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = model_of("places")
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
    "name, value",
    [
        *((part, None) for part in ("o_gate.weight", "z_proj.weight", "o_norm.weight", "1.self_attn.q_norm.weight")),
        ("attn_logits_scaling", "hype 3"),
        ("attn_logits_scaling", 0.5),
        ("attn_use_rope", True),
        ("lightning_use_rope", False),
        ("lightning_scale", "1/d"),
        ("rope_theta", 1e5),
    ],
)
def test_every_part_counts(name: str, value: Any, tmp_path: Path) -> None:
    """Where a tensor is zero, or config.json says otherwise, logits are others."""
    model, expected = model_of("published"), calm("published")[1]
    model.config["lightning_use_output_norm"] = True
    model.tensors = {key: x * (0 if key.endswith(f".{name}") else 1) for key, x in model.tensors.items()}
    if value is not None:
        model.config[name] = value
        if name == "lightning_scale":  # which a norm undoes
            model.config["lightning_use_output_norm"] = False
            model.tensors = {key: x for key, x in model.tensors.items() if "o_norm" not in key}
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids(), use_cache=False).logits, expected) > 100 * LOGITS


def test_what_is_said_of_a_folder(tmp_path: Path) -> None:
    model_of("published").save_pretrained(tmp_path)
    check_model(tmp_path)
    assert describe_folder(tmp_path)["model"].startswith("hypenet, 3 layers")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"mixer_types": ["attn", "kda", "attn"]},
            UnsupportedModelError,
            "mixer_types='kda' .* a hypenet model; covered",
        ),
        ({"lightning_use_short_conv": True}, UnsupportedModelError, "lightning_use_short_conv=True"),
        ({"lightning_head_dim": 12}, UnsupportedModelError, "lightning_head_dim=12 .* 10"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        ({"attn_logits_scaling": "hype 1"}, ConfigError, "attn_logits_scaling='hype 1' .* at least 2"),
        ({"lightning_nkv": 4}, ConfigError, "lightning_nh=6 .* no multiple of lightning_nkv=4"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope_type='dynamic'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = model_of("published")
    model.config |= changes
    model.save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "form, dtype",
    [
        pytest.param("places", "float32", marks=pytest.mark.slow),
        *(pytest.param(form, "float32", marks=pytest.mark.long) for form in FORMS if form != "places"),
        pytest.param("places", "float16", marks=pytest.mark.long),
    ],
)
def test_a_folder_becomes_a_proven_package(
    form: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of(form).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--dtype", dtype, "--quiet") == 0
    sizes = ("--lengths", "1,130", "--decode-steps", "8", "--quiet")
    assert call("verify", tmp_path / "package", *sizes) == 0, capsys.readouterr().out
    if (form, dtype) != ("places", "float32"):
        return

    def planted(weights: dict[str, Any]) -> None:
        name = next(n for n in weights if n.endswith("layers.1.self_attn.q_norm.weight"))
        weights[name][:2] += 0.5

    with_weights(open_package(tmp_path / "package"), tmp_path / "planted", planted)
    assert call("verify", tmp_path / "planted", *sizes) == 1
