"""RWKV-6 and RWKV-7."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from still_export.gguf.edits import Edit
from still_export.gguf.shared import FLAT, WHOLE, Architecture, Config, View, common, feed_forward

if TYPE_CHECKING:
    from torch import Tensor


def _rwkv6(view: View) -> Config:
    """Norms of heads have the epsilon of the published models, in llama.cpp too."""
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
    """The converter halves what each layer adds once more every few layers, and llama.cpp the hidden states."""
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
        "fuse_norm": False,  # keys of length 1 without a term under the root, as llama.cpp and the published definition have them
        **{f"{ours}_low_rank_dim": keys.whole(f"attention.{theirs}_lora_rank") for ours, theirs in ranks.items()},
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
RWKV = {
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
"""By GGUF's name."""
