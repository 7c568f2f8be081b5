"""Check what users of onnxruntime-genai get: og.Model against this project's runner on the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from still_export.package.folder import Package
from still_export.package.trust import UNTRUSTED, native_file
from still_export.proof.verdict import Check
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError

NAME = "onnxruntime-genai"
CONFIG = "genai_config.json"
BOUND = 1e-3
"""Allowed difference, relative to the largest logit. Both run the same graph in the same calls, so only rounding differs."""


def genai_checks(package: Package, steps: int) -> list[Check]:
    """Compare genai's logits and tokens with this project's runner: a prompt at once, in pieces, and two of different lengths as a batch,
    each with greedy steps. Also check that genai refuses calls that it does not support.

    Args:
        steps: Greedy steps after each prompt; fewer at the capacity's end.

    Raises:
        RunError: The package names native code that may not be loaded, or genai cannot load it.
        ModuleNotFoundError: genai is not installed.
    """
    import onnxruntime_genai as og

    check_library(package)
    try:
        model = og.Model(str(package.path))
    except RuntimeError as error:
        raise RunError(f"{NAME} cannot load {package.path}: {' '.join(str(error).split())}") from error
    own = OrtModel(package.path, check=False)
    table, padding = own.table, int(_config(package)["model"]["pad_token_id"])
    reserved = {*package.manifest["eos_token_ids"], padding}
    limit = table.capacity_tokens if table.bounded else 1 << 20
    chunk = table.period if table.period > 1 else own.prefill_tokens
    lengths = [max(1, min(n, limit - 2)) for n in (2 * chunk + chunk // 2, chunk + 1)]
    steps = max(1, min(steps, limit - lengths[0]))
    words = np.array([n for n in range(package.manifest["model"]["vocab_size"]) if n not in reserved], np.int64)
    random = np.random.default_rng(0)
    long, short = (random.choice(words, n) for n in lengths)
    both = _Both(og, model, own, reserved, padding, steps)
    piece = max(1, lengths[0] // 3)
    return [
        both.compare(f"{steps} tokens after a prompt of {lengths[0]}", [long]),
        both.compare(f"the same with the prompt in pieces of {piece}", [long], piece),
        both.compare(f"a batch of prompts of {lengths[0]} and {lengths[1]}", [long, short]),
        _refuses("beams", lambda: _generator(og, model, 1, num_beams=2)),
        _refuses("to go back to a token", lambda: both.go_back(short)),
    ]


def check_library(package: Package) -> None:
    """Raise RunError if genai would load untrusted native code, because genai does not check."""
    name = _config(package)["model"]["decoder"].get("session_options", {}).get("custom_ops_library")
    if name and native_file(package.path, package.manifest, name) is None:
        raise RunError(
            f"the native kernel {package.path / name} {UNTRUSTED}, and {NAME} would load it. Add --trust-native."
        )


def _config(package: Package) -> dict[str, Any]:
    return dict(json.loads((package.path / CONFIG).read_text(encoding="utf-8")))


def _generator(og: Any, model: Any, sequences: int, **options: Any) -> Any:
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(batch_size=sequences, **options)
    return og.Generator(model, parameters)


def _refuses(what: str, attempt: Callable[[], Any]) -> Check:
    try:
        attempt()
    except RuntimeError:
        return Check(f"{NAME} refuses {what}", True)
    return Check(f"{NAME} refuses {what}", False, "it computes something, which is wrong")


class _Both:
    """Runs genai and this project's runner on the same tokens; `reserved` token ids are never chosen."""

    def __init__(self, og: Any, model: Any, own: OrtModel, reserved: set[int], padding: int, steps: int) -> None:
        self.og, self.model, self.own, self.reserved, self.steps = og, model, own, sorted(reserved), steps
        self.padding = padding

    def compare(self, what: str, prompts: Sequence[np.ndarray], piece: int = 0) -> Check:
        """One check: every logit is within the bound, and every token of genai is the runner's likeliest, or ties with it."""
        counts = np.array([len(prompt) for prompt in prompts])
        padded = np.full((len(prompts), counts.max()), self.padding, np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        logits, tokens = self._genai(padded, piece)
        expected = self._own(padded, counts, piece, tokens)
        worst, bound = float(np.abs(logits - expected).max()), BOUND * float(np.abs(expected).max())
        expected[..., self.reserved] = -np.inf
        chosen = np.take_along_axis(expected, tokens[..., None].astype(np.int64), axis=-1)[..., 0]
        wrong = int((chosen < expected.max(-1) - bound).sum())
        detail = f"largest error of a logit {worst:.1e}, bound {bound:.1e}; {wrong} of {tokens.size} tokens are others"
        return Check(f"{NAME}: {what}, as run", worst <= bound and not wrong, detail)

    def go_back(self, prompt: np.ndarray) -> None:
        """Rewind to the middle of a prompt."""
        generator = _generator(self.og, self.model, 1, max_length=len(prompt) + 2)
        generator.append_tokens(prompt.astype(np.int32))
        generator.rewind_to(max(1, len(prompt) // 2))

    def _genai(self, prompts: np.ndarray, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits before each token, [steps, B, V], and the tokens, [steps, B]."""
        sequences, most = prompts.shape[0], prompts.shape[1] + self.steps
        pieces = {"chunk_size": piece} if piece else {}
        # Its own way to let no text end early.
        generator = _generator(self.og, self.model, sequences, max_length=most, min_length=most, **pieces)
        generator.append_tokens(prompts.astype(np.int32) if sequences > 1 else prompts[0].astype(np.int32))
        logits, tokens = [], []
        for _ in range(self.steps):
            logits.append(np.array(generator.get_logits(), np.float32).reshape(sequences, -1))
            generator.generate_next_token()
            tokens.append(np.array(generator.get_next_tokens()))
        return np.array(logits), np.array(tokens)

    def _own(self, prompts: np.ndarray, counts: np.ndarray, piece: int, tokens: np.ndarray) -> np.ndarray:
        """The runner's logits [steps, B, V] after the prompts and after each token but the last."""
        self.own.start(len(prompts))
        for begin in range(0, prompts.shape[1], piece or prompts.shape[1]):
            part = prompts[:, begin : begin + (piece or prompts.shape[1])]
            first = self.own.feed(part, np.clip(counts - begin, 0, part.shape[1]))
        return np.array([first[:, -1], *(self.own.step(token.astype(np.int64)).copy() for token in tokens[:-1])])
