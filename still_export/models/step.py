"""The model as a function of tensors: tokens and states in, logits and states out. This is what export traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.cache import StillCache
from still_export.models.base import last_rows
from still_graphs.states import EMBEDDINGS, POSITIONS


def forward_with_state(
    model: Any,
    input_ids: Tensor,
    new_tokens: Tensor,
    past_length: Tensor,
    states: Sequence[dict[str, Tensor]],
    keep: int = 1,
    extra_inputs: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Run a STILL model without data-dependent control flow, hidden state or Python counters.

    Args:
        model: A STILL model of any family.
        input_ids: [B, T], right-padded.
        new_tokens: Number of new tokens in each sequence, int64 [B].
        past_length: Number of earlier tokens in each sequence, int64 [B].
        states: Per layer, tensors by name, those of its ops' OpSpecs. All-zero states with past_length 0 start a sequence; see
            `still_export.mixers.cache.empty_states`.
        keep: Logits are computed for the last `keep` new tokens of each sequence; 0: for all.
        extra_inputs: Those named in `still_graphs.states.IMAGE_INPUTS`, for a model with a vision encoder.

    Returns:
        Logits [B, min(T, keep), V], or [B, T, V], and the states after the call in the order and shapes of `states`.
    """
    hidden, states = decode_with_state(model, input_ids, new_tokens, past_length, states, **(extra_inputs or {}))
    return model.logits(last_rows(hidden, new_tokens, rows_left(input_ids, keep))), states


def decode_with_state(
    model: Any,
    input_ids: Tensor,
    new_tokens: Tensor,
    past_length: Tensor,
    states: Sequence[dict[str, Tensor]],
    **extra_inputs: Tensor,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Like `forward_with_state`, up to the last norm: hidden states [B, T, channels]. `extra_inputs`: the model's inputs besides tokens."""
    cache = StillCache.from_states(model.config, states, past_length)
    cache.progress.begin(new_tokens, None)
    positions = past_length[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
    return decode_with(model, positions, cache, input_ids, extra_inputs).last_hidden_state, cache.states()


def rows_left(input_ids: Tensor, keep: int) -> Any:
    """Rows of the tokens [B, T] that remain for `keep`; see `forward_with_state`."""
    return keep if keep < 2 else torch.sym_min(input_ids.shape[1], keep)


def decode_with(
    model: Any, positions: Tensor, cache: StillCache, input_ids: Tensor, extra_inputs: Mapping[str, Tensor]
) -> Any:
    """Run the base model on tokens [B, T] at `positions` [B, T]; `extra_inputs` replaces some embeddings and positions."""
    if EMBEDDINGS not in extra_inputs:
        return model.decode(positions, cache, input_ids=input_ids, **extra_inputs)
    own = model.model.embed_tokens(input_ids.clamp_min(0))
    embedded = torch.where(input_ids[..., None] < 0, extra_inputs[EMBEDDINGS].to(own.dtype), own)
    return model.decode(
        torch.where(extra_inputs[POSITIONS] < 0, positions, extra_inputs[POSITIONS]), cache, inputs_embeds=embedded
    )
