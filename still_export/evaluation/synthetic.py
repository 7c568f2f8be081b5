"""Prompts answered in words: RULER's synthetic tasks and BABILong's, over any text, rewritten from their papers (arXiv:2404.06654,
arXiv:2406.10149). Each prompt is checked before it is used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.errors import ConfigError
from still_export.texts.replies import replies
from still_export.texts.tasks import COLOURS, THINGS, hide, piece, room_for_filler, stretch
from still_export.texts.turns import turn_pieces

REPLY_TOKENS = 40
"""Most tokens of a reply by default; tasks with long lists of answers have more."""
MANY = 4
"""Values, keys or distractors of RULER's harder needles."""
HOPS = 4
COMMON, OFTEN, SELDOM = 10, 30, 3
"""Number of common words, their frequency, and the frequency of all others."""
TRIES = 8
PEOPLE = "Daniel Mary John Sandra".split()
PLACES = "kitchen garden office bathroom hallway bedroom".split()
OBJECTS = "football apple milk".split()


def contains(reply: str, answer: str) -> bool:
    """Whether a reply contains the answer as a whole word."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Item:
    """A question, its answers, and the facts hidden in the text.

    Args:
        facts: Depth (0 = far, 1 = at the end) and text of each, in the order in which they appear.
        question: Text after the filler. lead: Beginning of the reply.
        answers: Texts that the reply must contain; each counts.
        choices: The first of these in the reply is its answer.
        words: Replace the filler: (word, frequency); frequencies below 1 are shares of all words.
        chance: The filler may contain an answer by chance.
        tokens: Most tokens of a reply.
    """

    question: str
    answers: tuple[str, ...]
    facts: tuple[tuple[float, str], ...] = ()
    lead: str = ""
    choices: tuple[str, ...] = ()
    words: tuple[tuple[str, float], ...] = ()
    chance: bool = False
    tokens: int = REPLY_TOKENS

    def score(self, reply: str) -> float:
        """Share of answers in the reply, 0 to 1."""
        if self.choices:
            match = re.search(rf"(?<!\w)({'|'.join(self.choices)})(?!\w)", reply, re.IGNORECASE)
            return float(match is not None and match[1].lower() == self.answers[0].lower())
        return sum(contains(reply, answer) for answer in self.answers) / len(self.answers)

    def fault(self, text: str) -> str:
        """The fault of a prompt with this `text`; "": none."""
        at = 0
        for part in (*(fact for _, fact in sorted(self.facts, key=lambda f: f[0])), self.question):
            at = text.find(_plain(part), at)
            if at < 0:
                return f"{_plain(part)!r} is not in it as a whole"
        if self.words:
            body = text[:at]
            counts = Counter(re.findall(r"\w+", body)).most_common(len(self.answers) + 1)
            if {word for word, _ in counts[:-1]} != set(self.answers) or counts[-2][1] <= counts[-1][1]:
                return f"its most frequent words are {', '.join(word for word, _ in counts)}"
        elif not self.chance:
            own_text = _plain(" ".join((*(fact for _, fact in self.facts), self.question, self.lead)))
            for answer in self.answers:
                if len(re.findall(rf"\b{answer}\b", text)) != len(re.findall(rf"\b{answer}\b", own_text)):
                    return f"its text has {answer!r}, too"
        return ""


@dataclass(frozen=True)
class Prompt:
    """Token ids int64 [n] of a prompt, and its item."""

    ids: np.ndarray
    item: Item


Maker = Callable[[np.random.Generator, float, Sequence[str]], Item]
"""Makes an item from a random generator, the depth of the fact, and the distinct words of the text."""


def _needles(keys: int, values: int, count: int) -> Maker:
    """`keys` things with `values` codes each; the question is about the first `count` things."""

    def make(rng: np.random.Generator, depth: float, words: Sequence[str]) -> Item:
        drawn = rng.choice(len(COLOURS) * len(THINGS), keys, replace=False)
        names = [f"{COLOURS[i % len(COLOURS)]} {THINGS[i // len(COLOURS)]}" for i in drawn]
        numbers = rng.choice(9_000_000, (keys, values), replace=False) + 1_000_000
        places = rng.random((keys, values))
        if count * values == 1:
            places[0, 0] = depth
        facts = [
            (float(places[i, j]), f" A code of the {name} is {numbers[i, j]}.")
            for i, name in enumerate(names)
            for j in range(values)
        ]
        things = ", the ".join(names[:count])
        every, verb = ("the code", "is") if count * values == 1 else ("all codes", "are")
        question = f"\nWhat {verb} {every} of the {things} that the text names?"
        lead = f" In the text {every} of the {things} {verb}"
        answers = tuple(str(n) for n in numbers[:count].flat)
        return Item(question, answers, tuple(facts), lead, tokens=16 + 12 * len(answers))

    return make


def _variables(rng: np.random.Generator, depth: float, words: Sequence[str]) -> Item:
    """A chain of assignments; the question is which variables have the first one's value."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(chr(65 + int(n)) for n in rng.integers(0, 26, 5))
        names += [name] * (name not in names)
    value = str(rng.integers(10_000, 100_000))
    assignments = [
        f" VAR {name} = {source}." for name, source in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)
    ]
    facts = tuple(zip(sorted(rng.random(len(assignments)).tolist()), assignments, strict=True))
    question = (
        f"\nSome variables of the text have the value {value}, directly or from another variable. Which are they?"
    )
    lead = f" These {len(names)} variables have the value {value}:"
    return Item(question, tuple(names), facts, lead, tokens=16 + 10 * len(names))


def _common(rng: np.random.Generator, depth: float, words: Sequence[str]) -> Item:
    """A list in which ten words occur ten times as often as all others."""
    order = [words[int(i)] for i in rng.permutation(len(words))]
    listed = [(word, float(OFTEN if i < COMMON else SELDOM)) for i, word in enumerate(order)]
    question = f"\nWhich {COMMON} words are the most frequent of the list above?"
    lead = f" The {COMMON} most frequent words are"
    return Item(question, tuple(order[:COMMON]), (), lead, words=tuple(listed), tokens=16 + 8 * COMMON)


def _frequent(rng: np.random.Generator, depth: float, words: Sequence[str]) -> Item:
    """A text of invented words with frequencies that fall with the square of their rank; the question is the first three."""
    made = ["".join(chr(97 + int(n)) for n in rng.integers(0, 26, 6)) for _ in range(64)]
    shares = [(word, 0.6 / (rank + 1) ** 2) for rank, word in enumerate(made)]
    question = "\nThe text above is in a secret script. Which three words are its most frequent?"
    lead = " The three most frequent words are"
    return Item(question, tuple(made[:3]), (), lead, words=tuple(shares), tokens=16 + 8 * 3)


def _story(supporting: int) -> Maker:
    """bAbI's first three kinds of stories, by number of supporting facts: people move, take and leave things."""

    def make(rng: np.random.Generator, depth: float, words: Sequence[str]) -> Item:
        where: dict[str, list[str]] = {}
        holder: dict[str, str] = {}
        seen: dict[str, list[str]] = {thing: [] for thing in OBJECTS}  # places of a thing, in order

        def pick(options: Sequence[str]) -> str:
            return options[int(rng.integers(len(options)))]

        events: list[str] = []
        questions: list[tuple[str, str, str]] = []
        while len(events) < 6 + 4 * supporting or not questions:
            person = pick(PEOPLE)
            here = where.get(person, [])
            if supporting > 1 and here and rng.random() < 0.5:
                thing = pick(OBJECTS)
                if holder.get(thing) == person:
                    del holder[thing]
                    events.append(f" {person} left the {thing} there.")
                elif thing not in holder and (not seen[thing] or seen[thing][-1] == here[-1]):
                    holder[thing] = person
                    seen[thing] = seen[thing] or [here[-1]]
                    events.append(f" {person} took the {thing} there.")
            else:
                place = pick([p for p in PLACES if p not in here[-1:]])
                where.setdefault(person, []).append(place)
                events.append(f" {person} went to the {place}.")
                for thing in (t for t, by in holder.items() if by == person):
                    seen[thing].append(place)
            if supporting == 1:
                questions = [(f"Where is {w}?", f"{w} is in the", p[-1]) for w, p in where.items()]
            elif supporting == 2:
                questions = [(f"Where is the {t}?", f"The {t} is in the", p[-1]) for t, p in seen.items() if len(p) > 1]
            else:
                questions = [
                    (f"Where was the {t} before the {p[-1]}?", f"Before the {p[-1]} the {t} was in the", p[-2])
                    for t, p in seen.items()
                    if len(p) > 1 and p.count(p[-1]) == 1
                ]
        question, lead, answer = questions[int(rng.integers(len(questions)))]
        facts = tuple(zip(sorted(rng.random(len(events)).tolist()), events, strict=True))
        return Item(
            f"\n{question} Answer with a place.", (answer,), facts, f" {lead}", tuple(PLACES), chance=True, tokens=8
        )

    return make


MAKERS: dict[str, Maker] = {
    "niah_single": _needles(1, 1, 1),
    "niah_multikey": _needles(MANY, 1, 1),
    "niah_multivalue": _needles(1, MANY, 1),
    "niah_multiquery": _needles(MANY, 1, MANY),
    "variable_tracking": _variables,
    "common_words": _common,
    "frequent_words": _frequent,
    "babi_1": _story(1),
    "babi_2": _story(2),
    "babi_3": _story(3),
}
"""Makers by task; bAbI's tasks by number of supporting facts."""


def _plain(text: str) -> str:
    """The text with single spaces: tokenizers differ in spaces between pieces."""
    return " ".join(text.split())


class PromptWriter:
    """Writes prompts of one task, in the chat template if the tokenizer has one.

    Args:
        fillers: Texts as token ids, used in turn.
        words: Distinct words of the texts.
    """

    def __init__(self, tokenizer: Any, task: str, fillers: Sequence[np.ndarray], words: Sequence[str]) -> None:
        self.tokenizer, self.task, self.fillers, self.words = tokenizer, task, fillers, words
        chat = turn_pieces(tokenizer)
        self.end = "" if chat is None else chat["user_to_assistant"]
        self.start = tokenizer("")["input_ids"] if chat is None else self._encode(chat["start"])

    def prompt(self, length: int, depth: float, number: int, rng: np.random.Generator) -> Prompt:
        """Prompt `number` at a depth. Prompt and reply together have `length` tokens, or one word less.

        Raises:
            ConfigError: It does not fit, or every attempt was faulty.
        """
        for _ in range(TRIES):
            item = MAKERS[self.task](rng, depth, self.words)
            lead = item.lead.lstrip() if self.end else item.lead
            start, end = (piece((ids, 1)) for ids in (self.start, self._encode(f"{item.question}{self.end}{lead}")))
            facts = [(place, piece((self._encode(fact), 1))) for place, fact in item.facts]
            most = length - item.tokens
            room = room_for_filler(most, [start, *(fact for _, fact in facts), end], [])
            filler = self._listed(item, room, rng) if item.words else stretch(self._filler(number), room, rng)
            ids = hide(start, filler, facts, end)[0].astype(np.int64)
            text = _plain(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))
            if not (fault := f"it has {len(ids)} tokens" if len(ids) > most else item.fault(text)):
                return Prompt(ids, item)
        raise ConfigError(
            f"none of {TRIES} prompts of {self.task} at {length} tokens is valid: {fault}. Use another --text or --lengths."
        )

    def _filler(self, number: int) -> np.ndarray:
        return self.fillers[number % len(self.fillers)]

    def _listed(self, item: Item, room: int, rng: np.random.Generator) -> np.ndarray:
        """Token ids of the item's words in random order, as many as fit."""
        encoded = self.tokenizer([f" {word}" for word, _ in item.words], add_special_tokens=False)["input_ids"]
        frequencies = np.array([count for _, count in item.words])
        sizes = np.array([len(ids) for ids in encoded])
        if frequencies[0] < 1:  # shares of all
            counts = np.floor(frequencies * room / (frequencies * sizes).sum()).astype(int)
        else:
            counts = np.where((frequencies * sizes).cumsum() <= room, frequencies, 0).astype(int)
            if len(counts) <= COMMON or counts[-1]:
                raise ConfigError(
                    f"{self.task}: {len(counts)} different words do not fill {room} tokens. Give more --text."
                )
            if not counts[COMMON]:
                raise ConfigError(f"{self.task}: its common words need more than {room} tokens. Use greater --lengths.")
        order = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        return np.concatenate([np.asarray(encoded[i], np.int64) for i in order])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def replied(
    model: Any, writer: PromptWriter, length: int, depths: int, samples: int, rng: np.random.Generator, at_once: int
) -> list[float]:
    """Mean score of replies, by depth.

    Args:
        length: Tokens of a prompt with its reply. at_once: Prompts per batch.

    Raises:
        ConfigError: A length is too short.
    """
    places = [depth / max(1, depths - 1) for depth in range(depths)]
    prompts = [writer.prompt(length, place, number, rng) for place in places for number in range(samples)]
    scores: list[float] = []
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        texts = replies(model, writer.tokenizer, [p.ids.tolist() for p in part], part[0].item.tokens)
        scores += [p.item.score(text) for p, text in zip(part, texts, strict=True)]
    found: list[float] = np.array(scores).reshape(depths, samples).mean(1).tolist()
    return found


def words_of(texts: Sequence[str]) -> list[str]:
    """Distinct words of 4 to 10 lower-case letters, sorted."""
    return sorted({word for text in texts for word in re.findall(r"\b[a-z]{4,10}\b", text)})
