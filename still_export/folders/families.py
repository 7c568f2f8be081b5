"""Families by transformers' model_type: supported ones, refused ones with the reason, and tensors outside the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.folders.files import Files

SOFTMAX = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "phi3", "gemma3_text")
"""Families with softmax layers, by model_type; linearize accepts them."""

GGUF_SOFTMAX = {
    **{name: name for name in ("llama", "smollm3", "qwen2", "qwen3", "phi3")},
    "mistral3": "mistral",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}
"""Their model_type by general.architecture of GGUF files."""

COMPANION_FILES = {
    "mamba_config.json": ("mambainllama", ("llama", "mistral")),
    "hybrid_config.json": ("zebra_llama", ("llama",)),
}
"""Files next to the config.json of a model that other programs linearized: prefix of the new model_type, and model_types before."""

IN_LLAMA = ("mambainllama_mamba", "mambainllama_mamba2")
"""model_types of Mamba-in-Llama with Mamba and with Mamba-2."""
ZEBRA = "zebra_llama"
"""Zebra-Llama; its config.json has the base's model_type."""

LINEAR = (
    *(
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
        "olmo_hybrid",
        "granitemoehybrid",
        "kimi_linear",
        "bailing_hybrid",
    ),
    *(
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "falcon_h1",
        "mamba2",
        "mamba",
        "falcon_mamba",
        "jamba",
        "minimax",
        "nemotron_h",
        "bamba",
        "zamba2",
        "recurrent_gemma",
        "gla",
    ),
    *("rwkv5", "rwkv6", "rwkv7", "rwkv6qwen2", "rwkv7qwen2", "rwkv7qwen3"),
    *(
        "hgrn2",
        "hgrn",
        "retnet",
        "delta_net",
        "gated_deltanet",
        "transnormer",
        "minicpm_sala",
        "mamba3",
        *IN_LLAMA,
        ZEBRA,
        "hypenet",
    ),
)
"""Families with linear layers, except those of systems; they are exported without linearization."""
TEXT_OF = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "gemma3": "gemma3_text",
}
"""Models of text and images, with the model_type of their language model."""
_SHARED = "its Mamba layers are of a kind that is not supported yet"
_SPARSE = "its softmax layers select keys"
_CONVOLVED = "its softmax layers attend to convolved inputs, which no mixer here supports"
_UNBOUNDED = "RWKV-4 weights tokens by unbounded exponentials of keys, which no op here supports"
_HXA = "its RWKV-7 in a Qwen mixes keys with the first layer's, or channels of the token before, which no family here does yet"
NOT_COVERED = {
    **dict.fromkeys(("zamba", "samba"), _SHARED),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "glm5_next", "glm5_next_text", "deepseek_v32", "nsa"), _SPARSE),
    **dict.fromkeys(("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text"), _CONVOLVED),
    "zaya": _CONVOLVED,
    "nemotron_h_omni": "only the language model of such models (nemotron_h) is",
    "rwkv": _UNBOUNDED,
    **dict.fromkeys(("ttt", "titans"), "its memory is trained token by token (TTT), which no rule of the op does"),
    "xlstm": "xLSTM's exponential gate needs a running maximum as a state",
    "lfm3": "transformers has it from 5.23 on: pip install 'transformers>=5.23'",
    "lara_mini": "transformers has it from 5.24 on: pip install 'transformers>=5.24'",
    **dict.fromkeys(("rwkv079qwen3", "rwkv07aqwen3", "rwkv_hybrid"), _HXA),
    **dict.fromkeys(("plamo2", "plamo3"), "PLaMo's layers have no family here yet"),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"), "its softmax has one more learned logit for each head (an attention sink)"
    ),
}
"""Linear families that are refused, with the reason."""
NEWER = ("lfm3", "lara_mini")
"""Of these, families that are supported if transformers is new enough to have their classes."""
_SAME = ("hidden_size", "num_attention_heads", "rms_norm_eps", "intermediate_size", "hidden_act", "vocab_size")
"""Fields that both files repeat."""


def whole_config(folder: Files, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a folder's config.json, merged with the second file of a model linearized by others.

    Raises:
        CheckpointError: The second file is damaged or contradicts config.json.
        UnsupportedModelError: The second file belongs to a model of another family.
    """
    kind, companion = (
        str(config.get("model_type")),
        next((name for name in COMPANION_FILES if folder.has(name)), ""),
    )
    second_config = folder.json(companion) if companion else {}
    became, bases = COMPANION_FILES.get(companion, ("", ()))
    if companion and kind not in bases and not kind.startswith(became):
        raise UnsupportedModelError(
            f"{folder.path} was linearized: it has {companion}, beside a {kind} model; covered: {', '.join((*bases, became))}."
        )
    for name in _SAME:
        if None not in (own := config.get(name), other := second_config.get(name)) and own != other:
            raise CheckpointError(
                f"{name} is {own} in config.json of {folder.path} and {other} in {companion}. Fix one of them."
            )
    whole = {**config, **{name: value for name, value in second_config.items() if value is not None}}
    if companion == "hybrid_config.json":  # latents have other positions than the base
        whole |= {"model_type": ZEBRA, "rope_scaling": second_config.get("rope_scaling"), "rope_parameters": None}
        softmax = whole.get("mla_layers")
    elif companion or kind in IN_LLAMA:
        second = "ngroups" in (whole.get("ssm_cfg") or {}) if companion else kind == IN_LLAMA[1]
        whole["model_type"] = IN_LLAMA[second]
        if not companion:
            whole.setdefault("d_inner", whole.get("hidden_size"))  # as in Qwerky's code
        softmax = whole.get("attn_layers")
    else:
        return whole
    softmax, count = softmax or [], whole.get("num_hidden_layers")
    if not isinstance(softmax, list) or not isinstance(count, int) or not set(softmax) <= set(range(count)):
        raise CheckpointError(
            f"softmax layers {softmax} of {folder.path} are none of its {count}. Fetch the model again."
        )
    whole["layer_types"] = ["full_attention" if layer in softmax else "linear_attention" for layer in range(count)]
    return whole


AHEAD, IMAGES = "layers that guess tokens ahead", "images"
NOT_LANGUAGE = {
    "mtp.": AHEAD,
    "backbone.mtp.": AHEAD,
    "model.visual.": IMAGES,
    "model.vision_tower.": IMAGES,
    "model.multi_modal_projector.": IMAGES,
    "vision_tower.": IMAGES,
    "multi_modal_projector.": IMAGES,
}
"""Prefixes of tensor names outside the language model, with their purpose. transformers skips them as well."""
AHEAD_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Configuration fields with the number of last layers that guess tokens ahead."""
