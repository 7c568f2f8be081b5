"""Many users at once: tokens a second, and what each waits for the first of them, of `still-export serve` and of a peer's server.

  python -m tools.benchmarks.serve_users PACKAGE --model NAME --threads 2 \\
      --peer "llama-server -m FILE.gguf -np {users} -c {room} -t 2 --port 8123"

Users ask at once, each for its own prompt, which nobody has sent before. In the peer's command {users} is the most of them, {room} the
tokens that all of them need; llama-cpp-python's own server answers one after the other. Servers take turns, each in a process of its own.
A third one keeps no states (`--prefix-cache 0`): what keeping them costs who never comes back.
"""

from __future__ import annotations

import random
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from still_export.package.folder import open_package
from still_export.package.trust import trust_package
from tools.benchmarks.common import Findings, numbers, parser_of
from tools.benchmarks.serve_turns import first_token, own_server, server_of

OURS, COLD = "still-export", "still-export, no states kept"


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so many of all do not exceed."""
    return sorted(values)[max(0, -(-round(share * 1000) * len(values) // 1000) - 1)]


def load(url: str, users: int, vocabulary: int, seed: int, given: Namespace) -> dict[str, Any]:
    """What `users` requests see that come at once: tokens a second of all, seconds to the first of each, seconds to the last of all."""
    draw = random.Random(seed)
    # Token ids that every vocabulary has, with a text of their own.
    prompts = [[draw.randrange(300, vocabulary) for _ in range(given.prompt_tokens)] for _ in range(users)]

    def ask(prompt: list[int]) -> tuple[float, int]:
        body = {"prompt": prompt, "max_tokens": given.answer_tokens, "ignore_eos": True}
        first, _, usage = first_token(url, "/v1/completions", body)
        return first, int(usage["completion_tokens"])

    begin = time.perf_counter()
    with ThreadPoolExecutor(users) as pool:
        answers = list(pool.map(ask, prompts))
    whole = time.perf_counter() - begin
    said = sum(tokens for _, tokens in answers)
    if said != users * given.answer_tokens:
        raise SystemExit(f"{url} said {said} tokens to {users} users, who asked for {given.answer_tokens} each.")
    return {"whole_s": whole, "tokens_per_s": said / whole, "first_s": [first for first, _ in answers]}


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--model", required=True, help="as the table calls it")
    parser.add_argument("--peer", help="command of another server of OpenAI's interface, which says its address")
    parser.add_argument("--peer-name", default="llama.cpp")
    parser.add_argument("--users", type=numbers, default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", default="", help="further options of still-export serve, in one text")
    given = parser.parse_args()
    trust_package(given.package)
    found, most, seeds = Findings(), max(given.users), count()
    vocabulary = int(open_package(given.package).manifest["model"]["vocab_size"])
    each = given.prompt_tokens + given.answer_tokens + 8
    own = f"--rows {most} --max-context {each} --threads {given.threads} {given.serve}"
    servers = {OURS: own_server(given.package, own)}
    servers[COLD] = [*servers[OURS], "--prefix-cache", "0"]
    if given.peer:
        servers[given.peer_name] = shlex.split(given.peer.format(users=most, room=most * each))
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(given.rounds):
        for name, command in servers.items():
            with server_of(command) as url:
                load(
                    url, 1, vocabulary, next(seeds), Namespace(prompt_tokens=16, answer_tokens=2)
                )  # code and weights are read
                for users in given.users:
                    runs.setdefault((name, users), []).append(load(url, users, vocabulary, next(seeds), given))
    for (name, users), loads in runs.items():
        waits = [first for run in loads for first in run["first_s"]]
        found.add(
            runtime=name,
            users=users,
            tokens_per_s=float(f"{statistics.median(run['tokens_per_s'] for run in loads):.4g}"),
            first_s_p50=float(f"{quantile(waits, 0.5):.4g}"),
            first_s_p95=float(f"{quantile(waits, 0.95):.4g}"),
        )
    subject = {
        "model": given.model,
        "prompt_tokens": str(given.prompt_tokens),
        "answer_tokens": str(given.answer_tokens),
        "threads": str(given.threads),
        "rounds": str(given.rounds),
    }
    found.record(given.record, f"users of {given.model}", subject)
    return 0


if __name__ == "__main__":
    sys.exit(main())
