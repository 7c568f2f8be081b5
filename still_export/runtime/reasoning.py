"""Separates an answer's reasoning from its content as it is generated.

Exports copy this file into packages.
"""

from __future__ import annotations


class Reasoning:
    """Splits an answer in pieces at the marks around its reasoning; marks and white space next to them are dropped.

    Args:
        marks: Marks before and after reasoning (see `ChatFormat.thoughts`); None: there is no reasoning.
        opened: The prompt ends with the first mark.
    """

    def __init__(self, marks: tuple[str, str] | None, opened: bool) -> None:
        self._marks, self.opened = marks or ("", ""), opened
        self._state = "begin" if marks else "content"
        self._pending = ""  # possibly part of a mark, or white space before one

    def push(self, piece: str) -> tuple[str, str]:
        """(reasoning, content) that are certain with this piece."""
        self._pending += piece
        before, behind = self._marks
        thought = ""
        if self._state == "begin":
            text = self._pending.lstrip()
            if len(text) < len(before) and before.startswith(text):
                return "", ""
            self._state = "blank" if self.opened or text.startswith(before) else "content"
            if self._state == "blank":
                self._pending = text.removeprefix(before)
        if self._state == "blank" and (text := self._pending.lstrip()):
            self._state, self._pending = "thought", text
        if self._state == "thought":
            thought, found, rest = self._pending.partition(behind)
            if found:
                thought, self._state, self._pending = thought.rstrip(), "rest", rest
            else:
                part = max((n for n in range(1, len(behind)) if thought.endswith(behind[:n])), default=0)
                sure = thought[: len(thought) - part].rstrip()
                thought, self._pending = sure, thought[len(sure) :]
        if self._state == "rest" and (text := self._pending.lstrip()):
            self._state, self._pending = "content", text
        if self._state != "content":
            return thought, ""
        content, self._pending = self._pending, ""
        return thought, content

    def end(self) -> tuple[str, str]:
        """(reasoning, content) that `push` has not returned yet."""
        pending, self._pending = self._pending, ""
        if self._state in ("thought", "blank"):
            return pending.rstrip(), ""
        return "", pending if self._state == "begin" else ""
