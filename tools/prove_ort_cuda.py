#!/usr/bin/env python3
"""Show that packages run right on ONNX Runtime's CUDA provider, on a GPU machine that reaches no registry and has little time.

  python tools/prove_ort_cuda.py prepare OUT --include HEADERS [--demo] [--arch sm_90]    # with PyTorch and Triton, no GPU
  python tools/prove_ort_cuda.py prepare OUT --include HEADERS --large                    # Llama-3.1-8B's geometry alone
  PYTHONPATH=. python tools/prove_ort_cuda.py prepare OUT --include HEADERS --linear qwen3_5_text,kimi_linear
  python3 tools/prove_ort_cuda.py run PLACE --site FOLDER [--deadline 230] [--jobs 1]     # with the GPU

The second makes packages of four of 32 layers and 32,000 of 128,256 tokens, in float16 and with 4 bits; the third of small random models
of these linear families alone, in float32 and float16. `prepare` writes OUT/part00,
part01, ...: folders of at most 40 MB with packages and PyTorch's answers. PLACE on the GPU machine holds what
`cat OUT/part*/content.tar.* | tar xz -C PLACE` gives. Beside this source tree `run` needs torch's own packages of CUDA, numpy, and in
--site (repeatable) onnxruntime-gpu and, for verify, typer, rich and pydantic: `pip install --target FOLDER --no-deps ...`.

Each check (check_ort_cuda.py) is a process of its own with a time limit and one line in the table, which is printed last and written to
$OUT after each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PART_BYTES = 36_000_000
LENGTHS = "1,63,64,65,129,512"
SMALL = ("small-float32", "small-float16", "small-bfloat16")
LINEAR = "linear-"
OTHER_GPU = "other-gpu"
SPEED, PEER, LARGE = "speed", "genai", "large"
LARGE_CAPACITY = 65536 + 256
GEOMETRY = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
"""Of SmolLM2-135M."""
LARGE_GEOMETRY = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
"""Of Llama-3.1-8B, with fewer layers and a smaller vocabulary."""
SOFTMAX_LAYERS = (17, 18, 20, 23)
"""Of the demo model."""


# Where PyTorch is.


def prepare(options: argparse.Namespace) -> None:
    """Make the packages, record PyTorch's answers, and split what the GPU machine needs."""
    shutil.rmtree(options.out, ignore_errors=True)
    content = options.out / "content"
    content.mkdir(parents=True)
    native = ["--native", "--onnxruntime-include", options.include, "--arch"]

    def export(name: str, model: Any, *flags: Any, arch: str = options.arch) -> Path:
        command = ["still-export", model, "--to", "onnx", *native, arch, *flags, "-o", content / name, "--quiet"]
        subprocess.run([str(c) for c in command], check=True)
        return content / name

    def record(package: Path, lengths: str = LENGTHS) -> None:
        command = ["still-export", "verify", package, "--record", f"{package}.npz", "--lengths", lengths, "--quiet"]
        subprocess.run([str(c) for c in command], check=True)

    if options.linear:
        from tests.still_export.linear_models import linear_model

        for family in options.linear.split(","):
            linear_model(family).save_pretrained(options.out / "blank")
            for dtype in ("float32", "float16"):
                record(
                    export(
                        f"{LINEAR}{family}-{dtype}",
                        options.out / "blank",
                        "--capacity-tokens",
                        "1024",
                        "--dtype",
                        dtype,
                    )
                )
            shutil.rmtree(options.out / "blank")
        pack(options.out, content)
        return
    if options.large:
        model = blank_model(options.out / "blank", geometry=LARGE_GEOMETRY)
        for name, more in ((f"{LARGE}-float16", ()), (f"{LARGE}-int4", ("--quantize", "int4"))):
            given = ("--attach-untrained", "--dtype", "float16", "--capacity-tokens", LARGE_CAPACITY)
            (export(name, model, *given, *more) / "model.onnx.data").unlink()  # random numbers are made there
        pack(options.out, content)
        return
    for name in SMALL:
        package = export(name, ROOT / "assets/small", "--dtype", name.split("-")[1])
        if name != "small-bfloat16":
            record(package)
    export(OTHER_GPU, ROOT / "assets/small", "--dtype", "float16", arch="sm_80" if options.arch != "sm_80" else "sm_90")
    speed = export(SPEED, blank_model(options.out / "blank", SOFTMAX_LAYERS), "--capacity-tokens", "8448")
    (speed / "model.onnx.data").unlink()  # random numbers are made there
    if options.peer:
        base = blank_model(options.out / "base")
        for path in (ROOT / "assets/small").glob("tokenizer*"):
            shutil.copy(path, base)  # its builder wants one
        for precision in ("fp16", "int4"):
            build = [
                sys.executable,
                "-m",
                "onnxruntime_genai.models.builder",
                "-i",
                base,
                "-o",
                content / f"{PEER}-{precision}",
            ]
            build += [
                "-p",
                precision,
                "-e",
                "cuda",
                "-c",
                options.out / "cache",
                "--extra_options",
                "enable_cuda_graph=1",
            ]
            subprocess.run([str(c) for c in build], check=True)
    if options.demo:
        import still_export

        overlay = ["--overlay", ROOT / "assets/smollm2-135m-instruct-mixed", "--capacity-tokens", "8448"]
        for dtype in ("float32", "float16"):
            record(export(f"demo-{dtype}", still_export.demo_model_path(), *overlay, "--dtype", dtype))
        four = ("--dtype", "float16", "--quantize", "int4")
        record(export("demo-int4", still_export.demo_model_path(), *overlay, *four), "1,63,65,129")
    if options.model:
        for dtype in ("float32", "float16"):
            untrained = ("--attach-untrained", "--capacity-tokens", "4096", "--dtype", dtype)
            record(export(f"model-{dtype}", options.model, *untrained))
    pack(options.out, content)


def pack(out: Path, content: Path) -> None:
    """What the GPU machine needs in pieces; what they were made of goes."""
    archive = out / "content.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", content, "."], check=True)
    subprocess.run(["split", "-b", str(PART_BYTES), "-d", archive, out / "content.tar."], check=True)
    archive.unlink()
    for number, piece in enumerate(sorted(out.glob("content.tar.[0-9]*"))):
        folder = out / f"part{number:02d}"
        folder.mkdir()
        shutil.move(piece, folder / piece.name)
        print(folder, (folder / piece.name).stat().st_size)
    for made in (content, *(out / name for name in ("blank", "base", "cache"))):
        shutil.rmtree(made, ignore_errors=True)


def blank_model(
    folder: Path, softmax_layers: tuple[int, ...] | None = None, geometry: dict[str, Any] = GEOMETRY
) -> Path:
    """A model folder of a geometry in float16, its weights zero; STILL with these softmax layers, or the base."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from still_export.mixers.config import StillConfig
    from still_export.mixers.layers import FULL, HYBRID
    from still_export.models import attach_untrained

    torch.set_default_dtype(torch.float16)
    config = LlamaConfig(max_position_embeddings=131072, **geometry)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    if softmax_layers is not None:
        layers = range(config.num_hidden_layers)
        still = StillConfig(layer_types=tuple(FULL if i in softmax_layers else HYBRID for i in layers))
        model = attach_untrained(model, still)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model.save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


# Where the GPU is.


def wanted(place: Path) -> list[tuple[str, str]]:
    """Checks and packages that are there, what matters most first."""
    linear = [path.name for path in sorted(place.glob(f"{LINEAR}*")) if path.is_dir()]
    models = [
        *SMALL,
        *(f"{name}-{dtype}" for name in ("model", "demo") for dtype in ("float32", "float16")),
        "demo-int4",
    ]
    list_ = [("nodes", SMALL[1]), ("kernels and bodies", SMALL[0]), ("graph", SMALL[1]), ("speed replayed", SPEED)]
    list_ += [("speed replayed", name) for name in ("demo-float16", "demo-int4")]
    list_ += [("large", path.name) for path in sorted(place.glob(f"{LARGE}-*"))]
    list_ += [("peer", path.name) for path in sorted(place.glob(f"{PEER}-*"))]
    list_ += [("verify", name) for name in (*models, *linear) if (place / f"{name}.npz").is_file()]
    list_ += [("buffers apart", SMALL[1]), ("runs at once", SMALL[1]), ("refusal", OTHER_GPU)]
    list_ += [("kernels and bodies", name) for name in (*models[1:], *linear)]
    list_ += [("graph", name) for name in (*models, *linear) if name != SMALL[1]]
    list_ += [(check, name) for name in linear for check in ("nodes", "buffers apart")]
    list_ += [("kernels", SPEED), ("pieces", SPEED)]
    list_ += [("kernels", path.name) for path in sorted(place.glob(f"{LARGE}-*"))]
    list_ += [("nodes", SPEED), ("speed by call", SPEED), ("speed of bodies", SPEED)]
    return [(check, name) for check, name in list_ if (place / name).is_dir()]


def run(options: argparse.Namespace) -> None:
    """All checks until the deadline; the table."""
    end = time.monotonic() + options.deadline
    out = Path(os.environ.get("OUT", options.place)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    paths = [*map(str, options.site), str(ROOT), str(ROOT / "graphs"), str(ROOT / "kernels")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, env=environment
    ).stdout.strip()
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in (found, os.environ.get("LD_LIBRARY_PATH", "")) if p)
    environment["XDG_CONFIG_HOME"] = tempfile.mkdtemp()  # the list of trusted libraries
    rows = []

    def checked(task: tuple[str, str]) -> None:
        """Run one check; its row."""
        check, name = task
        left, begin = end - time.monotonic(), time.monotonic()
        if left < 8:
            text = "not run: no time left"
        else:
            command = [sys.executable, ROOT / "tools/check_ort_cuda.py", check, (options.place / name).resolve()]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, env=environment, timeout=min(left, options.limit)
                )
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
                text = lines[-1].removeprefix("RESULT ") if lines else f"FAILED ({done.returncode}): {last[:300]}"
                (out / f"{check}-{name}.log".replace(" ", "_").replace(",", "")).write_text(done.stdout + done.stderr)
            except subprocess.TimeoutExpired:
                text = "FAILED: out of time"
        rows.append(f"{name:32} {check:20} {text} [{time.monotonic() - begin:.0f} s]")
        print(rows[-1], flush=True)
        (out / "ort-cuda.txt").write_text("\n".join(rows) + "\n")

    only = options.only.split(",") if options.only else []
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(checked, [task for task in wanted(options.place) if not only or task[0] in only]))
    print("\n=== ONNX Runtime CUDA ===", *sorted(rows), sep="\n")


LIBRARIES = """
import glob, os, sys
roots = {os.path.join(p, "nvidia") for p in sys.path if p}
print(os.pathsep.join(sorted({d for r in roots for d in glob.glob(r + "/*/lib") + glob.glob(r + "/lib")})))
"""
"""Folders of CUDA's libraries among the installed packages."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare")
    verb.add_argument("out", type=Path)
    verb.add_argument("--include", required=True, help="folder of onnxruntime_c_api.h")
    verb.add_argument("--arch", default="sm_90")
    verb.add_argument(
        "--peer", action="store_true", help="onnxruntime-genai's export of the base beside it; needs that package"
    )
    verb.add_argument("--demo", action="store_true", help="the demo model too, in float32, float16 and int4: 1 GB")
    verb.add_argument("--model", help="this model folder too, untrained, in float32 and float16")
    verb.add_argument("--large", action="store_true", help="Llama-3.1-8B's geometry, and nothing else")
    verb.add_argument("--linear", help="these linear families, with commas between, and nothing else")
    verb = verbs.add_parser("run")
    verb.add_argument("place", type=Path)
    verb.add_argument("--site", type=Path, action="append", default=[], help="folder of Python packages; repeatable")
    verb.add_argument("--deadline", type=float, default=230, help="seconds for all checks (default 230)")
    verb.add_argument("--limit", type=float, default=60, help="seconds for one check (default 60)")
    verb.add_argument("--jobs", type=int, default=1, help="checks at once; more disturb the speeds (default 1)")
    verb.add_argument("--only", help="names of checks, with commas between")
    options = parser.parse_args()
    {"prepare": prepare, "run": run}[options.verb](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
