"""Speed of a package for onnxruntime-genai by og.Model and by this project's runner, in turns, and whether their tokens are the same.

  pip install -e ".[genai]"
  still-export MODEL --to genai --native -o PACKAGE
  python -m tools.benchmarks.genai_turns PACKAGE --text FILE [--lengths 200,1000,4000] [--steps 300] [--threads 2]

With one thread, times are of its processor: other jobs of the machine disturb them little, and both alike. With more they are the clock's,
so the machine must be quiet. Prompts are the first tokens of FILE, which the two tokenizers may split in different ways. The exit code is
1 where greedy tokens differ. `still-export verify PACKAGE` proves more: batches, prompts in pieces, refusals.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.folder import open_package
from still_export.proof.genai import check_library
from still_export.runtime.ort import OrtModel
from tools.benchmarks.common import Clock, Findings, Times, numbers, parser_of, time_calls

TURN = 20
"""Steps that one of the two takes before the other's turn: threads of the one that rests go on looking for work for a while."""
WARM = 3
"""First steps of a turn, which are not timed."""


def compare(og: Any, model: Any, own: OrtModel, prompt: list[int], steps: int, clock: Clock) -> dict[str, Any]:
    """Both on one prompt, a turn of steps each."""
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(
        max_length=len(prompt) + steps, min_length=len(prompt) + steps, chunk_size=own.prefill_tokens
    )
    generator = og.Generator(model, parameters)
    own.start()
    state: dict[str, Any] = {}
    prefill = {
        "own": time_calls(lambda: state.update(logits=own.prefill(prompt)[None]), 1, 0, clock),
        "genai": time_calls(lambda: generator.append_tokens(np.array(prompt, np.int32)), 1, 0, clock),
    }
    ends, tokens = own.manifest["eos_token_ids"], {"own": list[int](), "genai": list[int]()}

    def own_step() -> None:
        if tokens["own"]:  # the prompt's logits are there, as in genai, whose first step only chooses
            state["logits"] = own.step(np.array(tokens["own"][-1:]))
        state["logits"][:, ends] = -np.inf  # as min_length has it
        tokens["own"].append(int(state["logits"].argmax()))

    def genai_step() -> None:
        generator.generate_next_token()
        tokens["genai"].append(int(generator.get_next_tokens()[0]))

    calls = {"own": own_step, "genai": genai_step}
    decode: dict[str, list[float]] = {name: [] for name in calls}
    for first in range(0, steps, TURN):
        count = min(TURN, steps - first)
        for name, call in calls.items():
            decode[name] += time_calls(call, count, 0, clock).seconds[WARM:]
    equal = sum(a == b for a, b in zip(*tokens.values(), strict=True))
    row: dict[str, Any] = {"tokens": len(prompt), "steps": steps, "equal": equal}
    for name in calls:
        row |= {
            f"{name}_prefill_s": round(prefill[name].best, 3),
            f"{name}_decode": Times(tuple(decode[name])).figures(),
        }
    return row


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", default="200,1000,4000")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    import onnxruntime_genai as og
    from tokenizers import Tokenizer

    check_library(open_package(options.package))
    config = og.Config(str(options.package))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options.threads}}}}))
    model, own = og.Model(config), OrtModel(options.package, options.threads, check=False)
    tokenizer = Tokenizer.from_file(str(options.package / "tokenizer.json"))
    text = options.text.read_text(encoding="utf-8")
    ids, found = tokenizer.encode(text).ids, Findings()
    same_text = ids == [int(token) for token in og.Tokenizer(model).encode(text)]
    found.add(text=options.text.name, tokens=len(ids), genais_tokenizer_gives_the_same=same_text)
    lengths = numbers(options.lengths)
    if max(lengths) > len(ids):
        print(f"{options.text} has {len(ids)} tokens, not {max(lengths)}", file=sys.stderr)
        return 2
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rows = [found.add(**compare(og, model, own, ids[:length], options.steps, clock)) for length in lengths]
    subject = {"package": options.package.name, "target": "genai", "threads": str(options.threads)}
    found.record(options.record, "onnxruntime-genai beside our runner", subject)
    return int(any(row["equal"] < row["steps"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
