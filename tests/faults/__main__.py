"""Print what verify finds of planted faults, and its false alarms: `python -m tests.faults FOLDER --seeds 12 --clean 200`.

FOLDER keeps the packages and results.json; a run that was cut off goes on where it was.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.faults.campaign import MODELS, RUNTIMES, TYPES, Broken, Drawn, Outcome, outcomes, package_of, widened
from tests.faults.registry import FAULTS

ENOUGH = 1e-5
"""Of the spread of the logits: what float32 must find all of."""
PAIRS = (
    *(("hybrid", kind) for kind in TYPES),
    *((model, kind) for kind in ("float32", "float16") for model in MODELS if model != "hybrid"),
)


def own_rounding(drawn: Drawn) -> float:
    """The largest error of a logit of PyTorch's own run, in parts of the spread: the median token's."""
    rows = [
        (call["logits"][0] / case.expected[0]["logits"].std()).ravel()
        for (case, *_) in drawn.cases
        for call in case.own
    ]
    return float(np.nanmedian(np.concatenate(rows)))


def least_found(found: Iterable[Outcome]) -> float:
    """The smallest move of the logits from which on every fault is found."""
    missed = [each.moved for each in found if not each.found]
    return max(missed, default=0.0)


def lines(results: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown."""
    table = [
        "| package | runtime | planted | found | moving a logit by 1e-5 of the spread: found | largest move missed | own rounding |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in results:
        each = [Outcome(**o) for o in entry["outcomes"]]
        told = [o for o in each if o.moved >= ENOUGH]
        share = [f"{sum(o.found for o in part)} of {len(part)}" for part in (each, told)]
        least = f"{least_found(each):.0e}" if least_found(each) else "none"
        row = [entry["package"], entry["runtime"], str(len(each)), *share, least, f"{entry['own']:.0e}"]
        table.append("| " + " | ".join(row) + " |")
    return table


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=12, help="random places of every fault")
    parser.add_argument("--first", type=int, default=0, help="the first of them, where several processes share a row")
    parser.add_argument("--clean", type=int, default=0, help="clean runs, over all packages and runtimes")
    parser.add_argument("--packages", default="", help="only those whose name holds one of these, separated by commas")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "results.json"
    known = json.loads(kept.read_text()) if kept.exists() else {"faults": [], "clean": []}
    subjects = [(m, k, r) for m, k in PAIRS for r in options.runtimes.split(",")]
    wanted = [s for s in subjects if any(w in f"{s[0]} {s[1]}" for w in options.packages.split(","))]
    clean = [s for s in wanted if s[2] != "native"]  # whose kernels are those of another
    for number, (model, kind, runtime) in enumerate(wanted):
        name = f"{model} {kind}"
        package = package_of(options.folder, model, kind)
        package = widened(package) if runtime == "float32" else package
        if kind == "int4" and runtime == "torch":
            continue  # it has no weights of its own to plant in
        scratch = options.folder / f"scratch-{number}"
        scratch.mkdir(exist_ok=True)
        share = -(-options.clean // len(clean)) if runtime != "native" else 0
        done = sum(e["package"] == name and e["runtime"] == runtime for e in known["clean"])
        for seed in range(done, share):
            report = Broken(package, runtime, Drawn(package, 1000 + seed), scratch).clean()
            worst = [(o.case, o.output, o.worst / o.bound) for o in report.outputs if not o.passed]
            used = max(o.worst / o.bound for o in report.outputs if o.bound)
            known["clean"].append(
                {
                    "package": name,
                    "runtime": runtime,
                    "seed": seed,
                    "passed": report.passed,
                    "wrong": worst,
                    "used": used,
                }
            )
            kept.write_text(json.dumps(known))
        if not options.seeds or any(e["package"] == name and e["runtime"] == runtime for e in known["faults"]):
            continue
        drawn = Drawn(package, 0)
        subject = Broken(package, runtime, drawn, scratch)
        subject.clean()
        found = [asdict(o) for o in outcomes(subject, range(options.first, options.first + options.seeds))]
        entry = {
            "package": name,
            "runtime": runtime,
            "seeds": options.seeds,
            "own": own_rounding(drawn),
            "outcomes": found,
        }
        known["faults"].append(entry)
        kept.write_text(json.dumps(known))
    print(f"{len(FAULTS)} kinds of faults")
    print("\n".join(lines(known["faults"])))
    alarms = [e for e in known["clean"] if not e["passed"]]
    used = max((e["used"] for e in known["clean"]), default=0.0)
    print(
        f"{len(known['clean'])} clean runs, {len(alarms)} false alarms; the worst row of any reaches {used:.2f} of its bound"
    )
    for entry in alarms:
        print(entry)


main()
