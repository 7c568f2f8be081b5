"""A target of the tests' own: bodies in the place of every still::* node, a file of its own, ONNX Runtime to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from still_export.graph.quantization.policy import ONNXRUNTIME
from still_export.options import option
from still_export.package.programs import write_programs
from still_export.targets.target import Lowering, Target
from still_graphs.conditions import known_ops, no_still_nodes
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.pipelines import Pass


@dataclass(frozen=True)
class ToyOptions:
    """What a toy package is asked for."""

    toy_note: str = option("none", "What the note of the package says.")

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any], **changes: Any) -> Self:
        """The options of an export to repeat."""
        recorded = {"toy_note": manifest["config"]["toy_note"]} if manifest.get("target") == "toy" else {}
        return cls(**{**recorded, **changes})


def finish(lowering: Lowering, graph: Any) -> None:
    """Write the note and the runner."""
    note = lowering.options.toy_note
    (lowering.folder / "note.txt").write_text(f"{note}: {len(graph.graph)} nodes\n")
    lowering.manifest.update(target="toy", config={**lowering.manifest["config"], "toy_note": note})
    write_programs(lowering.folder, ["ort"])


TOY = Target(
    "toy",
    "toy",
    ("float32",),
    ONNXRUNTIME,
    ToyOptions,
    passes=(Pass(inline_functions, "nobody has these ops", requires=known_ops, ensures=no_still_nodes),),
    finish=finish,
    runtime="ort",
    decode_steps=8,
)
