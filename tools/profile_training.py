#!/usr/bin/env python3
"""Where a training step of `still-export linearize` spends its time, by kind of work, with the share of matrix work.

  python tools/profile_training.py BASE --text corpus.txt --stage 1 --batch-size 16 --sequence-length 2048 --precision bf16
  python tools/profile_training.py BASE --text corpus.txt --stage 2 --config recipe.yaml

On a GPU the time of its kernels counts, on the CPU that of PyTorch's operators.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from still_export.linearization.linearize import linearize
from still_export.linearization.recipe import read_recipe

KINDS = (
    ("softmax attention", r"flash|fmha|attention_(forward|backward)|scaled_dot_product|sdpa"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|wgmma|xmma|triton_tem|\b(mm|bmm|addmm|baddbmm)\b"),
    ("hybrid attention, backward", r"^(backward_\w+|gather)_kernel"),
    ("hybrid attention, forward", r"^(score|features|scan|attend|linear)\w*_kernel"),
    ("fused elementwise", r"^triton_"),
)
"""Kinds by the name of a kernel or operator, the first that matches; all but the last are matrix work."""
WAIT, WARM, ACTIVE = 12, 1, 3
"""Steps before the profiler looks, while it starts, that it sees. On a GPU the second is recorded as a graph; later ones replay it."""
SHOWN = 12


def kind_of(name: str) -> str:
    """The kind of work of a kernel."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "everything else")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--text", required=True)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--config", type=Path, help="YAML recipe; flags win over it")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    given = parser.parse_args()
    steps = WAIT + WARM + ACTIVE + 1  # the last one also validates
    flags = {name: getattr(given, name) for name in ("base", "batch_size", "sequence_length", "precision")}
    recipe = read_recipe(
        given.config,
        {
            **{name: value for name, value in flags.items() if value is not None},
            "texts": (given.text,),
            "transfer_steps": steps if given.stage == 1 else 0,
            "finetune_steps": steps if given.stage == 2 else 0,
            "validate_every": steps,
            "validation_rows": 1,
        },
    )
    cuda = torch.cuda.is_available()
    speeds: list[float] = []
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=activities, schedule=schedule(wait=WAIT, warmup=WARM, active=ACTIVE, repeat=1)) as profiler,
    ):

        def progress(stage: str, step: int, of: int, values: dict[str, float]) -> None:
            speeds.append(values["tokens/s"])
            profiler.step()

        linearize(recipe, Path(folder) / "model", progress=progress)
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        if not event.key.startswith("ProfilerStep"):
            times[event.key] += event.self_device_time_total if cuda else event.self_cpu_time_total
    total = sum(times.values())
    kinds: Counter[str] = Counter()
    for name, time in times.items():
        kinds[kind_of(name)] += time
    for name, time in times.most_common(SHOWN):
        print(f"{time / total:6.1%}  {time / ACTIVE / 1e3:9.2f} ms a step  {name[:90]}")
    print()
    for kind in (*(kind for kind, _ in KINDS), "everything else"):
        print(f"{kinds[kind] / total:6.1%}  {kinds[kind] / ACTIVE / 1e3:9.2f} ms a step  {kind}")
    matrix = sum(kinds[kind] for kind, _ in KINDS[:-1]) / total
    speed = statistics.median(speeds[WAIT // 2 : WAIT])  # behind those that compile and record
    print(f"matrix work {matrix:.1%} of {total / ACTIVE / 1e3:.1f} ms a step; {speed:,.0f} tokens/s unprofiled")
    if cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
