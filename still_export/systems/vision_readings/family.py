"""Linear attention of vision models in a language model: causal readings in Llama's layers. No folder is published; the format is this
project's.

Left out are PolaFormer's patch positions, and MirrorLA's modulation, which depends on the whole sequence. So do the weights of InLine's
residual; here they depend on the tokens so far and weigh the latest ones, which differs from the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from still_export.errors import ConfigError
from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Family, Published
from still_export.models.families.stack import LlamaBlock, Stack, StackConfig
from still_export.models.families.transnormer import Places
from still_export.models.read.weights import Deferred, Weight, exact_value_of


@strict
class VisionConfig(StackConfig):
    """The layers' settings, under transformers' names where there are any.

    Args:
        kernel_size: Taps of PolaFormer's convolution; tokens of InLine's residual, 0: none.
        alpha: PolaFormer's powers lie between 1 and 1 + alpha.
        feature_map: Feature map of InLine's queries and keys, "identity" or "relu".
        mirrors: Number of MirrorLA's reflections of queries and keys, `attn.mirrors` [mirrors, channels]; folded into the projections.
        head_mirrors: Number of its later reflections across heads, `attn.head_mirrors` [head_mirrors, heads]; they reflect equal channels
            of all heads alike.
    """

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    kernel_size: int = 0
    alpha: float = 4.0
    feature_map: str = "identity"
    mirrors: int = 0
    head_mirrors: int = 0
    qkv_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        self.layer_types = ["linear_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)


class InLineMixer(nn.Module):
    """The weights of a layer under their stored names, until one of our mixers replaces the module."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.alpha = layer_idx, config.num_attention_heads, config.alpha
        self.rectified = config.feature_map == "relu"
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=config.qkv_bias) for _ in range(3))
        self.o_proj = nn.Linear(width, width)


class ResidualMixer(InLineMixer):
    """The same with a residual."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, taps = config.hidden_size, config.kernel_size
        first, last = (nn.Conv1d(width, width * n, 1, groups=self.heads) for n in (1, taps))
        self.residual = nn.Sequential(first, nn.GELU(), last)


class PolarMixer(InLineMixer):
    """The same for PolaFormer."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, size = config.hidden_size, config.hidden_size // self.heads
        self.g_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.power, self.scale = nn.Parameter(torch.zeros(self.heads, size)), nn.Parameter(torch.zeros(width))
        self.dwc = nn.Conv1d(size, size, config.kernel_size, groups=size)


class MirrorMixer(InLineMixer):
    """The same for MirrorLA, after `folded`."""


_MIXERS = {"polaformer": PolarMixer, "inline": InLineMixer, "mirrorla": MirrorMixer}


def folded(tensors: dict[str, Weight]) -> dict[str, Weight]:
    """Fold MirrorLA's reflections into the projections of queries and keys, reflections of channels before those of heads. Reflections of
    blocks of channels are 0 outside the block."""
    for kind in ("mirrors", "head_mirrors"):
        for name in [n for n in tensors if n.endswith(f".attn.{kind}")]:
            mirrors = tensors.pop(name)
            for part in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
                if (weight := tensors.get(own := name.removesuffix(kind) + part)) is not None:
                    read = partial(_reflected, weight, mirrors)
                    tensors[own] = Deferred(
                        torch.Size(weight.shape),
                        weight.dtype,
                        partial(read, weight.dtype),
                        exact=partial(read, torch.float32),
                    )
    return tensors


def _reflected(weight: Weight, mirrors: Weight, dtype: torch.dtype) -> Tensor:
    """`weight` [C] or [C, inputs] with its channels (or heads of channels) reflected by each of `mirrors` [R, C or heads] in order."""
    values, vectors = exact_value_of(weight), exact_value_of(mirrors).double()
    rows = values.double().reshape(vectors.shape[1], -1)  # a channel's inputs, or a head's channels and their inputs
    for mirror in vectors:
        rows = rows - torch.outer(mirror, mirror @ rows) * (2 / mirror.square().sum())
    return rows.reshape(values.shape).to(torch.float32).to(dtype)


def _layer(config: Any, index: int) -> LlamaBlock:
    name = config.model_type.removeprefix("still_")
    kind = ResidualMixer if name == "inline" and config.kernel_size else _MIXERS[name]
    return LlamaBlock(config, kind(config, index))


class VisionConfigMixin(LinearConfigMixin):
    """Checks of the settings."""

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        config: Any = self
        polar, mirrored = (config.model_type.endswith(name) for name in ("polaformer", "mirrorla"))
        if (config.mirrors < 1) if mirrored else config.mirrors:
            raise ConfigError(
                f"mirrors={config.mirrors} in config.json; it must be {'1 and more' if mirrored else '0'} for "
                f"{config.model_type.removeprefix('still_')}."
            )
        if config.head_mirrors and (not mirrored or config.head_mirrors < 0):
            raise ConfigError(f"head_mirrors={config.head_mirrors} in config.json; it must be 0, or more for mirrorla.")
        parts = config.num_attention_heads * (2 if polar else 1)
        if config.hidden_size % parts:
            raise ConfigError(
                f"hidden_size={config.hidden_size} in config.json is no multiple of {parts}, the heads' parts. Fix it."
            )
        taps = range(2, 65)
        if config.kernel_size not in (taps if polar else (0,) if mirrored else (0, *taps)):
            known = "2 to 64, taps" if polar else "0" if mirrored else "0, or 2 to 64, tokens of the residual"
            raise ConfigError(
                f"kernel_size={config.kernel_size} in config.json; it must be {known} for "
                f"{config.model_type.removeprefix('still_')}."
            )
        if config.feature_map not in ("identity", "relu") or ((polar or mirrored) and config.feature_map != "identity"):
            raise ConfigError(
                f"feature_map={config.feature_map!r} in config.json; covered: identity, and relu of InLine."
            )

    @property
    def key_size(self) -> int:
        """Key size of the rule: PolaFormer's keys have two signs, InLine's an additional 1."""
        config: Any = self
        size: int = config.hidden_size // config.num_attention_heads
        return {"polaformer": 2 * size, "inline": size + 1}.get(config.model_type.removeprefix("still_"), size)


FAMILIES: tuple[Family, ...] = tuple(
    stack_family(
        __name__,
        VisionConfig,
        lambda config: Stack(config, _layer, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), Places(config)),
        (VisionConfigMixin, LinearModelMixin),
        title=title,
        published=Published(tensors=folded),
        places={"linear_attention": Place("mean_attention", ("attn",))},
    )
    for title in ("PolaFormer", "InLine", "MirrorLA")
)
