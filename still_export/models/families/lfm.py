"""LFM2, LFM3 (since transformers 5.23): a short convolution in most layers, softmax in the others; LFM3 also has softmax with a window."""

from __future__ import annotations

from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM

from still_export.mixers.layers import FULL, WINDOWED
from still_export.models.families.linear_mixins import Place, linear_family, newer_families
from still_export.models.families.support import SLIDING

PLACES = {"conv": Place("short_conv", ("conv",)), "full_attention": Place(FULL, ("self_attn",))}


FAMILIES = (
    linear_family(__name__, Lfm2Config, Lfm2ForCausalLM, PLACES),
    linear_family(__name__, Lfm2MoeConfig, Lfm2MoeForCausalLM, PLACES),
    *newer_families(__name__, "Lfm3", {**PLACES, SLIDING: Place(WINDOWED, ("self_attn",))}),
)
