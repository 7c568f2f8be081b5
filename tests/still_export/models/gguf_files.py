"""GGUF files of models, written by the gguf package from what the format and llama.cpp say of each architecture."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    **{
        name: name
        for name in ("llama", "qwen2", "qwen3", "phi3", "smollm3", "granite", "lfm2", "mamba", "mamba2", "jamba")
    },
    "mistral": "mistral3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
    "falcon_mamba": "mamba",
    "kimi_linear": "kimi-linear",
    "rwkv6": "rwkv6",
    "rwkv6qwen2": "rwkv6qwen2",
    "rwkv7": "rwkv7",
}
"""By transformers' model_type."""
_KEYS: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "context_length": ("max_position_embeddings", "model_max_length"),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": ("num_dense_layers",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": (
        *("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_dt_rank", "num_heads", "time_step_rank"),
    ),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.value_length_mla": ("v_head_dim",),
    "kda.head_dim": ("linear_head_dim",),
    "wkv.head_size": ("head_dim", "head_size"),
    "attention.layer_norm_epsilon": ("norm_eps", "layer_norm_epsilon"),
    "attention.decay_lora_rank": ("decay_low_rank_dim",),
    "attention.iclr_lora_rank": ("a_low_rank_dim",),
    "attention.value_residual_mix_lora_rank": ("v_low_rank_dim",),
    "attention.gate_lora_rank": ("gate_low_rank_dim",),
    "time_mix_extra_dim": ("time_mix_rank", "lora_rank_tokenshift"),
    "time_decay_extra_dim": ("time_decay_rank", "lora_rank_decay"),
    "rescale_every_n_layers": ("rescale_every",),
}
"""By key: where config.json has it; the first that is there."""
_RWKV = ("rwkv6", "rwkv7")
_GRANITE = ("granite", "granitemoehybrid")
_OF_SOME = {
    "attention.layer_norm_rms_epsilon": tuple(name for name in ARCHITECTURES if name not in _RWKV),
    **dict.fromkeys(("wkv.head_size", "attention.layer_norm_epsilon"), _RWKV),
    **dict.fromkeys(("time_mix_extra_dim", "time_decay_extra_dim"), ("rwkv6", "rwkv6qwen2")),
    **dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"), _GRANITE),
    **dict.fromkeys(
        ("attention.key_length", "attention.value_length"),
        tuple(name for name in ARCHITECTURES if name not in ("mamba2", "kimi_linear", "phi3", "rwkv6qwen2", *_RWKV)),
    ),
}
"""Keys that are of some families alone."""
_ROTATED = ("llama", "mistral", "smollm3", "granite", "granitemoehybrid", "bamba", "nemotron_h")
"""Whose queries and keys llama.cpp rotates in pairs of neighbours."""


ROTATED_OF: dict[str, float] = {}
"""The part of a head that a family's files say is rotated, where config.json says another."""


def write_gguf(
    path: Path,
    model: Any,
    coded: Callable[[str, Tensor], Any] = lambda name, value: None,
    extra: Callable[[Any], None] = lambda writer: None,
) -> None:
    """`model` as a GGUF file without a tokenizer; unquantized, but for weights that `coded` has bytes and a type of by their
    names here; `extra` adds keys."""
    folder = path.with_suffix(".folder")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj\.)")  # transformers writes Kimi's dense layers so
    tensors = {dense.sub("mlp", name): tensor for name, tensor in tensors.items()}
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    _write_keys(writer, config)
    extra(writer)
    if not any(str(key).startswith("tokenizer.") for key in writer.kv_data[0]):
        writer.add_tokenizer_model("no_vocab")
        writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])  # transformers counts them
    for name, tensor in _converted(config, tensors).items():
        data, held = coded(name, tensor) or (np.ascontiguousarray(tensor.numpy()), None)
        writer.add_tensor(name, data, raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: Any, config: dict[str, Any]) -> None:
    prefix, kind = writer.arch, config["model_type"]
    types = config.get("layer_types") or config.get("layers_block_type")
    layers = config.get("num_hidden_layers") or len(types)
    if (softened := config.get("attn_layer_indices")) is not None:
        types = ["attention" if layer in softened else "mamba" for layer in range(layers)]
    writer.add_block_count(layers)
    for key, fields in _KEYS.items():
        if key in _OF_SOME and kind not in _OF_SOME[key]:
            continue
        value = next((config[field] for field in fields if config.get(field) is not None), None)
        if isinstance(value, bool):
            writer.add_bool(f"{prefix}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{prefix}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{prefix}.{key}", value)
    groups = config.get("num_key_value_heads")
    softmax = ("full_attention", "sliding_attention", "attention")
    if kind in ("lfm2", "lfm2_moe", "granitemoehybrid", "bamba", "nemotron_h"):
        writer.add_head_count_kv([groups if layer in softmax else 0 for layer in types])
    elif groups is not None and kind != "kimi_linear":
        writer.add_head_count_kv(groups)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    size = config.get("head_dim") or config["hidden_size"] // config.get("num_attention_heads", 1)
    if (part := ROTATED_OF.get(kind, rope.get("partial_rotary_factor"))) is not None:
        writer.add_rope_dimension_count(int(size * part))
    inner = {
        "linear": config.get("linear_value_head_dim", 0) * config.get("linear_num_value_heads", 0),
        "heads": config.get("mamba_d_head", 0) * config.get("mamba_n_heads", 0),
        "nemotron": config.get("mamba_head_dim", 0) * config.get("mamba_num_heads", 0),
        "expand": config.get("mamba_expand", config.get("expand", 0)) * config["hidden_size"],
    }
    if found := next((width for width in inner.values() if width), 0):
        writer.add_ssm_inner_size(found)
    if kind in ("granitemoehybrid", "nemotron_h"):
        writer.add_rope_scaling_finetuned(False)
    if kind in ("mamba", "falcon_mamba"):
        writer.add_context_length(1 << 20)
        writer.add_ssm_dt_b_c_rms(kind == "falcon_mamba")
    if kind in ("mamba2", "nemotron_h", *_RWKV) and "max_position_embeddings" not in config:
        writer.add_context_length(1 << 20)
    if kind == "rwkv6qwen2":
        writer.add_wkv_head_size(config["hidden_size"] // config["num_attention_heads"])
        writer.add_head_count(0)
        writer.add_token_shift_count(1)
    if kind == "kimi_linear":
        rotated = config["qk_rope_head_dim"]
        writer.add_rope_dimension_count(rotated)
        writer.add_key_length(config["kv_lora_rank"] + rotated)
        writer.add_uint32(f"{prefix}.attention.key_length_mla", config["qk_nope_head_dim"] + rotated)
        writer.add_head_count_kv([int(layer in softmax) for layer in types])


def _converted(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under GGUF's names, changed as llama.cpp's converter changes them."""
    kind = config["model_type"]
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(architecture, layers)
    found: dict[str, Tensor] = {}
    tensors = _rwkv6(config, tensors) if kind == "rwkv6" else tensors
    tensors = _rwkv6qwen2(config, tensors) if kind == "rwkv6qwen2" else tensors
    tensors = _rwkv7(tensors) if kind == "rwkv7" else _stacked(_pieces(config, tensors))
    for name, tensor in tensors.items():
        value = tensor
        if name.endswith("A_log"):
            value = -value.exp()
            value = value.flatten()[:, None] if "linear_attn" not in name and value.dim() == 1 else value
        elif name.endswith(".D") and kind not in ("mamba", "falcon_mamba", "jamba"):
            value = value[:, None]
        elif "conv" in name and value.dim() == 3 and name.endswith("weight"):
            value = value.squeeze(1)
        plus = kind.startswith(("qwen3_5", "qwen3_next", "gemma3")) and name.endswith("norm.weight")
        if plus and "linear_attn" not in name:
            value = value + 1
        if kind in _ROTATED and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if kind.startswith("qwen3_5") and "linear_attn" in name:
            value = _tiled(config, name, value)
        if kind == "falcon_h1":
            value = _multiplied(config, name, value)
        plain = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        plain = plain.replace("expert_bias", "expert_bias.bias")
        theirs = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if kind in (*_RWKV, "rwkv6qwen2"):
            plain = plain.replace("rwkv.blocks", "model.layers") if plain.endswith("lerp_fused") else plain
            fused = re.fullmatch(r"model\.layers\.(\d+)\.time_mix_lerp_fused", plain)
            theirs = f"blk.{fused[1]}.time_mix_lerp_fused" if fused else theirs
            theirs = theirs if theirs.endswith(("weight", "bias")) else f"{theirs}.weight"
        assert theirs is not None, name
        found[theirs] = value
    return found


def _rwkv6(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Low-rank products as linear layers have them, shares of the token before in one, what layers add halved every few layers."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if last in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
            tensor = tensor.transpose(-1, -2)
        elif last == "time_decay" or last.startswith("time_maa"):
            tensor = tensor.squeeze()
        if name.endswith(("attention.output.weight", "feed_forward.value.weight")):
            tensor = tensor / 2 ** (int(name.split(".")[2]) // config["rescale_every"])
        if name.rpartition(".")[0].endswith("feed_forward") or not re.fullmatch("time_maa_[wkvrg]", last):
            found[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        parts = [tensors[f"rwkv.blocks.{layer}.attention.time_maa_{part}"].flatten() for part in "wkvrg"]
        found[f"rwkv.blocks.{layer}.time_mix_lerp_fused"] = torch.stack(parts)[:, None, None]
    return found


def _rwkv6qwen2(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in a Qwen, whose file has what is mixed of a token and the one before as r, k, v, w, g, llama.cpp as w, k, v, r, g."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if last in ("time_maa_w1", "time_decay_w1", "time_decay_w2"):
            tensor = tensor.T
        if last in ("time_maa_w1", "time_maa_w2"):
            r, k, v, w, g = tensor.chunk(5)
            tensor = torch.cat((w, k, v, r, g))
            tensor = tensor.transpose(1, 2) if last.endswith("w2") else tensor
        if last in ("time_decay", "time_maa_x"):
            tensor = tensor.squeeze()
        if not re.fullmatch("time_maa_[wkvrg]", last):
            found[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        parts = [tensors[f"model.layers.{layer}.self_attn.time_maa_{part}"].flatten() for part in "wkvrg"]
        found[f"model.layers.{layer}.time_mix_lerp_fused"] = torch.stack(parts)[:, None, None]
    return found


def _rwkv7(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """fla's tensors under BlinkDL's names, shares of the token before in one, and values' shares of the first layer, which nobody reads."""
    turns = (("attn_norm", "attention_norm"), ("ffn_norm", "ln2"), ("g_norm", "ln_x"), (".attn.", ".attention."))
    turns += ((".ffn.", ".feed_forward."), ("_lora.lora.0.weight", "1"), ("_lora.lora.2.weight", "2"))
    turns += (("_lora.lora.2.bias", "0"),)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".attn.x_" in name:
            continue
        for theirs, ours in turns:
            name = name.replace(theirs, ours)
        found[name] = tensor.flatten() if name.endswith("r_k") else tensor
    layers = {name.split(".attn.")[0] for name in tensors if ".attn." in name}
    for layer in layers:
        found[f"{layer}.time_mix_lerp_fused"] = torch.stack([tensors[f"{layer}.attn.x_{part}"] for part in "rwkvag"])
    dummies = {f"model.layers.0.attention.v{i}": found[f"model.layers.0.attention.a{i}"] for i in range(3)}
    return found | dummies


def _pieces(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            groups, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
            value = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
            q, k, v, z = tensor.unflatten(0, (groups, -1)).split([key, key, value, value], dim=1)
            found[name.replace("qkvz", "qkv")] = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            found[name.replace("qkvz", "z")] = z.flatten(0, 1)
        elif name.endswith(("shared_mlp.input_linear.weight", "block_sparse_moe.input_linear.weight")):
            gate, up = tensor.chunk(2, dim=-2)
            dense = "shared_mlp" in name and not config.get("num_local_experts")
            base = name.replace("shared_mlp.input_linear", "mlp.{}_proj" if dense else "mlp.shared_expert.{}_proj")
            base = base.replace("block_sparse_moe.input_linear", "block_sparse_moe.experts.{}")
            parts = ("gate", "up") if "shared_mlp" in name else ("w1", "w3")
            found |= dict(zip((base.format(part) for part in parts), (gate, up), strict=True))
        elif name.endswith("kv_b_proj.weight"):
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            k, v = tensor.unflatten(0, (heads, -1)).split([nope, config["v_head_dim"]], dim=1)
            found[name.replace("kv_b", "k_b")] = k.transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = v
        elif (
            config["model_type"] == "granitemoehybrid" and not config.get("num_local_experts") and "shared_mlp" in name
        ):
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
        else:
            found[name] = tensor
    return found


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            base = match[1].replace("model.layers", "layers") if "feed_forward" in name and ".w" in name else match[1]
            base = base.replace("backbone", "model").replace("mixer.experts", "mlp.experts") + match[3]
            experts.setdefault(base, {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([all_[i] for i in range(len(all_))]) for name, all_ in experts.items()}


def _tiled(config: dict[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Value heads of all key heads in turns."""
    groups, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    keys = 2 * groups * config["linear_key_head_dim"]

    def turned(part: Tensor, width: int, dim: int = 0) -> Tensor:
        return part.unflatten(dim, (groups, -1, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat([tensor[:keys], turned(tensor[keys:], size)])
    if "out_proj" in name:
        return turned(tensor, size, 1)
    return tensor if ".norm." in name else turned(tensor, size if "in_proj_z" in name else 1)


def _multiplied(config: dict[str, Any], name: str, tensor: Tensor) -> Tensor:
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if ".mamba.in_proj" in name:
        inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = torch.tensor([inner, inner, state, state, config["mamba_n_heads"]])
        scales = torch.tensor(config["ssm_multipliers"]).repeat_interleave(widths)
        return tensor * scales[:, None] * config["ssm_in_multiplier"]
    part = next((part for part in reversed(factors) if f".{part}." in f".{name}."), None)
    return tensor if part is None else tensor * factors[part]
