"""The training loop of a stage, with accelerate, sharded checkpoints, and resumption after being killed at any point."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from still_export.errors import TrainingError
from still_export.linearization.curves import Curves
from still_export.linearization.passes import Passes, passes_of
from still_export.linearization.recipe import Recipe
from still_export.package.refusals import first_line
from still_export.texts.texts import Batch, Batches

PARTIAL = StateDictOptions(ignore_frozen_params=True, strict=False)
MOST_CHECKPOINTS = 2
CLIP_NORM = 1.0
"""Largest norm of the gradient."""
Arguments = ParamSpec("Arguments")


class StopTraining(BaseException):
    """Raised by a progress callback to end the run with a checkpoint."""


@dataclass
class StageReport:
    """The result of a stage.

    losses: Of each step. validation: (step, loss) pairs. seconds: Of training steps only, over all runs of the stage.
    kept: Step with the least validation loss; the stage returns its weights.
    """

    name: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    stopped_early: bool = False
    done: bool = False
    kept: int = 0


def _on_a_stream_of_its_own(
    method: Callable[Concatenate[Trainer, Arguments], StageReport],
) -> Callable[Concatenate[Trainer, Arguments], StageReport]:
    """Run a trainer's method on a CUDA stream of its own, because the default stream cannot be recorded."""

    @functools.wraps(method)
    def wrapped(trainer: Trainer, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> StageReport:
        if trainer.accelerator.device.type != "cuda":
            return method(trainer, *arguments, **named)
        default, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(default)
        with torch.cuda.stream(stream):
            report = method(trainer, *arguments, **named)
        default.wait_stream(stream)
        return report

    return wrapped


Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called after each step with (stage, steps done, steps in all, {"loss", tokens per second})."""


class Trainer:
    """Trains the parameters of `objective` that require a gradient.

    Args:
        name: Name of the stage and its checkpoints.
        folder: Folder for checkpoints of all stages.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, name: str, folder: Path, progress: Progress) -> None:
        self.accelerator, self.recipe, self.name = accelerator, recipe, name
        self.folder = folder / name
        self.progress = progress
        self.best: dict[str, Any] = {}

    @_on_a_stream_of_its_own
    def train(
        self,
        objective: nn.Module,
        batches: Batches,
        steps: int,
        rate_of: Callable[[str], float],
        validate: Callable[[nn.Module], float],
        until: float = math.inf,
    ) -> StageReport:
        """Train for `steps` steps, from the latest checkpoint if there is one.

        Args:
            objective: Maps ids and weights to (loss, parts).
            rate_of: Highest learning rate of a parameter, by its name in `objective`.
            validate: Returns the loss for early stopping, equal on all processes.
            until: Monotonic time after which no step begins; the first process to reach it ends the stage for all.

        Raises:
            TrainingError: The loss is not finite, memory does not suffice, or a checkpoint does not fit.
        """
        accelerator, recipe = self.accelerator, self.recipe
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in objective.named_parameters():
            if parameter.requires_grad:
                groups.setdefault(rate_of(name), []).append(parameter)
        optimizer = torch.optim.AdamW(
            [{"params": members, "lr": rate} for rate, members in groups.items()], weight_decay=0.0
        )
        module, optimizer = accelerator.prepare(objective, optimizer)
        trained = [p for p in module.parameters() if p.requires_grad]
        kinds = len(set(recipe.row_lengths or (recipe.row_tokens,)))
        passes = passes_of(accelerator, module, optimizer, kinds, recipe.gradient_checkpointing)
        report = self._restore(module, optimizer)
        curves = Curves(self.folder.parent, self.name, report.steps) if accelerator.is_main_process else None
        ahead = ThreadPoolExecutor(1)  # prepares the next batch while the GPU computes
        following = ahead.submit(batches.batch, report.steps)
        while report.steps < steps and not report.done:
            started = time.perf_counter()
            for group, rate in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = rate * schedule(report.steps, steps, recipe.warmup)
            try:
                batch = following.result()
                if report.steps + 1 < steps:
                    following = ahead.submit(batches.batch, report.steps + 1)
                loss, parts, late = self._step(passes, optimizer, trained, batch, until)
            except torch.OutOfMemoryError as error:
                raise TrainingError(
                    f"stage {self.name} ran out of GPU memory at step {report.steps} with {recipe.batch_size} rows of "
                    f"{recipe.row_tokens} tokens. Use a smaller --micro-batch-size (the result stays the same), "
                    f"--gradient-checkpointing, --precision bf16 or more processes; then --resume. Checkpoints are in {self.folder}."
                ) from error
            if not math.isfinite(loss):
                bad = [str(i) for i, part in enumerate(parts) if not math.isfinite(part)]
                raise TrainingError(
                    f"the loss of stage {self.name} is {loss} at step {report.steps} (parts {', '.join(bad)} of {len(parts)}): "
                    "the teacher's activations, or the student's, are not finite. Use --precision fp32 or a smaller "
                    f"rate; then --resume. Checkpoints before it are in {self.folder}."
                )
            report.steps += 1
            report.tokens += recipe.batch_size * recipe.row_tokens
            seconds = time.perf_counter() - started
            report.seconds += seconds
            report.losses.append(loss)
            report.parts = parts
            last = late or report.steps == steps
            validated = None
            if report.steps % recipe.validate_every == 0 or last:
                validated = validate(module)
                report.validation.append((report.steps, validated))
                if validated == min(loss for _, loss in report.validation):
                    report.kept = report.steps
                    self.best = _copy(get_model_state_dict(module, options=PARTIAL))
                report.stopped_early = plateau([v for _, v in report.validation], recipe.patience) and not last
            report.done = last or report.stopped_early
            if curves is not None:
                speed = recipe.batch_size * recipe.row_tokens / seconds
                rate = max(group["lr"] for group in optimizer.param_groups)
                curves.add(report.steps, loss, validated, rate, speed, report.seconds)
                try:
                    self.progress(self.name, report.steps, steps, {"loss": loss, "tokens/s": speed})
                except StopTraining:
                    if (
                        accelerator.num_processes == 1
                    ):  # other processes do not know, and checkpoints are written by all together
                        self._save(module, optimizer, report)
                    raise
            if report.done or report.steps % recipe.checkpoint_every == 0:
                self._save(module, optimizer, report)
        if 0 < report.kept < report.steps:  # 0 if no validation was finite
            set_model_state_dict(module, self.best, options=PARTIAL)
        if curves is not None:
            curves.close()
        return report

    def _step(
        self, passes: Passes, optimizer: Any, trained: list[nn.Parameter], batch: Batch, until: float
    ) -> tuple[float, list[float], bool]:
        """One optimizer step; returns (loss over all processes, its parts, whether a process reached `until`)."""
        accelerator, recipe = self.accelerator, self.recipe
        rows = torch.arange(accelerator.process_index, len(batch.ids), accelerator.num_processes)
        groups = rows.split(recipe.rows_of_a_pass(batch.ids.shape[1]))
        total, total_parts = torch.zeros((), device=accelerator.device), torch.zeros((), device=accelerator.device)
        passes.begin()
        for number, part in enumerate(groups, 1):
            share = len(part) / len(rows)
            loss, parts = passes.run(batch.ids[part], batch.weights[part], share, last=number == len(groups))
            total, total_parts = total + loss * share, total_parts + parts * share
        passes.end()
        accelerator.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        late = torch.tensor([float(time.monotonic() >= until)], device=accelerator.device)
        sums = torch.cat([late, total[None].float(), total_parts.float()])
        late_share, mean, *means = accelerator.reduce(sums, reduction="mean").tolist()
        return mean, means, late_share > 0

    def _save(self, module: nn.Module, optimizer: Any, report: StageReport) -> None:
        """Write a checkpoint that gets its name only once complete."""
        accelerator = self.accelerator
        final = self.folder / f"step-{report.steps:07d}"
        partial = final.with_suffix(".partial")
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        weights, state = get_state_dict(module, optimizer, options=PARTIAL)
        try:
            with _one_process_is_fine():
                dcp.save({"weights": weights, "optimizer": state, "best": self.best or weights}, checkpoint_id=partial)
        except dcp.api.CheckpointException as error:  # no Exception; it has those of all processes
            shutil.rmtree(partial, ignore_errors=True)
            raise next(iter(error.failures.values()))[0] from None
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / "report.json").write_text(json.dumps(asdict(report)), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self._checkpoints()[:-MOST_CHECKPOINTS]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("step-*") if p.suffix != ".partial")

    def _restore(self, module: nn.Module, optimizer: Any) -> StageReport:
        found = self._checkpoints()
        if not found:
            return StageReport(self.name)
        weights, state = get_state_dict(module, optimizer, options=PARTIAL)
        self.best = _copy(weights)
        try:
            with _one_process_is_fine():
                dcp.load({"weights": weights, "optimizer": state, "best": self.best}, checkpoint_id=found[-1])
            set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state, options=PARTIAL)
            values = json.loads((found[-1] / "report.json").read_text(encoding="utf-8"))
        except (dcp.api.CheckpointException, OSError, ValueError, RuntimeError, KeyError) as error:
            raise TrainingError(
                f"the checkpoint {found[-1]} does not fit this run: {first_line(error)}. --resume needs the recipe that wrote it, or "
                "remove it to continue from the one before."
            ) from error
        values["validation"] = [(step, loss) for step, loss in values["validation"]]
        return StageReport(**values)


def _copy(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Silence torch's warning that a checkpoint is written without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: a linear rise over the first `warmup` share, then a cosine down to a tenth."""
    rise = max(1, round(steps * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def plateau(losses: list[float], patience: int) -> bool:
    """Whether the last `patience` losses improved the best one before by less than a thousandth."""
    if patience == 0 or len(losses) <= patience:
        return False
    return min(losses[-patience:]) > min(losses[:-patience]) * (1 - 1e-3)
