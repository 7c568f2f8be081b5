"""Passes, which take onnx_ir's models, run over protobuf ones, which tests build, check and run."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from still_graphs import pipelines
from still_graphs.conditions import whole
from still_graphs.passes import attach_functions as passes
from still_graphs.pipelines import Dump, Pass


def applied(run: Callable[..., Any], model: onnx.ModelProto, *arguments: Any, **named: Any) -> Any:
    """Run a pass, or a condition, over `model`, in place; what it returns. Nothing is read that nothing makes."""
    graph = ir.from_proto(model)
    result = run(graph, *arguments, **named)
    assert not (wrong := whole(graph)), wrong
    model.CopyFrom(ir.to_proto(graph))
    return result


def run_passes(
    model: onnx.ModelProto, order: Sequence[Pass], dump: Dump | None = None, traits: Collection[str] = ()
) -> dict[str, int]:
    """`still_graphs.pipelines.run_passes` over `model`, in place."""
    counts: dict[str, int] = applied(pipelines.run_passes, model, order, dump, traits)
    return counts


def attach_functions(model: onnx.ModelProto, onnxruntime: bool = False) -> int:
    """`still_graphs.passes.attach_functions` over `model`, in place."""
    count: int = applied(passes.attach_functions, model, onnxruntime)
    return count
