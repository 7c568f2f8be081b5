"""Qwen2.5 and Qwen3 converted by RADLADS: RWKV-6 or RWKV-7 instead of softmax, in all layers or some (QRWKV, Qwerky).

Source: RADLADS, arXiv:2505.03005. Forms share a model_type; fields of config.json distinguish them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import Place, stack_family
from still_export.models.families.rwkv6 import turned
from still_export.models.families.rwkv7 import low_rank
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied, demand_covered, rope_of
from still_export.models.read.weights import Weight

LINEAR = "linear_attention"
NAMES = ("rwkv6qwen2", "rwkv7qwen2", "rwkv7qwen3")
UNUSED = "RWKV-7 that its published code does not read"
_GATES = ("none", "full", "low_rank")
SHARES = "rkvwg"
"""Vectors that RWKV-6 mixes with the previous token's, in the order of the file."""
_PARAMETER = re.compile(r"(model\.layers\.(\d{1,6})\.self_attn)\.(\w+)")
_LOW_RANK = re.compile(r"([wavg])([12])")


@strict
class RadladsConfig(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        seven: RWKV-7's rule, else RWKV-6's.
        token_shift: Projections also read the previous token.
        balanced: Keys are scaled by 1 - decay, in RWKV-7 by 1 - decay + rate.
        key_scales: Keys have learned scales (k_k, k_a).
        bonus: A token reads its own value through a separate key (r_k).
        head_norm: The output of each head is normalized.
        gate: Output gate: none, full or low_rank.
        ranks: Ranks of decay, rate, share of the first layer's values, gate, and token shift.
        use_rope: Queries and keys are rotated by their positions.
        qk_norm: Queries and keys are normalized.
    """

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    seven: bool = True
    token_shift: bool = False
    balanced: bool = True
    key_scales: bool = False
    bonus: bool = False
    head_norm: bool = False
    gate: str = "low_rank"
    ranks: list[int] | None = None
    use_rope: bool = False
    rope_parameters: dict[str, Any] | None = None
    qk_norm: bool = False
    attention_bias: bool = True
    output_bias: bool = False
    hidden_act: str = "silu"
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-6


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, width, heads = str(config["model_type"]), int(config["hidden_size"]), int(config["num_attention_heads"])
    seven, newer = kind != "rwkv6qwen2", kind == "rwkv7qwen3"
    first = kind == "rwkv7qwen2" and not {"use_rope", "balance_state"} & set(config)
    _demand_form(kind, config, first)
    if width % heads:
        raise ConfigError(
            f"hidden_size={width} in config.json is no multiple of num_attention_heads={heads}. Fix one of them."
        )
    layers, rope = int(config["num_hidden_layers"]), bool(config.get("use_rope", False))
    kinds = [FULL if _is_softmax(config, layer, layers) else LINEAR for layer in range(layers)]
    if FULL in kinds and (not rope or kinds[0] == FULL):
        raise UnsupportedModelError(
            f"num_attention_layers={config['num_attention_layers']} in config.json of an {kind} model: softmax layers are read where "
            "use_rope is true and the first layer is none of them, as its published code can run them."
        )
    balanced, bias = bool(config.get("balance_state", not first)), bool(config.get("attention_bias", True))
    wide = 1 + (width >= 4096)
    ranks = [
        int(config.get("lora_rank_decay") or (_rank(width, 0.5, 1.8) if seven else 64 * wide)),
        int(config.get("lora_rank_iclr") or _rank(width, 0.5, 1.8)),
        int(config.get("lora_rank_value_residual_mix") or _rank(width, 0.5, 1.3)),
        int(config.get("lora_rank_gate") or _rank(width, 0.8, 0.6)),
        int(config.get("lora_rank_tokenshift") or 32 * wide),
    ]
    context = ("max_position_embeddings",) if rope else ()
    return {
        "bos_token_id": None,
        "eos_token_id": None,
        **copied(config, "intermediate_size", "rms_norm_eps", "initializer_range", *context),
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or width // heads),
        "seven": seven,
        "token_shift": first or (not seven and bool(config.get("use_tokenshift", True))),
        "balanced": balanced,
        "key_scales": kind == "rwkv7qwen2" and not balanced,
        "bonus": first,
        "head_norm": bool(config.get("groupnorm_att", kind == "rwkv7qwen2")),
        "gate": _GATES[config.get("gate_rank_type", 2 if seven else 1)],
        "ranks": ranks,
        "use_rope": rope,
        "rope_parameters": rope_of(config) if rope else None,
        "qk_norm": newer,
        "attention_bias": bias,
        "output_bias": bias if newer else bool(config.get("attention_output_bias", False)),
        "layer_types": kinds,
    }


def _demand_form(kind: str, config: Mapping[str, Any], first: bool) -> None:
    """Raise UnsupportedModelError for settings that no published code of this form reads, or that leave the form ambiguous."""
    if kind == "rwkv7qwen2" and not first and "balance_state" not in config:
        raise UnsupportedModelError(
            "config.json of an rwkv7qwen2 model has use_rope and no balance_state: a form between the first one and the released one, "
            "whose keys its files do not tell. Where modeling_rwkv7qwen2.py in the folder is the released one, add balance_state to "
            "config.json."
        )
    no = (False, None)
    covered: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "gate_rank_type": (1, 2) if kind == "rwkv7qwen2" else (0, 1, 2),
        **dict.fromkeys(("use_sliding_window", "use_k_first", "use_bonus", "v_first_pre_gqa"), no),
        **dict.fromkeys(("first_attention_layer", "first_post_attention_layer"), (None,)),
    }
    if kind == "rwkv6qwen2":
        covered["num_attention_layers"] = (0, None)
    else:
        covered["use_tokenshift"] = no
    if first:
        covered |= {"groupnorm_att": (True,), "gate_rank_type": (2,), "num_attention_layers": (0, None)}
    demand_covered(f"an {kind}", config, covered)


def _is_softmax(config: Mapping[str, Any], layer: int, layers: int) -> bool:
    """Whether a layer is softmax: one of the last `num_attention_layers`, and up to last_striping_layer one in `attention_striping`."""
    stripe, last = int(config.get("attention_striping") or 1), int(config.get("last_striping_layer", 99999))
    if layer < layers - int(config.get("num_attention_layers") or 0):
        return False
    return layer > min(layers, last) or (min(layers - 1, last) - layer) % stripe == 0


def _rank(width: int, power: float, factor: float) -> int:
    """Default rank: a multiple of 32 near factor * width ** power."""
    return 32 * max(1, round(width**power * factor / 32))


def unused(name: str, config: Mapping[str, Any]) -> str:
    """See `Published`: some forms of RWKV-7 do not use all parameters in their files."""
    match = _PARAMETER.fullmatch(name)
    if match is None or not config["seven"]:
        return ""
    absent = {"r_k": not config["bonus"], **dict.fromkeys(("k_k", "k_a"), not config["key_scales"])}
    absent |= dict.fromkeys(("v0", "v1", "v2"), match[2] == "0")
    return UNUSED if absent.get(match[3]) else ""


def moved(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Transpose low-rank matrices [in, out] to linear layers, and rename RWKV-6's parameters to RWKV-7's names."""
    shifts = {"time_maa_x": "x_all", **{f"time_maa_{x}": f"x_{x}" for x in SHARES}}
    plain = {**shifts, "time_decay": "w0"}
    products = {"time_decay_w1": "w_lora.0", "time_decay_w2": "w_lora.2", "time_maa_w1": "mix_in"}
    found: dict[str, Weight] = {}
    for name, whole in tensors.items():
        match = _PARAMETER.fullmatch(name)
        start, own = (match[1], match[3]) if match else ("", "")
        if low := _LOW_RANK.fullmatch(own):
            found[f"{start}.{low[1]}_lora.{2 * (int(low[2]) - 1)}.weight"] = turned(whole, whole.shape)
        elif own in products:
            found[f"{start}.{products[own]}.weight"] = turned(whole, whole.shape)
        elif own == "time_maa_w2":
            for number, part in enumerate(SHARES):
                found[f"{start}.mix_{part}.weight"] = turned(whole, whole.shape[1:], number)
        else:
            found[f"{start}.{plain[own]}" if own in plain else name] = whole
    return found


_EPSILON = 1e-5
"""Epsilon of a head's norm, per channel."""


class QwenProjections(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.dim = layer_idx, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, heads = config.hidden_size, config.num_attention_heads * self.dim
        bias, keys = config.attention_bias, config.num_key_value_heads * self.dim
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads, width, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (LlamaRMSNorm(self.dim, config.rms_norm_eps) for _ in range(2))


class RuleWeights(QwenProjections):
    """Weights of both rules besides the projections: decay, gate, output norm."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.balanced = config.balanced
        width, heads = config.hidden_size, config.num_attention_heads * self.dim
        decay, _, _, gate, _ = config.ranks
        self.w0 = nn.Parameter(torch.zeros(1, 1, heads))
        self.w_lora = low_rank(width, decay, nn.Tanh(), bias=False, wide=heads)
        if config.gate == "full":
            self.gate = nn.Linear(width, heads, bias=False)
        elif config.gate == "low_rank":
            self.g_lora = low_rank(width, gate, nn.Sigmoid(), bias=False, wide=heads)
        if config.head_norm:
            self.ln_x = nn.GroupNorm(config.num_attention_heads, heads, eps=self.dim * _EPSILON)

    def vectors(self, size: int, names: Iterable[str]) -> None:
        """Register parameters [1, 1, size]."""
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, size)))


class Rwkv6Attention(RuleWeights):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, shift = config.hidden_size, config.ranks[-1]
        if config.token_shift:
            self.mix_in = nn.Linear(width, len(SHARES) * shift, bias=False)
            self.vectors(width, ["x_all", *(f"x_{name}" for name in SHARES)])
            for name in SHARES:
                self.add_module(f"mix_{name}", nn.Linear(shift, width, bias=False))


class Rwkv7Attention(RuleWeights):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, heads = config.hidden_size, config.num_attention_heads * self.dim
        _, rate, share, _, _ = config.ranks
        self.vectors(heads, ["a0", *(["k_k", "k_a"] if config.key_scales else [])])
        self.a_lora = low_rank(width, rate, nn.Identity(), bias=False, wide=heads)
        if layer_idx:
            self.vectors(heads, ["v0"])
            self.v_lora = low_rank(width, share, nn.Identity(), bias=False, wide=heads)
        if config.token_shift:
            self.vectors(width, [f"x_{name}" for name in "rwkvag"])
        if config.bonus:
            self.r_k = nn.Parameter(torch.zeros(config.num_attention_heads, self.dim))


class RadladsBlock(nn.Module):
    """A Qwen layer. RWKV-7's later layers read the first layer's values, which are appended to the hidden states."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.width = config.hidden_size
        linear = Rwkv7Attention if config.seven else Rwkv6Attention
        self.self_attn: nn.Module = (linear if config.layer_types[index] == LINEAR else QwenProjections)(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """Hidden states [B, T, channels], with RWKV-7 followed by the first layer's values; `cache` is a StillCache or None."""
        hidden, first = hidden[..., : self.width], hidden[..., self.width :]
        mixed, value = self.self_attn(self.input_layernorm(hidden), past_key_values=cache, first=first, **kwargs)
        first = first if first.shape[-1] or value is None else value
        hidden = hidden + mixed
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return torch.cat((hidden, first), dim=-1) if first.shape[-1] else hidden


class LastRMSNorm(LlamaRMSNorm):
    """Normalizes the hidden states and drops the appended values."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed: Tensor = super().forward(hidden_states[..., : self.weight.shape[0]])
        return normed


def _stack(config: Any) -> Stack:
    norm = LastRMSNorm(config.hidden_size, config.rms_norm_eps)
    return Stack(config, RadladsBlock, norm, LlamaRotaryEmbedding(config) if config.use_rope else None)


FAMILIES = tuple(
    stack_family(
        __name__,
        RadladsConfig,
        _stack,
        title=name.title(),
        published=Published(values, moved=moved, unused=unused),
        places={LINEAR: Place("radlads", ("self_attn",)), FULL: Place(FULL, ("self_attn",))},
    )
    for name in NAMES
)
