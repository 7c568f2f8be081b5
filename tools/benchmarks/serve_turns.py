"""A conversation over a document through `still-export serve`: what each turn reads again, and how long its first token takes.

  python -m tools.benchmarks.serve_turns PACKAGE --document-tokens 6000 --turns 20 --serve "--rows 2 --threads 2" \\
      --peer "python -m llama_cpp.server --model BASE.gguf --n_ctx 8192 --n_threads 2 --host 127.0.0.1 --port 8123"

Turn 1 reads the document; each later one sends all that was said, as OpenAI's clients do. Beside every later turn stands a request of as
many tokens as that turn brought, which nobody has read before and which follows nothing: "alone". A peer is asked the same turns.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from tokenizers import Tokenizer

from tools.benchmarks.common import Findings, parser_of

QUESTIONS = (
    "What is this text about?",
    "Name one thing that it measures.",
    "Which command is in it?",
    "What is asked next?",
)


@contextmanager
def server_of(command: list[str]) -> Iterator[str]:
    """The address of a server while it runs: the first one that it says on stderr."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        rest = Thread(target=deque, args=(server.stderr, 0))  # else the server waits when the pipe is full
        try:
            url = next((m[0] for line in server.stderr if (m := re.search(r"http://[\d.]+:\d+", line))), None)
            if url is None:
                raise SystemExit(f"{shlex.join(command)} ended before it said its address.")
            rest.start()
            yield url
        finally:
            server.terminate()
            if rest.is_alive():
                rest.join()


def own_server(package: Path, options: str) -> list[str]:
    """The command of `still-export serve`, with options in one text."""
    own = ["serve", str(package), "--port", "0", "--name", "m", *shlex.split(options)]
    return [sys.executable, "-m", "still_export.cli.main", *own]


def first_token(url: str, path: str, body: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first piece of text, the answer, its usage."""
    asked = {**body, "model": "m", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{url}{path}", json.dumps(asked).encode(), {"content-type": "application/json"})
    begin, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    with urllib.request.urlopen(request) as events:
        for line in events:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice.get("delta", {}).get("content") or choice.get("text") or ""
                    first = first or (time.perf_counter() - begin if piece or choice["finish_reason"] else 0.0)
                    text += piece
    return first, text, usage


def document_of(tokenizer: Tokenizer, tokens: int) -> str:
    """The first `tokens` tokens of this repository's pages."""
    pages = "\n".join(page.read_text() for page in sorted(Path(__file__).resolve().parents[2].glob("docs/**/*.md")))
    return str(tokenizer.decode(tokenizer.encode(pages, add_special_tokens=False).ids[:tokens]))


def turns(url: str, document: str, given: Namespace) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Each turn: its number, seconds to its first token, its usage."""
    said: list[dict[str, str]] = []
    for turn in range(1, given.turns + 1):
        question = QUESTIONS[turn % len(QUESTIONS)]
        said.append({"role": "user", "content": f"{document}\n\n{question}" if turn == 1 else f"{question} ({turn})"})
        body = {"messages": said, "max_tokens": given.answer_tokens}
        seconds, answer, usage = first_token(url, "/v1/chat/completions", body)
        said.append({"role": "assistant", "content": answer})
        yield turn, seconds, usage


def own_turns(url: str, document: str, given: Namespace, found: Findings) -> None:
    """Of `still-export serve`, with what stands beside each turn."""
    ratios, times, read, new = list[float](), list[float](), 0, 0
    for turn, seconds, usage in turns(url, document, given):
        fresh = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        row: dict[str, Any] = {
            "turn": turn,
            "prompt": usage["prompt_tokens"],
            "new": fresh,
            "first_s": round(seconds, 3),
        }
        if turn > 1:
            ids = [1000 + 37 * turn + i for i in range(fresh)]
            alone, _, _ = first_token(url, "/v1/completions", {"prompt": ids, "max_tokens": 1})
            ratios.append(seconds / alone)
            times.append(seconds)
            read, new = read + usage["prompt_tokens"], new + fresh
            row["alone_s"] = round(alone, 3)
        found.add(**row)
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    held = re.findall(r"^still_prefix_bytes (\S+)", metrics, re.MULTILINE)
    found.add(
        hit_rate=round(1 - new / read, 4),
        ratio_median=round(statistics.median(ratios), 2),
        ratio_largest=round(max(ratios), 2),
        first_s_median=round(statistics.median(times), 3),
        prefix_mb=round(float(held[0]) / 1e6) if held else 0,
    )


def peer_turns(url: str, document: str, given: Namespace, found: Findings) -> None:
    """Of another server."""
    times = list[float]()
    for turn, seconds, _ in turns(url, document, given):
        times.append(seconds)
        found.add(peer_turn=turn, first_s=round(seconds, 3))
    found.add(peer_first_s_median=round(statistics.median(times[1:]), 3), peer_first_s_largest=round(max(times[1:]), 3))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--document-tokens", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--serve", default="", help="options of still-export serve, in one text")
    parser.add_argument("--peer", help="command of another server of OpenAI's interface, which says its address")
    given = parser.parse_args()
    found = Findings()
    document = document_of(Tokenizer.from_file(str(given.package / "tokenizer.json")), given.document_tokens)
    servers = [(own_server(given.package, given.serve), own_turns)]
    servers += [(shlex.split(given.peer), peer_turns)] if given.peer else []
    for command, measured in servers:
        with server_of(command) as url:
            measured(url, document, given, found)
    found.record(given.record, "serve turns", {"package": str(given.package)})


if __name__ == "__main__":
    main()
