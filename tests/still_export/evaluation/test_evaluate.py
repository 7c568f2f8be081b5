"""Evaluation: numbers that can be computed by hand, variants that switch off what they say, files that are written."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from still_export.errors import ConfigError, DataError
from still_export.evaluation import chat as chats
from still_export.evaluation import code, questions
from still_export.evaluation.chat import chat_ends, greedy
from still_export.evaluation.evaluate import (
    DEFAULT_HAYSTACK,
    VARIANTS,
    EvaluationOptions,
    answered,
    bits_per_byte,
    by_depth,
    load_any,
    measure,
    measurements,
    without,
    write_evaluation,
)
from still_export.evaluation.positions import perplexity_by_position, ranges
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.mixers.layers import Deployment
from still_export.models import attach_untrained
from still_export.texts import forms
from tests.still_export.tiny import CHUNK, plain_model, random_ids, still_model
from tests.still_export.training import byte_tokenizer, chat_tokenizer, make_base, make_text
from tools.write_chats import prompts


def wide_model() -> Any:
    """A STILL model with the byte tokenizer's vocabulary."""
    return attach_untrained(plain_model("llama", torch.float32, vocab_size=257), StillConfig(chunk_size=CHUNK))


class Uniform(nn.Module):
    """Knows nothing: every token has the same logit."""

    class config:
        vocab_size = 257

    device = torch.device("cpu")

    def forward(self, ids: Tensor, **_: Any) -> Any:
        class Output:
            logits = torch.zeros(*ids.shape, 256)

        return Output


def test_bits_per_byte_of_ignorance() -> None:
    """256 equal choices are 8 bits a byte, whatever the context and the text."""
    for context in (16, 100):
        assert bits_per_byte(Uniform(), byte_tokenizer(), DEFAULT_HAYSTACK, context, 1000) == pytest.approx(
            8.0, rel=1e-6
        )
    with pytest.raises(ConfigError, match="fewer than a context"):
        bits_per_byte(Uniform(), byte_tokenizer(), "short", 100, 1000)


def test_perplexity_by_position() -> None:
    assert ranges(100) == [(0, 100)] and ranges(5000) == [(0, 1024), (1024, 2048), (2048, 4096), (4096, 5000)]
    found = perplexity_by_position(Uniform(), byte_tokenizer(), DEFAULT_HAYSTACK, 5000, 10_000)
    assert found == pytest.approx({"0-1024": 256, "1024-2048": 256, "2048-4096": 256, "4096-5000": 256})
    model = attach_untrained(
        plain_model("llama", torch.float32, vocab_size=257),
        StillConfig(chunk_size=CHUNK, deployment=Deployment(capacity_tokens=1200)),
    )
    text = DEFAULT_HAYSTACK[:1200]
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    found = perplexity_by_position(model, byte_tokenizer(), text, 1200, 1200)
    expected = {"0-1024": losses[:1023].mean().exp().item(), "1024-1200": losses[1023:].mean().exp().item()}
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="more text"):
        perplexity_by_position(model, byte_tokenizer(), text, 2000, 2000)


def test_bits_per_byte_is_the_cross_entropy() -> None:
    model = wide_model()
    text = DEFAULT_HAYSTACK[:200]
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    nats = nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert bits_per_byte(model, byte_tokenizer(), text, 200, 200) == pytest.approx(nats / math.log(2), rel=1e-5)


def test_answered_needs_every_token_right() -> None:
    ids = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    said = [(7, 8), (7, 9), (9, 8)]

    class Fixed(nn.Module):
        device = torch.device("cpu")

        def forward(self, ids: Tensor, logits_to_keep: int, **_: Any) -> Any:
            assert logits_to_keep == 3
            logits = torch.zeros(3, 3, 10)
            for row, tokens in enumerate(said):
                for column, token in enumerate(tokens):
                    logits[row, column, token] = 1
            return type("Output", (), {"logits": logits})

    assert answered(Fixed(), None, ids, [2, 2, 2]) == 1
    assert answered(Fixed(), None, ids, [2, 2, 1]) == 2  # the last row's first token is no part of its answer


def test_variants_switch_off_what_they_say() -> None:
    model = still_model("llama", torch.float64)
    ids = random_ids(1, 8 * CHUNK)
    logits = {}
    with torch.no_grad():
        for variant in VARIANTS:
            with without(model, variant):
                logits[variant] = model(ids, use_cache=False).logits
                cached = model(ids, use_cache=True).logits
            torch.testing.assert_close(cached, logits[variant], rtol=0, atol=1e-9)
        again = model(ids, use_cache=False).logits
    torch.testing.assert_close(again, logits["still"], rtol=0, atol=0)
    for variant in VARIANTS[1:]:
        assert (logits[variant] - logits["still"])[:, : 2 * CHUNK].abs().max() < 1e-9
        assert (logits[variant] - logits["still"])[:, 2 * CHUNK :].abs().max() > 1e-4


def test_window_only_forgets() -> None:
    """Far tokens change nothing: three layers see at most three times two chunks back."""
    model = still_model("llama", torch.float64)
    ids = random_ids(1, 10 * CHUNK)
    other = ids.clone()
    other[:, :CHUNK] = 60 - other[:, :CHUNK]
    with torch.no_grad(), without(model, "window_only"):
        difference = (model(ids, use_cache=False).logits - model(other, use_cache=False).logits)[:, -CHUNK:]
    assert difference.abs().max() < 1e-6
    with torch.no_grad():
        difference = (model(ids, use_cache=False).logits - model(other, use_cache=False).logits)[:, -CHUNK:]
    assert difference.abs().max() > 1e-4


def test_without_its_linear_part_far_tokens_are_the_salient_ones() -> None:
    """Every token salient: the linear part holds none, so it gives nothing."""
    model = still_model("llama", torch.float64)
    few = still_model("llama", torch.float64)
    for module in model.modules():
        if isinstance(module, StillAttention):
            module.still = replace(module.still, salient_per_chunk=CHUNK)
    ids = random_ids(1, 6 * CHUNK)
    for changed, each in ((False, model), (True, few)):
        with torch.no_grad():
            whole = each(ids, use_cache=False).logits
            with without(each, "no_linear_part"):
                difference = (each(ids, use_cache=False).logits - whole).abs().max()
        assert (difference > 1e-4) == changed


@pytest.mark.slow
def test_teacher_and_still_get_the_same_questions(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    text = make_text(tmp_path / "text.txt", 500)
    options = EvaluationOptions(
        texts=(str(text),), context_lengths=(64,), text_tokens=256, lengths=(600,), depths=2, samples=1
    )
    models = load_any(str(base), None, "auto")
    assert set(models) == {"teacher"}
    still = wide_model()
    done: list[str] = []
    result = measure({**models, "still": still}, byte_tokenizer(), options, advance=done.append)
    assert len(done) == measurements(["teacher", "still"], options) == (1 + len(VARIANTS)) * 4
    assert list(result.bits_per_byte) == ["teacher", *VARIANTS] and "@ 64" in next(iter(result.bits_per_byte["still"]))
    write_evaluation(result, options, tmp_path / "out", "the command")
    saved = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert saved["command"] == "the command" and saved["bits_per_byte"]["teacher"] == result.bits_per_byte["teacher"]
    assert result.table() in (tmp_path / "out" / "evaluation.md").read_text()


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needle"):
        EvaluationOptions(tasks=("needel",))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0\1")
    with pytest.raises(DataError, match="zero bytes"):
        measure({"teacher": Uniform()}, byte_tokenizer(), EvaluationOptions(texts=(str(binary),)))
    with pytest.raises(ConfigError, match="does not fit"):
        measure({"teacher": Uniform()}, byte_tokenizer(), EvaluationOptions(lengths=(40,)))


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_greedy_is_the_most_likely_continuation_of_every_row() -> None:
    """Rows of different lengths, with a cache: what the model says without one, up to the end's token."""
    model, tokenizer = wide_model(), chat_tokenizer(TEMPLATE)
    prompts = [list(range(40, 40 + n)) for n in (5, 3 * CHUNK + 1)]
    replies = greedy(model, tokenizer, prompts, 6)
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt + reply])
        with torch.no_grad():
            likely = model(ids, use_cache=False).logits[0].argmax(-1)
        assert reply == likely[len(prompt) - 1 : -1].tolist()
        assert len(reply) == 6 or int(likely[-1]) == tokenizer.eos_token_id


def test_a_teacher_that_generates_is_the_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    ids = random_ids(1, 4 * CHUNK)
    with torch.no_grad():
        fast, writing = (
            load_any(str(base), None, "float32", generates=g)["teacher"](ids).logits for g in (False, True)
        )
    torch.testing.assert_close(writing, fast, rtol=0, atol=1e-4)


def test_unseen_forms_are_answered_in_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = chat_tokenizer(TEMPLATE), wide_model()
    options = EvaluationOptions(tasks=("unseen",), lengths=(700,), depths=3, samples=2)
    seen: list[str] = []

    def knows(model: Any, tokenizer: Any, prompts: Any, tokens: int) -> list[list[int]]:
        """Answers with the whole text, except for the first prompt of a call."""
        assert {len(p) for p in prompts} == {700}
        seen.extend(tokenizer.decode(p) for p in prompts)
        texts = ["", *(text.split("\n\n")[0] for text in seen[-len(prompts) + 1 :])]
        return [tokenizer(text)["input_ids"] for text in texts]

    monkeypatch.setattr(chats, "greedy", knows)
    text = {"text": DEFAULT_HAYSTACK}
    first = by_depth(model, tokenizer, "unseen", 700, options, text)
    assert first == [0.5, 1.0, 1.0] and all(t.endswith("<assistant>") and t.startswith("<user>") for t in seen)
    prompts = list(seen)
    assert by_depth(model, tokenizer, "unseen", 700, options, text) == first and seen == 2 * prompts
    with pytest.raises(ConfigError, match="no chat template"):
        by_depth(model, byte_tokenizer(), "unseen", 700, options, text)


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
    shared = {w for words in questions.WORDS.values() for w in words.split() if f" {w} " in source.replace('"', " ")}
    assert not shared, shared
    assert not [a for a in questions.AROUND if repr(a)[1:-1] in source]
    asked = set(questions.CHAT)
    assert len(asked) == 50 and not asked & set(prompts(3000, 0))
    rng = np.random.default_rng(0)
    for _ in range(50):
        fact, question, answer = questions.unseen_fact(rng)
        assert fact.count(answer) == 1 and answer not in question and "{" not in fact + question


def test_replies_and_repetition_are_judged_by_words() -> None:
    assert questions.holds("It is pier 17.", "17") and questions.holds("the BARREL, I think", "barrel")
    assert not questions.holds("pier 170 or 317", "17") and not questions.holds("barrels", "barrel")
    assert questions.repeated([1, 2, 3, 4, 5]) == 0 and questions.repeated([1, 2, 3]) == 0
    assert questions.repeated([1, 2, 1, 2, 1, 2, 1]) == pytest.approx(0.5)


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
    given: dict[str, Any] = {"context_lengths": (), "tasks": (), "chat": 5, "chat_lengths": (0, 500)}
    options = EvaluationOptions(texts=(str(text),), **given)
    result = measure({"teacher": Uniform()}, tokenizer, options)
    assert result.chat["teacher"] == {
        **{"tokens": 7, "ended": 1, "repeated": 0.75},
        **{"tokens @ 500": 7, "ended @ 500": 1, "repeated @ 500": 0.75},
    }
    assert measurements(["teacher"], options) == 2 and "| chat repeated @ 500 |" in result.table()
    short, long = asked[:5], [tokenizer.decode(prompt) for prompt in asked[5:]]
    assert max(map(len, short)) < 100 and len(set(long)) == 5
    assert all(470 < len(prompt) <= 540 for prompt in asked[5:])
    assert all(" of the text\nline " in prompt and "the text above" in prompt for prompt in long)
    with pytest.raises(ConfigError, match=r"has 4090 tokens, fewer than --chat-lengths 5000"):
        measure(
            {"teacher": Uniform()},
            tokenizer,
            EvaluationOptions(**{**given, "texts": (str(text),), "chat_lengths": (5000,)}),
        )
    for wrong in ({"texts": ()}, {"chat": 0}, {"chat_lengths": (64,)}, {"chat_lengths": (-1,)}):
        with pytest.raises(ConfigError, match="--chat-lengths"):
            EvaluationOptions(**{**given, "texts": (str(text),), **wrong})
