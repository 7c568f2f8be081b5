"""Cost of a linearization, printed before it starts: tokens, and the time measured with one row on this machine."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from still_export.linearization.objectives import TransferObjective
from still_export.mixers.trainable import SOFTMAX, attention_mode

if TYPE_CHECKING:
    from still_export.linearization.run import LinearizationRun

LEAST_STEPS = 20
"""Fewest steps with an estimate; for fewer the progress bar shows it soon enough."""


def cost_of(run: LinearizationRun) -> str:
    """One line on all stages of `run`; time is measured if one process has the whole model."""
    recipe = run.recipe
    steps = {"attention transfer": recipe.transfer_steps, "LoRA": recipe.finetune_steps}
    area = recipe.batch_size * recipe.row_tokens
    planned = " and ".join(f"{count:,} steps of {stage}" for stage, count in steps.items() if count)
    fits = run.fits and any(steps.values())
    planned = f"a start in closed form, then {planned}" if fits else planned
    line = f"cost: {planned or 'no step'}, {area:,} tokens each, {sum(steps.values()) * area:,} in all"
    if run.accelerator.num_processes > 1 or sum(steps.values()) < LEAST_STEPS:
        return line
    # With separate models: the stages load their own afterwards, with the same seed.
    seconds = sum(count * step_seconds(run, stage) for stage, count in steps.items() if count)
    seconds += fit_seconds(run) if fits else 0.0
    return f"{line}; about {spoken(seconds)} on this machine, measured on a row of each stage (Ctrl-C leaves nothing behind)"


def step_seconds(run: LinearizationRun, stage: str) -> float:
    """Time of a step, measured by forward and backward passes: of one row on the CPU, scaled by rows; of the whole step on a GPU."""
    device = run.accelerator.device
    objective: nn.Module = run.transfer_objective() if stage == "attention transfer" else run.finetune_objective(None)
    objective.to(device)
    batch = run.batches(run.recipe.retrieval).batch(0)
    whole = device.type != "cpu"
    rows = len(batch.ids) if whole else 1
    taken = run.recipe.rows_of_a_pass(batch.ids.shape[1])
    passes = [
        (batch.ids[i : i + taken].to(device), batch.weights[i : i + taken].to(device)) for i in range(0, rows, taken)
    ]
    for _ in range(2):  # the first run allocates, and compiles on a GPU
        begin = time.perf_counter()
        for ids, weights in passes:
            with run.accelerator.autocast():
                loss, _ = objective(ids, weights)
            loss.backward()
        if whole:
            torch.accelerator.synchronize()
    for parameter in objective.parameters():
        parameter.grad = None
    return (time.perf_counter() - begin) * len(batch.ids) / rows


def fit_seconds(run: LinearizationRun) -> float:
    """Time of the start in closed form, from the base's pass over one row and the fit of one layer to one and two rows."""
    objective, (rows, length) = run.transfer_objective(), run.fit_shape
    objective.to(run.accelerator.device)
    batch, layers = run.batches(0.0).batch(0).ids.flatten(), objective.attentions
    ids = batch.repeat(2)[: 2 * length].view(2, length).to(run.accelerator.device)

    def taken(count: int, fitted: int) -> float:
        begin = time.perf_counter()
        with torch.no_grad(), attention_mode(layers, SOFTMAX):
            if fitted:
                TransferObjective(objective.model, layers[:1], layers[1:]).fit(ids[:count])
            else:
                objective.model(ids[:count], use_cache=False, logits_to_keep=1)
        if run.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    taken(1, 0)  # allocates
    base, one, two = taken(1, 0), taken(1, 1), taken(2, 1)
    return rows * base + len(layers) * (one - base + (rows - 1) * max(0.0, two - one - base))


def peak_memory() -> str:
    """The most memory that this process used so far, in words."""
    text = f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB"
    if torch.cuda.is_available():
        text += f", on the GPU {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    return text


def spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
