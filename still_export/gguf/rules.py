"""Splitting rules of GGUF's byte-level tokenizers, by `tokenizer.ggml.pre`.

Expressions are those of the models' tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from still_export.errors import UnsupportedModelError

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_MARKED = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(before: str, upper: str, lower: str, behind: str) -> str:
    """Words whose capitals come first, and words of capitals."""
    return f"{before}[{upper}]*[{lower}]+{behind}|{before}[{upper}]+[{lower}]*{behind}"


_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_cased(_OTHER, _UPPER, _LOWER, '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_cased(_OTHER, _UPPER, _LOWER, _SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|{_cased(_OTHER, _UPPER + _NOT_HAN, _LOWER + _NOT_HAN, _SHORT + '?')}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)


@dataclass(frozen=True)
class Rule:
    """How a tokenizer splits texts before merges.

    Args:
        expressions: Splits one after the other, each of the pieces of the one before; none: GPT-2's own.
        digits: Each digit is a piece of its own, before anything else.
        ignore_merges: A piece that is a token is one, whether merges lead there or not.
        adds_bos: Before each text, where no key says otherwise.
        composed: Texts are brought into Unicode's form NFC.
    """

    expressions: tuple[str, ...] = ()
    digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    composed: bool = False

    def pre_tokenizer(self) -> Any:
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in self.expressions]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.expressions)
        return pre_tokenizers.Sequence([*steps, last]) if steps else last


_GPT2, _DIGITS = Rule(), Rule(digits=True)
_LLAMA3 = Rule((_WORDS.replace("{digits}", "{1,3}"),))
_QWEN2 = Rule((_WORDS.replace("{digits}", ""),), composed=True)
_OF_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
RULES: dict[str, Rule] = {
    **dict.fromkeys(_OF_LLAMA3, replace(_LLAMA3, ignore_merges=True, adds_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), replace(_QWEN2, composed=False)),
    "qwen35": Rule((_MARKED,), composed=True),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "granite-docling", "exaone4", "mellum", "a.x-4.0", "jais"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), replace(_GPT2, composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": replace(_DIGITS, composed=True),
    "tekken": Rule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Rule((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Rule(_DEEPSEEK)),
    "kimi-k2": Rule((_KIMI,)),
}
"""By `tokenizer.ggml.pre`."""


def rule_of(name: str | None, path: Path) -> Rule:
    """The rule of a file.

    Raises:
        UnsupportedModelError: It names none, or one that is not known here.
    """
    if name in RULES:
        return RULES[name]
    what = "does not say how it splits texts (tokenizer.ggml.pre)"
    if name:
        what = f"splits texts by the rule {name!r} (tokenizer.ggml.pre), which is none of {', '.join(RULES)}"
    raise UnsupportedModelError(
        f"the tokenizer of {path} {what}: its token ids would be guesses. Use the model's Hugging Face folder, or a file that a newer "
        "llama.cpp converted."
    )
