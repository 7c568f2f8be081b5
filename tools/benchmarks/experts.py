"""Time a layer of experts on the CPU, float32 activations: the native kernel, ONNX Runtime's own op (MoE, QMoE), the portable body.

  python -m tools.benchmarks.experts --library libstill_onnxruntime.so [--sizes 64,1536,512,6] [--bits 0,4,8] [--tokens 1,128]

--sizes are experts, channels, channels inside and experts of a token; --bits 0 is float32. `read_ms` is a sum over as many bytes as the
chosen experts have, by NumPy on one processor. `processor` is time of the processor, which other processes disturb less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from still_graphs.ops import DOMAIN
from still_graphs.passes.attach_functions import attach_functions
from still_kernels.experts.spec import EXPERTS
from still_kernels.experts_nbits.spec import EXPERTS_NBITS
from tools.benchmarks.common import Findings, numbers, parser_of, time_in_turns

BLOCK = 32
KINDS = {np.dtype("f4"): TensorProto.FLOAT, np.dtype("i4"): TensorProto.INT32}
CALL = ("input", "expert", "weight")


def tensors(sizes: list[int], bits: int, activation: str, tokens: int) -> dict[str, np.ndarray]:
    """A call's, weights too; codes and zero points are random bits."""
    experts, channels, inner, chosen = sizes
    draw = np.random.default_rng(0)
    rows = inner * (2 if activation == "swiglu" else 1)
    found = {
        "input": draw.standard_normal((1, tokens, channels), np.float32),
        "expert": np.stack([draw.permutation(experts)[:chosen] for _ in range(tokens)])[None].astype(np.int32),
        "weight": draw.random((1, tokens, chosen), np.float32),
    }
    for name, outputs, inputs in (("gate_up", rows, channels), ("down", channels, inner)):
        if not bits:
            found[name] = draw.standard_normal((experts, outputs, inputs), np.float32) * 0.03
            continue
        words = {name: inputs * bits // 32, f"{name}_zero_points": -(-inputs // BLOCK * bits // 32)}
        for part, columns in words.items():
            if part == name or bits == 4:
                found[part] = draw.integers(-(2**31), 2**31 - 1, (experts, outputs, columns)).astype(np.int32)
        found[f"{name}_scales"] = draw.random((experts, outputs, inputs // BLOCK), np.float32) / 2 ** (bits + 3)
    return found


def session_of(
    held: dict[str, np.ndarray], bits: int, activation: str, own: bool, threads: int, library: str = ""
) -> Any:
    """Of one node, whose weights are mapped from a file as packages have them."""
    spec = EXPERTS_NBITS if bits else EXPERTS
    sizes: dict[str, Any] = {"bits": bits, "block_size": BLOCK} if bits else {}
    names = [name if name in held else "" for name in spec.input_names()]
    node = helper.make_node(spec.name, names, ["output"], domain=DOMAIN, activation=activation, **sizes)
    infos = [helper.make_tensor_value_info(n, KINDS[held[n].dtype], [1, "T", held[n].shape[2]]) for n in CALL]
    result = helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, "T", held["input"].shape[2]])
    weights = [numpy_helper.from_array(x, name) for name, x in held.items() if name not in CALL]
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "bench", infos, [result], weights)
    made = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))
    attach_functions(made, own)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 3
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if library:
        settings.register_custom_ops_library(library)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(ir.to_proto(made), path, save_as_external_data=True, location="model.data", size_threshold=1024)
        return ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def call_of(session: Any, feeds: dict[str, np.ndarray]) -> Callable[[], Any]:
    return lambda: session.run(None, feeds)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", required=True, help="the native kernels")
    parser.add_argument("--sizes", default="64,1536,512,6")
    parser.add_argument("--bits", default="0,4,8")
    parser.add_argument("--tokens", default="1,128")
    parser.add_argument("--activation", choices=("swiglu", "relu2"), default="swiglu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", choices=("native", "own op", "body"), help="one alone, for its memory")
    options = parser.parse_args()
    found, sizes = Findings(), numbers(options.sizes)
    for bits in numbers(options.bits):
        held = tensors(sizes, bits, options.activation, 1)
        others = "own op" if options.activation == "swiglu" else "body"
        forms = {
            name: session_of(held, bits, options.activation, name != "native", options.threads, library)
            for name, library in (("native", options.library), (others, ""))
            if options.form in (None, name)
        }
        for tokens in numbers(options.tokens):
            feeds = {
                name: x
                for name, x in tensors([*sizes[:2], 1, sizes[3]], 0, options.activation, tokens).items()
                if name in CALL
            }
            calls = {name: call_of(session, feeds) for name, session in forms.items()}
            runs = max(5, 60 // tokens)
            wall, used = time_in_turns(calls, runs), time_in_turns(calls, runs, 0, time.process_time)
            chosen = len(np.unique(feeds["expert"]))
            size = sum(x.nbytes for name, x in held.items() if name not in CALL) * chosen // sizes[0]
            read = time_in_turns({"read": np.zeros(size // 8).sum}, 5)["read"].best
            for name in calls:
                row = {"form": name, "activation": options.activation, "bits": bits, "tokens": tokens}
                row |= {"megabytes": round(size / 1e6, 1), "read_ms": round(read * 1e3, 3), **wall[name].figures()}
                found.add(**row, processor_ms=round(used[name].best * 1e3, 4))
    found.record(options.record, "experts, ONNX Runtime CPU", {"sizes": options.sizes})


if __name__ == "__main__":
    main()
