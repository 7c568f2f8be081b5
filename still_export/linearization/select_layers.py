"""Which layers should stay softmax: those whose restoration brings the all-linear student closest to its teacher."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from still_export.errors import ConfigError, TrainingError
from still_export.linearization.linearize import make_accelerator
from still_export.linearization.lookup import lookup_scores
from still_export.linearization.objectives import FinetuneObjective, make_students
from still_export.linearization.recipe import Recipe
from still_export.linearization.run import LinearizationRun
from still_export.linearization.tasks import TaskWriter
from still_export.mixers.layers import FULL

KL, RETRIEVAL = CRITERIA = ("kl", "retrieval")
NONE = -1
"""The candidate that restores no layer: what scores are measured from."""


@dataclass
class LayerChoice:
    """The result of `select_layers`.

    layers: Chosen indices, best first.
    scores: By layer, KL reduction in nats per token after the last round, or attention to facts summed over heads.
    rounds: Rounds that ran. layer_types: For StillConfig.
    """

    layers: list[int]
    scores: dict[int, float]
    rounds: int
    layer_types: tuple[str, ...]


def select_layers(
    recipe: Recipe,
    count: int,
    output: Path,
    *,
    by: str = KL,
    steps: int = 25,
    rounds: int = 4,
    resume: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> LayerChoice:
    """Score every layer and choose `count`; writes layers.json into `output`.

    By "retrieval": how much attention a layer's heads together send from answers to the facts that hold them; nothing is trained.
    By "kl": how much closer to its teacher the student gets with the layer restored. One stage 1 serves all candidates, because it
    trains each layer behind the teacher's own outputs. Then every candidate gets LoRA against the teacher for `steps` steps a round,
    until the best `count` stay the same for two rounds. Candidates are shared out over the processes that torchrun started; finished
    ones are not repeated by a resumed run.

    Raises:
        ConfigError: More layers than the model has, or an unknown `by`.
        TrainingError: The folder holds another run.
    """
    if by not in CRITERIA:
        raise ConfigError(f"by={by!r} is unknown; known: {', '.join(CRITERIA)}.")
    recipe = replace(recipe, layer_types=None, loss="kl", device=recipe.device)
    accelerator = make_accelerator(recipe)
    run = LinearizationRun(recipe, output, accelerator, lambda *_: None, log)
    layers = run.layers
    if not 0 < count <= layers:
        raise ConfigError(f"{count} softmax layers of a model with {layers}.")
    run.open_folder(resume, force)
    if by == RETRIEVAL:
        log("looking for heads that look facts up")
        model = run.load_base()
        attentions = make_students(model.to(accelerator.device))
        writer = TaskWriter(run.tokenizer, run.corpus.train)
        found = lookup_scores(model, attentions, writer, run.recipe.row_tokens, recipe.seed).sum(1)
        scores = [dict(enumerate(found.tolist()))]
    else:
        scores = _kl_scores(run, count, steps, rounds, log)
    chosen = best(scores[-1], count)
    types = tuple(FULL if layer in chosen else recipe.layer for layer in range(layers))
    choice = LayerChoice(chosen, scores[-1], len(scores), types)
    if accelerator.is_main_process:
        content = {**asdict(choice), "scores_by_round": scores, "recipe": recipe.to_dict()}
        (output / "layers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    return choice


def _kl_scores(
    run: LinearizationRun, count: int, steps: int, rounds: int, log: Callable[[str], None]
) -> list[dict[int, float]]:
    """KL reductions of every layer, a dictionary for each round."""
    accelerator, layers = run.accelerator, run.layers
    if run.recipe.transfer_steps and not (run.work / "transfer.safetensors").is_file():
        run.transfer()
    candidates = _Candidates(run, steps)
    scores: list[dict[int, float]] = []
    for number in range(rounds):
        for index, layer in enumerate((NONE, *range(layers))):
            if index % accelerator.num_processes == accelerator.process_index:
                divergence = candidates.advance(layer, number)
                log(
                    f"round {number + 1}: {'no layer' if layer == NONE else f'layer {layer}'} restored, KL {divergence:.4f}"
                )
        accelerator.wait_for_everyone()
        found = {layer: candidates.divergence(layer, number) for layer in (NONE, *range(layers))}
        scores.append({layer: found[NONE] - value for layer, value in found.items() if layer != NONE})
        if number and set(best(scores[-1], count)) == set(best(scores[-2], count)):
            break
    return scores


def best(scores: dict[int, float], count: int) -> list[int]:
    """The `count` layers of the highest scores, best first; of equals the lower layer."""
    return sorted(scores, key=lambda layer: (-scores[layer], layer))[:count]


class _Candidates:
    """Trains students with one restored layer, a round at a time, in one model; each keeps its LoRA and optimizer in a file."""

    def __init__(self, run: LinearizationRun, steps: int) -> None:
        self.run, self.recipe, self.steps = run, run.recipe, steps
        self.folder = run.work / "candidates"
        self.folder.mkdir(exist_ok=True)
        maps = run.work / "transfer.safetensors" if run.recipe.transfer_steps else None
        model, self.attentions = run.student(maps)
        self.model = model.to(run.accelerator.device)
        self.lora = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.start = {n: p.detach().clone() for n, p in self.lora.items()}
        self.batches = run.batches(self.recipe.retrieval)

    def divergence(self, layer: int, number: int) -> float:
        """KL of a candidate after a round that was finished, by this process or another."""
        return float(json.loads(self._score(layer, number).read_text(encoding="utf-8")))

    def advance(self, layer: int, number: int) -> float:
        """Train a candidate for one more round, unless that was done before; its KL on the held-out text."""
        if self._score(layer, number).is_file():
            return self.divergence(layer, number)
        optimizer = torch.optim.AdamW(self.lora.values(), lr=self.recipe.finetune_rate)
        self._load(layer, number, optimizer)
        objective = FinetuneObjective(
            self.model, self.attentions, "kl", softmax_layers=() if layer == NONE else (layer,)
        )
        device = self.run.accelerator.device
        for step in range(number * self.steps, (number + 1) * self.steps):
            batch = self.batches.batch(step).to(device)
            with self.run.accelerator.autocast():
                loss, _ = objective(batch.ids, batch.weights)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.lora.values(), self.recipe.clip_norm or math.inf)
            optimizer.step()
        divergence = self.run.validate(objective)
        if not math.isfinite(divergence):
            raise TrainingError(
                f"the KL of layer {layer} is {divergence} in round {number + 1}. Use --precision fp32 or a smaller rate."
            )
        self._save(layer, number, optimizer, divergence)
        return divergence

    def _score(self, layer: int, number: int) -> Path:
        return self.folder / f"layer{layer}-round{number}.json"

    def _state(self, layer: int) -> Path:
        return self.folder / f"layer{layer}.pt"

    def _load(self, layer: int, number: int, optimizer: torch.optim.Optimizer) -> None:
        values: dict[str, Tensor] = self.start
        if number:
            saved = torch.load(self._state(layer), weights_only=True, map_location=self.run.accelerator.device)
            if saved["round"] != number - 1:
                raise TrainingError(
                    f"{self._state(layer)} is of round {saved['round']}, not {number - 1}. Start again with --force."
                )
            values = saved["lora"]
            optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for name, parameter in self.lora.items():
                parameter.copy_(values[name])

    def _save(self, layer: int, number: int, optimizer: torch.optim.Optimizer, divergence: float) -> None:
        """State first, score last: a score says that its round is finished."""
        lora = {n: p.detach() for n, p in self.lora.items()}
        partial = self._state(layer).with_suffix(".partial")
        torch.save({"round": number, "lora": lora, "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, self._state(layer))
        self._score(layer, number).write_text(json.dumps(divergence), encoding="utf-8")
