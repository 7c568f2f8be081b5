"""The losses that CUDA runs compiled: one graph, the same values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from still_export.linearization.objectives import cross_entropy, divergence
from still_export.mixers.hybrid_attention.modes import selection_loss
from still_export.mixers.trainable import fused, relative_error
from still_kernels.hybrid_attention import HybridAttentionConfig


def case(name: str) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
    """A loss, the tensor that it is differentiated by, and the others."""
    torch.manual_seed(0)
    if name == "selection":
        config = HybridAttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, chunk_size=8, salient_per_chunk=2)
        loss = functools.partial(selection_loss, config=config)
        return loss, torch.randn(2, 40, 2, 8), (torch.randn(2, 40, 1, 8), torch.randint(0, 40, (2, 5)))
    if name == "relative error":
        return relative_error, torch.randn(2, 9, 2, 8), (torch.randn(2, 9, 2, 8),)
    if name == "divergence":
        return divergence, torch.randn(2, 9, 30), (torch.randn(2, 9, 30),)
    return cross_entropy, torch.randn(2, 9, 30), (torch.randint(0, 30, (2, 9)),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selection", "relative error", "divergence", "cross-entropy"])
def test_compiled_losses_are_the_losses(name: str) -> None:
    loss, values, others = case(name)
    results = []
    for function in (loss, torch.compile(loss, dynamic=False, fullgraph=True)):
        leaf = values.clone().requires_grad_()
        output = function(leaf, *others)
        results.append((output.detach(), torch.autograd.grad(output.square().sum(), leaf)[0]))
    assert results[0][1].abs().max() > 0
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_on_the_cpu_nothing_is_compiled() -> None:
    assert fused(divergence, torch.device("cpu")) is divergence


def test_cross_entropy_is_that_of_each_position() -> None:
    logits, target = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    expected = -logits.log_softmax(-1).gather(2, target[..., None])[..., 0]
    torch.testing.assert_close(cross_entropy(logits, target), expected)
