"""All that only a GPU can show, in pieces that each end in time, and one record of it.

  python -m tools.check_gpu prepare PLACE [--arch sm_90] [--only NAME ...]     anywhere: packages of odd sizes, their kernels compiled
  python -m tools.check_gpu run PLACE [PIECE ...] [-o FOLDER] [--seconds N]    on the GPU; FOLDER/check_gpu.json, and a log for each piece

Pieces: states (errors beside those of PyTorch on the same GPU), packages (`prove` of each by ONNX Runtime's CUDA provider), kernels (of
every op against their meanings), core (the C++ core against Triton's launches), speeds (beside peers), tests (the fast tests, which need no
GPU but its machine's Python), tensorrt and vllm, where these are installed. Without names: all these, in this order; by name also slow
(65,536 steps of a graph), memcheck and racecheck (compute-sanitizer over few cases) and tune (settings that are faster). A piece that is
not done within its time is stopped and fails; the record is written anew after each piece, so what was shown stays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "graphs")]  # runs without installation
CORES = len(os.sched_getaffinity(0))
STILL = (sys.executable, "-m", "still_export.cli.main")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tools.check_gpu")
FAILURES = "STILL_FAILURES"
"""Environment variable with the file that pytest writes failures to at once: a run that is stopped has no summary."""
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("float16", dict(hidden_size=96, num_heads=6, head_dim=32, state_size=48, n_groups=2)),
    "nemotron_h, dense": (
        "float16",
        dict(hidden_size=96, mamba_num_heads=6, mamba_head_dim=32, ssm_state_size=32, n_groups=3),
    ),
    "granitemoehybrid": ("float16", dict(hidden_size=72, mamba_n_heads=6, mamba_d_head=24, mamba_d_state=40)),
    "falcon_h1": ("float16", dict(hidden_size=56, mamba_n_groups=3)),
    "qwen3_5_text": ("float16", dict(hidden_size=80, linear_key_head_dim=48, linear_value_head_dim=36)),
    "kimi_linear": ("float16", dict(hidden_size=88, linear_head_dim=40)),
    "gla": ("float16", {}),
    "jamba": ("float16", dict(hidden_size=40, mamba_d_state=22)),
    "lfm2": ("float16", dict(hidden_size=48)),
    "hgrn2": ("float16", {}),
    "gated_deltanet": ("float32", {}),
    "still": ("float16", dict(hidden_size=72, head_dim=24)),
}
"""Packages by family: their type and sizes, which no published model has. One in float32 is among them."""
LENGTHS = "1,63,65,129,300"
SANITIZED = "compiled and (crossing or promoting or folding)"
"""Cases of hybrid attention for compute-sanitizer, under which a kernel takes a hundred times as long."""
OPS = ("LinearAttention", "HybridAttention", "Attention", "CausalConv")
"""Whose speeds are measured beside peers."""


@dataclass
class Piece:
    """Commands that run beside each other, and what their outputs say.

    commands: By name; each has a log of that name.
    together: How many run at once.
    files: JSON that commands write, whose contents go into the record.
    missing: Why the piece cannot run; such a piece is left out, which the record says.
    """

    seconds: float
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    together: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    missing: str = ""


def packages_of(place: Path) -> list[Path]:
    """Prepared packages."""
    return sorted(path.parent for path in place.glob("*/manifest.json"))


def kernels(place: Path, out: Path) -> Piece:
    tests = ("-n", str(CORES), "-m", "gpu and not slow", "tests/still_kernels")
    return Piece(480, {"kernels": [*PYTEST, *tests]})


def core(place: Path, out: Path) -> Piece:
    return Piece(90, {"core": [*PYTEST, "tests/gpu/test_core.py"]})


def states(place: Path, out: Path) -> Piece:
    commands = {
        f"states-{each.name}": [
            sys.executable,
            "-m",
            "tests.gpu.state_errors",
            str(each),
            "-o",
            str(out / f"states-{each.name}.json"),
        ]
        for each in packages_of(place)
    }
    files = {name.removeprefix("states-"): out / f"{name}.json" for name in commands}
    return Piece(150, commands, CORES // 2, files=files, missing="" if commands else f"{place} has no packages")


def packages(place: Path, out: Path) -> Piece:
    commands = {
        f"packages-{each.name}": [
            *(*STILL, "prove", str(each), "--model", str(place / f"model-{each.name}"), "--trust-native"),
            *("--provider", "cuda", "--lengths", "64", "-o", str(out / "records"), "--quiet"),
        ]
        for each in packages_of(place)
    }
    return Piece(240, commands, CORES // 2, missing="" if commands else f"{place} has no packages")


def speeds(place: Path, out: Path) -> Piece:
    files = {op: out / f"speeds-{op}.json" for op in OPS}
    commands = {
        f"speeds-{op}": [
            sys.executable,
            "-m",
            "tools.kernels.bench",
            op,
            "--context",
            "8192,65536",
            "--json",
            str(file),
        ]
        for op, file in files.items()
    }
    return Piece(240, commands, files=files)


def tests(place: Path, out: Path) -> Piece:
    chosen = ("-n", str(CORES), "--dist", "loadfile", "-m", "not long and not slow and not gpu")
    commands = {"builds": [sys.executable, "-m", "tests.plugins.builds"], "tests": [*PYTEST, *chosen]}
    return Piece(420, commands, environment={"OMP_NUM_THREADS": "1"})


def tensorrt(place: Path, out: Path) -> Piece:
    found = os.environ.get("STILL_TENSORRT_ENV") or find_spec("tensorrt")
    command = [*PYTEST, "-n", "4", "--maxschedchunk", "1", "-m", "tensorrt", "tests/gpu/test_trt.py"]
    return Piece(420, {"tensorrt": command}, missing="" if found else "TensorRT is not installed")


def vllm(place: Path, out: Path) -> Piece:
    missing = "" if find_spec("vllm") else "vLLM is not installed"
    return Piece(420, {"vllm": [*PYTEST, "-m", "gpu", "tests/gpu/test_vllm.py"]}, missing=missing)


def slow(place: Path, out: Path) -> Piece:
    tests = ("-n", "4", "-m", "gpu and slow", "tests/still_kernels")
    return Piece(420, {"slow": [*PYTEST, *tests]})


def sanitized(tool: str) -> Piece:
    """compute-sanitizer; PyTorch's allocator would hide what lies beside a tensor."""
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin") or ""
    own = (program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20")
    command = [*own, *PYTEST, "-m", "gpu", "tests/still_kernels/hybrid_attention/test_triton.py", "-k", SANITIZED]
    missing = "" if program else "compute-sanitizer is not installed"
    return Piece(300, {tool: command}, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, missing=missing)


def memcheck(place: Path, out: Path) -> Piece:
    return sanitized("memcheck")


def racecheck(place: Path, out: Path) -> Piece:
    return sanitized("racecheck")


def tune(place: Path, out: Path) -> Piece:
    files = {op: out / f"tune-{op}.json" for op in OPS}
    commands = {
        f"tune-{op}": [sys.executable, "-m", "tools.kernels.tune", op, "--seconds", "240", "-o", str(file)]
        for op, file in files.items()
    }
    return Piece(300.0 * len(OPS), commands, files=files)


USUAL = (states, packages, kernels, core, speeds, tests, tensorrt, vllm)
PIECES: dict[str, Callable[[Path, Path], Piece]] = {
    each.__name__: each for each in (*USUAL, slow, memcheck, racecheck, tune)
}


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest: keep the end of what a failed test says."""
    if report.failed and (file := os.environ.get(FAILURES)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(file, "a", encoding="utf-8") as out:
            said = [line for line in report.longreprtext.splitlines() if line.strip()][-6:]
            print(f"{report.nodeid} ({report.when})", *said, sep="\n    ", file=out)


def run_command(command: Sequence[str], log: Path, end: float, environment: dict[str, str]) -> str:
    """Why it failed, or "". It is killed with what it started when the time is over."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "graphs"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **environment}
    variables[FAILURES] = str(log.with_suffix(".failures"))
    left = end - time.monotonic()
    if left <= 0:
        return "not begun: the piece's time was over"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            list(command), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, start_new_session=True
        )
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end within {left:.0f} s"
    return f"exit code {code}" if code else ""


def last_lines(log: Path, count: int = 12) -> list[str]:
    """The end of a log, without empty lines and without what is wider than a page."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return [line[:300] for line in lines if line.strip()][-count:]


def counted(log: Path) -> str:
    """pytest's closing line of a log, or ""."""
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return (re.findall(r"\d+ (?:passed|failed)[^\n]*", said) or [""])[-1]


def run_piece(name: str, place: Path, out: Path, seconds: float) -> dict[str, Any]:
    """Verdict, seconds and figures of one piece."""
    piece = PIECES[name](place, out)
    if piece.missing:
        return {"verdict": "left out", "why": piece.missing}
    limit, begin = min(piece.seconds, seconds), time.monotonic()
    with ThreadPoolExecutor(piece.together) as pool:
        work = lambda item: run_command(item[1], out / f"{item[0]}.log", begin + limit, piece.environment)  # noqa: E731
        said = dict(zip(piece.commands, pool.map(work, piece.commands.items()), strict=True))
    failed = {each: {"why": why, "log": last_lines(out / f"{each}.log")} for each, why in said.items() if why}
    found = {each: json.loads(file.read_text(encoding="utf-8")) for each, file in piece.files.items() if file.is_file()}
    counts = {each: line for each in said if (line := counted(out / f"{each}.log"))}
    return {
        "verdict": "failed" if failed else "passed",
        "commands": len(said),
        "failed": failed,
        "seconds": round(time.monotonic() - begin, 1),
        "limit_seconds": limit,
        **({"counts": counts} if counts else {}),
        **({"figures": found} if found else {}),
    }


def run(options: argparse.Namespace) -> int:
    """All pieces; the record is kept up to date."""
    from still_export.proof.records import make_record

    options.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(options.output.resolve() / "triton"))
    end, found = time.monotonic() + options.seconds, {}
    for name in options.pieces or [piece.__name__ for piece in USUAL]:
        left = end - time.monotonic()
        found[name] = (
            run_piece(name, options.place.resolve(), options.output.resolve(), left)
            if left > 0
            else {
                "verdict": "left out",
                "why": "the time was over",
            }
        )
        passed = all(each["verdict"] != "failed" for each in found.values())
        record = make_record("proof", "check_gpu", {"target": "kernels"}, {"pieces": found}, {}, passed)
        (options.output / "check_gpu.json").write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        show(name, found[name])
    return int(any(each["verdict"] == "failed" for each in found.values()))


def show(name: str, found: dict[str, Any]) -> None:
    """A line for a piece, and below it what failed."""
    more = [found.get("why", ""), *found.get("counts", {}).values()]
    print(f"{name:10} {found['verdict']:9} {found.get('seconds', 0):6.1f} s ", *filter(None, more), flush=True)
    for each, failure in found.get("failed", {}).items():
        print(f"  {each}: {failure['why']}", *failure["log"], sep="\n    ", flush=True)


def model_of(name: str) -> Any:
    """A small random model of ODD."""
    import torch

    from tests.still_export.expert_models import SPARSE, expert_model
    from tests.still_export.linear_models import linear_model
    from tests.still_export.tiny import still_model

    sizes = ODD[name][1]
    if name == "still":
        return still_model("llama", torch.float32, sizes=sizes, chunk_size=32, capacity_tokens=1024)
    return expert_model(name, **sizes) if name in SPARSE and "," in name else linear_model(name, **sizes)


def prepare(options: argparse.Namespace) -> int:
    """Export packages, which needs no GPU."""
    options.place.mkdir(parents=True, exist_ok=True)
    commands: dict[str, Sequence[str]] = {}
    for name in options.only or ODD:
        slug = re.sub(r"\W+", "-", name)
        model, package = options.place / f"model-{slug}", options.place / slug
        model_of(name).save_pretrained(model)
        flags = ("--native", "--arch", options.arch, "--dtype", ODD[name][0], "--capacity-tokens", "1024")
        commands[slug] = [*STILL, "export", str(model), *flags, "-o", str(package), "--force", "--quiet"]
    with ThreadPoolExecutor(max(1, CORES - 2)) as pool:
        end = time.monotonic() + options.seconds
        work = lambda item: run_command(item[1], options.place / f"{item[0]}.log", end, {})  # noqa: E731
        said = dict(zip(commands, pool.map(work, commands.items()), strict=True))
    for name in filter(said.get, said):
        print(f"{name}: {said[name]}", *last_lines(options.place / f"{name}.log"), sep="\n  ")
    return int(any(said.values()))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    making = verbs.add_parser("prepare")
    making.add_argument("place", type=Path)
    making.add_argument("--arch", default="sm_90")
    making.add_argument("--only", nargs="+", choices=ODD)
    making.add_argument("--seconds", type=float, default=1800.0)
    making.set_defaults(verb=prepare)
    running = verbs.add_parser("run")
    running.add_argument("place", type=Path)
    running.add_argument("pieces", nargs="*", metavar="PIECE")
    running.add_argument("-o", "--output", type=Path, default=ROOT / "build/check_gpu")
    running.add_argument("--seconds", type=float, default=480.0)
    running.set_defaults(verb=run)
    options = parser.parse_args()
    if unknown := sorted(set(getattr(options, "pieces", ())) - set(PIECES)):
        parser.error(f"unknown piece {', '.join(unknown)}; known: {', '.join(PIECES)}")
    return int(options.verb(options))


if __name__ == "__main__":
    sys.exit(main())
