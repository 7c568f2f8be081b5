"""Architectures with Mamba and Mamba-2 layers."""

from __future__ import annotations

from still_export.gguf.edits import Edit
from still_export.gguf.shared import (
    ATTENTION,
    CONVOLUTION,
    FLAT,
    WHOLE,
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
    rotation,
    routing,
    shared_size,
)
from still_export.gguf.softmax import QKVO, llama

_SSM = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_d": "D", "ssm_a": "A_log", "ssm_out": "out_proj"}
_SSM1 = {**_SSM, "ssm_x": "x_proj", "ssm_dt": "dt_proj"}
_SSM2 = {**_SSM, "ssm_dt.bias": "dt_bias", "ssm_norm": "norm"}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}


def _inside(module: str, parts: dict[str, str]) -> dict[str, str]:
    return {key: f"{module}.{name}" for key, name in parts.items()}


def _edits(module: str) -> dict[str, Edit]:
    """Shapes: the file's A_log, D and gated norm have an additional last dimension of 1."""
    return {
        f"{module}.A_log": Edit(value=lambda a: (-a).log().flatten() if a.shape[-1] == 1 else (-a).log()),
        f"{module}.D": FLAT,
        f"{module}.norm": FLAT,
        f"{module}.conv1d": CONVOLUTION,
    }


def _mamba(view: View) -> Config:
    """Falcon-Mamba has the same tensors; its norms of step, B and C have no weights."""
    keys = view.keys
    normed = bool(keys("ssm.dt_b_c_rms", False))
    feed_forward(view), keys("attention.head_count", 0), keys("ssm.group_count", 0)
    return {
        **common(view, "falcon_mamba" if normed else "mamba"),
        "layer_norm_epsilon": epsilon(view),
        "state_size": keys.whole("ssm.state_size"),
        "conv_kernel": keys.whole("ssm.conv_kernel"),
        "intermediate_size": keys.whole("ssm.inner_size"),
        "expand": keys.whole("ssm.inner_size") // view.hidden,
        "time_step_rank": keys.whole("ssm.time_step_rank"),
        "use_bias": "ssm_in.bias" in view.parts,
        "use_conv_bias": "ssm_conv1d.bias" in view.parts,
    }


def _mamba2(view: View) -> Config:
    keys = view.keys
    feed_forward(view), keys("attention.head_count", 0)
    inner, count = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    if inner % view.hidden:
        raise view.refuse(f"ssm.inner_size={inner}, no multiple of embedding_length={view.hidden}")
    return {
        **common(view, "mamba2"),
        "layer_norm_epsilon": epsilon(view),
        "state_size": keys.whole("ssm.state_size"),
        "conv_kernel": keys.whole("ssm.conv_kernel"),
        "expand": inner // view.hidden,
        "num_heads": count,
        "head_dim": inner // count,
        "n_groups": keys.whole("ssm.group_count"),
        "use_bias": "ssm_in.bias" in view.parts,
        "use_conv_bias": "ssm_conv1d.bias" in view.parts,
    }


def _mixer2(view: View) -> Config:
    """Fields of Mamba-2 layers in hybrids."""
    keys = view.keys
    inner, count = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    return {
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_d_state": keys.whole("ssm.state_size"),
        "mamba_n_groups": keys.whole("ssm.group_count"),
        "mamba_d_conv": keys.whole("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // view.hidden),
        "mamba_conv_bias": "ssm_conv1d.bias" in view.parts,
        "mamba_proj_bias": "ssm_in.bias" in view.parts,
    }


def _granite_scales(view: View, size: int) -> Config:
    """Granite's multipliers; llama.cpp reads 0 as none."""
    number = view.keys.number
    return {
        "attention_multiplier": number("attention.scale", 0.0) or size**-0.5,
        "embedding_multiplier": number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": number("residual_scale", 0.0) or 1.0,
        "logits_scaling": number("logit_scale", 0.0) or 1.0,
    }


def _granite_hybrid(view: View) -> Config:
    """Bamba has this architecture, too; it is the one with positions in attention."""
    keys = view.keys
    if keys("rope.scaling.finetuned", True):
        return _bamba(view)
    keys("rope.freq_base", None), keys("rope.dimension_count", None)
    sizes = heads(view)
    size = shared_size(view, sizes)
    routed = "ffn_gate_inp" in view.parts
    shared = feed_forward(view, "expert_shared_feed_forward_length") if routed else view.shape("ffn_up")[0]
    config = {
        **common(view, "granitemoehybrid"),
        **sizes,
        **_mixer2(view),
        **_granite_scales(view, size),
        "rms_norm_eps": epsilon(view),
        "position_embedding_type": "nope",
        "layer_types": view.kinds(linear_attention="ssm_in", full_attention="attn_q"),
        "attention_bias": "attn_q.bias" in view.parts,
        "intermediate_size": feed_forward(view),
        "shared_intermediate_size": shared,
        "num_local_experts": keys.whole("expert_count", 0) if routed else 0,
        "num_experts_per_tok": keys.whole("expert_used_count", 0) if routed else 0,
    }
    if not routed:
        keys("expert_count", 0), keys("expert_used_count", 0), keys("expert_shared_feed_forward_length", 0)
    return config


def _bamba(view: View) -> Config:
    """transformers rotates half of each head in all Bamba models. Files state half or, if config.json had no value, all."""
    sizes = heads(view)
    size = shared_size(view, sizes)
    positions = rope(view, size)
    if positions.get("partial_rotary_factor", 1.0) not in (0.5, 1.0):
        raise view.refuse(
            f"rope.dimension_count={view.keys('rope.dimension_count')} beside Mamba-2 layers, not {size // 2}"
        )
    return {
        **common(view, "bamba"),
        **sizes,
        **_mixer2(view),
        "rms_norm_eps": epsilon(view),
        "attn_layer_indices": view.layers_with("attn_q"),
        "rope_parameters": {**positions, "partial_rotary_factor": 0.5},
        "intermediate_size": feed_forward(view),
        "attention_bias": "attn_q.bias" in view.parts,
        "mlp_bias": "ffn_up.bias" in view.parts,
    }


def _granite(view: View) -> Config:
    """Granite with softmax layers only: a hybrid without the others. llama.cpp uses rope.scaling.finetuned to mark positions."""
    config = {**llama(view, "granitemoehybrid")}
    size = shared_size(view, config)
    return {
        **config,
        **_granite_scales(view, size),
        "position_embedding_type": "rope" if view.keys("rope.scaling.finetuned", True) else "nope",
        "layer_types": ["full_attention"] * view.layers,
        "shared_intermediate_size": config["intermediate_size"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 1,  # unused; the default 128 would have to divide the hidden size
    }


def _granite_edits(view: View, config: Config) -> dict[str, Edit]:
    return {**rotation(view, config), **_edits("mamba")}


def _falcon_h1(view: View) -> Config:
    """llama.cpp's converter multiplied all factors into the weights. A tied head has a different factor than the embedding, which is
    lost."""
    keys = view.keys
    if view.tied:
        raise view.refuse(
            "no output.weight: embedding and head are tied but have different factors, and the file only has the embedding's"
        )
    sizes = heads(view)
    mixer = _mixer2(view)
    return {
        **common(view, "falcon_h1"),
        **sizes,
        **mixer,
        "mamba_d_ssm": keys.whole("ssm.inner_size"),
        "mamba_expand": 2,
        "mamba_rms_norm": "ssm_norm" in view.parts,
        "mamba_norm_before_gate": False,
        "intermediate_size": feed_forward(view),
        "rms_norm_eps": epsilon(view),
        "rope_parameters": rope(view, sizes["head_dim"]),
        "attention_bias": "attn_q.bias" in view.parts,
        "mlp_bias": "ffn_up.bias" in view.parts,
        "projectors_bias": "ssm_out.bias" in view.parts,
        **dict.fromkeys(
            (
                *("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier"),
                *("lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
            ),
            1.0,
        ),
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0, 1.0],
    }


def _nemotron_h(view: View) -> Config:
    keys = view.keys
    if keys("rope.scaling.finetuned", False):
        raise view.refuse("rotary positions (rope.scaling.finetuned)")
    keys("rope.dimension_count", None), keys("rope.freq_base", None)
    kinds = view.kinds(linear_attention="ssm_in", full_attention="attn_q", moe="ffn_gate_inp", mlp="ffn_up")
    inner, count = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    width = feed_forward(view)
    config = {
        **common(view, "nemotron_h"),
        **heads(view),
        "layer_norm_epsilon": epsilon(view),
        "layers_block_type": kinds,
        "intermediate_size": view.shape("ffn_up")[0] if "mlp" in kinds else width or view.hidden,
        "mamba_num_heads": count,
        "mamba_head_dim": inner // count,
        "ssm_state_size": keys.whole("ssm.state_size"),
        "n_groups": keys.whole("ssm.group_count"),
        "conv_kernel": keys.whole("ssm.conv_kernel"),
        "expand": max(1, inner // view.hidden),
        "use_conv_bias": "ssm_conv1d.bias" in view.parts,
        "use_bias": "ssm_in.bias" in view.parts,
        "mlp_bias": "ffn_up.bias" in view.parts,
        "attention_bias": "attn_q.bias" in view.parts,
        "num_nextn_predict_layers": 0,
    }
    routed = {
        "n_routed_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "n_shared_experts": keys.whole("expert_shared_count", 0),
        "moe_intermediate_size": feed_forward(view, "expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": feed_forward(view, "expert_shared_feed_forward_length"),
        **routing(view, normed=False),
        **groups(view),
        "moe_latent_size": keys.whole("moe_latent_size", 0) or None,
    }
    return {**config, **routed} if "moe" in kinds else config


_NEMOTRON = {
    **_inside("mixer", _SSM2),
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def _nemotron_edits(view: View, config: Config) -> dict[str, Edit]:
    turned = {name.replace("self_attn", "mixer"): edit for name, edit in rotation(view, config).items()}
    return {**turned, **_edits("mixer")}


def _period(view: View, part: str, what: str) -> tuple[int, int]:
    """Period and offset of the layers that have a tensor."""
    layers = view.layers_with(part)
    if not layers:
        return view.layers + 1, view.layers
    period = layers[1] - layers[0] if len(layers) > 1 else max(view.layers, layers[0] + 1)
    if layers != list(range(layers[0], view.layers, period)) or layers[0] >= period:
        raise view.refuse(f"{what} in the layers {layers}, which no period and offset describe")
    return period, layers[0]


def _jamba(view: View) -> Config:
    keys = view.keys
    sizes = heads(view)
    shared_size(view, sizes)
    attention, offset = _period(view, "attn_q", "attention")
    routed, first = _period(view, "ffn_gate_inp", "experts")
    found = experts(view) if view.layers_with("ffn_gate_inp") else {}
    found.pop("moe_intermediate_size", None)
    if not found:
        keys("expert_count", 0), keys("expert_used_count", 0)
        found = {"num_experts": 1, "num_experts_per_tok": 1}
    return {
        **common(view, "jamba"),
        **sizes,
        **found,
        "intermediate_size": feed_forward(view),
        "rms_norm_eps": epsilon(view),
        "attn_layer_period": attention,
        "attn_layer_offset": offset,
        "expert_layer_period": routed,
        "expert_layer_offset": first,
        "mamba_d_state": keys.whole("ssm.state_size"),
        "mamba_d_conv": keys.whole("ssm.conv_kernel"),
        "mamba_expand": keys.whole("ssm.inner_size") // view.hidden,
        "mamba_dt_rank": keys.whole("ssm.time_step_rank"),
        "mamba_conv_bias": "ssm_conv1d.bias" in view.parts,
        "mamba_proj_bias": "ssm_in.bias" in view.parts,
    }


_FALCON = {**WHOLE, "output_norm": "model.final_layernorm"}
_JAMBA = {
    **ATTENTION,
    **_inside("mamba", _SSM1),
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_HYBRID = {
    **ATTENTION,
    **_inside("mamba", _SSM2),
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
_GRANITE = {
    **ATTENTION,
    **_inside("mamba", _SSM2),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_down": "shared_mlp.output_linear",
}
MAMBA = {
    "mamba": Architecture(
        _mamba, {"attn_norm": "norm", **_inside("mixer", _SSM1)}, _BACKBONE, lambda view, config: _edits("mixer")
    ),
    "mamba2": Architecture(
        _mamba2, {"attn_norm": "norm", **_inside("mixer", _SSM2)}, _BACKBONE, lambda view, config: _edits("mixer")
    ),
    "granitehybrid": Architecture(
        _granite_hybrid,
        _GRANITE,
        edits=_granite_edits,
        joined={"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_gate", "ffn_up")},
        others={"bamba": Architecture(_bamba, _HYBRID, _FALCON, _granite_edits)},
    ),
    "granite": Architecture(
        _granite, _GRANITE, edits=rotation, joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")}, biases=QKVO
    ),
    "falcon-h1": Architecture(_falcon_h1, _HYBRID, _FALCON, lambda view, config: _edits("mamba")),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(_nemotron_h, _NEMOTRON, _BACKBONE, _nemotron_edits)),
    "jamba": Architecture(_jamba, _JAMBA, _FALCON, lambda view, config: _edits("mamba")),
}
