"""Forward and backward passes of a step; on CUDA recorded as graphs, which are cheap to launch.

A step of stage 2 launches some thousand kernels, for which the host takes longer than the GPU does.
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
    """The passes of consecutive steps. Gradients accumulate in the parameters, and over processes as FSDP does it.

    Args:
        objective: Maps ids and weights to (loss, parts); as `accelerator` prepared it.
    """

    def __init__(self, accelerator: Accelerator, objective: nn.Module, optimizer: Any) -> None:
        self.accelerator, self.objective, self.optimizer = accelerator, objective, optimizer

    def begin(self) -> None:
        """Start a step with zero gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, ids: Tensor, weights: Tensor, share: float, last: bool) -> tuple[Tensor, Tensor]:
        """Run one pass: returns detached loss and parts, valid until the next pass; adds its gradients times `share`.

        Args:
            ids, weights: [B, T], on any device. last: Of the step.
        """
        device = self.accelerator.device
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective):
            return self._forward_backward(ids.to(device), weights.to(device), share)

    def end(self) -> None:
        """Finish averaging gradients over processes."""

    def _forward_backward(self, ids: Tensor, weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            loss, parts = self.objective(ids, weights)
        # Outside of autocast: attention chooses its own precision when recomputed.
        self.accelerator.backward(loss * share)
        return loss.detach(), parts


class SummedPasses(Passes):
    """Gradients in one buffer, which the processes sum at the end of a step.

    DDP would add them up amid the last backward pass, which cannot be recorded, and waits in it for every gradient: rows of at most two
    chunks have none for what acts on far tokens alone.

    Args:
        trained: Parameters that have gradients, float32.
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
    """A recorded pass. ids, weights: its input buffers. loss, parts: its outputs."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    weights: Tensor
    loss: Tensor
    parts: Tensor


class ReplayedPasses(SummedPasses):
    """Runs the first pass of a shape normally, which compiles and loads kernels; then records it, and replays it from there on.

    Args:
        kinds: Lengths of rows: nothing is recorded before each was seen, for a recording keeps its memory to itself.
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
        """A pass as a graph; None, with a warning, where its operations cannot be one."""
        ids, weights = (x.to(self.accelerator.device, copy=True) for x in (ids, weights))
        graph = torch.cuda.CUDAGraph()
        # On the stream of the first pass, where autograd accumulates gradients. Only this thread must stick to recordable operations.
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
        self.pool = graph.pool()  # graphs never run concurrently, so they can share memory
        return _Recorded(graph, ids, weights, loss, parts)


def passes_of(
    accelerator: Accelerator, objective: nn.Module, optimizer: Any, kinds: int, checkpointing: bool
) -> Passes:
    """The runner of passes for a prepared objective; arguments: see the classes.

    Args:
        checkpointing: Activations are computed again, which asks the host for a random state amid the pass. FSDP decides there what it
            gathers. Neither can be recorded.
    """
    if isinstance(objective, FSDPModule):
        return Passes(accelerator, objective, optimizer)
    trained = [p for p in objective.parameters() if p.requires_grad]
    if accelerator.device.type != "cuda" or checkpointing:
        return SummedPasses(accelerator, objective, optimizer, trained)
    return ReplayedPasses(accelerator, objective, optimizer, trained, kinds)
