"""Objectives of the two stages, as modules that DDP and FSDP can wrap: they map a batch to a loss and its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from still_export.linearization.losses import head_losses, without_head
from still_export.mixers.registry import mixer_of
from still_export.mixers.trainable import SOFTMAX, STUDENT, TRANSFER, Trainable, attention_mode

SELECTION_QUERIES = 32
"""Watched positions of a row for the loss of the selection: enough for a gradient, and cheap compared with T."""


def make_students(model: Any, learn_window_factors: bool = False) -> list[Trainable]:
    """Convert all linearized layers of a STILL model, in place, to the form with teacher and student modes. Parameter names stay."""
    found = (
        mixer_of(model.config, index).trainable(layer.self_attn, learn_window_factors)
        for index, layer in enumerate(model.model.layers)
    )
    return [module for module in found if module is not None]


class TransferObjective(nn.Module):
    """Stage 1: each layer's output against its softmax output (before o_proj in hybrid attention). Layers get the softmax output of the one
    before.

    Args:
        attentions: Linearized layers to compare.
        known: Other linearized layers, which only pass on their softmax output.
    """

    def __init__(self, model: Any, attentions: list[Trainable], known: Sequence[Trainable] = ()) -> None:
        super().__init__()
        self.model = model
        self.attentions, self.known = attentions, known

    @torch.no_grad()
    def fit(self, ids: Tensor) -> None:
        """Start layers that support it near the teacher's outputs on ids [B, T]."""

        def look(module: Any, arguments: Any, kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else arguments[0]
            module.fit(hidden, kwargs.get("position_embeddings"))

        hooks = [a.register_forward_pre_hook(look, with_kwargs=True) for a in self.attentions if hasattr(a, "fit")]
        if not hooks:
            return
        try:
            with attention_mode([*self.attentions, *self.known], SOFTMAX):
                self.model(ids, use_cache=False, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mean relative error over layers (and heads of hybrid attention), and the error per layer [L]; ids [B, T]."""
        with attention_mode(self.known, SOFTMAX), attention_mode(self.attentions, TRANSFER):
            self.model(ids, use_cache=False, logits_to_keep=1)
        layers = torch.stack([a.difference.mean() for a in self.attentions if a.difference is not None])
        return layers.mean(), layers.detach()


class FinetuneObjective(nn.Module):
    """Stage 2: next-token cross-entropy, or divergence from the teacher, of the model with LoRA.

    Args:
        model: A PEFT model around a STILL model. With its adapter disabled and softmax attention it is the teacher.
        loss: "ce" or "kl".
        selection_weight: Weight of the selection's loss.
        selection_target: Source of the target attention, "student" or "base".
        answer_loss: "same", or "ce" for tokens with a weight above 1.
        per_answer: In rows with answers, watch only the answers for the selection.
    """

    def __init__(
        self,
        model: Any,
        attentions: list[Trainable],
        loss: str,
        selection_weight: float = 0.0,
        answer_loss: str = "same",
        per_answer: bool = False,
        selection_target: str = "student",
    ) -> None:
        super().__init__()
        self.model = model
        self.attentions = attentions
        self.loss = loss
        self.selection_weight, self.selection_target = selection_weight, selection_target
        self.answer_loss, self.per_answer = answer_loss, per_answer

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and its parts [next token or divergence, answers, selection if watched]; ids, weights [B, T].

        The mean is over positions, not weights, so the mean over processes is that of the whole batch. The answers' part is their
        unweighted loss per position of the batch.
        """
        watched = self.selection_weight > 0 and torch.is_grad_enabled()
        positions = watched_positions(ids, weights, self.per_answer) if watched else None
        of_base = self.selection_target == "base"
        self._watch(positions if of_base else None)
        teacher = self.teacher_hidden(ids) if self.loss == "kl" or (watched and of_base) else None
        self._watch(positions)
        student_mode(self.attentions)
        with without_head(self.model):
            hidden = self.model(ids, use_cache=False).logits
        selection = (
            torch.stack([a.selection for a in self.attentions if a.selection is not None]).mean() if watched else None
        )
        weights = weights.roll(-1, dims=1)
        weights[:, -1] = 0  # the last token has no next one
        answers = weights > 1
        losses = head_losses(
            hidden,
            self.model.get_output_embeddings().weight,
            ids.roll(-1, dims=1),
            teacher if self.loss == "kl" else None,
            answers if self.answer_loss == "ce" else None,
        )
        predicted = weights.numel() - len(weights)
        main = (losses * weights).sum() / predicted
        parts = [main, (losses * answers).sum() / predicted]
        if selection is None:
            return main, torch.stack(parts).detach()
        return main + self.selection_weight * selection, torch.stack([*parts, selection]).detach()

    def _watch(self, positions: Tensor | None) -> None:
        for attention in self.attentions:
            attention.selection_queries = positions
            if positions is None:
                attention.selection_target = None

    @torch.no_grad()
    def teacher_hidden(self, ids: Tensor) -> Tensor:
        """Last hidden states of the base model, [B, T, channels]."""
        with attention_mode(self.attentions, SOFTMAX), without_adapter(self.model), without_head(self.model):
            return self.model(ids, use_cache=False).logits


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Disable LoRA inside the block, if the model has any. PEFT's own way searches all modules first, 16 ms a step."""
    tuner: Any = getattr(model, "base_model", None)
    if not hasattr(tuner, "disable_adapter_layers"):
        yield
        return
    tuner.disable_adapter_layers()
    try:
        yield
    finally:
        tuner.enable_adapter_layers()


def student_mode(attentions: list[Trainable]) -> None:
    """Set all layers to student mode. It stays set, because recomputation in the backward pass needs the same modes."""
    for attention in attentions:
        attention.mode = STUDENT


def watched_positions(ids: Tensor, weights: Tensor, per_answer: bool = False) -> Tensor:
    """Queries to watch, int64 [B, n]: those that predict answers (weight above 1), then evenly spread ones.

    Args:
        per_answer: Repeat a row's answers instead, so that one answer counts as much as many.
    """
    tokens = ids.shape[1]
    spread = (
        torch.arange(tokens, device=ids.device) * 0.6180339887 % 1
    )  # the golden ratio spreads the highest ones evenly
    answers = (weights > 1).roll(-1, dims=1)
    count = min(SELECTION_QUERIES, tokens)
    ranked = (answers.float() + spread).topk(count, dim=1).indices
    if not per_answer:
        return ranked
    found = answers.sum(1, keepdim=True)
    cycle = torch.where(found > 0, found.clamp_max(count), count)
    return ranked.gather(1, torch.arange(count, device=ids.device) % cycle)
