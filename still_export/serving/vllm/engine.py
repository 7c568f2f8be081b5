"""vLLM under a load of requests, in a process of its own that reads a job file and writes the answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from still_export.errors import UnsupportedError

if TYPE_CHECKING:
    from still_export.proof.served import Load, Request, Served

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are counted here, and requests arrive between them
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Default environment of the process."""
CPU_MEMORY = 0.3
"""Share of a machine's memory that must be free for vLLM on a CPU."""


@dataclass(frozen=True)
class VllmEngine:
    """vLLM with a STILL folder, restarted for each load.

    Args:
        ranks: Devices that share each layer.
        log: File for vLLM's messages.
        settings: Further vLLM settings, such as its memory.
    """

    folder: Path
    dtype: str
    ranks: int = 1
    log: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def serve(self, load: Load, requests: Sequence[Request]) -> Served:
        """Serve all requests.

        Raises:
            UnsupportedError: vLLM is not installed, or refuses the model; the message has its last error.
        """
        from still_export.proof.served import Answer, Served

        settings = {"model": str(self.folder), "dtype": self.dtype, "tensor_parallel_size": self.ranks, **self.settings}
        job = {"settings": settings, "load": asdict(load), "requests": [asdict(r) for r in requests]}
        with tempfile.TemporaryDirectory() as name:
            job_path, answers_path, log = Path(name, "job.json"), Path(name, "answers.json"), Path(name, "log")
            job_path.write_text(json.dumps(job))
            failed = in_process(log, _answer, job_path, answers_path)
            text = log.read_text(errors="replace") if log.exists() else ""
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(f"--- {load.name}\n{text}")
            if failed or not answers_path.exists():
                raise UnsupportedError(f"vLLM did not serve {self.folder} ({load.name}): {_last_words(text)}")
            found = json.loads(answers_path.read_text())
        return Served(
            [Answer(tuple(a["tokens"]), tuple(a["logprobs"])) for a in found["answers"]],
            found["preemptions"],
            found["kept_tokens"],
        )


def _last_words(text: str) -> str:
    """The last line that names an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or ["it printed nothing."])[-1]


def in_process(log: Path, call: Callable[..., None], *arguments: Any) -> int | None:
    """Run `call` in its own process, where vLLM is imported and no device is in use; returns the exit code.

    Imports take 10 to 30 s: `preload` runs them once, in the process that all calls are forked from.

    Args:
        call, arguments: Must be picklable.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preload"])
    process = context.Process(target=_begin, args=({**ENVIRONMENT, **os.environ}, log, call, arguments))
    process.start()
    process.join()
    return process.exitcode


def _begin(environment: Mapping[str, str], log: Path, call: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Set up the process: the caller's current environment, and a log file."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    call(*arguments)


def _answer(job_path: Path, answers_path: Path) -> None:
    job = json.loads(job_path.read_text())
    load, requests = job["load"], job["requests"]
    llm = open_engine(job["settings"], load)
    answers_path.write_text(json.dumps(press(llm.llm_engine, requests, load["preempt_every"])))


def open_engine(settings: dict[str, Any], load: dict[str, Any]) -> Any:
    """A vLLM engine set up for a load."""
    from vllm import LLM
    from vllm.platforms import current_platform

    more: dict[str, Any] = {"gpu_memory_utilization": CPU_MEMORY} if current_platform.is_cpu() else {}
    if load["prefix_tokens"]:
        more["mamba_block_size"] = load["prefix_tokens"]
    if load["tight"]:
        more["num_gpu_blocks_override"] = tight_blocks(settings, load)
    return LLM(
        **{**more, **settings},
        max_model_len=load["context_tokens"],
        max_num_seqs=load["rows"],
        max_num_batched_tokens=load["budget_tokens"],
        enforce_eager=load["eager"],
        enable_prefix_caching=bool(load["prefix_tokens"]),
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )


def tight_blocks(settings: dict[str, Any], load: dict[str, Any]) -> int:
    """Blocks for the initial states of all rows and for one row at the full context, times `tight`."""
    import torch
    from transformers import AutoConfig

    import still_export.models.families.softmax_families  # noqa: F401  # registers the configurations with transformers
    from still_export.serving.vllm.pages import common_pages, linear_state, paged_layers

    config, tokens = AutoConfig.from_pretrained(settings["model"]), load["context_tokens"]
    dtype = getattr(torch, settings["dtype"])
    linear = linear_state(SimpleNamespace(**settings))
    pages = common_pages(config, tokens, dtype, settings["tensor_parallel_size"], linear)
    layers = paged_layers(config)
    softmax = layers.count(None)
    # vLLM shares memory among groups of layers; a group is as large as the rarest kind has layers.
    size = max(1, min(softmax, len(layers) - softmax)) if softmax else len(layers)
    blocks = 2 + -(-(len(layers) - softmax) // size) * ((load["rows"] - 1) * pages.after(1) + pages.after(tokens))
    if softmax:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache_bytes = tokens * 2 * config.num_key_value_heads * head_dim * dtype.itemsize
        blocks += -(-softmax // size) * (1 + -(-cache_bytes // pages.size_bytes))
    return int(load["tight"] * blocks)


def press(engine: Any, requests: list[dict[str, Any]], preempt_every: int) -> dict[str, Any]:
    """Feed requests as they arrive; returns answers in order, the number of preemptions, and tokens with cached states."""
    from vllm import SamplingParams

    waiting = sorted(range(len(requests)), key=lambda i: requests[i]["arrives"])
    answers: dict[int, dict[str, Any]] = {}
    thrown: dict[str, int] = {}
    step = cached = 0
    while len(answers) < len(requests):
        while waiting and requests[waiting[0]]["arrives"] <= step:
            number = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0, max_tokens=requests[number]["count"], ignore_eos=True, logprobs=0, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": list(requests[number]["prompt"])}, sampling)
        if preempt_every and step % preempt_every == preempt_every - 1:
            engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            if output.finished:
                cached += output.num_cached_tokens or 0
                (found,) = output.outputs
                tokens = list(found.token_ids)
                chosen = [entry[token].logprob for entry, token in zip(found.logprobs, tokens, strict=True)]
                answers[int(output.request_id)] = {"tokens": tokens, "logprobs": chosen}
        for name, request in engine.engine_core.engine_core.scheduler.requests.items():
            thrown[name] = request.num_preemptions
        step += 1
    in_order = [answers[i] for i in range(len(requests))]
    return {"answers": in_order, "preemptions": sum(thrown.values()), "kept_tokens": cached}
