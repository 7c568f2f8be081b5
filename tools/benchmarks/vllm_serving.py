"""Time vLLM with a STILL model of Llama-3.1-8B's sizes, or with other models: room for requests, prefill, decode, many at once.

  python -m tools.benchmarks.vllm_serving KIND [--ranks 2] [--eight] [--mixed 48x128] [--long 64x256] [--profile] [--own-process]
  python -m tools.benchmarks.vllm_serving KIND --model FOLDER --at 4096,16384,32000      # a trained model, one request at a time,
                                                                     in float16 or its own codes

KIND: still, kv_group, still-bfloat16 (linear state in bfloat16 with a rest); full attention: full, full-int4, full-fp8, full-ngram
(speculation by n-grams of prompts that repeat themselves, four guesses a step of which 0.8 hold, as vLLM's synthetic acceptance draws
them); experts-int4: Qwen3.5-35B-A3B's sizes, as a Qwen3-Next, for 8 requests at most.

Weights are of no meaning (--load-format dummy) and in bfloat16, or in GPTQ's 4 bits or vLLM's FP8 (all of the layers, not embedding and
head); a GPU of 100 GB is needed for 64 requests of 64K, one of 80 GB for eight. One engine does all of it, and each time is printed when
it is there.
--long COUNTxOUT: so many requests of 64K that come at once, and tokens that each gets;
--mixed COUNTxOUT: of 100 tokens to 64K, as many of each octave.
--no-compile: without torch.compile, steps as CUDA graphs all the same (experts compile for more than four minutes).
--profile: which kernels a step of 64 rows and one with prompts spend their time in, to $OUT; of several ranks, or an engine in a process
of its own, the kernels of 64 short requests, as each rank's profiler tells them. --own-process: as `vllm serve` has its engine.
--cache-gib N --turn FILE: of several engines on one GPU, each with so much cache, those that wait for the file's lock measure one after the
other. --tiny: everything at a small size, to try the tool without a GPU. vLLM and the plugin are found as tests/gpu/test_vllm.py says.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.benchmarks.common import Findings, Times, parser_of
from tools.benchmarks.geometries import GEOMETRIES, LLAMA_8B
from tools.benchmarks.vllm_process import environment

Loads = list[tuple[int, int]]
"""Requests, and tokens that each gets."""
KINDS = ("full", "full-int4", "full-fp8", "full-ngram", "experts-int4", "still", "still-bfloat16", "kv_group")
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    # Named here, for there are no files in which vLLM would see what is quantized.
    "modules_in_block_to_quantize": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
"""What config.json says of weights in 4 bits, with which vLLM takes its fastest kernel (Machete on Hopper, else Marlin)."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.64, 0.512, 0.4096],  # unconditional: each of those that remain holds in 0.8
}
LLAMA, EXPERTS = GEOMETRIES[LLAMA_8B], "qwen3.5-35b-a3b"
TINY = {
    **LLAMA,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Sizes:
    """What is measured: tokens of a long request and of a short one, the context, short requests at once, tokens that each gets."""

    geometry: dict[str, Any]
    long: int = 65536
    short: int = 1024
    context: int = 68 * 1024
    rows: int = 64
    out: int = 256
    steps: int = 129
    folder: Path | None = None
    """Of a model with its weights."""


SIZES = Sizes(LLAMA)
TINY_SIZES = Sizes(TINY, long=512, short=64, context=640, rows=4, out=40, steps=24)


@dataclass
class Run:
    """Seconds for all, until the last first token, and of each later step in which all rows get a token; how many ran at a time."""

    total: float = 0.0
    prefill: float = 0.0
    steps: list[float] = field(default_factory=list)
    running: int = 0
    made: float = 0.0
    """Tokens that a request got in these steps, on average."""

    @property
    def step_ms(self) -> float | None:
        """Of the median step."""
        return round(1e3 * Times(tuple(self.steps)).median, 3) if self.steps else None


def blank_folder(folder: Path, kind: str, sizes: Sizes) -> Path:
    """A model folder with a configuration alone: full attention, or STILL."""
    from transformers import LlamaConfig, Qwen3NextConfig

    from still_export.mixers.config import StillConfig
    from still_export.models.build import family_of, still_family_config

    values = {**sizes.geometry, "max_position_embeddings": 2 * sizes.long}
    values.pop("model_type")
    config: Any
    if kind.startswith("experts"):
        config = Qwen3NextConfig(**values, architectures=["Qwen3NextForCausalLM"])
    else:
        config = LlamaConfig(**values, architectures=["LlamaForCausalLM"])
    if kind.startswith("still") or kind == "kv_group":
        scope = "kv_group_max" if kind == "kv_group" else "q_head"
        still = StillConfig.from_dict({"capacity_tokens": sizes.context, "select_scope": scope})
        config = still_family_config(family_of("llama"), config.to_dict(), still)
    config.dtype = "bfloat16"
    if kind == "full-int4":
        config.quantization_config = GPTQ
    if kind == "experts-int4":
        config.quantization_config = {k: v for k, v in GPTQ.items() if k != "modules_in_block_to_quantize"}
    config.save_pretrained(folder)
    return folder


def fill_codes(model: Any) -> int:
    """Give all 4-bit weights random codes, where --load-format dummy leaves what was in memory; how many matrices they are."""
    import torch

    matrices = [weight.data for name, weight in model.named_parameters() if name.endswith("qweight")]
    for codes in matrices:
        codes.random_(torch.iinfo(codes.dtype).min, torch.iinfo(codes.dtype).max)
    return len(matrices)


class Bench:
    """One engine.

    Args:
        kind: Of KINDS.
        ranks: GPUs that share each layer.
        sizes: What is measured.
        limits: More of the engine: the memory of a machine without a GPU, what is compiled.
    """

    def __init__(self, kind: str, ranks: int, sizes: Sizes, limits: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        self.found = Findings()
        self.name, self.sizes = f"{kind}, {ranks} rank{'s' * (ranks > 1)}", sizes
        self.random = torch.Generator().manual_seed(0)
        self.repeats = kind == "full-ngram"
        self.engine = LLM(
            model=str(sizes.folder or blank_folder(Path(tempfile.mkdtemp()) / "blank", kind, sizes)),
            load_format="auto" if sizes.folder else "dummy",
            dtype="float16" if sizes.folder else "auto",
            quantization="fp8" if kind == "full-fp8" else None,
            skip_tokenizer_init=True,
            max_model_len=sizes.context,
            enable_prefix_caching=False,
            max_num_seqs=sizes.rows,
            tensor_parallel_size=ranks,
            speculative_config=NGRAM if kind == "full-ngram" else None,
            mamba_ssm_cache_dtype="bfloat16" if kind == "still-bfloat16" else "auto",
            additional_config={} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"},
            **limits,
        ).llm_engine
        core = getattr(self.engine.engine_core, "engine_core", None)  # in another process it is not seen
        self.scheduler = None if core is None else core.scheduler
        self.apart = ranks > 1 or core is None
        if kind.endswith("-int4"):
            self.found.add(engine=self.name, matrices_in_4_bits=sum(self.engine.apply_model(fill_codes)))

    def say(self, load: str, run: Run, out: int) -> None:
        """A row of one load, whose requests got `out` tokens each."""
        seconds = {"total_s": round(run.total, 3), "prefill_s": round(run.prefill, 3), "step_ms": run.step_ms}
        steps = max(1, len(run.steps))
        spent = (
            {"ms_a_token": round(1e3 * sum(run.steps) / run.made, 3), "tokens_a_step": round(run.made / steps, 2)}
            if run.made
            else {}
        )
        self.found.add(engine=self.name, load=load, out=out, **seconds, **spent, at_a_time=run.running)

    def room(self, tokens: int) -> float:
        """Requests of so many tokens that memory holds."""
        assert self.scheduler is not None
        config = self.scheduler.kv_cache_config
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        needed = (spec.blocks(tokens) if hasattr(spec, "blocks") else -(-tokens // spec.block_size) for spec in specs)
        return float((config.num_blocks - 1) / sum(needed))

    def begin(self, lengths: Sequence[int], out: int) -> None:
        """Requests of so many random tokens each, all at once."""
        import torch
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        for i, tokens in enumerate(lengths):
            prompt = torch.randint(5, self.sizes.geometry["vocab_size"], (tokens,), generator=self.random).tolist()
            if self.repeats:  # so that n-grams always find something
                prompt = (prompt[: min(64, tokens)] * -(-tokens // 64))[:tokens]
            self.engine.add_request(f"{i} {time.perf_counter()}", {"prompt_token_ids": prompt}, sampling)

    def timed(self, lengths: Sequence[int], out: int) -> Run:
        """Requests of so many tokens each, until the last has ended."""
        times, first, count = Run(), set[str](), len(lengths)
        begin = last = said = time.perf_counter()
        made, had = 0, dict[str, int]()
        self.begin(lengths, out)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            got = {each.request_id: len(each.outputs[0].token_ids) for each in outputs}
            made += len(outputs)
            if len(first) == count and len(outputs) == count:
                times.steps.append(now - last)
                times.made += sum(got[name] - had[name] for name in got) / count
            elif len(first) < count:
                first |= {output.request_id for output in outputs}
                times.prefill = now - begin
            had |= got
            times.running = max(times.running, len(outputs))  # each that runs gets a token, unless it is read
            if now - said > 30:
                print(f"  {now - begin:.0f} s: {len(first)} have begun, {made} tokens", flush=True)
                said = now
            last = now
        times.total = last - begin
        return times

    def profile(self, folder: Path) -> None:
        """Where steps spend their time: one with prompts, and some of single tokens."""
        self.begin([self.sizes.short] * self.sizes.rows, 32)
        self.engine.step()
        self.profiled(folder, "with prompts", 1)
        decodes, engine = 0, self.engine
        while decodes < 8:  # beyond the last prompt, whose rows are captured
            decodes = decodes + 1 if len(engine.step()) == self.sizes.rows else 0
        self.profiled(folder, "of single tokens", 8)
        while engine.has_unfinished_requests():
            engine.step()

    def profiled(self, folder: Path, name: str, count: int) -> None:
        """Some steps, by kernels."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        gpu = torch.cuda.is_available()
        wait: Callable[[], None] = torch.cuda.synchronize if gpu else (lambda: None)
        wait()
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
            begin = time.perf_counter()
            for _ in range(count):
                self.engine.step()
            wait()
            wall = time.perf_counter() - begin
        field_name = "self_device_time_total" if gpu else "self_cpu_time_total"
        rows = sorted(((getattr(e, field_name), e.count, e.key) for e in found.key_averages()), reverse=True)
        busy = sum(row[0] for row in rows)
        lines = [
            f"{us / count:10.1f} us a step {calls / count:7.1f} calls  {key[:150]}" for us, calls, key in rows[:40]
        ]
        head = f"steps {name}: {1e3 * wall / count:.2f} ms each, of which {1e-3 * busy / count:.2f} in kernels"
        (folder / f"profile-{self.name}-{name}.txt".replace(" ", "-").replace(",", "")).write_text(
            "\n".join([head, *lines]) + "\n"
        )
        print(f"{self.name}: {head}", flush=True)
        print("\n".join(lines[:14]), flush=True)

    def run_at(self, lengths: Sequence[int]) -> None:
        """One request of each of these lengths, whose later steps are a sequence's."""
        for tokens in lengths:
            for turn in ("first", "again"):
                self.say(f"1 of {tokens}, {turn}", self.timed([tokens], self.sizes.steps), self.sizes.steps)

    def run(self, eight: bool, mixed: Loads, long: Loads, folder: Path | None) -> None:
        """All measurements, the shortest first."""
        s = self.sizes
        if self.scheduler is not None:
            room = {str(tokens): round(self.room(tokens), 1) for tokens in (s.long, s.short)}
            self.found.add(engine=self.name, room_for_requests_of=room)
        self.say(f"1 of {4 * s.short}", self.timed([4 * s.short], s.steps), s.steps)
        self.timed([s.short] * min(8, s.rows), 8)
        for turn in ("first", "again"):
            self.say(f"{s.rows} of {s.short}, {turn}", self.timed([s.short] * s.rows, s.out), s.out)
        if folder is not None and not self.apart:
            self.profile(folder)
        for turn in ("first", "again"):
            self.say(f"1 of {s.long}, {turn}", self.timed([s.long], s.steps), s.steps)
        if eight:
            self.say(f"8 of {s.long}", self.timed([s.long] * 8, s.steps), s.steps)
        for count, out in mixed:
            least = min(100, s.short)
            lengths = [round(least * (s.long / least) ** ((i + 0.5) / count)) for i in range(count)]
            random.Random(0).shuffle(lengths)
            load = f"{count} of {min(lengths)} to {max(lengths)}, {sum(lengths)} in all"
            self.say(load, self.timed(lengths, out), out)
        for count, out in long:
            self.say(f"{count} of {s.long}", self.timed([s.long] * count, out), out)
        if folder is not None and self.apart:
            self.engine.start_profile()
            self.timed([s.short] * s.rows, 32)
            self.engine.stop_profile()


def load_of(text: str) -> tuple[int, int]:
    """Of "64x256"."""
    count, out = text.split("x")
    return int(count), int(out)


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--eight", action="store_true", help="8 requests of 64K too")
    for load in ("--mixed", "--long"):
        parser.add_argument(load, type=load_of, action="append", default=[], metavar="COUNTxOUT", help="repeatable")
    parser.add_argument("--model", type=Path, help="folder of a trained model of this KIND")
    parser.add_argument(
        "--at", default="4096,16384,32000", help="with --model: prompts' tokens (default 4096,16384,32000)"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--own-process", action="store_true")
    parser.add_argument("--cache-gib", type=int)
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", tempfile.gettempdir())).resolve()
    found_by = os.environ.get("PYTHONPATH", "")
    os.environ.update(environment(out))
    if options.own_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if not found_by.startswith(str(out / "entry")):
        # So that this process finds the plugin, as those that vLLM starts.
        os.execv(sys.executable, [sys.executable, "-m", "tools.benchmarks.vllm_serving", *sys.argv[1:]])
    limits: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": True} if options.tiny else {}
    geometry, sizes = ("tiny", TINY_SIZES) if options.tiny else (LLAMA_8B, SIZES)
    if options.kind == "experts-int4":
        geometry, sizes = EXPERTS, replace(SIZES, geometry=GEOMETRIES[EXPERTS], rows=8)
    lengths = [int(text) for text in options.at.split(",")]
    if options.model:
        values = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
        if ("still_config" in values) != (options.kind in ("still", "still-bfloat16", "kv_group")):
            parser.error(
                f"{options.model} is no model of the kind {options.kind}. Give still for STILL folders, full for others."
            )
        geometry, context = options.model.name, max(lengths) + SIZES.steps
        sizes = Sizes(values, context=context, rows=1, folder=options.model)
    if options.no_compile:
        rows = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= sizes.rows]
        limits["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": rows,
        }
    if options.cache_gib:
        limits |= {"kv_cache_memory_bytes": options.cache_gib << 30, "gpu_memory_utilization": 0.4 / options.ranks}
    if options.profile and (options.ranks > 1 or options.own_process):
        limits["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(out),
            "torch_profiler_with_stack": False,
        }
    bench = Bench(options.kind, options.ranks, sizes, limits)
    if options.turn:
        print("ready", flush=True)
        held = options.turn.open("w")
        fcntl.flock(held, fcntl.LOCK_EX)  # until this process ends
    if options.model:
        bench.run_at(lengths)
    else:
        bench.run(options.eight, options.mixed, options.long, out if options.profile else None)
    subject = {
        "model" if options.model else "geometry": geometry,
        "runtime": "vllm",
        "kind": options.kind,
        "ranks": str(options.ranks),
        **({"compiled": "no"} if options.no_compile else {}),
        **({"engine": "in a process of its own"} if options.own_process else {}),
    }
    bench.found.record(options.record, f"vLLM, {bench.name}", subject)
    return 0


if __name__ == "__main__":
    sys.exit(main())
