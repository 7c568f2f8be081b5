#!/usr/bin/env python3
"""Measure the peer: onnxruntime-genai's own export of a base model with full attention, on the CPU, as its users run it.

  pip install -e ".[genai]"
  python tools/bench_genai.py MODEL WORK -o peer.json
  still-export bench PACKAGE --beside peer.json

MODEL is the base model (folder or GGUF file); WORK keeps genai's package for the next run. Lengths, decode steps and what is measured
are those of `still-export bench`; one process per length.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def measure(package: Path, length: int, steps: int, threads: int) -> dict[str, float]:
    """One length in this process: random tokens, greedy decoding."""
    import numpy as np
    import onnxruntime_genai as genai

    config = genai.Config(str(package))
    if threads:
        session = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)
    total = length + steps + 1
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
    generator = genai.Generator(model, parameters)
    tokens = np.random.default_rng(0).integers(0, 40_000, length).astype(np.int32)
    begin = time.perf_counter()
    generator.append_tokens(tokens)
    generator.generate_next_token()
    prefill = time.perf_counter() - begin
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        generator.generate_next_token()
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"length": length, "prefill_s": prefill, "decode_ms": statistics.median(times) * 1e3, "peak_mb": peak}


def measure_each(command: list[str], lengths: str, output: Path) -> None:
    """Run the script `command` with --one LENGTH, a process per length; print what each measured, and write all to `output`."""
    rows = []
    for length in lengths.split(","):
        done = subprocess.run(
            [sys.executable, *command, "--one", length], check=True, text=True, stdout=subprocess.PIPE
        )
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        text = "{length:6.0f} tokens: prefill {prefill_s:.2f} s, decode {decode_ms:.1f} ms, peak {peak_mb:.0f} MB"
        print(text.format(**rows[-1]), flush=True)
    output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def write_folder(gguf: Path, folder: Path) -> Path:
    """A GGUF file as a plain Hugging Face folder, in float32: what genai's builder reads.

    Read by this project: transformers loads such a file through accelerate, and refuses to save what it loaded.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from still_export.models.gguf import read_gguf, read_tokenizer

    family, config, weights = read_gguf(gguf)
    tensors = {name: weight.read() for name, weight in weights.items()}
    described = AutoConfig.for_model(family, **config, dtype="float32")
    described.architectures = [f"{family.capitalize()}ForCausalLM"]
    described.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read_tokenizer(gguf).save_pretrained(folder)
    return folder


def package_folder(work: Path, precision: str) -> Path:
    """Where genai's package of a precision lies."""
    return work / ("genai" if precision == "fp32" else f"genai-{precision}")


def build(model: Path, work: Path, precision: str = "fp32") -> Path:
    """genai's CPU package of `model`, made once; int4 as its builder quantizes by default."""
    package = package_folder(work, precision)
    if (package / "genai_config.json").exists():
        return package
    folder = model
    if model.is_file():
        folder = work / "base" if (work / "base/model.safetensors").exists() else write_folder(model, work / "base")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(package)]
    subprocess.run([*command, "-p", precision, "-e", "cpu", "-c", str(work / "cache")], check=True, stdout=sys.stderr)
    return package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("peer.json"))
    parser.add_argument("--lengths", default="1024,4096,8000")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=0, help="0 = genai's choice, which is half of the logical cores")
    parser.add_argument(
        "--quantize", choices=("int4",), help="weights in 4 bits, the counterpart of export --quantize int4"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    precision = options.quantize or "fp32"
    if options.one:
        print(json.dumps(measure(package_folder(options.work, precision), options.one, options.steps, options.threads)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    build(options.model.resolve(), options.work, precision)
    command = [__file__, str(options.model), str(options.work), "--steps", str(options.steps)]
    command += ["--threads", str(options.threads)]
    command += ["--quantize", options.quantize] if options.quantize else []
    measure_each(command, options.lengths, options.output)


if __name__ == "__main__":
    main()
