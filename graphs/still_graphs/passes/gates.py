"""Recognizes the gate of a feed-forward layer: silu(gate) * up, the halves of one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from still_graphs.passes.walk import Readers, only_reader


def gated_halves(
    product: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], users: Readers, dims: Mapping[str, Sequence[object]]
) -> onnx.NodeProto | None:
    """The Split whose halves, of one known size and read by nothing else, `product` makes silu(gate) * up of."""
    if product.op_type != "Mul":
        return None
    for silu, up in (product.input, tuple(reversed(product.input))):
        bent = makers.get(silu)
        if bent is None or bent.op_type != "Mul" or only_reader(users, silu, "Mul") is None:
            continue
        for gate, sigmoid in (bent.input, tuple(reversed(bent.input))):
            split, made = makers.get(gate), makers.get(sigmoid)
            if made is None or made.op_type != "Sigmoid" or only_reader(users, sigmoid, "Mul") is None:
                continue
            if list(made.input) != [gate] or len(users[gate]) != 2:
                continue
            if split is None or split.op_type != "Split" or list(split.output) != [gate, up] or len(users[up]) != 1:
                continue
            halves = [dims.get(name, [None])[-1] for name in split.output]
            if len(set(halves)) == 1 and isinstance(halves[0], int):
                return split
    return None
