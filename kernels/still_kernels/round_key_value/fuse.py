"""Fuse the rounding of keys and values for 8-bit caches: still::RoundKeyValue.

TensorRT 8.6 runs it in 18 launches per layer, which cost a decode step more than small caches save.

requires: the rounding of still_kernels.codes.rounded, traced; types and shapes of keys and values declared.
ensures: no attention reads keys and values [B, T, HK, D], float16 or bfloat16, that other nodes round in this way.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import in_half, rank, width
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS
from still_graphs.patterns import Either, Fusion, Match, Op, Val, fusing
from still_graphs.pipelines import PLUGINS
from still_kernels.round_key_value.spec import ROUND_KEY_VALUE

NAMES = ROUND_KEY_VALUE.input_names()


def _is_steps(value: ir.Value) -> bool:
    from still_graphs.functions.codes import STEPS  # imports onnx, which programs that run packages lack

    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().item()) == STEPS


def _rounded(value: Val) -> Op:
    """The nodes of still_kernels.codes.rounded for a value."""
    wide, steps = Op("Cast", value), Val(_is_steps)
    largest = Op("Clip", Op("ReduceMax", Op("Abs", wide), ...), ...)
    scale = Op("Div", largest, Either(Op("Expand", steps, ...), steps))
    return Op("Cast", Op("Mul", Op("Round", Op("Div", wide, scale)), scale))


SOURCES = Val(lambda value: rank(value) == 4), Val(lambda value: rank(value) == 4)
ROUNDED = _rounded(SOURCES[0]), _rounded(SOURCES[1])


def _attention(match: Match) -> ir.Node | None:
    """The first node that reads both as its keys and values."""
    key, value = match.results
    for node, place in key.uses():
        names = OPS[node.op_type].input_names() if node.domain == DOMAIN else []
        if set(NAMES) <= set(names) and [node.inputs[names.index(name)] for name in NAMES] == [key, value]:
            return node if names[place] == NAMES[0] else None
    return None


def _is_pair(match: Match) -> bool:
    both = [*match.results, *(match.value(source) for source in SOURCES)]
    alike = width(both[0]) > 0 and all(value.shape == both[0].shape for value in both)
    return alike and in_half(*both) and _attention(match) is not None


def _replace(match: Match) -> Sequence[ir.Value]:
    attention = _attention(match)
    assert attention is not None
    name = f"{attention.name}.rounding"
    return match.add(ROUND_KEY_VALUE.name, [match.value(x) for x in SOURCES], name=name, domain=DOMAIN, outputs=2)


PAIR = Fusion((ROUNDED[0], ROUNDED[1]), _replace, _is_pair, alone=False)
PASS = fusing("fuse_rounding", "the same of caches in 8 bits", PAIR)
fuse_rounding = PASS.run

AFTER = ("rotary_qkv",)
PASSES = {PLUGINS: (PASS,)}
