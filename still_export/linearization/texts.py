"""Text files as one stream of token ids, cut into blocks without padding; batches that depend on seed and step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import ConfigError, DataError
from still_export.linearization.tasks import TASKS, TaskWriter

_PIECE_CHARACTERS = 1 << 16
"""Texts are tokenized in pieces of about this size, in parallel; a piece ends at a line's end."""


def read_text(path: Path) -> str:
    """The content of a text file.

    Raises:
        DataError: The file is missing, empty, or no UTF-8 text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Give a text file.") from error
    if not content.strip():
        raise DataError(f"{path} is empty. Give a text file with some megabytes of text.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no UTF-8 text (byte {error.start:,} is 0x{content[error.start]:02x}). Decompress or convert it first."
        ) from error
    if "\0" in text:
        raise DataError(f"{path} holds zero bytes, so it is a binary file. Give plain text.")
    return text


def tokenize(text: str, tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Token ids of `text` without special tokens, int32 [N].

    Raises:
        DataError: An id is beyond the model's vocabulary.
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
            "the tokenizer belongs to another model. Use the one beside the model, or name it with --tokenizer."
        )


@dataclass(frozen=True)
class Corpus:
    """Texts as token ids; the end of every file is held out for validation.

    train, held_out: int32 [N]. bytes_per_token: UTF-8 bytes of the held-out text by its tokens.
    """

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float


def read_corpus(paths: Sequence[str | Path], tokenizer: Any, vocab_size: int, held_out: float) -> Corpus:
    """Read and tokenize `paths`; the files follow each other with an end-of-text token in between.

    Args:
        held_out: Share of each file's end that is kept for validation.

    Raises:
        DataError: A file is no text, or the tokenizer does not fit the model.
    """
    train, validation, size = [], [], 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for path in paths:
        text = read_text(Path(path))
        cut = int(len(text) * (1 - held_out))
        train += [tokenize(text[:cut], tokenizer, vocab_size), np.asarray(end, np.int32)]
        if cut < len(text):
            validation.append(tokenize(text[cut:], tokenizer, vocab_size))
            size += len(text[cut:].encode())
    kept = np.concatenate(validation) if validation else np.zeros(0, np.int32)
    return Corpus(np.concatenate(train), kept, size / max(len(kept), 1))


@dataclass(frozen=True)
class Batch:
    """ids: int64 [B, T]. weights: Of each token's loss where it is predicted, float32 [B, T]."""

    ids: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        return Batch(self.ids.to(device), self.weights.to(device))


class Batches:
    """The training batches of a stage; batch s is a function of (seed, s), so a resumed run sees what it would have seen.

    Args:
        corpus: Its training tokens are cut into blocks, which are visited in a new random order every epoch.
        writer: Writes the retrieval rows.
        rows, tokens: B and T, rows over all processes.
        retrieval: Share of the rows that are retrieval tasks.
        answer_weight: Loss weight of their answers.
    """

    def __init__(
        self,
        corpus: Corpus,
        writer: TaskWriter,
        rows: int,
        tokens: int,
        seed: int,
        retrieval: float,
        answer_weight: float,
    ) -> None:
        self.corpus, self.writer = corpus, writer
        self.rows, self.tokens, self.seed = rows, tokens, seed
        self.retrieval, self.answer_weight = retrieval, answer_weight
        self.blocks = len(corpus.train) // tokens
        if self.blocks == 0:
            raise DataError(
                f"the training text has {len(corpus.train)} tokens, fewer than one row of {tokens}. "
                "Give more text, or a smaller --sequence-length."
            )
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def batch(self, step: int) -> Batch:
        """The batch of `step` over all processes."""
        rng = np.random.default_rng((self.seed, step))
        names = list(TASKS)
        ids, weights = [], []
        for row in range(self.rows):
            if rng.random() < self.retrieval:
                task = TASKS[names[int(rng.integers(len(names)))]]
                row_ids, row_weights = self.writer.training_row(task, self.tokens, rng, self.answer_weight)
            else:
                row_ids = self._block(step * self.rows + row)
                row_weights = np.ones(self.tokens, np.float32)
            ids.append(row_ids)
            weights.append(row_weights)
        return Batch(torch.from_numpy(np.stack(ids).astype(np.int64)), torch.from_numpy(np.stack(weights)))

    def _block(self, number: int) -> np.ndarray:
        epoch, index = divmod(number, self.blocks)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.seed, 1, epoch)).permutation(self.blocks))
        start = int(self._order[1][index]) * self.tokens
        return self.corpus.train[start : start + self.tokens]


def held_out_rows(corpus: Corpus, rows: int, tokens: int) -> Tensor:
    """The first blocks of the held-out text, int64 [rows or fewer, tokens].

    Raises:
        ConfigError: There is not one block.
    """
    count = min(rows, len(corpus.held_out) // tokens)
    if count == 0:
        raise ConfigError(
            f"the held-out text has {len(corpus.held_out)} tokens, fewer than one row of {tokens}. "
            "Raise --held-out, give more text, or a smaller --sequence-length."
        )
    return torch.from_numpy(corpus.held_out[: count * tokens].reshape(count, tokens).astype(np.int64))
