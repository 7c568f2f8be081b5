"""Choices for a budget: softmax layers and salient tokens from trials, steps from the time, and more softmax if the result is not
enough."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from still_export.errors import ConfigError
from still_export.linearization.budget import Budget
from still_export.linearization.cost import spoken, step_seconds
from still_export.linearization.measure import Measured, Yardstick, last_hidden
from still_export.linearization.needs import Needs, needs_of
from still_export.linearization.objectives import make_students
from still_export.linearization.recipe import Recipe
from still_export.linearization.run import LinearizationRun
from still_export.mixers.cache import state_table
from still_export.mixers.trainable import SOFTMAX, STUDENT, Trainable

PLAN_FILE = "plan.json"
DENSEST = 4
"""Tokens of a chunk per salient token, at most; a quarter of the cache has most of what an untrained student uses."""
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
PASSES = 4
"""A training step takes at least as long as so many forward passes: the teacher's, the student's, and its gradients."""
FULL_RATE_STEPS = 40
"""Most steps that are trained at the recipe's rate; longer trainings have a lower rate."""
RATE_FALLS = 0.3
"""Exponent of the rate's decrease with steps: ten times as many have half the rate."""
FEW_STEPS = 100
"""Steps to advise if the budget has no time for training."""
RESERVED = 1.5
"""Final measurements to reserve time for; some runs keep more layers and measure again."""


@dataclass(frozen=True)
class BudgetPlan:
    """The result of the trials.

    needs: Of all layers. count: Number of top-ranked layers that stay softmax. most: Largest such number for the state. salient: Tokens per
    chunk. base: Results of the base. tried: Results of the untrained student. steps: Of training. tokens: Read by a measurement; 0: all.
    """

    needs: Needs
    count: int
    most: int
    salient: int
    base: Measured
    tried: Measured
    steps: int = 0
    tokens: int = 0

    @classmethod
    def read(cls, text: str) -> BudgetPlan:
        """Parse the output of `json.dumps(asdict(plan))`."""
        values = json.loads(text)
        for name in ("base", "tried"):
            bits = {int(context): value for context, value in values[name]["bits"].items()}
            values[name] = Measured(**{**values[name], "bits": bits})
        return cls(**{**values, "needs": Needs.read(values["needs"])})

    def expected(self) -> float:
        """Largest expected increase of bits per byte, as a share."""
        return max(0.0, (LEFT if self.steps else 1.0) * worst(self.tried, self.base))


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
        least = self.state(0, 1)
        if least > self.budget.state:
            raise ConfigError(
                f"--budget {self.requested.budget!r}: a state of {self.budget.state:.0%} is impossible; with no softmax layer and one "
                f"salient token a chunk it is {least:.0%} of the base's cache at {run.context:,} tokens."
            )
        path = run.work / PLAN_FILE
        if run.accelerator.is_main_process and not path.is_file():
            path.write_text(json.dumps(asdict(self._plan())), encoding="utf-8")
        run.accelerator.wait_for_everyone()
        self.plan = BudgetPlan.read(path.read_text(encoding="utf-8"))
        if self.plan.tokens:
            self.stick.keep(self.plan.tokens)
        run.adopt(self.recipe(self.plan, self.plan.count))
        chosen = ", ".join(map(str, sorted(self.plan.needs.ranked()[: self.plan.count])))
        run.log(
            f"plan: {self.plan.count} of {run.described} softmax ({chosen}), {self.plan.salient} of {run.still.chunk_size} tokens "
            f"salient, state {self.state(self.plan.count, self.plan.salient):.0%} of the base's cache at {run.context:,} tokens; "
            f"{self.plan.steps} steps of {run.recipe.row_tokens:,} tokens; expected: bits per byte {self.plan.expected():+.1%} at most"
        )

    def recipe(self, plan: BudgetPlan, count: int) -> Recipe:
        """The recipe of a plan with `count` softmax layers, and a rate for its steps."""
        softmax = plan.needs.ranked()[:count]
        types = self.run.types(softmax)
        rate = self.requested.finetune_rate * min(1.0, FULL_RATE_STEPS / max(1, plan.steps)) ** RATE_FALLS
        return replace(self._trial(plan.salient), layer_types=types, finetune_steps=plan.steps, finetune_rate=rate)

    def _trial(self, salient: int) -> Recipe:
        """The recipe with all layers linearized."""
        recipe = self.requested if self.requested.row_tokens >= LEAST_ROW else replace(self.requested, retrieval=0.0)
        return replace(recipe, budget="", salient_per_chunk=salient)

    def state(self, count: int, salient: int) -> float:
        """State size of a student with `count` softmax layers at the model's context, relative to the base's cache."""

        def size(softmax: int) -> int:
            config = copy.copy(self.run.geometry)
            types = self.run.types(self.run.replaceable[:softmax])
            config.still_config = replace(self.run.still, layer_types=types, salient_per_chunk=salient).to_dict()
            table = state_table(config, torch.float16)
            return table.size_bytes(1, table.rows(self.run.context))

        return size(count) / size(len(self.run.replaceable))

    def _room(self, least: int) -> tuple[int, int]:
        """Returns (salient tokens per chunk, softmax layers that fit): the most tokens with room for `least` layers, if any fit."""
        layers, salient = len(self.run.replaceable), max(1, self.run.still.chunk_size // DENSEST)
        while True:
            most = max((n for n in range(layers + 1) if self.state(n, salient) <= self.budget.state), default=-1)
            if most >= least or salient == 1:
                return salient, max(most, 0)
            salient //= 2

    def _plan(self) -> BudgetPlan:
        run, log = self.run, self.run.log
        run.adopt(self._trial(max(1, run.still.chunk_size // DENSEST)))
        model = run.load_base().to(run.accelerator.device)
        attentions = make_students(model)
        tokens = self._fit_yardstick(model, attentions)
        log("measuring what each layer needs")
        needs = needs_of(run, model, attentions)
        set_modes(attentions, run.replaceable)
        with run.accelerator.autocast():
            base = self.stick.measured(model)
        losses = ", ".join(f"{bits:.4f} at {context:,}" for context, bits in base.bits.items())
        log(f"base: bits per byte {losses}; finds {base.found} of {base.asked} facts")
        count = min(needs.looking(), max(1, len(run.replaceable) // 4))
        salient, most = self._room(count)
        if salient != run.recipe.salient_per_chunk:
            run.adopt(self._trial(salient))
            model = run.load_base().to(run.accelerator.device)
            attentions = make_students(model)
        count = min(count, most)
        for trial in range(TRIALS):
            begin = time.monotonic()
            set_modes(attentions, needs.ranked()[:count])
            with run.accelerator.autocast():
                tried = self.stick.measured(model, questions=False)
            seconds = time.monotonic() - begin
            log(f"trial: {count} of {run.described} softmax, untrained: {tried.compared(base)}")
            plan = BudgetPlan(needs, count, most, salient, base, tried, tokens=tokens)
            expected = LEFT * worst(tried, base)
            if expected <= self.budget.loss or count == most:
                break
            if trial < TRIALS - 1:
                count = self.more(plan, count, expected)
        del model, attentions
        return replace(plan, steps=self._steps(plan, seconds))

    def _fit_yardstick(self, model: Any, attentions: list[Trainable]) -> int:
        """Use fewer tokens if all would take more than MEASURING of the time; returns the number of tokens, 0: all."""
        set_modes(attentions, self.run.replaceable)
        ids = self.stick.rows[0][:, :PROBE]
        for _ in range(2):  # the first run allocates
            begin = time.monotonic()
            with torch.no_grad(), self.run.accelerator.autocast():
                float(last_hidden(model, ids.to(self.run.accelerator.device)).sum())
        speed = ids.numel() / (time.monotonic() - begin)
        self._demand_time(PASSES * self.run.recipe.row_tokens * self.run.recipe.batch_size / speed)
        whole, tokens = self.stick.tokens, int(speed * MEASURING * 60 * self.budget.time / MEASUREMENTS)
        if tokens >= whole:
            return 0
        self.stick.keep(tokens)
        self.run.log(
            f"measuring {whole:,} tokens would take {spoken(MEASUREMENTS * whole / speed)} of the {self.budget.time:g} minutes, so "
            f"{self.stick.tokens:,} are measured: text to {max(self.stick.contexts):,} tokens, {len(self.stick.prompts)} questions"
        )
        return max(1, tokens)

    def _demand_time(self, step_s: float, lacking_s: float | None = None) -> None:
        """Raise ConfigError if the budget leaves no time for a step of `step_s`, `lacking_s` short of it (None: before measuring)."""
        whole = 60 * self.budget.time
        if lacking_s is None:
            lacking_s = time.monotonic() - self.run.started + self.reading + step_s - (1 - MEASURING) * whole
        if not self.requested.finetune_steps or lacking_s <= 0:
            return
        steps = min(FEW_STEPS, self.requested.finetune_steps)
        enough = math.ceil((whole + (lacking_s + steps * step_s) / (1 - MEASURING)) / 60)
        raise ConfigError(
            f"--budget {self.requested.budget!r}: nothing can be trained in {self.budget.time:g} minutes, since a step takes some "
            f"{step_s:.1f} s here beside reading and measuring. Some {enough} minutes leave {steps} steps: time {enough}"
        )

    def more(self, plan: BudgetPlan, count: int, loss: float) -> int:
        """Number of softmax layers that should reduce `loss`, measured with `count`, to the budget, by the needs of the remaining
        layers."""
        aim = plan.needs.text_left(count) * self.budget.loss / loss if loss > 0 else 0.0
        enough = (n for n in range(count + 1, plan.most + 1) if plan.needs.text_left(n) <= aim)
        return min(next(enough, plan.most), plan.most)

    def _steps(self, plan: BudgetPlan, seconds: float) -> int:
        """Steps that fit into the time; `seconds`: time to measure a student's text."""
        run = self.run
        if plan.count == len(run.replaceable):
            return 0
        run.adopt(self.recipe(plan, plan.count))
        question_share = sum(ids.shape[1] for ids, _ in self.stick.prompts) / sum(
            row.numel() for row in self.stick.rows
        )
        step = step_seconds(run, "LoRA")
        # Writing the model takes about as long as reading the base.
        self.until = (
            run.started + 60 * self.budget.time - self.reading - RESERVED * (1 + question_share) * seconds - step
        )
        steps = max(0, min(self.requested.finetune_steps, 1 + math.floor((self.until - time.monotonic()) / step)))
        if not steps:
            self._demand_time(step, time.monotonic() - self.until)
        run.log(
            f"cost: {steps} steps of {step:.1f} s, {spoken(steps * step)} of the {self.budget.time:g} minutes in all"
        )
        return steps

    def settle(self, model: Any, attentions: list[Trainable]) -> dict[str, Any]:
        """Measure the trained `model` and keep more layers softmax until the budget is met. Returns promises and results."""
        run, plan, count = self.run, self.plan, self.plan.count
        least = math.ceil(self.budget.found * plan.base.found)
        while True:
            softmax = plan.needs.ranked()[:count]
            set_modes(attentions, softmax)
            forget_lora(model, softmax)
            with run.accelerator.autocast():
                reached = self.stick.measured(model)
            loss = worst(reached, plan.base)
            met = loss <= self.budget.loss and reached.found >= least
            run.log(f"reached with {count} of {run.described} softmax: {reached.compared(plan.base)}")
            if met or count == plan.most:
                break
            wanted = count + max(1, len(run.replaceable) // 10) if reached.found < least else 0
            if loss > self.budget.loss:
                wanted = max(wanted, self.more(plan, count, loss))
            count = min(wanted, plan.most)
            run.log(f"that exceeds the budget ({self.budget}), so {count} layers stay softmax")
        run.adopt(self.recipe(plan, count))
        state, minutes = self.state(count, plan.salient), (time.monotonic() - run.started) / 60
        promises = limits_met(self.budget, plan.base, reached, state, minutes)
        return {
            "budget": str(self.budget),
            "expected_loss": plan.expected(),
            "base": asdict(plan.base),
            "reached": asdict(reached),
            "loss": loss,
            "state": state,
            "softmax_layers": sorted(plan.needs.ranked()[:count]),
            "minutes": minutes,
            "promises": promises,
            "met": all(promise == MET for promise in promises.values()),
            "said": f"{reached.compared(plan.base)}{'' if reached.asked else '; no question was asked'}; {count} of {run.described} "
            f"softmax, state {state:.0%} of the base's cache at {run.context:,} tokens, {minutes:.1f} minutes. Promised {self.budget}: "
            + ", ".join(f"{name} {promise}" for name, promise in promises.items()),
        }


def worst(student: Measured, base: Measured) -> float:
    """Largest relative increase of bits per byte over the base."""
    return max(student.losses(base).values())


MET, BROKEN, UNMEASURED = "met", "NOT met", "NOT MEASURED"


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


def set_modes(attentions: list[Trainable], softmax: Any) -> None:
    """Set the layers with the numbers `softmax` to teacher mode, all others to student mode."""
    for attention in attentions:
        attention.mode = SOFTMAX if attention.layer_idx in softmax else STUDENT


@torch.no_grad()
def forget_lora(model: Any, layers: list[int]) -> None:
    """Restore the base's projections in `layers`."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name and any(f".layers.{layer}." in name for layer in layers):
            parameter.zero_()
