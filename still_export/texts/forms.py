"""Retrieval rows in natural forms: facts about people and things in prose, code, tables, JSON or dialogue, with questions in text or chat.

For training. The task "unseen" of `still_export.evaluate` uses other relations, words and places.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.errors import ConfigError
from still_export.texts.tasks import ANSWER, DATA, Weighing, hide, piece, places, room_for_filler, stretch

OPEN, CLOSE = "\x02", "\x03"
"""Marks around a value in a text. A preceding space belongs to the value, because tokenizers merge it."""
MOST_FACTS, MOST_TURNS = 24, 12

_NAMES = [names.split() for names in DATA["names"].values()]
PEOPLE, SURNAMES, TOWNS, COMPANIES, PROJECTS, GOODS, ROOMS, *_OTHERS = _NAMES
COLOURS, JOBS, INSTRUMENTS, ANIMALS, DRINKS, WORDS, MONTHS = _OTHERS

SUBJECTS: dict[str, Callable[[np.random.Generator], str]] = {
    "person": lambda rng: pick(PEOPLE, rng) if rng.random() < 0.5 else f"{pick(PEOPLE, rng)} {pick(SURNAMES, rng)}",
    "company": lambda rng: pick(COMPANIES, rng),
    "project": lambda rng: f"project {pick(PROJECTS, rng)}",
    "thing": lambda rng: f"the {pick(COLOURS, rng)} {pick(GOODS, rng)}",
    "room": lambda rng: f"the {pick(ROOMS, rng)} in {pick(TOWNS, rng)}",
    "town": lambda rng: pick(TOWNS, rng),
}
VALUES: dict[str, Callable[[np.random.Generator], str]] = {
    "short number": lambda rng: str(rng.integers(2, 100)),
    "number": lambda rng: str(rng.integers(100, 10 ** int(rng.integers(3, 8)))),
    "code": lambda rng: f"{pick(list('ABCDEFGHKMNPRSTVWXYZ'), rng)}{rng.integers(1, 100)}-{rng.integers(100, 1000)}",
    "year": lambda rng: str(rng.integers(1700, 2030)),
    "time": lambda rng: f"{rng.integers(0, 24)}:{rng.integers(0, 60):02d}",
    "date": lambda rng: f"{pick(MONTHS, rng)} {rng.integers(1, 29)}",
    "version": lambda rng: f"{rng.integers(0, 20)}.{rng.integers(0, 30)}.{rng.integers(0, 10)}",
    "word": lambda rng: pick(WORDS, rng),
    "two words": lambda rng: f"{pick(COLOURS, rng)} {pick(WORDS, rng)}",
    "person": lambda rng: f"{pick(PEOPLE, rng)} {pick(SURNAMES, rng)}",
    "town": lambda rng: pick(TOWNS, rng),
    "colour": lambda rng: pick(COLOURS, rng),
    "job": lambda rng: pick(JOBS, rng),
    "instrument": lambda rng: pick(INSTRUMENTS, rng),
    "animal": lambda rng: pick(ANIMALS, rng),
    "drink": lambda rng: pick(DRINKS, rng),
}


@dataclass(frozen=True)
class Relation:
    """A relation of a subject: its `noun`, and its own sentence and question where English has them."""

    noun: str
    subject: str
    value: str
    sentence: str = ""
    question: str = ""


RELATIONS = tuple(Relation(*relation) for relation in DATA["relations"])


@dataclass(frozen=True)
class Fact:
    """A value with its subject and relation, and sentences and questions about it. Sentences have the value between OPEN and CLOSE."""

    relation: Relation
    subject: str
    value: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]

    @property
    def noun(self) -> str:
        return self.relation.noun

    @property
    def key(self) -> str:
        return f"{self.noun} of {self.subject}"

    @property
    def name(self) -> str:
        """The key as an identifier in code."""
        return re.sub(r"\W+", "_", f"{self.subject.removeprefix('the ')} {self.noun}".lower())


def draw_fact(rng: np.random.Generator, relation: Relation | None = None) -> Fact:
    relation = relation or RELATIONS[int(rng.integers(len(RELATIONS)))]
    subject, value = SUBJECTS[relation.subject](rng), VALUES[relation.value](rng)
    marked = f"{OPEN}{value}{CLOSE}"
    sentences = [f"The {relation.noun} of {subject} is {marked}."]
    questions = [f"What is the {relation.noun} of {subject}?"]
    if relation.sentence:
        sentences.append(capital(relation.sentence.format(s=subject, v=marked)) + ".")
        questions.append(relation.question.format(s=subject))
    return Fact(relation, subject, value, tuple(sentences), tuple(questions))


def as_prose(fact: Fact, rng: np.random.Generator) -> str:
    """A sentence within the text, or a paragraph."""
    around = pick((" {}", "\n\n{}\n\n", "\n{}\n", " By the way: {}", "\n\nNote: {}\n\n", "\n> {}\n", " ({})"), rng)
    return around.format(pick(fact.sentences, rng))


def as_code(fact: Fact, rng: np.random.Generator) -> str:
    """A comment, a constant, an assertion, or a line of a log or of settings."""
    marked = f"{OPEN}{fact.value}{CLOSE}"
    if rng.random() < 0.4:
        around = pick(
            ("\n# {}\n", "\n    # {}\n", "\n// {}\n", '\n    """{}"""\n', "\n/* {} */\n", "\n    # TODO: {}\n"), rng
        )
        return around.format(pick(fact.sentences, rng))
    form = pick(
        (
            '\n{n} = "{v}"\n',
            '\n{N} = "{v}"\n',
            '\n    self.{n} = "{v}"\n',
            '\n        "{k}": "{v}",\n',
            "\n2024-03-0{d} 11:{d}7:03 INFO {k} set to {v}\n",
            "\n{n}: {v}\n",
            "\n{k} = {v}\n",
        ),
        rng,
    )
    return form.format(n=fact.name, N=fact.name.upper(), k=fact.key, v=marked, d=rng.integers(1, 6))


def as_table(fact: Fact, rng: np.random.Generator) -> str:
    """A table, a list or a JSON object with values of the same kind; one is the fact's."""
    others = [draw_fact(rng, fact.relation) for _ in range(int(rng.integers(1, 5)))]
    rows = [(o.subject, o.value) for o in others if o.subject != fact.subject]
    rows.insert(int(rng.integers(len(rows) + 1)), (fact.subject, f"{OPEN}{fact.value}{CLOSE}"))
    kind = int(rng.integers(4))
    if kind == 0:
        lines = [f"| name | {fact.noun} |", "|---|---|", *(f"| {s} | {v} |" for s, v in rows)]
    elif kind == 1:
        lines = [f"{fact.noun}:", *(f"- {s}: {v}" for s, v in rows)]
    elif kind == 2:
        lines = ["[", *(f'  {{"name": "{s}", "{fact.noun}": "{v}"}},' for s, v in rows), "]"]
    else:
        lines = [f"name,{fact.noun}", *(f"{s},{v}" for s, v in rows)]
    return "\n\n" + "\n".join(lines) + "\n\n"


def as_dialogue(fact: Fact, rng: np.random.Generator) -> str:
    """A dialogue with a question about the fact, or with the fact itself."""
    one, other = pick(PEOPLE, rng), pick(PEOPLE, rng)
    statement, question = pick(fact.sentences, rng), pick(fact.questions, rng)
    form = pick(
        (
            "\n\n{one}: {question}\n{other}: {statement}\n{one}: Thank you.\n\n",
            '\n\n"{statement}" said {one}.\n\n',
            "\n\n{one}: Do not forget: {statement}\n{other}: I will not.\n\n",
            "\n\nFrom: {one}\nTo: {other}\n\nHello {other},\n{statement}\nRegards, {one}\n\n",
        ),
        rng,
    )
    return form.format(one=one, other=other, statement=statement, question=question)


WAYS = (as_prose, as_prose, as_code, as_code, as_table, as_dialogue)


class NaturalWriter:
    """Writes training rows with facts in natural forms. Each piece is tokenized separately.

    Args:
        text: Token ids of ordinary text for the filler, [N].
        chat: Pieces of the chat template (see `turn_pieces`); None: no row is a chat.
    """

    def __init__(self, tokenizer: Any, text: np.ndarray, chat: dict[str, str] | None) -> None:
        self._tokenizer, self._text, self._chat = tokenizer, text, chat
        self._start = tokenizer("")["input_ids"]

    def training_row(self, length: int, rng: np.random.Generator, weighing: Weighing) -> tuple[np.ndarray, np.ndarray]:
        """A row with as many questioned facts as fit: ids int64 [length] and loss weights float32 [length].

        Raises:
            ConfigError: No fact fits.
        """
        count = int(rng.integers(1, max(2, min(length // 256, MOST_FACTS)) + 1))
        facts = list({fact.key: fact for fact in (draw_fact(rng) for _ in range(count))}.values())
        write = self._as_chat if self._chat is not None and rng.random() < 0.6 else self._as_text
        while True:
            try:
                ids, marks = write(facts, length, rng)
                return ids.astype(np.int64), weighing.weights(marks)
            except ConfigError:  # texts of facts differ much in length
                if len(facts) == 1:
                    raise
                facts = facts[: len(facts) // 2]

    def prompt(self, length: int, depth: float, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """A text with one fact, and a question about it with its answer at the end. Returns (ids int64 [length], number of the last tokens
        that are the value).

        Args:
            depth: Place of the fact, 0 = beginning, 1 = right before the question.

        Raises:
            ConfigError: It does not fit.
        """
        fact, chat = draw_fact(rng), self._chat
        start = self._start if chat is None else self._tokenizer(chat["start"], add_special_tokens=False)["input_ids"]
        turn = "\n" if chat is None else chat["user_to_assistant"]
        lead = capital(f"the {fact.key} is {OPEN}{fact.value}{CLOSE}")
        end = self._encode(f"\n\nWhat is the {fact.key}?{turn}{lead}", ANSWER)
        hidden = [(depth, self._encode(pick(WAYS, rng)(fact, rng), 1))]
        row = self._composed(hidden, piece((start, 1)), end, length, rng)
        return row[0].astype(np.int64), int((end[1] == ANSWER).sum())

    def _as_text(self, facts: list[Fact], length: int, rng: np.random.Generator) -> np.ndarray:
        """Facts in a text, each with a question at a later place."""
        pieces = []
        for fact in facts:
            query, statement = pick(fact.questions, rng), pick(fact.sentences, rng)
            form = pick(
                (
                    "\n\n{query} {statement}\n\n",
                    "\n\nQuestion: {query}\nAnswer: {v}\n\n",
                    " Remember: {statement}",
                    "\nQ: {query}\nA: {v}.\n",
                ),
                rng,
            )
            question = form.format(query=query, statement=statement, v=f"{OPEN}{fact.value}{CLOSE}")
            place, later = places(length, rng, near=True)
            pieces.append((place, self._encode(pick(WAYS, rng)(fact, rng), 0)))
            pieces.append((later, self._encode(question, ANSWER)))
        return self._composed(pieces, piece((self._start, 1)), piece(), length, rng)

    def _as_chat(self, facts: list[Fact], length: int, rng: np.random.Generator) -> np.ndarray:
        """The user sends a text with a question; further questions follow the first answer."""
        assert self._chat is not None
        queried = [facts[i] for i in rng.permutation(len(facts))[: int(rng.integers(1, MOST_TURNS + 1))]]
        pieces = []
        for fact in facts:
            distance = rng.random() if rng.random() < 0.5 else length ** (rng.random() - 1)
            pieces.append((1 - float(distance), self._encode(pick(WAYS, rng)(fact, rng), 0)))
        first_question = pick(queried[0].questions, rng)
        before = rng.random() < 0.2  # the question precedes the text
        opening = pick(("", "", "Read this.\n\n", "Text:\n", "```\n", "Here is a document.\n\n"), rng)
        start = self._chat["start"] + (f"{first_question}\n\n" if before else "") + opening
        closing = "\n```" if opening == "```\n" else ""
        end = "" if before else "\n\n" + pick(("", "", "Question: ", "According to the text: "), rng) + first_question
        turns = closing + end
        for number, fact in enumerate(queried):
            answer = pick((*fact.sentences, f"{OPEN}{fact.value}{CLOSE}.", f"{OPEN}{fact.value}{CLOSE}"), rng)
            turns += self._chat["user_to_assistant"] + answer + self._chat["assistant_to_user"]
            if number + 1 < len(queried):
                turns += pick(queried[number + 1].questions, rng)
        turns = turns.removesuffix(self._chat["assistant_to_user"]) + end_of_turn(self._chat)
        return self._composed(pieces, self._encode(start, 0), self._encode(turns, ANSWER), length, rng)

    def _composed(
        self,
        pieces: list[tuple[float, np.ndarray]],
        start: np.ndarray,
        end: np.ndarray,
        length: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        room = room_for_filler(length, [start, *(p for _, p in pieces), end], [])
        return hide(start, stretch(self._text, room, rng), pieces, end)

    def _encode(self, text: str, value_weight: float) -> np.ndarray:
        """Ids and weights of a text: 1, or `value_weight` for marked values."""
        parts = []
        for index, part in enumerate(re.split(rf"( ?{OPEN}[^{CLOSE}]*{CLOSE})", text)):
            if part:
                plain = part.replace(OPEN, "").replace(CLOSE, "")
                ids = self._tokenizer(plain, add_special_tokens=False)["input_ids"]
                parts.append((ids, value_weight if index % 2 else 1))
        return piece(*parts)


def end_of_turn(chat: dict[str, str]) -> str:
    """The template's text between an answer and the next turn, such as "<|im_end|>"."""
    both = (chat["assistant_to_user"], chat["user_to_assistant"])
    shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    return both[0][:shared].split("\n")[0]


def pick(options: Any, rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
