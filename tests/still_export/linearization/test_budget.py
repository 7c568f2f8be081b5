"""Budgets: how they are read, what trials choose, and that a run ends within its budget or says that it does not."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from still_export.errors import ConfigError
from still_export.linearization import harms, trainer
from still_export.linearization import plan as module
from still_export.linearization.budget import RANGES, Budget
from still_export.linearization.harms import Harms
from still_export.linearization.linearize import linearize
from still_export.linearization.measure import Measured, Yardstick
from still_export.linearization.plan import BudgetPlan, Planner
from still_export.linearization.recipe import Recipe
from still_export.mixers.layers import FULL
from still_export.models.load import load_model, load_tokenizer
from still_export.texts.forms import NaturalWriter
from still_export.texts.texts import python_documentation
from tests.still_export.tiny import STORIES, needs_stories
from tests.still_export.training import byte_tokenizer, small_recipe

LOSS = st.integers(0, 100_000).map(lambda n: n / 100)
SHARE = st.integers(100, 10_000).map(lambda n: n / 100)
MINUTES = st.integers(1, 100_000)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {}, optional={"loss": LOSS, "state": SHARE, "found": SHARE, "everyday": SHARE, "time": MINUTES}
    ),
    st.randoms(),
)
def test_what_is_written_is_read(values: dict[str, float], random: Any) -> None:
    entries = [f"{key} {value:g}{'' if key == 'time' else '%'}" for key, value in values.items()]
    random.shuffle(entries)
    if not entries:
        return
    budget = Budget.read(random.choice([",", ", ", " , "]).join(entries))
    for key in RANGES:
        expected = values.get(key)
        scale = 1 if key == "time" else 100
        assert getattr(budget, key) == (getattr(Budget(), key) if expected is None else pytest.approx(expected / scale))
    again = Budget.read(str(budget))
    assert all(getattr(again, key) == pytest.approx(getattr(budget, key)) for key in RANGES)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20))
def test_other_text_is_refused_in_a_sentence(text: str) -> None:
    try:
        Budget.read(text)
    except ConfigError as error:
        assert str(error).startswith("--budget ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lose 2%", "'lose' is unknown; known: loss, state, found, everyday, time. Did you mean 'loss'"),
        ("loss -2%", "loss -2% is outside 0 to 1000"),
        ("state 0%", "state 0% is outside 1 to 100"),
        ("found 101%", "found 101% is outside 0 to 100"),
        ("time 0", "time 0 is outside 1 to"),
        ("loss 2", "loss is a percentage, with its sign"),
        ("time 15%", "time is minutes, without a sign"),
        ("loss 2%, loss 3%", "names loss twice"),
        ("loss 2%,", "'' is not a key with a number"),
        ("loss two%", "'loss two%' is not a key with a number"),
        ("", "'' is not a key with a number"),
    ],
)
def test_bad_budgets(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Budget.read(text)


class Stop(BaseException):
    """Ends a run as a kill would."""


def stop(stage: str, step: int, *_: Any) -> None:
    if step == 2:
        raise Stop


def budgeted(base: Path, text: Path, budget: str, **changes: Any) -> Recipe:
    values = {"transfer_steps": 0, "batch_size": 1, "loss": "kl", "retrieval": 0.5, "natural": 1.0, "held_out": 0.2}
    values |= {"salient_per_chunk": 4, "feature_map": "none"}
    return small_recipe(base, text, **{**values, "budget": budget, **changes})


@pytest.fixture
def three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training, whatever the machine's speed."""
    monkeypatch.setattr(Planner, "_steps", lambda self, plan, seconds: 3)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trained model loses it can be given back; a random one may gain."""
    told = AutoModelForCausalLM.from_pretrained(STORIES)
    words = load_tokenizer(STORIES)
    torch.manual_seed(0)
    ids = told.generate(torch.full((24, 1), 1), max_new_tokens=200, do_sample=True)
    path = tmp_path_factory.mktemp("stories") / "text.txt"
    path.write_text("\n".join(words.batch_decode(ids, skip_special_tokens=True)), encoding="utf-8")
    return path


@needs_stories
def test_layers_are_kept_until_the_budget_is_met(
    stories: Path, tmp_path: Path, three_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, text = STORIES, stories
    monkeypatch.setattr(module, "LEFT", 0.0)  # what trials expect is too good
    said: list[str] = []
    result = linearize(budgeted(base, text, "loss 0%, found 0%"), tmp_path / "model", log=said.append)
    assert result.plan is not None and result.promises["loss"] == "met" and result.plan["loss"] == 0
    layers = len(result.plan["softmax_layers"])
    assert layers == 5 and result.plan["state"] == 1
    assert any(line.startswith("that exceeds the budget (loss 0%, ") for line in said)
    assert len([line for line in said if line.startswith("reached with")]) > 1
    assert load_model(tmp_path / "model").config.still.layer_types == (FULL,) * 5

    easy = linearize(budgeted(base, text, "loss 1000%, found 0%"), tmp_path / "easy", log=said.append)
    assert easy.plan is not None and easy.promises["loss"] == "met" and easy.plan["state"] < 0.5
    kept = len(easy.plan["softmax_layers"])
    assert load_model(tmp_path / "easy").config.still.layer_types.count(FULL) == kept
    saved = json.loads((tmp_path / "easy" / "linearize.json").read_text())
    assert saved["plan"]["reached"]["bits"].keys() == {"512"} and saved["recipe"]["layer_types"].count(FULL) == kept


@needs_stories
def test_what_is_not_reached_is_said(stories: Path, tmp_path: Path, three_steps: None) -> None:
    """A state that leaves no room for more softmax layers."""
    recipe = budgeted(STORIES, stories, "loss 0%")
    result = linearize(replace(recipe, budget="loss 0%, state 90%"), tmp_path / "model")
    assert result.plan is not None and result.promises["loss"] == "NOT met" and result.plan["loss"] > 0
    assert result.plan["said"].startswith("bits per byte +") and result.said[0].startswith("NOT met: loss")
    assert result.promises["state"] == "met"
    assert result.plan["state"] <= 0.9
    with pytest.raises(
        ConfigError, match=r"a state of 1% is impossible; with no softmax layer .* it is \d\d% of the base"
    ):
        linearize(replace(recipe, budget="state 1%"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_stopped_run_goes_on_by_its_plan(
    base: Path, text: Path, tmp_path: Path, three_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = budgeted(base, text, "loss 1000%", checkpoint_every=1, sequence_length=256)
    whole = linearize(recipe, tmp_path / "whole")

    with pytest.raises(Stop):
        linearize(recipe, tmp_path / "model", progress=stop)

    def again(self: Planner) -> BudgetPlan:
        raise AssertionError("the plan stands in the folder")

    monkeypatch.setattr(Planner, "_plan", again)
    resumed = linearize(recipe, tmp_path / "model", resume=True)
    assert resumed.stages[0].losses == whole.stages[0].losses
    assert resumed.plan is not None and whole.plan is not None
    untimed = {"minutes": 0, "said": "", "processor_seconds": 0, "load": 0}
    assert {**resumed.plan, **untimed} == {**whole.plan, **untimed}


def test_training_ends_with_its_time(base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take longer than the measured one are fewer, and the model is written."""
    monkeypatch.setattr(module, "step_seconds", lambda *_: 60 / 1000)
    times = iter(range(3))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return 1e9 if next(times, None) is None else 0.0

    monkeypatch.setattr(trainer, "time", Clock)
    monkeypatch.setattr(Clock, "perf_counter", staticmethod(time.perf_counter), raising=False)
    recipe = budgeted(base, text, "loss 1000%, time 1", sequence_length=256, finetune_steps=100, validate_every=1000)
    said: list[str] = []
    result = linearize(recipe, tmp_path / "model", log=said.append)
    assert result.plan is not None and result.plan["promises"]["loss"] == "met"
    assert any(line.startswith("cost: 100 steps") for line in said)
    assert result.stages[0].steps == len(result.stages[0].losses) == 4 and result.stages[0].done
    assert load_model(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "linearize.json").read_text())["recipe"]
    assert written["finetune_rate"] == pytest.approx(recipe.finetune_rate * (40 / 100) ** 0.3)  # of more steps than 40
    monkeypatch.setattr(module, "step_seconds", lambda *_: 61.0)  # of one minute nothing is left
    late = linearize(recipe, tmp_path / "late", log=said.append)
    assert not late.stages and late.plan is not None and load_model(tmp_path / "late")
    assert any(line.startswith("no time is left to train: a step takes 61.0 s") for line in said)


def test_what_was_measured_is_kept_for_another_call(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MOST", module.FEWEST)
    recipe = budgeted(base, text, "loss 1000%", sequence_length=256, finetune_steps=0)
    first = linearize(recipe, tmp_path / "first")
    monkeypatch.setattr(module, "harms_of", lambda *_: pytest.fail("measured again"))
    second = linearize(replace(recipe, budget="loss 500%, state 90%"), tmp_path / "second")
    assert first.plan is not None and second.plan is not None
    (kept,) = (tmp_path / "cache" / "linearize").iterdir()
    kept.write_text("{}")  # what cannot be read is measured
    with pytest.raises(pytest.fail.Exception):
        linearize(recipe, tmp_path / "third")


@pytest.mark.parametrize(("a_token", "longest", "rows"), [(1e-3, 256, 2), (4.0, 64, 1)])
def test_harms_end_with_their_share_of_the_time(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_token: float, longest: int, rows: int
) -> None:
    """A slow machine reads shorter rows, and ends after one round; its measurement is kept as that of the rounds asked for."""
    monkeypatch.setenv("STILL_CACHE", str(tmp_path / "cache"))
    clock, read, real = [0.0], [], harms.damages

    def damages(model: Any, attentions: Any, ids: torch.Tensor, levels: Any, answer: int = 0) -> torch.Tensor:
        clock[0] += a_token * ids.shape[1]
        read.append((ids.shape[1], answer))
        return real(model, attentions, ids, levels, answer)

    monkeypatch.setattr(harms, "damages", damages)
    monkeypatch.setattr(harms, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(harms, "SHORT", 64)
    monkeypatch.setattr(harms, "TOKENS", 256)
    monkeypatch.setattr(module, "MOST", module.FEWEST)
    result = linearize(budgeted(base, text, "loss 1000%", sequence_length=256, finetune_steps=0), tmp_path / "model")
    assert result.plan is not None
    assert max(length for length, _ in read) == longest
    assert [length for length, answer in read if not answer][2:] == [
        longest
    ] * rows  # behind two that measure the speed


def test_every_promise_is_met_or_not_or_not_measured() -> None:
    budget, base = Budget(loss=0.02, state=0.4, found=0.85, time=5), Measured({1024: 1.0}, 8, 9)
    good = Measured({1024: 1.01}, 7, 9)
    for reached, state, minutes, wanted in (
        (good, 0.4, 5.0, ["met", "met", "met", "met"]),
        (Measured({1024: 1.03}, 7, 9), 0.5, 11.0, ["NOT met", "NOT met", "met", "NOT met"]),
        (Measured({1024: 1.01}, 6, 9), 0.4, 5.0, ["met", "met", "NOT met", "met"]),
        (Measured({1024: 1.01}), 0.4, 5.0, ["met", "met", "NOT MEASURED", "met"]),
    ):
        assert list(module.limits_met(budget, base, reached, state, minutes).values()) == wanted
    assert module.limits_met(budget, Measured({1024: 1.0}, 0, 9), good, 0.4, 5.0)["found"] == "NOT MEASURED"
    assert module.limits_met(replace(budget, found=0.0), base, Measured({1024: 1.0}), 0.4, 5.0)["found"] == "met"


def test_a_stopped_step_leaves_a_checkpoint(base: Path, text: Path, tmp_path: Path, three_steps: None) -> None:
    """Between two that are written anyway."""
    recipe = budgeted(base, text, "loss 1000%", checkpoint_every=100, sequence_length=256)
    raised: list[int] = []

    def stop(stage: str, step: int, *_: Any) -> None:
        if step == 2 and not raised:
            raised.append(step)
            raise trainer.StopTraining

    with pytest.raises(trainer.StopTraining):
        linearize(recipe, tmp_path / "model", progress=stop)
    seen: list[int] = []
    result = linearize(recipe, tmp_path / "model", resume=True, progress=lambda stage, step, *_: seen.append(step))
    assert seen == [3] and result.stages[0].steps == 3


def test_a_budget_chooses_alone(base: Path, text: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--layer-types beside --budget 'loss 2%': a budget"):
        budgeted(base, text, "loss 2%", layer_types=("full_attention",) * 3)
    with pytest.raises(ConfigError, match=r"^--salient-per-chunk beside"):
        budgeted(base, text, "loss 2%", salient_per_chunk=8)
    with pytest.raises(ConfigError, match=r"^--mixer beside"):
        Recipe(budget="loss 2%", mixer="gdn")
    with pytest.raises(ConfigError, match="'lost' is unknown"):
        Recipe(budget="lost 2%")


def test_a_slow_machine_measures_by_less(
    base: Path, text: Path, tmp_path: Path, three_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left out is said, and a run that goes on measures by the same."""
    recipe, said = budgeted(base, text, "loss 1000%", checkpoint_every=1, sequence_length=256), []
    monkeypatch.setattr(module, "MEASURING", 1e-9)

    with pytest.raises(Stop):
        linearize(recipe, tmp_path / "model", progress=stop, log=said.append)
    (line,) = [line for line in said if "are measured: text" in line]
    assert line.endswith("so 256 are measured: text to 256 tokens, 0 questions")
    monkeypatch.setattr(module, "MEASURING", 1.0)
    result = linearize(recipe, tmp_path / "model", resume=True)
    assert result.plan is not None and result.plan["base"]["asked"] == result.plan["reached"]["asked"] == 0
    assert "; no question was asked; " in result.plan["said"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.lists(st.integers(1, 40), max_size=9), st.integers(0, 300)
)
def test_a_yardstick_keeps_its_shortest_parts(rows: list[int], prompts: list[int], tokens: int) -> None:
    stick = Yardstick.__new__(Yardstick)
    stick.rows = [torch.zeros(1, size, dtype=torch.int64) for size in rows]
    stick.prompts = [(torch.zeros(1, size, dtype=torch.int64), 1) for size in prompts]
    whole = stick.tokens
    stick.keep(tokens)
    kept, asked = [row.shape[1] for row in stick.rows], [ids.shape[1] for ids, _ in stick.prompts]
    assert kept == sorted(rows)[: len(kept)] and kept and asked == sorted(prompts)[: len(asked)]
    assert stick.tokens <= max(tokens, min(rows)) and stick.contexts == sorted(set(kept))
    again = [list(kept), list(asked)]
    stick.keep(tokens)
    assert [[row.shape[1] for row in stick.rows], [ids.shape[1] for ids, _ in stick.prompts]] == again
    if tokens >= 2 * whole:
        assert stick.tokens == whole


HARMS = Harms(
    8, [1, 2, 4], {1: [0.8, 0.4, 0.2], 4: [0.4, 0.3, 0.1], 6: [0.1, 0.1, 0.1]}, dict.fromkeys((1, 4, 6), [0.0] * 3)
)


def test_state_is_spent_where_it_avoids_harm() -> None:
    prices = {salient: float(salient) for salient in HARMS.choices}
    assert HARMS.choices == [1, 2, 3, 4, 8]
    assert HARMS.spend(0, prices) == {1: 1, 4: 1, 6: 1}  # the least, even where it does not fit
    assert HARMS.spend(4, prices) == {1: 2, 4: 1, 6: 1}
    assert HARMS.spend(24, prices) == dict.fromkeys((1, 4, 6), 8)
    spent = 0.0
    for state in range(3, 25):
        chosen = HARMS.spend(state, prices)
        assert sum(chosen.values()) <= state and HARMS.of(6, chosen[6]) <= 0.11
        harm = sum(HARMS.of(layer, salient) for layer, salient in chosen.items())
        assert not spent or harm <= spent
        spent = harm
    free = dict.fromkeys(HARMS.choices, 1.0)
    assert HARMS.spend(3, free) == dict.fromkeys(
        (1, 4, 6), 8
    )  # a window may be larger than the cache of a small context


def test_harms_are_read_as_written() -> None:
    assert Harms.read(json.loads(json.dumps(HARMS.to_dict()))) == HARMS
    assert HARMS.of(1, 8) == 0 and HARMS.of(1, 1) == pytest.approx(0.8)
    assert 0.2 < HARMS.of(1, 3) < 0.4


@pytest.mark.parametrize(
    "chat", [None, {"start": "<u>", "user_to_assistant": "</u><a>", "assistant_to_user": "</a><u>"}]
)
def test_questions_have_their_answer_once_before(chat: dict[str, str] | None) -> None:
    tokenizer = byte_tokenizer()
    writer = NaturalWriter(tokenizer, np.asarray(tokenizer(python_documentation()[:5000])["input_ids"]), chat)
    for seed in range(30):
        ids, count = writer.prompt(1200, seed / 30, np.random.default_rng(seed))
        words = tokenizer.decode(ids.tolist())
        answer = tokenizer.decode(ids[-count:].tolist())
        assert len(ids) == 1200 and words.endswith(f" is{answer}") and answer.startswith(" ")
        assert answer.strip() in words[: -len(answer)]
