"""Texts for proofs of tokenizers: prose, code, numbers, white space, many scripts, special tokens, long inputs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from still_export.package.refusals import RunError
from still_export.runtime.text import Text

PROSE = (
    "The lighthouse keeper counted 1,204 waves before breakfast; he hadn't slept. \"Again?\" she asked, 'again'. "
    "Rain (heavy, at times) fell on the 3rd of May 1987, at 07:45. Nobody could say why it stopped."
)
CODE = (
    "def total(rows: list[dict[str, int]]) -> int:\n"
    '\t"""Sum `x`."""\n'
    "    return sum(row[\"x\"] ** 2 for row in rows if row.get('x') is not None)  # 0x1F\n\n\n"
    "<div class=\"a-b\">&nbsp;{{ value|default('-') }}</div>\r\nSELECT * FROM t WHERE a >= 3.14e-7;"
)
KINDS = (
    "",
    " ",
    "a",
    " leading and trailing ",
    "two  spaces,   three,\ttabs\t\tand\n\n\nlines\r\n",
    "0 1 12 123 1234 12345 3.14159 1e-9 1,000,000 007 2026-11-28",
    "it's we'll they've I'd you're CAN'T",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d \u2026 \u00c5\u03a9\u2248\u00e7\u221a e\u0301 \ufb01 \u1e9b\u0323",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4 \uff21\uff22\uff23 \uff5cx\uff5c",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \u26a1\ufe0f \U0001d538\U0001d4b7",
    "\u00a0no-break\u202fspaces\u3000and\u200bzero\ufeffwidth\u2028line",
    "\x07\x1b[0m\x7f",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\temp\\x.txt",
    PROSE,
    CODE,
)
LONG = 40
"""Repetitions of prose and code, some 5,000 tokens."""


def tokenizer_texts(special: Iterable[str] = ()) -> list[str]:
    """The texts, with each of the `special` tokens by itself, between letters and between spaces."""
    around = [text for token in special for text in (token, f"a{token}b", f"Say {token} {token}\n")]
    return [*KINDS, *around, "\n".join([PROSE, CODE] * LONG)]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather \u2014 in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CHATS: tuple[tuple[list[dict[str, str]], dict[str, Any]], ...] = (
    ([{"role": "user", "content": "Hi"}], {}),
    ([{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": PROSE}], {}),
    (
        [
            {"role": "user", "content": CODE},
            {"role": "assistant", "content": " It sums squares.\n"},
            {"role": "user", "content": "  Why?\u00a0"},
        ],
        {},
    ),
    ([{"role": "user", "content": "Is it raining in Bergen?"}], {"tools": [TOOL]}),
)
"""Conversations, with arguments, for proofs of chat formats."""
SPECIAL_MOST = 256
"""Most special tokens in prompts."""


class Silent:
    """Replaces the runner that `Text` needs."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest


def prompt_words(folder: Path, manifest: dict[str, Any]) -> tuple[int, ...]:
    """Tokens of chats, special tokens, prose and code, for prompts; none if the package's tokenizer cannot be read here."""
    if "tokenizer.json" not in manifest["files"] or importlib.util.find_spec("tokenizers") is None:
        return ()
    try:
        text = Text(Silent(folder, manifest))  # type: ignore[arg-type]
    except RunError:
        return ()
    found = []
    for messages, more in CHATS:
        try:
            found += text.dialogue(messages, **more)
        except RunError:  # the template does not accept them
            continue
    found += sorted(text.tokenizer.get_added_tokens_decoder())[:SPECIAL_MOST]
    found += text.encode(PROSE) + text.encode(CODE)
    return tuple(token for token in found if token < manifest["model"]["vocab_size"])
