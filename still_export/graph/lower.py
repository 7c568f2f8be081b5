"""From ExportedProgram to portable ONNX: standard ops, and still::* nodes that carry their function bodies."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype

from still_export.graph.decompose import decompose_simply, promote_simply
from still_export.graph.garbage import few_collections
from still_export.graph.repeat import LayersDiffer, hidden_names, repeat_layers
from still_export.graph.trace import TracedModel, trace_model
from still_export.models.read.weights import Weight, Weights, value_of
from still_export.version import __version__
from still_graphs.ops import DOMAIN, OPS, OPSET, OpSpec
from still_graphs.spec import CACHE
from still_graphs.states import EMBEDDINGS, IMAGE_INPUTS, StateTable

IR_VERSION = 10
TOLERANCES = ("_rel_tol", "_abs_tol")
"""Attributes of a constant in onnxscript's patterns."""


def _translation(spec: OpSpec) -> Callable[..., Any]:
    """A function for torch.onnx's translation table that emits one node of `spec`, absent outputs unnamed."""
    from onnxscript import values

    opset = values.Opset(spec.domain, spec.version)
    tensors = len(spec.input_names())

    def translate(*arguments: Any) -> Any:
        inputs, attributes = arguments[:tensors], arguments[tensors:]
        op = values.Op(opset, spec.name, _schema(spec))
        results = op(*inputs, **dict(zip((a.name for a in spec.attributes), attributes, strict=True)))
        return tuple(results) if len(spec.output_names()) > 1 else results

    return translate


def _schema(spec: OpSpec) -> Any:
    from onnx import defs

    kinds = {int: defs.OpSchema.AttrType.INT, float: defs.OpSchema.AttrType.FLOAT, str: defs.OpSchema.AttrType.STRING}
    optional, single = defs.OpSchema.FormalParameterOption.Optional, defs.OpSchema.FormalParameterOption.Single
    types = {"float32": "tensor(float)", "int64": "tensor(int64)", "int32": "tensor(int32)", "kept": "S"}
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    narrow = (
        [("S", [*floats, "tensor(int32)"], "states that may be narrower")] if any(s.narrow for s in spec.states) else []
    )
    options = {t.name: t.optional for t in (*spec.inputs, *spec.outputs)}
    dtypes: dict[str, str] = {t.name: t.dtype for t in (*spec.inputs, *spec.outputs)}
    for state in spec.states:
        for side in ("past", "present"):
            options[f"{side}_{state.name}"] = state.optional
            dtypes[f"{side}_{state.name}"] = "kept" if state.narrow else state.dtype

    def parameter(name: str) -> Any:
        return defs.OpSchema.FormalParameter(
            name, types.get(dtypes[name], "T"), param_option=optional if options[name] else single
        )

    return defs.OpSchema(
        spec.name,
        spec.domain,
        spec.version,
        inputs=[parameter(n) for n in spec.input_names()],
        outputs=[parameter(n) for n in spec.output_names()],
        type_constraints=[("T", floats, "activations"), *narrow],
        attributes=[defs.OpSchema.Attribute(a.name, kinds[type(a.default)], required=False) for a in spec.attributes],
    )


def portable_graph(model: Any, weights: Weights | None = None, keep: int = 1, ahead: bool = False) -> ir.Model:
    """Trace and lower `model`; equal layers are traced once if they share only hidden states.

    Args, Returns: See `trace_model` and `lower_program`.
    """
    try:
        return lower_program(trace_model(model, keep, ahead=ahead), weights)
    except LayersDiffer as error:
        logging.getLogger(__name__).info("tracing every layer: %s", error)
        return lower_program(trace_model(model, keep, whole=True, ahead=ahead), weights)


def lower_program(traced: TracedModel, weights: Weights | None = None) -> ir.Model:
    """Lower a traced model to ONNX with bare still::* nodes. Weights are read lazily.

    Args:
        traced: The model, or one with stand-ins for its weights.
        weights: Values by the model's names; None: those that were traced.

    Returns:
        Opset 23, IR 10, without function bodies (`attach_functions` adds them last). Weights have the model's names; those of products
        are stored as [in, out].

    Raises:
        LayersDiffer: Layers that seemed equal differ.
    """
    traced_ops = [s for s in OPS.values() if s.traced]
    table = {getattr(getattr(torch.ops, s.domain), s.torch_name).default: _translation(s) for s in traced_ops}
    absent = {name for s in traced.states if traced.alike[s.layer] != s.layer for name in (s.past, s.present)}
    model = onnx_of(
        traced.program,
        [name for name in traced.input_names if name not in absent],
        [*(name for name in traced.output_names if name not in absent), *hidden_names(traced.alike)],
        traced.weight_names,
        table,
    )
    with few_collections():
        repeat_layers(model, traced.alike, traced.constants, traced.input_names, traced.output_names)
    weights = traced.weights if weights is None else weights
    _drop_absent(model)
    _widen_norms(model)
    _name_dimensions(model, traced.states)
    give_weights(model, traced.weight_names, weights)
    _give_defaults(model)
    return model


def onnx_of(
    traced: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    weights: Collection[str],
    table: dict[Any, Any],
) -> ir.Model:
    """A traced program in ONNX.

    Args:
        weights: Names for the program's weights; their values are left out.
    """
    decompose_simply(traced)
    with few_collections(), promote_simply(), _without_exporter_noise():
        program = torch.onnx.export(
            traced,
            input_names=inputs,
            output_names=outputs,
            opset_version=OPSET,
            custom_translation_table=table,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert program is not None  # only with a file name
        model = program.model
        for name in set(weights).intersection(model.graph.initializers):
            model.graph.initializers[name].const_value = None  # the optimizer shall neither read nor fold weights
        with exact_constants():
            program.optimize()
        model = program.model
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "still-export", __version__
    return model


@contextlib.contextmanager
def exact_constants() -> Iterator[None]:
    """Inside the block, a constant in a rewrite rule of onnxscript matches that value alone.

    By default it matches with tolerances, so that x + 1e-8 becomes x, and so does x * 1.00001. Norms then lose a small epsilon.
    """
    from onnxscript.rewriter import _pattern_ir

    exact = property(lambda _: 0.0, lambda *_: None)  # takes precedence over the instances' own values
    for name in TOLERANCES:
        setattr(_pattern_ir.Constant, name, exact)
    try:
        yield
    finally:
        for name in TOLERANCES:
            delattr(_pattern_ir.Constant, name)


def _give_defaults(model: ir.Model) -> None:
    """Make image inputs optional: no embeddings, and positions that count tokens."""
    for value in [value for value in model.graph.inputs if value.name in IMAGE_INPUTS]:
        dtype, sizes = value.dtype or ir.DataType.FLOAT, [*(value.shape or ())]
        embeds = value.name == EMBEDDINGS
        shape: list[int | str] = [f"{value.name}_{axis}" for axis in ("batch", "tokens")]
        shape = [*shape, int(sizes[-1])] if embeds else [3, *shape]
        least = [size if isinstance(size, int) else 1 for size in shape]
        default = np.full(least, 0 if embeds else -1, dtype.numpy())
        value.shape = ir.Shape(shape)
        value.const_value = ir.tensor(default, dtype=dtype, name=value.name)
        model.graph.initializers.add(value)
        for node in [node for node, _ in value.uses() if node.op_type != "Where"]:  # traced with dimensions of 1
            node.outputs[0].shape = ir.Shape(shape)


@contextlib.contextmanager
def _without_exporter_noise() -> Iterator[None]:
    """Silence warnings of torch's exporter about optional packages and its own deprecations."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")
    ]  # onnx_ir: weights without values are no mistake
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _drop_absent(model: ir.Model) -> None:
    """Unname outputs of absent states, ONNX's way to omit them, and remove what only 8-bit caches need if there are none."""
    for node in model.graph:
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        if spec is None:
            continue
        node_inputs = dict(zip(spec.input_names(), node.inputs, strict=False))
        for name, output in zip(spec.output_names(), node.outputs, strict=True):
            past = name.replace("present_", "past_", 1)
            if past != name and node_inputs.get(past) is None:
                output.name = ""
        if (cache := node.attributes.get(CACHE.name)) is not None and cache.value == CACHE.default:
            del node.attributes[CACHE.name]
            # Absent inputs at the end are already gone.
            node.resize_outputs(len(node.outputs) - sum(state.of_codes for state in spec.states))


def _widen_norms(model: ir.Model) -> None:
    """Compute norms in their scale's type where that is wider than the input: no runtime has kernels for two types.

    Families that scale by 1 + weight have them in half precision.
    """
    for node in list(model.graph):
        if node.op_type != "RMSNormalization" or node.domain != "":
            continue
        x, scale, output = node.inputs[0], node.inputs[1], node.outputs[0]
        if x is None or scale is None or x.dtype is None or scale.dtype is None or x.dtype == scale.dtype:
            continue
        before = ir.node("Cast", [x], {"to": scale.dtype.value})
        before.outputs[0].dtype, before.outputs[0].shape = scale.dtype, x.shape
        node.replace_input_with(0, before.outputs[0])
        model.graph.insert_before(node, before)
        if output.dtype == scale.dtype:  # the nodes after it compute in it
            continue
        after = ir.node("Cast", [output], {"to": x.dtype.value})
        after.outputs[0].dtype, after.outputs[0].shape = x.dtype, output.shape
        ir.convenience.replace_all_uses_with(output, after.outputs[0])
        after.replace_input_with(0, output)
        output.dtype = scale.dtype
        model.graph.insert_after(node, after)


def _drop_trace_metadata(model: ir.Model) -> None:
    """Remove torch's stack traces and class names, which include local paths and are larger than the graph."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _name_dimensions(model: ir.Model, states: StateTable) -> None:
    """Name the free dimensions instead of torch's symbols, and those of states without rows, to which hosts may give spare rows."""
    names: dict[str, str] = {}
    growths = [(s, int(s.growth["axis"]), str(s.growth["dimension"])) for s in states if s.growth is not None]
    grown = {s.past: (axis, dimension) for s, axis, dimension in growths}
    empty = {
        name: (axis, dimension)
        for s, axis, dimension in growths
        if s.growth and not s.growth["rows"]
        for name in (s.past, s.present)
    }

    def learn(value: ir.Value, axis: int, name: str) -> None:
        if value.shape is not None and isinstance(dim := value.shape[axis], ir.SymbolicDim):
            names[str(dim.value)] = name

    for value in model.graph.inputs:
        if value.name == "input_ids":
            learn(value, 0, "batch")
            learn(value, 1, "tokens")
        elif value.name in grown:
            learn(value, *grown[value.name])
    values = {id(v): v for node in model.graph for v in (*node.inputs, *node.outputs) if v is not None}
    for value in (*values.values(), *model.graph.inputs, *model.graph.outputs):
        if value.shape is None or value.shape.frozen:
            continue
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, ir.SymbolicDim) and str(dim.value) in names:
                value.shape[axis] = names[str(dim.value)]
        if value.name in empty:
            axis, dimension = empty[value.name]
            value.shape[axis] = dimension


def _store_transposed(model: ir.Model, names: dict[str, str]) -> set[str]:
    """Store weights of products as [in, out] and drop their Transpose; returns the weights to transpose.

    A tied embedding stays as it is: the head reads it through its Transpose.
    """
    turned = set()
    for node in list(model.graph):
        weight = node.inputs[0] if node.op_type == "Transpose" and node.domain == "" else None
        if weight is None or weight.name not in names or weight.shape is None or len(weight.shape) != 2:
            continue
        if len(weight.uses()) == 1:
            weight.shape = ir.Shape(list(reversed(weight.shape)))
            ir.convenience.replace_all_uses_with(node.outputs[0], weight)
            model.graph.remove(node, safe=True)
            turned.add(weight.name)
    return turned


def give_weights(model: ir.Model, names: dict[str, str], weights: Weights) -> None:
    """Name weights as the model does, and read their values lazily.

    Args:
        names: The model's by the program's.
        weights: Values by the model's names; those of products are stored as [in, out].
    """
    turned = _store_transposed(model, names)
    given: dict[str, bool] = {}
    order = {name: place for place, name in enumerate(dict.fromkeys(names.values()))}
    for old in sorted(names.keys() & model.graph.initializers.keys(), key=lambda old: (order[names[old]], old)):
        value, name = model.graph.initializers.pop(old), names[old]
        if name in given:  # of a module that layers share
            assert given[name] == (old in turned)
            ir.convenience.replace_all_uses_with(value, model.graph.initializers[name])
            continue
        given[name] = old in turned
        value.name, value.const_value = name, lazy_tensor(name, weights[name], old in turned)
        model.graph.initializers[name] = value
    _drop_trace_metadata(model)


def lazy_tensor(name: str, weight: Weight, turned: bool = False) -> ir.LazyTensor:
    """`weight` as a lazy ONNX tensor; `turned`: transposed, as a view."""

    def read() -> TorchTensor:
        value = value_of(weight).detach()
        return TorchTensor(value.t() if turned else value, name=name)

    shape = list(reversed(weight.shape)) if turned else list(weight.shape)
    return ir.LazyTensor(read, from_torch_dtype(weight.dtype), ir.Shape(shape), name=name)
