"""Function body of still::HybridAttention."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_kernels.hybrid_attention.body.decode import DecodeIndex, write_decode
from still_kernels.hybrid_attention.body.general import General
from still_kernels.hybrid_attention.body.layer import Layer
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a short branch for plain decode steps, a general one for everything else."""
    scope = Scope()
    layer = Layer(node, dtype, dims, scope)
    names = [n for n, value in zip(HYBRID_ATTENTION.output_names(), node.output, strict=False) if value]
    types = [FLOAT if n.endswith(("_score", "_state")) else dtype for n in names]

    def branch(suffix: str) -> tuple[Scope, dict[str, str]]:
        return Scope(scope), {n: f"{n}_{suffix}" for n in names}

    index = DecodeIndex(layer) if layer.local == "chunked" else None
    general, general_names = branch("general")
    General(general, layer).write(general_names)
    general_graph = general.graph("general", list(zip(general_names.values(), types, strict=True)))
    if index:
        short, short_names = branch("decode")
        write_decode(short, layer, index, short_names)
        short_graph = short.graph("decode", list(zip(short_names.values(), types, strict=True)))
        scope.multi("If", index.condition, out=names, then_branch=short_graph, else_branch=general_graph)
    else:
        scope.nodes.extend(general_graph.node)
        for name in names:
            scope("Identity", general_names[name], out=name)
    return scope.function(HYBRID_ATTENTION, node, {"": opset}, "past_length")


BODY = Body(function_body, ("H", "HK", "D", "F", "WH"))
