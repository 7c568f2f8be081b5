"""Forward and backward passes, one or more per step. On CUDA they are recorded as graphs that the host only starts.

A step of stage 2 launches some thousand kernels, which takes the host longer than the GPU needs to run them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class Passes:
    """Runs the passes of a step in sequence. Gradients add up in the parameters; FSDP reduces them over processes.

    Args:
        objective: Maps ids and weights to (loss, parts); prepared by `accelerator`.
    """

    def __init__(self, accelerator: Accelerator, objective: nn.Module, optimizer: Any) -> None:
        self.accelerator, self.objective, self.optimizer = accelerator, objective, optimizer

    def begin(self) -> None:
        """Start a step with zero gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, ids: Tensor, weights: Tensor, share: float, last: bool) -> tuple[Tensor, Tensor]:
        """Run a pass and add its gradients times `share`. Returns detached loss and parts, valid until the next pass.

        Args:
            ids, weights: [B, T], on any device. last: Whether it is the step's last pass.
        """
        device = self.accelerator.device
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective):
            return self._forward_backward(ids.to(device), weights.to(device), share)

    def end(self) -> None:
        """Make the gradients the mean over processes, if they are not yet."""

    def _forward_backward(self, ids: Tensor, weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            loss, parts = self.objective(ids, weights)
        # Outside of autocast: attention chooses its own precision when recomputed.
        self.accelerator.backward(loss * share)
        return loss.detach(), parts


class SummedPasses(Passes):
    """Gradients share one buffer, which is reduced over processes at the end of a step.

    DDP would reduce them during the last backward pass, which cannot be recorded. It also waits for all gradients, but rows of at most two
    chunks have none for parameters that act on far tokens only.

    Args:
        trained: Parameters with gradients, float32.
    """

    def __init__(
        self, accelerator: Accelerator, objective: nn.Module, optimizer: Any, trained: Sequence[nn.Parameter]
    ) -> None:
        super().__init__(accelerator, accelerator.unwrap_model(objective), optimizer)
        self.trained = trained
        self.sum = torch.zeros(sum(p.numel() for p in trained), device=accelerator.device)

    def begin(self) -> None:
        self.sum.zero_()
        for parameter, part in zip(self.trained, self.sum.split([p.numel() for p in self.trained]), strict=True):
            parameter.grad = part.view_as(parameter)

    def run(self, ids: Tensor, weights: Tensor, share: float, last: bool) -> tuple[Tensor, Tensor]:
        device = self.accelerator.device
        return self._forward_backward(ids.to(device), weights.to(device), share)

    def end(self) -> None:
        if self.accelerator.num_processes > 1:
            torch.distributed.all_reduce(self.sum)
            self.sum /= self.accelerator.num_processes


@dataclass
class _Recorded:
    """A recorded pass. ids, weights: Its inputs. loss, parts: Its outputs."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    weights: Tensor
    loss: Tensor
    parts: Tensor


class ReplayedPasses(SummedPasses):
    """Runs the first pass of each shape directly, which compiles and loads kernels, then records it and replays the recording.

    Args:
        kinds: Number of row lengths. Nothing is recorded before all were seen, because a recording reserves its memory.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: nn.Module,
        optimizer: Any,
        trained: Sequence[nn.Parameter],
        kinds: int,
    ) -> None:
        super().__init__(accelerator, objective, optimizer, trained)
        self.kinds = kinds
        self.recorded: dict[tuple[tuple[int, ...], float], _Recorded | None] = {}
        self.pool: Any = None
        self.records = True

    def run(self, ids: Tensor, weights: Tensor, share: float, last: bool) -> tuple[Tensor, Tensor]:
        key = (tuple(ids.shape), share)
        known = key in self.recorded
        recorded = self.recorded.setdefault(key, None)
        if recorded is None and known and self.records and len(self.recorded) >= self.kinds:
            recorded = self.recorded[key] = self._record(ids, weights, share)
        if recorded is None:
            return super().run(ids, weights, share, last)
        recorded.ids.copy_(ids)
        recorded.weights.copy_(weights)
        recorded.graph.replay()
        return recorded.loss, recorded.parts

    def _record(self, ids: Tensor, weights: Tensor, share: float) -> _Recorded | None:
        """Record a pass; None, with a warning, if its operations cannot be recorded."""
        ids, weights = (x.to(self.accelerator.device, copy=True) for x in (ids, weights))
        graph = torch.cuda.CUDAGraph()
        # On the stream of the first pass, where autograd adds gradients to parameters. Only this thread must avoid unrecordable calls.
        stream = torch.cuda.current_stream(ids.device)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                loss, parts = self._forward_backward(ids, weights, share)
        except RuntimeError as error:
            self.records = False
            warnings.warn(
                f"training passes cannot be recorded as a CUDA graph, so the host launches every kernel, which takes longer: {error}",
                stacklevel=2,
            )
            return None
        self.pool = graph.pool()  # graphs run one after another, so they can share memory
        return _Recorded(graph, ids, weights, loss, parts)


def passes_of(
    accelerator: Accelerator, objective: nn.Module, optimizer: Any, kinds: int, checkpointing: bool
) -> Passes:
    """The runner for the passes of a prepared objective; arguments: see the classes.

    Args:
        checkpointing: Whether activations are recomputed, which asks the host for a random state during the pass; FSDP decides what to
            gather there. Neither can be recorded.
    """
    if isinstance(objective, FSDPModule):
        return Passes(accelerator, objective, optimizer)
    trained = [p for p in objective.parameters() if p.requires_grad]
    if accelerator.device.type != "cuda" or checkpointing:
        return SummedPasses(accelerator, objective, optimizer, trained)
    return ReplayedPasses(accelerator, objective, optimizer, trained, kinds)
