"""The weight files of a folder, chosen as transformers does, and their tensor names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from still_export.errors import CheckpointError
from still_export.folders.files import check_links, read_json

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt", "bitsandbytes")
"""Supported values of quant_method."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model or adapter folder, chosen as transformers does: model.safetensors, else the index's shards, with an
    adapter if its configuration exists; otherwise the only file.

    Raises:
        CheckpointError: There are no files, a shard is missing, there are several files without an index, only pickles, or a broken link.
    """
    check_links(folder)
    single, index, adapter = (
        folder / name for name in ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
    )
    configured = [adapter] if adapter.is_file() and (folder / "adapter_config.json").is_file() else []
    if single.is_file():
        return [single, *configured]
    if index.is_file():
        return [*_shards(index), *configured]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(
            f"{folder} has {', '.join(f.name for f in files[:4])}{' and others' * (len(files) > 4)}, but neither model.safetensors nor "
            "model.safetensors.index.json, which lists the files of the model. Fetch the index, too."
        )
    pickles = sorted(p for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise refuse_pickle(pickles[0])
    raise CheckpointError(
        f"{folder} has no weights: neither model.safetensors, adapter_model.safetensors nor another *.safetensors. "
        "The download is incomplete; fetch it again."
    )


def _shards(index: Path) -> list[Path]:
    """The files listed in an index, whose tensors are all listed and stored once."""
    shards, folder = read_json(index).get("weight_map"), index.parent
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index} has no weight_map. Fetch the model again.")
    for tensor, name in shards.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map of {tensor} is {name!r:.60}, which is no safetensors file in this folder. "
                "Fetch the model again."
            )
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, named in {index.name}. The download is incomplete; fetch it again."
        )
    seen: dict[str, str] = {}
    for file in files:
        for tensor in tensor_names(file):
            if tensor in seen:
                raise CheckpointError(
                    f"{tensor} is in {seen[tensor]} and in {file.name} of {folder}. Delete the outdated file."
                )
            seen[tensor] = file.name
            if tensor not in shards:
                raise CheckpointError(
                    f"{tensor} is in {file}, and {index.name} does not name it: they are of different models. Fetch both again."
                )
    return files


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file; CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from error


def refuse_pickle(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle: reading it could run any code that its author put in, so it is refused. "
        "Use the model's safetensors, or convert the file with an unpickler that runs nothing: "
        f"python -m still_export.models.read.unpickle {path} {path.with_suffix('.safetensors').name}"
    )


def damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} ({path.stat().st_size:,} bytes) is not an intact safetensors file: {error}. "
        "It is truncated or damaged; fetch it again."
    )


@dataclass(frozen=True)
class Head:
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def heads_of(files: Iterable[Path]) -> dict[str, Head]:
    """Headers of tensors in safetensors files, by name.

    Raises:
        CheckpointError: A file is damaged.
    """
    found: dict[str, Head] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                head = json.loads(file.read(size))
            found |= {n: Head(str(t["dtype"]), tuple(t["shape"])) for n, t in head.items() if n != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, error) from error
    return found
