"""Tokens of the model's own, which the runner puts between those that it is given: landmarks behind every 12th."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.errors import UnsupportedError
from still_export.evaluation.packages import PackageModel
from still_export.loading.language_model import LanguageModel
from still_export.models.load import load_model
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from tests.still_export.linear_models import VOCAB, linear_model
from tests.still_export.verbs import call

SIZE, OWN = 12, 60
TEXT = np.random.default_rng(3).integers(3, VOCAB - 1, 61)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and packages with the last token's logits and with those of all."""
    place = tmp_path_factory.mktemp("between")
    linear_model("llama_with_landmark").save_pretrained(place / "model")
    for name, flags in {"last": (), "all": ("--all-logits",)}.items():
        assert call("export", place / "model", "-o", place / name, "--quiet", *flags) == 0
    return {name: place / name for name in ("model", "last", "all")}


def marked(tokens: list[int]) -> tuple[list[int], list[int]]:
    """By the definition: tokens with the model's own behind each 12th, and where those logits are that follow each of them."""
    found, places = list[int](), list[int]()
    for number, token in enumerate(tokens):
        found += [token] + [OWN] * ((number + 1) % SIZE == 0)
        places.append(len(found) - 1)
    return found, places


@torch.no_grad()
def logits_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[T, V], behind each token, by PyTorch's form."""
    found, places = marked(tokens)
    logits: torch.Tensor = load_model(folder)(torch.tensor([found]), use_cache=False).logits[0, places]
    return logits


def likeliest(folder: Path, prompt: list[int], count: int) -> list[int]:
    said: list[int] = []
    for _ in range(count):
        said.append(int(logits_of(folder, [*prompt, *said])[-1].argmax()))
    return said


def opened(folder: Path) -> Any:
    model = OrtModel(folder, threads=1)
    model.start()
    return model


@pytest.mark.parametrize("length", [1, 11, 12, 13, 30])
@pytest.mark.parametrize("package", ["last", "all"])
def test_prompts_and_answers(folders: dict[str, Path], package: str, length: int) -> None:
    model, prompt = opened(folders[package]), TEXT[:length].tolist()
    assert list(model.generate(prompt, 15, Sampling())) == likeliest(folders["model"], prompt, 15)
    assert int(model.length[0]) == model.feeding.length(length + 14)
    assert model.feeding.text_tokens(int(model.length[0])) == length + 14


def test_logits_of_a_text(folders: dict[str, Path]) -> None:
    """Of all tokens and of the last ones, by a package of either kind; without the model's own tokens they are others."""
    expected = logits_of(folders["model"], TEXT.tolist())
    for package, kept in (("all", 0), ("all", 20), ("last", 20)):
        model = PackageModel(OrtModel(folders[package], threads=1))
        found = model(torch.from_numpy(TEXT)[None], logits_to_keep=kept).logits[0]
        assert torch.allclose(found, expected[-kept:], atol=1e-4), (package, kept)
    bare = load_model(folders["model"])(torch.from_numpy(TEXT)[None], use_cache=False).logits[0]
    assert not torch.allclose(bare, expected, atol=1e-1)


def test_sequences_of_different_lengths(folders: dict[str, Path]) -> None:
    model = OrtModel(folders["last"], threads=1)
    model.start(2)
    rows = [TEXT[:23].tolist(), TEXT[30:40].tolist()]
    for row, tokens in enumerate(rows):
        model.feed(model.feeding.fed(np.array([tokens]))[0], first=row)
    for token in range(3, 9):
        found = model.step(np.array([token, token + 1]))
        for row, tokens in enumerate(rows):
            tokens.append(token + row)
            assert np.allclose(found[row], logits_of(folders["model"], tokens)[-1], atol=1e-4)


def test_a_kept_state_goes_on(folders: dict[str, Path]) -> None:
    """What was read and answered, and one token that was not read yet."""
    model = LanguageModel(OrtModel(folders["last"], threads=1))
    prompt, more = TEXT[:30].tolist(), TEXT[30:40].tolist()
    said = list(map(int, model.generate(prompt, max_tokens=9).text.split()))
    kept = model.snapshot()
    assert kept.unread == (said[-1],)
    model.restore(kept)
    found = list(map(int, model.generate(more, max_tokens=9).text.split()))
    assert found == likeliest(folders["model"], [*prompt, *said, *more], 9)
    again = list(map(int, model.generate([*more, *found, 7], max_tokens=3).text.split()))
    assert again == likeliest(folders["model"], [*prompt, *said, *more, *found, 7], 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--to", "genai"), "--to genai: this llama_with_landmark model needs an extra token after every 12"),
        (("--to", "web"), "--to web: this llama_with_landmark model needs an extra token"),
        (("--speculate", "3"), "--speculate: this llama_with_landmark model needs an extra token"),
    ],
)
def test_who_puts_none_there_refuses(
    folders: dict[str, Path],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a byte is written."""
    assert call("export", folders["model"], "-o", tmp_path / "out", *arguments, "--quiet") != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_package_reads_the_best_blocks(tmp_path: Path) -> None:
    """Answers are PyTorch's, which the formula holds (tests/still_export/models/test_routed_families.py); other answers with all blocks."""
    linear_model("llama_with_landmark", cache_top_k=2).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--quiet") == 0
    assert call("verify", tmp_path / "package", "--quiet") == 0
    prompt = TEXT[:55].tolist()
    said = list(opened(tmp_path / "package").generate(prompt, 9, Sampling()))
    assert said == likeliest(tmp_path / "model", prompt, 9)


def test_pytorch_and_servers_refuse(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedError, match="puts no token 60 behind every 12"):
        load_model(folders["model"]).generate(torch.tensor([[3, 4]]), max_new_tokens=2)
    text = tmp_path / "text.txt"
    text.write_text("a b c")
    assert call("evaluate", folders["model"], "--text", text) != 0
    assert "after every 12" in " ".join(capsys.readouterr().err.split())
    bad = tmp_path / "bad"
    shutil.copytree(folders["model"], bad)
    for change, message in (
        ({"cache_top_k": 0}, "cache_top_k=0"),
        (
            {"cache_top_k": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3}},
            "rope_type='linear'",
        ),
        ({"mem_freq": 0}, "mem_freq=0"),
        ({"include_landmark_in_loss": False}, "include_landmark_in_loss=false"),
    ):
        config = json.loads((folders["model"] / "config.json").read_text())
        (bad / "config.json").write_text(json.dumps(config | change))
        assert call("export", bad, "-o", tmp_path / "out", "--quiet") != 0
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
