#!/usr/bin/env python3
"""Time one layer of still::Attention in ONNX Runtime on the CPU: a step, and a piece of a prompt, behind a filled cache.

Usage: python tools/bench_attention.py [--library libstill_onnxruntime.so] [--tokens 1024 4096 8192] [--threads 2]

Without a library the function body runs. Prints the best of several runs: wall time, and the processor's, which other processes disturb
less; the rate of the latter in gigabytes of cache and in products.
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
from still_graphs.ops.attention import ATTENTION
from still_graphs.passes.attach_functions import attach_functions


def model(heads: int, kv_heads: int, dim: int) -> onnx.ModelProto:
    """One node with its body."""
    sizes = {"H": heads, "HK": kv_heads, "D": dim}
    kinds = {"T": TensorProto.FLOAT, "int64": TensorProto.INT64}

    def infos(names: tuple[str, ...], tensors: Any) -> list[onnx.ValueInfoProto]:
        pairs = zip(names, tensors, strict=True)
        return [helper.make_tensor_value_info(n, kinds[t.dtype], [sizes.get(d, d) for d in t.shape]) for n, t in pairs]

    inputs = infos(ATTENTION.input_names(), ATTENTION.all_inputs())
    outputs = infos(ATTENTION.output_names(), ATTENTION.all_outputs())
    node = helper.make_node(ATTENTION.name, ATTENTION.input_names(), ATTENTION.output_names(), domain=DOMAIN)
    graph = helper.make_graph([node], "bench", inputs, outputs)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=10)
    attach_functions(made)
    return made


def best(session: Any, sizes: tuple[int, int, int], length: int, tokens: int, runs: int) -> tuple[float, float]:
    """Least wall and processor seconds of a call of `tokens` tokens that ends at `length`, in place."""
    heads, kv_heads, dim = sizes
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(generator.standard_normal(shape, np.float32))

    values = {
        "query": normal(1, tokens, heads, dim),
        "key": normal(1, tokens, kv_heads, dim),
        "value": normal(1, tokens, kv_heads, dim),
        "new_tokens": ort.OrtValue.ortvalue_from_numpy(np.array([tokens])),
        "past_length": ort.OrtValue.ortvalue_from_numpy(np.array([length - tokens])),
    }
    states = {name: normal(1, kv_heads, length, dim) for name in ("key", "value")}
    output = normal(1, tokens, heads, dim)
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, state in states.items():
        binding.bind_ortvalue_input(f"past_{name}", state)
        binding.bind_ortvalue_output(f"present_{name}", state)
    binding.bind_ortvalue_output("output", output)
    wall = processor = float("inf")
    for _ in range(runs):
        start, used = time.perf_counter(), time.process_time()
        session.run_with_iobinding(binding)
        wall, processor = min(wall, time.perf_counter() - start), min(processor, time.process_time() - used)
    return wall, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="", help="the native kernels")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--piece", type=int, default=512, help="tokens of a piece of a prompt")
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], metavar=("H", "HK", "D"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    heads, kv_heads, dim = options.heads
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = options.threads, 3
    # Waiting threads would count as the processor's time.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if options.library:
        settings.register_custom_ops_library(options.library)
    session = ort.InferenceSession(
        model(heads, kv_heads, dim).SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    for length in options.tokens:
        wall, used = best(session, (heads, kv_heads, dim), length, 1, 50)
        gigabytes = length * kv_heads * dim * 8 / 1e9
        print(
            f"{length}: step {wall * 1e3:.3f} ms, processor {used * 1e3:.3f} ms ({gigabytes / used:.1f} GB/s)", end="; "
        )
        piece = min(options.piece, length)
        wall, used = best(session, (heads, kv_heads, dim), length, piece, 4)
        products = 4 * heads * dim * piece * (length - piece / 2) / 1e9
        print(f"{piece} tokens {wall * 1e3:.1f} ms, processor {used * 1e3:.1f} ms ({products / used:.0f} GFLOP/s)")


if __name__ == "__main__":
    main()
