"""Make STILL models: from tensors by name, or around a plain softmax model with untrained STILL attention."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers.initialization import no_init_weights

from still_export.errors import CheckpointError, ConfigError, StillExportError, UnsupportedModelError
from still_export.folders.model import not_covered
from still_export.mixers.config import LayersConfig, StillConfig
from still_export.mixers.projections import ProjectedAttention
from still_export.models.families.experts import stacked_experts
from still_export.models.families.fused import split_linear_layers
from still_export.models.families.linear_families import LINEAR_FAMILIES, LINEAR_NEEDS
from still_export.models.families.softmax_families import FAMILIES, Family
from still_export.models.read.weights import Deferred, Weight, Weights, value_of

SINGLE = ("bos_token_id", "pad_token_id")
APART = (
    *("model_type", "architectures", "auto_map"),
    *("return_dict", "torchscript", "output_attentions", "output_hidden_states"),
)
"""Fields of config.json that say how a model is found, or in which form it returns its outputs."""


class PublishedGeneration(GenerationConfig):
    """Settings that transformers reads with a warning, such as a temperature without do_sample, can also be saved."""

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Like transformers, but not strict when saving."""
        super().validate(False, user_set_attributes)


def read_generation(values: Mapping[str, Any]) -> GenerationConfig:
    """Settings of generation_config.json; of lists of start or padding tokens, the first.

    Raises:
        ValueError, TypeError, AttributeError, KeyError: transformers does not read them.
    """
    first = {name: (values[name] or [None])[0] for name in SINGLE if isinstance(values.get(name), list)}
    found: GenerationConfig = PublishedGeneration.from_dict({**values, **first})
    found.validate()
    return found


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def family_of(model_type: str) -> Family:
    """The family of transformers' `model_type`, plain or "still_...".

    Raises:
        UnsupportedModelError: Unknown, with the known ones; or the installed transformers computes it in another way.
    """
    name = model_type.removeprefix("still_")
    family = FAMILIES.get(name) or LINEAR_FAMILIES.get(name)
    if family is None:
        raise not_covered(model_type, FAMILIES, LINEAR_FAMILIES)
    if family.linear and tuple(map(int, transformers.__version__.split(".")[:2])) < LINEAR_NEEDS:
        least = ".".join(map(str, LINEAR_NEEDS))
        raise UnsupportedModelError(
            f"model_type={model_type!r} in config.json has linear layers, which need transformers {least}; {transformers.__version__} is "
            f"installed. Type: pip install -U 'transformers>={least}'"
        )
    return family


def still_family_config(family: Family, values: Mapping[str, Any], still: LayersConfig) -> Any:
    """The STILL configuration of `family` from a plain configuration's values.

    Raises:
        UnsupportedModelError: The attention is a variant that is not covered.
        ConfigError: The values are not valid for `family`, or contradict `still`.
    """
    if values.get("is_causal") is False:
        raise UnsupportedModelError(
            "is_causal=false in config.json: its tokens see those behind them, as in a model of embeddings. Only causal models are covered."
        )
    unused = APART if family.linear or _has_field(family, "layer_types") else (*APART, "layer_types")
    own = {name: value for name, value in values.items() if name not in unused}
    own["still_config"] = still.to_dict()
    try:
        config = family.still_config.from_dict(own)  # type: ignore[attr-defined]
    except (UnsupportedModelError, ConfigError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        # huggingface_hub wraps what a configuration's own checks raise.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (UnsupportedModelError, ConfigError)):
                raise cause from None
            cause = cause.__cause__
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"config.json is no valid {family.name} configuration: {reason}. Fix the named value."
        ) from error
    padding, size = getattr(config, "pad_token_id", None), config.vocab_size
    if isinstance(padding, int) and not -size <= padding < size:
        raise ConfigError(
            f"pad_token_id={padding} in config.json is no token of the {size} that vocab_size says, so transformers makes no embedding. "
            "Set it to null or to one of them."
        )
    config.architectures = [family.still_model.__name__]
    return config


def _has_field(family: Family, name: str) -> bool:
    """Whether the family's own configuration has a field; transformers ignores others."""
    return any(field.name == name for field in dataclasses.fields(family.config))


def complete_weights(family: Family, config: Any, weights: Weights, fresh: bool = False) -> dict[str, Weight]:
    """All parameters of a model by name, tied ones once: those in `weights`, and initial values of untrained layers.

    Args:
        family, config: The model's class and STILL configuration.
        weights: Parameters by name; `lm_head.weight` may be missing where embeddings are tied.
        fresh: Parameters that a base model lacks (gates, feature maps) may be missing; they start untrained.

    Raises:
        CheckpointError: Names or shapes do not match the model.
        ConfigError: Values of the configuration fit none.
        UnsupportedModelError: `weights` has attention parameters that the family has no place for.
    """
    weights = stacked_experts(weights)
    dtype = next(iter(weights.values())).dtype
    numbers = {int(match[1]) for name in weights if (match := _LAYER.match(name))}
    if config.num_hidden_layers != max(numbers, default=-1) + 1:  # before that many tensors are made
        raise CheckpointError(
            f"config.json says num_hidden_layers={config.num_hidden_layers}, the weights have {max(numbers, default=-1) + 1} layers. "
            "The configuration and the weights belong to different models. Fetch the model again."
        )
    hf_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(family.config, family.still_model)
    if "lm_head.weight" in weights and not hf_class._tied_weights_keys:
        config.tie_word_embeddings = False  # transformers never ties the head of this class, whatever config.json says
    try:
        model = _without_values(family, config).to(dtype)
    except StillExportError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"no {family.name} model has these values ({type(error).__name__}: {reason}). Fix them, or fetch the model again."
        ) from error
    expected = dict(model.named_parameters())
    found = _without_zero_biases(split_linear_layers(weights, config, expected), expected)
    if config.tie_word_embeddings:
        head, embedding = found.pop("lm_head.weight", None), found.get("model.embed_tokens.weight")
        if head is not None and embedding is not None and not _same(head, embedding):
            raise CheckpointError(
                "config.json ties the embeddings (tie_word_embeddings), but lm_head.weight differs from model.embed_tokens.weight. "
                "Set tie_word_embeddings to false if the head was trained."
            )
    untrained = {
        f"{prefix}.{name}": (module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, ProjectedAttention)
        for name in module.fresh_names()
    }
    _check_names(expected, found, config, untrained if fresh else ())
    for name, weight in found.items():
        if name in expected and weight.shape != expected[name].shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(weight.shape)}, config.json demands {list(expected[name].shape)}. "
                "The configuration and the weights belong to different models. Fetch the model again."
            )
    for name, (module, own) in untrained.items():
        if name not in found:
            parameter = expected[name]
            found[name] = Deferred(parameter.shape, parameter.dtype, partial(module.initial, own))
    return {name: found[name] for name in expected if name in found}


def _without_zero_biases(weights: Weights, expected: Collection[str]) -> dict[str, Weight]:
    """Without the zeros that GPTQ's writers put beside layers of a class that has no biases."""
    return {
        name: weight
        for name, weight in weights.items()
        if name in expected
        or not name.endswith(".bias")
        or f"{name.removesuffix('.bias')}.weight" not in expected
        or bool(value_of(weight).any())
    }


def _without_values(family: Family, config: Any) -> Any:
    """A model whose parameters have shapes but no values or initialization."""
    with torch.device("meta"), no_init_weights():
        model = family.still_model(config)
    model.tie_weights()
    return model


def _same(a: Weight, b: Weight) -> bool:
    return a is b or torch.equal(value_of(a), value_of(b))


def build_model(family: Family, config: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A model with exactly these `tensors`, not copied.

    Args:
        tensors: Every parameter by name; see `complete_weights`.
    """
    model = _without_values(family, config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    device, dtype = (getattr(next(iter(tensors.values())), name) for name in ("device", "dtype"))
    # Frequencies are not in a checkpoint. Families without positions have none.
    for name in ("rotary_emb", "pos_emb"):
        if (rotary := getattr(model.model, name, None)) is not None:
            setattr(model.model, name, type(rotary)(config).to(device))
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers())), "a tensor was left without a value"
    config.dtype = dtype
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _check_names(
    expected: Mapping[str, Any], tensors: Mapping[str, Any], config: Any, untrained: Collection[str]
) -> None:
    missing = [n for n in expected if n not in tensors and n not in untrained]
    if config.tie_word_embeddings:
        missing = [n for n in missing if n != "lm_head.weight"]
    extra = [n for n in tensors if n not in expected and not n.endswith("rotary_emb.inv_freq")]
    attention = [n for n in extra if ".self_attn." in n]
    if attention:
        raise UnsupportedModelError(
            f"the checkpoint has attention tensors without a place in {type(config).__name__}: {_some(attention)}. "
            "Dropping them would change the model; this variant is not covered."
        )
    if missing or extra:
        what = f"lacks {_some(missing)}" if missing else f"has the unknown tensors {_some(extra)}"
        raise CheckpointError(
            f"the checkpoint {what}. It is incomplete or of another model than config.json; fetch it again."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def attach_untrained(model: Any, still: StillConfig | None = None) -> Any:
    """A STILL model around a plain softmax model: same weights (shared, not copied), identity feature maps, open gates.

    Within 2C tokens its logits are those of `model`; beyond, the linear part is untrained.

    Args:
        model: A `...ForCausalLM` of a covered family.

    Raises:
        UnsupportedModelError: The family or a variant of its attention is not covered.
        ConfigError: The model is a STILL model already, or `still` does not fit it.
    """
    if hasattr(model.config, "still_config"):
        raise ConfigError(f"{type(model).__name__} is a STILL model already; leave out --attach-untrained.")
    family = family_of(model.config.model_type)
    if family.linear:
        raise ConfigError(f"{type(model).__name__} is linear already; export it as it is.")
    config = still_family_config(family, model.config.to_dict(), still or StillConfig())
    weights = complete_weights(family, config, model.state_dict(), fresh=True)
    result = build_model(family, config, {name: value_of(weight) for name, weight in weights.items()})
    if isinstance(getattr(model, "generation_config", None), GenerationConfig):
        result.generation_config = read_generation(model.generation_config.to_dict())
    return result
