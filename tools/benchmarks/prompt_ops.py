"""Where a prompt's time goes on the CPU, op by op, beside its linear layers alone.

  python -m tools.benchmarks.prompt_ops PACKAGE [PACKAGE ...] [--lengths 1024,4096,8000] [--runs 2]

One thread, all in time of the processor, which other processes disturb less: a run's is divided among ops by ONNX Runtime's profile, whose
times are those of a clock. `alone` is what the same linear layers take by themselves: each of the package's, with its weights, as a model
of one node over as many tokens as a call has, the median of several, times how often it runs; `gflops` is their rate. `products` is what
attention's own take at that rate (`prefill_cost`, the least). `ratio` is the whole over `alone`, `ratio_products` over both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from still_export.package.files import MODEL
from still_export.runtime.ort import OrtModel
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from tools.benchmarks.common import Findings, numbers, parser_of, time_calls
from tools.benchmarks.ort_ops import session_of
from tools.kernels.ops.attention import prefill_cost as attention_cost
from tools.kernels.ops.hybrid_attention import prefill_cost as hybrid_cost

LINEAR = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "DenseMatMul", "LowRankMatMul")
ATTENTION = ("HybridAttention", "Attention")


def shapes(event: dict[str, Any], side: str) -> list[tuple[int, ...]]:
    """Of a node's inputs or outputs."""
    return [tuple(next(iter(each.values()))) for each in event["args"][f"{side}_type_shape"]]


def run(package: Path, length: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the processor for one prompt in the pieces that it is fed in, and the profile's nodes."""
    with TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)  # where the profile goes
        try:
            model = OrtModel(package, 1, profile=True, check=False)
            model.start(1, length)
            tokens = np.random.default_rng(0).integers(0, model.manifest["model"]["vocab_size"], (1, length))
            begin = time.process_time()
            for start in range(0, length, model.prefill_tokens):
                model.feed(tokens[:, start : start + model.prefill_tokens])
            used = time.process_time() - begin
            events = json.loads(Path(model.session.end_profiling()).read_text(encoding="utf-8"))
        finally:
            os.chdir(here)
    return used, [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]


class Alone:
    """Seconds of single linear layers of a package, each measured once."""

    def __init__(self, package: Path, runs: int) -> None:
        self.model = onnx.load(package / MODEL)
        self.nodes = {node.name: node for node in self.model.graph.node}
        self.weights = {tensor.name: tensor for tensor in self.model.graph.initializer}
        found = sorted(package.glob("*.so"))
        self.library, self.runs = str(found[0].resolve()) if found else "", runs
        self.known: dict[Any, float] = {}

    def seconds(self, event: dict[str, Any]) -> float:
        """Of the layer that an event is of."""
        given, made = shapes(event, "input")[0], shapes(event, "output")[0]
        key = event["args"]["op_name"], given, made
        if key not in self.known:
            node = self.nodes.get(event["name"].removesuffix("_kernel_time"))
            half = "float16" in event["args"]["input_type_shape"][0]
            call = self._call(node, given, made, TensorProto.FLOAT16 if half else TensorProto.FLOAT)
            self.known[key] = time_calls(call, self.runs, 2, time.process_time).median
        return self.known[key]

    def _call(self, node: Any, given: tuple[int, ...], made: tuple[int, ...], kind: int) -> Callable[[], Any]:
        draw = np.random.default_rng(0)
        kept = [] if node is None else [self.weights[name] for name in node.input if name in self.weights]
        if node is None or not kept:  # merged with what is behind it
            weight = draw.standard_normal((given[-1], made[-1]), np.float32)
            kept, node = [numpy_helper.from_array(weight, "w")], helper.make_node("MatMul", ["x", "w"], ["y"])
        held = {tensor.name for tensor in kept}
        free = [name for name in dict.fromkeys(node.input) if name and name not in held]
        of = {name: given if i == 0 else made for i, name in enumerate(free)}  # a second one is added to the output
        inputs = [helper.make_tensor_value_info(name, kind, of[name]) for name in free]
        outputs = [helper.make_tensor_value_info(node.output[0], kind, made)]
        graph = helper.make_graph([node], "alone", inputs, outputs, kept)
        imports = [*self.model.opset_import]
        session = session_of(
            helper.make_model(graph, opset_imports=imports, ir_version=self.model.ir_version), 1, self.library
        )
        binding, number = session.io_binding(), helper.tensor_dtype_to_np_dtype(kind)
        for name in free:
            array = draw.standard_normal(of[name], np.float32).astype(number)
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        value = ort.OrtValue.ortvalue_from_numpy(np.zeros(made, number))
        binding.bind_ortvalue_output(node.output[0], value)
        return lambda: session.run_with_iobinding(binding)


def products(node: Any, event: dict[str, Any], length: int) -> float:
    """Multiplications and additions of an attention node over a whole prompt."""
    (_, _, heads, dim), (_, _, kv_heads, _) = shapes(event, "input")[:2]
    if event["args"]["op_name"] == "Attention":
        return attention_cost(heads, kv_heads, dim, length)[1]
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    chosen = {name: given[name] for name in ("chunk_size", "salient_per_chunk")}
    return hybrid_cost(HybridAttentionConfig(heads, kv_heads, dim, capacity_tokens=length, **chosen), length)[1]


def measure(package: Path, options: argparse.Namespace, findings: Findings) -> None:
    """A row for each length."""
    alone = Alone(package, options.repeat)
    for length in numbers(options.lengths):
        used: list[float] = []
        clock: Counter[str] = Counter()
        for _ in range(options.runs):
            seconds, events = run(package, length)
            used.append(seconds)
            for event in events:
                clock[event["args"]["op_name"]] += event["dur"]
        whole, all_clock = statistics.median(used), sum(clock.values())
        linear: Counter[str] = Counter()
        flop, attention = 0.0, {}
        for event in events:
            name, op = event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]
            if op in LINEAR:
                linear[op] += alone.seconds(event)
                flop += (
                    2.0
                    * math.prod(shapes(event, "input")[0])
                    * shapes(event, "output")[0][-1]
                    * (op != "LowRankMatMul")
                )
            elif op in ATTENTION:
                attention[name] = products(alone.nodes[name], event, length)
        layers = sum(linear.values())
        rate = flop / layers
        shares = {name: round(whole * time_us / all_clock, 3) for name, time_us in clock.most_common(options.ops)}
        findings.add(
            package=package.resolve().name,
            tokens=length,
            seconds=round(whole, 3),
            ops=shares,
            alone={name: round(seconds, 3) for name, seconds in linear.items()},
            gflops=round(rate / 1e9, 1),
            products=round(sum(attention.values()) / rate, 3),
            ratio=round(whole / layers, 3),
            ratio_products=round(whole / (layers + sum(attention.values()) / rate), 3),
        )


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path, nargs="+")
    parser.add_argument("--lengths", default="1024,4096,8000")
    parser.add_argument("--runs", type=int, default=2, help="of a prompt; the median counts, all are profiled")
    parser.add_argument("--repeat", type=int, default=8, help="runs of a linear layer alone")
    parser.add_argument("--ops", type=int, default=12, help="that are listed")
    options = parser.parse_args()
    findings = Findings()
    for package in options.packages:
        measure(package, options, findings)
    findings.record(options.record, "a prompt on the CPU by ops", {"threads": "1"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
