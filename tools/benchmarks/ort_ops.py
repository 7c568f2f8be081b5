"""Time one layer of an op in ONNX Runtime on the CPU, float32, in place: its forms in turns.

  python -m tools.benchmarks.ort_ops HybridAttention --library libstill_onnxruntime.so [--beside OTHER.so] [--heads 9 3 64] [--salient 16]
  python -m tools.benchmarks.ort_ops Attention --library libstill_onnxruntime.so [--lengths 1024,4096,8192] [--heads 9 3 64]
  python -m tools.benchmarks.ort_ops LinearAttention --library libstill_onnxruntime.so [--lengths 1024] [--heads 32 128 128]

Attention, HybridAttention: a step, and a piece of a prompt, that end at each length; --heads are query heads, key/value heads and their
size. HybridAttention has chunks of 64, gates, and selects for the heads of a key/value head together.
LinearAttention: a step and a piece of the prompt; --heads are heads and the sizes of keys and values. Forms: the native kernel, where
--library names it, and that of another build, --beside; ONNX Runtime's own op (com.microsoft::LinearAttention); the body around that op;
the body in standard ops. `processor` is time of the processor, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN, OpSpec
from still_graphs.passes.attach_functions import attach_functions
from still_kernels.attention.spec import ATTENTION
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.linear_attention.spec import DELTA, GATED, LINEAR_ATTENTION
from tools.benchmarks.common import Findings, numbers, parser_of, time_in_turns

Shapes = dict[str, list[int | str]]
OPS = {spec.name: spec for spec in (ATTENTION, HYBRID_ATTENTION, LINEAR_ATTENTION)}
INTEGERS = ("new_tokens", "past_length")


def shapes_of(spec: OpSpec, sizes: dict[str, int]) -> Shapes:
    """Of the op's inputs and outputs for one sequence, with free tokens and past."""
    pairs = [
        *zip(spec.input_names(), spec.all_inputs(), strict=True),
        *zip(spec.output_names(), spec.all_outputs(), strict=True),
    ]
    left_out = ("_scale",)  # of a cache in 8 bits
    return {name: [sizes.get(str(d), d) for d in tensor.shape] for name, tensor in pairs if not name.endswith(left_out)}


def model_of(
    spec: OpSpec, found: Shapes, absent: set[str], onnxruntime: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """One node with its body."""
    given, made = (
        ["" if n in absent or n not in found else n for n in names]
        for names in (spec.input_names(), spec.output_names())
    )
    node = helper.make_node(spec.name, given, made, domain=DOMAIN, **attributes)
    made = ir.from_proto(one_node(node, found, DOMAIN))
    attach_functions(made, onnxruntime)
    return ir.to_proto(made)


def own_model(found: Shapes, absent: set[str], rule: str) -> onnx.ModelProto:
    """ONNX Runtime's op of linear attention alone; its heads lie side by side."""
    heads = int(found["key"][2])
    packed = {
        n: [*s[:2], int(np.prod([int(d) for d in s[2:]]))] if "state" not in n else s
        for n, s in found.items()
        if len(s) > 2
    }
    order = ["query", "key", "value", "past_recurrent_state", "decay", "beta"]
    given = ["" if name in absent else name for name in order]
    node = helper.make_node(
        "LinearAttention", given, LINEAR_ATTENTION.output_names(), domain="com.microsoft", q_num_heads=heads, kv_num_heads=heads,
        update_rule=rule,
    )  # fmt: skip
    return one_node(node, packed, "com.microsoft")


def one_node(node: onnx.NodeProto, found: Shapes, domain: str) -> onnx.ModelProto:
    """A model of one node."""

    def info(name: str) -> onnx.ValueInfoProto:
        kind = TensorProto.INT64 if name in INTEGERS else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, found[name])

    graph = helper.make_graph([node], "bench", [info(n) for n in node.input if n], [info(n) for n in node.output if n])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def session_of(model: onnx.ModelProto, threads: int, library: str = "") -> Any:
    """Of ONNX Runtime on the CPU."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 3
    # Waiting threads would count as the processor's time.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if library:
        settings.register_custom_ops_library(library)
    return ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def bound(session: Any, tokens: int, length: int) -> Callable[[], None]:
    """A call of `tokens` tokens that ends at `length`, with everything bound, states in place."""
    binding, generator = session.io_binding(), np.random.default_rng(0)
    for given in session.get_inputs():
        free = length if given.name.startswith("past_") else tokens
        array = generator.standard_normal([free if not isinstance(d, int) else d for d in given.shape], np.float32)
        if given.name == "key":  # of unit length, as the delta rules need
            array *= 0.05
        if given.name == "decay":
            array = -np.abs(array) * 0.1
        if given.name == "beta":
            array = np.abs(np.tanh(array))
        if given.name in INTEGERS:
            array = np.array([tokens if given.name == "new_tokens" else length - tokens])
        value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(given.name, value)
        present = given.name.replace("past_", "present_")
        if given.name.startswith("past_") and present in {out.name for out in session.get_outputs()}:
            binding.bind_ortvalue_output(present, value)
    binding.bind_output("output")
    return lambda: session.run_with_iobinding(binding)


def forms_of(options: argparse.Namespace) -> dict[str, Any]:
    """Sessions of the op by form."""
    spec = OPS[options.op]
    if spec is ATTENTION:
        sizes = dict(zip(("H", "HK", "D"), options.heads or (9, 3, 64), strict=True)) | {"B": 1}
        models = {"body": model_of(spec, shapes_of(spec, sizes), set())}
    elif spec is HYBRID_ATTENTION:
        heads, kv_heads, dim = options.heads or (9, 3, 64)
        slots = max(numbers(options.lengths)) // 64 * options.salient
        sizes = {
            "B": 1,
            "H": heads,
            "HK": kv_heads,
            "HS": kv_heads,
            "D": dim,
            "P": dim,
            "F": 2 * dim,
            "2*C": 128,
            "N": slots,
        }
        how = {"chunk_size": 64, "salient_per_chunk": options.salient, "select_scope": "kv_group_max"}
        models = {"body": model_of(spec, shapes_of(spec, sizes), {"window_factor"}, **how)}
    else:
        heads, dim, size = options.heads or (32, 128, 128)
        decay = dim if options.per_key else 1
        state: list[int | str] = [1, heads, dim, size]
        found: Shapes = {
            "query": [1, "T", heads, 1, dim], "key": [1, "T", heads, dim], "value": [1, "T", heads, size],
            "decay": [1, "T", heads, decay], "beta": [1, "T", heads], "new_tokens": [1], "past_recurrent_state": state,
            "output": [1, "T", heads, 1, size], "present_recurrent_state": state,
        }  # fmt: skip
        absent = {name for name, takers in (("decay", GATED), ("beta", DELTA)) if options.rule not in takers}
        models = {
            "standard body": model_of(spec, found, absent, update_rule=options.rule),
            "body around its own op": model_of(spec, found, absent, True, update_rule=options.rule),
            "own op": own_model(found, absent, options.rule),
        }
    libraries = {"native": options.library, "beside": options.beside}
    native = {
        name: session_of(next(iter(models.values())), options.threads, library)
        for name, library in libraries.items()
        if library
    }
    if options.native_alone:
        return native
    return {**native, **{name: session_of(model, options.threads) for name, model in models.items()}}


def measure(options: argparse.Namespace, forms: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """A row for each length, number of tokens and form."""
    for length in numbers(options.lengths):
        for tokens in (1, min(options.piece, length)):
            calls = {name: bound(session, tokens, length) for name, session in forms.items()}
            runs = 50 if tokens == 1 else options.runs
            wall = time_in_turns(calls, runs)
            used = time_in_turns(calls, runs, 0, time.process_time)
            for name in calls:
                row = {"op": options.op, "form": name, "tokens": tokens, "length": length, **wall[name].figures()}
                yield {**row, "processor_ms": round(used[name].best * 1e3, 4)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--library", default="", help="the native kernels")
    parser.add_argument("--beside", default="", help="another build of them")
    parser.add_argument("--native-alone", action="store_true", help="no other form")
    parser.add_argument("--salient", type=int, default=16, help="tokens of a chunk, of HybridAttention")
    parser.add_argument("--lengths", default="1024,4096,8192", help="tokens at the end of a call")
    parser.add_argument("--piece", type=int, default=512, help="tokens of a piece of a prompt")
    parser.add_argument("--heads", type=int, nargs=3)
    parser.add_argument("--rule", choices=LINEAR_ATTENTION.attribute("update_rule").choices, default="gated_delta")
    parser.add_argument("--per-key", action="store_true", help="a decay for each channel of a key")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="of a piece; 50 of a step")
    options = parser.parse_args()
    found = Findings()
    for row in measure(options, forms_of(options)):
        found.add(**row)
    found.record(options.record, f"{options.op}, ONNX Runtime CPU", {"op": options.op})


if __name__ == "__main__":
    main()
