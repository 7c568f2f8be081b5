"""What CUDA runs compiled, losses and the parts of a layer: one graph, the same values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from still_export.linearization import losses
from still_export.linearization.adapter import attach_lora
from still_export.linearization.losses import cross_entropy, head_losses, loss_and_slope
from still_export.linearization.objectives import FinetuneObjective, make_students
from still_export.linearization.recipe import Recipe
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention import modes
from still_export.mixers.hybrid_attention.modes import TrainableAttention, selection_loss
from still_export.mixers.trainable import fuse_layers, relative_error
from still_export.models import attach_untrained
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.recompute import fused
from tests.still_export.tiny import plain_model, random_ids


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few small kernels: to start processes that compile side by side takes longer than these."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def case(name: str) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
    """A loss, the tensor that it is differentiated by, and the others."""
    torch.manual_seed(0)
    if name == "selection":
        config = HybridAttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, chunk_size=8, salient_per_chunk=2)
        loss = functools.partial(selection_loss, config=config)
        return loss, torch.randn(2, 40, 2, 8), (torch.randn(2, 40, 1, 8), torch.randint(0, 40, (2, 5)))
    if name == "relative error":
        return relative_error, torch.randn(2, 9, 2, 8), (torch.randn(2, 9, 2, 8),)
    raise ValueError(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selection", "relative error"])
def test_compiled_losses_are_the_losses(name: str, one_process: None) -> None:
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
    assert fused(loss_and_slope, torch.device("cpu")) is loss_and_slope


KINDS = ("next token", "teacher", "teacher and answers")


def hidden_case(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Hidden states, head, next tokens, the teacher's hidden states and answers."""
    torch.manual_seed(0)
    teacher = None if kind == "next token" else torch.randn(2, 9, 5, dtype=torch.float64)
    answers = torch.rand(2, 9) > 0.7 if kind == "teacher and answers" else None
    hidden = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 30, (2, 9)), teacher, answers


@pytest.mark.parametrize("kind", KINDS)
def test_losses_without_logits_are_those_of_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slices that end within a row, the last one short."""
    monkeypatch.setattr(losses, "SLICE", 7)
    hidden, head, following, teacher, answers = hidden_case(kind)
    logs = (hidden @ head.T).log_softmax(-1)
    expected = -logs.gather(2, following[..., None])[..., 0]
    if teacher is not None:
        wanted = (teacher @ head.T).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - logs)).sum(-1)
        expected = divergence if answers is None else torch.where(answers, expected, divergence)
    got = head_losses(hidden, head, following, teacher, answers)
    torch.testing.assert_close(got, expected.float())
    weights = torch.randn(2, 9)
    gradients = [torch.autograd.grad((x * weights).sum(), hidden)[0] for x in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(head_losses(hidden, head, following, teacher, answers), got)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loss_is_the_loss(kind: str, one_process: None) -> None:
    hidden, head, following, teacher, answers = hidden_case(kind)
    logits: Any = [None if x is None else (x.detach() @ head.T).flatten(0, 1).float() for x in (hidden, teacher)]
    rest: Any = (following.flatten(), None if answers is None else answers.flatten())
    compiled = torch.compile(loss_and_slope, dynamic=False, fullgraph=True)
    for mine, theirs in zip(compiled(*logits, *rest), loss_and_slope(*logits, *rest), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_cross_entropy_is_that_of_each_position() -> None:
    logits, target = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    expected = -logits.log_softmax(-1).gather(2, target[..., None])[..., 0]
    torch.testing.assert_close(cross_entropy(logits, target), expected)


@pytest.mark.slow
def test_compiled_layers_share_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, projections and MLPs of three layers: as many graphs as one has, and nothing changes."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    given: dict[str, Any] = {"backend": backend, "fullgraph": True}
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, **given))
    projected = torch.compile(TrainableAttention.project, **given)

    def as_compiled(function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        return projected if function is TrainableAttention.project else function

    results = []
    for compiled in (False, True):
        plain = plain_model("llama", torch.float32)
        model = attach_untrained(plain, StillConfig(chunk_size=8, salient_per_chunk=2))
        attentions = make_students(model)
        torch.manual_seed(0)
        model = attach_lora(model, Recipe())
        if compiled:
            fuse_layers(model, torch.device("cuda"))
            monkeypatch.setattr(modes, "fused", as_compiled)
        ids = random_ids(2, 40)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = FinetuneObjective(model, attentions, "kl")(ids, torch.ones(ids.shape))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results.append((loss.detach(), torch.autograd.grad(loss, trained)))
    assert len(graphs) == 10  # four kinds of parts; again with gradients, and of norm and MLP behind frozen embeddings
    torch.testing.assert_close(*results, rtol=0, atol=0)
