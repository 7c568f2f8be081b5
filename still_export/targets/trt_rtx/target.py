"""TensorRT-RTX: no plugins, so bodies are inlined; engines are built without a GPU and run in the user's own programs."""

from __future__ import annotations

from functools import partial

from still_export.graph.quantization.policy import Layout
from still_export.targets.target import Target
from still_export.targets.trt.options import RTX, RtxOptions
from still_export.targets.trt.package import finish
from still_export.targets.trt.target import DTYPES
from still_export.targets.trt_rtx.replace_nonzero import replace_nonzero
from still_export.targets.trt_rtx.take_general_branches import take_general_branches
from still_graphs.conditions import known_ops, no_functions, no_int64_io, no_still_nodes, without
from still_graphs.passes.add_greedy_token import add_greedy_token, gives_next_token
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.pipelines import Pass

TRT_RTX = Target(
    RTX,
    RTX,
    DTYPES,
    Layout("TensorRT-RTX's INT4", (32, 64, 128), blocks_of_eight=True),
    RtxOptions,
    passes=(
        Pass(inline_functions, "TensorRT-RTX has no plugins", requires=known_ops, ensures=no_still_nodes),
        Pass(
            take_general_branches,
            "its builder checks both branches of an If for every shape",
            requires=no_functions,
            ensures=without("If"),
        ),
        Pass(
            replace_nonzero,
            "TensorRT-RTX has no operator whose output size depends on data",
            requires=without("If"),
            ensures=without("NonZero"),
        ),
        Pass(add_greedy_token, "greedy decoding stays on the device", ensures=gives_next_token),
        Pass(lower_integers, "hosts bind int32 alike everywhere", requires=gives_next_token, ensures=no_int64_io),
    ),
    finish=partial(finish, plugins=False),
    lacks=("Experts",),
    dtype="float16",
    built=True,
)
