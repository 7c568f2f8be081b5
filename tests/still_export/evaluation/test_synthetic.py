"""RULER's tasks and BABILong's: prompts are whole, a reader of the text alone finds the answers, wrong answers do not count."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from still_export.errors import ConfigError, DataError
from still_export.evaluation import synthetic
from still_export.evaluation.evaluate import DEFAULT_HAYSTACK, EvaluationOptions, by_depth, check_answers, measure
from still_export.evaluation.intervals import interval, share
from still_export.evaluation.synthetic import MAKERS, PLACES, PromptWriter, words_of
from still_export.texts.texts import tokenize
from tests.still_export.evaluation.test_evaluate import TEMPLATE, Uniform, chat_tokenizer
from tests.still_export.training import byte_tokenizer

LENGTH = 6000
TEXT = "".join(f"{DEFAULT_HAYSTACK[:60]} {chr(97 + i % 26) * 3}{chr(97 + i // 26) * 2} " for i in range(500))
"""With 500 words more."""


def numbers(text: str) -> list[str]:
    """The codes of what the question names."""
    body, _, question = text.rpartition("\nWhat ")
    names = re.findall(
        r"the (\w+ \w+)(?=, the| that the text)", question.replace("the code of ", "", 1).replace("all codes of ", "")
    )
    return [code for name in names for code in re.findall(rf"A code of the {name} is (\d+)", body)]


def variables(text: str) -> list[str]:
    """Names that have the value, however far."""
    value = re.search(r"have the value (\d+), directly", text)
    assert value is not None
    known = {value[1]}
    for _ in range(9):
        known |= {name for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text) if source in known}
    return sorted(known - {value[1]})


def frequent(count: int) -> Callable[[str], list[str]]:
    return lambda text: [w for w, _ in Counter(re.findall(r"\w+", text.rpartition("\n")[0])).most_common(count)]


def place(text: str) -> list[str]:
    """Plays the story and answers its question."""
    at: dict[str, str] = {}
    held: dict[str, str] = {}
    past: dict[str, list[str]] = {}
    for who, verb, what in re.findall(r"(\w+) (went to|took|left) the (\w+)", text):
        if verb == "went to":
            at[who] = what
            for thing in (t for t, by in held.items() if by == who):
                past[thing].append(what)
        elif verb == "took":
            held[what] = who
            past.setdefault(what, [at[who]])
            assert past[what][-1] == at[who]
        else:
            assert held.pop(what) == who
    question = text.rpartition("\n")[2]
    if before := re.match(r"Where was the (\w+) before the (\w+)\?", question):
        return [past[before[1]][past[before[1]].index(before[2]) - 1]]
    name = re.match(r"Where is (?:the )?(\w+)\?", question)
    assert name is not None
    return [at[name[1]] if name[1] in at else past[name[1]][-1]]


READERS = {
    **dict.fromkeys(("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery"), numbers),
    "variable_tracking": variables,
    "common_words": frequent(10),
    "frequent_words": frequent(3),
    **dict.fromkeys(("babi_1", "babi_2", "babi_3"), place),
}


class Reader(Uniform):
    """Reads the prompt by itself and says what it finds; `wrong` of its answers with another letter."""

    def __init__(self, tokenizer: Any, task: str, wrong: int = 0) -> None:
        super().__init__()
        self.tokenizer, self.task, self.wrong = tokenizer, task, wrong

    def complete_all(self, asked: list[tuple[list[int], int]]) -> list[str]:
        return [self.complete(prompt, tokens) for prompt, tokens in asked]

    def complete(self, prompt: list[int], tokens: int) -> str:
        assert len(prompt) + tokens <= LENGTH
        text = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        found = READERS[self.task](text.split("<assistant>")[0].split(" In the text", 1)[0].rstrip("\n"))
        return ", ".join([f"{answer}x" if i < self.wrong else answer for i, answer in enumerate(found)])


@pytest.mark.parametrize("task", list(MAKERS))
def test_who_reads_the_text_answers_and_who_errs_does_not(task: str) -> None:
    """In a chat and without one; what is told of the text is enough, in whatever order it stands."""
    options = EvaluationOptions(tasks=(task,), lengths=(LENGTH,), depths=3, samples=2)
    for tokenizer in (byte_tokenizer(), chat_tokenizer(TEMPLATE)):
        found = by_depth(Reader(tokenizer, task), tokenizer, task, LENGTH, options, {"text": TEXT})
        assert found == [1.0] * 3
    answers = {
        "niah_multivalue": 4,
        "niah_multiquery": 4,
        "variable_tracking": 5,
        "common_words": 10,
        "frequent_words": 3,
    }
    wrong = by_depth(Reader(tokenizer, task, wrong=1), tokenizer, task, LENGTH, options, {"text": TEXT})
    assert wrong == pytest.approx([1 - 1 / answers.get(task, 1)] * 3)


def writer(task: str, text: str = TEXT, tokenizer: Any = None) -> PromptWriter:
    tokenizer = tokenizer or byte_tokenizer()
    return PromptWriter(tokenizer, task, [tokenize(text, tokenizer, 257)], words_of([text]))


@pytest.mark.parametrize("task", list(MAKERS))
def test_prompts_are_as_long_as_they_say_and_differ(task: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    rng, again = np.random.default_rng(1), np.random.default_rng(1)
    first, second = (writer(task, tokenizer=tokenizer).prompt(LENGTH, 0.5, 0, rng) for _ in range(2))
    assert (
        first.ids.tolist()
        == writer(task, tokenizer=tokenizer).prompt(LENGTH, 0.5, 0, again).ids.tolist()
        != second.ids.tolist()
    )
    room = LENGTH - first.item.tokens
    assert len(first.ids) == room or (first.item.words and 0.9 * room < len(first.ids) <= room)
    if task in ("niah_single", "niah_multikey"):
        text = tokenizer.decode(first.ids.tolist())
        assert abs(text.index(first.item.answers[0]) / len(text) - 0.5) < 0.1


def test_a_prompt_that_is_not_whole_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of damage is named, and one that no draw mends ends in a sentence."""
    rng = np.random.default_rng(0)
    item = MAKERS["niah_single"](rng, 0.5, [])
    whole = f"some text{item.facts[0][1]} more text{item.question}{item.lead}"
    assert item.fault(synthetic._plain(whole)) == ""
    assert "is not in it as a whole" in item.fault(whole.replace(item.answers[0], item.answers[0][:-1]))
    assert "is not in it as a whole" in item.fault(synthetic._plain(whole.replace(item.question, "")))
    assert "its text has" in item.fault(synthetic._plain(f"{item.answers[0]} {whole}"))
    words = MAKERS["frequent_words"](rng, 0.5, [])
    listed = " ".join(w for w, times in zip(words.answers, (3, 3, 2), strict=True) for _ in range(times))
    assert words.fault(synthetic._plain(f"{listed} other{words.question}")) == ""
    assert "most frequent words are" in words.fault(synthetic._plain(f"{listed} other other{words.question}"))
    monkeypatch.setitem(MAKERS, "niah_single", lambda *_: replace(item, answers=("text",)))
    with pytest.raises(
        ConfigError, match=r"none of 8 prompts of niah_single at 900 tokens is valid: its text has 'text'"
    ):
        writer("niah_single", " text" * 900).prompt(900, 0.5, 0, rng)


def test_needles_have_their_answer_once() -> None:
    tokenizer = byte_tokenizer()

    def prompt(text: str) -> tuple[np.ndarray, int]:
        return np.array(tokenizer(text)["input_ids"]), 7

    check_answers(tokenizer, [prompt("it is 123456. what is it? It is 123456")])
    for text in ("it is 12345. It is 123456", "it is 123456, 123456. It is 123456", "it is 123456 or so and abcdef"):
        with pytest.raises(DataError, match="does not have its answer"):
            check_answers(tokenizer, [prompt(text)])


def test_replies_are_scored_by_what_they_say() -> None:
    story = synthetic.Item("", ("office",), choices=tuple(PLACES))
    assert story.score("Office, and later the garden") == 1 and story.score("garden or office") == 0 == story.score("")
    many = synthetic.Item("", ("1234567", "7654321"))
    assert many.score("They are 7654321 and 1234567.") == 1 and many.score("1234567, 1234568") == 0.5
    assert many.score("12345678") == 0


def test_too_little_text_or_length_is_said() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"different words do not fill \d+ tokens\. Give more --text"):
        writer("common_words", DEFAULT_HAYSTACK).prompt(LENGTH, 0.5, 0, rng)
    with pytest.raises(ConfigError, match=r"its common words need more than \d+ tokens\. Use greater --lengths"):
        writer("common_words").prompt(1000, 0.5, 0, rng)
    with pytest.raises(ConfigError, match="does not fit"):
        writer("variable_tracking").prompt(100, 0.5, 0, rng)
    with pytest.raises(ConfigError, match=r"'niah_singel' is unknown; .* Did you mean 'niah_single'"):
        EvaluationOptions(tasks=("niah_singel",))


def test_shares_have_intervals() -> None:
    """Wilson's, beside values of the textbook."""
    assert interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert interval(0, 10) == pytest.approx((0, 0.2775), abs=1e-3) and interval(1, 10) == pytest.approx(
        (0.7225, 1), abs=1e-3
    )
    assert share(0.8, 10) == "80% (49 to 94)"
    options = EvaluationOptions(tasks=("babi_1",), lengths=(LENGTH,), depths=2, samples=5)
    result = measure({"reader": Reader(byte_tokenizer(), "babi_1")}, byte_tokenizer(), options)
    assert result.prompts == 10 and "| 100% (72 to 100) |" in result.table()
