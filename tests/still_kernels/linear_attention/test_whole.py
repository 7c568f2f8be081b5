"""Linear attention of whole sequences, which training differentiates, against the loop: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from still_kernels.linear_attention.call import linear_attention_whole
from still_kernels.linear_attention.meaning import Inputs, empty_state
from tests.still_kernels.linear_attention.inputs import LAYERS, Layer, error, loop, whole


def inputs_of(layer: Layer, tensors: dict[str, Tensor]) -> Inputs:
    return Inputs(**tensors, update_rule=layer.rule, scale=layer.scale)


def expected(layer: Layer, tensors: dict[str, Tensor], grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs and gradients of the loop in float64."""
    wide = {name: x.detach().double().cpu().requires_grad_() for name, x in tensors.items()}
    state = empty_state(len(grad), layer.heads, layer.dim, layer.size, torch.float64)
    output, _ = loop(inputs_of(layer, wide), state)
    return output.detach(), torch.autograd.grad(output, list(wide.values()), grad.double().cpu())


@pytest.mark.parametrize("tokens", [1, 65, 257])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_outputs_and_gradients_equal_the_loop(layer: Layer, tokens: int) -> None:
    """Five chunks: states are joined over one, two and four of them."""
    tensors = {name: x.float().requires_grad_() for name, x in whole(layer, 2, tokens).items()}
    output = linear_attention_whole(inputs_of(layer, tensors))
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(output, list(tensors.values()), grad)
    values, gradients = expected(layer, tensors, grad)
    assert error(output.detach(), values) <= layer.bound
    # A gradient that is nearly nothing is a difference of larger ones.
    for name, mine, theirs in zip(tensors, found, gradients, strict=True):
        assert error(mine, theirs) <= 20 * layer.bound or theirs.abs().max() < 1e-9, name


def test_without_gradients_nothing_differs() -> None:
    layer = Layer()
    tensors = {name: x.float() for name, x in whole(layer, 2, 130).items()}
    values, _ = expected(layer, tensors, torch.zeros(2, 130, layer.heads, 1, layer.size))
    assert error(linear_attention_whole(inputs_of(layer, tensors)), values) <= layer.bound


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [Layer("gated", decay=64, dim=64, size=64), Layer(dim=64, size=64)], ids=str)
def test_cuda_equals_the_loop(layer: Layer) -> None:
    """The Triton kernels forward, compiled PyTorch backward."""
    tensors = {name: x.float().cuda().requires_grad_() for name, x in whole(layer, 2, 257).items()}
    output = linear_attention_whole(inputs_of(layer, tensors))
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, list(tensors.values()), grad)
    values, gradients = expected(layer, tensors, grad)
    assert error(output.detach().cpu(), values) <= 5e-3
    for name, mine, theirs in zip(tensors, found, gradients, strict=True):
        assert error(mine.cpu(), theirs) <= 5e-3, name
