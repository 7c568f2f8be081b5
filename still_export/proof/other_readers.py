"""Other programs that read a model's files: transformers with PEFT, the gguf package, safetensors alone."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from still_export.discovery import recognised
from still_export.proof.other_gguf import read_gguf_tensors
from still_export.proof.reading import Reading, logits_of, room, too_large

if TYPE_CHECKING:
    from still_export.models.load import Source


LANGUAGE_ALONE = {r"\.language_model\.": "."}
"""Names of an adapter of a model with images, for its language model, which is what transformers makes of the folder here."""


def other_reading(path: Path, overlays: Sequence[Path], source: Source) -> Reading:
    """The model as another program reads it: transformers with PEFT, the gguf package, or safetensors alone."""
    if path.is_file():
        return read_gguf_tensors(path, overlays)
    reason = _not_transformers(path, source)
    adapters = [overlay for overlay in overlays if (overlay / "adapter_config.json").is_file()]
    others = [overlay for overlay in overlays if overlay not in adapters]
    if not reason and not others and not any(_is_own(overlay) for overlay in adapters):
        return _read_transformers(path, adapters, sum(math.prod(weight.shape) for weight in source.weights.values()))
    if overlays:
        reason = reason or "an overlay has feature maps of this project"
        return Reading(
            "safetensors", {}, why=[f"the files by another reader: {reason}, and its merge is this project's own"]
        )
    why = [f"logits by another program: {reason}"]
    if (path / "config.json").is_file() and "quantization_config" in (path / "config.json").read_text(encoding="utf-8"):
        return Reading("safetensors", {}, why=[*why, "the file's codes by another reader: no library here undoes them"])
    return Reading("safetensors", _read_safetensors(path), why=why)


def _is_own(overlay: Path) -> bool:
    return "still_config" in (overlay / "adapter_config.json").read_text(encoding="utf-8")


def _not_transformers(path: Path, source: Source) -> str:
    """Why transformers cannot be used; "": it can."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        kind = kind[0] if isinstance(kind, tuple) else kind
    except Exception as error:  # what it cannot read it refuses in many ways
        return f"transformers has no class for it ({type(error).__name__})"
    stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if (model_type := recognised(stored)) != stored.get("model_type"):
        return f"its config.json says {config.model_type}, and it is a {model_type} model"
    if not kind.__module__.startswith("transformers."):
        return f"transformers has no class of its own for {config.model_type}"
    if getattr(config, "quantization_config", None) is not None:
        return "transformers needs the library of its quantization"
    return ""


def _read_transformers(path: Path, adapters: Sequence[Path], parameters: int) -> Reading:
    """If the model does not fit into memory, its layers are read from the file at every call."""
    from transformers import AutoModelForCausalLM

    by, large = "transformers", too_large(parameters)
    streams: dict[str, Any] = {}
    if large and adapters:
        return Reading(
            "PEFT", {}, why=[f"the files by another reader: {large}, and adapters are merged into the whole"]
        )
    if large and find_spec("accelerate") is None:
        why = f"logits by another program: {large}; pip install accelerate streams it from the disk"
        return Reading("safetensors", _read_safetensors(path), why=[why])
    if large:
        scratch = tempfile.mkdtemp()  # for what the file has in another form
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        streams = {"device_map": "auto", "max_memory": {"cpu": room()}, "offload_folder": scratch}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **streams
        )
        model, info = loaded
        if lacks := sorted(info["missing_keys"]):
            why = f"logits by another program: transformers finds no {lacks[0]}"
            return Reading("safetensors", _read_safetensors(path), why=[why])
        for adapter in adapters:
            from peft import PeftModel

            by = "PEFT"
            model = PeftModel.from_pretrained(model, adapter, key_mapping=LANGUAGE_ALONE).merge_and_unload()
    except Exception as error:  # of whole libraries
        reason = " ".join(str(error).split())[:200]
        return Reading(by, {}, why=[f"the files by another reader: {by} cannot read them ({reason})"])
    if large:
        return Reading(by, _read_safetensors(path), logits_of(model.eval()), read="safetensors")
    return Reading(by, dict(model.state_dict()), logits_of(model.float().eval()), merged=bool(adapters))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder by safetensors' own rule: model.safetensors, or the shards that its index lists."""
    from safetensors import safe_open

    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [path / name for name in sorted(set(named.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))[:1]
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found
