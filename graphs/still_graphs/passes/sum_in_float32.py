"""Let products with 16-bit weights sum in float32: MatMul becomes still::DenseMatMul.

TensorRT 8.6 sums products of prompts in half precision, whatever type their result is asked for in, and states are then 1.5 to 2.8 times as
far off as PyTorch's. A weight that is transposed (a head that is the embedding too) is read as it lies: an engine whose weights can be
replaced (REFIT) folds nothing into them and transposed it anew in each call.

requires: types and shapes of what products read.
ensures: no product of tokens [B, T, I] and a float16 weight is left to the runtime.
"""

from __future__ import annotations

from still_graphs.edits import attribute, drop_unused, is_standard, put_in_place, typed
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.ops.dense_matmul import DENSE_MATMUL


def sum_in_float32(model: ir.Model) -> int:
    """Rewrite the main graph, in place.

    Returns:
        Number of products.
    """
    graph = model.graph
    count = 0
    for node in list(graph):
        if (parts := _parts(node)) is None:  # asked here: what a product reads may be one that was just replaced
            continue
        count += 1
        tokens, weight, turned = parts
        product = ir.node(
            DENSE_MATMUL.name, [tokens, None, weight] if turned else [tokens, weight], domain=DOMAIN, name=node.name
        )
        graph.insert_before(node, product)
        old, new = node.outputs[0], product.outputs[0]
        put_in_place(old, new)
        if new.type is None:  # which nothing infers behind a node of ours
            assert tokens.shape is not None and weight.shape is not None
            typed(new, [*tokens.shape[:2], weight.shape[0 if turned else 1]], ir.DataType.FLOAT16)
        graph.remove(node, safe=True)
    if count:
        graph.opset_imports[DOMAIN] = DENSE_MATMUL.version
        drop_unused(graph)
    return count


def sums_in_float32(model: ir.Model) -> str:
    """No product in half precision is left to the runtime."""
    left = [str(node.name) for node in model.graph if _parts(node) is not None]
    return f"products that sum in half precision, {', '.join(left[:3])}" if left else ""


def _parts(node: ir.Node) -> tuple[ir.Value, ir.Value, bool] | None:
    """Tokens and weight of a product in half precision, and whether the weight lies transposed; None: it is something else."""
    if not is_standard(node, "MatMul"):
        return None
    tokens, weight = node.inputs
    maker = None if weight is None else weight.producer()
    turned = maker is not None and is_standard(maker, "Transpose") and list(attribute(maker, "perm", [1, 0])) == [1, 0]
    if turned and maker is not None:
        weight = maker.inputs[0]
    if tokens is None or weight is None or not weight.is_initializer() or weight.shape is None:
        return None
    halves = tokens.dtype == weight.dtype == ir.DataType.FLOAT16
    return (tokens, weight, turned) if halves and len(weight.shape) == 2 and len(tokens.shape or ()) == 3 else None
