"""The model as a function of tensors: tokens and states in, logits and states out. This is what export traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.cache import StillCache
from still_export.models.base import last_rows


def forward_with_state(
    model: Any,
    input_ids: Tensor,
    new_tokens: Tensor,
    past_length: Tensor,
    states: Sequence[dict[str, Tensor]],
    last_only: bool = True,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Run a STILL model without data-dependent control flow, hidden state or Python counters.

    Args:
        model: A STILL model of any family.
        input_ids: [B, T], right-padded.
        new_tokens: Tokens that each row brings, int64 [B].
        past_length: Tokens that each row has seen, int64 [B].
        states: Per layer, tensors by name: those of the OpSpec for hybrid layers; `key`, `value` [B, HK, capacity, D] for full ones.
            All-zero states with past_length 0 start a sequence; see `still_export.mixers.cache.empty_states`.
        last_only: Logits of each row's last new token instead of all.

    Returns:
        Logits [B, 1, V] or [B, T, V], and the states after the call in the order and shapes of `states`.
    """
    config, decoder = model.config, model.model
    cache = StillCache.from_states(config, states, past_length)
    cache.begin(new_tokens, None)
    hidden = decoder.embed_tokens(input_ids)
    positions = past_length[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
    position_embeddings = decoder.rotary_emb(hidden, positions)
    for layer in decoder.layers:
        hidden = layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=position_embeddings,
        )
    hidden = last_rows(decoder.norm(hidden), new_tokens, 1 if last_only else 0)
    return model.lm_head(hidden), cache.states()
