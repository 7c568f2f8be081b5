"""Texts that end an answer, found while it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from still_export.runtime.sampling import RunError

MOST_STOP_CHARACTERS = 1000
"""Longest stop text. Texts that end an answer have a few words."""


class StopTexts:
    """A text in pieces up to the first of `stops`; a possible beginning of one is held back.

    Raises:
        RunError: One is empty, or has more than MOST_STOP_CHARACTERS.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RunError("a stop text is empty, so every answer would be. Give at least one character.")
        if (longest := max(map(len, stops), default=0)) > MOST_STOP_CHARACTERS:
            raise RunError(
                f"a stop text has {longest:,} characters; at most {MOST_STOP_CHARACTERS:,} are allowed. Shorten it."
            )
        self.stops = tuple(stops)
        self.found = False
        self._pending = ""
        self._borders = [_borders(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)  # for each stop, the length of its prefix that the text so far ends with

    def push(self, piece: str) -> str:
        """Text that is certain with this piece; nothing after a stop was `found`."""
        pending, ends = self._pending + piece, list[int]()
        for number, stop in enumerate(self.stops):
            matched = self._matched[number]
            for place, character in enumerate(piece, len(self._pending) + 1):
                matched = _extended(stop, self._borders[number], matched, character)
                if matched == len(stop):
                    ends.append(place - matched)
                    break
            self._matched[number] = matched
        if ends:
            self.found, self._pending = True, ""
            return pending[: min(ends)]
        keep = max(self._matched, default=0)
        self._pending = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def end(self) -> str:
        """Text that `push` has not returned yet."""
        return self._pending


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_extended(stop, borders, borders[-1], character))
    return borders


def _extended(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    """Length of the prefix of `stop` that a text ends with after one more character (Knuth, Morris, Pratt): constant time on average."""
    while matched and stop[matched] != character:
        matched = borders[matched - 1]
    return matched + (stop[matched] == character)


def until(pieces: Iterable[str], stops: StopTexts) -> Iterator[str]:
    """Pieces of a text up to a stop."""
    for piece in pieces:
        if certain := stops.push(piece):
            yield certain
        if stops.found:
            return
    if rest := stops.end():
        yield rest
