"""Write a package's tokenizer.json, which must give the same ids as the model's tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError, UnsupportedError

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12345 days, we've seen 678 more; don't you THINK'S so?",
    "def f(x):\n    return x + 1\n\n\tif x != 0b101: print(f'{x:>8.2f}')  # ok\r\n\r\n",
    "  two spaces,   three,\ttab\u00a0no-break\u3000wide ",
    "caf\u00e9 nai\u0308ve Stra\u00dfe \u0130stanbul \u4f60\u597d\u4e16\u754c",
    "\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0645\u0631\u062d\u0628\u0627",
    "\u05e9\u05dc\u05d5\u05dd \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2019quoted\u201d \u2014 3.14159 1,000,000 50% $9.99 x\u00b2 \u00bd \ufb01",
    "https://example.org/a?b=c&d=%20#e user@example.com /usr/lib/x86_64 C:\\path <html attr='v'>&amp;</html>",
    "camelCase XMLHttpRequest snake_case don't WE'LL",
    "x",
    "",
    " ",
    "\n",
    "a" * 300,
    "0" * 40,
)
"""Kinds of text in which splitting rules differ."""


def write_tokenizer(tokenizer: Any, folder: Path, origin: str) -> None:
    """Write tokenizer.json and its companions into `folder`.

    Truncation and padding, left over from training, are switched off: transformers ignores them, other programs do not.

    Raises:
        UnsupportedError: The tokenizer has no such form.
        CheckpointError: The file and the tokenizer give different ids.
    """
    from tokenizers import Tokenizer

    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedError(
            f"the tokenizer of {origin} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "convert it to a fast tokenizer first."
        )
    written = Tokenizer.from_file(str(path))
    if written.truncation is not None or written.padding is not None:
        written.no_truncation()
        written.no_padding()
        written.save(str(path))
    added = [token.content for token in written.get_added_tokens_decoder().values()]
    for text in (*TEXTS, *added, "".join(added[:64]), " a ".join(added[:64])):
        expected, actual = list(tokenizer(text)["input_ids"]), written.encode(text).ids
        if expected != actual:
            raise CheckpointError(
                f"the tokenizer of {origin} gives {text[:40]!r} the ids {str(expected[:12])[1:-1]}, and tokenizer.json, which a package "
                f"is run with, {str(actual[:12])[1:-1]}. Its files contradict each other: save it again with transformers' save_pretrained."
            )


def check_vocabulary(folder: Path, vocabulary: int) -> None:
    """Warn about tokens without an embedding in the model in `folder`."""
    from tokenizers import Tokenizer

    beyond = sorted(
        (number, token)
        for token, number in Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().items()
        if number >= vocabulary
    )
    if beyond:
        number, token = beyond[0]
        logging.getLogger(__name__).warning(
            "the tokenizer has %d tokens beyond the model's vocabulary of %d, the first %r (%d): texts with them are refused",
            len(beyond),
            vocabulary,
            token,
            number,
        )
