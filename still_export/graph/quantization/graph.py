"""Replace products and rows of weights by those of quantized weights, which are rounded when written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from still_export.errors import UnsupportedError
from still_export.graph.lower import lazy_tensor
from still_export.graph.quantization.experts import STACKED, StackedWeight, quantize_experts
from still_export.graph.quantization.forms import K_QUANT, ROWS, Form
from still_export.graph.quantization.gemm import PRODUCTS, Float8Product, SuperBlockProduct, store_super_blocks
from still_export.graph.quantization.policy import HALF, Quantization, account
from still_export.graph.quantization.stored import StoredWeight, cast_value, replace_nodes, store_values
from still_export.graph.weights_file import VIEW
from still_export.models.read.checkpoint import in_range
from still_export.models.read.weights import Deferred, Weight, Weights, value_of
from still_graphs.edits import CONTRIB, add_node, store, typed
from still_graphs.spec import DOMAIN
from still_kernels.gather_nbits.spec import GATHER_NBITS


def quantize_graph(
    model: ir.Model,
    weights: Weights,
    roles: Mapping[str, str],
    policy: Quantization,
    forms: Mapping[str, Form],
    rounded: dict[str, float],
) -> dict[str, Any]:
    """Replace the nodes that read weights that the policy quantizes, in place.

    Args:
        model: From `lower_program`; its initializers have the model's names.
        weights: Values by those names, [N, K].
        rounded: Filled during writing: relative errors of weights whose codes in the source are rounded again.

    Raises:
        UnsupportedError: A weight is read in a way that has no quantized form.
    """
    groups: dict[tuple[object, ...], list[tuple[StoredWeight, ir.Node]]] = {}
    gathers: list[tuple[StoredWeight, ir.Node]] = []
    stacks: dict[str, StackedWeight] = {}
    for name, form in forms.items():
        if form.bits == HALF:
            _halve(model, name, weights[name])
            continue
        if weights[name].dim() == STACKED:
            stacks[name] = StackedWeight(name, weights[name], form, policy, rounded)
            continue
        weight = StoredWeight(name, weights[name], form, policy, roles[name], rounded)
        products, rows = _readers(model, weight)
        alone = name if form.base is None or len(products) + len(rows) > 1 else ""
        order = None if form.order is None else form.order.tobytes()
        for node in products:
            stored = (form.zero_points, form.half_scales, form.super_blocks)
            kind = (alone or id(node.inputs[0]), form.bits, *stored, weight.dtype, order)
            groups.setdefault(kind, []).append((weight, node))
        gathers += [(weight, node) for node in rows]
    places = []
    for group in groups.values():
        usual = Float8Product if policy.float8 else PRODUCTS[policy.layout.nodes]
        kind_of = SuperBlockProduct if group[0][0].form.super_blocks else usual
        product = kind_of(model, list(dict.fromkeys(weight for weight, _ in group)))
        product.write([node for _, node in group])
        places += [product.place] if product.place else []
    for weight, node in gathers:  # after the products: rows of a tied embedding use the head's blocks
        (_write_super_rows if weight.form.super_blocks else _write_rows)(model, weight, node)
    quantize_experts(model, stacks)
    for domain in {
        PRODUCTS[policy.layout.nodes].domain,
        CONTRIB if any(not w.form.super_blocks for w, _ in gathers) else "",
    } - {""}:
        model.graph.opset_imports[domain] = 1
    made = {name: (form.bits if form.base is not None else None, form.method) for name, form in forms.items()}
    return account(policy, roles, made, places)


def _readers(model: ir.Model, weight: StoredWeight) -> tuple[list[ir.Node], list[ir.Node]]:
    """The products and the Gathers that read a weight; the weight is removed from the graph."""
    value = model.graph.initializers.pop(weight.name)
    weight.dtype = value.dtype or ir.DataType.FLOAT
    products: list[ir.Node] = []
    rows: list[ir.Node] = []
    for node, index in [(node, index) for node, index in value.uses()]:
        if node.op_type == "MatMul" and index == 1:
            products.append(node)
        elif node.op_type == "Transpose":
            products += [product for product, _ in node.outputs[0].uses()]
        elif node.op_type == "Gather" and index == 0:
            rows.append(node)
        else:
            raise UnsupportedError(
                f"{weight.name} is read by {node.op_type}, which has no form with quantized weights. Export without --quantize."
            )
    return products, rows


def _halve(model: ir.Model, name: str, weight: Weight) -> None:
    """Store a weight in float16 and cast it."""
    value = model.graph.initializers[name]
    if value.dtype != ir.DataType.FLOAT:
        return
    half = Deferred(weight.shape, torch.float16, lambda: in_range(name, value_of(weight).detach(), torch.float16))
    stored = store(model.graph, lazy_tensor(f"{name}.half", half))
    ir.convenience.replace_all_uses_with(value, cast_value(model, stored, ir.DataType.FLOAT))
    del model.graph.initializers[name]


def _write_rows(model: ir.Model, weight: StoredWeight, node: ir.Node) -> None:
    """Replace rows of a weight; if tied, reuse the head's bytes in another shape."""
    name, initializers = weight.name, model.graph.initializers
    if f"{name}.{ROWS}" not in initializers:
        head = initializers.get(f"{name}.blocks")
        shape = [weight.outputs, weight.inputs * weight.form.bits // 8]
        if head is None:
            blocks = [weight.outputs, weight.blocks]
            store_values(model, f"{name}.{ROWS}", shape, ir.DataType.UINT8, lambda: weight.made.packed.reshape(shape))
            scales = store_values(model, f"{name}.scales", blocks, weight.scale_type, partial(_last_scales, weight))
            if weight.scale_type != weight.dtype:
                cast_value(model, scales, weight.dtype)
        else:
            assert head.const_value is not None
            values = head.const_value.numpy
            rows = store_values(
                model, f"{name}.{ROWS}", shape, ir.DataType.UINT8, lambda: values().view(np.uint8).reshape(shape)
            )
            rows.metadata_props[VIEW] = f"{name}.blocks"
    scales = initializers[f"{name}.scales"]
    casts = [use.outputs[0] for use, _ in scales.uses() if use.op_type == "Cast"]
    if scales.dtype != weight.dtype and not casts:  # kernels of ours read them as they are
        casts = [cast_value(model, scales, weight.dtype)]
    attributes = {
        "gather_axis": 0,
        "quantize_axis": 1,
        "bits": weight.form.bits,
        "block_size": weight.policy.block_size,
    }
    inputs = [initializers[f"{name}.{ROWS}"], node.inputs[1], casts[0] if casts else scales]
    replace_nodes(
        model, [node], [add_node(model.graph, node, "GatherBlockQuantized", inputs, ROWS, attributes, CONTRIB)]
    )


def _write_super_rows(model: ir.Model, weight: StoredWeight, node: ir.Node) -> None:
    """Replace rows of K-quants; if tied, the head's."""
    initializers, part = model.graph.initializers, K_QUANT[weight.form.bits]
    tensors = [initializers.get(f"{weight.name}.{name}") for name in (part, "numbers")]
    if None in tensors:
        tensors = [*store_super_blocks(model, weight.name, [weight]).values()]
    indices, attributes = node.inputs[1], {"bits": weight.form.bits}
    found = add_node(model.graph, node, GATHER_NBITS.name, [indices, *tensors], ROWS, attributes, DOMAIN)
    assert indices is not None
    shape = [*(indices.shape or (None, None)), weight.inputs]
    replace_nodes(model, [node], [typed(found, shape, weight.dtype)])


def _last_scales(weight: StoredWeight) -> np.ndarray:
    """A weight's scales, written after its codes, so that it can be dropped."""
    scales = np.ascontiguousarray(weight.made.scales.astype(weight.scale_type.numpy()))
    weight.forget()
    return scales
