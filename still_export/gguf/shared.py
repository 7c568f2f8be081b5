"""Common to architectures: reading a file, names of tensors, sizes, rotary positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.gguf.container import Container, Keys
from still_export.gguf.edits import Edit, unpaired
from still_export.gguf.types import undone

BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
Config = dict[str, Any]

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors by GGUF's name and by transformers', without `.weight`; {} is the number of an expert."""
MINUS_ONE = Edit(value=lambda norm: norm - 1)
"""transformers adds 1 to the weights of these norms."""
LOG = Edit(value=lambda a: (-a).log().flatten())
"""A_log; the file stores -exp(A_log)."""
FLAT = Edit(value=lambda values: values.flatten())
CONVOLUTION = Edit(value=lambda taps: taps.reshape(-1, 1, taps.shape[-1]))


_UNTIED = ("kimi-linear", "rwkv6", "rwkv6qwen2", "rwkv7", "olmo2")
"""Architectures with an untied head; a file without one is incomplete."""


ENCODERS, GUESSES = "encoders of images and sounds", "heads that guess tokens ahead"
_NOT_LANGUAGE = {r"(v|a|mm)\..+": ENCODERS, r"mtp\..+": GUESSES, r".+\.(input_)?scale": "scales"}
"""Patterns of tensors outside the language model: encoders of images and sounds, heads that guess tokens ahead in the form of Ollama's
converter, and scales of low-bit weights, which are read with their weight (`Container.scale`)."""


def what_of(name: str) -> str | None:
    """What a tensor outside the language model is for; None: it belongs to the model."""
    return next((what for pattern, what in _NOT_LANGUAGE.items() if re.fullmatch(pattern, name)), None)


class View:
    """A file, read by its architecture."""

    def __init__(self, file: Container) -> None:
        self.file, self.keys = file, Keys(file, file.architecture)
        self.hidden = self.keys.whole("embedding_length")
        self.ahead = self.keys.whole("nextn_predict_layers", 0)
        blocks = self.keys.whole("block_count")
        self.layers = blocks - self.ahead
        if not 0 < self.layers <= 1 << 12 or self.ahead < 0:
            raise CheckpointError(
                f"{file.path} has block_count={blocks} and nextn_predict_layers={self.ahead}. It is damaged; fetch it again."
            )
        self._parts: list[set[str]] = [set() for _ in range(blocks)]
        for name in file.tensors:
            if (match := BLOCK.fullmatch(name)) and what_of(name) is None:
                if int(match[1]) >= blocks:
                    raise CheckpointError(f"{file.path} has {name}, beyond its {blocks} blocks. It is damaged.")
                self._parts[int(match[1])].add(match[2].removesuffix(".weight"))

    def has(self, part: str, layer: int) -> bool:
        """Whether a layer has a tensor, named without `.weight`."""
        return part in self._parts[layer]

    def layers_with(self, part: str) -> list[int]:
        """The model's own layers that have a tensor."""
        return [layer for layer in range(self.layers) if self.has(part, layer)]

    def kinds(self, **parts: str) -> list[str]:
        """The kind of each layer: the first of `parts` with a tensor in it.

        Raises:
            CheckpointError: A layer has no such tensor.
        """
        found = []
        for layer in range(self.layers):
            kind = next((kind for kind, part in parts.items() if self.has(part, layer)), None)
            if kind is None:
                raise CheckpointError(
                    f"block {layer} of {self.file.path} has none of {', '.join(parts.values())}. It is incomplete; fetch it again."
                )
            found.append(kind)
        return found

    def shape(self, part: str) -> tuple[int, ...]:
        """Shape of a tensor in PyTorch's order, from the first layer that has it.

        Raises:
            CheckpointError: No layer has it.
        """
        names = [part, f"{part}.weight"]
        names += [f"blk.{layer}.{name}" for layer in self.layers_with(part.removesuffix(".weight")) for name in names]
        for name in names:
            if (tensor := self.file.tensors.get(name)) is not None:
                return tuple(int(size) for size in reversed(tensor.shape))
        raise CheckpointError(f"{self.file.path} lacks the tensor {part}. It is incomplete; fetch it again.")

    @cached_property
    def parts(self) -> set[str]:
        """Tensors of any layer."""
        return set().union(*self._parts)

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding, as in llama.cpp for files without output.weight, except some architectures."""
        return "output.weight" not in self.file.tensors and self.file.architecture not in _UNTIED

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for an unsupported variant."""
        return UnsupportedModelError(
            f"{self.file.path} has {what}; {self.file.architecture} files with it are not supported. "
            "Use the model's Hugging Face folder if its family covers it."
        )


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture map to a model of transformers.

    Args:
        config: Maps a file to config.json, with `model_type`.
        parts: Names of a layer's tensors by GGUF's, both without `.weight`.
        whole: Names of the tensors outside layers.
        edits: Maps a file and its config to edits of tensors, by transformers' name with a layer, or without for all layers.
        joined: Tensors made of the rows of several, by transformers' name; layers without these do not have it.
        biases: Groups of projections that all have a bias if one has; missing ones are zero.
        skipped: Pattern of tensors that are not read.
        split: Tensors that contain several, row blocks in order, by GGUF's name: transformers' names.
        stem: Prefix of layer tensors, before the layer number.
        others: Architectures of other families with the same GGUF architecture, by model_type.
    """

    config: Callable[[View], Config]
    parts: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    edits: Callable[[View, Config], Mapping[str, Edit]] = lambda view, config: {}
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    biases: tuple[tuple[str, ...], ...] = ()
    skipped: str = ""
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stem: str = "model.layers."
    others: Mapping[str, Architecture] = field(default_factory=dict)

    def skips(self, name: str) -> bool:
        """Whether a tensor is no weight of the language model that is read."""
        return what_of(name) is not None or bool(self.skipped and re.fullmatch(self.skipped, name))


def common(view: View, model_type: str) -> Config:
    """Fields of every config.json."""
    rows = view.shape("token_embd")[0]
    stated = view.keys.whole("vocab_size", rows)
    if stated > rows and not view.file.value("tokenizer.ggml.tokens", []):
        raise view.refuse(f"vocab_size={stated} and embeddings of {rows} tokens")
    return {
        "model_type": model_type,
        "hidden_size": view.hidden,
        "num_hidden_layers": view.layers,
        "vocab_size": rows,
        "tie_word_embeddings": view.tied,
        "max_position_embeddings": view.keys.whole("context_length"),
    }


def epsilon(view: View) -> float:
    name = "attention.layer_norm_rms_epsilon"
    return view.keys.number(name if name in view.keys else "attention.layer_norm_epsilon")


def heads(view: View, channels: int = 1) -> Config:
    """Heads of softmax layers. Files may have 0 for layers without heads, or for all; then the tensors' sizes are used.

    Args:
        channels: Query projection channels per head channel; 2 with an output gate.
    """
    counts = {}
    for name in ("head_count", "head_count_kv"):
        value = view.keys(f"attention.{name}", 0)
        found = {int(count) for count in (value if isinstance(value, list) else [value]) if count}
        if len(found) > 1:
            raise UnsupportedModelError(
                f"{view.file.path} has another head count in each layer ({name}); only one for all layers is supported."
            )
        counts[name] = found.pop() if found else 0
    query = counts["head_count"]
    size = view.keys.whole("attention.key_length", 0) or (view.hidden // query if query else 0)
    if not size:
        raise view.refuse("neither attention.key_length nor attention.head_count")
    if view.keys.whole("attention.value_length", size) != size:
        raise view.refuse(f"attention.value_length={view.keys('attention.value_length')} beside keys of {size}")
    query = query or view.shape("attn_q")[0] // (channels * size)
    fused = not view.layers_with("attn_k")
    key = counts["head_count_kv"] or (query if fused else view.shape("attn_k")[0] // size)
    return {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": size}


def shared_size(view: View, sizes: Config) -> int:
    """Remove the head size from `sizes`, for families without a field for it in config.json."""
    size = int(sizes.pop("head_dim"))
    if size != view.hidden // sizes["num_attention_heads"]:
        raise view.refuse(f"{sizes['num_attention_heads']} heads of {size} channels for {view.hidden}")
    return size


def feed_forward(view: View, name: str = "feed_forward_length") -> int:
    """Channels of a feed-forward layer; of one value per layer, the one that is not 0."""
    value = view.keys(name, 0)
    found = {int(size) for size in (value if isinstance(value, list) else [value]) if size}
    if len(found) > 1:
        raise view.refuse(f"feed-forward layers of different widths ({name})")
    return found.pop() if found else 0


def experts(view: View) -> Config:
    """Routed experts, in the fields of most configurations."""
    return {
        "num_experts": view.keys.whole("expert_count"),
        "num_experts_per_tok": view.keys.whole("expert_used_count"),
        "moe_intermediate_size": feed_forward(view, "expert_feed_forward_length") or view.shape("ffn_down_exps")[-1],
    }


def routing(view: View, normed: bool = True) -> Config:
    """Routers by sigmoids, the only ones that these families have."""
    if (gating := view.keys("expert_gating_func", 2)) != 2:
        raise view.refuse(f"expert_gating_func={gating}")
    return {
        "norm_topk_prob": bool(view.keys("expert_weights_norm", normed)),
        "routed_scaling_factor": view.keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def groups(view: View) -> Config:
    """Numbers of expert groups: in all, and chosen by the router."""
    names = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {name: view.keys.whole(key, 1) or 1 for name, key in names.items()}


def rope(view: View, size: int) -> Config:
    """Rotary positions of heads with `size` channels, as `rope_parameters`.

    As in llama.cpp, a factor without a type, or under an old key, means linear scaling, and YaRN's context is the model's by default.

    Raises:
        CheckpointError: The table of frequencies has another size.
        UnsupportedModelError: The kind of scaling is not supported.
    """
    keys = view.keys
    found: Config = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base", 10000.0))}
    rotated = keys.whole("rope.dimension_count", size)
    if not 0 < rotated <= size:
        raise view.refuse(f"rope.dimension_count={rotated} for heads of {size} channels")
    if rotated != size:
        found["partial_rotary_factor"] = rotated / size
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0) or 1.0
    kind = str(keys("rope.scaling.type", "linear" if factor != 1 else "none"))
    context = keys.whole("rope.scaling.original_context_length", 0)
    keys("rope.scaling.finetuned", None)  # whether training continued after scaling
    if kind == "linear" and factor != 1:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        context = context or keys.whole("context_length")
        found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in keys:
                found[name] = keys.number(f"rope.scaling.yarn_{name}")
    elif kind not in ("none", "linear", ""):
        raise view.refuse(f"rope scaling {kind!r}")
    if "rope_freqs.weight" in view.file.tensors:
        found |= _of_table(view, found, rotated)
    return found


def _of_table(view: View, found: Config, rotated: int) -> Config:
    """Llama 3's scaling. A file has its divisors of frequencies: the factor is the largest, and the other parameters of all published
    models must produce the same table."""
    tensor = view.file.tensors["rope_freqs.weight"]
    table = np.asarray(undone(tensor.data, tensor.tensor_type, "rope_freqs.weight"), np.float32).flatten()
    if len(table) != rotated // 2:
        raise CheckpointError(
            f"{view.file.path} has {len(table)} rotary frequencies (rope_freqs.weight) for {rotated} rotated channels, which need "
            f"{rotated // 2}. It is damaged; fetch it again."
        )
    factor, low, high, context = round(float(table.max()), 4), 1.0, 4.0, 8192
    turns = context / (2 * np.pi) * found["rope_theta"] ** -(np.arange(0, rotated, 2) / rotated)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found["rope_type"] != "default" or not np.allclose(table, expected, rtol=1e-4):
        raise view.refuse("a table of rotary frequencies (rope_freqs.weight) that is not Llama 3's")
    if (table == 1).all():
        return {}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def rotation(view: View, config: Config) -> dict[str, Edit]:
    """Edits of queries and keys that rotate neighbours in the file and halves in transformers."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return {f"self_attn.{name}_proj": Edit(unpaired(count * size, count)) for name, count in counts.items()}
