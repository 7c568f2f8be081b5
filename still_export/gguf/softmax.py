"""Architectures of softmax attention, which linearize accepts."""

from __future__ import annotations

from functools import partial

from still_export.gguf.shared import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    MINUS_ONE,
    Architecture,
    Config,
    View,
    common,
    epsilon,
    experts,
    feed_forward,
    heads,
    rope,
    rotation,
)

_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QKVO = (("attn_q", "attn_k", "attn_v", "attn_output"),)
_OUTPUT_BIASES = (*QKVO, ("ffn_gate", "ffn_up", "ffn_down"))
_BIASES = (("attn_q", "attn_k", "attn_v"),)
_GEMMA_PERIOD = 6
_GEMMA_27B_LAYERS = 62
"""Layers of the only Gemma size whose logit scale is not that of its heads; llama.cpp recognises it the same way."""


def _dense(view: View, model_type: str) -> Config:
    sizes = heads(view)
    return {
        **common(view, model_type),
        **sizes,
        "intermediate_size": feed_forward(view),
        "rms_norm_eps": epsilon(view),
        "rope_parameters": rope(view, sizes["head_dim"]),
    }


def llama(view: View, model_type: str = "llama") -> Config:
    """config.json of a Llama, or of a similar model."""
    config = _dense(view, model_type)
    found = {part for part in view.parts if part.endswith(".bias")}
    config["attention_bias"] = any(f"{part}.bias" in found for part in _OUTPUT_BIASES[0])
    config["mlp_bias"] = any(f"{part}.bias" in found for part in _OUTPUT_BIASES[1])
    return config


def _without_head_size(view: View, model_type: str) -> Config:
    """config.json of families whose heads divide the hidden channels."""
    config = _dense(view, model_type)
    size = config.pop("head_dim")
    if size != view.hidden // config["num_attention_heads"]:
        raise view.refuse(f"{config['num_attention_heads']} heads of {size} channels for {view.hidden}")
    return config


def _mistral(view: View) -> Config:
    window = view.keys.whole("attention.sliding_window", 0)
    return {**_dense(view, "mistral"), "sliding_window": window or None}


def _phi3(view: View) -> Config:
    window = view.keys.whole("attention.sliding_window", 0)
    for name in ("long", "short"):
        if f"rope_factors_{name}.weight" in view.file.tensors:
            raise view.refuse(f"rope scaling 'longrope' (rope_factors_{name}.weight)")
    config = _without_head_size(view, "phi3")
    context = view.keys.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {**config, "sliding_window": window or None, "original_max_position_embeddings": context}


def _smollm3(view: View) -> Config:
    """llama.cpp omits positions in every fourth layer; no key says so."""
    config = _without_head_size(view, "smollm3")
    return {**config, "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(view.layers)]}


def _qwen3_moe(view: View) -> Config:
    return {
        **_dense(view, "qwen3_moe"),
        **experts(view),
        "norm_topk_prob": bool(view.keys("expert_weights_norm", True)),
        "attention_bias": "attn_q.bias" in view.parts,
    }


def _gemma3(view: View) -> Config:
    config = _dense(view, "gemma3_text")
    keys, size = view.keys, config["head_dim"]
    pattern = keys("attention.sliding_window_pattern", _GEMMA_PERIOD)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(view.layers)]
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    window = keys.whole("attention.sliding_window", 0)
    cap = keys.number("final_logit_softcapping", 0.0)
    return {
        **config,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": ["sliding_attention" if window and slides else "full_attention" for slides in pattern],
        "sliding_window": window or config["max_position_embeddings"],
        "query_pre_attn_scalar": view.hidden // config["num_attention_heads"]
        if view.layers == _GEMMA_27B_LAYERS
        else size,
        "final_logit_softcapping": cap or None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


_LLAMA = ATTENTION | FEED_FORWARD
SOFTMAX = {
    "llama": Architecture(llama, _LLAMA, edits=rotation, biases=_OUTPUT_BIASES),
    "mistral3": Architecture(_mistral, _LLAMA, edits=rotation),
    "smollm3": Architecture(_smollm3, _LLAMA, edits=rotation),
    "qwen2": Architecture(partial(_without_head_size, model_type="qwen2"), _LLAMA, biases=_BIASES),
    "qwen3": Architecture(partial(llama, model_type="qwen3"), _LLAMA, biases=QKVO),
    "qwen3moe": Architecture(_qwen3_moe, ATTENTION | EXPERTS, biases=QKVO),
    "phi3": Architecture(_phi3, {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Architecture(partial(_without_head_size, model_type="olmo2"), {**_LLAMA, **_NORMS}),
    "gemma3": Architecture(
        _gemma3,
        {**_LLAMA, **_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        edits=lambda view, config: dict.fromkeys(
            (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
                "model.norm",
            ),
            MINUS_ONE,
        ),
    ),
}
