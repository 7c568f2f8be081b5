"""TensorRT 10 and later: plugins over kernels that were compiled ahead of time. 8.6 has a record of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from still_export.extras import demand
from still_export.graph.merge import merge_linear_layers, merged
from still_export.graph.options import Progress
from still_export.graph.quantization.policy import Layout
from still_export.package.folder import Package
from still_export.targets.target import FLOAT_WEIGHTS, SPECULATION, Target
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.package import finish
from still_export.targets.trt.plugins import find_tensorrt_headers
from still_export.targets.trt.runtime import TENSORRT
from still_graphs.conditions import known_ops, no_functions, no_int64_io, plugin_nodes
from still_graphs.passes.add_greedy_token import add_greedy_token, gives_next_token
from still_graphs.passes.fix_shapes import fix_shapes, fixed_shapes
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.passes.lower_opset import lower_opset, lowered
from still_graphs.passes.lower_plugin_nodes import lower_plugin_nodes
from still_graphs.passes.merge_heads import merge_heads
from still_graphs.passes.part_head import leave_head, no_head
from still_graphs.passes.strip_functions import strip_functions
from still_graphs.pipelines import PLUGINS, Step, steps_of_ops

ONE_ROW = "one row"
"""Trait: the model is to run one row (sequence) at a time."""
DTYPES = ("float16", "bfloat16", "float32")


def traits(options: TrtOptions) -> tuple[str, ...]:
    """What steps ask for."""
    return (ONE_ROW,) if options.batch == 1 else ()


def ready(options: TrtOptions, say: Progress) -> None:
    """Raise where a folder that was named has no headers, or nothing compiles kernels."""
    demand("triton")
    find_tensorrt_headers(options.tensorrt_include)


def build(package: Package, options: Any, progress: Any) -> list[Path]:
    """The engines, built here (still_export.targets.trt.build)."""
    from still_export.targets.trt.build import build_engines

    return build_engines(package, options, progress)


TRT = Target(
    "trt",
    "trt",
    DTYPES,
    Layout("TensorRT's INT4", (64, 128)),
    TrtOptions,
    steps=(
        Step(
            leave_head,
            "the runner asks no head that guesses tokens ahead",
            only=(SPECULATION,),
            requires=known_ops,
            ensures=no_head,
        ),
        Step(
            merge_linear_layers,
            "engines whose weights can be replaced have none of their products merged by the compiler",
            only=(FLOAT_WEIGHTS,),
            requires=known_ops,
            ensures=merged,
        ),
        Step(
            strip_functions,
            "the parser prefers a function over a plugin",
            requires=known_ops,
            ensures=no_functions,
        ),
        Step(
            fix_shapes,
            "dimensions that are left to be computed hide which are equal; 8.6 reserves memory for them",
            ensures=fixed_shapes,
        ),
        Step(
            merge_heads,
            "no reshape parts a product from its attention; 8.6 tries each part in one layout instead of two",
            only=(ONE_ROW,),
            requires=fixed_shapes,
            ensures=fixed_shapes,
        ),
        Step(add_greedy_token, "greedy decoding stays on the device", ensures=gives_next_token),
        *steps_of_ops(PLUGINS),
        Step(
            lower_opset,
            "every TensorRT since 8.6 reads opset 17; quantized weights, for 10 and later, need 21",
            requires=no_functions,
            ensures=lowered,
        ),
        Step(
            lower_integers,
            "plugins take counts in int32, and hosts bind int32 alike everywhere",
            requires=gives_next_token,
            ensures=no_int64_io,
        ),
        Step(
            lower_plugin_nodes,
            "plugins get declared attributes, present inputs and int32 counts",
            requires=known_ops,
            ensures=plugin_nodes,
        ),
    ),
    finish=partial(finish, plugins=True),
    caches=("int8",),
    traits=traits,
    ready=ready,
    dtype="float16",
    speculates=True,
    runtime=TENSORRT,
    build=build,
    decode_steps=256,
)
