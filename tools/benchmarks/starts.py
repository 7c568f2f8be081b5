"""How many tokens GLA or Gated DeltaNet need from closed-form starts and from plain ones: losses of the same rows, by tokens.

  python -m tools.benchmarks.starts BASE --config docs/notebook/results/mixers/gdn.yaml --text enwik8.8M.txt -o OUT \
      --runs plain:1,fitted:1,fitted:0.25

A run is a start and a share of the recipe's steps, with the schedule of so many. Plain: memories spread evenly, open gates, outputs as
large as the base's, channel by channel. Writes OUT/starts.json and prints the tokens after which held-out losses were the first run's last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from still_export.linearization.linearize import linearize
from still_export.linearization.recipe import read_recipe
from still_export.mixers.linearized.fitted import Fitted
from tools.benchmarks.common import changes_in, parser_of


def plain_start(module: Any, target: Tensor, hidden: Tensor, positions: tuple[Tensor, Tensor] | None) -> None:
    """Scales alone, by the sizes of the outputs: in the place of `Fitted.fit_to`."""
    rows = module.mixed(hidden, *module._beside(hidden), positions, None)
    size, wanted = (x.float().square().mean((0, 1)).sqrt() for x in (rows, target))
    module.output_scale.copy_(wanted / size.clamp_min(1e-6))


STARTS = {"plain": plain_start, "fitted": Fitted.fit_to}


def tokens_to(loss: float, stage: Mapping[str, Any]) -> int | None:
    """Tokens of a stage after which its held-out loss was at most `loss`; None: never."""
    each = stage["tokens"] / stage["steps"]
    return next((round(step * each) for step, value in stage["validation"] if value <= loss), None)


def main() -> None:
    """As the head of the file says."""
    parser = parser_of(__doc__)
    parser.add_argument("base")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--runs", default="plain:1,fitted:1,fitted:0.25")
    parser.add_argument("--set", action="append", default=[], help="option=number of the recipe")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    changes = changes_in(",".join(options.set))
    asked = read_recipe(options.config, {"base": options.base, "texts": tuple(options.text), **changes})
    runs = {}
    for run in options.runs.split(","):
        start, share = run.split(":")
        steps = {name: round(float(share) * getattr(asked, name)) for name in ("transfer_steps", "finetune_steps")}
        setattr(Fitted, "fit_to", STARTS[start])  # noqa: B010  # of another signature's names
        made = linearize(replace(asked, **steps), options.output / run.replace(":", "-"), force=True, log=print)
        runs[run] = made.to_dict()
        (options.output / "starts.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    first = next(iter(runs.values()))["stages"]
    for run, found in runs.items():
        for stage, aim in zip(found["stages"], first, strict=True):
            loss = aim["validation"][-1][1]
            print(
                f"{run} {stage['name']}: {stage['tokens']:,} tokens, held out {stage['validation'][-1][1]:.4f};",
                end=" ",
            )
            print(f"{loss:.4f} after {tokens_to(loss, stage)} tokens")
        print(f"{run} bits per byte: {found['bits_per_byte']}")


if __name__ == "__main__":
    main()
