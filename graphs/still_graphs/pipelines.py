"""What each target can take, and the ordered passes that bring a portable graph there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from still_graphs.conditions import (
    Condition,
    known_ops,
    no_functions,
    no_int64_io,
    no_still_nodes,
    plugin_nodes,
    without,
)
from still_graphs.errors import UnsupportedError
from still_graphs.passes.add_greedy_token import add_greedy_node, add_greedy_token
from still_graphs.passes.fix_shapes import fix_shapes
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.passes.join_gates import join_all_gates, join_gates
from still_graphs.passes.join_heads import join_heads
from still_graphs.passes.join_low_rank import join_low_rank
from still_graphs.passes.join_norms import join_norms
from still_graphs.passes.join_products import join_products
from still_graphs.passes.join_rotary import join_rotary
from still_graphs.passes.join_rotary_embeddings import join_rotary_embeddings
from still_graphs.passes.join_rounding import join_rounding
from still_graphs.passes.join_states import join_states
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.passes.lower_opset import lower_opset, lowered
from still_graphs.passes.lower_plugin_nodes import lower_plugin_nodes
from still_graphs.passes.replace_nonzero import replace_nonzero
from still_graphs.passes.strip_functions import strip_functions
from still_graphs.passes.sum_in_float32 import sum_in_float32
from still_graphs.passes.take_general_branches import take_general_branches
from still_graphs.passes.take_lengths_from_mask import take_lengths_from_mask
from still_graphs.passes.widen_sigmoids import widen_sigmoids


@dataclass(frozen=True)
class Step:
    """One pass of a pipeline: `run` edits a model in place and counts its changes; `reason` says why the target needs it.

    `requires` and `ensures` hold before and after it (still_graphs.conditions); None: nothing beyond what all graphs have.
    """

    run: Callable[[onnx.ModelProto], int]
    reason: str
    one_row: bool = False  # only for a model that is to run one row (sequence) at a time
    requires: Condition | None = None
    ensures: Condition | None = None

    @property
    def name(self) -> str:
        """Name of the pass."""
        return self.run.__name__


@dataclass(frozen=True)
class Target:
    """Capabilities of a target and the way to it.

    Args:
        name: As in `--to`.
        plugins: Runs still:: nodes as plugins; else their bodies run.
        dtypes: Activation types that it computes in.
        steps: Passes in order.
    """

    name: str
    plugins: bool
    dtypes: tuple[str, ...]
    steps: tuple[Step, ...]


ORT_CUDA = "onnx-cuda"
"""ONNX Runtime where a package has kernels for its CUDA provider; its CPU provider runs the bodies of what is joined."""

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "trt",
            plugins=True,
            dtypes=("float16", "bfloat16", "float32"),
            steps=(
                Step(
                    strip_functions,
                    "the parser prefers a function over a plugin",
                    requires=known_ops,
                    ensures=no_functions,
                ),
                Step(fix_shapes, "8.6 reserves memory for dimensions that are left to be computed"),
                Step(join_heads, "8.6 tries each part of a model in one layout instead of two", one_row=True),
                Step(add_greedy_token, "greedy decoding stays on the device"),
                Step(sum_in_float32, "8.6 sums products of prompts in half precision"),
                Step(join_products, "8.6 compiles and launches what lies between two plugins apart"),
                Step(join_norms, "the same between products that do not take norms"),
                Step(join_gates, "the same between the products of a feed-forward layer in few bits"),
                Step(join_rotary, "the same between a product and its attention"),
                Step(join_rounding, "the same of caches in 8 bits"),
                Step(
                    lower_opset,
                    "TensorRT 8.6 reads opset 17, and so do all later versions; quantized weights, for 10 and later, need 21",
                    requires=no_functions,
                    ensures=lowered,
                ),
                Step(widen_sigmoids, "8.6 finds no kernels for a part with sigmoids of two types"),
                Step(lower_integers, "8.6 has no int64, and hosts bind int32 alike everywhere", ensures=no_int64_io),
                Step(
                    lower_plugin_nodes,
                    "plugins get declared attributes, present inputs and int32 counts",
                    requires=known_ops,
                    ensures=plugin_nodes,
                ),
            ),
        ),
        Target(
            "trt-rtx",
            plugins=False,
            dtypes=("float16", "bfloat16", "float32"),
            steps=(
                Step(inline_functions, "TensorRT-RTX has no plugins", requires=known_ops, ensures=no_still_nodes),
                Step(
                    take_general_branches,
                    "its builder checks both branches of an If for every shape",
                    requires=no_functions,
                    ensures=without("If"),
                ),
                Step(
                    replace_nonzero,
                    "TensorRT-RTX has no operator whose output size depends on data",
                    ensures=without("NonZero"),
                ),
                Step(add_greedy_token, "greedy decoding stays on the device"),
                Step(lower_integers, "hosts bind int32 alike everywhere", ensures=no_int64_io),
            ),
        ),
        Target(
            ORT_CUDA,
            plugins=True,
            dtypes=("float16", "bfloat16", "float32"),
            steps=(
                Step(join_low_rank, "its CUDA provider launches what lies between two products node by node"),
                Step(join_rotary_embeddings, "the same between a product and its attention"),
                Step(join_all_gates, "the same of the gate of a feed-forward layer"),
                Step(add_greedy_node, "greedy decoding stays on the device"),
            ),
        ),
        Target(
            "genai",
            plugins=False,
            dtypes=("float32", "float16"),
            steps=(
                Step(join_states, "it keeps two tensors of fixed size a layer", requires=known_ops),
                Step(take_lengths_from_mask, "it gives an attention mask, and no lengths"),
            ),
        ),
    )
}
"""Every target with a pipeline, by name."""


def run_pipeline(
    model: onnx.ModelProto,
    target: str,
    dump: Callable[[str, onnx.ModelProto], None] | None = None,
    *,
    one_row: bool = False,
) -> dict[str, int]:
    """Run the passes of `target` over `model`, in place.

    Args:
        model: A portable graph; its weights may lie in files beside it.
        target: Name of a target.
        dump: Called with each pass's name and its result.
        one_row: The model is to run one row (sequence) at a time.

    Returns:
        Changes by pass.

    Raises:
        UnsupportedError: The target is unknown or cannot take the graph; the message names the pass.
    """
    if target not in TARGETS:
        raise UnsupportedError(f"target {target!r} has no pipeline; known: {', '.join(TARGETS)}.")
    counts = {}
    for step in TARGETS[target].steps:
        if step.one_row and not one_row:
            continue
        _demand(step.requires, model, f"before the pass {step.name}")
        try:
            counts[step.name] = step.run(model)
        except UnsupportedError as error:
            raise UnsupportedError(f"pass {step.name}: {error}") from error
        _demand(step.ensures, model, f"after the pass {step.name}")
        if dump is not None:
            dump(step.name, model)
    return counts


def _demand(condition: Condition | None, model: onnx.ModelProto, when: str) -> None:
    """Raise UnsupportedError where the graph is not what a pass needs or promises."""
    wrong = condition(model) if condition is not None else ""
    if wrong:
        raise UnsupportedError(f"{when} the graph has {wrong}. Write the graph after each pass with --dump-dir.")
