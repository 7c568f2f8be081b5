"""Random models of every linear family, as transformers has them: dimensions all differ, gates and decays drawn wide."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from still_export.models.families.experts import FLOAT32
from still_export.models.families.linear_families import LINEAR_FAMILIES
from tests.still_export.decay_models import Mamba3Model, SalaModel, TransNormerModel
from tests.still_export.fla_models import SIZES as FLA_SIZES
from tests.still_export.fla_models import SOFTMAX, FlaModel
from tests.still_export.griffin_models import RecurrentGemmaModel
from tests.still_export.hype_models import HypeModel
from tests.still_export.in_llama_models import SIZES as IN_LLAMA
from tests.still_export.in_llama_models import InLlamaModel, ZebraModel
from tests.still_export.own_models import OwnModel
from tests.still_export.radlads_models import SIZES as RADLADS
from tests.still_export.radlads_models import RadladsModel
from tests.still_export.routed_models import ROUTED
from tests.still_export.rwkv_models import Rwkv6Model, Rwkv7Model
from tests.still_export.system_models import FluxModel, MohModel, RatModel, VisionModel

OWN: dict[str, type[OwnModel]] = {
    "mamba3": Mamba3Model,
    "recurrent_gemma": RecurrentGemmaModel,
    "flux_qwen3": FluxModel,
    "rat": RatModel,
    "moh_llama": MohModel,
    "transnormer": TransNormerModel,
    "minicpm_sala": SalaModel,
    "rwkv5": Rwkv6Model,
    "rwkv6": Rwkv6Model,
    "rwkv7": Rwkv7Model,
    "polaformer": VisionModel,
    "inline": VisionModel,
    "mirrorla": VisionModel,
    **ROUTED,
}
"""By model_type."""
VOCAB = 61
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=44,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_TAPS = ("conv1d.weight", "conv.conv.weight", "conv_1d.weight")
_ONE_SOFTMAX = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=24,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
    layer_types=_ONE_SOFTMAX,
)
_NO_SOFTMAX: dict[str, Any] = dict(num_attention_heads=None, num_key_value_heads=None)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(_DELTA, head_dim=16),
    "qwen3_next": dict(_DELTA, head_dim=16, num_experts=0),
    "olmo_hybrid": dict(_DELTA, linear_conv_kernel_dim=3),
    "granitemoehybrid": dict(
        num_local_experts=0,
        shared_intermediate_size=44,
        layer_types=_ONE_SOFTMAX,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_d_head=8,
        attention_multiplier=0.3,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        logits_scaling=3.0,
    ),
    "falcon_h1": dict(
        head_dim=6,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=14,
        mamba_rms_norm=True,
        key_multiplier=0.6,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.8,
        ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.9],
        ssm_in_multiplier=1.4,
        ssm_out_multiplier=0.7,
        mlp_multipliers=[0.9, 1.1],
        embedding_multiplier=2.0,
        lm_head_multiplier=0.4,
    ),
    "mamba2": dict(_NO_SOFTMAX, num_heads=6, head_dim=8, state_size=10, n_groups=2, time_step_limit=(0.1, 2.0)),
    "mamba": dict(_NO_SOFTMAX, intermediate_size=None, state_size=10, time_step_rank=5, use_bias=True),
    "falcon_mamba": dict(_NO_SOFTMAX, intermediate_size=None, state_size=10, time_step_rank=5),
    "jamba": dict(
        num_experts=1, mamba_d_state=10, mamba_dt_rank=5, attn_layer_period=3, attn_layer_offset=1, mamba_d_conv=3
    ),
    "kimi_linear": dict(
        num_key_value_heads=6,
        mlp_layer_types=["dense"] * 3,
        layer_types=_ONE_SOFTMAX,
        linear_num_heads=3,
        linear_head_dim=12,
        kv_lora_rank=14,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=10,
    ),
    "zamba2": dict(
        num_key_value_heads=None,
        num_hidden_layers=4,
        layer_types=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=10,
        mamba_ngroups=2,
        n_mamba_heads=6,
        adapter_rank=5,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "lfm3": dict(
        layer_types=["conv", "sliding_attention", "full_attention"], head_dim=8, conv_L_cache=7, sliding_window=37
    ),
}
"""What each family's configuration has beside `COMMON`, None where it lacks one of those."""
SELDOM: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=10),
}
"""The same of families made of parts that others have: few tests ask them."""
FAMILIES = (*SIZES, *FLA_SIZES, *OWN)
"""All, those that transformers has no class for too."""
_WIDE: dict[str, Any] = dict(vocab_size=128, hidden_size=128, intermediate_size=256)
_HEADS: dict[str, Any] = dict(_WIDE, num_attention_heads=2, num_key_value_heads=1)
_WIDE_DELTA: dict[str, Any] = dict(_HEADS, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64)
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(_WIDE_DELTA, head_dim=64),
    "qwen3_next": dict(_WIDE_DELTA, head_dim=64),
    "olmo_hybrid": _WIDE_DELTA,
    "granitemoehybrid": dict(_HEADS, shared_intermediate_size=256, mamba_n_heads=4, mamba_d_state=64, mamba_d_head=64),
    "falcon_h1": dict(_HEADS, head_dim=64, mamba_d_ssm=256, mamba_n_heads=4, mamba_d_head=64, mamba_d_state=64),
    "mamba2": dict(_WIDE, num_heads=4, head_dim=64, state_size=64),
    "mamba": dict(vocab_size=128, hidden_size=128, state_size=16),
    "falcon_mamba": dict(vocab_size=128, hidden_size=128, state_size=16),
    "jamba": dict(_HEADS, mamba_d_state=16),
    "kimi_linear": dict(
        _HEADS,
        num_key_value_heads=2,
        linear_num_heads=4,
        linear_head_dim=64,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
    ),
    "zamba2": dict(
        _HEADS, num_key_value_heads=None, n_mamba_heads=4, mamba_d_state=64, adapter_rank=32, intermediate_size=128
    ),
    "lfm2": _HEADS,
    "lfm3": dict(_HEADS, head_dim=64, sliding_window=64, layer_types=["conv", "sliding_attention", "full_attention"]),
    "gated_deltanet": dict(_WIDE, num_v_heads=4, head_dim=64, expand_v=1.0),
    "delta_net": dict(_WIDE, num_heads=2, expand_k=1.0, expand_v=1.0),
    "gla": dict(_WIDE, expand_k=2.0, expand_v=2.0, attn=dict(SOFTMAX, num_heads=2, num_kv_heads=1)),
    "hgrn2": dict(_WIDE, expand_ratio=64),
    "hgrn": _WIDE,
    "retnet": dict(_WIDE, num_heads=2),
    "flux_qwen3": dict(_HEADS, head_dim=64),
    "mamba3": dict(vocab_size=128, hidden_size=128, head_dim=64, state_size=64),
    "rat": dict(vocab_size=128, d_model=128, d_head=64, d_ffn=256, chunk_size=16),
    "parallax": dict(_WIDE, num_heads=2, num_kv_heads=1),
    "local_linear": dict(_WIDE, num_heads=2, num_kv_heads=1),
    "minicpm_sala": dict(_HEADS, head_dim=64, lightning_nh=2, lightning_nkv=2, lightning_head_dim=64),
    **{name: dict(_WIDE, head_size=64, attention_hidden_size=128) for name in ("rwkv5", "rwkv6")},
    "rwkv7": dict(_WIDE, head_dim=64, value_dim=None),
    "moh_llama": dict(_WIDE, num_attention_heads=8),
    "polaformer": dict(_WIDE, num_attention_heads=2, num_key_value_heads=2),
    "mirrorla": dict(_WIDE, num_attention_heads=2, num_key_value_heads=2),
    "inline": dict(_WIDE, num_attention_heads=2, num_key_value_heads=2),
    "transnormer": dict(decoder_embed_dim=128, hidden_dim=128, decoder_attention_heads=2, glu_dim=256),
}
"""Changes that make sizes the multiples of 16 that published models have, for runtimes that demand them."""


def published_pair(family: str) -> dict[str, Any]:
    """`PUBLISHED` with two layers: of a family with softmax layers one of each kind."""
    changes = dict(PUBLISHED[family], num_hidden_layers=2)
    if kinds := SIZES.get(family, {}).get("layer_types"):
        changes["layer_types"] = kinds[:2]
    if family == "kimi_linear":
        changes["mlp_layer_types"] = ["dense"] * 2
    if family == "minicpm_sala":
        changes["mixer_types"] = ["minicpm4", "lightning-attn"]
    return changes


def linear_config(family: str, **changes: Any) -> Any:
    """A plain configuration of transformers."""
    given = {**COMMON, **SIZES.get(family, {}), **SELDOM.get(family, {}), **changes}
    if family == "zamba2":  # its class computes what hybrid layers are before it knows the other name
        given["layers_block_type"] = given.pop("layer_types")
    return LINEAR_FAMILIES[family].config(**{name: value for name, value in given.items() if value is not None})


def linear_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model of transformers, or where it has no class by its formulas, every parameter random: what decays, and how fast, over a wide
    range."""
    generator = torch.Generator().manual_seed(seed)
    usual: int = COMMON["hidden_size"]
    narrow = (usual / changes.get("hidden_size", usual)) ** 0.5  # sums of more terms are no larger

    def drawn(name: str, shape: Sequence[int]) -> torch.Tensor:
        ranges = {"A_log": (-1.5, 1.5), "dt_bias": (-3.0, 0.5), "D": (0.5, 1.5), "recurrent_param": (-6.9, 0.0)}
        if bounds := ranges.get(name.rsplit(".", 1)[-1]):
            return bounds[0] + (bounds[1] - bounds[0]) * torch.rand(shape, generator=generator)
        # Taps so large that no output is lost in the norm that follows it: that would multiply rounding, in transformers too.
        values = torch.randn(shape, generator=generator) * (2.0 if name.endswith(_TAPS) else 0.2 * narrow)
        if name.endswith((".gate.weight", ".router.weight", "_bias")) and "norm" not in name:
            values = values * (1.5 if name.endswith("_bias") else 4.0)  # of routers, which are not flat
        one = "norm" in name and not (family.startswith("qwen3") and "linear_attn" not in name)
        return values + 1.0 if one else values

    if family in RADLADS:
        return RadladsModel(family, drawn, **changes)
    if family in IN_LLAMA:
        return InLlamaModel(family, drawn, **changes)
    if family == "zebra_llama":
        return ZebraModel(family, drawn, **changes)
    if family == "hypenet":
        return HypeModel(family, drawn, **changes)
    if family in OWN:
        return OWN[family](family, drawn, **changes)
    if family in FLA_SIZES:
        return FlaModel(family, drawn, **changes)
    model = AutoModelForCausalLM.from_config(linear_config(family, **changes)).to(dtype).eval()
    model.generation_config.eos_token_id = None  # random models must not stop by chance
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, torch.nn.Parameter) or name.endswith(FLOAT32):
                tensor.copy_(drawn(name, tensor.shape))
    return model
