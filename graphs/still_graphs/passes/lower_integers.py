"""Replace int64 inputs and outputs of the graph by int32 ones.

TensorRT 8.6 has no int64, and plugins have int32 counts. Token ids and lengths fit. Inner values stay int64, which every parser reads (8.6
as int32). An output that is the sum of inputs, such as lengths, becomes int32 without casts.

requires: inputs and outputs declare their types.
ensures: no int64 input or output; the names are unchanged.
"""

from __future__ import annotations

from still_graphs.edits import Writer, is_standard
from still_graphs.later_ir import ir


def lower_integers(model: ir.Model) -> int:
    """Turn int64 inputs and outputs of the main graph into int32, in place."""
    graph, writer = model.graph, Writer(model.graph)
    int32, int64 = ir.DataType.INT32, ir.DataType.INT64
    writer.place = graph[0]
    narrow: dict[ir.Value | None, ir.Value] = {}
    for value in [v for v in graph.inputs if v.dtype == int64]:
        cast = writer.node("Cast", [], hint=f"{value.name}.int64", to=int64)
        value.replace_all_uses_with(cast)
        maker = cast.producer()
        assert maker is not None
        maker.resize_inputs(1)
        maker.replace_input_with(0, value)
        value.dtype = int32
        narrow[cast] = value
    writer.place = None
    wide = [(i, v) for i, v in enumerate(graph.outputs) if v.dtype == int64]
    for index, value in wide:
        maker, name = value.producer(), value.name
        assert maker is not None
        if is_standard(maker, "Add") and not value.uses() and all(term in narrow for term in maker.inputs):
            for position, term in enumerate(maker.inputs):
                maker.replace_input_with(position, narrow[term])
            value.dtype = int32
        else:
            value.name = writer.fresh(f"{name}.int64")
            graph.outputs[index] = cast = writer.node("Cast", [value], name, to=int32)
            cast.shape, cast.dtype = value.shape, int32
    return len(narrow) + len(wide)
