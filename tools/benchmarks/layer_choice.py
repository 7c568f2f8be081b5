"""Softmax layers chosen by what layers need and by gates that learn on retrieval, and settings of `quick`: what models of a budget give.

  python -m tools.benchmarks.layer_choice BASE --text django.txt --counts 2,4 -o OUT
  python -m tools.benchmarks.layer_choice BASE --layers 17,18,20,23 --set finetune_steps=26 --set finetune_rate=1e-3,retrieval=0.9 -o OUT

Gates, after FlashMorph (arXiv:2606.30562): every layer's output is a mixture of softmax and of the untrained student. Only the mixtures'
shares learn: by the answers of retrieval prompts, and by a price for each softmax layer. Each choice is then trained by the recipe `quick`
with its layers fixed, once for each --set. Facts are natural sentences, 40 at 1,024 tokens and 40 at 4,096. Writes OUT/choice.json.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from still_export.linearization import measure
from still_export.linearization.linearize import make_accelerator
from still_export.linearization.losses import head_losses
from still_export.linearization.measure import Yardstick, last_hidden
from still_export.linearization.needs import needs_of
from still_export.linearization.objectives import make_students
from still_export.linearization.plan import set_modes
from still_export.linearization.recipe import preset, read_recipe
from still_export.linearization.run import LinearizationRun
from still_export.mixers.layers import FULL
from still_export.mixers.trainable import SOFTMAX, STUDENT
from still_export.texts.forms import NaturalWriter
from still_export.texts.turns import turn_pieces
from tools.benchmarks.common import changes_in, numbers, parser_of

STEPS, RATE, PRICE, TOKENS = 100, 0.1, 1.0, 2048
"""Of the gates: price of all layers together, and tokens of a prompt."""


def learned_gates(run: LinearizationRun, model: Any, attentions: list[Any]) -> list[float]:
    """Share of softmax in each layer's output after training."""
    gates = nn.Parameter(torch.zeros(len(attentions), device=run.accelerator.device))
    optimizer = torch.optim.Adam([gates], lr=RATE)
    writer = NaturalWriter(run.tokenizer, run.corpus.train, turn_pieces(run.tokenizer))

    def mixture(index: int) -> Any:
        def hook(module: Any, arguments: Any, given: dict[str, Any], result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            module.mode = STUDENT
            student = module.forward(*arguments, **given)[0]
            module.mode = SOFTMAX
            share = gates[index].sigmoid()
            return share * result[0] + (1 - share) * student, result[1]

        return hook

    set_modes(attentions, range(len(attentions)))
    hooks = [a.register_forward_hook(mixture(i), with_kwargs=True) for i, a in enumerate(attentions)]
    head, rng = model.get_output_embeddings().weight, np.random.default_rng(run.recipe.seed)
    for step in range(STEPS):
        prompt, count = writer.prompt(TOKENS, float(rng.random()) * 0.9, rng)
        ids = torch.from_numpy(prompt)[None].to(head.device)
        losses = head_losses(last_hidden(model, ids), head, ids.roll(-1, dims=1))[0]
        loss = losses[-count - 1 : -1].mean() + PRICE * gates.sigmoid().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(
                f"gates, step {step + 1}: loss {loss.item():.3f}, softmax {gates.sigmoid().mean().item():.2f}",
                flush=True,
            )
    for hook in hooks:
        hook.remove()
    return gates.detach().sigmoid().tolist()


def main() -> None:
    """As the head of the file says."""
    parser = parser_of(__doc__)
    parser.add_argument("base")
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--counts", type=numbers, default=[2, 4])
    parser.add_argument("--layers", type=numbers, default=[], help="train with these softmax alone, without a ranking")
    parser.add_argument(
        "--set", action="append", metavar="OPTION=NUMBER,...", help="of the recipe; each one is a model"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    measure.QUESTIONS.update({1024: 40, 4096: 40})
    given = {"base": options.base, "texts": tuple(options.text), "budget": "", "salient_per_chunk": 16}
    recipe = read_recipe(preset("tuned"), given)
    settings = {text: changes_in(text) for text in options.set or [""]}

    def begin(name: str, changes: dict[str, Any]) -> LinearizationRun:
        made = replace(recipe, **changes)
        run = LinearizationRun(made, options.output / name, make_accelerator(made), lambda *_: None, print)
        run.open_folder(False, True)
        return run

    run = begin("ranking", {})
    model = run.load_base().to(run.accelerator.device)
    attentions: list[Any] = make_students(model)
    stick = Yardstick(run.corpus, run.tokenizer, run.context)
    found: dict[str, Any] = {"models": []}
    ranks = {"asked": options.layers}
    if not options.layers:
        needs, gates = needs_of(run, model, attentions), learned_gates(run, model, attentions)
        found |= {"needs": asdict(needs), "gates": gates}
        ranks = {"needs": needs.ranked(), "gates": sorted(range(run.layers), key=lambda layer: -gates[layer])}
    set_modes(attentions, range(run.layers))
    base = stick.measured(model)
    found["base"] = asdict(base)
    for count in (len(options.layers),) if options.layers else options.counts:
        for name, ranked in ranks.items():
            layers = sorted(ranked[:count])
            types = tuple(FULL if layer in layers else recipe.layer for layer in range(run.layers))
            for number, (setting, changes) in enumerate(settings.items()):
                trial = begin(f"{name}-{count}-{number}", {"layer_types": types, **changes})
                _, student, _ = trial.finetune()
                with trial.accelerator.autocast():
                    reached = stick.measured(student)
                found["models"].append({"choice": name, "setting": setting, "layers": layers, **asdict(reached)})
                print(f"{name}, softmax {layers}, {setting}: {reached.compared(base)} of {reached.asked}", flush=True)
                (options.output / "choice.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
