#!/usr/bin/env python3
"""Run a package for onnxruntime-genai by og.Model and by this project's runner, step by step in turns: are the tokens the same, and what
does genai cost?

  pip install -e ".[genai]"
  still-export MODEL --to genai --native -o PACKAGE
  python tools/prove_genai.py PACKAGE --text FILE [--lengths 200,1000,4000] [--steps 300]

Both use one thread, and times are of that thread's processor: other jobs of the machine disturb them little, and both alike. Prompts are
the first tokens of FILE. `still-export verify PACKAGE` proves more: batches, prompts in pieces, refusals.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from still_export.package.folder import open_package
from still_export.proof.genai import check_library
from still_export.runners.ort import OrtModel

WARM = 3
"""Steps that are not timed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", default="200,1000,4000")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    import onnxruntime_genai as og
    from tokenizers import Tokenizer

    check_library(open_package(options.package))
    config = og.Config(str(options.package))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}))
    model, own = og.Model(config), OrtModel(options.package, 1, check=False)
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
        wrong += compare(og, model, own, ids[:length], options.steps)
    return 1 if wrong else 0


def compare(og: object, model: object, own: OrtModel, prompt: list[int], steps: int) -> int:
    """Both on one prompt; how many greedy tokens differ."""
    parameters = og.GeneratorParams(model)  # type: ignore[attr-defined]
    parameters.set_search_options(
        max_length=len(prompt) + steps, min_length=len(prompt) + steps, chunk_size=own.prefill_tokens
    )
    clock, begin = time.thread_time, time.thread_time()
    generator = og.Generator(model, parameters)  # type: ignore[attr-defined]
    made = clock() - begin
    own.start()
    begin = clock()
    logits = own.prefill(prompt)[None]
    between = clock()
    generator.append_tokens(np.array(prompt, np.int32))
    prefill = between - begin, clock() - between
    wrong, times = 0, []
    ends = own.manifest["eos_token_ids"]
    for step in range(steps):
        logits[:, ends] = -np.inf  # as min_length has it
        token = logits.argmax(-1)
        begin = clock()
        generator.generate_next_token()
        chosen = int(generator.get_next_tokens()[0])
        between = clock()
        wrong += chosen != token[0]
        if step + 1 < steps:
            logits = own.step(token)
            times.append((clock() - between, between - begin))
    # genai's first step only chooses: the prompt's logits were there. Its others run the model for the token before.
    ours, theirs = 1e3 * np.array([t[0] for t in times][WARM:]), 1e3 * np.array([t[1] for t in times][WARM + 1 :])
    medians = float(np.median(ours)), float(np.median(theirs))
    print(
        f"{len(prompt):6d} tokens: {steps - wrong} of {steps} tokens equal; prefill {prefill[0]:.2f} s, genai {prefill[1]:.2f}; "
        f"decode {medians[0]:.1f} ms, genai {medians[1]:.1f}, {medians[1] / medians[0]:.2f} times; generator made in {made * 1e3:.0f} ms",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
