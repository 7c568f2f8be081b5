"""Rows of training: what their answers weigh, facts in natural forms, chat, several lengths in one stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from still_export.errors import ConfigError, DataError
from still_export.linearization.linearize import linearize
from still_export.linearization.objectives import FinetuneObjective, watched_positions
from still_export.linearization.recipe import Recipe
from still_export.texts.forms import RELATIONS, WAYS, NaturalWriter, draw_fact, end_of_turn
from still_export.texts.tasks import ANSWER, FEW_ANSWERS, TASKS, TaskWriter, Weighing, places
from still_export.texts.texts import Batches, Corpus, read_chats, read_corpus
from still_export.texts.turns import turn_pieces
from tests.still_export.training import byte_tokenizer, chat_tokenizer, make_base, make_text, small_recipe

TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus([make_text(tmp_path_factory.mktemp("text") / "text.txt")], byte_tokenizer(), 257, 0.1)


def answers_of(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> list[str]:
    """The runs of tokens that weigh more than 1."""
    found, run = [], []
    for token, weight in zip([*ids, 0], [*weights, 0], strict=True):
        if weight > 1:
            run.append(int(token))
        elif run:
            found.append(tokenizer.decode(run).strip())
            run = []
    return found


def test_an_answer_weighs_the_same_whatever_its_tokens_and_its_row() -> None:
    for length in (100, 1000):
        marks = np.ones(length)
        marks[:3] = 0
        for start, size in ((10, 2), (20, 5), (30, 1), (40, 3), (50, 4)):
            marks[start : start + size] = ANSWER
        weights = Weighing(share=0.4).weights(marks)
        assert weights.dtype == np.float32 and set(weights[:3]) == {0}
        each = [weights[s : s + n].sum() for s, n in ((10, 2), (20, 5), (30, 1), (40, 3), (50, 4))]
        assert each == pytest.approx([0.4 * length / 5] * 5)
        single = np.where(np.arange(length) == 7, ANSWER, 1)
        assert Weighing(share=0.4).weights(single)[7] == pytest.approx(0.4 * length / FEW_ANSWERS)
        assert set(Weighing(7.0).weights(marks)) == {0, 1, 7}
    assert Weighing(share=1e-6).weights(marks).max() > 1  # what is 1 or less is taken for text


@pytest.mark.parametrize("template", [True, False], ids=["chat", "text alone"])
def test_natural_rows_ask_for_what_they_hold(template: bool, corpus: Corpus) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    chat = turn_pieces(tokenizer)
    assert chat is not None and end_of_turn(chat) == "</s>"
    writer = NaturalWriter(tokenizer, corpus.train, chat if template else None)
    rng = np.random.default_rng(1)
    chats = 0
    for _ in range(60):
        ids, weights = writer.training_row(6000, rng, Weighing(share=0.2))
        assert ids.shape == weights.shape == (6000,) and ids.dtype == np.int64
        text, answers = tokenizer.decode(ids), answers_of(ids, weights, tokenizer)
        assert answers and all(text.count(answer) >= 2 for answer in answers)
        hidden = tokenizer.decode(ids[weights == 0])
        assert all(answer in hidden for answer in answers)
        assert text.index(answers[0]) < len(text) - 20
        if text.startswith("<user>"):
            chats += 1
            assert text.endswith("</s>") and text.count("<assistant>") == len(answers)
    assert (20 < chats < 50) if template else chats == 0
    with pytest.raises(ConfigError, match="does not fit"):
        writer.training_row(30, rng, Weighing())


def test_facts_are_said_in_every_way_with_their_value_marked() -> None:
    rng = np.random.default_rng(0)
    for relation in RELATIONS:
        for way in WAYS:
            fact = draw_fact(rng, relation)
            text = way(fact, rng)
            assert text.count("\x02") == text.count("\x03") == 1 and f"\x02{fact.value}\x03" in text
            assert all(fact.value not in question or relation.value == relation.subject for question in fact.questions)


def test_questions_stand_at_every_distance() -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([places(8192, rng, near=True) for _ in range(4000)])
    distance = drawn[:, 1] - drawn[:, 0]
    assert (distance >= 0).all() and drawn.max() <= 1
    assert np.mean(distance < 0.01) > 0.1 and np.mean(distance > 0.5) > 0.2
    drawn = np.array([places(8192, rng, near=False) for _ in range(4000)])
    assert np.mean(drawn[:, 1] - drawn[:, 0] < 0.01) < 0.08


def test_lengths_take_turns_and_rows_fill_the_batch(corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    path = tmp_path / "chat.jsonl"
    talk = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well."}]
    path.write_text(json.dumps(talk) + "\n" + json.dumps(talk[:1]) + "\n", encoding="utf-8")
    chats = read_chats(path, tokenizer, 257)
    assert tokenizer.decode(chats[0]) == "<user>How are you?</s>\n<assistant>Well.</s>\n"
    batches = Batches(
        corpus, TaskWriter(tokenizer, corpus.train), 2, 800, 3, 0.0, Weighing(), chats=chats, chat_share=0.4,
        lengths=(400, 800, 1600),
    )  # fmt: skip
    made = [batches.batch(step) for step in range(30)]
    assert all(b.ids.numel() == b.weights.numel() == 1600 and b.ids.shape[1] in (400, 800, 1600) for b in made)
    for turn in range(10):
        assert {b.ids.shape[1] for b in made[3 * turn : 3 * turn + 3]} == {400, 800, 1600}
    often = Batches(corpus, TaskWriter(tokenizer, corpus.train), 2, 800, 3, 0.0, Weighing(), lengths=(400, 800, 800))
    long = [row for step in range(9) for row in often.batch(step).ids.tolist() if len(row) == 800]
    assert len(long) == 12 and len(set(map(tuple, long))) == min(12, often.blocks(800))  # no block twice in an epoch
    texts = [tokenizer.decode(row) for b in made for row in b.ids]
    assert 0.25 < sum("<user>How" in t for t in texts) / len(texts) < 0.55
    assert torch.equal(batches.batch(7).ids, made[7].ids)
    for content, message in (("no json", "line 1"), ("", "empty"), (json.dumps(talk) + "\n[]", "line 2")):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            read_chats(path, tokenizer, 257)
    path.write_text("[]")
    with pytest.raises(DataError, match="no chat template"):
        read_chats(path, byte_tokenizer(), 257)


def test_rows_with_few_answers_are_watched_as_much() -> None:
    ids, weights = torch.zeros(3, 200, dtype=torch.int64), torch.ones(3, 200)
    weights[1, [20, 21, 90]] = 5
    weights[2, 50:150] = 5
    watched = watched_positions(ids, weights, per_answer=True)
    assert watched.shape == (3, 32) and len(watched[0].unique()) == 32
    assert set(watched[1].tolist()) == {19, 20, 89} and watched[1].bincount().max() == 11
    assert len(watched[2].unique()) == 32 and 49 <= int(watched[2].min()) and int(watched[2].max()) < 149
    assert set(watched_positions(ids, weights)[1].tolist()) > {19, 20, 89}


class Fixed(nn.Module):
    """Says the same logits always; they are its parameters, and its head changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(0)))
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = nn.Parameter(torch.eye(5), requires_grad=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": self.head(self.logits)})


def test_answers_are_learned_from_themselves() -> None:
    """The teacher is the student here, so its divergence is none; what is left is the cross-entropy of the answers."""
    model = Fixed()
    ids = torch.arange(18).reshape(2, 9) % 5
    weights = torch.ones(2, 9)
    weights[0, 3], weights[1, 8], weights[1, 0] = 6.0, 4.0, 9.0  # nothing predicts the first token
    plain, _ = FinetuneObjective(model, [], "kl")(ids, weights)
    loss, parts = FinetuneObjective(model, [], "kl", answer_loss="ce")(ids, weights)
    logs = -model.logits.detach().log_softmax(-1)
    expected = [logs[0, 2, ids[0, 3]], logs[1, 7, ids[1, 8]]]
    assert float(plain.detach()) == pytest.approx(0, abs=1e-6)
    assert float(loss.detach()) == pytest.approx(float(6 * expected[0] + 4 * expected[1]) / 16, rel=1e-5)
    assert parts.tolist() == pytest.approx([float(loss.detach()), float(sum(expected)) / 16], rel=1e-5)
    loss.backward()
    assert model.logits.grad is not None and int((model.logits.grad.abs().sum(-1) > 1e-6).sum()) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_stage_of_several_lengths(tmp_path: Path) -> None:
    """Lengths, natural rows, chat and answers of equal weight in one run that goes on where it was killed."""
    tokenizer = chat_tokenizer(TEMPLATE)
    base, text, chat = (
        make_base(tmp_path / "base", max_position_embeddings=4096),
        make_text(tmp_path / "text.txt", 30_000),
        tmp_path / "chat.jsonl",
    )
    tokenizer.save_pretrained(base)
    chat.write_text(json.dumps([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]))
    recipe = small_recipe(
        base, text, sequence_length=2048, batch_size=2, row_lengths=(1024, 2048), retrieval=0.5, natural=0.5,
        answer_share=0.2, answer_loss="ce", chat_file=str(chat), chat=0.3, loss="kl", selection_weight=1.0,
        transfer_steps=0, finetune_steps=3, checkpoint_every=1,
    )  # fmt: skip
    whole = linearize(recipe, tmp_path / "whole")

    def stop(stage: str, step: int, *_: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        linearize(recipe, tmp_path / "cut", progress=stop)
    again = linearize(recipe, tmp_path / "cut", resume=True)
    assert again.stages[0].losses == whole.stages[0].losses and again.stages[0].tokens == 3 * 4096
    assert len(whole.stages[0].parts) == 3


def test_recipes_of_rows_that_cannot_be() -> None:
    for change, message in (
        ({"row_lengths": (1000,)}, "not whole"),
        ({"retrieval": 0.8, "chat": 0.3, "chat_file": "x"}, "at most 1"),
        ({"chat": 0.1}, "name their file"),
        ({"answer_loss": "kl"}, "unknown"),
        ({"row_lengths": (64, 1024)}, "at most two chunks"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(Recipe(), **change)
    assert TASKS.keys() == {"needle", "passkey", "key_value"}
