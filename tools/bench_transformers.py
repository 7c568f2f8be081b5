#!/usr/bin/env python3
"""Measure the peer: a model folder in transformers on the CPU, as `generate` runs it.

  python tools/bench_transformers.py MODEL --threads 2 -o peer.json
  still-export bench PACKAGE --threads 2 --beside peer.json

Lengths, decode steps and what is measured are those of `still-export bench`; one process per length.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from bench_genai import measure_each


def measure(model: Path, length: int, steps: int, threads: int, dtype: str) -> dict[str, float]:
    """One length in this process: random tokens, greedy decoding."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads or torch.get_num_threads())
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    vocabulary = min(40_000, loaded.config.vocab_size)
    tokens = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    times = []
    with torch.inference_mode():
        loaded(tokens[:, :70], use_cache=True, logits_to_keep=1)  # what the first call alone pays
        begin = time.perf_counter()
        found = loaded(tokens, use_cache=True, logits_to_keep=1)
        token = found.logits[:, -1:].argmax(-1)
        prefill = time.perf_counter() - begin
        for _ in range(steps):
            begin = time.perf_counter()
            found = loaded(token, past_key_values=found.past_key_values, use_cache=True)
            token = found.logits[:, -1:].argmax(-1)
            times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"length": length, "prefill_s": prefill, "decode_ms": statistics.median(times) * 1e3, "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("peer.json"))
    parser.add_argument("--lengths", default="1024,4096,8000")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's choice")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.model, options.one, options.steps, options.threads, options.dtype)))
        return
    command = [__file__, str(options.model), "--steps", str(options.steps), "--threads", str(options.threads)]
    measure_each([*command, "--dtype", options.dtype], options.lengths, options.output)


if __name__ == "__main__":
    main()
