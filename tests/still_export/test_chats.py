"""Conversations of other tools' forms: read as what they are, or refused with the line; never trained as marks without words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from still_export.errors import DataError
from still_export.texts.texts import read_chats
from tests.still_export.training import chat_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
ASK, SAY = "When is the ferry?", "At nine."
TALK = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]
SHARED = [{"from": "human", "value": ASK}, {"from": "gpt", "value": SAY}]
WHOLE = f"<user>{ASK}</s>\n<assistant>{SAY}</s>\n"


def read(row: Any, folder: Path, template: str = TURNS) -> str:
    path = folder / "chat.jsonl"
    path.write_text(json.dumps(TALK) + "\n\n" + json.dumps(row) + "\n", encoding="utf-8")
    tokenizer = chat_tokenizer(template)
    rows = read_chats(path, tokenizer, 257)
    assert len(rows) == 2  # an empty line is none
    return str(tokenizer.decode(rows[1]))


@pytest.mark.parametrize(
    "row",
    [
        TALK,
        {"messages": TALK, "id": 3},
        SHARED,
        {"conversations": SHARED},
        {"prompt": ASK, "completion": SAY},
        {"prompt": TALK[:1], "completion": TALK[1:]},
        [{"role": "user", "content": [{"type": "text", "text": ASK}]}, TALK[1]],
        [{"from": "Human", "value": ASK}, {"from": "model", "value": SAY}],
    ],
)
def test_forms_of_one_talk_are_the_same(row: Any, tmp_path: Path) -> None:
    assert read(row, tmp_path) == WHOLE


def test_a_system_prompt_beside_the_list_is_kept(tmp_path: Path) -> None:
    assert read({"system": "Be brief.", "conversations": SHARED}, tmp_path) == f"<system>Be brief.</s>\n{WHOLE}"


@pytest.mark.parametrize(
    "row",
    [
        [],
        {},
        ASK,
        7,
        {"text": ASK},
        {"messages": ASK},
        [ASK, SAY],
        [{"role": "user", "content": None}, TALK[1]],
        [TALK[0], {"role": "assistant", "content": None}],
        [TALK[0], {"role": "assistant", "content": "  "}],
        [TALK[0], {"role": "assistant", "text": SAY}],
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}, TALK[1]],
    ],
)
def test_other_forms_are_refused_by_line(row: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3"):
        read(row, tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}></s>{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content[:4] }}{% endfor %}",
    ],
)
def test_a_template_that_leaves_words_out_is_an_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1"):
        read(TALK, tmp_path, template)


def test_reasoning_may_be_left_out(tmp_path: Path) -> None:
    thought = [TALK[0], {"role": "assistant", "content": f"<think>It is summer.</think>{SAY}"}]
    assert (
        read(thought, tmp_path, "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}")
        == f"{ASK}\n{SAY}\n"
    )
