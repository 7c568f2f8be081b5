"""Package folders: written whole or not at all, and refused when they are not what was written."""

import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save_file

from still_export.errors import PackageError
from still_export.package.checked import read_manifest
from still_export.package.folder import open_package, staged_folder, write_manifest
from still_export.package.refusals import CheckError, first_line
from still_export.package.staging import lacks_room, write_json

CONTENT: dict[str, Any] = {
    "target": "onnx",
    "command": "",
    "config": {},
    "ops": {"Op": 1},
    "model": {
        "family": "llama", "dtype": "float32", "parameters": 1, "layers": 1, "hidden_size": 1, "heads": 1, "kv_heads": 1, "head_dim": 1,
        "vocab_size": 9, "layer_types": ["hybrid_attention"], "linearized": True, "all_logits": False,
    },
    "still": {},
    "capacity": {"capacity_tokens": 8, "bounded": True},
    "prefill_tokens": 4,
    "states": [
        {
            "name": "s.0", "layer": 0, "op": "Op", "shape": ["batch", "rows", 3], "dtype": "float32", "in_place": True,
            "growth": {"dimension": "rows", "axis": 1, "rows": 1, "per": 1, "lag": 0, "fixed": False},
        }
    ],
    "eos_token_ids": [2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "line"), [("", "OSError"), ("\n \n", "OSError"), ("\nfirst\nsecond", "first"), ("one", "one")]
)
def test_errors_that_say_nothing_are_named(said: str, line: str) -> None:
    assert first_line(OSError(said)) == line


def make_package(folder: Path) -> Path:
    with staged_folder(folder) as staging:
        (staging / "model.onnx").write_bytes(onnx.ModelProto(ir_version=10).SerializeToString())
        (staging / "sub").mkdir()
        (staging / "sub" / "weights").write_bytes(b"1234")
        write_manifest(staging, CONTENT)
    return folder


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    package = open_package(make_package(tmp_path / "p"))
    assert set(package.manifest["files"]) == {"model.onnx", "sub/weights"}
    assert package.manifest["files"]["sub/weights"]["size_bytes"] == 4
    assert {"python", "torch"} <= set(package.manifest["versions"])
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_existing_folder_needs_force(tmp_path: Path) -> None:
    make_package(tmp_path / "p")
    with pytest.raises(PackageError, match="--force"), staged_folder(tmp_path / "p"):
        pass
    with staged_folder(tmp_path / "p", force=True) as staging:
        (staging / "new").touch()
    assert [x.name for x in (tmp_path / "p").iterdir()] == ["new"]


def test_force_deletes_packages_only(tmp_path: Path) -> None:
    """`-o . --force` must not delete the working directory, nor `-o MODEL --force` the model."""
    other = tmp_path / "model"
    other.mkdir()
    with staged_folder(other, force=True) as staging:  # empty: nothing is lost
        (staging / "config.json").write_text("{}")
    for manifest in (None, "{", "[]", '{"name": "an app"}'):
        if manifest is not None:
            (other / "manifest.json").write_text(manifest)
        with pytest.raises(PackageError, match="no exported package"), staged_folder(other, force=True):
            pass
        assert (other / "config.json").is_file()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("force", [False, True])
def test_interruption_leaves_the_old_package_or_none(tmp_path: Path, interruption: type, force: bool) -> None:
    if force:
        make_package(tmp_path / "p")
    with pytest.raises(interruption), staged_folder(tmp_path / "p", force=force) as staging:
        (staging / "half").write_bytes(b"written")
        raise interruption
    if force:
        open_package(tmp_path / "p")
    assert [x.name for x in tmp_path.iterdir()] == (["p"] if force else [])


WRITERS: dict[str, Callable[[Path, np.ndarray], Any]] = {
    "text": lambda path, numbers: path.write_text(str(numbers.tolist())),
    "numpy": lambda path, numbers: numbers.tofile(path),
    "numpy, piece by piece": lambda path, numbers: numbers[::3].tofile(path),
    "safetensors": lambda path, numbers: save_file({"w": numbers}, path),
    "PyTorch": lambda path, numbers: torch.save({"w": torch.from_numpy(numbers)}, path),
    "ONNX": lambda path, numbers: onnx.save_tensor(onnx.numpy_helper.from_array(numbers), path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_room(writer: str, tmp_path: Path) -> None:
    """Whatever library meets the end of the room; a limit of files is the one that a test can set."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(PackageError, match="Free space"), staged_folder(tmp_path / "p") as work:
            WRITERS[writer](work / "file", np.arange(1 << 16))
        with pytest.raises(PackageError, match="Free space"):
            write_json(tmp_path / "file", list(range(1 << 16)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reason", [(errno.ENOSPC,), (errno.EDQUOT,), ("problem writing element 5120 to file",)])
def test_errors_of_full_disks_are_known(reason: tuple[Any, ...]) -> None:
    assert lacks_room(OSError(*reason, *[os.strerror(number) for number in reason if isinstance(number, int)]))
    assert not lacks_room(OSError(errno.EACCES, "Permission denied"))
    assert not lacks_room(RuntimeError("2 GPUs were requested and none is there"))


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PackageError, match="not a folder"), staged_folder(tmp_path / "file", force=True):
        pass
    with pytest.raises(PackageError, match="cannot write"), staged_folder(tmp_path / "file" / "p"):
        pass


def test_damage_is_refused(tmp_path: Path) -> None:
    folder = make_package(tmp_path / "p")
    (folder / "sub" / "weights").write_bytes(b"1235")
    with pytest.raises(PackageError, match="SHA-256"):
        open_package(folder)
    open_package(folder, check_hashes=False)
    (folder / "sub" / "weights").write_bytes(b"12")
    with pytest.raises(PackageError, match="size"):
        open_package(folder, check_hashes=False)
    (folder / "sub" / "weights").unlink()
    with pytest.raises(PackageError, match="missing"):
        open_package(folder)


def test_a_wrong_field_is_named_with_its_file(tmp_path: Path) -> None:
    """test_manifest.py has the fields; here, that verbs and runners say so."""
    with pytest.raises(PackageError, match="no exported package"):
        open_package(tmp_path)
    folder = make_package(tmp_path / "p")
    manifest = json.loads((folder / "manifest.json").read_text())
    read_manifest(folder)
    manifest["model"]["layers"] = "1"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for read, error in ((open_package, PackageError), (read_manifest, CheckError)):
        with pytest.raises(error, match=rf'{folder}/manifest\.json: model\.layers must be an integer .* not "1"'):
            read(folder)
