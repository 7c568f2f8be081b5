"""Other programs that read a model's files: transformers with PEFT, the gguf package, safetensors alone."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from still_export.discovery import recognised

if TYPE_CHECKING:
    from still_export.models.load import Source

ROOM = 0.5
"""Share of the free memory for another program's model."""
LANGUAGE_ALONE = {r"\.language_model\.": "."}
"""Names of an adapter of a model with images, for its language model, which is what transformers makes of the folder here."""
ALIKE = ("llama", "qwen2", "qwen3")
"""Architectures whose GGUF tensors equal transformers', except for the order of llama's heads."""
_LAYER = "model.layers.{}."
_PARTS = (
    *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm", "post_attention_layernorm"),
)
_WHOLE = ("model.embed_tokens", "model.norm", "lm_head")


@dataclass(frozen=True)
class Reading:
    """A model as another program reads it.

    Args:
        by: Name of the program.
        read: Name of the program that read the tensors; "": the same.
        tensors: Float tensors by the program's names.
        logits: Logits [T, V] for tokens [1, T]; None: it cannot compute them.
        merged: Adapters are merged into the tensors.
        why: Lines on what it cannot do or left out.
    """

    by: str
    tensors: Mapping[str, Tensor]
    logits: Callable[[Tensor], Tensor] | None = None
    merged: bool = False
    why: list[str] = field(default_factory=list)
    read: str = ""


def by_pytorch(model: Any) -> Any:
    """A transformers model that runs without kernels of installed packages (fla, mamba-ssm), which fail on a CPU.

    transformers takes them wherever their package can be imported, but not while a model is exported.
    """
    forward = model.forward

    @wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with patch("transformers.integrations.hub_kernels.is_torchdynamo_exporting", lambda: True):
            return forward(*args, **kwargs)

    model.forward = plain
    return model


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Logits [T, V] of a transformers model for tokens [1, T]."""
    by_pytorch(model)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the others require certain multiples as sizes
    for module in model.modules():
        if hasattr(module, "time_step_limit") and hasattr(model.config, "time_step_limit"):
            module.time_step_limit = tuple(
                model.config.time_step_limit
            )  # Nemotron-H's is another in transformers (#48989)
        if getattr(module, "config", None) is not None:
            module.config.return_dict = True  # whatever config.json says: layers read the fields of what others return

    def logits(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
            return found

    return logits


def too_large(parameters: int) -> str:
    """Why a float32 model of this size is not read; "": it fits."""
    size, free = 4 * parameters, _free_memory()
    if size <= ROOM * free:
        return ""
    return f"transformers' model takes {size / 2**30:.1f} GB, more than half of the {free / 2**30:.1f} that are free"


def room() -> int:
    """Largest size of a model, bytes."""
    return int(min(ROOM * _free_memory(), 1 << 62))


def _free_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


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


def read_gguf_tensors(path: Path, overlays: Sequence[Path]) -> Reading:
    """Tensors by the gguf package, under transformers' names by its own table; logits by transformers."""
    import gguf

    reader = gguf.GGUFReader(path)
    family = str(_value(reader, "general.architecture", ""))
    if overlays or family not in ALIKE or int(_value(reader, "split.count", 1)) > 1:
        what = (
            "an adapter is added to it" if overlays else f"its architecture ({family}) or its parts are read here alone"
        )
        return Reading("gguf", {}, why=[f"the GGUF file by another reader: {what}"])
    layers, heads = (int(_value(reader, f"{family}.{name}", 0)) for name in ("block_count", "attention.head_count"))
    groups = int(_value(reader, f"{family}.attention.head_count_kv", heads))
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    table = gguf.get_tensor_name_map(arch, layers)
    stems = [*_WHOLE, *(_LAYER.format(number) + part for number in range(layers) for part in _PARTS)]
    names = {known: stem for stem in stems if (known := table.get_name(stem)) is not None}
    tensors = {}
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        if stem not in names:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = torch.from_numpy(np.array(values, np.float32)).reshape([int(n) for n in reversed(tensor.shape)])
        if family == "llama" and stem.endswith(("attn_q", "attn_k")):
            # llama.cpp rotates neighbouring channels, transformers those half a head apart.
            count = heads if stem.endswith("attn_q") else groups
            value = value.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        tensors[f"{names[stem]}.{kind}"] = value
    logits, why = _logits(path, reader, family)
    return Reading("the gguf package", tensors, logits, why=why)


def _value(reader: Any, name: str, default: Any) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _logits(path: Path, reader: Any, family: str) -> tuple[Callable[[Tensor], Tensor] | None, list[str]]:
    """transformers' logits; it ignores scaled positions, which are set by llama.cpp's rules."""
    from transformers import AutoModelForCausalLM

    kind, factor = (_value(reader, f"{family}.rope.scaling.{name}", None) for name in ("type", "factor"))
    factor = float(factor or _value(reader, f"{family}.rope.scale_linear", 0) or 1)
    reason = too_large(sum(int(tensor.n_elements) for tensor in reader.tensors))
    if kind not in (None, "none", "linear") or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        reason = "transformers leaves out how the file scales positions"
    if reason:
        return None, [f"logits by another program: {reason}"]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # of whole libraries
        reason = " ".join(str(error).split())[:200]
        return None, [f"logits by another program: transformers cannot read the file ({reason})"]
    model = loaded.eval()
    if kind != "none" and factor != 1:
        theta = model.config.rope_parameters["rope_theta"]
        model.config.rope_parameters = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return logits_of(model), []
