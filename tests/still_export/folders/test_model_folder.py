"""A model's files are opened once by an export, by whichever of its parts reads them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import save_file

import still_export
from still_export.errors import CheckpointError
from still_export.folders.files import Files
from still_export.folders.model import ModelFolder
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.tiny import plain_model
from tests.still_export.training import byte_tokenizer
from tests.still_export.verbs import call

OURS, STANDARD = str(Path(still_export.__file__).parent), sysconfig.get_paths()["stdlib"]
_counted: dict[Path, Counter[str]] = {}
_hooked = False


def _by_us(frame: FrameType | None) -> bool:
    """Whether the nearest caller outside the standard library is this project; transformers opens its files itself."""
    while frame is not None:
        name = frame.f_code.co_filename
        standard = name.startswith((STANDARD, "<")) and "site-packages" not in name
        if not standard:
            return name.startswith(OURS)
        frame = frame.f_back
    return False


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _counted and isinstance(arguments[0], (str, os.PathLike)):
        path = Path(os.path.abspath(arguments[0]))
        for folder, opened in _counted.items():
            if path.is_relative_to(folder) and _by_us(sys._getframe(1)):
                opened[str(path.relative_to(folder))] += 1


@pytest.fixture
def opened(tmp_path: Path) -> Counter[str]:
    """Opens by this project of files below tmp_path / "in", by name."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_count)  # cannot be removed
        _hooked = True
    _counted.clear()
    return _counted.setdefault(tmp_path / "in", Counter())


def shards(folder: Path) -> list[str]:
    """A model in two files, with an adapter."""
    plain_model("llama", torch.float32).save_pretrained(folder / "base", max_shard_size="60KB")
    byte_tokenizer().save_pretrained(folder / "base")
    (folder / "adapter").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    pair = {name.format("A"): torch.ones(2, 24), name.format("B"): torch.ones(60, 2)}
    save_file(pair, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 16}')
    return [str(folder / "base"), "--overlay", str(folder / "adapter"), "--attach-untrained"]


def gguf(folder: Path) -> list[str]:
    folder.mkdir()
    write_gguf(folder / "m.gguf", plain_model("llama", torch.float32))
    return [str(folder / "m.gguf"), "--attach-untrained"]


MOST = {"m.gguf": 2}
"""The header is read before the gguf package and PyTorch are imported, and by the package."""


@pytest.mark.parametrize("make", [shards, gguf])
def test_an_export_opens_each_file_once(
    make: Callable[[Path], list[str]], tmp_path: Path, opened: Counter[str]
) -> None:
    words = make(tmp_path / "in")
    opened.clear()
    assert call("export", *words, "--to", "ort-cpu", "--no-native", "-o", tmp_path / "out", "--quiet") == 0
    _counted.clear()
    assert {name: count for name, count in opened.items() if count > MOST.get(name, 1)} == {}
    read = {str(path.relative_to(tmp_path / "in")) for path in (tmp_path / "in").rglob("*") if path.is_file()}
    assert set(opened) == {name for name in read if not name.startswith("m.folder")}


def test_what_is_open_is_not_opened_again(tmp_path: Path, opened: Counter[str]) -> None:
    shards(tmp_path / "in")
    folder = ModelFolder.open(tmp_path / "in" / "base")
    shutil.copytree(tmp_path / "in" / "base", tmp_path / "other")
    opened.clear()
    for _ in range(3):
        assert ModelFolder.open(folder) is folder
        assert folder.tokenizer.encode("a")
        assert folder.config["model_type"] == "llama"
        assert len(folder.weights) > 1
    assert opened["base/config.json"] == opened["base/tokenizer_config.json"] == 1
    assert opened["base/model.safetensors.index.json"] == 1


@pytest.mark.parametrize("cut", [1, -1])
def test_a_header_of_another_size_than_its_file(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3, 5)}, path)
    content = path.read_bytes()
    assert Files(tmp_path).header(path)["a"]["shape"] == [3, 5]
    path.write_bytes(content[:-1] if cut > 0 else content + b"\0")
    with pytest.raises(CheckpointError, match="60 bytes"):
        Files(tmp_path).header(path)
