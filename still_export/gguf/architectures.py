"""Architectures of GGUF files by name: how keys map to config.json, and tensors to the family's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.gguf.container import Container, open_gguf
from still_export.gguf.hybrids import HYBRIDS
from still_export.gguf.mamba import MAMBA
from still_export.gguf.rwkv import RWKV
from still_export.gguf.shared import BLOCK, Architecture, Config, View
from still_export.gguf.softmax import SOFTMAX

_ENDS = ("eos", "eot", "eom")
_TURNS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *(
        "<EOT>",
        "[EOT]",
        "<|eom|>",
        "<end_of_utterance>",
        "<|return|>",
        "<turn|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    *("<|turn_end|>", "<|end_of_turn|>", "<|message_end|>", "[e~[", "</s>"),
)
"""End-of-answer tokens of published chat templates."""


def token_ids(file: Container, vocabulary: int) -> dict[str, Any]:
    """Fields of config.json: bos, pad, and all tokens that end an answer. As in llama.cpp, the end-of-turn token in the chat template
    counts as one, whatever the keys state.

    Raises:
        CheckpointError: A token lies outside the vocabulary.
    """
    found = {}
    for name in (*_ENDS, "bos", "padding"):
        token = file.token(name)
        if token is not None and not 0 <= token < vocabulary:
            raise CheckpointError(
                f"{file.path} has {name}_token_id={token}, outside of its vocabulary of {vocabulary} tokens. It is damaged."
            )
        found[name] = token
    end_ids = [token for token in (*(found[name] for name in _ENDS), *turn_ends(file)) if token is not None]
    ends = list(dict.fromkeys(end_ids))
    return {
        "bos_token_id": found["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": found["padding"],
    }


def turn_ends(file: Container) -> list[int]:
    """Known end-of-turn tokens that occur in the chat template."""
    template = str(file.value("tokenizer.chat_template", ""))
    used = [name for name in _TURNS if name in template]
    tokens = file.value("tokenizer.ggml.tokens", []) if used else []
    return [tokens.index(name) for name in used if name in tokens]


ARCHITECTURES: dict[str, Architecture] = {**SOFTMAX, **HYBRIDS, **MAMBA, **RWKV}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "final_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "use_parallel_residual": (False,),
    "ssm.dt_b_c_rms": (False,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "token_shift_count": (2,),
    "tensor_data_layout": ("reference", "Meta AI original pth"),
}
"""Values of keys that have no effect on architectures without the feature."""
ROPE_TABLE = "rope_freqs.weight"
"""The tensor's numbers are part of the configuration."""


def find_architecture(path: Path, name: str) -> Architecture:
    """The architecture called `name` in the file `path`.

    Raises:
        UnsupportedModelError: It is not supported.
    """
    if (found := ARCHITECTURES.get(name)) is None:
        raise UnsupportedModelError(
            f"{path} has architecture {name!r}; supported GGUF architectures: {', '.join(ARCHITECTURES)}. "
            "Use the model's Hugging Face folder if its family is covered, or another program, such as llama.cpp."
        )
    return found


def read_config(path: Path) -> tuple[View, Architecture, Config]:
    """Returns (file, architecture, values of config.json including `model_type`).

    Raises:
        CheckpointError: The file is damaged.
        UnsupportedModelError: Its architecture, or a key that changes numbers, is not supported.
    """
    file = open_gguf(path)
    architecture = find_architecture(path, file.architecture)
    view = View(file)
    config = architecture.config(view)
    _refuse_unread(view)
    config |= token_ids(file, config["vocab_size"])
    return view, architecture.others.get(config["model_type"], architecture), config


_NOT_TEXT = re.compile(
    r"(vision|audio|clip|mm|projector)\..+|(.+_)?(image|video|audio|vision)(_\w+)?_token_id|(rope\.)?mrope_\w+|rope\.dimension_sections"
)
"""Keys of encoders of images and sounds, of their tokens, and of their positions, as Ollama's converter writes them: text has one number
for each token."""


def _refuse_unread(view: View) -> None:
    for name, value in view.keys.unread():
        if _NOT_TEXT.fullmatch(name):
            continue
        neutral = _NEUTRAL.get(name, ())
        values = value if isinstance(value, list) else [value]
        if not all(any(one == known for known in neutral) for one in values):
            raise view.refuse(f"{view.keys.prefix}{name}={str(value)[:60]}, a key that may change numbers")


def place(view: View, name: str, stem: str) -> tuple[str, str]:
    """Returns (prefix, name after it without `.weight`); the prefix is `stem` with a layer number, or "". Layers that guess tokens ahead
    come last."""
    match = BLOCK.fullmatch(name)
    if match is None:
        return "", name.removesuffix(".weight")
    layer = int(match[1])
    part = match[2].removesuffix(".weight")
    if layer < view.layers:
        return f"{stem}{layer}.", part
    return f"mtp.layers.{layer - view.layers}.", part


def target_of(view: View, architecture: Architecture, prefix: str, part: str, name: str) -> str:
    """transformers' name of a tensor, without layer and `.weight`.

    Raises:
        UnsupportedModelError: There is none.
    """
    table = architecture.parts if prefix else architecture.whole
    if (target := table.get(part)) is not None:
        return target
    if prefix.startswith("mtp."):  # layers that guess tokens ahead, skipped if the family does not support them
        return part
    base = part.removesuffix(".bias")
    if base != part and base in table and _takes_bias(architecture, base):
        return table[base]
    raise view.refuse(f"the tensor {name}, which has no place in the family")


def _takes_bias(architecture: Architecture, part: str) -> bool:
    """Whether a projection may have a bias; outside of groups, whether the family's class has one."""
    grouped = {name for group in architecture.biases for name in group}
    return part in grouped or not (grouped and part.startswith(("attn_", "ffn_")))
