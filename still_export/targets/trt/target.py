"""TensorRT 10 and later, strongly typed, with plugins over kernels compiled ahead of time. TensorRT 8.6 is this plus workarounds."""

from __future__ import annotations

from functools import partial

from still_export.extras import demand
from still_export.graph.merge import merge_linear_layers, merged
from still_export.graph.options import Progress
from still_export.graph.quantization.policy import Layout
from still_export.targets.target import FLOAT_WEIGHTS, SPECULATION, Target
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.package import finish
from still_export.targets.trt.plugins import cuda_headers, find_tensorrt_headers
from still_export.targets.trt.sum_products_in_float32 import products_sum_in_float32, sum_products_in_float32
from still_graphs.conditions import known_ops, no_functions, no_int64_io, plugin_nodes
from still_graphs.passes.add_greedy_token import add_greedy_token, gives_next_token
from still_graphs.passes.fix_shapes import fix_shapes, fixed_shapes
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.passes.lower_opset import lowering
from still_graphs.passes.lower_plugin_nodes import lower_plugin_nodes
from still_graphs.passes.part_head import leave_head, no_head
from still_graphs.passes.strip_functions import strip_functions
from still_graphs.pipelines import Pass

DTYPES = ("float16", "bfloat16", "float32")


def ready(options: TrtOptions, say: Progress) -> None:
    """Raise if a named folder has no headers, CUDA's headers are missing, or no kernel compiler is here."""
    demand("triton")
    if find_tensorrt_headers(options.tensorrt_include):
        cuda_headers(options.cuda_include)


lower_opset, lowered = lowering(21)
OPENING = (
    Pass(
        leave_head,
        "the runner asks no head that guesses tokens ahead",
        only=(SPECULATION,),
        requires=known_ops,
        ensures=no_head,
    ),
    Pass(
        merge_linear_layers,
        "engines whose weights can be replaced have none of their products merged by the compiler",
        only=(FLOAT_WEIGHTS,),
        requires=known_ops,
        ensures=merged,
    ),
    Pass(
        strip_functions,
        "the parser prefers a function over a plugin",
        requires=known_ops,
        ensures=no_functions,
    ),
    Pass(
        fix_shapes,
        "dimensions that are left to be computed hide which are equal, and memory is reserved for them",
        ensures=fixed_shapes,
    ),
)
GREEDY = Pass(add_greedy_token, "greedy decoding stays on the device", ensures=gives_next_token)
CLOSING = (
    Pass(
        lower_integers,
        "plugins take counts in int32, and hosts bind int32 alike everywhere",
        requires=gives_next_token,
        ensures=no_int64_io,
    ),
    Pass(
        lower_plugin_nodes,
        "plugins get declared attributes, present inputs and int32 counts",
        requires=known_ops,
        ensures=plugin_nodes,
    ),
)

TRT = Target(
    "trt",
    "trt",
    DTYPES,
    Layout("TensorRT's INT4", (64, 128)),
    TrtOptions,
    passes=(
        *OPENING,
        GREEDY,
        Pass(
            lower_opset,
            "10.3's parser reads opset 21, the first with quantized weights in blocks",
            requires=no_functions,
            ensures=lowered,
        ),
        Pass(
            sum_products_in_float32,
            "a product of 16-bit numbers may be summed in half precision",
            ensures=products_sum_in_float32,
        ),
        *CLOSING,
    ),
    finish=partial(finish, plugins=True),
    caches=("int8",),
    ready=ready,
    dtype="float16",
    speculates=True,
    runtime="trt",
    built=True,
    decode_steps=256,
)
