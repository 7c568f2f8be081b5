"""MiniCPM-SALA by whole prompts, as its published code goes dense or sparse: packages, what is fed, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.models.load import load_model
from still_export.runtime.ort import OrtModel
from tests.still_export.linear_models import OWN, linear_model
from tests.still_export.own_models import COMMON
from tests.still_export.verbs import call

SPARSE = {**OWN["minicpm_sala"].sizes["sparse_config"], "dense_len": 80}
"""Where it is decided, tokens 33 to 79 have more blocks than they may choose."""
VOCAB = COMMON["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sala")
    linear_model("minicpm_sala", sparse_config=SPARSE).save_pretrained(place / "model")
    assert not call("export", place / "model", "-o", place / "package", "--whole-prompts", "--no-native", "--quiet")
    return place


def expected(prompt: int, ids: np.ndarray) -> torch.Tensor:
    """Logits of `ids` by the formulas in float64; layers go by a prompt of so many tokens, or 0: by each token's place."""
    model: Any = linear_model("minicpm_sala", sparse_config=SPARSE).double()
    model.prompt = prompt
    return model(torch.tensor(ids)[None]).logits[0]


@pytest.mark.parametrize("prompt", [90, 74])
def test_a_prompt_goes_by_its_length_and_steps_by_their_place(folder: Path, prompt: int) -> None:
    """90 tokens are sparse from the first on, 74 dense; steps of the latter cross the border. The rule by tokens is seen to differ."""
    ids = np.random.default_rng(3).integers(3, VOCAB, prompt + 9)
    model = OrtModel(folder / "package", threads=1)
    model.manifest["prefill_tokens"] = 16  # else the prompt is no longer than a piece
    model.start(1, 128)
    assert model.prefill_tokens > prompt
    found = [model.feed(ids[None, :prompt])[0, -1]]
    found += [model.feed(ids[None, t : t + 1])[0, -1] for t in range(prompt, len(ids))]
    right, by_token = (expected(p, ids)[prompt - 1 :] for p in (prompt, 0))
    scale = float(right.abs().max())
    assert float((torch.tensor(np.stack(found)) - right).abs().max()) <= 2e-5 * scale
    assert (float((by_token - right).abs().max()) > 1e-3 * scale) == (prompt == 90)


def test_pytorch_goes_by_it_too(folder: Path) -> None:
    ids = np.random.default_rng(4).integers(3, VOCAB, 90)
    model = load_model(folder / "model", deployment={"whole_prompts": True})
    with torch.no_grad():
        found = model(torch.tensor(ids)[None]).logits[0]
    right = expected(90, ids)
    assert float((found - right).abs().max()) <= 2e-5 * float(right.abs().max())


@pytest.mark.slow
def test_its_package_is_verified(folder: Path) -> None:
    assert not call("verify", folder / "package", "--quiet")


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("export", folder / "model", "-o", tmp_path / "package", "--whole-prompts", "--quiet")
    assert call(*asked, "--speculate", 2) == 2
    assert "needs a prompt in one call" in capsys.readouterr().err
    linear_model("gla").save_pretrained(tmp_path / "gla")
    assert call("export", tmp_path / "gla", "-o", tmp_path / "package", "--whole-prompts", "--quiet") == 2
    assert "no layer goes by a prompt's length (full_attention, gated_linear_attention)" in capsys.readouterr().err
