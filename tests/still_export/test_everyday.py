"""Everyday questions: the file, how replies are judged, and what is asked of a model."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from still_export.texts.everyday import REPLY_TOKENS, Everyday, Question, asked, compared, questions
from still_export.texts.replies import everyday_replies, fitting
from tests.still_export.training import byte_tokenizer, chat_tokenizer, make_base

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_the_file() -> None:
    found = questions()
    kinds = Counter(q.kind for q in found)
    assert len(found) >= 300 and set(kinds) == {"fact", "sum", "code", "form"} and min(kinds.values()) >= 40
    assert len({q.ask for q in found}) == len(found)
    for part in (60, 120):
        some = Counter(q.kind for q in found[:part])
        assert all(abs(some[kind] - part * count / len(found)) <= 1 for kind, count in kinds.items())
    for question in found:
        assert bool(question.right) != bool(question.whole), question
        re.compile(question.right or question.whole)
        assert not question.judges("") and not question.judges("I do not know that."), question


@pytest.mark.parametrize(
    ("ask", "right", "wrong"),
    [
        ("What is the capital of France?", ["Paris.", "It is paris, of course."], ["Parisian", "Lyon"]),
        ("What is 7 + 5?", ["12", "7 + 5 = 12."], ["112", "13"]),
        ("How many days are in a week?", ["There are seven days.", "7"], ["14 days in a week", "17"]),
        ("Answer with yes or no only: is fire hot?", ["Yes.", "yes"], ["Yes, fire is hot", "no"]),
        ("Write a Python function add(a, b) that returns the sum of a and b.", ["def add(a, b):\n    return a + b"], ["a - b"]),
        ("Write the word HELLO in small letters.", ["hello"], ["HELLO"]),
        ("Which is larger, 17 or 71?", ["71", "71 is larger than 17."], ["17 is a larger number than 71."]),
        ("Is 7 a prime number?", ["Yes, it is."], ["No, 7 is not a prime number."]),
        ("Name the four seasons.", ["Winter, spring,\nsummer and fall"], ["spring, summer, winter"]),
        ('Write a JSON object with the key "name" and the value "Ann".', ['{"name": "Ann"}'], ["name: Ann"]),
    ],
)  # fmt: skip
def test_replies_are_judged(ask: str, right: list[str], wrong: list[str]) -> None:
    (question,) = [q for q in questions() if q.ask == ask]
    assert [question.judges(reply) for reply in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


def test_what_is_kept_counts_the_base_alone() -> None:
    some = [Question("fact", str(i), right="yes") for i in range(5)]
    found = compared(some, ["yes", "yes.", "no", "yes", "no"], ["yes", "yes", "yes", "no", "no"])
    assert found == Everyday(asked=5, base_right=3, kept=2, right=3, same=2) and found.share == pytest.approx(2 / 3)
    assert compared([], [], []).share is None


def test_prompts_are_chats_where_there_is_a_template() -> None:
    plain, chat = byte_tokenizer(), chat_tokenizer(TEMPLATE)
    assert plain.decode(asked("Is it?", plain)) == "Question: Is it?\nAnswer:"
    assert chat.decode(asked("Is it?", chat)) == "<user>Is it?<assistant>"
    sizes = [len(asked(q.ask, chat)) for q in questions()]
    room = sorted(sizes)[len(sizes) // 2] + REPLY_TOKENS
    assert len(fitting(chat, room)) == sum(size + REPLY_TOKENS <= room for size in sizes)


def test_replies_come_in_the_order_of_the_questions(tmp_path: Path) -> None:
    """Whatever the batches; a reply alone is the same."""
    from still_export.mixers.config import StillConfig
    from still_export.mixers.layers import FULL
    from still_export.models.load import load_model

    base = make_base(tmp_path / "base", max_position_embeddings=256)
    tokenizer, full = byte_tokenizer(), StillConfig(layer_types=(FULL,) * 3)
    model = load_model(base, attach_untrained=True, still_config=full, dtype=torch.float32)
    some = fitting(tokenizer, 256)[:5]
    together = everyday_replies(model, tokenizer, some)
    assert together == [everyday_replies(model, tokenizer, [question])[0] for question in some]
    assert len(set(together)) > 1
