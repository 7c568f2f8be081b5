#!/usr/bin/env python3
"""Run a package for onnxruntime-genai by og.Model and by this project's runner in turns: are the tokens the same, and what does genai
cost?

  pip install -e ".[genai]"
  still-export MODEL --to genai --native -o PACKAGE
  python tools/prove_genai.py PACKAGE --text FILE [--lengths 200,1000,4000] [--steps 300] [--threads 2]

With one thread, times are of its processor: other jobs of the machine disturb them little, and both alike. With more they are the clock's,
so the machine must be quiet. Prompts are the first tokens of FILE. `still-export verify PACKAGE` proves more: batches, prompts in pieces,
refusals.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from still_export.package.folder import open_package
from still_export.proof.genai import check_library
from still_export.runtime.ort import OrtModel

TURN = 20
"""Steps that one of the two takes before the other's turn: threads of the one that rests go on looking for work for a while."""
WARM = 3
"""First steps of a turn, which are not timed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    ids = tokenizer.encode(text).ids
    same_text = ids == [int(token) for token in og.Tokenizer(model).encode(text)]
    print(f"tokens of {options.text.name}: {len(ids)}, genai's {'are the same' if same_text else 'DIFFER'}")
    wrong = 0
    for length in map(int, options.lengths.split(",")):
        if length > len(ids):
            print(f"{options.text} has {len(ids)} tokens, not {length}", file=sys.stderr)
            return 2
        wrong += compare(
            og, model, own, ids[:length], options.steps, time.thread_time if options.threads == 1 else time.perf_counter
        )
    return 1 if wrong else 0


def compare(og: object, model: object, own: OrtModel, prompt: list[int], steps: int, clock: Callable[[], float]) -> int:
    """Both on one prompt; how many greedy tokens differ."""
    parameters = og.GeneratorParams(model)  # type: ignore[attr-defined]
    parameters.set_search_options(
        max_length=len(prompt) + steps, min_length=len(prompt) + steps, chunk_size=own.prefill_tokens
    )
    begin = clock()
    generator = og.Generator(model, parameters)  # type: ignore[attr-defined]
    made = clock() - begin
    own.start()
    begin = clock()
    logits = own.prefill(prompt)[None]
    between = clock()
    generator.append_tokens(np.array(prompt, np.int32))
    prefill = between - begin, clock() - between
    ends = own.manifest["eos_token_ids"]
    tokens: tuple[list[int], list[int]] = [], []
    times: tuple[list[float], list[float]] = [], []
    for first in range(0, steps, TURN):
        turn = range(min(TURN, steps - first))
        for step in turn:
            begin = clock()
            if first + step:  # the prompt's logits are there, as in genai, whose first step only chooses
                logits = own.step(np.array(tokens[0][-1:]))
            logits[:, ends] = -np.inf  # as min_length has it
            tokens[0].append(int(logits.argmax()))
            if step >= WARM:
                times[0].append(clock() - begin)
        for step in turn:
            begin = clock()
            generator.generate_next_token()
            tokens[1].append(int(generator.get_next_tokens()[0]))
            if step >= WARM:
                times[1].append(clock() - begin)
    equal = sum(a == b for a, b in zip(*tokens, strict=True))
    ours, theirs = (1e3 * float(np.median(of)) for of in times)
    print(
        f"{len(prompt):6d} tokens: {equal} of {steps} tokens equal; prefill {prefill[0]:.2f} s, genai {prefill[1]:.2f}; "
        f"decode {ours:.1f} ms, genai {theirs:.1f}, {theirs / ours:.2f} times; generator made in {made * 1e3:.0f} ms",
        flush=True,
    )
    return steps - equal


if __name__ == "__main__":
    sys.exit(main())
