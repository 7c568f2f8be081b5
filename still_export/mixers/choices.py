"""Fields of a STILL configuration that an export may choose, as flags; separate, so that naming them needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from still_export.options import option

MODEL = "The model and its states"
"""Group of flags."""


@dataclass(frozen=True)
class StillChoices:
    """Choices of an export; None: the model's own, or the default."""

    chunk_size: int | None = option(None, "Tokens per chunk.", shown="64", panel=MODEL)
    salient_per_chunk: int | None = option(None, "Tokens per chunk that stay in softmax.", shown="4", panel=MODEL)
    select_scope: str | None = option(None, "q_head, kv_group_max or kv_group_mean.", shown="q_head", panel=MODEL)
    capacity_tokens: int | None = option(None, "Longest sequence.", shown="the model's own")
    overflow: str | None = option(None, "Beyond it: error or fold_oldest.", shown="error", panel=MODEL)
    cache: str | None = option(
        None,
        "Keep keys and values in float16 (of float32) or int8.",
        shown="as the activations",
        panel=MODEL,
    )
    whole_prompts: bool = option(
        False, "Feed a prompt in one call: selected blocks go dense or sparse by its length.", panel=MODEL
    )
