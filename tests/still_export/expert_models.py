"""Random models with experts, as transformers has them: dimensions all differ, routers are not flat."""

from typing import Any

import torch

from still_export.models.families.linear_families import LINEAR_FAMILIES
from tests.still_export.linear_models import FAMILIES, PUBLISHED, SELDOM, SIZES, linear_model

_QWEN: dict[str, Any] = dict(
    SIZES["qwen3_next"],
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=18,
    shared_expert_intermediate_size=22,
)
_NEMOTRON: dict[str, Any] = dict(
    num_hidden_layers=None,
    head_dim=10,
    mamba_num_heads=6,
    mamba_head_dim=8,
    ssm_state_size=14,
    n_groups=2,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=18,
    moe_shared_expert_intermediate_size=22,
)
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN),
    "qwen3_next": ("qwen3_next", dict(_QWEN, mlp_only_layers=[1])),
    "qwen3_next, not normalized": ("qwen3_next", dict(_QWEN, norm_topk_prob=False)),
    "granitemoehybrid": (
        "granitemoehybrid",
        dict(num_local_experts=7, num_experts_per_tok=3, intermediate_size=18),
    ),
    "kimi_linear": (
        "kimi_linear",
        dict(
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=18,
            n_group=4,
            topk_group=2,
        ),
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        dict(
            num_key_value_heads=6,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            head_dim=12,
            kv_lora_rank=14,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=10,
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=18,
            n_group=4,
            topk_group=2,
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        dict(
            _NEMOTRON,
            layer_types=["linear_attention", "moe", "full_attention", "mlp", "moe"],
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        ),
    ),
    "nemotron_h, dense": ("nemotron_h", dict(_NEMOTRON, layer_types=["linear_attention", "mlp", "full_attention"])),
    "nemotron_h, latent": (
        "nemotron_h",
        dict(_NEMOTRON, layer_types=["linear_attention", "moe", "full_attention"], moe_latent_size=16),
    ),
    "minimax": (
        "minimax",
        dict(
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            head_dim=10,
            intermediate_size=18,
            num_local_experts=7,
            num_experts_per_tok=3,
            block_size=32,
            linear_attn_alpha_factor=1.3,
            full_attn_beta_factor=0.7,
            mlp_alpha_factor=1.1,
        ),
    ),
    "jamba": ("jamba", dict(num_experts=7, num_experts_per_tok=3, intermediate_size=18)),
    "lfm2_moe": (
        "lfm2_moe",
        dict(
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=18,
        ),
    ),
    **(
        {
            "lara_mini": (
                "lara_mini",
                dict(_QWEN, layer_types=["linear_attention", "sliding_attention", "full_attention"], sliding_window=9),
            )
        }
        if "lara_mini" in LINEAR_FAMILIES  # since transformers 5.24
        else {}
    ),
}
"""Family and what its configuration has beside that of the dense one."""


def published_sizes(name: str) -> dict[str, Any]:
    """Widths as published models have them, multiples of what kernels compute at once, for a name of SPARSE."""
    family, sizes = SPARSE[name]
    widths = {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 96,
    }
    own = widths if "moe_intermediate_size" in sizes else {"intermediate_size": 64}
    wide = PUBLISHED.get(family.replace("_moe", ""), {"vocab_size": 128, "hidden_size": 128})
    return {**wide, **{field: size for field, size in own.items() if field in sizes}}


def expert_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """As of `linear_model`, by a name of SPARSE."""
    family, sizes = SPARSE[name]
    model = linear_model(family, dtype, seed, **{**sizes, **changes})
    model.config._experts_implementation = "eager"  # the others want sizes that are multiples
    return model


EXPERTS = ", experts"
DEEP = (*FAMILIES, *SELDOM, *(f"{name}{EXPERTS}" for name in SPARSE))
"""All families, with and without experts."""
_OTHER_LAYER = 1, 5


def deep_model(name: str) -> Any:
    """A model of a name of DEEP with seven layers: the second and the sixth are of the second kind, if the family has one."""
    family, experts, _ = name.partition(EXPERTS)
    name, own = SPARSE[family] if experts else (family, SELDOM.get(family, {}))
    sizes = {**SIZES.get(name, {}), **own}
    changes: dict[str, Any] = {} if family.startswith("nemotron_h") else {"num_hidden_layers": 7}
    if kinds := sizes.get("layer_types"):
        changes["layer_types"] = [kinds[index in _OTHER_LAYER] for index in range(6)] + [kinds[-1]]
    if kinds := sizes.get("mlp_layer_types"):
        changes["mlp_layer_types"] = [kinds[0]] + [kinds[-1]] * 6
    if family == "bamba":
        changes["attn_layer_indices"] = [*_OTHER_LAYER]
    if family == "rat":
        changes["num_layers"] = 7
    if family == "transnormer":
        changes |= {"decoder_layers": 7, "linear_use_lrpe_list": [int(index not in _OTHER_LAYER) for index in range(7)]}
    if family == "minicpm_sala":
        changes["mixer_types"] = [("lightning-attn", "minicpm4")[index in _OTHER_LAYER] for index in range(7)]
    return expert_model(family, **changes) if experts else linear_model(family, **changes)
