"""How far a request's answer depends on the other requests of its batch: python -m tools.benchmarks.rows_alike DIR

One prompt is answered alone and among others, greedily. Printed for each number of rows: the largest difference of a token's
log-probability, and the number of tokens that differ, of all that were compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import still_export
from still_export.runtime.base import Runner
from still_export.runtime.sampling import Sampling
from still_export.runtime.text import Text
from still_export.serving.requests import Request
from still_export.serving.scheduler import Scheduler

ROWS = (1, 2, 4, 8, 16, 32, 64)


def answers(
    model: Runner, text: Text, rows: int, prompts: list[list[int]], tokens: int, reproducible: bool
) -> Sampling:
    """How the first of `rows` prompts is answered."""
    scheduler = Scheduler(model, text, rows, reproducible=reproducible)
    probe = Sampling(logprobs=0)
    scheduler.submit(Request(prompts[0], tokens, probe, lambda event: None, ignore_eos=True))
    for prompt in prompts[1:rows]:
        scheduler.submit(Request(prompt, tokens, Sampling(), lambda event: None, ignore_eos=True))
    while not scheduler.idle:
        scheduler.step()
    return probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4, help="prompts that are compared")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reproducible", action="store_true")
    options = parser.parse_args()
    model = still_export.load(options.package, threads=options.threads)
    random, vocabulary = np.random.default_rng(0), model.runner.manifest["model"]["vocab_size"]
    longest = min(300, model.runner.table.capacity_tokens - options.tokens)
    drawn = [
        random.integers(0, vocabulary, int(n)).tolist()
        for n in random.integers(20, longest, options.prompts + max(ROWS))
    ]
    found: dict[int, list[Sampling]] = {}
    for rows in ROWS:
        found[rows] = [
            answers(
                model.runner,
                model.text,
                rows,
                [drawn[n], *drawn[options.prompts :]],
                options.tokens,
                options.reproducible,
            )
            for n in range(options.prompts)
        ]
        worst, other = 0.0, 0
        for alone, among in zip(found[1], found[rows], strict=True):
            pairs = list(zip(alone.found, among.found, strict=True))
            same = next((n for n, (a, b) in enumerate(pairs) if a.token != b.token), len(pairs))
            worst = max([worst, *(abs(a.logprob - b.logprob) for a, b in pairs[:same])])
            other += len(pairs) - same
        print(
            f"{rows:>3} rows: log-probabilities differ by at most {worst:.2g}, {other} of {options.prompts * options.tokens} tokens"
        )


if __name__ == "__main__":
    main()
