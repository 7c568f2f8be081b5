"""Find out whether a model overflows in its export type: one short text through PyTorch, a layer at a time."""

from __future__ import annotations

import numpy as np

from still_export.errors import StillExportError
from still_export.folders.model import ModelFolder
from still_export.graph.options import ExportOptions
from still_export.models.read.source import find_folder, find_source
from still_export.proof.absolute import Overflow, overflow_of_logits
from still_export.proof.chains import Chain, nothing
from still_export.proof.layerwise import LayerwiseModel

TEXT = "The quick brown fox jumps over 13 lazy dogs. def f(x): return x + 1"
MOST = 32
"""Tokens of the text."""


def overflow_of(options: ExportOptions, folder: ModelFolder | None = None) -> Overflow | None:
    """The first layer with a non-finite output on a short text in `options.dtype`, or constant logits; None: no overflow.

    Args:
        folder: The model's files, where they are open.

    Raises:
        StillExportError: The model cannot be read.
    """
    folder = folder or find_folder(options)
    source = find_source(options, folder)
    layers = LayerwiseModel({"model": {"all_logits": False}}, source)
    vocabulary = int(source.config.vocab_size)
    try:
        ids = folder.tokenizer(TEXT)["input_ids"]
    except StillExportError:
        ids = np.random.default_rng(0).integers(0, vocabulary, MOST).tolist()
    tokens = np.clip(np.array([ids[:MOST] or [0]], np.int64), 0, vocabulary - 1)
    feed = layers.empty_feed(1, tokens.shape[1]) | {"input_ids": tokens, "new_tokens": np.array([tokens.shape[1]])}
    passage = layers.begin([Chain.of(feed, nothing)])
    for index in range(layers.layers):
        passage.through(index)
        if passage.overflows[0] is not None:
            return Overflow(index)
    passage.answer()
    logits = passage.outputs[0][0]["logits"]
    return overflow_of_logits([logits])
