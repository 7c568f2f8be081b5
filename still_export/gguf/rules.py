r"""How GGUF's byte-level tokenizers split texts before merging, by the name in `tokenizer.ggml.pre`.

Expressions are copied from the models' tokenizer.json.
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
    """Words with leading capitals, and words of capitals."""
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
    """How a tokenizer splits texts.

    Args:
        expressions: Splits in sequence, each applied to the pieces of the one before; (): GPT-2's.
        digits: Each digit becomes a piece, before the expressions.
        ignore_merges: A piece that is a token becomes that token, even if no merges lead to it.
        adds_bos: Whether bos precedes each text, by default.
        composed: Texts are normalized to Unicode NFC.
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
"""Rules by `tokenizer.ggml.pre`."""


def rule_of(name: str | None, path: Path) -> Rule:
    """The rule of a file.

    Raises:
        UnsupportedModelError: It names none, or an unknown one.
    """
    if name in RULES:
        return RULES[name]
    what = "does not state how it splits texts (tokenizer.ggml.pre)"
    if name:
        what = f"splits texts by the rule {name!r} (tokenizer.ggml.pre), which is none of {', '.join(RULES)}"
    raise UnsupportedModelError(
        f"the tokenizer of {path} {what}: its token ids would be guesses. Use the model's Hugging Face folder, or a file that a newer "
        "llama.cpp converted."
    )
