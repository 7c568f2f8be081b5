"""Body of a node whose states are joined in two tensors. It splits them, calls the op's own function, and joins the results.

The first tensor has the states of the activations' type, or words of codes. The second has the float32 states, including scales of codes.
States are in the order of the OpSpec. All rows of a state come before the next state, so that a kernel reads each state in place
(plugins/onnxruntime/joined_states.h).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from still_graphs.functions.builder import Scope
from still_graphs.functions.codes import has_codes
from still_graphs.ops import OpSpec

PREFIX = "Joined"
"""Prefix of the op's name."""
STATES = "states"
"""Attribute "STATE:3,128,64;...": the node's states in order, with all dimensions except the batch."""
PARTS = ("first", "second")
"""Names of the tensors in `past_<part>` and `present_<part>`."""


def part_of(spec: OpSpec, state: str) -> int:
    """Index of the state's tensor: 0 or 1."""
    return int(spec.state(state).dtype == "float32")


def written(shapes: Mapping[str, Sequence[int]]) -> str:
    """The attribute `STATES`; `shapes` has all dimensions except the batch."""
    return ";".join(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())


def joined_body(
    node: onnx.NodeProto, spec: OpSpec, overload: str, shapes: Mapping[str, Sequence[int]], opset: int
) -> onnx.FunctionProto:
    """The function of the joined form of `node`.

    Args:
        node: The node with separate states; it names a function of the model.
        shapes: The node's states in order, with all dimensions except the batch.
    """
    b = Scope()
    plain, results = [t.name for t in spec.inputs], [t.name for t in spec.outputs]
    batch = b("Shape", plain[0], start=0, end=1)
    flat = [b("Reshape", f"past_{part}", [-1]) for part in PARTS]
    offsets, inner = [0, 0], {}
    for name, shape in shapes.items():
        which, size = part_of(spec, name), math.prod(shape)
        begin, end = (b("Mul", batch, [offset]) for offset in (offsets[which], offsets[which] + size))
        piece = b("Slice", flat[which], begin, end, [0])
        # A state may have no rows; 0 means 0 here.
        inner[name] = b("Reshape", piece, b("Concat", batch, list(shape), axis=0), allowzero=1)
        offsets[which] += size
    names = [name if value else "" for name, value in zip(plain, node.input, strict=False)]
    states = [s for s in spec.states if has_codes(node) or not s.of_codes]
    call = helper.make_node(
        node.op_type,
        [*names, *(inner.get(s.name, "") for s in states)],
        [*results, *(f"new_{s.name}" if s.name in inner else "" for s in states)],
        domain=node.domain,
        overload=node.overload,
    )
    call.attribute.extend(node.attribute)
    b.nodes.append(call)
    for index, part in enumerate(PARTS):
        pieces = [b("Reshape", f"new_{name}", [-1]) for name in shapes if part_of(spec, name) == index]
        b("Reshape", b("Concat", *pieces, axis=0), b("Shape", f"past_{part}"), out=f"present_{part}")
    for name, value in zip(plain, names, strict=True):
        if not value:  # ONNX Runtime derives a function's schema from its nodes: a dead use of what may be absent
            b("Clip", "past_length", name, None)
    return helper.make_function(
        node.domain,
        PREFIX + node.op_type,
        [*plain, *(f"past_{part}" for part in PARTS)],
        [*results, *(f"present_{part}" for part in PARTS)],
        b.nodes,
        [helper.make_opsetid("", opset), helper.make_opsetid(spec.domain, spec.version)],
        [],
        overload=overload,
    )
