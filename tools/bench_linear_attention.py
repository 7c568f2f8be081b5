#!/usr/bin/env python3
"""Time one layer of still::LinearAttention in ONNX Runtime on the CPU, float32: pieces of a prompt, and a step.

Usage: python tools/bench_linear_attention.py --library libstill_onnxruntime.so [--heads 32 128 128] [--threads 2]

In the same run: the native kernel, ONNX Runtime's own op (com.microsoft::LinearAttention), the body around it, and the body in standard
ops. Prints the best of several runs in turn: wall time, and the processor's, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN
from still_graphs.ops.linear_attention import DELTA, GATED, LINEAR_ATTENTION
from still_graphs.passes.attach_functions import attach_functions

Shapes = dict[str, list[int | str]]


def shapes(heads: int, dim: int, size: int, decay: int) -> Shapes:
    """Of inputs and outputs, with free tokens."""
    state: list[int | str] = [1, heads, dim, size]
    return {
        "query": [1, "T", heads, 1, dim],
        "key": [1, "T", heads, dim],
        "value": [1, "T", heads, size],
        "decay": [1, "T", heads, decay],
        "beta": [1, "T", heads],
        "new_tokens": [1],
        "past_recurrent_state": state,
        "output": [1, "T", heads, 1, size],
        "present_recurrent_state": state,
    }


def still_model(found: Shapes, rule: str, onnxruntime: bool) -> onnx.ModelProto:
    """One node with its body."""
    absent = [name for name, takers in (("decay", GATED), ("beta", DELTA)) if rule not in takers]
    names = [name for name in LINEAR_ATTENTION.input_names() if name not in absent]
    node = helper.make_node(
        LINEAR_ATTENTION.name,
        [name if name in names else "" for name in LINEAR_ATTENTION.input_names()],
        LINEAR_ATTENTION.output_names(),
        domain=DOMAIN,
        update_rule=rule,
    )
    made = one_node(node, names, LINEAR_ATTENTION.output_names(), found, DOMAIN)
    attach_functions(made, onnxruntime)
    return made


def own_model(found: Shapes, rule: str) -> onnx.ModelProto:
    """ONNX Runtime's op alone."""
    heads = int(found["key"][2])
    packed = {
        name: [1, "T", int(np.prod([int(d) for d in shape[2:]]))] if "T" in shape else shape
        for name, shape in found.items()
    }
    order = ["query", "key", "value", "past_recurrent_state", "decay", "beta"]
    absent = {name for name, takers in (("decay", GATED), ("beta", DELTA)) if rule not in takers}
    given = ["" if name in absent else name for name in order]
    node = helper.make_node(
        "LinearAttention",
        given,
        LINEAR_ATTENTION.output_names(),
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule=rule,
    )
    return one_node(node, [n for n in given if n], LINEAR_ATTENTION.output_names(), packed, "com.microsoft")


def one_node(node: onnx.NodeProto, inputs: Any, outputs: Any, found: Shapes, domain: str) -> onnx.ModelProto:
    """A model of one node."""

    def info(name: str) -> onnx.ValueInfoProto:
        kind = TensorProto.INT64 if name == "new_tokens" else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, found[name])

    graph = helper.make_graph([node], "bench", [info(n) for n in inputs], [info(n) for n in outputs])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


class Timed:
    """A session with everything bound, in place."""

    def __init__(self, model: onnx.ModelProto, tokens: int, threads: int, library: str = "") -> None:
        settings = ort.SessionOptions()
        settings.intra_op_num_threads, settings.log_severity_level = threads, 3
        # Waiting threads would count as the processor's time.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if library:
            settings.register_custom_ops_library(library)
        self.session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        self.binding, generator = self.session.io_binding(), np.random.default_rng(0)
        for given in self.session.get_inputs():
            shape = [tokens if isinstance(d, str) else d for d in given.shape]
            array = generator.standard_normal(shape, np.float32)
            if given.name == "key":  # of unit length, as the delta rules need
                array *= 0.05
            if given.name == "decay":
                array = -np.abs(array) * 0.1
            if given.name == "beta":
                array = np.abs(np.tanh(array))
            if given.name == "new_tokens":
                array = np.array([tokens])
            value = ort.OrtValue.ortvalue_from_numpy(array)
            self.binding.bind_ortvalue_input(given.name, value)
            if given.name.startswith("past_"):
                self.binding.bind_ortvalue_output(given.name.replace("past", "present"), value)
        self.binding.bind_output("output")
        self.wall = self.processor = float("inf")

    def run(self) -> None:
        start, used = time.perf_counter(), time.process_time()
        self.session.run_with_iobinding(self.binding)
        self.wall = min(self.wall, time.perf_counter() - start)
        self.processor = min(self.processor, time.process_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="", help="the native kernels")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 256, 1024])
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 128, 128], metavar=("H", "D", "V"))
    parser.add_argument("--rule", choices=LINEAR_ATTENTION.attribute("update_rule").choices, default="gated_delta")
    parser.add_argument("--per-key", action="store_true", help="a decay for each channel of a key")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    heads, dim, size = options.heads
    found = shapes(heads, dim, size, dim if options.per_key else 1)
    for tokens in options.tokens:
        forms = {
            "own op": Timed(own_model(found, options.rule), tokens, options.threads),
            "body around it": Timed(still_model(found, options.rule, True), tokens, options.threads),
            "standard body": Timed(still_model(found, options.rule, False), tokens, options.threads),
        }
        if options.library:
            model = still_model(found, options.rule, False)
            forms = {"native": Timed(model, tokens, options.threads, options.library), **forms}
        for _ in range(options.runs * (20 if tokens == 1 else 1)):
            for form in forms.values():
                form.run()
        for name, form in forms.items():
            each = form.wall / tokens * 1e6
            print(
                f"{tokens} tokens, {name}: {form.wall * 1e3:.3f} ms, {each:.1f} us a token; processor {form.processor * 1e3:.3f} ms"
            )


if __name__ == "__main__":
    main()
