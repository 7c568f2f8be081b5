"""onnxruntime-genai: a package for ONNX Runtime's CPU provider with one more graph, for genai, over the same weights."""

from __future__ import annotations

from still_export.graph.quantization.policy import ONNXRUNTIME
from still_export.targets.genai.package import check_genai, demand_genai, finish
from still_export.targets.ort.options import GenaiOptions
from still_export.targets.ort.target import ORT_CPU, ready, traits
from still_export.targets.target import Target

GENAI = Target(
    "genai",
    "genai",
    ("float32", "float16"),
    ONNXRUNTIME,
    GenaiOptions,
    passes=ORT_CPU.passes,
    finish=finish,
    caches=("float16", "int8"),
    lacks=("Experts",),
    traits=traits,
    demand=demand_genai,
    check=check_genai,
    ready=ready,
    runtime="ort",
    host="onnxruntime_genai",
)
