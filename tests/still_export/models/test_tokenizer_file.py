"""Tokenizers of folders that name code of their own, or still do what training did."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from still_export.errors import CheckpointError
from still_export.folders import model as model_files
from still_export.models.load import load_tokenizer
from still_export.models.read.tokenizer_file import TEXTS, write_tokenizer
from still_export.proof.verdict import Verdict
from still_export.proof.whole_package import _own_tokenizer
from tests.still_export.training import byte_tokenizer


def folder_with(tmp_path: Path, config: dict[str, Any], **tokenizer: Any) -> Path:
    """A folder of a model that transformers has no class for, with `config` in tokenizer_config.json."""
    folder = tmp_path / "model"
    byte_tokenizer(["h e", "l l", "he ll"]).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "rwkv7qwen2", "auto_map": {"AutoConfig": "configuration_rwkv7qwen2.RWKV7Qwen2Config"}}
        )
    )
    for name, values in (("tokenizer_config.json", config), ("tokenizer.json", tokenizer)):
        said = json.loads((folder / name).read_text())
        for key, value in values.items():
            said[key] = {**said[key], **value} if key == "model" else value
        (folder / name).write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("listed", [True, False], ids=["as a list", "by AutoTokenizer"])
def test_a_fast_class_of_the_folder_is_its_tokenizer_json(listed: bool, tmp_path: Path) -> None:
    classes = ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizerFast"]
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": classes if listed else {"AutoTokenizer": classes}}
    tokenizer = load_tokenizer(folder_with(tmp_path, own))
    write_tokenizer(tokenizer, tmp_path / "package", "model")
    assert "auto_map" not in json.loads((tmp_path / "package/tokenizer_config.json").read_text())
    saved, right = AutoTokenizer.from_pretrained(tmp_path / "package"), byte_tokenizer(["h e", "l l", "he ll"])
    for text in (*TEXTS, "hello<end> he"):
        assert saved(text)["input_ids"] == tokenizer(text)["input_ids"] == right(text)["input_ids"]


def test_a_slow_class_of_the_folder_is_not_run(tmp_path: Path) -> None:
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    with pytest.raises(CheckpointError, match="contains custom code"):
        load_tokenizer(folder_with(tmp_path, own))


def test_merges_are_left_out_in_training_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, {}, model={"dropout": 0.9}))
    write_tokenizer(tokenizer, tmp_path / "package", "model")
    assert not json.loads((tmp_path / "package/tokenizer.json").read_text())["model"].get("dropout")
    assert len(tokenizer("hellohellohello")["input_ids"]) == 6


def test_the_proof_reads_a_folders_tokenizer_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class of the folder's own, and with merges that are left out; not by the function that the export reads it with."""
    classes = ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizerFast"]
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": classes}}
    folder, verdict = folder_with(tmp_path, own, model={"dropout": 0.9}), Verdict()
    monkeypatch.setattr(model_files, "read_folder_tokenizer", lambda *_: pytest.fail("the export's reader"))
    found, right = _own_tokenizer(folder, verdict), byte_tokenizer(["h e", "l l", "he ll"])
    assert not verdict.not_asked
    for text in (*TEXTS, "hello<end> he"):
        assert found(text)["input_ids"] == right(text)["input_ids"]
