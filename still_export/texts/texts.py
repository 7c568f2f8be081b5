"""Text files as one stream of token ids, cut into blocks without padding; batches depend on seed and step only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import ConfigError, DataError
from still_export.package.chat_format import chat_format
from still_export.package.refusals import RunError
from still_export.texts.chats import FORMS, conversation, printed
from still_export.texts.files import read_text
from still_export.texts.forms import NaturalWriter
from still_export.texts.tasks import TASKS, TaskWriter, Weighing

_PIECE_CHARACTERS = 1 << 16
"""Approximate size of the pieces that are tokenized in parallel; pieces end at a line break."""


def tokenize(text: str, tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Token ids of `text` without special tokens, int32 [N].

    Raises:
        DataError: An id exceeds the model's vocabulary.
    """
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARACTERS)
        end = len(text) if end < 0 else end + 1
        pieces.append(text[start:end])
        start = end
    encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    ids = np.concatenate([np.asarray(part, np.int32) for part in encoded])
    check_ids(ids, vocab_size)
    return ids


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise DataError unless every id is in the model's vocabulary."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(
            f"the tokenizer makes the id {int(ids.max())} and the model's vocabulary has {vocab_size} entries: "
            "the tokenizer belongs to another model. Use the one next to the model, or name it with --tokenizer."
        )


@dataclass(frozen=True)
class Corpus:
    """Texts as token ids; the end of each file is held out for validation.

    train, held_out: int32 [N]. bytes_per_token: UTF-8 bytes per token of the held-out text.
    """

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float


def python_documentation() -> str:
    """Python's language reference, 0.7 MB of English with code: the default text.

    Raises:
        DataError: This Python has no documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python comes without its documentation, so there is no text to train on. Give one with --text."
        ) from error
    return "\n\n".join(topics.values())


def read_corpus(paths: Sequence[str | Path], tokenizer: Any, vocab_size: int, held_out: float) -> Corpus:
    """Read and tokenize `paths`, joined with an end-of-text token.

    Args:
        held_out: Share at each file's end used for validation.

    Raises:
        DataError: A file is not text, or the tokenizer does not fit the model.
    """
    train, validation, size = [], [], 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in [read_text(Path(path)) for path in paths] or [python_documentation()]:
        cut = int(len(text) * (1 - held_out))
        train += [tokenize(text[:cut], tokenizer, vocab_size), np.asarray(end, np.int32)]
        if cut < len(text):
            validation.append(tokenize(text[cut:], tokenizer, vocab_size))
            size += len(text[cut:].encode())
    validation_ids = np.concatenate(validation) if validation else np.zeros(0, np.int32)
    return Corpus(np.concatenate(train), validation_ids, size / max(len(validation_ids), 1))


@dataclass(frozen=True)
class Batch:
    """ids: int64 [B, T]. weights: Loss weights of predicting each token, float32 [B, T]."""

    ids: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.ids.to(device), self.weights.to(device))


class Batches:
    """The training batches of a stage. Batch s is a function of (seed, s), so a resumed run sees the same batches.

    Args:
        corpus: Its training tokens are cut into blocks, visited in a new random order each epoch.
        rows, tokens: B and T; rows of all processes together.
        retrieval: Share of rows that are retrieval tasks.
        natural: Writer of natural forms; natural_share: Share of retrieval rows in natural forms.
        chats: Conversations as token ids; chat_share: Share of rows made of them.
        lengths: Row lengths used in turn instead of `tokens`, each with B * T tokens per batch; lengths may repeat.
    """

    def __init__(
        self,
        corpus: Corpus,
        writer: TaskWriter,
        rows: int,
        tokens: int,
        seed: int,
        retrieval: float,
        weighing: Weighing,
        *,
        natural: NaturalWriter | None = None,
        natural_share: float = 0.0,
        chats: Sequence[np.ndarray] = (),
        chat_share: float = 0.0,
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        self.corpus, self.writer = corpus, writer
        self.lengths, self.area, self.seed = lengths or (tokens,), rows * tokens, seed
        self.retrieval, self.weighing = retrieval, weighing
        self.natural, self.natural_share = natural, natural_share if natural else 0.0
        self.chats, self.chat_share = chats, chat_share if chats else 0.0
        longest = max(self.lengths)
        if len(corpus.train) < longest:
            raise DataError(
                f"the training text has {len(corpus.train)} tokens, fewer than one row of {longest}. "
                "Give more text, or a smaller --sequence-length."
            )
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def blocks(self, tokens: int) -> int:
        """Number of rows of `tokens` tokens in the text."""
        return len(self.corpus.train) // tokens

    def batch(self, step: int) -> Batch:
        """The batch of `step`, for all processes."""
        rng = np.random.default_rng((self.seed, step))
        turn, place = divmod(step, len(self.lengths))
        turns = np.random.default_rng((self.seed, 2, turn)).permutation(len(self.lengths))
        chosen = int(turns[place])
        tokens = self.lengths[chosen]
        rows = self.area // tokens
        batches_before = turn * self.lengths.count(tokens) + self.lengths[:chosen].count(tokens)  # of this length
        made = [self._row(batches_before * rows + row, tokens, rng) for row in range(rows)]
        ids, weights = (np.stack(arrays) for arrays in zip(*made, strict=True))
        return Batch(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights))

    def _row(self, number: int, tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights of a row; `number` counts rows of this length."""
        kind = rng.random()
        if kind < self.retrieval:
            if self.natural is not None and rng.random() < self.natural_share:
                return self.natural.training_row(tokens, rng, self.weighing)
            task = list(TASKS.values())[int(rng.integers(len(TASKS)))]
            return self.writer.training_row(task, tokens, rng, self.weighing)
        ids = self._chat(tokens, rng) if kind < self.retrieval + self.chat_share else self._block(number, tokens)
        return ids, np.ones(tokens, np.float32)

    def _block(self, number: int, tokens: int) -> np.ndarray:
        epoch, index = divmod(number, self.blocks(tokens))
        known, order = self._orders.get(tokens, (-1, np.zeros(0, np.int64)))
        if known != epoch:
            order = np.random.default_rng((self.seed, 1, epoch)).permutation(self.blocks(tokens))
            self._orders[tokens] = (epoch, order)
        start = int(order[index]) * tokens
        return self.corpus.train[start : start + tokens]

    def _chat(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Conversations, until the row is full."""
        parts, size = [], 0
        while size < tokens:
            parts.append(self.chats[int(rng.integers(len(self.chats)))])
            size += len(parts[-1])
        return np.concatenate(parts)[:tokens]


def read_chats(path: str | Path, tokenizer: Any, vocab_size: int) -> list[np.ndarray]:
    """Conversations as token ids in the tokenizer's chat template.

    Args:
        path: File with one JSON conversation per line, in a form of `chats.conversation`.

    Raises:
        DataError: The file is unusable, or the tokenizer has no template.
    """
    chat = chat_format(tokenizer)
    if chat is None:
        raise DataError(f"{path}: the tokenizer has no chat template for conversations. Leave out --chat-file.")
    found = []
    for number, line in enumerate(read_text(Path(path)).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = printed(chat, conversation(json.loads(line)))
        except (DataError, RunError, ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: {error} {FORMS}") from error
        found.append(tokenize(text, tokenizer, vocab_size))
    if not found:
        raise DataError(f"{path}: no conversation. {FORMS}")
    return found


def held_out_rows(corpus: Corpus, rows: int, tokens: int) -> Tensor:
    """The first blocks of the held-out text, int64 [rows or fewer, tokens].

    Raises:
        ConfigError: The text is shorter than one block.
    """
    count = min(rows, len(corpus.held_out) // tokens)
    if count == 0:
        raise ConfigError(
            f"the held-out text has {len(corpus.held_out)} tokens, fewer than one row of {tokens}. "
            "Raise --held-out, give more text, or a smaller --sequence-length."
        )
    return torch.from_numpy(corpus.held_out[: count * tokens].reshape(count, tokens).astype(np.int64))
