"""Runs of the tuner in Triton's interpreter, by tests/still_kernels/interpreted.py: prints exit code, output and report of the kind that is
named first."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from still_kernels import launcher
from tools.kernels import tune

SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 24, "chunk_size": 32, "salient_per_chunk": 3}


def tuned(op: str, kernels: str, seconds: int) -> dict[str, Any]:
    """What the tuner says of some kernels of a small layer."""
    known = tune.work_of(op).sizes
    sizes = [word for name, size in SIZES.items() if name in known for word in ("--set", f"{name}={size}")]
    shown = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(shown):
        path = Path(folder, "tune.json")
        budget = ["--kernels", kernels, "--seconds", str(seconds), "-o", str(path)]
        code = tune.main([op, *sizes, "--context", "70", "--dtype", "float32", *budget])
        report = json.loads(path.read_text()) if path.exists() else None
    return {"code": code, "shown": shown.getvalue(), "report": report}


def wrong() -> dict[str, Any]:
    """With results that are wrong with one setting."""
    right = tune.Workload.run

    def run(self: Any, table: Any) -> Any:
        made, results = right(self, table)
        if table.kernels()["select"].num_warps == 2:
            results["output"][0, -1, 0, 0] += 1e6
        return made, results

    tune.Workload.run = run  # type: ignore[method-assign]
    tune.work_of("HybridAttention").moves["select"] = [{"num_warps": 2}]
    return tuned("HybridAttention", "select", 60)


def workspace() -> dict[str, Any]:
    """What a launch's workspace holds while the tuner watches, and what is left of it behind."""
    with tune._recording():
        nan = bool(launcher.allocate(torch.zeros(1), (3,), torch.float32).isnan().all())
    return {"nan": nan, "after": [launcher.Launcher.__name__, hasattr(launcher.Launcher, "made")]}


KINDS = {
    "written": lambda: tuned("HybridAttention", "score,select", 4),
    "softmax": lambda: tuned("Attention", "attend,decode", 3),
    "wrong": wrong,
    "workspace": workspace,
}

if __name__ == "__main__":
    print(json.dumps(KINDS[sys.argv[1]]()))
