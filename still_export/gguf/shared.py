"""Shared by architectures: keys, tensor names, sizes, rotary positions."""

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
"""Tensors outside of layers by GGUF's and transformers' names, without `.weight`; {} is an expert's number."""
MINUS_ONE = Edit(value=lambda norm: norm - 1)
"""For norms with weights to which transformers adds 1."""
LOG = Edit(value=lambda a: (-a).log().flatten())
"""A_log, from the file's -exp(A_log)."""
FLAT = Edit(value=lambda values: values.flatten())
CONVOLUTION = Edit(value=lambda taps: taps.reshape(-1, 1, taps.shape[-1]))


_UNTIED = ("kimi-linear", "rwkv6", "rwkv6qwen2", "rwkv7", "olmo2")
"""Architectures whose head is never tied: a file without one is incomplete."""


class View:
    """A file as its architecture reads it."""

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
            if match := BLOCK.fullmatch(name):
                if int(match[1]) >= blocks:
                    raise CheckpointError(f"{file.path} has {name}, beyond its {blocks} blocks. It is damaged.")
                self._parts[int(match[1])].add(match[2].removesuffix(".weight"))

    def has(self, part: str, layer: int) -> bool:
        """Whether a layer has a tensor, named without `.weight`."""
        return part in self._parts[layer]

    def layers_with(self, part: str) -> list[int]:
        """Layers of the model itself that have a tensor."""
        return [layer for layer in range(self.layers) if self.has(part, layer)]

    def kinds(self, **parts: str) -> list[str]:
        """The kind of each layer: the first of `parts` whose tensor it has.

        Raises:
            CheckpointError: A layer has none.
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
        """Shape of a tensor in PyTorch's order, in the first layer that has it.

        Raises:
            CheckpointError: None has.
        """
        names = [part, f"{part}.weight"]
        names += [f"blk.{layer}.{name}" for layer in self.layers_with(part.removesuffix(".weight")) for name in names]
        for name in names:
            if (tensor := self.file.tensors.get(name)) is not None:
                return tuple(int(size) for size in reversed(tensor.shape))
        raise CheckpointError(f"{self.file.path} lacks the tensor {part}. It is incomplete; fetch it again.")

    @cached_property
    def parts(self) -> set[str]:
        """Names of tensors in any layer."""
        return set().union(*self._parts)

    @cached_property
    def tied(self) -> bool:
        """Whether the head is tied to the embedding; for most architectures llama.cpp ties files without output.weight."""
        return "output.weight" not in self.file.tensors and self.file.architecture not in _UNTIED

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for a variant that this reader does not map."""
        return UnsupportedModelError(
            f"{self.file.path} has {what}; {self.file.architecture} files with it are not read. "
            "Use the model's Hugging Face folder if its family covers it."
        )


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture become a model of transformers.

    Args:
        config: From a file to config.json, `model_type` included.
        parts: Names of a layer's tensors by GGUF's, `.weight` left out on both sides.
        whole: Of those beside the layers.
        edits: From a file and its config to the edits of tensors, by transformers' name, with its layer or for all without.
        joined: Tensors that are rows of several, by transformers' name; a layer that has none of them lacks it.
        biases: Groups of projections of which all have a bias where one has: those that the file lacks are zero.
        skipped: Tensors that nothing reads, as a pattern.
        split: Tensors that are several, one below the other, by GGUF's name: transformers' names of them.
        stem: How names of a layer's tensors begin, before its number.
        others: By model_type, the names of another family whose files have this architecture too.
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
        """Whether a tensor is never read."""
        return bool(self.skipped and re.fullmatch(self.skipped, name))


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
    """Heads of softmax layers. A file may have 0 for layers without, or for all; then tensor shapes decide.

    Args:
        channels: Of the query projection, for each channel of a head: 2 where an output gate lies in it.
    """
    counts = {}
    for name in ("head_count", "head_count_kv"):
        given = view.keys(f"attention.{name}", 0)
        found = {int(count) for count in (given if isinstance(given, list) else [given]) if count}
        if len(found) > 1:
            raise UnsupportedModelError(
                f"{view.file.path} has another head count in each layer ({name}); one for all layers is covered."
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


def feed_forward(view: View, name: str = "feed_forward_length") -> int:
    """Channels of a feed-forward layer; of per-layer values the nonzero one."""
    given = view.keys(name, 0)
    found = {int(size) for size in (given if isinstance(given, list) else [given]) if size}
    if len(found) > 1:
        raise view.refuse(f"feed-forward layers of different widths ({name})")
    return found.pop() if found else 0


def experts(view: View) -> Config:
    """Fields of routed experts in most configurations."""
    return {
        "num_experts": view.keys.whole("expert_count"),
        "num_experts_per_tok": view.keys.whole("expert_used_count"),
        "moe_intermediate_size": feed_forward(view, "expert_feed_forward_length") or view.shape("ffn_down_exps")[-1],
    }


def rope(view: View, size: int) -> Config:
    """Rotary positions of heads with `size` channels, as `rope_parameters`.

    llama.cpp takes a factor without a type for linear scaling, under an old key too.

    Raises:
        UnsupportedModelError: A kind of scaling that is not mapped.
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
    keys("rope.scaling.finetuned", None)  # whether the model was trained further after scaling
    if kind == "linear" and factor != 1:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context or None}
        for ours in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{ours}" in keys:
                found[ours] = keys.number(f"rope.scaling.yarn_{ours}")
    elif kind not in ("none", "linear", ""):
        raise view.refuse(f"rope scaling {kind!r}")
    if "rope_freqs.weight" in view.file.tensors:
        found |= _of_table(view, found, rotated)
    return found


def _of_table(view: View, found: Config, rotated: int) -> Config:
    """Llama 3's scaling from a file's table of frequency divisors: the factor is the largest; other values are those of all published
    models, and
    must give the same table."""
    tensor = view.file.tensors["rope_freqs.weight"]
    table = np.asarray(undone(tensor.data, tensor.tensor_type, "rope_freqs.weight"), np.float32).reshape(rotated // 2)
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
    """Edits of queries and keys whose rotation pairs neighbours in the file and halves in transformers."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return {f"self_attn.{name}_proj": Edit(unpaired(count * size, count)) for name, count in counts.items()}
