"""Packages that only some verbs need, and the extras of this package that install them."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "onnx": ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "polygraphy"),
    "gguf": ("gguf",),
    "gpu": ("triton",),
    "train": ("accelerate", "peft", "yaml"),
    "report": ("altair", "vl_convert"),
    "serve": ("starlette", "anyio", "uvicorn", "prometheus_client", "llguidance"),
    "vllm": ("vllm",),
    "ray": ("ray",),
    "genai": ("onnxruntime_genai",),
    "llama-cpp": ("llama_cpp",),
    "lm-eval": ("lm_eval",),
    "quantize": ("gptqmodel",),
    "trt": ("tensorrt",),
    "trt-rtx": ("tensorrt_rtx_bindings",),
}
"""Modules that verbs import when needed, by extra. The first extra with a module is the one to name."""


def demand(*modules: str) -> None:
    """Raise ModuleNotFoundError for the first missing module, before the work that needs it.

    Raises:
        ModuleNotFoundError: Of the first that is missing; the command line names its extra.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def installation(module: str | None) -> str | None:
    """How to install the extra that has `module`; None: no extra has it."""
    top = (module or "").split(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if top in modules), None)
    return extra and f"pip install 'still-export[{extra}]'"
