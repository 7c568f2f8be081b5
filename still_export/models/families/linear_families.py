"""Families with linear layers. Each file has one family or a few related ones; its first line names the layers.

Such a model is exported unchanged: no layer is linearized, no untrained layer attached. Its STILL configuration follows from its own.
"""

from __future__ import annotations

from still_export.discovery import Registry
from still_export.models.families import (
    fla_families,
    gated_delta,
    hypenet,
    kimi,
    lara,
    lfm,
    mamba,
    mamba2_hybrids,
    mamba3,
    mamba_in_llama,
    minicpm_sala,
    minimax,
    radlads,
    recurrent_gemma,
    rwkv6,
    rwkv7,
    transnormer,
    zamba2,
    zebra_llama,
)
from still_export.models.families.softmax_families import Family

FILES = (
    *(gated_delta, mamba2_hybrids, kimi, lfm, mamba, minimax, fla_families, transnormer, minicpm_sala),
    *(rwkv6, rwkv7, radlads, mamba_in_llama, zebra_llama, hypenet, mamba3, lara, zamba2, recurrent_gemma),
)
LINEAR_NEEDS = (5, 23)
"""The oldest transformers that these families are compared with. 5.20, which vLLM 0.33 asks for, computes Mamba-2 in another way."""
LINEAR_FAMILIES: Registry[Family] = Registry(
    (family for file in FILES for family in file.FAMILIES),  # type: ignore[attr-defined]
    "family",
    "FAMILIES",
)
"""By transformers' model_type; includes families of research systems."""
