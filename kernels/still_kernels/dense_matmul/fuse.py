"""Replace MatMul with 16-bit weights by still::DenseMatMul, which sums in float32 and includes a norm and a residual.

TensorRT 8.6 sums products of prompts in half precision for any requested output type. Errors of states are then 1.5 to 2.8 times PyTorch's.
A transposed weight (a head that shares the embedding) is read as stored: an engine with replaceable weights (REFIT) folds nothing into them
and transposed it in each call. TensorRT 8.6 compiles the nodes between two plugins separately, a second each, and runs them in separate
launches. Launches dominate a decode step of a small model.

requires: types and shapes of the products' inputs; RMSNormalization as in ai.onnx since opset 23.
ensures: the runtime computes no product of tokens [B, T, I] and a float16 weight; no norm of tokens has one product as its only reader; no
sum of activations and a product that is used once and has no residual is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.conditions import no_functions
from still_graphs.edits import attribute, drop_unused, is_standard, is_weight, on_last, put_in_place, rank, typed
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Fusion, Match, Op, Val, fusing
from still_graphs.pipelines import PLUGINS, Pass
from still_kernels.dense_matmul.spec import DENSE_MATMUL


def sum_in_float32(model: ir.Model) -> int:
    """Rewrite the main graph, in place, and return the number of products."""
    graph = model.graph
    count = 0
    for node in list(graph):
        if (parts := _parts(node)) is None:  # not earlier: an input of the product may have just been replaced
            continue
        count += 1
        tokens, weight, turned = parts
        product = ir.node(
            DENSE_MATMUL.name, [tokens, None, weight] if turned else [tokens, weight], domain=DOMAIN, name=node.name
        )
        graph.insert_before(node, product)
        old, new = node.outputs[0], product.outputs[0]
        put_in_place(old, new)
        if new.type is None:  # unknown after a still node
            assert tokens.shape is not None and weight.shape is not None
            typed(new, [*tokens.shape[:2], weight.shape[0 if turned else 1]], ir.DataType.FLOAT16)
        graph.remove(node, safe=True)
    if count:
        graph.opset_imports[DOMAIN] = DENSE_MATMUL.version
        drop_unused(graph)
    return count


def sums_in_float32(model: ir.Model) -> str:
    """The runtime computes no product in half precision."""
    left = [str(node.name) for node in model.graph if _parts(node) is not None]
    return f"products that sum in half precision, {', '.join(left[:3])}" if left else ""


def _parts(node: ir.Node) -> tuple[ir.Value, ir.Value, bool] | None:
    """Tokens and weight of a product in half precision, and whether the weight is transposed; None for other nodes."""
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


NAMES = DENSE_MATMUL.input_names()
EPSILON = DENSE_MATMUL.attributes[0].name
NORM, RESIDUAL = NAMES.index("norm_weight"), NAMES.index("residual")


X, SCALE, OTHER = Val(), Val(is_weight), Val(lambda value: not is_weight(value))
NORMED = Op("RMSNormalization", X, SCALE)
OF_NORM = Op(DENSE_MATMUL.name, NORMED, ..., domain=DOMAIN)
PRODUCT = Op(DENSE_MATMUL.name, ..., domain=DOMAIN)
TOTAL = Op("Add", PRODUCT, OTHER)


def _present(node: ir.Node, place: int) -> bool:
    return len(node.inputs) > place and node.inputs[place] is not None


def _takes_norm(match: Match) -> bool:
    kinds = {match.value(pattern).dtype for pattern in (X, SCALE, OF_NORM)}
    free = not _present(match.node(OF_NORM), NORM)
    return (
        free and rank(match.value(X)) == 3 and on_last(match.node(NORMED), -1) and len(kinds) == 1 and None not in kinds
    )


def _with_norm(match: Match) -> Sequence[ir.Value]:
    epsilon = match.node(NORMED).attributes.get_float("epsilon", 1e-5)
    inputs = {0: match.value(X), NORM: match.value(SCALE)}
    return _changed(match, match.node(OF_NORM), inputs, {EPSILON: epsilon})


def _takes_residual(match: Match) -> bool:
    made, other, total = (match.value(pattern) for pattern in (PRODUCT, OTHER, TOTAL))
    # One that has a residual already, as the second of a LoRA pair has its base's product, keeps it.
    free = other is not made and not _present(match.node(PRODUCT), RESIDUAL)
    return free and other.dtype == total.dtype is not None and other.shape == made.shape


def _with_residual(match: Match) -> Sequence[ir.Value]:
    return _changed(match, match.node(PRODUCT), {RESIDUAL: match.value(OTHER)}, {})


def _changed(
    match: Match, node: ir.Node, inputs: dict[int, ir.Value], attributes: dict[str, float]
) -> Sequence[ir.Value]:
    """`node` with other inputs, by index, and more attributes."""
    node_inputs: list[ir.Value | None] = [*node.inputs, *[None] * (max(inputs) + 1 - len(node.inputs))]
    for place, value in inputs.items():
        node_inputs[place] = value
    return match.add(
        DENSE_MATMUL.name, node_inputs, {**node.attributes, **attributes}, name=node.name or "", domain=DOMAIN
    )


FUSIONS = Fusion((OF_NORM,), _with_norm, _takes_norm), Fusion((TOTAL,), _with_residual, _takes_residual)
LINEAR_LAYERS = fusing("fuse_linear_layers", "what lies between two plugins is compiled and launched apart", *FUSIONS)
fuse_linear_layers = LINEAR_LAYERS.run

PASSES = {
    PLUGINS: (
        Pass(
            sum_in_float32,
            "8.6 sums products of prompts in half precision",
            requires=no_functions,
            ensures=sums_in_float32,
        ),
        LINEAR_LAYERS,
    )
}
