"""Families by transformers' model_type: those that are read, those that are refused and why, and tensors of other things than the model."""

from __future__ import annotations

from pathlib import Path

from still_export.errors import UnsupportedModelError

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
        "gla",
    ),
    *("rwkv5", "rwkv6", "rwkv7", "rwkv6qwen2", "rwkv7qwen2", "rwkv7qwen3"),
    *("hgrn2", "hgrn", "retnet", "delta_net", "gated_deltanet", "transnormer", "minicpm_sala", "mamba3"),
)
"""Families whose layers are linear, but those of systems; they are exported as they are."""
TEXT_OF = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "gemma3": "gemma3_text",
}
"""Models of text and images, and the model_type of their language model."""
_SHARED = "its Mamba layers have a family of their own, which has no mixer here yet"
_SPARSE = "its softmax layers select keys"
_CONVOLVED = "what its softmax layers attend to goes through convolutions, which no mixer here has"
_UNBOUNDED = "RWKV-4 weights tokens by exponentials of keys without a bound, which no op here does"
_IN_LLAMA = "Mamba-in-Llama's layers have no family here yet"
_HXA = "its RWKV-7 in a Qwen mixes keys with the first layer's, or channels of the token before, which no family here does yet"
_ZEBRA = "Zebra-Llama's layers of Mamba-2 and latent attention have no family here yet"
NOT_COVERED = {
    **dict.fromkeys(("zamba", "samba"), _SHARED),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "glm5_next", "glm5_next_text", "deepseek_v32", "nsa"), _SPARSE),
    **dict.fromkeys(("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text"), _CONVOLVED),
    "zaya": _CONVOLVED,
    "nemotron_h_omni": "of Nemotron-H models that see and hear the language model alone is (nemotron_h)",
    "rwkv": _UNBOUNDED,
    **dict.fromkeys(("ttt", "titans"), "its memory is trained token by token (TTT), which no rule of the op does"),
    "xlstm": "xLSTM's exponential gate needs a running maximum as a state",
    "recurrent_gemma": "RG-LRU has no mixer here yet",
    "lara_mini": "transformers has it from 5.24 on: pip install 'transformers>=5.24'",
    "hypenet": "its layers, Lightning attention beside softmax without positions, have no family here yet",
    **dict.fromkeys(("mambainllama_mamba", "mambainllama_mamba2"), _IN_LLAMA),
    **dict.fromkeys(("rwkv079qwen3", "rwkv07aqwen3", "rwkv_hybrid"), _HXA),
    **dict.fromkeys(("plamo2", "plamo3"), "PLaMo's layers have no family here yet"),
    "zamba2": "its softmax blocks are shared between layers",
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"), "its softmax has a learned logit of each head beside the keys (a sink)"
    ),
}
"""Linear families that are refused, and why."""
NEWER = ("lara_mini",)
"""Those of them that are read where transformers is new enough, which its classes say."""
_BESIDE = {"mamba_config.json": _IN_LLAMA, "hybrid_config.json": _ZEBRA}
"""Files beside a config.json that names the softmax model which was linearized."""


def demand_softmax_folder(folder: Path) -> None:
    """Raise UnsupportedModelError where others linearized the model that config.json names, and say so in another file."""
    for name, why in _BESIDE.items():
        if (folder / name).is_file():
            raise UnsupportedModelError(
                f"{folder} was linearized: it has {name}, and {why}. Take the base model, and linearize it here: "
                "still-export linearize BASE -o STILL"
            )


AHEAD, IMAGES = "layers that guess tokens ahead", "images"
ELSEWHERE = {
    "mtp.": AHEAD,
    "backbone.mtp.": AHEAD,
    "model.visual.": IMAGES,
    "model.vision_tower.": IMAGES,
    "model.multi_modal_projector.": IMAGES,
    "vision_tower.": IMAGES,
    "multi_modal_projector.": IMAGES,
}
"""Beginnings of the names of tensors of other things than the language model, and what they are for. transformers leaves them out, too."""
AHEAD_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields of configurations whose last layers guess tokens ahead."""
