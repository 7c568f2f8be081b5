"""The report of `still-export linearize`: curves, cost and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from still_export.report.description import Bars, Lines, Plot, Plots, Report, Table, percent_more, reference_of

POINTS = 400
"""Most points of a curve; longer ones are averaged to so many."""

PROMISES = {
    "loss": "quality lost",
    "state": "size of the state",
    "found": "facts found in long inputs",
    "time": "time",
    "everyday": "the base's right answers to everyday questions",
}
WITH_MAPS = ("gla", "gdn")
"""Mixers that train their own weights in addition to LoRA."""
NAMES = {"transfer": "Stage 1, attention transfer", "finetune": "Stage 2, LoRA"}


def page(content: Mapping[str, Any], model: str, machine: Mapping[str, str], command: str) -> Report:
    """The page of a run.

    Args:
        content: recipe, bits_per_byte and stages (linearize.json).
    """
    bits, stages = content["bits_per_byte"], content["stages"]
    plots: list[Plot] = []
    for stage in stages:
        name = NAMES[stage["name"]]
        curves = {"training": thinned(stage["losses"]), "held-out text": [tuple(pair) for pair in stage["validation"]]}
        plots.append(
            Lines(
                f"{name}: loss",
                "step",
                "loss",
                {n: p for n, p in curves.items() if p},
                log_y=stage["name"] == "transfer",
                from_zero=False,
            )
        )
        if stage["name"] == "transfer" and len(stage["parts"]) > 1:
            layers = list(enumerate(stage["parts"]))
            note = (
                "How far each layer's attention is from the teacher's at the end; tall bars are candidates for softmax."
            )
            plots.append(Lines(f"{name}: loss by layer", "layer", "loss", {"last step": layers}, note=note))
    plots += Bars.of_changes("Bits per byte", "text", {name: {"held-out text": v} for name, v in bits.items()})
    columns = ["stage", "steps", "tokens", "time, s", "tokens/s", "first loss", "last loss", "ended"]
    rows = [
        [
            NAMES[s["name"]],
            s["steps"],
            s["tokens"],
            round(s["seconds"], 1),
            s["tokens"] / max(s["seconds"], 1e-09),
            s["losses"][0],
            s["losses"][-1],
            "on a plateau" if s["stopped_early"] else "after all steps",
        ]
        for s in stages
    ]
    recipe = [
        [name, ", ".join(map(str, v)) if isinstance(v, list) else str(v)]
        for name, v in content["recipe"].items()
        if v is not None
    ]
    reference = reference_of(bits)
    scores = "; ".join(
        f"{name} {v:.4f}" + (f" ({percent_more(v, bits[reference]):+.1f}%)" if name != reference else "")
        for name, v in bits.items()
    )
    seconds = sum(stage["seconds"] for stage in stages)
    return Report(
        title=f"{model}: linearized from {content['recipe']['base']}",
        verdict=f"Bits per byte of held-out text: {scores}. Training took {seconds:,.0f} s.",
        findings=[trained(content["recipe"], stages), _softmax(content)],
        parts=[
            *([_promises(content["plan"], content.get("everyday"))] if content.get("plan") else []),
            Plots("Training", plots),
            *([Table("Cost", columns, rows)] if rows else []),
            Table("Recipe", ["option", "value"], recipe, folded=True),
        ],
        machine=machine,
        command=command,
    )


def trained(recipe: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> str:
    """What was trained and what was not, in one or two sentences."""
    steps = {
        stage["name"]: f"{stage['steps']:,} steps over {stage['tokens']:,} tokens" for stage in stages if stage["steps"]
    }
    parts = []
    if "transfer" in steps:
        parts.append(f"the new layers' own weights, which imitate the base's attention ({steps['transfer']})")
    if "finetune" in steps:
        parts.append(f"LoRA of the base's projections ({steps['finetune']})")
    text = f"Trained: {', then '.join(parts)}." if parts else "Nothing was trained."
    linear = "transfer" in steps or (
        "finetune" in steps and (recipe.get("finetune_maps") or recipe.get("mixer") in WITH_MAPS)
    )
    if not linear and recipe.get("mixer", "still") == "still":
        text += " No linear part was trained: feature maps and gates have their initial values, and exact attention to selected tokens"
        text += " and the window carries the model."
    return text


def _softmax(content: Mapping[str, Any]) -> str:
    plan, types = content.get("plan"), content["recipe"].get("layer_types") or ()
    layers = plan["softmax_layers"] if plan else [i for i, kind in enumerate(types) if kind == "full_attention"]
    return f"Layers that stay softmax: {', '.join(map(str, layers)) or 'none'}."


def _promises(plan: dict[str, Any], everyday: dict[str, int] | None) -> Table:
    """The promises of a budget, what was reached, and the verdict."""
    base, reached = plan["base"], plan["reached"]
    values = {
        "loss": f"bits per byte {plan['loss']:+.1%} at most",
        "state": f"{plan['state']:.0%} of the base's cache",
        "found": f"{reached['found']} of {reached['asked']} facts, the base {base['found']}",
        "time": f"{plan['minutes']:.1f} minutes",
        "everyday": f"{everyday['kept']} of {everyday['base_right']} kept, {everyday['same']} of {everyday['asked']} the same text"
        if everyday
        else "",
    }
    requested = dict(part.split(" ", 1) for part in plan["budget"].split(", "))
    requested["time"] += " minutes"
    rows = [
        [PROMISES[name], requested.get(name, "any"), values[name], verdict]
        for name, verdict in plan["promises"].items()
    ]
    failed = frozenset(number for number, row in enumerate(rows) if row[3] != "met")
    return Table(f"Budget: {plan['budget']}", ["promise", "asked", "reached", "verdict"], rows, failed=failed)


def thinned(losses: list[float]) -> list[tuple[float, float]]:
    """The curve averaged to at most POINTS points; each is the mean of its part, placed at the part's last step."""
    size = -(-len(losses) // POINTS) or 1
    pieces = (losses[start : start + size] for start in range(0, len(losses), size))
    return [(min((i + 1) * size, len(losses)), sum(piece) / len(piece)) for i, piece in enumerate(pieces)]
