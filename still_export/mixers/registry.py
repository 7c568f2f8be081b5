"""The mixers by the name that `layer_types` has for them. One line an op; no generic room names one."""

from __future__ import annotations

from typing import Any

from still_export.mixers.attention.mixer import AttentionMixer
from still_export.mixers.base import Mixer
from still_export.mixers.block_attention.mixer import BlockAttentionMixer, SelectedBlocksMixer
from still_export.mixers.chosen_heads.mixer import ChosenHeadsMixer
from still_export.mixers.chosen_width.mixer import ChosenWidthMixer
from still_export.mixers.cluster_attention.mixer import ClusterAttentionMixer
from still_export.mixers.feed_forward import FeedForwardMixer
from still_export.mixers.gated_delta_net.mixer import DeltaNetMixer, GatedDeltaNetMixer
from still_export.mixers.gated_linear_attention.mixer import GatedLinearAttentionMixer
from still_export.mixers.hybrid_attention.mixer import HybridAttentionMixer
from still_export.mixers.landmark_attention.mixer import LandmarkAttentionMixer
from still_export.mixers.latent_attention.mixer import LatentAttentionMixer
from still_export.mixers.liger_gla.mixer import LigerGLAMixer
from still_export.mixers.lightning_attention.mixer import LightningAttentionMixer
from still_export.mixers.linearized.mixer import LinearizedGatedDeltaNetMixer, LinearizedGLAMixer
from still_export.mixers.local_linear_attention.mixer import LocalLinearAttentionMixer
from still_export.mixers.mamba.mixer import MambaMixer
from still_export.mixers.mamba2.mixer import Mamba2Mixer
from still_export.mixers.mamba3.mixer import Mamba3Mixer
from still_export.mixers.mean_attention.mixer import MeanAttentionMixer
from still_export.mixers.parallel_mamba2.mixer import ParallelMamba2Mixer
from still_export.mixers.routed_attention.mixer import RoutedAttentionMixer
from still_export.mixers.rwkv7.mixer import Rwkv7Mixer
from still_export.mixers.short_conv.mixer import ShortConvMixer
from still_export.mixers.strided_attention.mixer import StridedAttentionMixer
from still_export.mixers.windowed_attention.mixer import WindowedAttentionMixer

MIXERS: dict[str, Mixer] = {
    mixer.name: mixer
    for mixer in (
        HybridAttentionMixer(),
        AttentionMixer(),
        LigerGLAMixer(),
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
        Rwkv7Mixer(),
        MeanAttentionMixer(),
        ChosenHeadsMixer(),
        ChosenWidthMixer(),
        LocalLinearAttentionMixer(),
        StridedAttentionMixer(),
        RoutedAttentionMixer(),
        LandmarkAttentionMixer(),
        ClusterAttentionMixer(),
        FeedForwardMixer(),
    )
}


def mixer_of(config: Any, index: int) -> Mixer:
    """The mixer of layer `index` of a model with the STILL family configuration `config`."""
    return MIXERS[config.still.layer_type(index)]
