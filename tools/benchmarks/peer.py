"""The base model of a package with full attention in onnxruntime-genai, llama.cpp or transformers, as their users run them: the rows that
`still-export bench PACKAGE --beside FILE` compares with.

  python -m tools.benchmarks.peer BASE --runtime transformers --threads 2 -o peer.json
  python -m tools.benchmarks.peer MODEL.gguf --runtime llama.cpp --threads 2 -o peer.json     the same file, with flash attention
  python -m tools.benchmarks.peer BASE --provider cuda --quantize int4     with onnxruntime-genai-cuda; float16 without --quantize

Each length is a process of its own, which imports torch for transformers alone, so the peak is the peer's own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from still_export.evaluation.bench import LENGTHS, BenchOptions, Measurement, measure_rounds, to_dict
from still_export.extras import installation
from still_export.runtime.sampling import RunError
from tools.benchmarks.common import numbers

GENAI, LLAMA_CPP, TRANSFORMERS = "genai", "llama.cpp", "transformers"
RUNTIMES = {GENAI: "onnxruntime_genai", LLAMA_CPP: "llama_cpp", TRANSFORMERS: "torch"}
"""And the module that each needs."""
VOCABULARY = 40_000
"""Most that the random tokens of a prompt are drawn from."""


def build(model: Path, work: Path, precision: str = "fp32", provider: str = "cpu") -> Path:
    """genai's package of `model`, a folder or GGUF file, made once in `work`; int4 as its builder quantizes by default. On CUDA its steps
    are replayed from a graph.

    Raises:
        RunError: genai's builder failed.
    """
    package = work / ("genai" if (precision, provider) == ("fp32", "cpu") else f"genai-{provider}-{precision}")
    if (package / "genai_config.json").exists():
        return package
    from tools.gguf_folder import write_folder

    folder = model
    if model.is_file():
        folder = work / "base" if (work / "base/model.safetensors").exists() else write_folder(model, work / "base")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(package)]
    command += ["-p", precision, "-e", provider, "-c", str(work / "cache")]
    command += ["--extra_options", "enable_cuda_graph=1"] if provider == "cuda" else []
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        raise RunError(
            f"onnxruntime-genai's builder cannot export {model}: exit code {done.returncode}, what it said is above."
        )
    return package


def measure_peer(
    runtime: str,
    model: Path,
    lengths: Iterable[int],
    setting: BenchOptions,
) -> list[Measurement]:
    """Measure every length in a process of its own: what `still-export bench` measures of a package.

    Raises:
        RunError: The peer does not run here.
    """
    rows = []
    for length in lengths:
        command = [sys.executable, "-c", "import sys; from tools.benchmarks.peer import one; one(*sys.argv[1:])"]
        command += [runtime, str(model), str(length), json.dumps(asdict(setting))]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise RunError(f"{runtime} with {length} tokens: {said}")
        rows.append(Measurement(**json.loads(done.stdout.strip().splitlines()[-1])))
    return rows


Calls = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]
"""What begins anew, what reads a prompt of random tokens and chooses one, and what does a greedy step."""


def _genai(package: Path, length: int, setting: BenchOptions) -> Calls:
    import onnxruntime_genai as genai

    config = genai.Config(str(package))
    if setting.threads:
        session = {"intra_op_num_threads": setting.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)
    total = setting.room(length) + 1
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, length).astype(np.int32)
    made: dict[str, Any] = {}

    def step() -> None:
        made["generator"].generate_next_token()
        made["generator"].get_next_tokens()  # a GPU has chosen it then

    def prompt() -> None:
        made["generator"].append_tokens(tokens)
        step()

    def begin() -> None:
        made.clear()
        made["generator"] = genai.Generator(model, parameters)

    return begin, prompt, step


def _llama_cpp(model: Path, length: int, setting: BenchOptions) -> Calls:
    """The same of a GGUF file, with flash attention, in batches of 512 tokens, which are its default."""
    import llama_cpp

    room, threads = setting.room(length), setting.threads or None
    llama = llama_cpp.Llama(
        str(model), n_ctx=room, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    vocabulary = llama.n_vocab()
    tokens = np.random.default_rng(0).integers(0, min(VOCABULARY, vocabulary), length).tolist()
    made: dict[str, int] = {}

    def feed(ids: list[int]) -> None:
        llama.eval(ids)
        logits = llama_cpp.llama_get_logits(llama.ctx)  # of the last token
        made["token"] = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    return llama.reset, lambda: feed(tokens), lambda: feed([made["token"]])


def _transformers(folder: Path, length: int, setting: BenchOptions) -> Calls:
    """The same, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from still_export.mixers.cache_layer import CACHE

    torch.set_num_threads(setting.threads or torch.get_num_threads())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    vocabulary = min(VOCABULARY, model.config.vocab_size)
    tokens = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    state: dict[str, Any] = {}

    def feed(ids: Any) -> None:
        with torch.inference_mode():
            found = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: state.get("past")})
        state.update(past=getattr(found, CACHE), token=found.logits[:, -1:].argmax(-1))

    return state.clear, lambda: feed(tokens), lambda: feed(state["token"])


RUNS = {GENAI: _genai, LLAMA_CPP: _llama_cpp, TRANSFORMERS: _transformers}


def one(runtime: str, model: str, length: str, setting: str) -> None:
    """Print the measurement of one length; `setting` is of BenchOptions, in JSON."""
    options = BenchOptions(**json.loads(setting))
    start, prompt, step = RUNS[runtime](Path(model), int(length), options)
    start()
    prompt()  # the first call of a process loads code and weights
    print(json.dumps(asdict(measure_rounds(int(length), options, start, prompt, step))))


def first_token_command(runtime: str, model: Path, setting: BenchOptions) -> list[str]:
    """A process that loads a model, reads 16 tokens, chooses one and ends."""
    program = "import sys; from tools.benchmarks.peer import first; first(*sys.argv[1:])"
    return [sys.executable, "-c", program, runtime, str(model), json.dumps(asdict(setting))]


def first(runtime: str, model: str, setting: str) -> None:
    """What `first_token_command` runs; `setting` as of `one`."""
    start, prompt, _ = RUNS[runtime](Path(model), 16, BenchOptions(**json.loads(setting)))
    start()
    prompt()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of the base model, or for genai and llama.cpp a GGUF file")
    parser.add_argument("--runtime", choices=RUNTIMES, default=GENAI)
    parser.add_argument("--provider", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quantize", choices=["int4"], help="genai's weights in 4 bits")
    parser.add_argument("--lengths", type=numbers, default=list(LENGTHS))
    parser.add_argument("--steps", type=int, default=BenchOptions.steps)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("work"), help="keeps genai's package for the next run")
    parser.add_argument("-o", "--output", type=Path, default=Path("peer.json"))
    given = parser.parse_args(arguments)
    runtime, model = given.runtime, given.model
    if runtime != GENAI and (given.quantize or given.provider == "cuda"):
        parser.error(f"--quantize and --provider cuda are of genai, not of {runtime}.")
    if runtime != GENAI and (runtime == LLAMA_CPP) != (model.suffix == ".gguf"):
        parser.error(f"{model} with --runtime {runtime}: llama.cpp takes a GGUF file, transformers a folder.")
    if find_spec(RUNTIMES[runtime]) is None:
        parser.error(f"{runtime} is not installed: {installation(RUNTIMES[runtime])}")
    if runtime == GENAI:
        given.work.mkdir(parents=True, exist_ok=True)
        precision = given.quantize or ("fp16" if given.provider == "cuda" else "fp32")
        model = build(model.resolve(), given.work, precision, given.provider)
    options = BenchOptions(steps=given.steps, threads=given.threads, provider=given.provider)
    rows = measure_peer(runtime, model, given.lengths, options)
    given.output.write_text(json.dumps(to_dict(rows), indent=1) + "\n", encoding="utf-8")
    for r in rows:
        print(
            f"{r.length:>8} tokens: prefill {r.prefill_s:.2f} s, decode {r.decode_ms:.1f} ms, peak {r.peak_mb:.0f} MB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
