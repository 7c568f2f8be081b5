"""ONNX Runtime, with its own ops where they are faster. CPU packages share the portable package's weights; GPU packages merge products."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.fuse import fuse_nodes, nodes_fused
from still_export.graph.merge import merge_linear_layers
from still_export.graph.options import Progress
from still_export.graph.quantization.policy import ONNXRUNTIME, PLUGIN, Layout
from still_export.package.files import COMPONENT, FOLD, HEAD, MODEL
from still_export.package.programs import write_programs
from still_export.package.trust import trust
from still_export.targets.ort.kernels import add_native
from still_export.targets.ort.library import build_library, demand_build, find_library
from still_export.targets.ort.options import OrtOptions, demand
from still_export.targets.ort.scales import part_scales, scales_of_one_row
from still_export.targets.target import FLOAT_WEIGHTS, SPECULATION, Lowering, Target
from still_graphs.conditions import bodies, imported, known_ops, no_functions, opset_at_least, still_nodes
from still_graphs.later_ir import ir
from still_graphs.ops import FUSED_OPSET, OPS, OPSET
from still_graphs.passes.attach_functions import attach_functions
from still_graphs.passes.keep_replay import fold_graph, gives_replay, keep_replay
from still_graphs.passes.part_head import has_head, part_head
from still_graphs.passes.strip_functions import strip_functions
from still_graphs.passes.widen_activations import activations_are_typed, activations_are_wide, widen_activations
from still_graphs.pipelines import CPU, CUDA, Pass, passes_of_ops

PREFILL_TOKENS, GPU_PREFILL_TOKENS, GPU_PREFILL_NUMBERS = 512, (2048, 8192), 1 << 23
"""Tokens of one prefill call. On CPUs longer calls need more memory and are not faster. On GPUs shorter calls wait for the host; a call has
GPU_PREFILL_NUMBERS hidden-state numbers, within these limits: 8,192 tokens up to hidden size 1,024, 2,048 from 4,096 on
(docs/notebook/onnxruntime.md)."""

LOW_BIT_PREFILL_TOKENS = 128
"""Tokens of one prefill call with our low-bit kernels, which are as fast at this length. SmolLM2-135M needs 95 MB less of 400, and 2.17 s
of processor time for 1,024 tokens instead of 2.15."""

NATIVE_DTYPES = ("float32", "float16")
"""Types of the native kernels. ONNX Runtime's CPU provider does not run the rest of a bfloat16 model either."""

THREE = 3
"""Number of parts of a product that ONNX Runtime's CUDA provider splits well."""

OWN_OPS, NEW_OPS, KERNELS = "ops of ONNX Runtime", f"opset {FUSED_OPSET}", "kernels for CPUs"
"""Traits: the graph may have ONNX Runtime's own ops; the graph has ops of the newer opset, for any host; the package has CPU kernels."""

DTYPES = ("float32", "float16", "bfloat16")


def traits(options: OrtOptions) -> tuple[str, ...]:
    return (OWN_OPS if options.opset == OPSET else NEW_OPS, *((KERNELS,) if has_kernels(options) else ()))


def has_kernels(options: OrtOptions) -> bool:
    """Whether the package contains the library of CPU kernels, and its graph may have nodes for it."""
    return (
        options.native is not False
        and not options.archs
        and options.opset == OPSET
        and find_library(options.cpu) is not None
    )


def merge_three(model: ir.Model) -> int:
    """Merge the products of query, key and value, and those of gated feed-forward layers."""
    return merge_linear_layers(model, THREE)


def take_new_opset(model: ir.Model) -> int:
    """Set the graph's opset to the newer one."""
    model.opset_imports[""] = FUSED_OPSET
    return 1


def attach_own_functions(model: ir.Model) -> int:
    """Attach bodies to still:: nodes that may use ONNX Runtime's own ops."""
    return attach_functions(model, onnxruntime=True)


SCALES = Pass(
    part_scales, "its CUDA kernel of norms uses the first row of a scale for all of them", ensures=scales_of_one_row
)
FUSE = Pass(
    fuse_nodes, "a step of a small model costs its nodes", only=(OWN_OPS,), requires=imported, ensures=nodes_fused
)
STRIP = Pass(
    strip_functions, "bodies are attached last, when the nodes are known", requires=known_ops, ensures=no_functions
)
GUESS = Pass(
    keep_replay,
    "accepted tokens are folded into the states",
    only=(SPECULATION,),
    requires=no_functions,
    ensures=gives_replay,
)
WIDEN = Pass(
    widen_activations,
    "its CUDA kernels of activations round every step to 16 bits",
    requires=activations_are_typed,
    ensures=activations_are_wide,
)
BARE = partial(Pass, requires=no_functions)
THIN = tuple(replace(each, only=(KERNELS,)) for each in passes_of_ops(CPU))
ON_GPUS = passes_of_ops(CUDA)
BODIES = (
    BARE(
        take_new_opset,
        "a host of the newer opset has its ops",
        only=(NEW_OPS,),
        ensures=opset_at_least(FUSED_OPSET),
    ),
    BARE(attach_functions, "other hosts have none of ONNX Runtime's ops", only=(NEW_OPS,), ensures=bodies),
    BARE(attach_own_functions, "its own ops are faster in bodies, too", only=(OWN_OPS,), ensures=bodies),
)


def check(manifest: dict[str, Any], options: OrtOptions) -> None:
    """Raise for types that native kernels do not compute."""
    dtype, cache = manifest["model"]["dtype"], manifest["still"].get("cache")
    if options.native and not options.archs and dtype not in NATIVE_DTYPES:
        raise UnsupportedError(
            f"--native computes {' and '.join(NATIVE_DTYPES)}, not {dtype}. Export with --dtype float32, "
            "without --native, or with --arch for GPUs."
        )
    if cache == "int8" and options.native and not options.archs and dtype != "float32":
        raise ConfigError(f"--cache int8 with --native is for --dtype float32, not for {dtype}.")


def ready(options: OrtOptions, say: Progress) -> None:
    """Build kernels that were requested and do not exist; raise if they cannot be built."""
    if options.archs:
        demand_build(options.onnxruntime_include)
    elif options.native or options.cpu:
        say("building the kernels")
        build_library(options.cpu, options.onnxruntime_include)


def finish(lowering: Lowering, graph: ir.Model) -> None:
    """Write the native library and the runner."""
    manifest, options = lowering.manifest, lowering.options
    ops = {name: OPS[name].version for name in sorted({n.op_type for n in still_nodes(graph)})}
    manifest.update(
        target="onnx",
        config={**manifest["config"], **options.config()},
        ops={**manifest["ops"], **ops},
        prefill_tokens=options.prefill_tokens or _prefill_tokens(manifest, options),
    )
    library = None if options.archs or lowering.holes is not None else _library(options, manifest)
    if options.archs and lowering.holes is None:
        lowering.say("compiling the GPU kernels")
    if (options.archs and lowering.holes is None) or library:
        manifest["native"] = add_native(
            lowering.folder, library, options.cpu, options.onnxruntime_include, options.archs
        )
        trust(lowering.folder / manifest["native"]["library"])
    if has_head(graph):  # over the weights as written
        for name in (HEAD, MODEL):
            ir.save(part_head(ir.load(lowering.folder / MODEL), name == HEAD), lowering.folder / name)
    if manifest.get("speculate") and len((fold := fold_graph(ir.load(lowering.folder / MODEL))).graph):
        ir.save(fold, lowering.folder / FOLD)
    (lowering.folder / COMPONENT).write_text(component(manifest, bool(options.archs)), encoding="utf-8")
    write_programs(lowering.folder, ["ort"])


def component(manifest: dict[str, Any], gpu: bool) -> str:
    """component.json: the folder as a component of one of ONNX Runtime's model packages.

    https://github.com/microsoft/onnxruntime/blob/main/model_package/README.md
    """
    device, provider = ("gpu", "CUDA") if gpu else ("cpu", "CPU")
    variant = {
        "variant_directory": ".",
        "ep": f"{provider}ExecutionProvider",
        "device": device,
        "executor_info": {"ort": {"model_file": MODEL}},
    }
    known = {name: manifest[name] for name in ("origin", "portable", "state_identity") if manifest.get(name)}
    content = {"variants": {device: variant}, "additional_metadata": {"producer": "still-export", **known}}
    return json.dumps(content, indent=1) + "\n"


def _library(options: OrtOptions, manifest: dict[str, Any]) -> Path | None:
    """The library of CPU kernels for the package, or None."""
    dtype, cache = manifest["model"]["dtype"], manifest["still"].get("cache")
    if options.native is False or dtype not in NATIVE_DTYPES or (cache == "int8" and dtype != "float32"):
        return None
    return find_library(options.cpu)


def _prefill_tokens(manifest: dict[str, Any], options: OrtOptions) -> int:
    if not options.archs and (manifest.get("quantization") or {}).get("nodes") == PLUGIN:
        return LOW_BIT_PREFILL_TOKENS
    return prefill_tokens(options.archs, manifest["model"]["hidden_size"])


def prefill_tokens(archs: tuple[str, ...], hidden_size: int) -> int:
    """Tokens of one prefill call on CPUs, or on the GPUs `archs`."""
    if not archs:
        return PREFILL_TOKENS
    least, most = GPU_PREFILL_TOKENS
    return max(least, min(most, 1 << (GPU_PREFILL_NUMBERS // hidden_size).bit_length() - 1))


ORT_CPU = Target(
    "ort-cpu",
    "onnx",
    DTYPES,
    ONNXRUNTIME,
    OrtOptions,
    layouts={
        "float32": Layout(
            "kernels for CPUs (--native)",
            (32, 64, 128, 256),
            PLUGIN,
            True,
            True,
            True,
            adapters=True,
            half_scales=True,
            super_blocks=True,
        )
    },
    own_layouts=has_kernels,
    passes=(SCALES, FUSE, STRIP, *THIN, GUESS, WIDEN, *BODIES),
    speculates=True,
    sees=True,
    finish=finish,
    caches=("float16", "int8"),
    traits=traits,
    demand=demand,
    check=check,
    ready=ready,
    portable=True,
    runtime="ort",
)

ORT_CUDA = Target(
    "ort-cuda",
    "onnx",
    DTYPES,
    ONNXRUNTIME,
    OrtOptions,
    passes=(
        SCALES,
        FUSE,
        Pass(
            merge_three,
            "one product of several reads memory in longer runs",
            only=(OWN_OPS, FLOAT_WEIGHTS),
            requires=known_ops,
            ensures=imported,
        ),
        STRIP,
        *(replace(each, only=(OWN_OPS,)) for each in ON_GPUS),
        GUESS,
        WIDEN,
        *BODIES,
    ),
    speculates=True,
    finish=finish,
    layouts={
        "float16": Layout(
            "ONNX Runtime's kernels for GPUs", (32, 64, 128), PLUGIN, True, True, True, adapters=True, float8=True
        )
    },
    caches=("int8",),
    traits=traits,
    demand=demand,
    check=check,
    ready=ready,
    takes=lambda options: bool(options.archs),
    runtime="ort",
)
"""Packages with kernels for the CUDA provider; the CPU provider runs bodies of fused ops."""
