"""Serve a package for minutes to clients of every kind, and compare each answer with what the package says when it is asked alone.

One request in five is left in the middle, one in ten is malformed, one in ten asks for JSON by a schema, or in a chat for the call of a
tool; half of the others are streamed. Behind a fifth of the time attackers ask beside them (tools/soak_attackers.py). Exit code 1 where an
answer is wrong (a near tie of the two likeliest tokens is counted apart), JSON is not of its schema, a status is 5xx, a malformed request
or an attack is not refused, memory, threads or open files grew, or one answer in a hundred took more than twice as long among attackers as
without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import openai
import psutil

import still_export
from still_export.runtime.sampling import Sampling
from still_export.runtime.text import Text, TextPieces

TIES = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2.5e-1}
"""Two likeliest logits that lie nearer than this may change places by rounding, by the package's type: a batch is rounded in another way
than one row."""

TRIALS = 64
"""Logits within the tie, at random, that a sampled token is chosen from again."""

SHOWN = 5
"""Wrong answers in the report."""

GROWTH = 1.15
"""Most that memory, threads and open files may grow from their most of the first third to their least of the last quarter."""

QUIET = 0.2
"""Share of the time without attackers."""

KEY = "of-the-soak"

REFUSED = {
    "stop texts of 23000": (400, 413),
    "wrong bodies": (400, 413),
    "wrong keys": (401,),
    "other hosts": (403,),
    "half bodies": (408,),
}
"""Statuses of attacks; 429 is for any."""

MALFORMED: tuple[dict[str, Any], ...] = (
    {"temperature": "hot"},
    {"n": 0},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"model": "another"},
    {"prompt": {"text": "a"}},
    {"prompt": [10**12]},
    {"stop": ["a"] * 17},
    {"logit_bias": {"a": 5}},
    {"unheard_of": True},
)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "rain": {"type": "boolean"},
        "wind": {"enum": ["none", "light", "strong"]},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
    },
    "required": ["city", "rain", "wind", "hours"],
    "additionalProperties": False,
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}}
CALL = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@dataclass(frozen=True)
class Case:
    """A request with its answer.

    Attributes:
        pieces: The text as it became certain, and how many tokens had been given by then.
        gaps: By how much logits would have to move for another token, for each and where the answer ended: between the two likeliest;
            of a sampled one 0 where some within the tie give another.
        tie: Of TIES.
    """

    request: dict[str, Any]
    text: str
    pieces: tuple[tuple[str, int], ...]
    gaps: tuple[float, ...]
    tie: float


def make_cases(package: Path, count: int, context: int, threads: int, provider: Any, seed: int) -> list[Case]:
    """Random requests of up to `context` tokens, answered by the package alone."""
    model = still_export.load(package, threads=threads, provider=provider)
    manifest = model.runner.manifest
    vocabulary, tie = manifest["model"]["vocab_size"], TIES[manifest["model"]["dtype"]]
    random_, cases = random.Random(seed), []
    for number in range(count):
        answer = random_.choice((8, 30, 100))
        length = min(int(2 ** random_.uniform(0, np.log2(context))), context - answer)
        prompt = [random_.randrange(vocabulary) for _ in range(max(1, length))]
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 4 == 0 else {"temperature": 0}
        given = model.generate(prompt, max_tokens=answer, **sampled)
        gaps = gaps_of(model, prompt, given.tokens, Sampling(**sampled), tie)
        request = {"prompt": prompt, "max_tokens": answer, **sampled}
        cases.append(Case(request, given.text, pieces_of(model.text, given.tokens), tuple(gaps), tie))
        print(f"\r{number + 1} of {count} answers", end="", file=sys.stderr)
    print(file=sys.stderr)
    return cases


def pieces_of(text: Text, tokens: list[int]) -> tuple[tuple[str, int], ...]:
    """Pieces of the text of `tokens`, each with the number of tokens up to its end."""
    pieces = TextPieces(text)
    found = [(piece, count) for count, token in enumerate(tokens, 1) if (piece := pieces.push(token))]
    return (*found, (pieces.end(), len(tokens)))


def gaps_of(
    model: still_export.LanguageModel, prompt: list[int], tokens: list[int], sampling: Sampling, tie: float
) -> list[float]:
    """By how much logits would have to move for another token, for each of `tokens` and where the answer ended."""
    model.runner.start()
    logits, gaps = model.runner.prefill(prompt), []
    draws, noise = np.random.default_rng(sampling.seed), np.random.default_rng(0)
    for token in [*tokens, None]:
        if sampling.temperature == 0:
            likeliest = np.partition(logits, -2)[-2:]
            gaps.append(float(likeliest[1] - likeliest[0]))
        else:
            number = draws.random()
            sampling.random = SimpleNamespace(random=lambda number=number: number)  # type: ignore[assignment]
            others = logits + noise.uniform(-tie / 2, tie / 2, (TRIALS, len(logits)))
            gaps.append(0.0 if len({sampling.choose(x) for x in (logits, *others)}) > 1 else math.inf)
        if token is not None:
            logits = model.runner.feed(np.array([[token]]))[0, -1]
    return gaps


def parted(case: Case, text: str) -> tuple[int, int]:
    """The tokens of the answer, from the first to behind the last, of which one came otherwise where the texts part."""
    said, begin, end = "", 0, 0
    for piece, end in case.pieces:
        if not text.startswith(said + piece):
            return max(0, min(begin, end - 1)), end
        if piece:
            said, begin = said + piece, end
    return max(0, min(begin, end - 1)), end + 1  # the other goes on, where this one may have ended itself


def verdict(case: Case, text: str) -> str:
    """ "right", "near tie" or "wrong"."""
    if text == case.text:
        return "right"
    begin, end = parted(case, text)
    return "near tie" if min(case.gaps[begin:end], default=math.inf) < case.tie else "wrong"


EXPECTED = ("right", "near tie", "left", "malformed and refused", "JSON", "called", "JSON cut")


def held(process: psutil.Process) -> tuple[float, int, int]:
    """MB of memory, threads, and open files of a process and its children."""
    found = (0.0, 0, 0)
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess), each.oneshot():
            own = (each.memory_info().rss / 1e6, each.num_threads(), each.num_fds())
            found = (found[0] + own[0], found[1] + own[1], found[2] + own[2])
    return round(found[0]), found[1], found[2]


class Client(threading.Thread):
    """Asks until `end`, one request after the other."""

    def __init__(self, url: str, model: str, cases: list[Case], seed: int, end: float, chats: bool) -> None:
        super().__init__()
        self.api = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=600)
        self.chats = chats
        self.model, self.cases, self.random, self.until = model, cases, random.Random(seed), end
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.times: list[tuple[float, float]] = []  # of whole answers: begin and seconds
        self.tokens = 0

    def run(self) -> None:
        while time.monotonic() < self.until:
            kind = self.random.random()
            case = self.random.choice(self.cases)
            try:
                if kind < 0.1:
                    wrong = {"model": self.model, **case.request, **self.random.choice(MALFORMED)}
                    self.api.post("/completions", body=wrong, cast_to=dict[str, Any])
                    self.counts["malformed and answered"] += 1
                elif kind < 0.3:
                    self._leave(case)
                elif kind < 0.4:
                    self._form()
                else:
                    self._ask(case)
            except openai.APIStatusError as error:
                expected = kind < 0.1 and error.status_code in (400, 404)
                self.counts[
                    "malformed and refused" if expected else f"status {error.status_code}: {error.message}"
                ] += 1
            except openai.OpenAIError as error:
                self.counts[f"{type(error).__name__}: {error}"] += 1

    def _leave(self, case: Case) -> None:
        stream = self.api.completions.create(model=self.model, stream=True, **case.request)
        for _, _chunk in zip(range(self.random.randrange(12)), stream, strict=False):
            pass
        stream.close()
        self.counts["left"] += 1

    def _form(self) -> None:
        """JSON by a schema: as text, or in a chat also as the arguments of a call."""
        how: dict[str, Any] = {"model": self.model, "max_tokens": 400, "seed": self.random.randrange(1000)}
        is_call = self.chats and self.random.random() < 0.5
        if self.chats:
            messages: Any = [{"role": "user", "content": f"Weather in {self.random.randrange(1000)}?"}]
            choice: Any = self.api.chat.completions.create(
                messages=messages, **how, **(CALL if is_call else FORM)
            ).choices[0]
            calls = choice.message.tool_calls or ()
            text = calls[0].function.arguments if calls else choice.message.content
        else:
            choice = self.api.completions.create(prompt="Weather:", extra_body=FORM, **how).choices[0]
            text = choice.text
        if choice.finish_reason == "length":
            self.counts["JSON cut"] += 1
            return
        try:
            jsonschema.validate(json.loads(text), SCHEMA)
        except (ValueError, TypeError, jsonschema.ValidationError) as error:
            self.counts[f"wrong JSON: {error}"] += 1
        else:
            self.counts["called" if is_call else "JSON"] += 1

    def _ask(self, case: Case) -> None:
        begin = time.monotonic()
        if self.random.random() < 0.5:
            chunks = self.api.completions.create(model=self.model, stream=True, **case.request)
            text = "".join(chunk.choices[0].text for chunk in chunks)
        else:
            text = self.api.completions.create(model=self.model, **case.request).choices[0].text
        self.times.append((begin, time.monotonic() - begin))
        found = verdict(case, text)
        self.counts[found] += 1
        if found == "wrong":
            begin, end = parted(case, text)
            gaps = [round(gap, 4) for gap in case.gaps[begin:end]]
            self.wrong.append({"case": self.cases.index(case), "tokens": [begin, end], "gaps": gaps, "came": text})
        self.tokens += len(case.pieces)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--cases", type=int, default=60, help="different requests")
    parser.add_argument("--context", type=int, default=1000, help="tokens of the longest")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu", help="of ONNX Runtime")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--slower", type=float, default=2.0, help="most that the 99th percentile may grow among attackers"
    )
    parser.add_argument(
        "--serve",
        default="--prefix-cache 32MiB",
        help="more options of still-export serve, in one text; the cache of states is small by default, so that it soon is full and any "
        "other growth of memory shows",
    )
    options = parser.parse_args()
    text = still_export.load(options.package).text
    asks = [{"role": "user", "content": "Weather in 999?"}]
    needs = len(text.dialogue(asks, tools=CALL["tools"])) if text.chat else 0
    if needs >= options.context:
        parser.error(f"the chat with a tool has {needs} tokens: --context {options.context} is too small")
    machine = options.threads, options.provider
    cases = make_cases(options.package, options.cases, options.context, *machine, options.seed)
    command = [
        sys.executable,
        "-m",
        "still_export.cli.main",
        "serve",
        str(options.package),
        "--port",
        "0",
        "--name",
        "soak",
    ]
    command += ["--rows", str(options.rows), "--threads", str(options.threads), "--max-context", str(options.context)]
    command += ["--provider", options.provider, *shlex.split(options.serve)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "STILL_API_KEY": KEY})
    assert server.stderr is not None
    url = ""
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if "soak on " in line:
            url = line.split("soak on ")[1].split(": ")[0]
            break
    if not url:
        return 1
    threading.Thread(target=lambda: [print(line, end="", file=sys.stderr) for line in server.stderr or ()]).start()
    begin = time.monotonic()
    seconds = 60 * options.minutes
    clients = [
        Client(url, "soak", cases, options.seed + i, begin + seconds, bool(text.chat)) for i in range(options.clients)
    ]
    seen: list[tuple[float, int, int]] = []
    attackers: subprocess.Popen[str] | None = None
    quiet_until = begin + QUIET * seconds
    try:
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            if attackers is None and time.monotonic() >= quiet_until:
                attackers = attack(url, (1 - QUIET) * seconds)
            seen.append(held(psutil.Process(server.pid)))
            time.sleep(min(5, seconds / 100))
    finally:
        attacks = json.loads(attackers.communicate()[0] or "{}") if attackers else {}
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
    counts: Counter[str] = sum((client.counts for client in clients), Counter())
    quarter = len(seen) // 4 + 1
    kept = {
        name: {"first": values[0], "first_third": max(values[: len(seen) // 3 + 1]), "end": min(values[-quarter:])}
        for name, values in zip(("memory_mb", "threads", "files"), zip(*seen, strict=True), strict=True)
    }
    times = [pair for client in clients for pair in client.times]
    quiet, among = slowest(times, begin, quiet_until), slowest(times, quiet_until, begin + seconds)
    failures = {k: n for k, n in counts.items() if k not in EXPECTED}
    report = {
        "minutes": round((time.monotonic() - begin) / 60, 1),
        **dict(sorted(counts.items())),
        "tokens_per_s": round(sum(client.tokens for client in clients) / (time.monotonic() - begin), 1),
        **kept,
        "p99_s": {"quiet": round(quiet, 3), "among_attackers": round(among, 3)},
        "attacks": attacks,
        "exit_code": server.returncode,
        "wrong_answers": [answer for client in clients for answer in client.wrong][:SHOWN],
    }
    print(json.dumps(report, indent=1))
    wrong = bool(failures) or counts["right"] == 0 or not attacks or not all(map(is_refused, attacks))
    grew = any(each["end"] > GROWTH * each["first_third"] for each in kept.values())
    return int(wrong or grew or among > options.slower * quiet or server.returncode != 0)


def attack(url: str, seconds: float) -> subprocess.Popen[str]:
    """Attackers in a process of their own, whose work is not that of the clients' process."""
    host, port = url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    tool = Path(__file__).with_name("soak_attackers.py")
    command = [sys.executable, str(tool), host, port, "soak", "--key", KEY, "--seconds", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def is_refused(kind: str) -> bool:
    """Whether what an attacker reports, "kind: status", is as it must be; kinds without a rule are answered or refused."""
    name, _, status = kind.partition(": ")
    if name.startswith("half requests"):
        return False
    return int(status) in (*REFUSED.get(name, (200, 400)), 429)


def slowest(times: list[tuple[float, float]], begin: float, end: float) -> float:
    """The 99th percentile of the times of answers that began between."""
    return float(np.percentile([took for at, took in times if begin <= at < end] or [math.nan], 99))


if __name__ == "__main__":
    sys.exit(main())
