"""Speed of PyTorch: a Transformer and the STILL model of its geometry side by side, `generate` eager and with a static cache, and prefill.

  python -m tools.benchmarks.torch_generate
  python -m tools.benchmarks.torch_generate --geometry llama-8b --contexts 65536 --ways "" --calls 2048,16384

Random weights. SmolLM2-135M's geometry has the softmax layers and window factors of assets/smollm2-135m-instruct-mixed-2, Llama-3.1-8B's is
all hybrid. First the static cache must give the tokens of the dynamic one, compiled on this machine as a whole. A token's time is the
median between two ends of a step, as `generate` runs them; `--calls` times a prompt that is fed in calls of so many tokens. `--small`
shrinks every size, to try it on a CPU. Each result is one JSON line, then a table; the exit code is 1 where tokens differ.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from tools.benchmarks.common import Findings, Times, numbers, parser_of, time_calls
from tools.benchmarks.geometries import GEOMETRIES, LLAMA_8B, SMOLLM2, config_of

ADAPTER = Path(__file__).parents[2] / "assets/smollm2-135m-instruct-mixed-2/adapter_config.json"
TARGETS = {"eager": 1.1, "static": 0.9}
"""Most that the STILL model may take, over the base in the same way."""


class Clock(StoppingCriteria):
    """Notes when each step is over; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def steps(self, skip: int) -> Times:
        """The steps after the first `skip`."""
        return Times(tuple(b - a for a, b in zip(self.times, self.times[1:], strict=False))[skip:])


class Profile(StoppingCriteria):
    """Records what runs on the GPU from the end of step `first` to that of step `first + steps`; never stops."""

    def __init__(self, first: int = 20, steps: int = 8) -> None:
        self.first, self.steps, self.seen = first, steps, 0
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += 1
        if self.seen in (self.first, self.first + self.steps):
            torch.cuda.synchronize()
            (self.profiler.start if self.seen == self.first else self.profiler.stop)()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def table(self, rows: int = 24) -> str:
        """Kernels of a step: launches, microseconds of all of them together, name."""
        found = sorted(self.profiler.key_averages(), key=lambda each: -each.self_device_time_total)
        lines = [
            f"{each.count / self.steps:8.1f}{each.self_device_time_total / self.steps:10.1f}  {each.key[:110]}"
            for each in found
        ]
        total = sum(each.self_device_time_total for each in found) / self.steps
        launches = sum(each.count for each in found) / self.steps
        return "\n".join([f"{launches:8.1f}{total:10.1f}  all", *lines[:rows]])


TINY = dict(intermediate_size=48, num_hidden_layers=3, vocab_size=97)


def base_config(small: bool, geometry: str = SMOLLM2, layers: int | None = None) -> Any:
    """A geometry's, or a tiny one whose heads the kernels have."""
    sizes: dict[str, Any] = {}
    if small:
        sizes = {**TINY, "hidden_size": 4 * GEOMETRIES[geometry]["num_attention_heads"]}
    sizes |= {} if layers is None else {"num_hidden_layers": layers}
    sizes |= {"max_position_embeddings": 16384} if geometry == SMOLLM2 else {}
    return config_of(geometry, **sizes)


def base_model(small: bool, geometry: str = SMOLLM2, layers: int | None = None, device: str = "cpu") -> Any:
    """A plain softmax model with random weights, made on `device` in the default type."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(base_config(small, geometry, layers)).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def still_model(base: Any, small: bool, geometry: str = SMOLLM2) -> Any:
    """The STILL model around `base`: mixed as the published one is, or all hybrid."""
    from still_export.mixers.config import StillConfig
    from still_export.models import attach_untrained

    if geometry != SMOLLM2:
        return attach_untrained(base, StillConfig()).requires_grad_(False)
    values = json.loads(ADAPTER.read_text())["still_config"]
    if small:
        kinds = ("hybrid_attention", "full_attention", "hybrid_attention")
        values |= {"layer_types": kinds, "window_factors": values["window_factors"][:3]}
    return attach_untrained(base, StillConfig.from_dict(values)).requires_grad_(False)


def fresh(model: Any) -> None:
    """Forget what was compiled, and the size of earlier caches: each measurement is one of its own."""
    torch._dynamo.reset()
    for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length", "_most_cached"):
        if hasattr(model, name):
            delattr(model, name)


def way_of(name: str) -> dict[str, Any]:
    """Arguments of `generate`; transformers compiles steps with a static cache by itself where there is a GPU."""
    return {} if name == "eager" else {"cache_implementation": "static"}


def check(device: str) -> bool:
    """Whether a small mixed model in float32 generates alike with both caches: a ragged batch, several chunks, one whole graph."""
    model = still_model(base_model(small=True), small=True).to(device)
    fresh(model)
    ids = torch.randint(3, 97, (2, 190), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :61] = 0
    tokens = 12 if device == "cpu" else 140  # both begin chunks
    given = {"attention_mask": mask, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **given)
    compiling = CompileConfig(fullgraph=True)
    if device == "cpu":
        compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)  # type: ignore[arg-type]
        compiling._compile_all_devices = True  # type: ignore[assignment]
    found = [
        model.generate(ids, cache_implementation="static", compile_config=compiling, **given) for _ in range(2)
    ]  # the second cache lies elsewhere: its steps are captured again
    same = all(torch.equal(expected, each) for each in found)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    print(json.dumps({"check": "static = dynamic", "same": same, "cudagraph_skips": skips}), flush=True)
    return same and not skips


def measure(model: Any, name: str, way: str, context: int, steps: int, profile: bool = False) -> dict[str, Any]:
    """One row: a call that compiles and warms up, then one that is timed; with `profile` a third, whose kernels are printed."""
    fresh(model)
    ids = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(2))
    ids = ids.to(model.device)
    given = {**way_of(way), "do_sample": False, "pad_token_id": 0, "max_new_tokens": steps + 8}
    begin = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    ready = time.perf_counter() - begin
    clock = Clock()
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([clock]), **given
    )
    if profile:
        recorded = Profile(steps // 3, max(1, steps // 8))
        model.generate(
            ids, attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([recorded]), **given
        )
        print(f"{name}, {way}, {context}: launches and microseconds a token\n{recorded.table()}", flush=True)
    figures = clock.steps(skip=6).figures("us")
    return {
        "model": name,
        "way": way,
        "context": context,
        "decode_us": round(figures["median_us"], 1),
        "spread": figures["spread"],
        "first_call_s": round(ready, 1),
        "tokens": tokens[0, context:].tolist(),
    }


def measure_calls(model: Any, name: str, size: int, context: int) -> dict[str, Any]:
    """One row: the better of two prefills of `context` tokens in calls of `size`, after one call that compiles."""
    from transformers import DynamicCache

    from still_export.mixers.cache import StillCache

    ids = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(2))
    ids = ids.to(model.device)

    def prefill(tokens: int) -> None:
        cache = DynamicCache(config=model.config) if name == "base" else StillCache.empty(model.config)
        for piece in ids[:, :tokens].split(size, dim=1):
            logits = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        logits.argmax(-1).tolist()  # waits for the device

    with torch.no_grad():
        prefill(min(2 * size, context))
        seconds = time_calls(lambda: prefill(context), 2, 0).best
    return {"model": name, "calls_of": size, "context": context, "prefill_s": round(seconds, 4)}


def table(rows: list[dict[str, Any]]) -> str:
    """Both models side by side, with the target; a missing time is a dash."""
    found = {(row["model"], row["way"], row["context"]): row for row in rows}
    lines = [f"{'context':>8} {'way':8}{'base ms':>9}{'STILL ms':>10}{'ratio':>7}{'target':>8}"]
    for context in sorted({row["context"] for row in rows}):
        for way, target in TARGETS.items():
            times = [found.get((name, way, context), {}).get("decode_us") for name in ("base", "still")]
            cells = [f"{x / 1e3:.3f}" if x else "-" for x in times]
            ratio = f"{times[1] / times[0]:.2f}" if all(times) else "-"
            lines.append(f"{context:8} {way:8}{cells[0]:>9}{cells[1]:>10}{ratio:>7}{f'<= {target}':>8}")
        same = [found.get(("still", way, context), {}).get("tokens") for way in TARGETS]
        if all(same):
            alike = sum(a == b for a, b in zip(*same, strict=True))
            lines.append(f"{context:8} STILL model, eager and static: {alike} of {len(same[0])} tokens alike")
    return "\n".join(lines)


def main() -> int:
    """Command line; exit code 1 where the static cache gives other tokens."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--contexts", default="8000,1024", help="tokens already seen, comma-separated, in order of work"
    )
    parser.add_argument("--models", default="base,still", help="of base, still")
    parser.add_argument("--ways", default="eager,static", help="of eager, static; '' = none")
    parser.add_argument("--calls", default="", help="time prefill in calls of so many tokens, comma-separated")
    parser.add_argument("--geometry", default=SMOLLM2, choices=(SMOLLM2, LLAMA_8B))
    parser.add_argument("--layers", type=int, help="fewer layers than the geometry has")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--limit-s", type=float, default=240, help="start nothing new after so long (default 240)")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a token for each row")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    begin, models = time.perf_counter(), options.models.split(",")
    ways = [way for way in options.ways.split(",") if way]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "still" in models and "static" in ways and not check(device):
        print("error: the static cache gives other tokens than the dynamic one, or no CUDA graph; nothing is timed.")
        return 1
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    base = base_model(options.small, options.geometry, options.layers, device)
    made = {"base": base}
    if "still" in models:
        made["still"] = still_model(base, options.small, options.geometry)
    made = {name: made[name].to(device, dtype) for name in models}
    torch.set_default_dtype(torch.float32)
    found, rows = Findings(), []
    for context in numbers(options.contexts):
        for size, way in [*((size, "") for size in numbers(options.calls)), *((0, way) for way in ways)]:
            for name in models:
                if time.perf_counter() - begin > options.limit_s:
                    print(f"not measured for want of time: {name}, {way or f'calls of {size}'}, {context}")
                elif size:
                    found.add(**measure_calls(made[name], name, size, context))
                else:
                    rows.append(measure(made[name], name, way, context, options.steps, options.profile))
                    found.add(**{key: value for key, value in rows[-1].items() if key != "tokens"})
    if rows:
        print(table(rows))
    subject = {"geometry": options.geometry, "dtype": str(dtype)[6:]}
    found.record(options.record, f"PyTorch, {options.geometry}", subject)
    return 0


if __name__ == "__main__":
    sys.exit(main())
