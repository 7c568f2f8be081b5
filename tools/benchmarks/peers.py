"""A package beside its base with full attention in other runtimes, in turns at each length: prefill, decode and peak memory.

  python -m tools.benchmarks.peers PACKAGE BASE.gguf --model "SmolLM2-135M, two softmax layers" --threads 2 --record FOLDER

Needs quiet cores, onnxruntime-genai and llama-cpp-python. The base is the GGUF file that the package was made from: llama.cpp reads it as
it is, genai's builder makes a package of it in --work. Each measurement is a process of its own; of several rounds the median is kept.
A start is a process from its beginning to the first token behind a prompt of 16, ours `still-export run`, when the files were read before.
What bounds both is measured first: how fast so many threads read memory, and multiply matrices in float32.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from still_export.evaluation.bench import LENGTHS, BenchOptions, Measurement, bench
from still_export.package.folder import open_package
from still_export.package.trust import trust_package
from still_export.targets.registry import packaged_target
from tools.benchmarks.common import Findings, numbers, parser_of, time_in_turns
from tools.benchmarks.peer import GENAI, LLAMA_CPP, build, first_token_command, measure_peer

OURS = "still-export"
FIGURES = ("prefill_s", "decode_ms", "peak_mb")


def start_s(command: list[str]) -> float:
    """Seconds that a process takes.

    Raises:
        CalledProcessError: It failed.
    """
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def machine_rates(threads: int, bytes_read: int = 1 << 30, size: int = 2048, runs: int = 5) -> dict[str, float]:
    """Bytes that so many threads read from memory, and float32 operations of a GEMM that they do, 1e9 a second, the best of some runs."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    parts = np.array_split(np.ones(bytes_read // 8), threads)
    matrix = torch.ones(size, size)
    with ThreadPoolExecutor(threads) as pool:
        calls = {"read": lambda: list(pool.map(np.sum, parts)), "multiply": lambda: matrix @ matrix}
        best = {name: times.best for name, times in time_in_turns(calls, runs).items()}
    read, done = bytes_read / best["read"], 2 * size**3 / best["multiply"]
    return {"read_gb_s": float(f"{read / 1e9:.3g}"), "gemm_gflop_s": float(f"{done / 1e9:.3g}")}


def rounded(figures: list[float]) -> float:
    """Their median, as records have it."""
    return float(f"{median(figures):.4g}")


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("base", type=Path, help="GGUF file")
    parser.add_argument("--model", required=True, help="as the table calls it")
    parser.add_argument("--peers", default=f"{GENAI},{LLAMA_CPP}")
    parser.add_argument("--lengths", type=numbers, default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("work"), help="keeps genai's package")
    given = parser.parse_args()
    package, found = open_package(given.package), Findings()
    trust_package(given.package)
    peers = {name: given.base for name in given.peers.split(",") if name}
    quantized = package.manifest.get("quantization")
    if GENAI in peers:
        given.work.mkdir(parents=True, exist_ok=True)
        peers[GENAI] = build(given.base.resolve(), given.work, "int4" if quantized else "fp32")
    sizes = {
        "file_mb": round(given.base.stat().st_size / 1e6, 1),
        "parameters": package.manifest["model"]["parameters"],
    }
    found.add(**machine_rates(given.threads), **sizes)
    for length in given.lengths:
        options = BenchOptions(threads=given.threads, lengths=(length,))
        runs: dict[str, list[Measurement]] = {}
        for _ in range(given.rounds):
            runs.setdefault(OURS, []).extend(bench(given.package, options))
            for name, model in peers.items():
                runs.setdefault(name, []).extend(measure_peer(name, model, [length], options))
        for name, each in runs.items():
            found.add(runtime=name, context=length, **{n: rounded([getattr(run, n) for run in each]) for n in FIGURES})
    options = BenchOptions(threads=given.threads)
    own = [sys.executable, "-m", "still_export.cli.main", "run", str(given.package), "--threads", str(given.threads)]
    starts = {OURS: [*own, "--prompt", "a b c d e f g h", "--tokens", "1"]}
    starts |= {name: first_token_command(name, model, options) for name, model in peers.items()}
    times: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for name, command in starts.items():
            times.setdefault(name, []).append(start_s(command))
    for name, seconds in times.items():
        found.add(runtime=name, start_s=rounded(seconds))
    subject = {
        "model": given.model,
        "dtype": package.manifest["model"]["dtype"],
        "quantize": "" if quantized is None else quantized["scheme"],
        "target": packaged_target(package.manifest).name,
        "threads": str(given.threads),
        "rounds": str(given.rounds),
    }
    found.record(given.record, f"beside peers {given.model}", {k: v for k, v in subject.items() if v})
    return 0


if __name__ == "__main__":
    sys.exit(main())
