"""A softmax model with a byte tokenizer and a text, small enough to train in a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from still_export.linearization.recipe import Recipe
from tests.still_export.tiny import plain_model

WORDS = "the river runs down to a sea of stone and no bird sings there in winter when ships go by".split()


def byte_tokenizer(merges: Sequence[str] = ()) -> Any:
    """One token per byte, one of each of `merges`, such as "h e", and an end-of-text token."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    pairs = [(first, second) for first, second in (merge.split() for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def chat_tokenizer(template: str) -> Any:
    """The byte tokenizer with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def make_base(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A base model folder with weights of a trained model's size."""
    model = plain_model(
        family, torch.float32, vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None, **changes
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_text(path: Path, words: int = 4000, seed: int = 0) -> Path:
    """A file of random words."""
    chosen = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    path.write_text(" ".join(WORDS[int(i)] for i in chosen) + "\n", encoding="utf-8")
    return path


def small_values(base: Path, text: Path) -> dict[str, Any]:
    """Options of a recipe of a few steps on the CPU, of any layers."""
    return dict(
        base=str(base),
        texts=(str(text),),
        sequence_length=64,
        batch_size=4,
        transfer_steps=4,
        finetune_steps=4,
        validate_every=2,
        validation_rows=2,
        checkpoint_every=2,
        patience=0,
        device="cpu",
        everyday_questions=2,
    )


def small_recipe(base: Path, text: Path, **changes: Any) -> Recipe:
    """The recipe of STILL with such options."""
    return Recipe(**{**small_values(base, text), "chunk_size": 8, "salient_per_chunk": 2, **changes})
