"""TensorRT 8.6: TensorRT's target with a named workaround for each difference."""

from __future__ import annotations

from dataclasses import replace

from still_export.errors import UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import PLUGIN, Layout, demand_float8
from still_export.targets.trt.options import QUANTIZED_MAJOR, TrtOptions
from still_export.targets.trt.plugins import find_tensorrt_headers, tensorrt_major
from still_export.targets.trt.target import CLOSING, GREEDY, OPENING, TRT
from still_export.targets.trt8.angles import angles_reduced, reduce_angles
from still_export.targets.trt8.merge_heads import merge_heads
from still_export.targets.trt8.norms import norm_in_place, whole_norms
from still_export.targets.trt8.opset import lower_opset, lowered
from still_export.targets.trt8.shapes import shape_before_widening, shaped_before_widening
from still_export.targets.trt8.sigmoids import sigmoids_of_one_type, widen_sigmoids
from still_graphs.conditions import known_ops, no_functions
from still_graphs.passes.fix_shapes import fixed_shapes
from still_graphs.pipelines import PLUGINS, Pass, passes_of_ops


def traits(options: TrtOptions) -> tuple[str, ...]:
    return (ONE_ROW,) if options.batch == 1 else ()


def takes(options: TrtOptions) -> bool:
    """Whether a library is compiled for a TensorRT without low-bit weights."""
    return any(tensorrt_major(include) < QUANTIZED_MAJOR for include in find_tensorrt_headers(options.tensorrt_include))


def demand(export_options: ExportOptions, options: TrtOptions) -> None:
    """Raise UnsupportedError for activations that the plugin cannot multiply, and GPUs that cannot multiply the weights."""
    demand_float8(export_options.quantize, options.architectures)
    if export_options.quantize and export_options.dtype != "float16":
        raise UnsupportedError(
            f"--quantize {export_options.quantize} beside --dtype {export_options.dtype}: {LAYOUT.form} multiplies with float16. "
            "Export with --dtype float16, or name only headers of TensorRT 10 or later with --tensorrt-include."
        )


ONE_ROW = "one row"
"""Trait: the engine runs one row (sequence) at a time."""
LAYOUT = Layout("the plugin for TensorRT 8.6", (32, 64, 128), PLUGIN, True, True, float8=True)

TRT8 = replace(
    TRT,
    name="trt8",
    layout=LAYOUT,
    passes=(
        Pass(
            norm_in_place,
            "8.6 compiles a norm of the first channels for prompts, but not for one token",
            requires=known_ops,
            ensures=whole_norms,
        ),
        *OPENING,
        Pass(
            merge_heads,
            "no reshape parts a product from its attention; 8.6 tries each part in one layout instead of two",
            only=(ONE_ROW,),
            requires=fixed_shapes,
            ensures=fixed_shapes,
        ),
        GREEDY,
        *passes_of_ops(PLUGINS),
        Pass(
            lower_opset,
            "8.6 reads opset 17, and compiles what lies around a choice as one part",
            requires=no_functions,
            ensures=lowered,
        ),
        Pass(
            shape_before_widening,
            "8.6 loses track of the type of a float32 reshape",
            requires=lowered,
            ensures=shaped_before_widening,
        ),
        Pass(
            widen_sigmoids,
            "8.6 finds no kernels for a part with sigmoids of two types",
            requires=lowered,
            ensures=sigmoids_of_one_type,
        ),
        Pass(
            reduce_angles,
            "8.6 computes sines of large angles in few digits",
            requires=lowered,
            ensures=angles_reduced,
        ),
        *CLOSING,
    ),
    traits=traits,
    demand=demand,
    takes=takes,
)
