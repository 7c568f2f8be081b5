"""Questions that are asked in a chat: unseen facts, code, how answers end."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from still_export.errors import ConfigError
from still_export.evaluation.evaluate import DEFAULT_HAYSTACK, EvaluationOptions, by_depth
from still_export.evaluation.synthetic import MAKERS, contains
from still_export.texts import forms, replies
from tests.still_export.evaluation.test_evaluate import TEMPLATE, Uniform, wide_model
from tests.still_export.training import byte_tokenizer, chat_tokenizer
from tools.questions import __main__ as questions_asked
from tools.questions import chats, code, facts
from tools.questions.chats import chat_ends
from tools.write_chats import prompts


def test_unseen_forms_are_answered_in_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = chat_tokenizer(TEMPLATE), wide_model()
    options = EvaluationOptions(tasks=(), depths=3, samples=2)
    monkeypatch.setitem(MAKERS, "unseen", facts.unseen)
    seen: list[str] = []

    def knows(model: Any, tokenizer: Any, prompts: Any, tokens: int) -> list[list[int]]:
        """Answers with the whole text, except for the first prompt of a call."""
        assert {len(p) for p in prompts} == {700 - 40}
        seen.extend(tokenizer.decode(p) for p in prompts)
        texts = ["", *(text.split("\n\n")[0] for text in seen[-len(prompts) + 1 :])]
        return [tokenizer(text)["input_ids"] for text in texts]

    monkeypatch.setattr(replies, "greedy", knows)
    text = {"text": DEFAULT_HAYSTACK}
    first = by_depth(model, tokenizer, "unseen", 700, options, text)
    assert first == [0.5, 1.0, 1.0] and all(t.endswith("<assistant>") and t.startswith("<user>") for t in seen)
    prompts = list(seen)
    assert by_depth(model, tokenizer, "unseen", 700, options, text) == first and seen == 2 * prompts
    with pytest.raises(ConfigError, match="no chat template"):
        chats.template(byte_tokenizer())


def test_questions_about_code_have_the_answers_of_the_source() -> None:
    source = f"""
LIMIT = 37
def first(a, b=12, *, mode="slow", flag=True): ...
def twice(x=5): ...
class Inner(Outer.Base):
    retries = 4
    def twice(self, x=6): ...
    async def other(self, path="/tmp"): ...
class Plain(Exception): ...
{"# more" * 30}
"""
    found = {(q.name, q.answer) for q in code.questions(source)}
    # Not asked for: a flag that is True, a name that two functions have, a class that derives from Exception.
    assert found == {
        ("LIMIT", "37"), ("first", "12"), ("first", '"slow"'), ("Inner", "Outer.Base"), ("retries", "4"), ("other", '"/tmp"'),
    }  # fmt: skip
    assert code.questions("def broken(:") == []
    text = "\n\n".join(f"# a/{name}.py\n{source.replace('37', str(n))}" for n, name in enumerate("xyz", 37))
    assert code.files(text)[2] == source.replace("37", "39").strip()
    tokenizer, chat = byte_tokenizer(), {"start": "<u>", "user_to_assistant": "</u><a>"}
    prompts = code.code_prompts(tokenizer, chat, text, 800, 2, 3, np.random.default_rng(0))
    assert [len(rows) for rows in prompts] == [3, 3]
    for ids, count in (row for rows in prompts for row in rows):
        written = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        assert 400 <= len(ids) <= 800 and written[:-count].endswith("`")
        reply = written.rsplit("</u><a>", 1)[1]
        name, answer = re.findall(r"`([^`]+)", reply)[0], written[-count:]
        assert (name, answer) in found | {
            ("LIMIT", "38"),
            ("LIMIT", "39"),
            ("b", "12"),
            ("mode", '"slow"'),
            ("path", '"/tmp"'),
        }
    with pytest.raises(ConfigError, match="too few files"):
        code.code_prompts(tokenizer, chat, text, 800, 2, 30, np.random.default_rng(0))


def test_unseen_forms_are_unseen() -> None:
    """No name, place or thing of theirs, and nothing that stands around them, is in the training rows' forms."""
    spoken = " ".join(
        [*forms.DATA["names"].values(), *(text for relation in forms.DATA["relations"] for text in relation)]
    )
    source = f"{Path(forms.__file__).read_text(encoding='utf-8')} {spoken} "
    shared = {w for words in facts.WORDS.values() for w in words.split() if f" {w} " in source.replace('"', " ")}
    assert not shared, shared
    assert not [a for a in facts.AROUND if repr(a)[1:-1] in source]
    asked = set(facts.CHAT)
    assert len(asked) == 50 and not asked & set(prompts(3000, 0))
    rng = np.random.default_rng(0)
    for _ in range(50):
        fact, question, answer = facts.unseen_fact(rng)
        assert fact.count(answer) == 1 and answer not in question and "{" not in fact + question


def test_replies_and_repetition_are_judged_by_words() -> None:
    assert contains("It is pier 17.", "17") and contains("the BARREL, I think", "barrel")
    assert not contains("pier 170 or 317", "17") and not contains("barrels", "barrel")
    assert facts.repeated([1, 2, 3, 4, 5]) == 0 and facts.repeated([1, 2, 3]) == 0
    assert facts.repeated([1, 2, 1, 2, 1, 2, 1]) == pytest.approx(0.5)


def test_chat_ends_are_counted() -> None:
    class Scripted:
        """Says 65, 65, ... and ends after as many tokens as its row's number."""

        device = torch.device("cpu")

        def generate(self, ids: Tensor, attention_mask: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
            new = torch.full((len(ids), max_new_tokens), 65)
            new[0, 10:] = 256
            return torch.cat([ids, new], dim=1)

    result = chat_ends(Scripted(), chat_tokenizer(TEMPLATE), ["one", "another"], 1 << 13)
    assert result["tokens"] == (10 + 200) / 2 and result["ended"] == 0.5
    assert result["repeated"] == pytest.approx((6 / 7 + 196 / 197) / 2)
    assert chat_ends(Scripted(), chat_tokenizer(TEMPLATE), ["one", "another"], 1)["ended"] == 1, "one prompt at once"


def test_a_chat_behind_a_text_asks_about_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of the text\n" for n in range(200)))
    tokenizer, asked = chat_tokenizer(TEMPLATE), []

    def says(model: Any, tokenizer: Any, prompts: Any, tokens: int) -> list[list[int]]:
        asked.extend(prompts)
        return [[1] * 7 for _ in prompts]

    monkeypatch.setattr(chats, "greedy", says)
    monkeypatch.setattr(questions_asked, "load_any", lambda *_, **__: {"teacher": Uniform()})
    monkeypatch.setattr(questions_asked, "load_tokenizer", lambda _: tokenizer)
    given, out = ["MODEL", "--text", str(text), "--tasks", "", "--chat", "5", "--chat-lengths"], tmp_path / "out.json"
    assert questions_asked.main([*given, "0,500", "-o", str(out)]) == 0
    ends = {"tokens": 7, "ended": 1, "repeated": 0.75}
    assert json.loads(out.read_text())["teacher"]["chat"] == {"0": ends, "500": ends}
    short, long = asked[:5], [tokenizer.decode(prompt) for prompt in asked[5:]]
    assert max(map(len, short)) < 100 and len(set(long)) == 5
    assert all(470 < len(prompt) <= 540 for prompt in asked[5:])
    assert all(" of the text\nline " in prompt and "the text above" in prompt for prompt in long)
    with pytest.raises(ConfigError, match=r"has 4090 tokens, fewer than --chat-lengths 5000"):
        questions_asked.main([*given, "5000"])
