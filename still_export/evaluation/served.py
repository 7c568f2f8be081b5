"""A server with OpenAI's completions as a model to evaluate: vLLM, `still-export serve` or another."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from still_export.runtime.sampling import RunError

SECONDS = 600
"""Timeout of an answer."""
AT_ONCE = 8
"""Prompts sent at a time; servers answer several together."""


def is_served(model: str) -> bool:
    """Whether a model is an address."""
    return model.startswith(("http://", "https://"))


class ServedModel:
    """A model on a server. A server returns no logits, so only tasks answered in text can be measured.

    Args:
        address: Up to the version: http://127.0.0.1:8000/v1.
        vocab_size: Vocabulary of the tokenizer.

    Raises:
        RunError: No such server answers there.
    """

    device = torch.device("cpu")

    def __init__(self, address: str, vocab_size: int) -> None:
        self.address, self.config = address.rstrip("/"), SimpleNamespace(vocab_size=vocab_size)
        self.name = self._ask("models", lambda found: found["data"][0]["id"])

    def to(self, device: Any) -> ServedModel:
        """No effect: the model stays on its server."""
        return self

    def complete(self, prompt: Sequence[int], tokens: int) -> str:
        """The greedy continuation of token ids, of at most `tokens` tokens."""
        body = {"model": self.name, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        return self._ask("completions", lambda found: found["choices"][0]["text"], body)

    def complete_all(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[str]:
        """The continuations of (token ids, most tokens) pairs, in order."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda one: self.complete(*one), requests))

    def _ask(self, what: str, read: Any, body: dict[str, Any] | None = None) -> str:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/{what}", content, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return str(read(json.loads(answer.read())))
        except urllib.error.HTTPError as error:
            reason = error.read(400).decode(errors="replace").strip() or error.reason
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = str(error) or type(error).__name__
        raise RunError(
            f"{self.address}/{what} does not answer as OpenAI's interface does: {reason}. Start the server first: still-export serve DIR"
        )
