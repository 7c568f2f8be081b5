"""Measure what packages know at length, cell by cell, with the runner that users run: retrieval tasks, RULER's and BABILong's among them,
and perplexity by position. A model's folder or GGUF file runs in PyTorch, with --provider for its device; a server is asked over HTTP.

  python -m tools.benchmarks.quality PACKAGE --base NAME --adapter NAME --text enwik8.test.txt --provider cuda --record FOLDER
  python -m tools.benchmarks.quality BASE.gguf --base NAME --text enwik8.test.txt --provider cuda --dtype float16 --record FOLDER
  python -m tools.benchmarks.quality http://HOST/v1 --tokenizer FOLDER --runtime vllm --dtype float16 --base NAME ...

Cells are those of `still-export evaluate`, the same prompts for all packages of a tokenizer. Perplexity comes first, then each
cell is printed when it is there, the shortest length first; a run that reaches --seconds ends behind the cell that it is at, and its record
has what was measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, DataError
from still_export.evaluation.bench import BenchOptions
from still_export.evaluation.evaluate import EvaluationOptions, by_depth, load_any, pick_device
from still_export.evaluation.intervals import interval
from still_export.evaluation.packages import open_model
from still_export.evaluation.positions import perplexity_by_position
from still_export.evaluation.served import ServedModel, is_served
from still_export.evaluation.synthetic import MAKERS
from still_export.models.load import load_tokenizer
from still_export.package.folder import is_package, open_package
from still_export.targets.registry import packaged_target
from still_export.texts.files import read_text
from tools.benchmarks.common import Findings, numbers, parser_of
from tools.questions.facts import unseen

TASKS = ",".join(["needle", *MAKERS, "unseen"])


def opened(given: argparse.Namespace, longest: int) -> tuple[Any, Any, dict[str, str]]:
    """What is measured, its tokenizer, and what a record says of how it runs.

    Args:
        longest: Tokens that a model has to hold.
    """
    tokenizer = load_tokenizer(given.tokenizer or given.package)
    if is_served(given.package):
        served = ServedModel(given.package, len(tokenizer))
        return served, tokenizer, {"dtype": given.dtype, "runtime": given.runtime}
    if not is_package(Path(given.package)):
        (model,) = load_any(given.package, None, given.dtype, generates=True, tokens=longest).values()
        model = model.to(pick_device(given.provider))
        how = {"dtype": str(model.dtype).removeprefix("torch."), "runtime": f"torch-{given.provider}"}
        return model, tokenizer, how
    package = open_package(Path(given.package))
    found = open_model(package, BenchOptions(runtime=given.runtime, provider=given.provider))
    quantized = package.manifest.get("quantization")
    how = {
        "dtype": package.manifest["model"]["dtype"],
        "quantize": "" if quantized is None else quantized["scheme"],
        "target": packaged_target(package.manifest).name,
    }
    return found, tokenizer, {**how, "provider": given.provider}


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("package", help="a package, a model's folder or GGUF file, or http://HOST/v1")
    parser.add_argument("--base", required=True, help="the model that it comes from, as the table calls it")
    parser.add_argument("--adapter", default="", help="what made it linear; empty: full attention")
    parser.add_argument("--text", type=Path, action="append", required=True, help="filler, and the text of perplexity")
    parser.add_argument("--tokenizer", help="folder or GGUF file of the tokenizer, if there is none beside it")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument(
        "--positions", type=int, default=0, help="tokens of a block for perplexity by position; 0: none"
    )
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--runtime", help="of a package; of a server what it is")
    parser.add_argument("--dtype", default="auto", help="of a model; of a server the type that it was started with")
    parser.add_argument("--provider", default="cpu", help="cpu or cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    MAKERS["unseen"] = unseen
    if is_served(given.package) and (
        None in (given.tokenizer, given.runtime) or given.dtype == "auto" or given.positions
    ):
        parser.error("of a server say --tokenizer, --runtime and --dtype; it shows no logits for --positions.")
    end, found = time.monotonic() + given.seconds, Findings()
    texts = {path.name: read_text(path) for path in given.text}
    options = EvaluationOptions(depths=given.depths, samples=given.samples)
    model, tokenizer, how = opened(given, max([given.positions, *numbers(given.lengths)]))
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
    subject = {"base": given.base, "adapter": given.adapter, **how, "text": ", ".join(texts)}
    name = " ".join(filter(None, [given.base, given.adapter, subject.get("quantize") or subject["dtype"]]))
    found.record(given.record, f"quality {name}", {k: v for k, v in subject.items() if v})
    return 0


if __name__ == "__main__":
    sys.exit(main())
