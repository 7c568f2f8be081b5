"""What lies where a file of a model should be, and what trainers leave: said in a sentence by whichever reader meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from still_export.errors import CheckpointError, StillExportError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import ModelFolder, check_model, check_overlay
from still_export.folders.sources import look
from still_export.models.load import load_tokenizer, open_source
from still_export.models.read.convert import plain_names
from still_export.models.read.unpickle import main as unpickle
from still_export.package.files import stand_in
from tests.still_export.linear_models import linear_model
from tests.still_export.training import byte_tokenizer

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 988097824\n"
PAGES = {
    "lfs": POINTER,
    "xet": "# xet version 0\nfilesize = 3\nhash = 'a'\n",
    "annex": "../../.git/annex/objects/a/b/SHA256E-s1--0.safetensors\n",
    "html": "<!DOCTYPE html>\n<html><title>Sign in</title></html>",
    "html without a type": "\n\n  <html lang='en'><body>404</body></html>",
    "a byte order mark": "\ufeff<!doctype HTML>\n<p>",
    "xml": "<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "json error": '{"error": "Repository not found"}',
    "text error": "Entry not found",
}
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "m"
    linear_model("lfm2", tie_word_embeddings=True).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def read(folder: Path) -> None:
    look(folder)
    check_model(folder)
    open_source(folder)
    load_tokenizer(folder)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_page_or_a_pointer_in_the_place_of_a_file(model: Path, file: str, page: str) -> None:
    (model / file).write_text(PAGES[page], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"Git LFS|web page|error message") as fault:
        read(model)
    assert str(model / file) in str(fault.value)


@pytest.mark.parametrize("page", PAGES)
def test_of_other_kinds_of_files(model: Path, page: str) -> None:
    from still_export.gguf.container import open_gguf

    for name in ("x.gguf", "tokenizer.model"):
        (model / name).write_text(PAGES[page], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"x\.gguf is (a Git LFS|a web|an error)"):
        open_gguf(model / "x.gguf")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is (a Git LFS|a web|an error)"):
        load_tokenizer(model)
    (model / "a").mkdir()
    (model / "a/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (model / "a/adapter_model.safetensors").write_text(PAGES[page], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is"):
        check_overlay(model / "a")


def test_files_that_are_not_read_may_be_pointers(model: Path) -> None:
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx.onnx"):
        (model / name).write_text(POINTER)
    read(model)
    assert "model" in describe_folder(model)


@pytest.mark.parametrize("text", ["<|im_start|>{{ messages }}", "{%- if tools %}", '{"architectures": []}', "<s>"])
def test_beginnings_of_files_are_no_pages(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    assert stand_in(tmp_path / "file") == ""


def fsdp(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0/__0_0.distcp").write_bytes(b"x")
    (folder / "rng_state_0.pth").write_bytes(b"x")


def zero(folder: Path) -> None:
    (folder / "global_step10").mkdir()
    (folder / "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")
    (folder / "rng_state_0.pth").write_bytes(b"x")


def pickles(folder: Path) -> None:
    for name in ("optimizer.bin", "pytorch_model.bin", "random_states_0.pkl", "scheduler.bin", "training_args.bin"):
        (folder / name).write_bytes(b"x")


def shards(folder: Path) -> None:
    for name in ("optimizer.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (folder / name).write_bytes(b"x")


def only_trainers(folder: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).write_bytes(b"x")


@pytest.mark.parametrize(
    "leave, said",
    [
        (fsdp, r"accelerate merge-weights .*pytorch_model_fsdp_0 "),
        (zero, r"zero_to_fp32\.py"),
        (pickles, r"m/pytorch_model\.bin is a pickle.*unpickle \S*/pytorch_model\.bin \S*/pytorch_model\.safetensors"),
        (shards, r"/m has only pickles.*unpickle \S*/m$"),
        (only_trainers, r"optimizer\.pt, scheduler\.pt are a trainer's"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_leftovers_in_the_place_of_weights(model: Path, leave: Callable[[Path], None], said: str) -> None:
    (model / "model.safetensors").unlink()
    leave(model)
    with pytest.raises(CheckpointError, match=said):
        check_model(model)


def test_pickled_shards_by_the_command_that_is_named(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for number in (1, 2):
        part = {name: tensor for name, tensor in state.items() if len(name) % 2 == number - 1}
        torch.save({"module": part, "ds_version": "0.17"}, model / f"pytorch_model-0000{number}-of-00002.bin")
    assert unpickle([str(model)]) == 0
    assert [file.name for file in ModelFolder(model).weights] == [
        f"pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    read(model)
    (model / "pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError):  # one of two
        open_source(model)
    assert unpickle([str(model), "one.safetensors"]) == 2


def test_weights_that_were_not_gathered(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    empty = {name: torch.zeros(0) if tensor.dim() == 2 else tensor for name, tensor in state.items()}
    save_file(empty, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"shape \[0\].*zero_to_fp32"):
        check_model(model)
    save_file({"model._flat_param": torch.ones(9)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="_flat_param"):
        check_model(model)


@pytest.mark.parametrize("part", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"])
@pytest.mark.parametrize(
    "place",
    ["{}.model.layers.0.w", "model.{}.layers.0.w", "model.layers.0.{}.w", "base_model.model.{}.model.layers.0.w"],
)
def test_names_of_wrappers_anywhere(part: str, place: str) -> None:
    assert [*plain_names({place.format(part): 0})] == ["model.layers.0.w"]
    assert [
        *plain_names({place.format(f"module.{part}.{part}") if place[0] == "{" else place.format(f"{part}.{part}"): 0})
    ] == ["model.layers.0.w"]


@pytest.mark.parametrize("quantized", [False, True])
def test_folders_of_mlx_are_refused_by_name(model: Path, quantized: bool) -> None:
    state = load_file(model / "model.safetensors")
    save_file(state, model / "model.safetensors", {"format": "mlx"})
    config = json.loads((model / "config.json").read_text())
    if quantized:
        config |= {"quantization": {"bits": 4, "group_size": 64}, "model_type": "llama"}
    (model / "config.json").write_text(json.dumps(config))
    for reader in (check_model, open_source, describe_folder):
        with pytest.raises(UnsupportedModelError, match="MLX"):
            reader(model)  # type: ignore[operator]
    if not quantized:
        (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
        try:
            check_model(model)  # a softmax model's layout is the usual one
        except StillExportError as error:
            pytest.fail(str(error))
