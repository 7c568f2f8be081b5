"""Make the packages that tests/gpu proves, where PyTorch and Triton are; no GPU is needed.

  python -m tests.gpu.prepare PLACE small --include HEADERS [--only genai]    # ONNX Runtime's headers; assets/small in every type
  python -m tests.gpu.prepare PLACE demo --include HEADERS                    # SmolLM2, float32, float16 and int4: 1 GB
  python -m tests.gpu.prepare PLACE linear --include HEADERS [--only qwen3_5_text,kimi_linear]
  python -m tests.gpu.prepare PLACE bodies [--only rat]                       # families without kernels
  python -m tests.gpu.prepare PLACE quantized --include HEADERS [--only gptq] # folders of quantizers, which have to be installed
  python -m tests.gpu.prepare PLACE trt --tensorrt-include INCLUDE [--model FOLDER] [--only demo,verified,mamba2]
  python -m tests.gpu.prepare PLACE tasks --include HEADERS [--tensorrt-include INCLUDE] [--only delta]  # trained tasks, and their texts
  python -m tests.gpu.prepare PLACE moved --include HEADERS --tensorrt-include INCLUDE   # of one portable package, for three runtimes
  python -m tests.gpu.prepare PLACE speed --include HEADERS [--only smollm2]  # no weights, for tools.benchmarks.gpu_package
  python -m tests.gpu.prepare PLACE pack                                      # PLACE/part00, part01 ...: what travels, in small pieces

PLACE holds a folder a package and PyTorch's recorded answers beside it (NAME.npz). On the machine with the GPU,
`STILL_GPU_PLACE=PLACE pytest -n 8 --maxschedchunk 1 -m "gpu or tensorrt" tests/gpu` proves what PLACE has; of pieces it is what
`cat part*/content.tar.* | tar xz -C PLACE` gives.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tools.benchmarks.geometries import LLAMA_8B, SMOLLM2, config_of

ROOT = Path(__file__).resolve().parents[2]
SMALL_MODEL, DEMO_ADAPTER = ROOT / "assets/small", ROOT / "assets/smollm2-135m-instruct-mixed-2"
PART_BYTES = 36_000_000
LENGTHS = "1,63,64,65,129,512"
CONTEXT = 65536 + 256
SMALL = ("small-float32", "small-float16", "small-bfloat16")
DEMO = ("demo-float32", "demo-float16", "demo-int4")
EXPERTS = tuple(
    f"experts-{name}"
    for name in ("qwen3_5_moe", "granitemoehybrid", "kimi_linear", "nemotron_h", "minimax", "lfm2_moe")
)
GUESSES = ("guesses-float32", "guesses-float16")
OTHER_GPU, GENAI = "other-gpu", "genai"
MOVED = ("moved-onnx", "moved-trt")
TASKS = ("allmem", "conv", "delta", "gated", "gated_delta", "hybrid", "mamba2", "rwkv7")
ENGINE_TASKS = ("conv", "delta", "gated", "gated_delta", "hybrid", "mamba2")
"""Those whose ops have plugins."""
QUANTIZED = {
    each.replace(", ", "-").replace(" ", "_"): each
    for each in (
        *("gptq", "gptq, zero points", "gptq, act-order", "awq", "packed int4", "int8, channels", "fp8, channels"),
        *("fp8, blocks of 128", "fp8 of transformers", "nvfp4", "nvfp4 of modelopt", "nf4", "mixed"),
    )
}
"""Forms of checkpoints that quantizers write, by names of packages."""
REFERENCE: list[str] = []
"""Flags of who answers; --reference-device fills it."""
LINEAR_FAMILIES = (
    *("qwen3_5_text", "granitemoehybrid", "kimi_linear", "falcon_h1", "mamba2", "lfm2", "qwen3_next", "olmo_hybrid"),
    *("gated_deltanet", "delta_net", "gla", "hgrn2", "minicpm_sala", "hgrn", "retnet", "transnormer", "mamba", "jamba"),
    *("polaformer", "inline", "mirrorla", "moh_llama"),
)
BODIES = (
    *("rwkv7", "mamba3", "rat", "flux_qwen3", "parallax", "local_linear", "llama_with_landmark", "routing_transformer"),
    "neural_attention_search_linear_attn_gdn",
)
"""Families without kernels: standard ops on the GPU."""
STATES: dict[str, dict[str, Any]] = {
    "no_salient": {"salient_per_chunk": 0, "capacity_tokens": 1024},
    "fold_oldest": {"overflow": "fold_oldest", "capacity_tokens": 256},
}
"""Small random models whose salient cache has no rows, or always the same."""
ENGINE = ("--capacity-tokens", "4096", "--prefill-tokens", "512", "--batch")
RANDOM = ("--capacity-tokens", "1024", "--batch", "1", "--prefill-tokens", "512")
ENGINES: dict[str, tuple[str, ...]] = {
    "trt-demo": ("--overlay", str(DEMO_ADAPTER), "--capacity-tokens", "8448", "--batch", "1"),
    "trt-verified": (*ENGINE, "4", "--attach-untrained"),
    "trt-one_row": (*ENGINE, "1", "--attach-untrained"),
    "trt-small_model": (*ENGINE, "4"),
    "trt-small_int4": (*ENGINE, "4", "--quantize", "int4"),
    **{f"trt-{name}": (*ENGINE, "4", "--dtype", name.split("-")[1], "--speculate", "16") for name in GUESSES},
    **{f"trt-{name}": ("--prefill-tokens", "512", "--batch", "4") for name in STATES},
    **{f"trt-{name}": RANDOM for name in (*LINEAR_FAMILIES, *EXPERTS)},
    **{f"trt-quantized-{name}": (*RANDOM, "--attach-untrained") for name in QUANTIZED},
    **{f"trt-{name}_int4": (*RANDOM, "--quantize", "int4") for name in EXPERTS[:2]},
}
"""What is proven on TensorRT; `verified` and `one_row` are of --model, linear families random models of two layers each."""


def export(
    target: str, place: Path, name: str, model: Any, *flags: Any, lengths: str | None = LENGTHS, verb: str = "export"
) -> Path:
    """One package, and PyTorch's answers for prompts of `lengths`, without which nothing is recorded."""
    still = [sys.executable, "-m", "still_export.cli.main"]
    command = [*still, verb, model, "--to", target, *flags, "-o", place / name, "--force", "--quiet"]
    subprocess.run([str(c) for c in command], check=True)
    if lengths is not None:
        record = [*still, "verify", place / name, "--record", place / f"{name}.npz", "--lengths", lengths, "--quiet"]
        subprocess.run([str(c) for c in (*record, *REFERENCE)], check=True)
    return place / name


def native(options: argparse.Namespace, arch: str | None = None) -> tuple[str, ...]:
    """Flags of a package with kernels for ONNX Runtime."""
    if not options.include:
        sys.exit("--include: give the folder of onnxruntime_c_api.h.")
    return ("--native", "--onnxruntime-include", options.include, "--arch", arch or options.arch)


def small(options: argparse.Namespace) -> None:
    """The small model in every type, with steps of guessed tokens, and once for another GPU."""
    other = native(options, "sm_80" if options.arch != "sm_80" else "sm_90")
    for name in wanted(options, (*SMALL, *GUESSES, OTHER_GPU, GENAI)):
        recorded = LENGTHS if name in (*SMALL[:2], *GUESSES) else None
        if name == GENAI:
            export("genai", options.place, name, SMALL_MODEL, *native(options)[:-2], lengths=recorded)
            continue
        dtype = "float16" if name == OTHER_GPU else name.split("-")[1]
        flags = (*(other if name == OTHER_GPU else native(options)), "--dtype", dtype)
        more = ("--speculate", "16") if name in GUESSES else ()
        export("onnx", options.place, name, SMALL_MODEL, *flags, *more, lengths=recorded)


def demo(options: argparse.Namespace) -> None:
    """The demo's model, which has the quality."""
    import still_export

    model, overlay = still_export.demo_model_path(), ("--overlay", DEMO_ADAPTER, "--capacity-tokens", "8448")
    types: dict[str, tuple[tuple[str, ...], str]] = {
        "demo-float32": (("--dtype", "float32"), LENGTHS),
        "demo-float16": (("--dtype", "float16"), LENGTHS),
        "demo-int4": (("--dtype", "float16", "--quantize", "int4"), "1,63,65,129"),
    }
    for name in wanted(options, DEMO):
        flags, lengths = types[name]
        export("onnx", options.place, name, model, *native(options), *overlay, *flags, lengths=lengths)


def linear(options: argparse.Namespace) -> None:
    """Small random models of linear families."""
    for family in wanted(options, LINEAR_FAMILIES):
        model = linear_folder(options.place / f"blank-{family}", family)
        for dtype in ("float32", "float16"):
            flags = ("--capacity-tokens", "1024", "--dtype", dtype)
            export("onnx", options.place, f"linear-{family}-{dtype}", model, *native(options), *flags)
        shutil.rmtree(model)


def quantized(options: argparse.Namespace) -> None:
    """A small model as each quantizer writes it, in float16 by its codes where the kernels take them."""
    for name in wanted(options, QUANTIZED):
        model, scheme = quantized_folder(options.place, name)
        flags = ("--dtype", "float16", "--attach-untrained", "--capacity-tokens", "1024", "--quantize", scheme)
        export("onnx", options.place, f"quantized-{name}", model, *native(options), *flags)


def bodies(options: argparse.Namespace) -> None:
    """Small random models of families without kernels, beside their packages: of choices that nearly tie PyTorch follows the package's, so
    it answers where they run."""
    for family in wanted(options, BODIES):
        model = linear_folder(options.place / f"model-{family}", family)
        for dtype in ("float32", "float16"):
            flags = ("--capacity-tokens", "1024", "--dtype", dtype)
            export("onnx", options.place, f"bodies-{family}-{dtype}", model, *flags, lengths=None)


def trt(options: argparse.Namespace) -> None:
    """Packages of ENGINES; those of a model need it."""
    import still_export

    if not options.tensorrt_include:
        sys.exit("--tensorrt-include: give the folder of TensorRT's NvInfer.h.")
    for name in wanted(options, [each.removeprefix("trt-") for each in ENGINES]):
        more: tuple[str, ...] = ()
        if name in LINEAR_FAMILIES:
            model: Any = linear_folder(options.place / f"blank-{name}", name, published=True)
        elif name in STATES:
            model = state_folder(options.place / f"blank-{name}", **STATES[name])
        elif name.startswith("experts-"):
            model = expert_folder(options.place / f"blank-{name}", name.removeprefix("experts-").removesuffix("_int4"))
        elif name.startswith("quantized-"):
            model, scheme = quantized_folder(options.place, name.removeprefix("quantized-"))
            more = ("--quantize", scheme)
        elif name == "demo":
            model = still_export.demo_model_path()
        elif name.startswith(("small", "guesses")):
            model = SMALL_MODEL
        elif options.model:
            model = options.model
        else:
            print(f"left out: {name}, without --model")
            continue
        flags = ("--arch", options.arch, "--tensorrt-include", options.tensorrt_include, *ENGINES[f"trt-{name}"], *more)
        export("trt", options.place, f"trt-{name}", model, *flags)
        shutil.rmtree(options.place / f"blank-{name}", ignore_errors=True)
    tensorrt_site(options.place)


def tensorrt_site(place: Path) -> None:
    """What this project needs in TensorRT's Python, which has none of it."""
    if not (site := place / "site").is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--only-binary=:all:"]
        needed = ["typer", "rich", "pydantic", "filelock", "tokenizers", "safetensors"]
        subprocess.run([*install, "--target", site, *needed], check=True)


def tasks(options: argparse.Namespace) -> None:
    """Trained models whose task is exact, in both types, and for TensorRT where its headers are given."""
    from tests.still_export.evaluation.test_tasks import task_of

    if options.tensorrt_include:
        tensorrt_site(options.place)
    for name in wanted(options, TASKS):
        np.savez(options.place / f"task-{name}.npz", **task_of(name)._asdict())
        kernels = native(options) if name in ENGINE_TASKS else ()
        for dtype in ("float32", "float16"):
            given = (ROOT / "assets/tasks" / name, *kernels, "--dtype", dtype)
            export("onnx", options.place, f"task-{name}-{dtype}", *given, lengths=None)
        if options.tensorrt_include and name in ENGINE_TASKS:
            sizes = ("--capacity-tokens", "512", "--prefill-tokens", "256", "--batch", "6")
            given = (
                ROOT / "assets/tasks" / name,
                "--arch",
                options.arch,
                "--tensorrt-include",
                options.tensorrt_include,
            )
            export("trt", options.place, f"trt-task-{name}", *given, *sizes, lengths=None)


def moved(options: argparse.Namespace) -> None:
    """Of one portable package one for ONNX Runtime and one for TensorRT, whose saved states are each other's."""
    if not options.tensorrt_include:
        sys.exit("--tensorrt-include: give the folder of TensorRT's NvInfer.h.")
    flags = ("--no-native", "--dtype", "float32", *ENGINE[:2], "--speculate", "16")
    portable = export("onnx", options.place, "portable", SMALL_MODEL, *flags, lengths=None)
    engine = ("--arch", options.arch, "--tensorrt-include", options.tensorrt_include, *ENGINE[2:], "4")
    for name, own in zip(MOVED, (native(options), engine), strict=True):
        export(name.removeprefix("moved-"), options.place, name, portable, *own, lengths=None, verb="lower")
    shutil.rmtree(portable)


def speed(options: argparse.Namespace) -> None:
    """SmolLM2's geometry, and Llama-3.1-8B's in float16 and with 4 bits, four layers (in longer calls, too) and whole, which takes 32 GB
    of disk, without weights: zeros are made here, random numbers there. For TensorRT where --tensorrt-include is given, else for ONNX
    Runtime."""
    from still_export.mixers.layers import FULL, HYBRID

    kinds = [FULL if i in (17, 18) else HYBRID for i in range(30)]  # as the demo's
    part = {"num_hidden_layers": 4, "vocab_size": 32000}
    long, four = ("--capacity-tokens", str(CONTEXT)), ("--batch", "8", "--quantize", "int4")
    packages: dict[str, tuple[str, dict[str, int], tuple[str, ...], list[str] | None]] = {
        "smollm2": (SMOLLM2, {}, ("--capacity-tokens", "8448", "--batch", "1"), kinds),
        "llama": (LLAMA_8B, part, (*long, "--batch", "8"), None),
        "llama-calls": (LLAMA_8B, part, (*long, "--prefill-tokens", "16384"), None),
        "llama-int4": (LLAMA_8B, part, (*long, *four), None),
        "llama-whole": (LLAMA_8B, {}, (*long, "--batch", "8"), None),
        "llama-whole-int4": (LLAMA_8B, {}, (*long, *four), None),
    }
    for name in wanted(options, packages):
        geometry, changed, flags, layers = packages[name]
        model = blank_folder(options.place / "blank", geometry, layers, **changed)
        if options.tensorrt_include:
            own = ("--arch", options.arch, "--tensorrt-include", options.tensorrt_include, *flags)
            package = export("trt", options.place, f"speed-trt-{name}", model, *own, lengths=None)
        elif name == "llama-calls":  # a size of an engine; ONNX Runtime takes any
            continue
        else:
            own = (*native(options), "--dtype", "float16", *(f for f in flags if f not in ("--batch", "1", "8")))
            package = export("onnx", options.place, f"speed-{name}", model, *own, lengths=None)
        (package / "model.onnx.data").unlink()
    shutil.rmtree(options.place / "blank", ignore_errors=True)


def pack(options: argparse.Namespace) -> None:
    """What the GPU machine needs, in pieces."""
    place: Path = options.place
    for old in place.glob("part*"):
        shutil.rmtree(old)
    archive = place / "content.tar.gz"
    subprocess.run(["tar", "-czf", archive, "--exclude=content.tar.gz", "-C", place, "."], check=True)
    subprocess.run(["split", "-b", str(PART_BYTES), "-d", archive, place / "content.tar."], check=True)
    archive.unlink()
    for number, piece in enumerate(sorted(place.glob("content.tar.[0-9]*"))):
        folder = place / f"part{number:02d}"
        folder.mkdir()
        shutil.move(piece, folder / piece.name)
        print(folder, (folder / piece.name).stat().st_size)


def wanted(options: argparse.Namespace, known: Any) -> list[str]:
    """Names of --only, or all."""
    names = options.only.split(",") if options.only else list(known)
    if unknown := set(names) - set(known):
        sys.exit(f"--only {', '.join(sorted(unknown))}: unknown; known: {', '.join(known)}.")
    return names


def linear_folder(folder: Path, family: str, published: bool = False) -> Path:
    """A small random model of a linear family; `published`: with the layers that its published models have beside each other."""
    from tests.still_export.linear_models import linear_model, published_pair

    shutil.rmtree(folder, ignore_errors=True)
    linear_model(family, **(published_pair(family) if published else {})).save_pretrained(folder)
    return folder


def state_folder(folder: Path, **still: Any) -> Path:
    """A small random STILL model of widths that engines' kernels have."""
    import torch

    from tests.still_export.tiny import still_model

    shutil.rmtree(folder, ignore_errors=True)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    still_model("llama", torch.float32, sizes=sizes, chunk_size=32, **still).save_pretrained(folder)
    return folder


def expert_folder(folder: Path, name: str) -> Path:
    """A small random model with experts, of widths that engines' kernels have."""
    from tests.still_export.expert_models import expert_model, published_sizes

    shutil.rmtree(folder, ignore_errors=True)
    expert_model(name, **published_sizes(name)).save_pretrained(folder)
    return folder


def quantized_folder(place: Path, name: str) -> tuple[Path, str]:
    """A small model in a form of QUANTIZED, which stays in PLACE, and the scheme that keeps its codes where one does."""
    from tests.still_export.models.quantizers import FORMS, make_small

    folder, made = place / f"model-quantized-{name}", FORMS[QUANTIZED[name]]
    if not folder.is_dir():
        base = place / "blank-base"
        shutil.rmtree(base, ignore_errors=True)
        made.maker(make_small(base), folder)
        shutil.rmtree(base)
    return folder, made.scheme


def blank_folder(folder: Path, geometry: str, layers: list[str] | None, **changed: Any) -> Path:
    """A STILL model of a geometry in float16, its weights zero; all hybrid without `layers`."""
    import torch
    from transformers import AutoModelForCausalLM

    from still_export.mixers.config import StillConfig
    from still_export.models import attach_untrained

    shutil.rmtree(folder, ignore_errors=True)
    torch.set_default_dtype(torch.float16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(geometry, **changed))
    model.to_empty(device="cpu")
    model = attach_untrained(model, StillConfig(layer_types=tuple(layers)) if layers else StillConfig())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model.save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = {each.__name__: each for each in (small, demo, linear, quantized, bodies, trt, tasks, moved, speed, pack)}
    parser.add_argument("place", type=Path)
    parser.add_argument("packages", choices=made)
    parser.add_argument("--include", help="folder of onnxruntime_c_api.h")
    parser.add_argument("--tensorrt-include", help="folder of NvInfer.h")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--model", help="model folder that `trt` proves beside those of this repository, untrained")
    parser.add_argument("--reference-device", help="cuda: PyTorch answers on the GPU, where one is")
    parser.add_argument("--only", help="of linear and bodies these families, of others these packages; commas between")
    options = parser.parse_args()
    options.place.mkdir(parents=True, exist_ok=True)
    REFERENCE[:] = ["--reference-device", options.reference_device] if options.reference_device else []
    made[options.packages](options)


if __name__ == "__main__":
    main()
