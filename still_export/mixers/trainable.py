"""Trainable layers: the interface for linearization, and shared code of their modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from still_export.mixers.projections import ProjectedAttention
from still_kernels.recompute import fused

STUDENT, SOFTMAX, TRANSFER = "student", "softmax", "transfer"


class Trainable(Protocol):
    """A layer's module that can compute different outputs on whole sequences.

    layer_idx: Number of its layer in the model. Layers that are not linearized, such as those with a window, have no Trainable, so a place
        in a list of them is no such number.
    mode: "student"; "softmax": the base model's attention; "transfer": the output is softmax, and the student's error is stored in
        `difference`.
    save_memory: The student of a transfer is recomputed in the backward pass.
    selection_queries: Positions [b, n] in the first b sequences of the queries that define which tokens should be salient; None:
        `selection` is not computed. Layers without selection never compute it.
    selection_target: Attention of these queries, measured before, without gradients, in softmax mode; None: the student's own.
    difference: Squared error relative to the teacher's mean square, per head or in all, [H or 1].
    selection: Loss of the selection, a scalar.
    """

    layer_idx: int
    mode: str
    save_memory: bool
    selection_queries: Tensor | None
    selection_target: Tensor | None
    difference: Tensor | None
    selection: Tensor | None

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False) -> Any:
        """Like nn.Module."""


class TrainableModule(ProjectedAttention):
    """Mixin for a linear attention module that replaces softmax; the teacher uses the base's projections without LoRA."""

    mode: str = STUDENT
    save_memory: bool = False
    selection_queries: Tensor | None = None
    selection_target: Tensor | None = None
    difference: Tensor | None = None
    selection: Tensor | None = None

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        """Like the module; a call with a cache always runs the student."""

        def student() -> Tensor:
            return super(TrainableModule, self).mix(hidden, position_embeddings, past_key_values)

        if past_key_values is not None or self.mode == STUDENT:
            return student()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode == SOFTMAX):
            *projections, last = (without_lora(proj) for proj in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))
            query, key, value = self.heads(hidden, projections)
            query, key = self.turned(query, key, position_embeddings)
            target = last(softmax_attention(query, key, value).flatten(2))
        if self.mode == TRANSFER:
            again = self.save_memory and torch.is_grad_enabled()
            output = checkpoint(student, use_reentrant=False) if again else student()
            self.difference = fused(relative_error, target.device)(output[:, :, None], target[:, :, None])
        return target


def without_lora(projection: nn.Module) -> nn.Module:
    """The projection inside a LoRA wrapper, or the projection itself."""
    return getattr(projection, "base_layer", projection)


@contextlib.contextmanager
def attention_mode(modules: Sequence[Trainable], mode: str) -> Iterator[None]:
    """Inside the block, every module computes `mode`."""
    before = [module.mode for module in modules]
    for module in modules:
        module.mode = mode
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.mode = old


FUSED = ("RMSNorm", "MLP")
"""Suffixes of module classes that process each token separately: a few linear layers with much elementwise work."""


def fuse_layers(model: nn.Module, device: torch.device) -> None:
    """On CUDA, compile norms, MLPs and output projections with LoRA, in place. Eager, they took a third of a step of stage 2.

    All layers share the compiled code.
    """
    if device.type == "cpu":
        return
    for name, module in model.named_modules():
        with_lora = name.endswith("o_proj") and without_lora(module) is not module
        if with_lora or type(module).__name__.endswith(FUSED):
            module.compile()


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention of query [B, T, H, D] to key and value [B, T, HK, D]: [B, T, H, D], dtype of value."""
    q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2)


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of [B, T, H, D] over the target's mean square, by row and head, as a mean over rows, [H].

    Dividing by the target's mean square hardly changes a head's optimum, because heads have separate parameters and AdamW is invariant to
    their loss's scale. It makes layers comparable. As a mean over rows the result does not depend on the split of a batch.
    """
    output, target = output.float(), target.float()
    error = (output - target).square().mean(dim=(1, 3))
    return (error / target.square().mean(dim=(1, 3)).clamp_min(1e-12)).mean(0)
