"""Stage 2's loss from last hidden states. Logits exist for one slice of positions at a time, and never in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from still_export.mixers.trainable import fused

SLICE = 1 << 25
"""Logits at a time: 128 MB in float32, of which a handful exist at once."""


@contextlib.contextmanager
def without_head(model: Any) -> Iterator[None]:
    """Inside the block the model returns its last hidden states, the input of its head, as logits."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del head.forward


def head_losses(
    hidden: Tensor, weight: Tensor, following: Tensor, teacher: Tensor | None = None, answers: Tensor | None = None
) -> Tensor:
    """Loss of each position, float32 [B, T], in nats: cross-entropy, or with a teacher the divergence from its distribution.

    Args:
        hidden: Last hidden states [B, T, channels].
        weight: The head's weight, [V, channels]; frozen.
        following: Ids of the next tokens, [B, T].
        teacher: The teacher's last hidden states.
        answers: Positions that use cross-entropy even with a teacher, bool [B, T].
    """
    flat = [None if x is None else x.flatten(0, 1) for x in (hidden, teacher, following, answers)]
    losses: Tensor = _HeadLosses.apply(weight, torch.is_grad_enabled() and hidden.requires_grad, *flat)
    return losses.view(following.shape)


class _HeadLosses(torch.autograd.Function):
    """Each loss depends on its own hidden state only. The forward pass computes the gradient as well, and the backward pass scales it."""

    @staticmethod
    def forward(ctx, weight, wanted, hidden, teacher, following, answers):  # type: ignore[no-untyped-def]
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        matrix = weight.to(dtype)
        compute = fused(loss_and_slope, hidden.device)
        losses, gradients = [], []
        rows = max(1, SLICE // len(matrix))
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = hidden[part].to(dtype) @ matrix.T
            expected = None if teacher is None else teacher[part].to(dtype) @ matrix.T
            loss, slope = compute(logits, expected, following[part], None if answers is None else answers[part], wanted)
            losses.append(loss)
            if wanted:
                gradients.append((slope @ matrix).to(hidden.dtype))
        if wanted:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gradients,) = ctx.saved_tensors
        return None, None, (grad[:, None] * gradients).to(gradients.dtype), None, None, None


def loss_and_slope(
    logits: Tensor, teacher: Tensor | None, following: Tensor, answers: Tensor | None, wanted: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Losses [N] (see `head_losses`), and if `wanted` their derivatives by logits [N, V], in the type of the logits.

    Args:
        logits, teacher: [N, V]. following, answers: [N].
    """
    logs = logits.float().log_softmax(-1)
    entropy = -logs.gather(-1, following[:, None])[:, 0]
    token = torch.arange(logits.shape[-1], device=logits.device) == following[:, None]
    if teacher is None:
        losses, aim = entropy, token.float()
    else:
        expected = teacher.float().log_softmax(-1)
        aim = expected.exp()
        losses = (aim * (expected - logs)).sum(-1)
        if answers is not None:
            losses, aim = torch.where(answers, entropy, losses), torch.where(answers[:, None], token.float(), aim)
    return losses, (logs.exp() - aim).to(logits.dtype) if wanted else None


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each position, [...], in nats; logits [..., V], target ids [...]."""
    # Flat: with the vocabulary in the middle PyTorch used a CUDA kernel that took 73% of a step.
    flat = nn.functional.cross_entropy(logits.float().flatten(0, -2), target.flatten(), reduction="none")
    return flat.view(target.shape)
