#!/usr/bin/env python3
"""Show the TensorRT numbers of docs/notebook/tensorrt.md again, on a GPU machine that reaches no registry and has little time.

  python tools/prove_trt.py prepare OUT --model MODEL --demo GGUF --include INCLUDE  # with PyTorch, no GPU
  python tools/prove_trt.py demo PLACE --deadline 400                                # with the GPU; all but large may run side by side
  python tools/prove_trt.py verified PLACE --deadline 300                            # so one_row, small_model, small_int4
  python tools/prove_trt.py small PLACE --deadline 300
  python tools/prove_trt.py large PLACE --deadline 500                               # alone; so large_calls, large_int4
  PYTHONPATH=. python tools/prove_trt.py prepare OUT --only qwen3_5_text,kimi_linear --include INCLUDE
  python tools/prove_trt.py qwen3_5_text PLACE --deadline 200                        # so every linear family

`prepare` writes OUT/more00, more01, ...: folders of at most 40 MB that hold packages of MODEL for batches of four and for single rows, of
assets/small in float16 and with 4 bits and of the demo (mixed SmolLM2, 300 MB; `--demo` is a GGUF file of its base) with PyTorch's
answers, and packages of SmolLM2-135M's and Llama-3.1-8B's geometry without weights, of the latter also for calls of 16,384 tokens and with
4 bits; of linear families a random model of two layers each, for single rows. PLACE on the GPU machine holds
TensorRT with Python (env.sh with trt-python) and what `cat more*/more.tar.* | tar x` gives. Every step has a time limit and a log; the
table is written after each step to $OUT and printed last, so that what was measured comes back even when a later step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PART_BYTES = 40_000_000
LENGTHS = "1,63,64,65,129,512"
CONTEXT, SMALL_CONTEXT = 65536, 8064
# fewer where time or memory is short: results are scaled by layer
LARGE_LAYERS = int(os.environ.get("LARGE_LAYERS", "4"))
LARGE_VOCABULARY = 32000
LARGE = ("large", "large_calls", "large_int4")
GEOMETRIES: dict[str, dict[str, int | bool]] = {
    "small": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "large": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": LARGE_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": LARGE_VOCABULARY,
        "tie_word_embeddings": False,
    },
}
"""Of SmolLM2-135M, and of Llama-3.1-8B with fewer layers and a smaller vocabulary."""
GEOMETRIES |= dict.fromkeys(LARGE, GEOMETRIES["large"])

LINEAR = (
    *("qwen3_5_text", "granitemoehybrid", "kimi_linear", "falcon_h1", "mamba2", "lfm2", "qwen3_next", "olmo_hybrid"),
    *("gated_deltanet", "delta_net", "gla", "hgrn2"),
)
"""Linear families."""

EXPORTS = {
    "demo": [
        "--overlay",
        str(ROOT / "assets/smollm2-135m-instruct-mixed"),
        "--capacity-tokens",
        "8448",
        "--batch",
        "1",
    ],
    "verified": ["--capacity-tokens", "4096", "--batch", "4", "--prefill-tokens", "512"],
    "one_row": ["--capacity-tokens", "4096", "--batch", "1", "--prefill-tokens", "512"],
    "small_model": ["--capacity-tokens", "4096", "--batch", "4", "--prefill-tokens", "512"],
    "small_int4": ["--capacity-tokens", "4096", "--batch", "4", "--prefill-tokens", "512", "--quantize", "int4"],
    "small": ["--capacity-tokens", "8448", "--batch", "1"],
    "large": ["--capacity-tokens", str(CONTEXT + 256), "--batch", "8"],
    "large_calls": ["--capacity-tokens", str(CONTEXT + 256), "--batch", "1", "--prefill-tokens", "16384"],
    "large_int4": ["--capacity-tokens", str(CONTEXT + 256), "--batch", "8", "--quantize", "int4"],
    **{name: ["--capacity-tokens", "1024", "--batch", "1", "--prefill-tokens", "512"] for name in LINEAR},
}


def prepare(options: argparse.Namespace) -> int:
    """Make everything that the GPU machine needs beside TensorRT."""
    sources = {"demo": options.demo, "verified": options.model, "one_row": options.model}
    sources |= dict.fromkeys(("small_model", "small_int4"), str(ROOT / "assets/small"))
    made = (*GEOMETRIES, *LINEAR)
    names = options.only.split(",") if options.only else [n for n in EXPORTS if n in GEOMETRIES or sources.get(n)]
    if lacking := [n for n in names if n not in made and not sources[n]]:
        sys.exit(f"{', '.join(lacking)}: no model to export; give --demo for demo, --model for the others.")
    work = options.out / "work"
    shutil.rmtree(work, ignore_errors=True)
    content = work / "content"
    content.mkdir(parents=True)
    for name in names:
        if name in LINEAR:
            from tests.still_export.linear_models import linear_model, published_pair

            model: Any = work / f"{name}.model"
            linear_model(name, **published_pair(name)).save_pretrained(model)
        else:
            model = _blank_model(work / f"{name}.model", name) if name in GEOMETRIES else sources[name]
        untrained = [] if name in ("demo", "small_model", "small_int4", *LINEAR) else ["--attach-untrained"]
        command = ["still-export", model, "--to", "trt", *untrained, "--arch", options.arch, *EXPORTS[name]]
        command += ["--tensorrt-include", options.include, "-o", content / name, "--quiet"]
        subprocess.run([str(c) for c in command], check=True)
        if name not in GEOMETRIES:
            calls = content / f"{name}.npz"
            record = ["still-export", "verify", content / name, "--record", calls, "--lengths", LENGTHS]
            subprocess.run([str(c) for c in record], check=True)
        else:
            (content / name / "model.onnx.data").unlink()
            shutil.rmtree(model)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--only-binary=:all:", "--target"]
    plots = ["matplotlib"] if "demo" in names else []  # bench wants it
    subprocess.run([*install, str(content / "site"), "typer", "rich", "pydantic", *plots], check=True)
    for old in options.out.glob("more*"):
        shutil.rmtree(old)
    archive = work / "more.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", content, "."], check=True)
    subprocess.run(["split", "-b", str(PART_BYTES), "-d", archive, work / "more.tar."], check=True)
    for number, piece in enumerate(sorted(work.glob("more.tar.[0-9]*"))):
        folder = options.out / f"more{number:02d}"
        folder.mkdir()
        shutil.move(piece, folder / piece.name)
        print(folder, (folder / piece.name).stat().st_size)
    shutil.rmtree(work)
    return 0


def _blank_model(folder: Path, name: str) -> Path:
    """A model folder of a geometry in float16, its weights zero."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, **GEOMETRIES[name]
    )
    torch.set_default_dtype(torch.float16)
    with no_init_weights():
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


class Session:
    """Runs steps until a deadline, keeps their logs, and a table of what they found."""

    def __init__(self, place: Path, name: str, deadline_s: float) -> None:
        self.place, self.name = place.resolve(), name
        self.end = time.monotonic() + deadline_s
        self.out = self.place / f"{name}-logs"
        self.final = Path(os.environ.get("OUT", self.place)).resolve()
        for folder in (self.out, self.final):
            folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[tuple[str, str]] = []
        binaries = self.place / "bin"
        binaries.mkdir(exist_ok=True)
        (binaries / "polygraphy").write_text(f'#!/bin/bash\n. {self.place}/env.sh\ntrt-polygraphy "$@"\n')
        (binaries / "polygraphy").chmod(0o755)
        self.head = (
            f". {self.place}/env.sh; export PATH={binaries}:$PATH PYTHONUNBUFFERED=1; "
            f"export PYTHONPATH={self.place}/site:{ROOT}:{ROOT}/graphs:{ROOT}/kernels; "
            'still() { trt-python -m still_export.cli.main "$@"; }; '
        )

    def step(self, name: str, command: str, limit_s: float, bare: bool = False) -> str | None:
        """Run a shell command for at most `limit_s` seconds; its output, None where it failed or there was no time."""
        left = self.end - time.monotonic()
        if left < 5:
            self.note(name, "not run: no time left")
            return None
        begin = time.monotonic()
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            try:
                process = subprocess.run(
                    ["timeout", "-k", "3", f"{min(limit_s, left):.0f}", "bash", "-c", ("" if bare else self.head) + command],
                    stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                )  # fmt: skip
                status = process.returncode
            except OSError as error:
                file.write(str(error))
                status = -1
        output = log.read_text(errors="replace")
        seconds = time.monotonic() - begin
        self.note(name, f"{'ok' if status == 0 else f'FAILED ({status})'} after {seconds:.1f} s")
        print(f"--- {name}, {seconds:.1f} s, exit {status}\n{output[-1500:] if status else output[-600:]}", flush=True)
        return output if status == 0 else None

    def note(self, name: str, value: str) -> None:
        """Add a row and write the table."""
        self.rows.append((name, value))
        (self.final / f"{self.name}.txt").write_text(self.table())

    def close(self) -> None:
        """Print the table, and pack the logs into one file: few files come back."""
        archive = self.final / f"{self.name}-logs.tar.gz"
        subprocess.run(["tar", "-czf", archive, "-C", self.place, self.out.name], check=False)
        print(f"\n=== {self.name} ===\n{self.table()}", flush=True)

    def measured(self, name: str, output: str | None, read: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Read a step's JSON lines with `read`; None where that fails."""
        try:
            return read([json.loads(line) for line in (output or "").splitlines() if line.startswith('{"')])
        except (LookupError, StopIteration, TypeError, ValueError) as error:
            self.note(name, f"cannot be computed: {error!r}")
            return None

    def table(self) -> str:
        """The rows so far."""
        return "".join(f"{name:34} {value}\n" for name, value in self.rows)


def proof(session: Session) -> None:
    """Verify the session's package, repeat that by polygraphy, and run its programs."""
    package = session.place / session.name
    if not session.step("build", f"still build {package} --quiet --trust-native", 220):
        return
    _engine_facts(session, package)
    output = session.step("verify", f"still verify {package} --runtime trt --calls {package}.npz --quiet", 150)
    session.note("verify", "PASSED" if output and output.rstrip().endswith("PASSED") else "see verify.log")
    _keep(session, package / "verify/report.json")
    output = session.step("polygraphy", f"sh {package}/verify/polygraphy.sh", 60)
    rates = re.findall(r"Pass Rate: [\d.]+%", output or "")
    session.note("polygraphy", rates[-1] if rates else "see polygraphy.log")
    _runners(session, package)


def demo(session: Session) -> None:
    """The model that has the quality: proof, and speed by context."""
    proof(session)
    package = session.place / session.name
    output = session.step("bench", f"still bench {package} --runtime trt --lengths 1024,4096,8000 --json --quiet", 120)
    session.note("demo: speed", " ".join((output or "see bench.log").split())[-900:])


def small(session: Session) -> None:
    """Build time and speed at SmolLM2-135M's geometry."""
    package = session.place / "small"
    bench = f"trt-python -m tools.benchmarks.gpu_package {package} --runtime trt --context {SMALL_CONTEXT} --batch 1 --steps 64"
    built = session.step("build", f"{bench} --build --batch ''", 220)
    build = session.measured("build", built, lambda rows: rows[0]["build_s"])
    if build is not None:
        session.note("small: engine build", f"{build} s (target 180)")
        _engine_facts(session, package)
    output = session.step("bench", f"{bench} --layers", 40)
    eager = session.step(
        "eager",
        f"python3 -m tools.benchmarks.torch_generate --models base --ways eager --contexts {SMALL_CONTEXT}",
        60,
        bare=True,
    )
    mine = session.measured(
        "small: decode", output, lambda rows: next(r["decode_us"] for r in rows if "decode_us" in r)
    )
    theirs = session.measured("small: eager", eager, lambda rows: rows[-1]["decode_us"])
    if mine and theirs:
        session.note("small: decode at 8K", f"{mine} us, PyTorch eager {theirs} us: {theirs / mine:.1f}x (target 3)")


def _runners(session: Session, package: Path) -> None:
    """The C++ program and the Python runner give the same tokens."""
    vocabulary = json.loads((package / "manifest.json").read_text())["model"]["vocab_size"]
    ids = ",".join(str(7 * i % min(500, vocabulary - 3) + 3) for i in range(600))  # more than a prefill call
    run = session.step("run", f"still run {package} --runtime trt --prompt-ids {ids} --tokens 64 --json --quiet", 40)
    library = f"export LD_LIBRARY_PATH={session.place}/lib:$LD_LIBRARY_PATH; "
    program = f"{library}{package}/still_run8 {package} --prompt-ids {ids} --tokens 64"
    direct = session.step("still_run", program, 40)
    if run and direct:
        python = json.loads(next(line for line in run.splitlines() if line.startswith("{")))["tokens"]
        native = [int(x) for x in re.findall(r"^[\d ]+$", direct, re.M)[0].split()]
        speed = direct.strip().splitlines()[-1]
        session.note("still_run", f"same tokens: {python[: len(native)] == native[: len(python)]} {speed}")


def large(session: Session) -> None:
    """Speed at Llama-3.1-8B's geometry beside full attention; the whole model from fewer layers and a smaller vocabulary."""
    full = session.step(
        "full_attention",
        f"python3 -m tools.benchmarks.full_attention --layers 4 --context {CONTEXT} --batch 1,8",
        100,
        bare=True,
    )
    package = session.place / "large"
    bench = f"trt-python -m tools.benchmarks.gpu_package {package} --runtime trt --context {CONTEXT} --steps 50"
    built = session.step("build", f"{bench} --build --batch ''", 460)
    build = session.measured("build", built, lambda rows: rows[0])
    if build:
        session.note("large: engine build", f"{build['build_s']} s, {build['engine_mib']} MiB")
        _engine_facts(session, package)
    output = session.step("bench", f"{bench} --batch 1,8 --prefill --layers", 80)
    layers = GEOMETRIES["large"]["num_hidden_layers"]
    head = {
        b: session.measured(
            "head", full, lambda rows, b=b: next(r["head_us"] for r in rows if r.get("batch") == b and "head_us" in r)
        )
        for b in (1, 8)
    }

    def whole(step_us: float, count: int, head_us: float) -> float:
        """Milliseconds of 32 layers and the whole vocabulary."""
        return (32 * (step_us - head_us) / count + head_us * 128256 / LARGE_VOCABULARY) / 1e3

    for batch, target, ratio in ((1, 5.5, 1.4), (8, 9.5, 2.2)):
        name = f"large: decode, batch {batch}"
        mine = session.measured(
            name,
            output,
            lambda rows, b=batch: next(r["decode_us"] for r in rows if r.get("batch") == b and "decode_us" in r),
        )
        theirs = session.measured(
            name,
            full,
            lambda rows, b=batch: min(
                (r["decode_us"], r["layers"]) for r in rows if r.get("batch") == b and "decode_us" in r
            ),
        )
        if mine:
            session.note(f"{name}, {layers} layers", f"{mine} us")
        if mine and theirs and head[batch] is not None:
            a, b = whole(mine, int(layers), head[batch]), whole(*theirs, head[batch])
            session.note(
                name, f"{a:.2f} ms (target {target}), full attention {b:.2f} ms: {b / a:.2f}x (target {ratio})"
            )
            state = session.measured(
                name,
                output,
                lambda rows, b=batch: next(r["state_mib"] for r in rows if r.get("batch") == b and "state_mib" in r),
            )
            session.note(
                f"large: state, batch {batch}", f"{state * 32 / int(layers) / 1024:.2f} GiB (target 2.3 at batch 1)"
            )
    calls = session.measured(
        "large: prefill", output, lambda rows: [r["prefill_ms"] for r in rows if "prefill_ms" in r]
    )
    base = session.measured("large: prefill", full, lambda rows: next(r for r in rows if "attention_ms" in r))
    if calls and base:
        mine = sum(calls) / len(calls) * (CONTEXT / 2048) * 32 / int(layers) / 1e3
        theirs = 32 * (base["attention_ms"] + base["rest_ms"]) / 1e3
        session.note(
            "large: prefill of 65,536",
            f"{mine:.2f} s, full attention {theirs:.2f} s: {theirs / mine:.2f}x (target 1.80 s)",
        )


def large_engine(session: Session) -> None:
    """Speed of an engine of Llama-3.1-8B's geometry for longer calls, or with 4 bits, and where its time goes."""
    package = session.place / session.name
    batches = "1,8" if session.name == "large_int4" else "''"
    bench = f"trt-python -m tools.benchmarks.gpu_package {package} --runtime trt --context {CONTEXT} --steps 50"
    if session.step("build", f"{bench} --build --batch ''", 300):
        _engine_facts(session, package)
        output = session.step("bench", f"{bench} --batch {batches} --prefill --layers", 90)
        session.note(f"{session.name}: speed", " ".join((output or "see bench.log").split())[:3000])


def _engine_facts(session: Session, package: Path) -> None:
    """Which kernels the products run on, from the engine's own list of layers; and the builder's log."""
    _keep(session, package / "build.log")
    text = (package / "engine.json").read_text(errors="replace")
    tactics: dict[str, int] = {}
    for name in re.findall(r'"TacticName": "(\w*gemm_\w*?)_(?:[nt]{2}_n|tilesize)', text):
        tactics[name] = tactics.get(name, 0) + 1
    session.note(f"{package.name}: products", ", ".join(f"{n} {name}" for name, n in sorted(tactics.items())) or "none")
    if (package / "timing.cache").exists():
        _keep(session, package / "timing.cache")


def _keep(session: Session, path: Path) -> None:
    if path.is_file():
        shutil.copyfile(path, session.out / f"{path.parent.name}_{path.name}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare")
    verb.add_argument("out", type=Path)
    verb.add_argument("--model", help="model folder that is verified")
    verb.add_argument("--demo", help="GGUF file of the demo's base")
    verb.add_argument("--include", required=True, help="folder of TensorRT 8.6's NvInfer.h")
    verb.add_argument("--arch", default="sm_90")
    verb.add_argument(
        "--only", help=f"of {', '.join(EXPORTS)}, with commas between; default: all that a model is given for"
    )
    steps = {"demo": demo, "small": small, "large": large, "large_calls": large_engine, "large_int4": large_engine}
    steps |= dict.fromkeys(("verified", "one_row", "small_model", "small_int4"), proof)
    steps |= dict.fromkeys(LINEAR, proof)
    for name in steps:
        verb = verbs.add_parser(name)
        verb.add_argument("place", type=Path)
        verb.add_argument("--deadline", type=float, default=420, help="seconds for all steps (default 420)")
    options = parser.parse_args()
    if options.verb == "prepare":
        return prepare(options)
    session = Session(options.place, options.verb, options.deadline)
    try:
        steps[options.verb](session)
    finally:
        session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
