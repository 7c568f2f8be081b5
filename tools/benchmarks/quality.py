"""Measure what packages know at length, cell by cell, with the runner that users run: retrieval tasks, RULER's and BABILong's among them,
and perplexity by position.

  python -m tools.benchmarks.quality PACKAGE --base NAME --adapter NAME --text enwik8.test.txt --provider cuda --record FOLDER

Cells are those of `still-export evaluate`, the same prompts for all packages of a tokenizer. Perplexity comes first, then each
cell is printed when it is there, the shortest length first; a run that reaches --seconds ends behind the cell that it is at, and its record
has what was measured.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from still_export.errors import ConfigError, DataError
from still_export.evaluation.bench import BenchOptions
from still_export.evaluation.evaluate import EvaluationOptions, by_depth
from still_export.evaluation.intervals import interval
from still_export.evaluation.packages import open_model
from still_export.evaluation.positions import perplexity_by_position
from still_export.evaluation.synthetic import MAKERS
from still_export.linearization.texts import read_text
from still_export.models.load import load_tokenizer
from still_export.package.folder import open_package
from still_export.targets.registry import packaged_target
from tools.benchmarks.common import Findings, numbers, parser_of

TASKS = ",".join(["needle", *MAKERS])
ROOMS = ("still_export.evaluation", "still_export.runtime", "still_kernels")


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--base", required=True, help="the model that it comes from, as the table calls it")
    parser.add_argument("--adapter", default="", help="what made it linear; empty: full attention")
    parser.add_argument("--text", type=Path, action="append", required=True, help="filler, and the text of perplexity")
    parser.add_argument("--tokenizer", help="folder or GGUF file of the tokenizer, if the package has none")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument(
        "--positions", type=int, default=0, help="tokens of a block for perplexity by position; 0: none"
    )
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--runtime")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    package, found = open_package(given.package), Findings()
    texts = {path.name: read_text(path) for path in given.text}
    options = EvaluationOptions(depths=given.depths, samples=given.samples)
    tokenizer = load_tokenizer(given.tokenizer or str(given.package))
    model = open_model(package, BenchOptions(runtime=given.runtime, provider=given.provider))
    if given.positions:
        text = next(iter(texts.values()))
        rows = perplexity_by_position(model, tokenizer, text, given.positions, given.blocks * given.positions)
        for span, value in rows.items():
            found.add(task="perplexity", positions=span, value=round(value, 4), tokens=given.blocks * given.positions)
    prompts = given.depths * given.samples
    cells = [(length, task) for length in numbers(given.lengths) for task in given.tasks.split(",") if task]
    for number, (length, task) in enumerate(cells):
        if time.monotonic() > end:
            print(f"{len(cells) - number} of {len(cells)} cells are left out: no time", file=sys.stderr)
            break
        begin = time.monotonic()
        try:
            shares = by_depth(model, tokenizer, task, length, options, texts)
        except (ConfigError, DataError) as error:
            print(f"left out: {task} at {length}: {error}", file=sys.stderr, flush=True)
            continue
        right = sum(shares) / len(shares)
        low, high = (round(bound, 4) for bound in interval(right, prompts))
        spent = round(time.monotonic() - begin, 1)
        found.add(task=task, length=length, right=round(right, 4), low=low, high=high, prompts=prompts, seconds=spent)
    quantized = package.manifest.get("quantization")
    subject = {
        "base": given.base,
        "adapter": given.adapter,
        "dtype": package.manifest["model"]["dtype"],
        "quantize": "" if quantized is None else quantized["scheme"],
        "target": packaged_target(package.manifest).name,
        "provider": given.provider,
        "text": ", ".join(texts),
    }
    name = " ".join(filter(None, [given.base, given.adapter, subject["quantize"] or subject["dtype"]]))
    found.record(given.record, f"quality {name}", {k: v for k, v in subject.items() if v}, ROOMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
