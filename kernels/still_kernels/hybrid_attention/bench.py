"""Speed of the kernels beside their peers and the machine's measured ceilings, in one process on one GPU.

    python -m still_kernels.hybrid_attention.bench --context 8192,65536 --batch 1,8 --json bench.json --plot roofline.png

Every kernel is compared with the chunked PyTorch form on the same inputs first; one that fails gets no speed. Decode steps are
replayed from a CUDA graph of several layers, each with its own state, so that the caches of one step do not serve the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState, Inputs
from still_kernels.hybrid_attention.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.dispatch import hybrid_attention

CHECK_LIMIT = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Greatest relative error (Frobenius norm) of an output for which a speed is printed."""

DECODE_BYTES = 256 << 20
"""State that one decode graph walks through at least: several times the L2 cache."""


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: bytes/s of a large copy (read + written), FLOP/s of a large matrix product."""

    copy: float
    gemm: float

    def floor_s(self, size_bytes: float, flop: float) -> float:
        """Least time for moving `size_bytes` and computing `flop`: the slower of both."""
        return max(size_bytes / self.copy, flop / self.gemm)


@dataclass(frozen=True)
class Row:
    """One measurement. `time_s` is None where the check failed."""

    name: str
    context: int
    batch: int
    size_bytes: float
    flop: float
    error: float
    time_s: float | None

    def share(self, ceilings: Ceilings) -> float | None:
        """Floor over time."""
        return None if self.time_s is None else ceilings.floor_s(self.size_bytes, self.flop) / self.time_s


def layer(context: int, scope: str) -> HybridAttentionConfig:
    """Llama-3.1-8B geometry with room for `context` tokens and one chunk more."""
    return HybridAttentionConfig(
        num_heads=32, num_kv_heads=8, head_dim=128, capacity_tokens=context + 64, select_scope=scope
    )


def prefill_cost(config: HybridAttentionConfig, tokens: int) -> tuple[float, float]:
    """(bytes, FLOP) that prefilling one empty row needs at least, 16-bit activations.

    Bytes: activations once, S and the caches once. FLOP: local and salient pairs, both projections, S written and read.
    """
    heads, dim, chunk, rows = config.num_heads, config.head_dim, config.chunk_size, config.projection_dim
    chunks = tokens / chunk
    slots = config.salient_per_chunk * max(0.0, (chunks - 3) * (chunks - 2) / 2) / chunks  # a query's mean
    local = 1.5 * chunk - 0.5
    per_token = 4 * dim * (local + slots) + 4 * dim * rows + 4 * config.state_features * dim
    activations = tokens * dim * 2 * (3 * heads + 2 * config.num_kv_heads)
    state = config.slots_for(tokens) * config.select_heads * dim * 4 + heads * config.state_features * dim * 4
    return activations + state, tokens * heads * per_token


def decode_cost(config: HybridAttentionConfig, context: int, batch: int) -> tuple[float, float]:
    """(bytes, FLOP) of one decode step: caches, window, S and the query projection are read once."""
    heads, dim = config.num_heads, config.head_dim
    slots = config.slots_for(context)
    salient = slots * config.select_heads * dim * 4
    state = heads * config.state_features * (dim + 1) * 4
    window = config.num_kv_heads * 2 * config.chunk_size * dim * 4
    weights = heads * config.projection_dim * dim * 2
    flop = heads * (
        4 * dim * (slots + 1.5 * config.chunk_size) + 2 * dim * (config.projection_dim + config.state_features)
    )
    return batch * (salient + state + window) + weights, batch * flop


def median_s(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of `run` on the device, by events, after three runs."""
    times = []
    for i in range(repeats + 3):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def measure_ceilings(dtype: torch.dtype) -> Ceilings:
    """Copy and matrix-product rates on random data."""
    source = torch.randn(2**29, device="cuda", dtype=dtype)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * source.element_size() / median_s(lambda: target.copy_(source), 10)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in "lr")
    return Ceilings(copy, 2 * 8192**3 / median_s(lambda: left @ right, 10))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; infinite where `got` has a NaN."""
    value = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    return value if value == value else float("inf")


def _inputs(config: HybridAttentionConfig, batch: int, tokens: int, dtype: torch.dtype) -> Inputs:
    """Random tokens and maps; every row brings all of its tokens."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    shapes = [(batch, tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    query, key, value, gate = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    shape = (heads, config.projection_dim, dim)
    weight_q, weight_k = ((torch.randn(shape, device="cuda") * dim**-0.5).to(dtype) for _ in "qk")
    new = torch.full((batch,), tokens, device="cuda")
    return Inputs(query, key, value, gate.sigmoid(), weight_q, weight_k, new)


def bench_prefill(context: int, scope: str, dtype: torch.dtype) -> Row:
    """One row of `context` tokens from an empty state."""
    config = layer(context, scope)
    inputs = _inputs(config, 1, context, dtype)
    empty = HybridAttentionState.empty(config, 1, dtype, "cuda")
    expected, _ = chunked_hybrid_attention(inputs, config, empty)
    got, _ = hybrid_attention(inputs, config, HybridAttentionState.empty(config, 1, dtype, "cuda"))
    error = relative_error(got, expected)
    del expected, got
    state = HybridAttentionState.empty(config, 1, dtype, "cuda")  # the same values enter S at every run
    run = lambda: hybrid_attention(inputs, config, state, in_place=True)  # noqa: E731
    time_s = median_s(run, 10) if error <= CHECK_LIMIT[dtype] else None
    return Row(f"prefill {scope}", context, 1, *prefill_cost(config, context), error, time_s)


def _filled_state(config: HybridAttentionConfig, batch: int, length: int, dtype: torch.dtype) -> HybridAttentionState:
    """A state with random contents after `length` tokens."""
    state = HybridAttentionState.empty(config, batch, dtype, "cuda")
    for name, tensor in state.tensors().items():
        if name != "length":
            tensor.normal_()
    state.kv_state.abs_()
    state.z_state.abs_().add_(1)
    state.length.fill_(length)
    return state


def bench_decode(context: int, batch: int, scope: str, dtype: torch.dtype, promoting: bool = False) -> Row:
    """One step of `batch` rows at `context` tokens (one fewer unless the step promotes), per layer of a CUDA graph."""
    config = layer(context, scope)
    length = context if promoting else context - 1
    size_bytes, flop = decode_cost(config, length, batch)
    inputs = _inputs(config, batch, 1, dtype)
    state = _filled_state(config, batch, length, dtype)
    expected, _ = chunked_hybrid_attention(inputs, config, state)
    got, _ = hybrid_attention(inputs, config, state)
    error = relative_error(got, expected)
    layers = max(2, min(32, -(-DECODE_BYTES // int(size_bytes))))
    states = [state] + [_filled_state(config, batch, length, dtype) for _ in range(layers - 1)]

    def step() -> None:
        for each in states:
            hybrid_attention(inputs, config, each, in_place=True)

    time_s = None
    if error <= CHECK_LIMIT[dtype]:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        time_s = median_s(graph.replay, 30) / layers
    name = f"decode {scope}{', promoting' if promoting else ''}"
    return Row(name, context, batch, size_bytes, flop, error, time_s)


def bench_peers(context: int, dtype: torch.dtype) -> list[Row]:
    """Causal scaled-dot-product attention of PyTorch's backends, and fla's chunked linear attention where installed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 32, context, 128, device="cuda", dtype=dtype) for _ in "qkv")
    size_bytes, flop = 4 * q.numel() * q.element_size(), 2 * 32 * 128 * context * context
    rows = []
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention-2", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
            rows.append(Row(f"{name} attention", context, 1, size_bytes, flop, 0.0, median_s(run, 5)))
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return rows
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    time_s = median_s(lambda: chunk_linear_attn(q, k, v, normalize=False), 5)
    return [*rows, Row("fla chunk_linear_attn", context, 1, size_bytes, 4 * 32 * 128 * 128 * context, 0.0, time_s)]


def table(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """Text table; a kernel that failed its check says so instead of a time."""
    lines = [f"ceilings: copy {ceilings.copy / 1e12:.2f} TB/s, matrix product {ceilings.gemm / 1e12:.0f} TFLOP/s"]
    lines.append(f"{'kernel':34}{'context':>9}{'batch':>7}{'time us':>12}{'floor us':>11}{'share':>8}{'error':>10}")
    for row in rows:
        share = row.share(ceilings)
        time = "CHECK FAILED" if row.time_s is None else f"{row.time_s * 1e6:.1f}"
        floor = ceilings.floor_s(row.size_bytes, row.flop) * 1e6
        lines.append(
            f"{row.name:34}{row.context:9}{row.batch:7}{time:>12}{floor:11.1f}"
            f"{'' if share is None else f'{share:.0%}':>8}{row.error:10.1e}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], ceilings: Ceilings, path: Path) -> None:
    """Roofline: FLOP/s over FLOP per byte of every row that passed its check."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    span = [0.1, 1e5]
    axes.loglog(span, [min(ceilings.copy * x, ceilings.gemm) for x in span], alpha=0)
    knee = ceilings.gemm / ceilings.copy
    axes.loglog([span[0], knee, span[1]], [span[0] * ceilings.copy, ceilings.gemm, ceilings.gemm], color="black")
    for name in dict.fromkeys(row.name for row in rows):
        points = [row for row in rows if row.name == name and row.time_s]
        axes.loglog(
            [row.flop / row.size_bytes for row in points],
            [row.flop / (row.time_s or 1) for row in points],
            "o",
            label=name,
        )
    axes.set_xlabel("FLOP per byte of device memory")
    axes.set_ylabel("FLOP/s")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 0, 1 if a check failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m still_kernels.hybrid_attention.bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--context", type=_numbers, default=[8192, 32768, 65536], help="tokens, comma-separated")
    parser.add_argument("--batch", type=_numbers, default=[1, 8], help="rows of a decode step, comma-separated")
    parser.add_argument("--scope", default="q_head,kv_group_max", help="select scopes, comma-separated")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--plot", type=Path, help="write a roofline plot here (needs matplotlib)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device; the kernels are timed on the GPU they run on.", file=sys.stderr)
        return 2
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    ceilings = measure_ceilings(dtype)
    rows: list[Row] = []
    for context in options.context:
        rows += bench_peers(context, dtype)
        for scope in options.scope.split(","):
            rows.append(bench_prefill(context, scope, dtype))
            for batch in options.batch:
                rows += [bench_decode(context, batch, scope, dtype, promoting) for promoting in (False, True)]
            torch.cuda.empty_cache()
    print(table(rows, ceilings))
    if options.json:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "ceilings": asdict(ceilings),
            "rows": [{**asdict(row), "share": row.share(ceilings)} for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(rows, ceilings, options.plot)
    return 1 if any(row.time_s is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
