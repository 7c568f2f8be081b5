"""Architectures with linear layers, all or some: gated delta rule, short convolutions, Kimi's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from still_export.gguf.edits import Edit, grouped
from still_export.gguf.shared import (
    ATTENTION,
    CONVOLUTION,
    EXPERTS,
    FEED_FORWARD,
    LOG,
    MINUS_ONE,
    SHARED_EXPERT,
    Architecture,
    Config,
    View,
    common,
    epsilon,
    experts,
    feed_forward,
    groups,
    heads,
    rope,
    routing,
    shared_size,
)

if TYPE_CHECKING:
    from torch import Tensor

_AHEAD = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
    "nextn.embed_tokens": "mtp.embed_tokens",
    "nextn.shared_head_head": "mtp.lm_head",
}
_DELTA = {
    **ATTENTION,
    **_AHEAD,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35 = {
    **_DELTA,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_NORMS = (
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "model.norm"),
    *("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
)


def _delta(view: View, model_type: str) -> Config:
    keys = view.keys
    keys("full_attention_interval", None)  # tensors show which layers are softmax
    kinds = view.kinds(linear_attention="ssm_a", full_attention="attn_q")
    recurrent = keys("attention.recurrent_layers", None)
    if recurrent is not None and [k == "linear_attention" for k in kinds] != list(map(bool, recurrent))[: view.layers]:
        raise view.refuse("attention.recurrent_layers that its tensors contradict")
    keys("ssm.v_head_reordered", None)  # see _qwen35_edits
    count = keys.whole("ssm.time_step_rank")
    sizes = heads(view, channels=2)
    config = {
        **common(view, model_type),
        **sizes,
        "intermediate_size": feed_forward(view),
        "rms_norm_eps": epsilon(view),
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope(view, sizes["head_dim"])},
        "layer_types": kinds,
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": count,
        "linear_value_head_dim": keys.whole("ssm.inner_size") // count,
        "mtp_num_hidden_layers": view.ahead,
    }
    config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    if "ffn_gate_inp" in view.parts:
        config |= experts(view)
        shared = feed_forward(view, "expert_shared_feed_forward_length")
        config["shared_expert_intermediate_size"] = shared or view.shape("ffn_up_shexp")[0]
    return config


def _qwen3_next(view: View) -> Config:
    norm = bool(view.keys("expert_weights_norm", True))
    return {**_delta(view, "qwen3_next"), "norm_topk_prob": norm, "mlp_only_layers": [], "decoder_sparse_step": 1}


def _delta_edits(view: View, config: Config) -> dict[str, Edit]:
    return {**dict.fromkeys(_NORMS, MINUS_ONE), "linear_attn.A_log": LOG, "linear_attn.conv1d": CONVOLUTION}


def _qwen35_edits(view: View, config: Config) -> dict[str, Edit]:
    """The file orders value heads by turns over key heads; transformers puts the value heads of one key head together."""
    if not view.keys("ssm.v_head_reordered", True):
        return _delta_edits(view, config)
    count, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    size, keys = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]
    one, wide = grouped(count, groups, 1), grouped(count, groups, size)
    behind = np.concatenate([np.arange(keys), keys + wide])
    return {
        **_delta_edits(view, config),
        "linear_attn.in_proj_qkv": Edit(behind),
        "linear_attn.in_proj_z": Edit(wide),
        "linear_attn.in_proj_a": Edit(one),
        "linear_attn.in_proj_b": Edit(one),
        "linear_attn.dt_bias": Edit(one),
        "linear_attn.A_log": Edit(one, value=LOG.value),
        "linear_attn.conv1d": Edit(behind, value=CONVOLUTION.value),
        "linear_attn.out_proj": Edit(columns=wide),
    }


def _qwen3_next_edits(view: View, config: Config) -> dict[str, Edit]:
    """The file has all queries, then keys, values and gates; transformers puts those of one key head together."""
    groups, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    widths = [key, key, value, value]
    begins = np.cumsum([0, *(groups * width for width in widths)])
    parts = [
        begin + np.arange(groups * width).reshape(groups, width) for begin, width in zip(begins, widths, strict=False)
    ]
    return {**_delta_edits(view, config), "linear_attn.in_proj_qkvz": Edit(np.concatenate(parts, axis=1).ravel())}


def _lfm2(view: View, model_type: str) -> Config:
    sizes = heads(view)
    size = shared_size(view, sizes)
    return {
        **common(view, model_type),
        **sizes,
        "intermediate_size": feed_forward(view),
        "norm_eps": epsilon(view),
        "rope_parameters": rope(view, size),
        "layer_types": view.kinds(conv="shortconv.conv", full_attention="attn_q"),
        "conv_L_cache": view.keys.whole("shortconv.l_cache"),
        "conv_bias": "shortconv.conv.bias" in view.parts or "shortconv.in_proj.bias" in view.parts,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(view: View) -> Config:
    return {
        **_lfm2(view, "lfm2_moe"),
        **experts(view),
        **routing(view),
        "num_dense_layers": view.keys.whole("leading_dense_block_count", 0),
        "use_expert_bias": "exp_probs_b.bias" in view.parts,
    }


_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE = {
    **_LFM2,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
_LFM2_WHOLE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "output": "lm_head",
}


def _kimi(view: View) -> Config:
    keys = view.keys
    count = next(size for size in view.shape("ssm_a") if size != 1)
    keys("attention.key_length", None), keys("attention.head_count_kv", None)  # sizes of llama.cpp's cache
    rotated = keys.whole("rope.dimension_count")
    query = keys.whole("attention.head_count")
    keys("attention.value_length", None)
    return {
        **common(view, "kimi_linear"),
        **experts(view),
        "num_attention_heads": query,
        "num_key_value_heads": query,
        "intermediate_size": feed_forward(view),
        "rms_norm_eps": epsilon(view),
        "n_shared_experts": keys.whole("expert_shared_count", 1),
        "mlp_layer_types": ["sparse" if view.has("ffn_gate_inp", i) else "dense" for i in range(view.layers)],
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        **routing(view),
        **groups(view),
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.whole("attention.key_length_mla") - rotated,
        "v_head_dim": keys.whole("attention.value_length_mla"),
        "layer_types": view.kinds(linear_attention="ssm_a", full_attention="attn_kv_a_mqa"),
        "linear_head_dim": keys.whole("kda.head_dim"),
        "linear_num_heads": count,
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "rope_parameters": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)},
    }


def _kimi_edits(view: View, config: Config) -> dict[str, Edit]:
    count, rank = config["num_attention_heads"], config["kv_lora_rank"]
    keys = config["qk_nope_head_dim"]

    def joined(both: Tensor) -> Tensor:
        import torch

        key, value = both[: count * rank * keys], both[count * rank * keys :]
        key = key.reshape(count, rank, keys).transpose(1, 2)
        return torch.cat([key, value.reshape(count, -1, rank)], dim=1).flatten(0, 1)

    return {
        **dict.fromkeys((f"self_attn.{part}_conv1d" for part in "qkv"), CONVOLUTION),
        "self_attn.A_log": Edit(value=lambda a: (-a).log().reshape(1, 1, -1, 1)),
        "self_attn.kv_b_proj": Edit(value=joined, flat=True),
    }


_KIMI = {
    **ATTENTION,
    **FEED_FORWARD,
    **EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


HYBRIDS = {
    "qwen35": Architecture(lambda view: _delta(view, "qwen3_5_text"), _QWEN35 | FEED_FORWARD, edits=_qwen35_edits),
    "qwen35moe": Architecture(
        lambda view: _delta(view, "qwen3_5_moe_text"), _QWEN35 | EXPERTS | SHARED_EXPERT, edits=_qwen35_edits
    ),
    "qwen3next": Architecture(
        _qwen3_next,
        _DELTA | EXPERTS | SHARED_EXPERT | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
        edits=_qwen3_next_edits,
        joined={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
    ),
    "lfm2": Architecture(
        lambda view: _lfm2(view, "lfm2"), _LFM2, _LFM2_WHOLE, lambda view, config: {"conv.conv": CONVOLUTION}
    ),
    "lfm2moe": Architecture(_lfm2_moe, _LFM2_MOE, _LFM2_WHOLE, lambda view, config: {"conv.conv": CONVOLUTION}),
    "kimi-linear": Architecture(
        _kimi, _KIMI, edits=_kimi_edits, joined={"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")}
    ),
}
