"""The weight files of a folder, chosen as transformers does, and their tensor names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.folders.families import SOFTMAX
from still_export.folders.files import Files, damaged

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SAFE = ".safetensors"
TRAINERS = re.compile(
    r"optimizer|optim|scheduler|scaler|sampler|random_states|rng_state|training_args|trainer_state|custom_checkpoint"
)
"""Beginnings of pickles that trainers leave beside a model."""
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E5M2": "float8",
}
"""Float types in headers of safetensors files, and their names."""
_MAY_BE_EMPTY = ("g_idx", "zero_point", "qzeros")
"""Ends of names of tensors that quantizers leave empty."""
AUTO_ROUND = ("auto-round", "intel/auto-round")
METHODS = ("gptq", "awq", *AUTO_ROUND, "compressed-tensors", "fp8", "modelopt", "bitsandbytes")
"""Supported values of quant_method."""


def weight_files(folder: Files) -> list[Path]:
    """The safetensors files of a model or adapter, chosen as transformers does: model.safetensors, else the index's shards, with an
    adapter if its configuration exists; otherwise the only file, or all parts named NAME-00001-of-0000N.

    Raises:
        CheckpointError: There are no files, a shard is missing, there are several files without an index, only pickles, or a broken link;
            or a tensor is empty.
        UnsupportedModelError: MLX wrote them in its own layout.
    """
    folder.check_links()
    files = _chosen(folder)
    _refuse_ungathered(folder.path, heads_of(folder, files))
    _refuse_mlx(folder, files)
    return files


def _chosen(opened: Files) -> list[Path]:
    folder = opened.path
    single, index, adapter = (
        folder / name for name in ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
    )
    configured = [adapter] if adapter.is_file() and (folder / "adapter_config.json").is_file() else []
    if single.is_file():
        return [single, *configured]
    if index.is_file():
        return [*_shards(opened, index), *configured]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if _are_parts(files):
        _places(opened, files)
        return files
    if files:
        raise CheckpointError(
            f"{folder} has {', '.join(f.name for f in files[:4])}{' and others' * (len(files) > 4)}, but neither model.safetensors nor "
            "model.safetensors.index.json, which lists the files of the model. Fetch the index, too."
        )
    raise _without_weights(folder)


def _are_parts(files: Sequence[Path]) -> bool:
    """Whether these are all parts of one model, by their names."""
    found = [re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", file.name) for file in files]
    return (
        all(found)
        and len({(one[1], one[3]) for one in found if one}) == 1
        and [int(one[2]) for one in found if one] == [*range(1, int(found[0][3]) + 1)]  # type: ignore[index]
    )


def _without_weights(folder: Path) -> CheckpointError:
    """The error for a folder without safetensors, with what to do about the files that it has."""
    names = [str(p.relative_to(folder)) for depth in ("*", "*/*", "*/*/*") for p in sorted(folder.glob(depth))]
    if shards := [name for name in names if name.endswith(".distcp")]:
        where = folder / Path(shards[0]).parent
        return CheckpointError(
            f"{folder} has shards of PyTorch's distributed checkpoints, as FSDP writes them ({shards[0]}), which are not read. Merge them: "
            f"accelerate merge-weights {where} {folder}, which writes model.safetensors. Or train with "
            "fsdp_state_dict_type: FULL_STATE_DICT."
        )
    if zero := [
        name
        for name in names
        if re.search(r"zero_to_fp32\.py|zero_pp_rank_|mp_rank_\d+_model_states|(^|/)global_step", name)
    ]:
        return CheckpointError(
            f"{folder} has a checkpoint of DeepSpeed ({zero[0]}), whose weights lie in parts. Join them with the script that DeepSpeed put "
            f"there: python zero_to_fp32.py --safe_serialization {folder} {folder}. It opens pickles, so only with files of your own."
        )
    pickles = [name for name in names if "/" not in name and name.endswith(PICKLE_SUFFIXES)]
    if models := [name for name in pickles if not TRAINERS.match(name)]:
        first = next(
            (name for name in models if name.startswith(("pytorch_model", "model", "consolidated"))), models[0]
        )
        return refuse_pickle(folder if len(models) > 1 and first.startswith("pytorch_model-") else folder / first)
    beside = f" {', '.join(pickles[:3])} are a trainer's, not the model's." if pickles else ""
    return CheckpointError(
        f"{folder} has no weights: neither model.safetensors, adapter_model.safetensors nor another *.safetensors.{beside} "
        "The download is incomplete; fetch it again."
    )


def _refuse_ungathered(folder: Path, heads: Mapping[str, Head]) -> None:
    for name, head in heads.items():
        if "_flat_param" in name:
            raise CheckpointError(
                f"{name} in {folder} holds several weights in one, as FSDP keeps them while it trains. Save with "
                "fsdp_state_dict_type: FULL_STATE_DICT, or merge shards with accelerate merge-weights."
            )
        if not head.numbers and head.dtype in TYPES and not name.endswith(_MAY_BE_EMPTY):
            raise CheckpointError(
                f"{name} in {folder} is empty (shape {list(head.shape)}): DeepSpeed's ZeRO-3 had it in parts when it was saved. Run "
                "zero_to_fp32.py of the checkpoint, or train with stage3_gather_16bit_weights_on_model_save: true."
            )


def _refuse_mlx(folder: Files, files: Iterable[Path]) -> None:
    """Raise UnsupportedModelError for files in MLX's own layout; plain softmax models without quantization have the usual one."""
    said = (folder.header(file).get("__metadata__") for file in files)
    if not any(isinstance(texts, dict) and texts.get("format") == "mlx" for texts in said):
        return
    config = folder.json("config.json")
    text = config.get("text_config")
    kinds = {config.get("model_type"), text.get("model_type") if isinstance(text, dict) else None}
    if "quantization" in config or not kinds & set(SOFTMAX):
        coded = (
            "with its own quantization" if "quantization" in config else "with convolutions and norms in its own form"
        )
        raise UnsupportedModelError(
            f"{folder.path} was written by MLX (format: mlx in its weights), {coded}, which is not read. Use the Hugging Face folder that "
            "it was converted from (base_model in its README.md), or a GGUF file of the model."
        )


def _shards(opened: Files, index: Path) -> list[Path]:
    """The files listed in an index, whose tensors are all listed and stored once."""
    shards, folder = opened.json(index.name).get("weight_map"), index.parent
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
    for tensor, name in _places(opened, files).items():
        if tensor not in shards:
            raise CheckpointError(
                f"{tensor} is in {folder / name}, and {index.name} does not name it: they are of different models. Fetch both again."
            )
    return files


def _places(opened: Files, files: Iterable[Path]) -> dict[str, str]:
    """The file of each tensor; CheckpointError if two have one."""
    seen: dict[str, str] = {}
    for file in files:
        for tensor in heads_of(opened, [file]):
            if tensor in seen:
                raise CheckpointError(
                    f"{tensor} is in {seen[tensor]} and in {file.name} of {file.parent}. Delete the outdated file."
                )
            seen[tensor] = file.name
    return seen


def refuse_pickle(path: Path) -> CheckpointError:
    """The error for a pickle, or for a folder whose weights are pickles."""
    what = "has only pickles" if path.is_dir() else "is a pickle"
    return CheckpointError(
        f"{path} {what}: reading one could run any code that its author put in, so it is refused. "
        "Use the model's safetensors, or convert it with an unpickler that runs nothing: "
        f"python -m still_export.models.read.unpickle {path}{'' if path.is_dir() else f' {path.with_suffix(SAFE)}'}"
    )


@dataclass(frozen=True)
class Head:
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def heads_of(folder: Files, files: Iterable[Path]) -> dict[str, Head]:
    """Headers of tensors in safetensors files of a folder, by name.

    Raises:
        CheckpointError: A file is damaged.
    """
    found: dict[str, Head] = {}
    for path in files:
        try:
            entries = folder.header(path).items()
            found |= {n: Head(str(t["dtype"]), tuple(t["shape"])) for n, t in entries if n != "__metadata__"}
        except (KeyError, TypeError) as error:
            raise damaged(path, error) from error
    return found
