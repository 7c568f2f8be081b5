"""From ExportedProgram to portable ONNX: standard ops, and still::* nodes that carry their function bodies."""

from __future__ import annotations

import ast
import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch

import still_export
from still_export.export.trace import TracedModel
from still_graphs.ops import DOMAIN, OPS, OpSpec
from still_graphs.states import StateTable

OPSET = 23
IR_VERSION = 10


def _translation(spec: OpSpec) -> Callable[..., Any]:
    """A function for torch.onnx's translation table that emits one node of `spec`, absent outputs unnamed."""
    from onnxscript import values

    opset = values.Opset(spec.domain, spec.version)
    tensors = len(spec.input_names())

    def translate(*arguments: Any) -> tuple[Any, ...]:
        inputs, attributes = arguments[:tensors], arguments[tensors:]
        op = values.Op(opset, spec.name, _schema(spec))
        results = op(*inputs, **dict(zip((a.name for a in spec.attributes), attributes, strict=True)))
        return tuple(results)

    return translate


def _schema(spec: OpSpec) -> Any:
    """The op's schema for onnxscript, made from its OpSpec."""
    from onnx import defs

    kinds = {int: defs.OpSchema.AttrType.INT, float: defs.OpSchema.AttrType.FLOAT, str: defs.OpSchema.AttrType.STRING}
    optional, single = defs.OpSchema.FormalParameterOption.Optional, defs.OpSchema.FormalParameterOption.Single
    types = {"float32": "tensor(float)", "int64": "tensor(int64)"}
    options = {t.name: t.optional for t in (*spec.inputs, *spec.outputs)}
    dtypes = {t.name: t.dtype for t in (*spec.inputs, *spec.outputs)}
    for state in spec.states:
        for side in ("past", "present"):
            options[f"{side}_{state.name}"] = state.optional
            dtypes[f"{side}_{state.name}"] = state.dtype

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
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "activations")],
        attributes=[defs.OpSchema.Attribute(a.name, kinds[type(a.default)], required=False) for a in spec.attributes],
    )


def lower_program(traced: TracedModel) -> ir.Model:
    """Lower a traced model to ONNX with bare still::* nodes; weights stay the model's own memory.

    Returns:
        Opset 23, IR 10, without function bodies (`attach_functions` adds them last).
    """
    table = {getattr(getattr(torch.ops, s.domain), s.torch_name).default: _translation(s) for s in OPS.values()}
    with _without_exporter_noise():
        program = torch.onnx.export(
            traced.program,
            input_names=traced.input_names,
            output_names=traced.output_names,
            opset_version=OPSET,
            custom_translation_table=table,
            dynamo=True,
            optimize=True,
            verbose=False,
        )
    assert program is not None  # only with a file name
    model = program.model
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "still-export", still_export.__version__
    _drop_absent_outputs(model)
    _name_dimensions(model, traced.states)
    _name_weights(model)
    _drop_trace_metadata(model)
    return model


@contextlib.contextmanager
def _without_exporter_noise() -> Iterator[None]:
    """Silence what torch's exporter says about optional packages and its own deprecations; errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _drop_absent_outputs(model: ir.Model) -> None:
    """Unname the outputs that stand for states which the configuration does not have: ONNX's way to say absent."""
    for node in model.graph:
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        if spec is None:
            continue
        given = dict(zip(spec.input_names(), node.inputs, strict=False))
        for name, output in zip(spec.output_names(), node.outputs, strict=True):
            past = name.replace("present_", "past_", 1)
            if past != name and given.get(past) is None:
                output.name = ""


def _drop_trace_metadata(model: ir.Model) -> None:
    """Remove torch's stack traces and class names: they hold paths of this machine and outweigh the graph."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _name_dimensions(model: ir.Model, states: StateTable) -> None:
    """Give the free dimensions their names in the place of torch's symbols."""
    names: dict[str, str] = {}
    grown = {s.past: (int(s.growth["axis"]), str(s.growth["dimension"])) for s in states if s.growth is not None}

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


def _name_weights(model: ir.Model) -> None:
    """Name weights as in the checkpoint, those too that torch's exporter folded with their transpose (stored [in, out] then)."""
    weights = model.graph.initializers
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        if node.op_type != "MatMul" or len(scopes) < 2 or node.inputs[1] is None:
            continue
        folded = node.inputs[1]
        if (
            folded.name is not None
            and folded.name in weights
            and folded.name.startswith("val_")
            and len(folded.uses()) == 1
        ):
            name = f"{scopes[-2]}.weight"
            if name in weights:  # tied: the embedding is stored already, as [out, in]
                _read_transposed(model, node, weights[name])
            else:
                _rename_weight(model, folded.name, name)
    for name in list(weights):
        if name.startswith("model."):
            _rename_weight(model, name, name.removeprefix("model."))


def _read_transposed(model: ir.Model, node: ir.Node, weight: ir.Value) -> None:
    """Let `node` read `weight` through a Transpose in the place of a second, transposed copy."""
    folded = node.inputs[1]
    assert folded is not None and folded.name is not None and folded.shape is not None
    transpose = ir.node("Transpose", [weight], {"perm": [1, 0]}, name=f"{node.name}_weight")
    transpose.outputs[0].name, transpose.outputs[0].type = f"{weight.name}.transposed", folded.type
    transpose.outputs[0].shape = folded.shape
    model.graph.insert_before(node, transpose)
    node.replace_input_with(1, transpose.outputs[0])
    del model.graph.initializers[folded.name]


def _rename_weight(model: ir.Model, old: str, new: str) -> None:
    value = model.graph.initializers.pop(old)
    value.name = new
    if value.const_value is not None:
        value.const_value.name = new
    model.graph.initializers[new] = value
