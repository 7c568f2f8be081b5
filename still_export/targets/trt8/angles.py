"""Remove whole turns from angles before sine and cosine.

TensorRT 8.6 computes both by the GPU's fast instructions, whose error grows with the angle: keys that are turned by their position erred by
4.5e-7 times it, 0.03 behind 65,536 tokens, where an angle of at most half a turn errs by 5e-7.

requires: the types of their inputs known.
ensures: every Sin and Cos of the main graph in float32 reads an angle without whole turns.
"""

from __future__ import annotations

import math

from still_graphs.edits import Writer, is_standard
from still_graphs.later_ir import ir

WAVES = ("Sin", "Cos")
TURN = (6.28125, 253 / 2**17, 2 * math.pi - 6.28125 - 253 / 2**17)
"""Parts of a turn: the first two have so few bits that their products with up to 65,536 turns are exact in float32."""
LEFT = ".part_of_a_turn"


def reduce_angles(model: ir.Model) -> int:
    """Insert the reduction before them, once for each angle, in place."""
    writer, reduced = Writer(model.graph), dict[ir.Value, ir.Value]()
    whole = _whole(model)
    for node in whole:
        angle = node.inputs[0]
        assert angle is not None
        if angle not in reduced:
            writer.place = node
            reduced[angle] = _part_of_a_turn(writer, angle)
        node.replace_input_with(0, reduced[angle])
    return len(whole)


def angles_reduced(model: ir.Model) -> str:
    """No sine or cosine reads an angle with whole turns."""
    left = [str(node.name) for node in _whole(model)]
    return f"sines and cosines of whole turns, {', '.join(left[:3])}" if left else ""


def _whole(model: ir.Model) -> list[ir.Node]:
    """Nodes whose angle may include whole turns."""
    return [
        node
        for node in model.graph
        if is_standard(node, *WAVES)
        and (angle := node.inputs[0]) is not None
        and angle.dtype == ir.DataType.FLOAT
        and not str(angle.name).endswith(LEFT)
    ]


def _part_of_a_turn(writer: Writer, angle: ir.Value) -> ir.Value:
    """The angle minus its whole turns, subtracted in parts, so that no bits are lost."""
    name = str(angle.name)

    def of(op: str, value: ir.Value, other: ir.Value | float | None, hint: str) -> ir.Value:
        constant = writer.constant(other, "float32") if isinstance(other, float) else other
        result = writer.node(op, [value] if constant is None else [value, constant], hint=f"{name}{hint}")
        result.shape, result.type = angle.shape, ir.TensorType(ir.DataType.FLOAT)
        return result

    turns = of("Round", of("Mul", angle, 1 / (2 * math.pi), ".in_turns"), None, ".turns")
    for place, part in enumerate(TURN):
        last = place == len(TURN) - 1
        angle = of("Sub", angle, of("Mul", turns, part, ".whole"), LEFT if last else ".less")
    return angle
