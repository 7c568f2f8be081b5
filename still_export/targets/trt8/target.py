"""TensorRT 8.6: what TensorRT takes, with low-bit weights in a plugin of this project and norms of a part written out."""

from __future__ import annotations

from dataclasses import replace

from still_export.errors import UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import PLUGIN, Layout
from still_export.targets.trt.options import QUANTIZED_MAJOR, TrtOptions
from still_export.targets.trt.plugins import find_tensorrt_headers, tensorrt_major
from still_export.targets.trt.target import TRT
from still_export.targets.trt8.norms import norm_in_place
from still_graphs.pipelines import Step


def takes(options: TrtOptions) -> bool:
    """Whether a library is compiled for a TensorRT that reads no low-bit weights."""
    return any(tensorrt_major(include) < QUANTIZED_MAJOR for include in find_tensorrt_headers(options.tensorrt_include))


def demand(asked: ExportOptions, options: TrtOptions) -> None:
    """Raise UnsupportedError for activations that the plugin does not multiply."""
    if asked.quantize and asked.dtype != "float16":
        raise UnsupportedError(
            f"--quantize {asked.quantize} beside --dtype {asked.dtype}: {LAYOUT.form} multiplies with float16. "
            "Export with --dtype float16, or name the headers of TensorRT 10 or later alone with --tensorrt-include."
        )


LAYOUT = Layout("the plugin for TensorRT 8.6", (32, 64, 128), PLUGIN, True, True)

TRT8 = replace(
    TRT,
    name="trt8",
    layout=LAYOUT,
    steps=(
        Step(norm_in_place, "8.6 compiles a norm of the first channels for prompts, but not for one token"),
        *TRT.steps,
    ),
    demand=demand,
    takes=takes,
)
