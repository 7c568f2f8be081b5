"""Check that an engine computes each row of a batch like that row alone. TensorRT 8.6 has built engines that do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from still_export.runtime.trt_engine import TrtError

TOLERANCE = 0.1
"""Largest error of a row's logits, as a share of their norm. Rounding differs between kernels: on an H200 in float16 by at most 0.2%. Rows
of wrong engines were off by 83% or more."""

STEPS = 4


class WrongEngineError(TrtError):
    """The engine does not compute its graph."""


def check_rows(model: Any, batch: int, context: int = 0) -> float:
    """Compare each row of a batch with the row alone: a prefill call with rows of different lengths, then decode steps.

    Args:
        model: A TrtModel; its state is overwritten.
        context: Tokens that the empty state claims to have seen.

    Returns:
        The largest error, as a share of the logits' norm.

    Raises:
        WrongEngineError: The error exceeds the tolerance, a number is not finite, or the engine counted the tokens wrongly.
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
                f"the engine gives infinite numbers or NaN for {count} tokens of a single row. Either the model overflows in "
                "its type (export it with --dtype float32, or bfloat16 for TensorRT 10 and later), or the kernels are wrong."
            )
        errors = np.linalg.norm(together[:, row] - alone, axis=1) / np.linalg.norm(alone, axis=1)
        if not (errors < TOLERANCE).all():
            calls = [f"prefill of {count} tokens", *(f"decode step {i + 1}" for i in range(STEPS))]
            found = ", ".join(f"{c} {e:.1%}" for c, e in zip(calls, errors, strict=True) if not e < TOLERANCE)
            raise WrongEngineError(
                f"the engine is wrong: row {row} of {batch} differs from the row alone after {context} tokens ({found})."
            )
        largest = max(largest, float(errors.max()))
    return largest


def _answers(model: Any, prompts: np.ndarray, counts: np.ndarray, context: int) -> np.ndarray:
    """Logits [1 + STEPS, B, V]: each row's last token in a prefill call of `counts` tokens, then the decode steps."""
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
            f"the engine is wrong: it counted {found.tolist()} tokens instead of {expected.tolist()}."
        )
    return np.stack(answers)
