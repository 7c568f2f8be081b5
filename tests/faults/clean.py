"""Whether verify refuses packages that are right: `python -m tests.faults.clean FOLDER --seeds 5`. Exit code 1: one was.

Of each family and type every seed draws weights, lengths and tokens. FOLDER keeps results.json; a run that was cut off goes on where it
was.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from still_export.errors import StillExportError
from still_export.graph.options import ExportOptions
from still_export.proof.package import VerifyOptions, verify
from still_export.targets.export import export
from tests.faults.campaign import TYPES, WIDE
from tests.still_export.linear_models import linear_model
from tests.still_export.tiny import CHUNK, MIXED, still_model

OWN: dict[str, dict[str, Any]] = {
    "hybrid": dict(family="llama", sizes=WIDE, layer_types=MIXED),
    "numbers by layer": dict(family="llama", sizes=WIDE, salient_by_layer=(5, 1, 3)),
    "grouped": dict(family="qwen2", select_scope="kv_group_max"),
}
RECURRENT = ("qwen3_5_text", "falcon_h1", "mamba2", "kimi_linear", "lfm2", "gla", "rwkv7", "granitemoehybrid")
FAMILIES: dict[str, Callable[[int], Any]] = {
    **{name: lambda seed, of=of: still_model(dtype=torch.float32, seed=seed, **of) for name, of in OWN.items()},
    **{name: lambda seed, name=name: linear_model(name, seed=seed) for name in RECURRENT},
}
SPACE: dict[str, Any] = dict(lengths=(1, CHUNK + 1, 6 * CHUNK), decode_steps=3 * CHUNK)


def asked(folder: Path, family: str, kind: str, seed: int) -> dict[str, Any]:
    """What verify says of one package."""
    model, package = folder / "model", folder / "package"
    for each in (model, package):
        shutil.rmtree(each, ignore_errors=True)
    FAMILIES[family](seed).save_pretrained(model)
    try:
        export(ExportOptions(str(model), **TYPES[kind]), package, command="clean")
    except StillExportError as error:  # a family without a cache, or without products of this size
        return {"passed": True, "used": 0.0, "not_made": str(error)[:200]}
    report = verify(package, VerifyOptions(seed=seed, **SPACE)).report
    wrong = [each.describe() for each in report.mismatches] + [str(c) for c in report.checks if not c.passed]
    used = report.nearest.of_bound if report.nearest else 0.0
    return {"passed": report.passed, "used": used, "wrong": wrong[:4], "near_ties": report.selections.near_ties}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.clean", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose name holds this, such as 'hybrid, int8'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "results.json"
    known: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in range(options.seeds):
        for family in FAMILIES:
            for kind in TYPES:
                name = f"{family}, {kind}, seed {seed}"
                if name not in known and options.only in name:
                    known[name] = asked(options.folder, family, kind, seed)
                    kept.write_text(json.dumps(known, indent=1))
                    print(name, known[name], flush=True)
    refused = [name for name, each in known.items() if not each["passed"]]
    most = max((each["used"] for each in known.values()), default=0.0)
    made = sum("not_made" not in each for each in known.values())
    print(f"{made} right packages, {len(refused)} refused; the nearest output of any reaches {most:.2f} of its bound")
    print("\n".join(f"{name}: {known[name]['wrong']}" for name in refused))
    sys.exit(bool(refused))


if __name__ == "__main__":
    main()
