"""Linearize a softmax model: attention transfer, then LoRA, then a STILL model folder with an adapter for the base."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from still_export.errors import ConfigError
from still_export.linearization.cost import cost_of
from still_export.linearization.plan import Planner
from still_export.linearization.recipe import Recipe
from still_export.linearization.run import Linearization, LinearizationRun
from still_export.linearization.trainer import Progress


def linearize(
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    force: bool = False,
    command: str = "",
    progress: Progress = lambda *_: None,
    log: Callable[[str], None] = lambda _: None,
) -> Linearization:
    """Linearize `recipe.base` into the model folder `output`; the adapter is written to `output`/adapter.

    Runs in one process, or in all that torchrun or `accelerate launch` started.

    Args:
        resume: Continue the run with checkpoints in `output`.
        log: Called with a line about each part of the work.

    Raises:
        TrainingError: Training cannot continue; checkpoints stay intact.
        DataError: The texts are unusable.
        ConfigError: The recipe contradicts the model or the folder.
    """
    if not recipe.base:
        raise ConfigError("a linearization needs a base model: still-export linearize BASE -o DIR.")
    accelerator = make_accelerator(recipe)
    run = LinearizationRun(recipe, output, accelerator, progress, log)
    run.open_folder(resume, force)
    try:
        return _train(run, resume, command)
    except BaseException:
        if accelerator.is_main_process and not resume:
            run.folder.discard()
        raise


def _train(run: LinearizationRun, resume: bool, command: str) -> Linearization:
    planner = Planner(run) if run.recipe.budget else None
    if not resume and planner is None:
        run.log(cost_of(run))
    stages = []
    if run.recipe.transfer_steps:
        stages.append(run.transfer())
    finetune, model, attentions = run.finetune(planner.until if planner else math.inf)
    stages += [finetune] if finetune else []
    if planner is None:
        result = Linearization(run.output, run.quality(model, attentions), stages)
    else:
        plan = planner.settle(model, attentions)
        bits = {f"{name}, {n:,}": plan[name]["bits"][n] for n in plan["base"]["bits"] for name in ("base", "reached")}
        result = Linearization(run.output, bits, stages, plan)
    del model, attentions  # writing and asking load models of their own
    if run.accelerator.is_main_process:
        run.write(result, command)
    run.accelerator.wait_for_everyone()
    return result


def make_accelerator(recipe: Recipe) -> Accelerator:
    """An Accelerator for the recipe, seeded. float32 products may use TF32, which is more precise than bfloat16."""
    # Without a GPU, accelerate starts a process group only if the CPU is requested.
    on_cpu = recipe.device == "cpu" or not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision="bf16" if recipe.precision == "bf16" else "no", cpu=on_cpu or None)
    set_seed(recipe.seed)
    if recipe.precision == "bf16":
        torch.set_float32_matmul_precision("high")
    # Each row length compiles its own kernels, in both stages, with and without gradients.
    torch._dynamo.config.recompile_limit = 64
    return accelerator


def leave_processes() -> None:
    """Leave the process group, which torch requires at the end; does nothing in a single process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
