"""Tokenizers that live in a folder's own code, which is never run: their rules for splitting texts, where they are known."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError, ModelNotFoundError
from still_export.folders.files import Files
from still_export.gguf.rules import RULES

_EXTRA = [f"<|extra_{number}|>" for number in range(205)]


@dataclass(frozen=True)
class Remote:
    """A class of remote code.

    Args:
        file: Its vocabulary: a token in base64 and its rank a line, as tiktoken has it.
        rule: Name of its rule in RULES.
        begins: Tokens before each text.
        specials: Tokens behind the vocabulary that tokenizer_config.json does not list.
    """

    file: str
    rule: str
    begins: tuple[str, ...] = ()
    specials: tuple[str, ...] = ()


_KIMI = Remote("tiktoken.model", "kimi-k2")
KNOWN = {
    "tokenization_kimi.TikTokenTokenizer": _KIMI,
    "tokenization_moonshot.TikTokenTokenizer": _KIMI,
    "tokenization_qwen.QWenTokenizer": Remote(
        "qwen.tiktoken", "qwen2", specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRA)
    ),
    "tokenization_chatglm.ChatGLM4Tokenizer": Remote("tokenizer.model", "chatglm-bpe", ("[gMASK]", "<sop>")),
}
"""By module and class, as auto_map in tokenizer_config.json names them."""


def remote_class(folder: Files, is_known: Callable[[str], bool] = lambda name: True) -> str:
    """The class of remote code that alone knows how texts are split; "": tokenizer.json, or a class of transformers, does.

    Args:
        is_known: Whether transformers has a class; only with transformers imported can one say so.
    """
    config = folder.json("tokenizer_config.json")
    named = config.get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    found = next((name for name in (classes if isinstance(classes, list) else [classes]) if isinstance(name, str)), "")
    if folder.has("tokenizer.json"):
        return ""
    return found.rpartition("--")[2] or _of_another_library(folder.path, config, is_known)


def _of_another_library(folder: Path, config: Mapping[str, Any], is_known: Callable[[str], bool]) -> str:
    """A class that transformers lacks, or a vocabulary of tiktoken, which states no rule."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and name and not (is_known(name) or is_known(name.removesuffix("Fast"))):
        return name
    if not name and (tiktoken := [p.name for p in (*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model"))]):
        return tiktoken[0]
    return ""


def describe_remote(name: str) -> str:
    """Summary of the tokenizer of the class `name`."""
    if name in KNOWN:
        return f"{KNOWN[name].file} by the rule {KNOWN[name].rule} of {name}"
    return f"none that is read: {name} is code of its own, which is never run; a package accepts token ids only"


def make_remote(folder: Files, name: str) -> Any:
    """The tokenizer of the class `name`, for transformers.

    Raises:
        ModelNotFoundError: Its rule is not known.
        CheckpointError: Its vocabulary is missing or damaged.
    """
    if name not in KNOWN:
        raise ModelNotFoundError(
            f"the tokenizer of {folder.path} is {name}, code of its own that states how texts are split and is never run here; known are "
            f"{', '.join(KNOWN)}. Save it as tokenizer.json where you trust that code, and put the file there."
        )
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    remote, path = KNOWN[name], folder.path / "tokenizer_config.json"
    rule, config = RULES[remote.rule], folder.json(path.name)
    ranks = _ranks(folder, remote.file)
    letters = _letters()
    words = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(words, _merges(ranks, letters), ignore_merges=True))  # as tiktoken does
    made.pre_tokenizer, made.decoder = rule.pre_tokenizer(), decoders.ByteLevel()
    if rule.composed:
        made.normalizer = normalizers.NFC()
    added = {len(ranks) + number: {"content": token} for number, token in enumerate(remote.specials)}
    added |= {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    for number, token in sorted(added.items()):
        made.add_special_tokens([AddedToken(str(token["content"]), normalized=False, special=True)])
        if (found := made.token_to_id(str(token["content"]))) != number:
            raise CheckpointError(
                f"{path}: the token {token['content']!r} has the number {number}; behind the {len(ranks)} tokens of {remote.file} it "
                f"would be {found}. The files belong to different models; fetch them again."
            )
    if remote.begins:
        ids = [(token, made.token_to_id(token)) for token in remote.begins]
        if any(number is None for _, number in ids):
            raise CheckpointError(f"{path} lacks {', '.join(remote.begins)}, which precede each text. Fetch it again.")
        made.post_processor = processors.TemplateProcessing(
            single=[*remote.begins, "$A"], pair=[*remote.begins, "$A", "$B"], special_tokens=ids
        )
    kinds = ("bos_token", "eos_token", "pad_token", "unk_token")
    stated = {kind: config.get(kind) for kind in kinds}
    texts = {kind: each.get("content") if isinstance(each, dict) else each for kind, each in stated.items()}
    known = {name: text for name, text in texts.items() if isinstance(text, str) and made.token_to_id(text) is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **known)
    tokenizer.chat_template = config.get("chat_template")
    if folder.has("chat_template.jinja"):
        tokenizer.chat_template = folder.text("chat_template.jinja")
    return tokenizer


def _ranks(folder: Files, name: str) -> dict[bytes, int]:
    """The vocabulary of tiktoken in a file.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    path, content = folder.path / name, folder.content(name)
    try:
        lines = [line.split() for line in content.splitlines() if line.strip()]
        found = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path} is no vocabulary of tiktoken: {error}. Fetch it again.") from error
    if sorted(found.values()) != [*range(len(lines))] or not all(bytes([byte]) in found for byte in range(256)):
        raise CheckpointError(f"{path} lacks tokens, or has some twice: {len(found)} of {len(lines)}. Fetch it again.")
    return found


def _letters() -> dict[int, str]:
    """GPT-2's visible letters for bytes: those that print stand for themselves, the others follow from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def _merges(ranks: Mapping[bytes, int], letters: Mapping[int, str]) -> list[tuple[str, str]]:
    """Each token's splits into two tokens, by its rank: tiktoken joins the two neighbours whose whole has the least rank."""

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    found = []
    for token, _ in sorted(ranks.items(), key=lambda entry: entry[1]):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        found += [(word(left), word(right)) for left, right in sorted(pairs, key=lambda p: (ranks[p[0]], ranks[p[1]]))]
    return found
