"""Choices for a budget: each layer's tokens from its harms, steps from the time, and more state if the result is not enough."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from still_export.errors import ConfigError, PackageError
from still_export.linearization import harms
from still_export.linearization.budget import BROKEN, MET, UNMEASURED, Budget
from still_export.linearization.cost import peak_memory, spoken, step_seconds
from still_export.linearization.harms import FEWEST, MOST, ROUND, Harms, harms_of
from still_export.linearization.measure import Measured, Yardstick, last_hidden
from still_export.linearization.objectives import make_students
from still_export.linearization.recipe import Recipe
from still_export.linearization.run import LinearizationRun
from still_export.mixers.cache import state_table
from still_export.mixers.trainable import SOFTMAX, STUDENT, Trainable
from still_export.package.cache import cache_folder
from still_export.package.staging import write_whole

PLAN_FILE = "plan.json"
STATE, MORE = 0.45, 0.1
"""Size of state to try first, if the budget allows it, and its increase where quality is not met; shares of the base's cache."""
LEFT = 0.8
"""Share of an untrained student's loss that trials expect after a short training. 40 steps of 1,024 tokens left 70% for SmolLM2."""
LEAST_ROW = 512
"""Shortest row with questions: any tokenizer fits a question and its fact. Shorter rows are text only."""
TRIALS = 3
PROBE = 256
"""Tokens used to measure the machine's speed."""
MEASURING = 0.4
"""Largest share of the time for measuring: the base, the trials' text and the result, MEASUREMENTS full measurements in all."""
MEASUREMENTS = 3.4
HARMS = 0.25
"""Largest share of the time for harms, of which one round is measured in any case."""
EVERYDAY, PER_QUESTION = 0.2, 220
"""Largest share of the time for everyday questions; tokens of one for base and model, a generated one counted twice."""
FULL_RATE_STEPS = 40
"""Most steps that are trained at the recipe's rate; longer trainings have a lower rate."""
RATE_FALLS = 0.3
"""Exponent of the rate's decrease with steps: ten times as many have half the rate."""
RESERVED = 1.5
"""Final measurements to reserve time for; some runs keep more tokens and measure again."""


@dataclass(frozen=True)
class BudgetPlan:
    """The result of the trials.

    harms: Of all layers. share: Size of state to spend, as a share of the base's cache. base: Results of the base. tried: Results of the
    untrained student. steps: Of training. tokens: Read by a measurement; 0: all. questions: Everyday questions to ask; None: all.
    """

    harms: Harms
    share: float
    base: Measured
    tried: Measured
    steps: int = 0
    tokens: int = 0
    questions: int | None = None

    @classmethod
    def read(cls, text: str) -> BudgetPlan:
        """Parse the output of `json.dumps(asdict(plan))`."""
        values = json.loads(text)
        for name in ("base", "tried"):
            values[name] = read_measured(values[name])
        return cls(**{**values, "harms": Harms.read(values["harms"])})

    def expected(self) -> float:
        """Largest expected increase of bits per byte, as a share."""
        return max(0.0, (LEFT if self.steps else 1.0) * worst(self.tried, self.base))


def read_measured(values: dict[str, Any]) -> Measured:
    """From JSON, whose keys are texts."""
    return Measured(**{**values, "bits": {int(context): value for context, value in values["bits"].items()}})


class Planner:
    """Chooses a plan for a run with an open folder, and keeps the trained model within the budget.

    Raises:
        ConfigError: No student has so small a state.
    """

    def __init__(self, run: LinearizationRun) -> None:
        self.run, self.budget, self.until = run, Budget.read(run.recipe.budget), math.inf
        self.reading = time.monotonic() - run.started
        self.requested = run.recipe
        self.stick = Yardstick(run.corpus, run.tokenizer, run.context)
        self.chunk = run.still.chunk_size
        self._base_size = self._size(dict.fromkeys(run.replaceable, self.chunk))
        few = Harms(self.chunk, [], {}, {}).choices
        self.prices = {
            k: (self._size(dict.fromkeys(run.replaceable, k)) - self._base_size) / len(run.replaceable) for k in few
        }
        least = 1 + len(run.replaceable) * min(self.prices.values()) / self._base_size
        if least > self.budget.state:
            raise ConfigError(
                f"--budget {self.requested.budget!r}: a state of {self.budget.state:.0%} is impossible; with no softmax layer and "
                f"{few[0]} of {self.chunk} tokens salient it is {least:.0%} of the base's cache at {run.context:,} tokens."
            )
        path = run.work / PLAN_FILE
        if run.accelerator.is_main_process and not path.is_file():
            write_whole(path, json.dumps(asdict(self._plan())))
        run.accelerator.wait_for_everyone()
        self.plan = BudgetPlan.read(path.read_text(encoding="utf-8"))
        run.questions = self.plan.questions
        if self.plan.tokens:
            self.stick.keep(self.plan.tokens)
        chosen = self.spend(self.plan, self.plan.share)
        run.adopt(self.recipe(self.plan, chosen))
        run.log(
            f"plan: {self.told(chosen)}; {self.plan.steps} steps of {run.recipe.row_tokens:,} tokens; expected: bits per byte "
            f"{self.plan.expected():+.1%} at most"
        )

    def told(self, chosen: Mapping[int, int]) -> str:
        """A choice in words."""
        softmax = softmax_of(chosen, self.chunk)
        few = sorted({k for k in chosen.values() if k < self.chunk}) or [self.chunk]
        between = str(few[0]) if few[0] == few[-1] else f"{few[0]} to {few[-1]}"
        return (
            f"{len(softmax)} of {self.run.described} softmax ({', '.join(map(str, softmax)) or 'none'}), {between} of {self.chunk} tokens "
            f"salient, state {self.state(chosen):.0%} of the base's cache at {self.run.context:,} tokens"
        )

    def spend(self, plan: BudgetPlan, share: float) -> dict[int, int]:
        """Salient tokens of each layer for a share of the base's cache."""
        return plan.harms.spend((share - 1) * self._base_size, self.prices)

    def recipe(self, plan: BudgetPlan, chosen: Mapping[int, int]) -> Recipe:
        """The recipe of a plan with these salient tokens, and a rate for its steps."""
        rate = self.requested.finetune_rate * min(1.0, FULL_RATE_STEPS / max(1, plan.steps)) ** RATE_FALLS
        types, few = self._layers(chosen)
        return replace(
            self._trial(), layer_types=types, salient_by_layer=few, finetune_steps=plan.steps, finetune_rate=rate
        )

    def _layers(self, chosen: Mapping[int, int]) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
        """Types of all layers, and their salient tokens; softmax layers and windows have the default."""
        few = {layer: k for layer, k in chosen.items() if k < self.chunk}
        row = tuple(few.get(layer, self.requested.salient_per_chunk) for layer in range(self.run.layers))
        return self.run.types(softmax_of(chosen, self.chunk)), row if few else None

    def _trial(self) -> Recipe:
        """The recipe with all layers linearized."""
        recipe = self.requested if self.requested.row_tokens >= LEAST_ROW else replace(self.requested, retrieval=0.0)
        return replace(recipe, budget="")

    def _size(self, chosen: Mapping[int, int]) -> int:
        """Bytes of state at the model's context."""
        config = copy.copy(self.run.geometry)
        types, few = self._layers(chosen)
        config.still_config = replace(self.run.still, layer_types=types, salient_by_layer=few).to_dict()
        table = state_table(config, torch.float16)
        return table.size_bytes(1, table.rows(self.run.context))

    def state(self, chosen: Mapping[int, int]) -> float:
        """State size at the model's context, relative to the base's cache, windows counted in both."""
        return self._size(chosen) / self._base_size

    def _plan(self) -> BudgetPlan:
        run, log = self.run, self.run.log
        run.adopt(self._trial())
        model = run.load_base().to(run.accelerator.device)
        attentions = make_students(model)
        tokens, questions = self._fit_yardstick(model, attentions)
        measured = self._harms(model, attentions)
        set_layers(attentions, {})
        with run.accelerator.autocast():
            base = self.stick.measured(model)
        losses = ", ".join(f"{bits:.4f} at {context:,}" for context, bits in base.bits.items())
        log(f"base: bits per byte {losses}; finds {base.found} of {base.asked} facts")
        plan = BudgetPlan(measured, min(STATE, self.budget.state), base, base, tokens=tokens, questions=questions)
        left = LEFT if self.requested.finetune_steps else 1.0
        for _ in range(TRIALS):
            begin = time.monotonic()
            chosen = self.spend(plan, plan.share)
            set_layers(attentions, chosen)
            with run.accelerator.autocast():
                tried = self.stick.measured(model, questions=False)
            seconds = time.monotonic() - begin
            log(f"trial: {self.told(chosen)}, untrained: {tried.compared(base)}")
            plan = replace(plan, tried=tried)
            if left * worst(tried, base) <= self.budget.loss or not self._more(plan.share):
                break
            plan = replace(plan, share=self._more(plan.share))
        del model, attentions
        return replace(plan, steps=self._steps(plan, seconds))

    def _more(self, share: float) -> float:
        """The next size of state to try; 0: the budget has none."""
        most = min(1.0, self.budget.state)
        return min(share + MORE, most) if share < most else 0.0

    def _harms(self, model: Any, attentions: list[Trainable]) -> Harms:
        """Those of an earlier call for the same base and text, from as many rounds or more; or measured, and kept for later calls."""
        run, rounds = self.run, self._rounds
        what = [run.base_weights, run.context, str(run.still.to_dict()), run.recipe.seed]
        code = Path(harms.__file__).read_bytes()
        what += [hashlib.sha256(part).hexdigest() for part in (run.corpus.train.tobytes(), code)]
        path = cache_folder() / "linearize" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]}.json"
        try:
            known = Harms.read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            known = None
        if known is not None and known.rounds >= rounds:
            run.log(f"what each layer loses was measured before: {path}")
            return known
        run.log(f"measuring what each layer loses, in {rounds} rounds")
        found = harms_of(run, model, attentions, rounds, HARMS * 60 * self.budget.time)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(found.to_dict()))
        except (OSError, PackageError) as error:
            run.log(f"what each layer loses is not kept for another call: {error}")
        return found

    def _fit_yardstick(self, model: Any, attentions: list[Trainable]) -> tuple[int, int | None]:
        """Use fewer tokens and questions if all would take more than their share of the time; returns (tokens, 0: all; questions, None:
        all)."""
        set_layers(attentions, {})
        ids = self.stick.rows[0][:, :PROBE]
        for _ in range(2):  # the first run allocates
            begin = time.monotonic()
            with torch.no_grad(), self.run.accelerator.autocast():
                float(last_hidden(model, ids.to(self.run.accelerator.device)).sum())
        speed = ids.numel() / (time.monotonic() - begin)
        seconds = 60 * self.budget.time
        self._rounds = min(MOST, max(FEWEST, int(HARMS * seconds * speed / ROUND)))
        asked = int(speed * EVERYDAY * seconds / PER_QUESTION)
        questions = None if asked >= 1000 else max(1, asked)
        whole, tokens = self.stick.tokens, int(speed * MEASURING * seconds / MEASUREMENTS)
        if tokens >= whole:
            return 0, questions
        self.stick.keep(tokens)
        self.run.log(
            f"measuring {whole:,} tokens would take {spoken(MEASUREMENTS * whole / speed)} of the {self.budget.time:g} minutes, so "
            f"{self.stick.tokens:,} are measured: text to {max(self.stick.contexts):,} tokens, {len(self.stick.prompts)} questions"
        )
        return max(1, tokens), questions

    def _steps(self, plan: BudgetPlan, seconds: float) -> int:
        """Steps that fit into the time; `seconds`: time to measure a student's text."""
        run, chosen = self.run, self.spend(plan, plan.share)
        if not self.requested.finetune_steps or len(softmax_of(chosen, self.chunk)) == len(chosen):
            return 0
        run.adopt(self.recipe(plan, chosen))
        question_share = sum(ids.shape[1] for ids, _ in self.stick.prompts) / sum(
            row.numel() for row in self.stick.rows
        )
        step = step_seconds(run, "LoRA")
        # Writing the model takes about as long as reading the base.
        self.until = (
            run.started
            + 60 * self.budget.time * (1 - EVERYDAY)
            - self.reading
            - RESERVED * (1 + question_share) * seconds
            - step
        )
        steps = max(0, min(self.requested.finetune_steps, 1 + math.floor((self.until - time.monotonic()) / step)))
        if not steps:
            run.log(
                f"no time is left to train: a step takes {step:.1f} s here, beside reading and measuring. The untrained model is written; "
                f"--budget with a longer time trains it, and what was measured is kept"
            )
        run.log(
            f"cost: {steps} steps of {step:.1f} s, {spoken(steps * step)} of the {self.budget.time:g} minutes in all; {peak_memory()}"
        )
        return steps

    def settle(self, model: Any, attentions: list[Trainable]) -> dict[str, Any]:
        """Measure the trained `model` and spend more state until the budget is met. Returns promises and results."""
        run, plan, share = self.run, self.plan, self.plan.share
        least = math.ceil(self.budget.found * plan.base.found)
        while True:
            chosen = self.spend(plan, share)
            set_layers(attentions, chosen)
            forget_lora(model, softmax_of(chosen, self.chunk))
            begin = time.monotonic()
            with run.accelerator.autocast():
                reached = self.stick.measured(model)
            loss, seconds = worst(reached, plan.base), time.monotonic() - begin
            met = loss <= self.budget.loss and reached.found >= least
            run.log(f"reached with {self.told(chosen)}: {reached.compared(plan.base)}")
            if met or not self._more(share):
                break
            if time.monotonic() + seconds > run.started + 60 * self.budget.time - self.reading:
                run.log("no time is left to try more state")
                break
            share = self._more(share)
            run.log(f"that exceeds the budget ({self.budget}), so the state grows to {share:.0%} of the base's cache")
        run.adopt(self.recipe(plan, chosen))
        state, minutes = self.state(chosen), (time.monotonic() - run.started) / 60
        promises = limits_met(self.budget, plan.base, reached, state, minutes)
        return {
            "budget": str(self.budget),
            "everyday": self.budget.everyday,
            "expected_loss": plan.expected(),
            "base": asdict(plan.base),
            "reached": asdict(reached),
            "loss": loss,
            "state": state,
            "softmax_layers": softmax_of(chosen, self.chunk),
            "salient": [chosen.get(layer, 0) for layer in range(run.layers)],
            "minutes": minutes,
            "processor_seconds": time.process_time(),
            "load": os.getloadavg()[0] / (os.cpu_count() or 1),
            "promises": promises,
            "said": f"{reached.compared(plan.base)}{'' if reached.asked else '; no question was asked'}; {self.told(chosen)}; "
            f"{minutes:.1f} minutes ({time.process_time():,.0f} processor seconds, load {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} cores), {peak_memory()}",
        }


def softmax_of(chosen: Mapping[int, int], chunk: int) -> list[int]:
    """Layers whose whole chunks are salient."""
    return sorted(layer for layer, salient in chosen.items() if salient >= chunk)


def worst(student: Measured, base: Measured) -> float:
    """Largest relative increase of bits per byte over the base."""
    return max(student.losses(base).values())


def limits_met(budget: Budget, base: Measured, reached: Measured, state: float, minutes: float) -> dict[str, str]:
    """Whether each limit of a budget was met; facts are not measured without questions, or if the base knows no answer."""
    found = MET if budget.found == 0 or reached.found >= math.ceil(budget.found * base.found) else BROKEN
    if budget.found and not (reached.asked and base.found):
        found = UNMEASURED
    limits = {
        "loss": worst(reached, base) <= budget.loss,
        "state": state <= budget.state,
        "time": minutes <= budget.time,
    }
    verdicts = {name: MET if met else BROKEN for name, met in limits.items()}
    return {"loss": verdicts["loss"], "state": verdicts["state"], "found": found, "time": verdicts["time"]}


def set_layers(attentions: list[Trainable], chosen: Mapping[int, int]) -> None:
    """Set layers to student mode with `chosen` salient tokens per chunk; those with a whole chunk, and others, to teacher mode."""
    for attention in attentions:
        still: Any = attention.still  # type: ignore[attr-defined]
        salient = chosen.get(attention.layer_idx, still.chunk_size)
        attention.mode = SOFTMAX if salient >= still.chunk_size else STUDENT
        if salient < still.chunk_size:
            attention.still = replace(still, salient_per_chunk=salient)  # type: ignore[attr-defined]


@torch.no_grad()
def forget_lora(model: Any, layers: list[int]) -> None:
    """Restore the base's projections in `layers`."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name and any(f".layers.{layer}." in name for layer in layers):
            parameter.zero_()
