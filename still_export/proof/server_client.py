"""A client of OpenAI-compatible servers for greedy completions. No torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import httpx2

from still_export.errors import ConfigError
from still_export.runtime.sampling import RunError

PER_SECOND = 20.0
"""Most requests a second."""
TIMEOUT_S = 300.0
"""For one answer. A large model on a laptop needs two minutes for a prompt of a thousand tokens."""
PENALTIES: dict[str, Any] = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}
"""No penalties. llama-cpp-python's server defaults to 1.1 for repeated tokens; vLLM uses the other name."""
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Answer:
    """A server's answer.

    Args:
        text: Without special tokens.
        count: Number of tokens in the server's usage; None: not reported.
        ended: The model ended it (finish_reason "stop").
        logprobs: Log-probability of each token, if the server reports them.
    """

    text: str
    count: int | None
    ended: bool
    logprobs: tuple[float, ...] = ()


@dataclass
class Client:
    """One model of one server.

    Args:
        model: The server's name of the model; None: the only one it has.
        per_second: Requests at most.

    Raises:
        ConfigError: No server answers there, it has several models, or none of this name.
    """

    address: str
    model: str | None = None
    per_second: float = PER_SECOND
    tokens: bool = field(default=False, init=False)
    logprobs: bool = field(default=False, init=False)
    penalties: Mapping[str, Any] = field(default_factory=lambda: PENALTIES, init=False)

    def __post_init__(self) -> None:
        base = self.address.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(
            base_url=base, headers=headers, timeout=httpx2.Timeout(TIMEOUT_S, connect=5), trust_env=False
        )
        self._lock, self._next = threading.Lock(), 0.0
        names = [str(entry.get("id")) for entry in self._json("GET", "/v1/models").get("data") or ()]
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            detail = "--as names none" if self.model is None else f"it has no {self.model!r}"
            raise ConfigError(
                f"{self.address} serves {', '.join(map(repr, names)) or 'no model'}; {detail}. Choose one: --as MODEL."
            )

    def probe(self, prompt: str, ids: list[int]) -> None:
        """Find out whether the server accepts token ids (`tokens`), reports log-probabilities (`logprobs`) and knows `penalties`.

        Raises:
            RunError: It answers neither form.
        """
        refused = ""
        for penalties, tokens, logprobs in product((PENALTIES, {}), (True, False), (True, False)):
            self.penalties = penalties
            status, content = self._send("POST", "/v1/completions", self._body(ids if tokens else prompt, 1, logprobs))
            if status == 200:
                self.tokens, self.logprobs = tokens, logprobs and bool(_logprobs(_choice(content)))
                return
            refused = _reason(content, status)
            if status in (401, 403, 404):
                break
        raise RunError(f"{self.address} answers no completion: {refused}")

    def ask(self, prompt: str | list[int], most: int) -> Answer:
        """The greedy answer of at most `most` tokens.

        Raises:
            RunError: The server refuses or breaks.
        """
        content = self._json("POST", "/v1/completions", self._body(prompt, most, self.logprobs))
        choice = _choice(content)
        text, count = choice.get("text"), (content.get("usage") or {}).get("completion_tokens")
        if not isinstance(text, str):
            raise RunError(f"{self.address} answers a completion without text")
        logprobs = _logprobs(choice) if self.logprobs else ()
        return Answer(
            text,
            count if isinstance(count, int) else len(logprobs) or None,
            choice.get("finish_reason") == "stop",
            logprobs,
        )

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def _body(self, prompt: str | list[int], most: int, logprobs: bool) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": most, "temperature": 0}
        return {**body, **self.penalties} | ({"logprobs": 1} if logprobs else {})

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        status, content = self._send(method, path, body)
        if status != 200 or not isinstance(content, dict):
            raise RunError(f"{self.address} refuses {method} {path}: {_reason(content, status)}")
        return content

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next)
            self._next = at + 1 / self.per_second
        time.sleep(at - now)
        try:
            response = self._http.request(method, path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConfigError(
                f"{self.address} does not answer: {error or type(error).__name__}. Is the server running there?"
            ) from error
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, response.text


def _choice(content: Any) -> dict[str, Any]:
    choices = content.get("choices") if isinstance(content, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Log-probabilities of an answer's tokens, in the format of completions or of chats. llama.cpp's server uses the latter for both."""
    found = choice.get("logprobs") or {}
    if isinstance(found.get("token_logprobs"), list):
        return tuple(float(x) for x in found["token_logprobs"] if x is not None)
    return tuple(float(entry["logprob"]) for entry in found.get("content") or () if "logprob" in entry)


def _reason(content: Any, status: int) -> str:
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"status {status}, {' '.join(str(message).split())[:200]}"
