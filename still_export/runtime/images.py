"""Positions of the tokens of a prompt with images (mRoPE) in time, height and width. No torch, no runtime.

Source: transformers, models/qwen3_5, `get_rope_index`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def image_positions(seen: np.ndarray, grids: Sequence[Sequence[int]], merge: int, first: int = 0) -> np.ndarray:
    """Positions int64 [3, T] of a prompt; the next token's is their maximum + 1.

    Args:
        seen: Mask [T] of image tokens: one run for each image, or frame of a video.
        grids: Time, rows and columns of patches of each image, from transformers' processor; a frame's time is 1.
        merge: Number of patches in a row that become one token.
        first: Position of the first token.

    Raises:
        ValueError: Runs and grids are not of one number and size.
    """
    ends = np.flatnonzero(np.diff(seen.astype(np.int8), prepend=0, append=0))
    runs = list(zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True))
    sizes = [(t, rows // merge, columns // merge) for t, rows, columns in grids]
    if [end - begin for begin, end in runs] != [int(np.prod(size)) for size in sizes]:
        raise ValueError(f"runs of image tokens at {runs} are not those of {len(sizes)} images of {sizes} tokens.")
    parts, done, place = [], 0, first
    for (begin, end), size in zip(runs, sizes, strict=True):
        text = place + np.arange(begin - done)
        place += begin - done
        parts += [np.tile(text, (3, 1)), place + np.indices(size).reshape(3, -1)]
        done, place = end, place + max(size[1:])
    parts.append(np.tile(place + np.arange(len(seen) - done), (3, 1)))
    return np.concatenate(parts, axis=1).astype(np.int64)
