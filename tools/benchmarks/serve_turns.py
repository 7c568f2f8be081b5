"""A conversation over a document through `still-export serve`: what each turn reads again, and how long its first token takes.

  python -m tools.benchmarks.serve_turns PACKAGE --document-tokens 6000 --turns 20 --serve "--rows 2 --threads 2"

Turn 1 reads the document; each later one sends all that was said, as OpenAI's clients do. Beside every later turn stands a request of as
many tokens as that turn brought, which nobody has read before and which follows nothing: "alone".
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
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tools.benchmarks.common import Findings, parser_of

QUESTIONS = (
    "What is this text about?",
    "Name one thing that it measures.",
    "Which command is in it?",
    "What is asked next?",
)


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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--document-tokens", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--serve", default="", help="options of still-export serve, in one text")
    given = parser.parse_args()
    found = Findings()
    tokenizer = Tokenizer.from_file(str(given.package / "tokenizer.json"))
    pages = "\n".join(page.read_text() for page in sorted(Path(__file__).resolve().parents[2].glob("docs/**/*.md")))
    document = tokenizer.decode(tokenizer.encode(pages, add_special_tokens=False).ids[: given.document_tokens])
    own = ["serve", str(given.package), "--port", "0", "--name", "m", *shlex.split(given.serve)]
    command = [sys.executable, "-m", "still_export.cli.main", *own]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(m[0] for line in server.stderr if (m := re.search(r"http://[\d.:]+", line)))
            said: list[dict[str, str]] = []
            ratios, read, new = list[float](), 0, 0
            for turn in range(1, given.turns + 1):
                question = QUESTIONS[turn % len(QUESTIONS)]
                said.append(
                    {"role": "user", "content": f"{document}\n\n{question}" if turn == 1 else f"{question} ({turn})"}
                )
                seconds, answer, usage = first_token(
                    url, "/v1/chat/completions", {"messages": said, "max_tokens": given.answer_tokens}
                )
                said.append({"role": "assistant", "content": answer})
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                fresh = usage["prompt_tokens"] - cached
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
                    read, new = read + usage["prompt_tokens"], new + fresh
                    row["alone_s"] = round(alone, 3)
                found.add(**row)
            metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
            held = (
                float(re.findall(r"^still_prefix_bytes (\S+)", metrics, re.MULTILINE)[0])
                if "still_prefix_bytes" in metrics
                else 0
            )
            found.add(
                hit_rate=round(1 - new / read, 4),
                ratio_median=round(statistics.median(ratios), 2),
                ratio_largest=round(max(ratios), 2),
                prefix_mb=round(held / 1e6),
            )
            found.record(given.record, "serve turns", {"package": str(given.package)}, ["still_export"])
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
