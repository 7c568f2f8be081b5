"""Configurations of Mamba-in-Llama: what its folders say, and the sizes as mixers ask for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from huggingface_hub.dataclasses import strict

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import LinearConfigMixin
from still_export.models.families.stack import StackConfig, demand_covered, kept, rope_of

_READ = ("expand", "ngroups", "d_state", "d_conv", "dt_rank", "repeat_kv_before_conv", "conv_bias")
_TRAINING = (
    *("A_init_range", "conv_init", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "headdim"),
    *("chunk_size", "use_mem_eff_path", "use_fast_path"),
)
"""Fields of ssm_cfg that change no trained model."""
_COVERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("bias", "proj_x_bias", "proj_z_bias", "out_proj_bias", "norm_before_gate", "D_has_hdim"), (False,)
    ),
    **{"rmsnorm": (True,), "d_ssm": (None,)},
}


@strict
class InLlamaConfig(StackConfig):
    """What its layers have, under transformers' names where it has the like.

    Args:
        mamba_inner: Channels of the gate, of C and of the output of a Mamba layer.
        mamba_shared: Of x and B, which serve mamba_inner / mamba_shared groups of mamba_d_state channels each.
        mamba_repeat_first: They are repeated before the convolution, else behind it.
        mamba_dt_rank: Of the step, of Mamba alone.
    """

    vocab_size: int = 128256
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    mamba_inner: int = 4096
    mamba_shared: int = 1024
    mamba_d_state: int = 128
    mamba_d_conv: int = 4
    mamba_dt_rank: int = 256
    mamba_repeat_first: bool = False
    mamba_conv_bias: bool = True
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, width, ssm = str(config["model_type"]), int(config["hidden_size"]), dict(config.get("ssm_cfg") or {})
    second, heads, layers = (
        not kind.endswith("mamba"),
        int(config["num_attention_heads"]),
        int(config["num_hidden_layers"]),
    )
    kinds = list(config["layer_types"])
    model = f"a {kind}"
    unread = sorted(set(ssm) - {*_READ, *_TRAINING, *_COVERED})
    if unread:
        raise UnsupportedModelError(f"ssm_cfg of {model} model has {', '.join(unread)}; read: {', '.join(_READ)}.")
    demand_covered(model, ssm, _COVERED)
    no = (False, None)
    covered = {
        "hidden_act": ("silu",),
        "attention_bias": no,
        "mlp_bias": no,
        "d_model": (width, None),
        "n_layer": (layers, None),
    }
    context = int(config.get("max_position_embeddings") or 1 << 20)
    window = config.get("sliding_window")
    if FULL in kinds and (window or context) < context:
        raise UnsupportedModelError(
            f"sliding_window={window} in config.json of {model} model: softmax layers are read without a window, as the published code "
            "runs them. Set it to null to read them so."
        )
    demand_covered(model, config, covered)
    dim = int(ssm.get("d_state") or (128 if second else 16))
    keys, size = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or width // heads)
    inner, shared = int(config.get("d_inner") or width * ssm.get("expand", 2)), int(config.get("d_xb") or keys * size)
    groups = ssm.get("ngroups", 1) if second else inner // dim
    if shared % dim or inner % shared or inner != groups * dim:
        raise ConfigError(
            f"the configuration gives d_inner={inner}, d_xb={shared}, and in ssm_cfg d_state={dim}"
            f"{f', ngroups={groups}' if second else ''}: d_inner must be a multiple of d_xb, and d_xb of d_state"
            f"{', and d_inner ngroups times d_state' if second else ''}. Fix the named values."
        )
    rank = ssm.get("dt_rank", "auto")
    return {
        **kept(config, "intermediate_size", "rms_norm_eps", "initializer_range"),
        **(kept(config, "max_position_embeddings") if FULL in kinds else {}),
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": size,
        "mamba_inner": inner,
        "mamba_shared": shared,
        "mamba_d_state": dim,
        "mamba_d_conv": int(ssm.get("d_conv", 4)),
        "mamba_dt_rank": math.ceil(width / 16) if rank == "auto" else int(rank),
        "mamba_repeat_first": bool(ssm.get("repeat_kv_before_conv", not second)),
        "mamba_conv_bias": bool(ssm.get("conv_bias", True)),
        "rope_parameters": rope_of(config),
        "layer_types": kinds,
    }


class InLlamaConfigMixin(LinearConfigMixin):
    """Sizes as Mamba-2's mixer asks for them."""

    @property
    def second(self) -> bool:
        """Its linear layers are Mamba-2."""
        return not self.model_type.endswith("mamba")  # type: ignore[attr-defined]

    @property
    def mamba_mixed(self) -> int:
        """Channels that go through Mamba's convolution."""
        return self.mamba_inner if self.mamba_repeat_first else self.mamba_shared  # type: ignore[attr-defined]

    @property
    def mamba_n_heads(self) -> int:
        return self.mamba_inner // self.mamba_d_state  # type: ignore[attr-defined]

    @property
    def mamba_n_groups(self) -> int:
        """Groups of B and C beside one of x in what the convolution reads."""
        return self.mamba_n_heads if self.mamba_repeat_first else self.mamba_shared // self.mamba_d_state  # type: ignore[attr-defined]

    @property
    def mamba_d_head(self) -> int:
        return self.mamba_d_state  # type: ignore[attr-defined]
