"""Perplexity by position in long texts: whether distant text still helps, and where a model's context ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from still_export.errors import ConfigError
from still_export.texts.texts import tokenize

FIRST = 1024
"""Positions of the first range; each further range is as long as all before it."""
SLICE = 4096
"""Positions whose logits are cast at a time."""


def ranges(context: int) -> list[tuple[int, int]]:
    """Ranges of positions up to `context`, first and end: 0 to FIRST, then octaves."""
    found, start = [], 0
    while start < context:
        end = min(context, max(FIRST, 2 * start))
        found.append((start, end))
        start = end
    return found


@torch.no_grad()
def perplexity_by_position(model: Any, tokenizer: Any, text: str, context: int, limit: int) -> dict[str, float]:
    """Perplexity of the tokens in each range of positions, "first-end", over blocks of `context` tokens of the first `limit`.

    Raises:
        ConfigError: The text has not one block.
    """
    ids = tokenize(text[: 16 * limit], tokenizer, int(model.config.vocab_size))[:limit]
    blocks = len(ids) // context
    if blocks == 0:
        raise ConfigError(f"the text has {len(ids)} tokens, fewer than {context}. Give more text, or fewer positions.")
    rows = torch.from_numpy(ids[: blocks * context].reshape(blocks, context).astype(np.int64))
    nats = torch.zeros(context - 1, dtype=torch.float64)
    for row in rows.to(model.device):
        logits = model(row[None], use_cache=False).logits[0, :-1]
        pairs = zip(logits.split(SLICE), row[1:].split(SLICE), strict=True)
        losses = [nn.functional.cross_entropy(part.float(), target, reduction="none") for part, target in pairs]
        nats += torch.cat(losses).double().cpu()
    # Position p is predicted by the one before it; the first is given.
    return {
        f"{first}-{end}": math.exp(float(nats[max(first, 1) - 1 : end - 1].mean()) / blocks)
        for first, end in ranges(context)
    }
