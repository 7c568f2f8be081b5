"""Tokens that begin and end texts, by a GGUF file."""

from __future__ import annotations

from typing import Any

from still_export.errors import CheckpointError
from still_export.gguf.container import Container

_ENDS = ("eos", "eot", "eom")
_TURNS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *(
        "<EOT>",
        "[EOT]",
        "<|eom|>",
        "<end_of_utterance>",
        "<|return|>",
        "<turn|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    *("<|turn_end|>", "<|end_of_turn|>", "<|message_end|>", "[e~[", "</s>"),
)
"""Names that published chat templates end an answer with."""


def token_ids(file: Container, vocabulary: int) -> dict[str, Any]:
    """Fields of config.json: bos, pad, and all tokens that end an answer. A chat template that writes a known end of turns ends answers
    with it, whatever the keys say, as llama.cpp has it.

    Raises:
        CheckpointError: A token lies outside of the vocabulary.
    """
    found = {}
    for name in (*_ENDS, "bos", "padding"):
        token = file.value(f"tokenizer.ggml.{name}_token_id", None)
        if token is not None and not 0 <= token < vocabulary:
            raise CheckpointError(
                f"{file.path} has {name}_token_id={token}, outside of its vocabulary of {vocabulary} tokens. It is damaged."
            )
        found[name] = token
    given = [token for token in (*(found[name] for name in _ENDS), *turn_ends(file)) if token is not None]
    ends = list(dict.fromkeys(given))
    return {
        "bos_token_id": found["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": found["padding"],
    }


def turn_ends(file: Container) -> list[int]:
    """Known ends of turns that the chat template writes."""
    template = str(file.value("tokenizer.chat_template", ""))
    used = [name for name in _TURNS if name in template]
    tokens = file.value("tokenizer.ggml.tokens", []) if used else []
    return [tokens.index(name) for name in used if name in tokens]
