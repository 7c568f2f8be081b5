#!/usr/bin/env python3
"""Show that packages run right on ONNX Runtime's CUDA provider, on a GPU machine that reaches no registry and has little time.

  python tools/prove_ort_cuda.py prepare OUT --include HEADERS [--demo] [--arch sm_90]    # with PyTorch and Triton, no GPU
  python3 tools/prove_ort_cuda.py run PLACE --site FOLDER [--deadline 230]                # with the GPU

`prepare` writes OUT/part00, part01, ...: folders of at most 40 MB with packages and PyTorch's answers. PLACE on the GPU machine holds what
`cat OUT/part*/content.tar.* | tar xz -C PLACE` gives. Beside this source tree `run` needs torch's own packages of CUDA, numpy, and in
--site (repeatable) onnxruntime-gpu and, for verify, typer, rich and pydantic: `pip install --target FOLDER --no-deps ...`.

Each check is a process of its own with a time limit and one line in the table, which is printed last and written to $OUT after each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PART_BYTES = 36_000_000
LENGTHS = "1,63,64,65,129,512"
CONTEXTS = (1024, 4096, 8000)
SMALL = ("small-float32", "small-float16", "small-bfloat16")
OTHER_GPU = "other-gpu"
SPEED, PEER = "speed", "genai"
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

    for name in SMALL:
        package = export(name, ROOT / "assets/small", "--dtype", name.split("-")[1])
        if name != "small-bfloat16":
            record(package)
    export(OTHER_GPU, ROOT / "assets/small", "--dtype", "float16", arch="sm_80" if options.arch != "sm_80" else "sm_90")
    speed = export(SPEED, blank_model(options.out / "blank", SOFTMAX_LAYERS), "--capacity-tokens", "8448")
    (speed / "model.onnx.data").unlink()  # zeros: made again there
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
    archive = options.out / "content.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", content, "."], check=True)
    subprocess.run(["split", "-b", str(PART_BYTES), "-d", archive, options.out / "content.tar."], check=True)
    archive.unlink()
    for number, piece in enumerate(sorted(options.out.glob("content.tar.[0-9]*"))):
        folder = options.out / f"part{number:02d}"
        folder.mkdir()
        shutil.move(piece, folder / piece.name)
        print(folder, (folder / piece.name).stat().st_size)
    for made in (content, *(options.out / name for name in ("blank", "base", "cache"))):
        shutil.rmtree(made, ignore_errors=True)


def blank_model(folder: Path, softmax_layers: tuple[int, ...] | None = None) -> Path:
    """A model folder of the geometry in float16, its weights zero; STILL with these softmax layers, or the base."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from still_export.mixers.config import FULL, HYBRID, StillConfig
    from still_export.models import attach_untrained

    torch.set_default_dtype(torch.float16)
    config = LlamaConfig(max_position_embeddings=131072, **GEOMETRY)
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


# Where the GPU is: checks, each in a process of its own.


def opened(package: Path, replay: bool = False, **options: Any) -> Any:
    """The package's runner on CUDA, started."""
    from still_export.package.trust import trust_package
    from still_export.runners.ort import OrtModel

    trust_package(package)
    model = OrtModel(package, provider="cuda", check=False, replay=replay, **options)
    if model.native is None:
        raise RuntimeError("the kernels were not loaded")
    model.start()
    return model


def without_kernels(package: Path) -> Any:
    """The same with function bodies."""
    from still_export.runners import ort

    ort.native_library = lambda *a: None
    model = ort.OrtModel(package, provider="cuda", check=False)  # no kernels, no replays
    model.start()
    return model


def tokens_of(model: Any, count: int, seed: int = 0) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(3, model.manifest["model"]["vocab_size"], (1, count))


def difference(first: Any, second: Any) -> float:
    """Largest difference over the largest value."""
    import numpy as np

    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return float("nan")
    return float(np.abs(first - second).max(initial=0) / max(np.abs(second).max(initial=0), 1e-30))


def partition(package: Path) -> str:
    """On which provider nodes ran, from ONNX Runtime's profile."""
    os.chdir(tempfile.mkdtemp())
    model = opened(package, profile=True)
    model.feed(tokens_of(model, 100))
    model.feed(tokens_of(model, 1))
    events = json.loads(Path(model.session.end_profiling()).read_text())
    nodes = {
        (e["name"], e["args"]["op_name"], e["args"]["provider"]) for e in events if "provider" in e.get("args", {})
    }
    still = [op for name, op, provider in nodes if op in model.manifest["ops"] and provider.startswith("CUDA")]
    cpu = sorted({op for _, op, provider in nodes if provider.startswith("CPU")})
    copies = sum(op.startswith("Memcpy") for _, op, _ in nodes)
    wanted = len(model.manifest["model"]["layer_types"])
    verdict = "ok" if len(still) == wanted else "FAILED"
    return f"{verdict}: {len(still)} of {wanted} still nodes on CUDA, {copies} copies, on the CPU: {' '.join(cpu) or 'none'}"


def kernels_and_bodies(package: Path) -> str:
    """Logits and states of a prefill and 70 steps over chosen tokens."""
    import numpy as np

    results = []
    for model in (opened(package), without_kernels(package)):
        tokens = tokens_of(model, 270)
        logits = [model.feed(tokens[:, :200])]
        logits += [model.feed(tokens[:, i : i + 1]) for i in range(200, 270)]
        results.append((np.stack([x[0, -1] for x in logits]), model.state_arrays()))
    (logits, states), (other, theirs) = results
    agree = float((logits.argmax(-1) == other.argmax(-1)).mean())
    worst = max(states, key=lambda name: difference(states[name], theirs[name]))
    by = difference(states[worst], theirs[worst])
    return f"logits differ by {difference(logits, other):.1e}, top-1 {agree:.1%}, states by {by:.1e} ({worst})"


def buffers_apart(package: Path) -> str:
    """Past and present in different buffers against one buffer, bit for bit."""
    import numpy as np
    import onnxruntime

    model = opened(package)
    tokens = tokens_of(model, 140)
    model.feed(tokens[:, :130])
    before, length = model.state_arrays(), model.length.copy()
    wrong = []
    for count in (1, 9):  # decode, prefill
        model.load(before, length, count)
        expected = model.feed(tokens[:, :count])
        kept = model.state_arrays()
        model.load(before, length, count)
        binding, values = model.session.io_binding(), {}
        given = {"input_ids": tokens[:, :count], "new_tokens": np.array([count]), "past_length": length}
        for name, array in given.items():
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, np.int64), "cuda", 0)
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_output("logits", "cpu")
        binding.bind_output("present_length", "cpu")
        for state in model.table:
            past = model._past[state.name]
            rubbish = np.full(past.shape(), 7, model._array(past).dtype)
            values[state.present] = model._tensor(rubbish, state.dtype)
            binding.bind_ortvalue_input(state.past, past)
            binding.bind_ortvalue_output(state.present, values[state.present])
        model.session.run_with_iobinding(binding)
        same = np.array_equal(model._floats(binding.get_outputs()[0]), expected)
        wrong += [] if same else [f"logits of {count}"]
        wrong += [
            f"{s.name} of {count}"
            for s in model.table
            if not np.array_equal(model._array(values[s.present]), kept[s.name])
        ]
        wrong += [
            f"past {s.name}"
            for s in model.table
            if not np.array_equal(model._array(model._past[s.name]), before[s.name])
        ][:3]
    return "ok: bit for bit, past left alone" if not wrong else f"FAILED: {', '.join(wrong[:6])}"


def runs_at_once(package: Path) -> str:
    """One session from four threads with states of their own, against each alone, bit for bit."""
    import copy

    import numpy as np

    base = opened(package)

    def sequence(model: Any, seed: int) -> list[Any]:
        tokens = tokens_of(model, 120, seed)
        model.start()
        logits = [model.feed(tokens[:, :70])]
        logits += [model.feed(tokens[:, i : i + 1]) for i in range(70, 120)]
        return [*logits, *model.state_arrays().values()]

    alone = [sequence(copy.copy(base), seed) for seed in range(4)]
    found: list[Any] = [None] * 4

    def work(seed: int) -> None:
        try:
            found[seed] = sequence(copy.copy(base), seed)
        except Exception as error:
            found[seed] = error

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [repr(f)[:200] for f in found if not isinstance(f, list)]
    if failed:
        return f"FAILED: {failed[0]}"
    same = [all(np.array_equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(alone, found, strict=True)]
    return "ok: 4 threads, bit for bit" if all(same) else f"FAILED: {same.count(False)} of 4 differ"


def graph(package: Path) -> str:
    """Steps replayed from CUDA graphs against single steps, states bit for bit, over a growing state and two rows."""
    import numpy as np

    from still_export.proof.sessions import Session

    model = opened(package, replay=True)
    tokens = np.concatenate([tokens_of(model, 61), tokens_of(model, 61, 1)])
    (check,) = Session(model).checks({"input_ids": tokens, "new_tokens": np.array([61, 40])}, 140)
    return f"{'ok' if check.passed else 'FAILED'}: {check.name}; {check.detail}"


def refusal(package: Path) -> str:
    """A package whose kernels are for another GPU says so."""
    try:
        opened(package)
    except Exception as error:
        text = str(error)
        return f"{'ok' if 'the archive has' in text and 'the GPU is' in text else 'FAILED'}: {text[-230:]}"
    return "FAILED: it was opened"


def verify(package: Path) -> str:
    """The verb, against PyTorch's recorded answers."""
    command = [
        sys.executable,
        "-m",
        "still_export.cli.main",
        "verify",
        str(package),
        "--provider",
        "cuda",
        "--trust-native",
    ]
    done = subprocess.run([*command, "--calls", f"{package}.npz", "--quiet"], capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).strip().splitlines() if line.strip()]
    print("\n".join(lines), file=sys.stderr)
    return f"{'ok' if done.returncode == 0 else 'FAILED'}: {lines[-1][:200] if lines else 'it said nothing'}"


def blank_weights(package: Path) -> None:
    """The weights of the speed package, which are zeros, as a sparse file."""
    path = package / "model.onnx.data"
    if not path.exists():
        manifest = json.loads((package / "manifest.json").read_text())
        with path.open("wb") as file:
            file.truncate(manifest["files"][path.name]["size_bytes"])


def speed(package: Path, replay: bool, contexts: tuple[int, ...] = CONTEXTS, bodies: bool = False) -> str:
    """Milliseconds of a prefill in pieces of 2,048 and of a decode step, by context."""
    import numpy as np

    blank_weights(package)
    model = without_kernels(package) if bodies else opened(package, replay=replay)
    texts = []
    for context in contexts:
        tokens = tokens_of(model, context)
        times = []
        for _ in range(2):
            model.start(1, context + 64)
            begin = time.perf_counter()
            for start in range(0, context, 2048):
                model.feed(tokens[:, start : start + 2048])
            times.append(time.perf_counter() - begin)
        steps = model.greedy(np.array([5]), 40)
        next(steps)
        decode = []
        for _ in range(39):
            begin = time.perf_counter()
            next(steps)
            decode.append(time.perf_counter() - begin)
        text = f"{context}: prefill {min(times) * 1e3:.1f} ms, decode {statistics.median(decode) * 1e3:.3f} ms"
        if replay:  # without what Python does between steps
            binding, _, options = model._replayed_step()
            begin = time.perf_counter()
            for _ in range(20):
                model.session.run_with_iobinding(binding, options)
            text += f" (the replay alone {(time.perf_counter() - begin) * 50:.3f})"
        texts.append(text)
    return "; ".join(texts)


def peer(package: Path) -> str:
    """What `speed` measures, of onnxruntime-genai with full attention; its step chooses a token, ours too."""
    import numpy as np
    import onnxruntime_genai as genai

    model = genai.Model(str(package))
    texts = []
    for context in CONTEXTS:
        prefill, decode = [], []
        for seed in range(3):
            parameters = genai.GeneratorParams(model)
            parameters.set_search_options(max_length=8192, min_length=8192, do_sample=False, batch_size=1)
            generator = genai.Generator(model, parameters)
            begin = time.perf_counter()
            generator.append_tokens(np.random.default_rng(seed).integers(5, 49000, context).astype(np.int32))
            for step in range(60):
                generator.generate_next_token()
                generator.get_next_tokens()
                end = time.perf_counter()
                (decode if step else prefill).append(end - begin)
                begin = end
            del generator
        milliseconds = [1e3 * value for value in (min(prefill), statistics.median(decode))]
        texts.append(f"{context}: prefill {milliseconds[0]:.1f} ms, decode {milliseconds[1]:.3f} ms")
    return "; ".join(texts)


CHECKS: dict[str, Callable[[Path], str]] = {
    "nodes": partition,
    "verify": verify,
    "kernels and bodies": kernels_and_bodies,
    "buffers apart": buffers_apart,
    "runs at once": runs_at_once,
    "graph": graph,
    "refusal": refusal,
    "speed, replayed": lambda package: speed(package, True),
    "speed, call by call": lambda package: speed(package, False, CONTEXTS[:1]),
    "peer": peer,
    "speed of bodies": lambda package: speed(package, False, CONTEXTS[:1], bodies=True),
}


def wanted(place: Path) -> list[tuple[str, str]]:
    """Checks and packages, what matters most first."""
    models = [name for name in (*SMALL, "demo-float32", "demo-float16") if (place / name).is_dir()]
    list_ = [("nodes", SMALL[1]), ("kernels and bodies", SMALL[0]), ("graph", SMALL[1]), ("speed, replayed", SPEED)]
    list_ += [("speed, replayed", name) for name in models if name == "demo-float16"]
    list_ += [("peer", path.name) for path in sorted(place.glob(f"{PEER}-*"))]
    list_ += [("verify", name) for name in models if (place / f"{name}.npz").is_file()]
    list_ += [("buffers apart", SMALL[1]), ("runs at once", SMALL[1]), ("refusal", OTHER_GPU)]
    list_ += [("kernels and bodies", name) for name in models[1:]]
    list_ += [("graph", name) for name in models if name != SMALL[1]]
    return [*list_, ("nodes", SPEED), ("speed, call by call", SPEED), ("speed of bodies", SPEED)]


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
    for check, name in wanted(options.place):
        left = end - time.monotonic()
        begin = time.monotonic()
        if options.only and check not in options.only.split(","):
            continue
        if left < 8:
            text = "not run: no time left"
        else:
            command = [sys.executable, __file__, "check", check, str((options.place / name).resolve())]
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
        rows.append(f"{name:15} {check:20} {text} [{time.monotonic() - begin:.0f} s]")
        print(rows[-1], flush=True)
        (out / "ort-cuda.txt").write_text("\n".join(rows) + "\n")
    print("\n=== ONNX Runtime CUDA ===", *rows, sep="\n")


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
    verb.add_argument("--demo", action="store_true", help="the demo model too, in float32 and float16: 0.8 GB")
    verb = verbs.add_parser("run")
    verb.add_argument("place", type=Path)
    verb.add_argument("--site", type=Path, action="append", default=[], help="folder of Python packages; repeatable")
    verb.add_argument("--deadline", type=float, default=230, help="seconds for all checks (default 230)")
    verb.add_argument("--limit", type=float, default=60, help="seconds for one check (default 60)")
    verb.add_argument("--only", help="names of checks, with commas between")
    verb = verbs.add_parser("check")
    verb.add_argument("name", choices=CHECKS)
    verb.add_argument("package", type=Path)
    options = parser.parse_args()
    if options.verb == "check":
        print(f"RESULT {CHECKS[options.name](options.package)}")
    else:
        {"prepare": prepare, "run": run}[options.verb](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
