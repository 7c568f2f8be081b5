"""NAtS-L's models: modules with the weights, and the supported settings of its authors' configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from still_export.errors import ConfigError
from still_export.models.families.fla import FlaGatedDeltaNet, FlaKind, GatedRMSNorm
from still_export.models.families.fla_families import LINEAR, fla_family, gated_delta_net_heads
from still_kernels.routed_attention.spec import ROUTED_CHUNK

NATS, ROUTED = "neural_attention_search_linear_attn_gdn", "hybrid"
"""The model_type, and transformers' name of layers other than plain gated delta rule."""


class PairNorm(nn.Module):
    """Norms of two rows, summed by shares, times silu of a gate; in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight1, self.weight2 = (nn.Parameter(torch.ones(size)) for _ in range(2))
        self.eps = eps

    def forward(self, first: Tensor, second: Tensor, shares: Tensor, gate: Tensor) -> Tensor:
        """Rows and gate [.., size], shares [.., 2]."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        total = torch.zeros_like(gate, dtype=wide)
        for rows, weight, share in zip((first, second), (self.weight1, self.weight2), shares.unbind(-1), strict=True):
            rows = rows.to(wide)
            rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + self.eps) * weight.to(wide)
            total = total + rows * share.to(wide)[..., None]
        return (total * nn.functional.silu(gate.to(wide))).to(gate.dtype)


class FlaRouted(FlaGatedDeltaNet):
    def add_parts(self, config: Any) -> None:
        super().add_parts(config)
        keys, heads = self.num_k_heads * self.head_k_dim, config.num_attention_heads
        self.o_norm = PairNorm(self.outputs // heads, config.rms_norm_eps)
        self.nats_layer = nn.Linear(config.hidden_size, 2 * config.routes, bias=False)
        self.nats_out_weights_layer = nn.Linear(keys, 2 * heads, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = (GatedRMSNorm(keys // heads, config.rms_norm_eps, None) for _ in range(2))


def nats_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, softmax, sizes = config["num_heads"], config["num_attn_heads"], gated_delta_net_heads(config)
    routes = config.get("num_nats_head") or heads
    keys, values = (heads * sizes[f"linear_{x}_head_dim"] for x in ("key", "value"))
    if heads % routes or softmax % routes or keys % softmax or values % softmax:
        raise ConfigError(
            f"num_nats_head={routes} in config.json must divide num_heads={heads} and num_attn_heads={softmax}, which must divide "
            f"{keys} channels of keys and {values} of values. Fix one of them."
        )
    plain = set(config.get("gdn_layers") or ())
    return sizes | {
        "layer_types": [LINEAR if i in plain else ROUTED for i in range(config["num_hidden_layers"])],
        "num_attention_heads": softmax,
        "num_key_value_heads": softmax,
        "head_dim": max(keys, values) // softmax,
        "qk_norm": config.get("attn_qk_norm", False),
        "routes": routes,
        "keep_decay": config.get("decay_for_non_gdn_blocks", False),
    }


_COVERED: dict[str, tuple[Any, ...]] = {
    "nats_block_size": (ROUTED_CHUNK,),
    "n_ops": (2,),
    "nats_block_agg_type": ("mean",),
    "nats_sample_strategy": ("argmax",),
    "ops_for_incomplete_chunks": ("all",),
    "incomplete_block_start_with_ht": (True,),
    "outputs_are_wighted": (True,),  # the authors' spelling
    "use_gate": (True,),
    "use_short_conv": (True,),
    "conv_bias": (False,),
    "attn_with_short_conv": (True,),
    "attn_apply_pos_encoding": (False,),
    "attn": (None,),
}
"""Supported values of NAtS-L's settings."""


def _covered(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {**_COVERED, "num_v_heads": (None, config.get("num_heads"))}


FAMILIES = (
    fla_family(
        FlaKind(
            NATS,
            "NatsLinear",
            "gated_delta_net",
            FlaGatedDeltaNet,
            nats_heads,
            {
                "head_dim": 256,
                "num_heads": 6,
                "num_attn_heads": 12,
                "expand_v": 2.0,
                "use_short_conv": True,
                "use_gate": True,
                "attn_with_short_conv": False,
                "attn_apply_pos_encoding": True,
            },
            _covered,
            further={ROUTED: ("routed_attention", FlaRouted)},
            fields={"qk_norm": (bool, False), "routes": (int, 0), "keep_decay": (bool, False)},
        ),
        __name__,
    ),
)
