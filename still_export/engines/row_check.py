"""Check that an engine computes every row of a batch as it does alone; TensorRT 8.6 has built engines that do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from still_export.runtime.trt_engine import TrtError

TOLERANCE = 0.1
"""Largest distance of a row's logits from those of the row alone, as a share of their norm. Kernels of other batches round otherwise: on an
H200, float16, that was 0.2% at most, and rows of wrong engines were 83% away or more."""

STEPS = 4


class WrongEngineError(TrtError):
    """An engine that computes wrong numbers."""


def check_rows(model: Any, batch: int, context: int = 0) -> float:
    """Compare every row of a batch with the row alone: a prefill call in which rows have different lengths, then decode steps.

    Args:
        model: A TrtModel; it forgets what it holds.
        context: Tokens that an empty state pretends to have seen.

    Returns:
        The largest distance, as a share of the logits' norm.

    Raises:
        WrongEngineError: It is above the tolerance, a number is infinite or none, or the engine has counted the tokens wrongly.
    """
    table = model.table
    longest = max(1, min(model.prefill_tokens, table.period + 1, table.capacity_tokens - STEPS))
    counts = np.maximum(1, longest - np.arange(batch))
    vocabulary = model.manifest["model"]["vocab_size"]
    prompts = np.random.default_rng(0).integers(0, vocabulary, (batch, longest + STEPS))
    together = _answers(model, prompts, counts, context)
    largest = 0.0
    for row, count in enumerate(counts):
        alone = _answers(model, prompts[row : row + 1], counts[row : row + 1], context)[:, 0]
        if not np.isfinite(alone).all():
            raise WrongEngineError(
                f"the engine gives numbers that are infinite or none for {count} tokens of a single row. Either the model overflows in "
                "its type (export it with --dtype float32, or bfloat16 for TensorRT 10 and later), or the kernels are wrong."
            )
        errors = np.linalg.norm(together[:, row] - alone, axis=1) / np.linalg.norm(alone, axis=1)
        if not (errors < TOLERANCE).all():
            calls = [f"prefill of {count} tokens", *(f"decode step {i + 1}" for i in range(STEPS))]
            found = ", ".join(f"{c} {e:.1%}" for c, e in zip(calls, errors, strict=True) if not e < TOLERANCE)
            raise WrongEngineError(
                f"the engine is wrong: row {row} of {batch} is not what it is alone after {context} tokens ({found})."
            )
        largest = max(largest, float(errors.max()))
    return largest


def _answers(model: Any, prompts: np.ndarray, counts: np.ndarray, context: int) -> np.ndarray:
    """Logits [1 + STEPS, B, V]: of each row's last token in a prefill call of `counts` tokens, and of the decode steps behind it."""
    rows = np.arange(len(counts))
    longest = int(counts.max())
    model.start(len(counts), context + longest + STEPS)
    model.length[:] = context
    logits = model.feed(prompts[:, :longest], counts)
    answers = [logits[rows, counts - 1 if logits.shape[1] > 1 else 0]]
    for step in range(STEPS):
        answers.append(model.feed(prompts[rows, counts + step][:, None])[:, 0])
    expected = context + counts + STEPS
    found = model.lengths_on_device()
    if (found != expected).any():
        raise WrongEngineError(
            f"the engine is wrong: it counted {found.tolist()} tokens in place of {expected.tolist()}."
        )
    return np.stack(answers)
