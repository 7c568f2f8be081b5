"""All mixers by name in `layer_types`, including those of research systems."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.discovery import Registry
from still_export.mixers.attention.mixer import AttentionMixer
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.block_attention.mixer import BlockAttentionMixer, SelectedBlocksMixer
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.gated_delta_net.mixer import DeltaNetMixer, GatedDeltaNetMixer
from still_export.mixers.gated_linear_attention.mixer import GatedLinearAttentionMixer
from still_export.mixers.hybrid_attention.mixer import HybridAttentionMixer
from still_export.mixers.latent_attention.mixer import LatentAttentionMixer
from still_export.mixers.lightning_attention.mixer import LightningAttentionMixer
from still_export.mixers.linearized.mixer import LinearizedGatedDeltaNetMixer, LinearizedGLAMixer
from still_export.mixers.mamba.mixer import MambaMixer
from still_export.mixers.mamba2.mixer import Mamba2Mixer
from still_export.mixers.mamba3.mixer import Mamba3Mixer
from still_export.mixers.parallel_mamba2.mixer import ParallelMamba2Mixer
from still_export.mixers.radlads.mixer import RadladsMixer
from still_export.mixers.rg_lru.mixer import RgLruMixer
from still_export.mixers.rwkv6.mixer import Rwkv6Mixer
from still_export.mixers.rwkv7.mixer import Rwkv7Mixer
from still_export.mixers.short_conv.mixer import ShortConvMixer
from still_export.mixers.windowed_attention.mixer import WindowedAttentionMixer


class FeedForwardMixer(FixedStatesMixer):
    """Layers of type "feed_forward": the family's block is not replaced."""

    name = "feed_forward"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return ()

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return base


MIXERS: Registry[Mixer] = Registry(
    (
        HybridAttentionMixer(),
        AttentionMixer(),
        LinearizedGLAMixer(),
        LinearizedGatedDeltaNetMixer(),
        LatentAttentionMixer(),
        WindowedAttentionMixer(),
        GatedDeltaNetMixer(),
        DeltaNetMixer(),
        GatedLinearAttentionMixer(),
        MambaMixer(),
        Mamba2Mixer(),
        Mamba3Mixer(),
        ParallelMamba2Mixer(),
        ShortConvMixer(),
        LightningAttentionMixer(),
        BlockAttentionMixer(),
        SelectedBlocksMixer(),
        Rwkv6Mixer(),
        Rwkv7Mixer(),
        RadladsMixer(),
        RgLruMixer(),
        FeedForwardMixer(),
    ),
    "mixer",
    "MIXERS",
)


def mixer_of(config: Any, index: int) -> Mixer:
    """The mixer of layer `index` of a model with the STILL family configuration `config`."""
    return MIXERS[config.still.layer_type(index)]
