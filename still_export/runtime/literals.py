"""Values as models write them: JSON, Python's literals, and mixtures of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

DEPTH = 60
"""Deepest nesting of lists and objects."""
_QUOTES = ('"""', "'''", '"', "'", "<escape>", '<|"|>')
"""The last two are those of FunctionGemma and Gemma 4; their texts have no escapes."""
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\W\d]\w*")
_KEY = re.compile(r"[^\W\d][\w.\-]*")
_STRING = re.compile(r"[rR]?(?=[\"'])")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\'\"/"}}
Item = TypeVar("Item")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number, strict=False)


def json_value(text: str, at: int) -> tuple[Any, int]:
    """(the JSON value at `at`, the place after it); ValueError or RecursionError where there is none."""
    return _DECODER.raw_decode(text, at)


def loose_value(text: str, at: int) -> tuple[Any, int]:
    """`json_value`, also of an object or list in Python's notation, with keys without quotes, or with a comma at its end."""
    try:
        return json_value(text, at)
    except ValueError:
        reader = Literals(text, at)
        return reader.value(), reader.at


class Literals:
    """Reads literals from `text`; `at` is the next place. Methods raise ValueError for anything else."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at, self._depth = text, at, 0

    def value(self) -> Any:
        """The next value; tuples become lists."""
        self.blank()
        if (string := self._string()) is not None:
            while (more := self._string()) is not None:  # Python joins them
                string += more
            return string
        character = self.text[self.at : self.at + 1]
        if character == "[":
            return self.items("[", "]", self.value)
        if character == "(":
            found = self.items("(", ")", self.value)
            return found[0] if len(found) == 1 and not self.text[: self.at - 1].rstrip().endswith(",") else found
        if character == "{":
            return self.mapping()
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            plain = number[0].replace("_", "")
            return int(plain) if re.fullmatch(r"[+-]?\d{1,300}", plain) else float(plain)
        word = self.word(_WORD)
        if word not in _WORDS:
            raise ValueError(f"{word!r:.40} is no value")
        return _WORDS[word]

    def mapping(self) -> dict[str, Any]:
        """An object; its keys may lack quotes."""

        def pair() -> tuple[str, Any]:
            key = self.key(":")
            if key is None:
                key = self.value()
                self._expect(":")
            return key if isinstance(key, str) else json.dumps(key), self.value()

        return dict(self.items("{", "}", pair))

    def items(self, begin: str, end: str, item: Callable[[], Item]) -> list[Item]:
        """Items between `begin` and `end`, with commas between them."""
        self._expect(begin)
        self._depth += 1
        if self._depth > DEPTH:
            raise ValueError("nested too deeply")
        found: list[Item] = []
        while not self._took(end):
            found.append(item())
            if not self._took(","):
                self._expect(end)
                break
        self._depth -= 1
        return found

    def key(self, after: str) -> str | None:
        """A key without quotes before `after`, if there is one."""
        self.blank()
        found = _KEY.match(self.text, self.at)
        rest = self.text[found.end() :].lstrip() if found else ""
        if found is None or not rest.startswith(after) or rest.startswith("=="):
            return None
        self.at = len(self.text) - len(rest) + len(after)
        return found[0]

    def word(self, pattern: re.Pattern[str]) -> str:
        """The next word."""
        self.blank()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError("no word")
        self.at = found.end()
        return found[0]

    def blank(self) -> None:
        """Skip white space."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def _took(self, text: str) -> bool:
        self.blank()
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _expect(self, text: str) -> None:
        if not self._took(text):
            raise ValueError(f"no {text}")

    def _string(self) -> str | None:
        """The next text; None: there is none."""
        self.blank()
        raw = _STRING.match(self.text, self.at)
        begin = raw.end() if raw else self.at
        quote = next((q for q in _QUOTES if self.text.startswith(q, begin)), None)
        if quote is None:
            return None
        start = end = begin + len(quote)
        plain = quote in _QUOTES[-2:]
        while not self.text.startswith(quote, end):
            if end >= len(self.text):
                raise ValueError("a text without an end")
            end += 2 if self.text[end] == "\\" and not plain else 1
        is_raw, self.at = begin > self.at, end + len(quote)
        found = self.text[start:end]
        if plain or is_raw or "\\" not in found:
            return found
        found = _ESCAPE.sub(_escaped, found)
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, escape[0])
