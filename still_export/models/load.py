"""Open a model: read a Hugging Face folder, hub id or GGUF file, configure the layers by its kind (kinds.py), build the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from still_export.errors import (
    CheckpointError,
    ConfigError,
    UnsupportedModelError,
    unknown,
)
from still_export.folders.adapter_config import ADAPTER_CONFIG
from still_export.folders.families import AHEAD, whole_config
from still_export.folders.files import Generation, Optimizer
from still_export.folders.model import ModelFolder, check_file
from still_export.mixers.config import LayersConfig, StillConfig
from still_export.models.ahead import SHARED, ahead_config, ahead_family, ahead_tensors
from still_export.models.ambient import plain_torch
from still_export.models.build import build_model, complete_weights, family_of, read_generation, still_family_config
from still_export.models.families.linear_names import language_model
from still_export.models.families.softmax_families import Family
from still_export.models.families.vision import Vision, take_vision
from still_export.models.gguf.model import read_gguf
from still_export.models.kinds import Checkpoint, UserChoice, kind_of
from still_export.models.read import convert
from still_export.models.read.checkpoint import open_tensors, stored_dtype
from still_export.models.read.weights import Weight, Weights, stand_ins, value_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """A STILL model before its weights are read.

    Attributes:
        family, config: What it is.
        weights: Each parameter by name; a tied one once, under the embedding's name.
        others: Number of unused tensors, by purpose (vision, MTP head).
        ahead: Opens the MTP head (None: none is covered); raises CheckpointError if it is damaged.
        vision: The image encoder, if requested.
    """

    family: Family
    config: Any
    weights: Weights
    generation: GenerationConfig
    others: Mapping[str, int] = field(default_factory=dict)
    ahead: Callable[[], Source] | None = None
    vision: Vision | None = None

    def left_out(self, ahead: bool = True) -> str:
        """Unused tensors in words, "": none; `ahead`: count the MTP head."""
        unused = sorted((what, count) for what, count in self.others.items() if ahead or what != AHEAD)
        return " and ".join(f"{count} tensors of {what}" for what, count in unused)

    @plain_torch()
    def model(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The model in evaluation mode around `tensors`, which have the names, shapes and types of `weights`."""
        model = build_model(self.family, self.config, tensors)
        model.generation_config = self.generation
        return model

    @plain_torch()
    def read(self) -> Any:
        """The model with all of its weights, on the CPU."""
        return self.model({name: value_of(weight) for name, weight in self.weights.items()})

    def outline(self) -> Any:
        """The model with meta weights: it can be traced and described, not run."""
        return self.model(stand_ins(self.weights))


def load_model(source: str | Path | ModelFolder, **options: Any) -> Any:
    return open_source(source, **options).read()


@plain_torch()
def open_source(
    source: str | Path | ModelFolder,
    *,
    attach_untrained: bool = False,
    still_config: StillConfig | None = None,
    deployment: Mapping[str, Any] | None = None,
    overlays: Sequence[str | Path | ModelFolder] = (),
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    vision: bool = False,
) -> Any:
    """A STILL model whose weights are read and checked lazily.

    Args:
        source: Model folder, hub id ("org/name") or .gguf file, or one that is open. A STILL model, a checkpoint of the released STILL
            code, or, with `attach_untrained`, an adapter that `linearize` wrote, or a LoLCATs overlay, a plain softmax model.
        attach_untrained: Give a plain softmax model untrained STILL attention (identity maps, open gates).
        still_config: Configuration of untrained attention; for released and LoLCATs checkpoints, values missing in their files. Not for
            STILL folders and adapters, which have their own.
        deployment: Fields that training does not fix, for any model: `capacity_tokens`, `overflow`.
        overlays: Folders, hub ids or safetensors files whose tensors are added to the model's: LoRA adapters, LoLCATs feature maps; added
            to those of an open `source`.
        dtype: float32, float16, bfloat16, or auto = as stored.
        revision: Of a hub id.
        vision: Also read the image encoder.

    Raises:
        ModelNotFoundError: `source` is no model.
        CheckpointError: Files are damaged, incomplete or pickled; or, when a weight is read, it has NaN.
        NotLinearizedError: A plain softmax model without `attach_untrained`.
        UnsupportedModelError: The family or a variant of its attention is not covered.
        ConfigError: Configurations contradict each other.
    """
    folder = ModelFolder.open(source, revision)
    found = _opened(folder, [*folder.overlays, *map(ModelFolder.open, overlays)], _dtype(dtype))
    sees = take_vision(found.sight, found.tensors, found.source) if vision else None
    if sees is not None:
        found.config["vision_config"] = sees.config.to_dict()
    kind = kind_of(found)
    if attach_untrained and kind.linearized:
        raise ConfigError(
            f"{source} is linearized: it has feature maps of its own. Leave out --attach-untrained, or give the softmax model that it "
            "was made of."
        )
    still = kind.configure(found, UserChoice(attach_untrained, still_config))
    still = replace(still, deployment=replace(still.deployment, **deployment or {}))
    return _built(found, still, kind.fresh, sees)


def _opened(folder: ModelFolder, overlays: Sequence[ModelFolder], dtype: torch.dtype | None) -> Checkpoint:
    """The tensors of a model and its overlays, LoRA merged."""
    found = _read(folder, dtype)
    found.overlays = [overlay.name for overlay in overlays]
    for overlay in overlays:
        _overlay(found, overlay, next(iter(found.tensors.values())).dtype)
    plain = convert.plain_names(found.tensors)
    found.tensors = convert.merge_lora(plain, found.adapter, found.source, found.model_type)
    return found


def _built(found: Checkpoint, still: LayersConfig, fresh: bool, sees: Vision | None) -> Source:
    """The model of a checkpoint; `fresh`: STILL attention without tensors starts untrained."""
    family = family_of(found.model_type)
    config = still_family_config(family, found.config, still)
    if config.tie_word_embeddings and found.own_embedding is not None:
        raise UnsupportedModelError(
            f"{found.own_embedding} has trained embeddings (modules_to_save) of a model that ties its head to them. PEFT leaves the head "
            "as it was, so they are tied no more: merge the adapter with PEFT (merge_and_unload), save the model with "
            "tie_word_embeddings=false, and take that."
        )
    try:
        weights = complete_weights(family, config, found.tensors, fresh)
    except ConfigError as error:  # fields that are valid alone but not together
        raise ConfigError(f"{found.configured or f'config.json of {found.source}'}: {error}") from error
    except (CheckpointError, UnsupportedModelError) as error:
        if not found.added:
            raise
        files = [*([found.configured] if found.configured else []), *found.added]
        raise type(error)(f"{found.source} with {', '.join(map(str, files))}: {error}") from error
    try:
        generation = read_generation(found.generation or _generation_of(config))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"generation_config.json of {found.source} is not valid: {reason} Fix the named value."
        ) from error
    ahead, values = None, ahead_config(config, found.config) if AHEAD in found.others else None
    if values is not None:
        tensors = {**_shared(weights), **ahead_tensors(found.others[AHEAD])}
        ahead = partial(_ahead, family, values, still, tensors, generation)
    counts = {what: len(tensors) for what, tensors in found.others.items()}
    return Source(family, config, weights, generation, counts, ahead, sees)


def _shared(weights: Weights) -> dict[str, Weight]:
    return {name: weights[name] for name in SHARED if name in weights}


def _ahead(
    family: Family, values: Mapping[str, Any], still: LayersConfig, tensors: Weights, generation: GenerationConfig
) -> Source:
    """The MTP head, from its own tensors and those shared with the model."""
    family = ahead_family(family)
    config = still_family_config(family, values, replace(still, layer_types=None))
    try:
        return Source(family, config, complete_weights(family, config, tensors), generation)
    except CheckpointError as error:
        raise CheckpointError(
            f"{AHEAD} (MTP), which --speculate exports: {error} Without --speculate they are left out."
        ) from error


def source_dtype(source: str | Path | ModelFolder, revision: str | None = None) -> torch.dtype:
    """The type that the weights of `source` are stored in; float32 for a GGUF file, which is dequantized.

    Raises:
        ModelNotFoundError, CheckpointError: See `open_source`.
    """
    folder = ModelFolder.open(source, revision)
    return torch.float32 if folder.is_file else stored_dtype(folder.config)


def load_tokenizer(source: str | Path | ModelFolder, revision: str | None = None) -> Any:
    """The tokenizer of a model; errors: those of `ModelFolder.tokenizer`, or `source` is no model (ModelNotFoundError)."""
    return ModelFolder.open(source, revision).tokenizer


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise unknown(dtype, ("auto", *DTYPES), f"dtype={dtype!r}")
    return DTYPES[dtype]


def _read(folder: ModelFolder, dtype: torch.dtype | None) -> Checkpoint:
    if folder.is_file:
        check_file(folder.place)
        model_type, values, generation, blocks = read_gguf(folder.place, dtype or torch.float32)
        return Checkpoint(folder.name, model_type, language_model(values), dict(blocks), generation=generation)
    config = deepcopy(whole_config(folder, folder.config))
    quantized = config.pop("quantization_config", None)
    sight, config = config, language_model(config)
    quantized = config.pop("quantization_config", quantized)
    if quantized is None and (
        optimized := folder.json("hf_quant_config.json", Optimizer)
    ):  # older folders have it only there
        quantized = {"quant_method": "modelopt", **optimized["quantization"]}
    known = config["model_type"]
    if known != "still":
        family_of(known)  # before gigabytes are read
    tensors: dict[str, Weight] = dict(open_tensors(folder.weights, dtype or stored_dtype(config), quantized))
    return Checkpoint(
        folder.name,
        known,
        config,
        tensors,
        folder.adapter,
        dict(folder.json("generation_config.json", Generation)),
        sight=sight,
    )


def _overlay(found: Checkpoint, overlay: ModelFolder, dtype: torch.dtype) -> None:
    """Add the tensors of an adapter or of distilled feature maps; they replace the model's."""
    files, adapter = overlay.weights, overlay.path / ADAPTER_CONFIG
    found.added += files
    added = convert.plain_names(open_tensors(files, dtype))
    found.tensors = convert.plain_names(found.tensors)
    if overlay.adapter is not None:
        found.adapter = overlay.adapter
        if isinstance(found.adapter.get("still_config"), dict):
            found.still = StillConfig.from_dict(found.adapter["still_config"], f"{adapter}: still_config")
            found.configured = adapter
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in added}
    if (
        found.still is None
        and overlay.adapter is not None
        and ends & {"embed_tokens", "embeddings"}
        and not ends & {"lm_head", "head"}
    ):
        found.own_embedding = overlay.place
    in_base = convert.names_in_base(found.tensors, found.model_type)
    found.tensors.update({in_base(name): tensor for name, tensor in added.items()})
    if any("lora_" in name for name in added):
        found.tensors = convert.merge_lora(found.tensors, found.adapter, ", ".join(map(str, files)), found.model_type)
        found.adapter = None


def _generation_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
