"""RWKV-6, RWKV-7, and RWKV-6 in a Qwen2.5."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from still_export.gguf.edits import Edit
from still_export.gguf.shared import FLAT, WHOLE, Architecture, Config, View, common, epsilon, feed_forward

if TYPE_CHECKING:
    from torch import Tensor


def _rwkv6(view: View) -> Config:
    """Head norms have the epsilon of the published models, as in llama.cpp."""
    keys = view.keys
    epsilon = keys.number("attention.layer_norm_epsilon", 1e-5)
    keys("attention.head_count", 0), keys("rescale_every_n_layers", 0)
    return {
        **common(view, "rwkv6"),
        "intermediate_size": feed_forward(view),
        "head_size": keys.whole("wkv.head_size"),
        "head_size_divisor": (64e-5 / epsilon) ** 0.5,
        "layer_norm_epsilon": epsilon,
        "time_mix_rank": keys.whole("time_mix_extra_dim"),
        "time_decay_rank": keys.whole("time_decay_extra_dim"),
    }


def _rwkv6_edits(view: View, config: Config) -> dict[str, Edit]:
    """The converter halves each layer's output once more every few layers; llama.cpp halves the hidden states."""
    period = view.keys("rescale_every_n_layers", 0)
    wide, turned = Edit(value=lambda x: x.reshape(1, 1, -1)), Edit(value=lambda x: x.transpose(-1, -2))
    scaled = {
        f"{_RWKV6_STEM}{layer}.{name}": Edit(value=partial(_multiplied, 2.0 ** (layer // period)))
        for layer in range(period, view.layers)
        for name in ("attention.output", "feed_forward.value")
        if period
    }
    return {
        **dict.fromkeys((f"attention.time_maa_{part}" for part in "xwkvrg"), wide),
        **dict.fromkeys(("attention.time_decay", "feed_forward.time_maa_k", "feed_forward.time_maa_r"), wide),
        **dict.fromkeys((f"attention.time_{part}" for part in ("maa_w1", "maa_w2", "decay_w1", "decay_w2")), turned),
        "attention.time_faaaa": Edit(value=lambda x: x.reshape(-1, config["head_size"])),
        **scaled,
    }


def _multiplied(factor: float, value: Tensor) -> Tensor:
    return value * factor


_RWKV6_STEM = "rwkv.blocks."
_RWKV6 = {
    "attn_norm": "ln1",
    "attn_norm_2": "ln2",
    **{f"time_mix_lerp_{part}": f"attention.time_maa_{part}" for part in "xwkvrg"},
    "time_mix_w1": "attention.time_maa_w1",
    "time_mix_w2": "attention.time_maa_w2",
    "time_mix_first": "attention.time_faaaa",
    "time_mix_decay": "attention.time_decay",
    "time_mix_decay_w1": "attention.time_decay_w1",
    "time_mix_decay_w2": "attention.time_decay_w2",
    **{f"time_mix_{part}": f"attention.{part}" for part in ("key", "value", "receptance", "gate", "output")},
    "time_mix_ln": "attention.ln_x",
    **{f"channel_mix_lerp_{part}": f"feed_forward.time_maa_{part}" for part in "kr"},
    **{f"channel_mix_{part}": f"feed_forward.{part}" for part in ("key", "receptance", "value")},
}
_RWKV6_WHOLE = {
    "token_embd": "rwkv.embeddings",
    "token_embd_norm": f"{_RWKV6_STEM}0.pre_ln",
    "output_norm": "rwkv.ln_out",
    "output": "head",
}


def _rwkv7(view: View) -> Config:
    keys = view.keys
    ranks = {"decay": "decay", "gate": "gate", "a": "iclr", "v": "value_residual_mix"}
    keys("attention.head_count", 0)
    return {
        **common(view, "rwkv7"),
        "intermediate_size": feed_forward(view),
        "head_dim": keys.whole("wkv.head_size"),
        "norm_eps": keys.number("attention.layer_norm_epsilon"),
        "norm_bias": "attn_norm.bias" in view.parts,
        "norm_first": "token_embd_norm.weight" in view.file.tensors,
        "hidden_act": "sqrelu",
        "fuse_norm": False,  # keys of length 1 without epsilon under the root, as in llama.cpp and the published definition
        **{f"{name}_low_rank_dim": keys.whole(f"attention.{key}_lora_rank") for name, key in ranks.items()},
    }


def _rwkv7_edits(view: View, config: Config) -> dict[str, Edit]:
    return {
        "attn.x_x": Edit(value=lambda lerp: lerp.reshape(6, -1)),
        **dict.fromkeys(("attn.k_k", "attn.k_a", "ffn.x_k"), FLAT),
        "attn.r_k": Edit(value=lambda r: r.reshape(-1, config["head_dim"])),
    }


_RWKV7 = {
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_lerp_fused": "attn.x_x",
    **{f"time_mix_{part}0": f"attn.{part}_lora.lora.2.bias" for part in "wav"},
    **{f"time_mix_{part}1": f"attn.{part}_lora.lora.0" for part in "wavg"},
    **{f"time_mix_{part}2": f"attn.{part}_lora.lora.2" for part in "wavg"},
    **{f"time_mix_{part}": f"attn.{part}" for part in ("k_k", "k_a", "r_k")},
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_receptance": "attn.r_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
    "channel_mix_lerp_k": "ffn.x_k",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
}


def _qwen(view: View) -> Config:
    """RADLADS' model; the tensors show which parts it has."""
    keys, size = view.keys, view.keys.whole("wkv.head_size")
    keys("attention.head_count", 0)
    if (shifted := keys.whole("token_shift_count", 1)) != 1:
        raise view.refuse(f"token_shift_count={shifted}")
    if not size or view.hidden % size:
        raise view.refuse(f"wkv.head_size={size} for {view.hidden} channels")
    return {
        **common(view, "rwkv6qwen2"),
        "intermediate_size": feed_forward(view),
        "rms_norm_eps": epsilon(view),
        "num_attention_heads": view.hidden // size,
        "num_key_value_heads": keys.whole("attention.head_count_kv"),
        "lora_rank_tokenshift": keys.whole("time_mix_extra_dim"),
        "lora_rank_decay": keys.whole("time_decay_extra_dim"),
        "attention_bias": "time_mix_receptance.bias" in view.parts,
        "attention_output_bias": "time_mix_output.bias" in view.parts,
        "use_tokenshift": "time_mix_w1" in view.parts,
        "gate_rank_type": int("time_mix_gate" in view.parts),
        "groupnorm_att": "time_mix_ln" in view.parts,
    }


def _qwen_edits(view: View, config: Config) -> dict[str, Edit]:
    """The converter writes the token-shift mixing in RWKV-6's order."""
    order = [_SHIFTED.index(part) for part in "rkvwg"]
    wide, turned = Edit(value=lambda x: x.reshape(1, 1, -1)), Edit(value=lambda x: x.transpose(-1, -2))
    return {
        **dict.fromkeys((f"self_attn.time_maa_{part}" for part in ("x", *_SHIFTED)), wide),
        "self_attn.time_decay": wide,
        **dict.fromkeys((f"self_attn.time_decay_w{i}" for i in (1, 2)), turned),
        "self_attn.time_maa_w1": Edit(value=lambda x: x.unflatten(0, (5, -1))[order].flatten(0, 1).T),
        "self_attn.time_maa_w2": Edit(value=lambda x: x[order].transpose(-1, -2)),
    }


_SHIFTED = "wkvrg"
"""Parts that RWKV-6 mixes from a token and the one before, in llama.cpp's order."""
_QWEN = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"time_mix_{key}": f"self_attn.{name}" for key, name in (("w1", "time_maa_w1"), ("w2", "time_maa_w2"))},
    **{f"time_mix_lerp_{part}": f"self_attn.time_maa_{part}" for part in ("x", *_SHIFTED)},
    **{f"time_mix_decay{part}": f"self_attn.time_decay{part}" for part in ("", "_w1", "_w2")},
    "time_mix_receptance": "self_attn.q_proj",
    "time_mix_key": "self_attn.k_proj",
    "time_mix_value": "self_attn.v_proj",
    "time_mix_output": "self_attn.o_proj",
    "time_mix_gate": "self_attn.gate",
    "time_mix_ln": "self_attn.ln_x",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
RWKV = {
    "rwkv6qwen2": Architecture(
        _qwen,
        _QWEN,
        edits=_qwen_edits,
        split={"time_mix_lerp_fused": tuple(f"self_attn.time_maa_{part}" for part in _SHIFTED)},
    ),
    "rwkv6": Architecture(
        _rwkv6,
        _RWKV6,
        _RWKV6_WHOLE,
        _rwkv6_edits,
        split={"time_mix_lerp_fused": tuple(f"attention.time_maa_{part}" for part in "wkvrg")},
        stem=_RWKV6_STEM,
    ),
    "rwkv7": Architecture(
        _rwkv7,
        _RWKV7,
        {**WHOLE, "token_embd": "model.embeddings", "token_embd_norm": "model.layers.0.pre_norm"},
        _rwkv7_edits,
        skipped=r"blk\.0\.time_mix_v[012]\.weight",
    ),
}
