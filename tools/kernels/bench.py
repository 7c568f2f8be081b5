"""Speed of an op's kernels beside their peers and the machine's measured ceilings, in one process on one GPU.

    python -m tools.kernels.bench OP --context 8192,65536 --batch 1,8 --json bench.json

Every kernel is compared with the PyTorch form on the same inputs first; one that fails gets no speed. Calls are replayed from CUDA graphs,
so that the time of the host is in none but PyTorch's, whose form may ask the host. A graph of decode steps holds several layers, each with
its own state, so that the caches of one step do not serve the next; beside them stands a plain copy of as many bytes in such a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from still_kernels.registry import op_names
from tools.kernels.registry import work_of
from tools.kernels.work import CHECK_LIMIT, Kind, OpWork, Work, relative_error, states_of_step


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: bytes/s of a large copy (read + written), FLOP/s of a large GEMM."""

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
    """Copy and GEMM rates on random data."""
    source = torch.randn(2**29, device="cuda", dtype=dtype)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * source.element_size() / median_s(lambda: target.copy_(source), 10)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in "lr")
    return Ceilings(copy, 2 * 8192**3 / median_s(lambda: left @ right, 10))


def error_of(work: Work) -> float:
    """How far the kernels' output is from that of PyTorch."""
    return relative_error(work.run(work.state()), work.reference(work.state()))


def time_graph(work: Work, states: Sequence[Any], repeats: int) -> float:
    """Seconds of a call, of a CUDA graph of one on each of the states."""

    def calls() -> None:
        for state in states:
            work.run(state)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return median_s(graph.replay, repeats) / len(states)


def time_call(work: Work) -> float:
    """Seconds of a call, again and again on one state."""
    state = work.state()
    if work.run is work.reference:
        return median_s(lambda: work.run(state), 10)
    return time_graph(work, [state], 10)


def time_step(work: Work) -> float:
    """Seconds of a step of one layer, beside others with their own states."""
    return time_graph(work, [work.state() for _ in range(states_of_step(work))], 30)


def measure(op: OpWork, layer: Any, name: str, kind: Kind, context: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Check and time one kind of call, and what other libraries have for it."""
    own = op.work(layer, kind, dtype, device)
    works = {f"{kind.name} {name}".rstrip(): own} | {peer: replace(own, run=run) for peer, run in own.peers.items()}
    rows = []
    for title, work in works.items():
        error = error_of(work)
        time_s = None
        if error <= CHECK_LIMIT[dtype]:
            time_s = time_step(work) if kind.tokens == 1 else time_call(work)
        rows.append(Row(title, context, kind.batch, work.size_bytes, work.flop, error, time_s))
    if kind.tokens == 1:  # as few bytes a launch do not reach the rate of a large copy
        half = int(own.size_bytes) // 2
        pair = lambda: torch.empty(2, half, dtype=torch.int8, device=device)  # noqa: E731
        copy = replace(own, state=pair, run=lambda pair: pair[0].copy_(pair[1]))
        rows.append(Row("copy of as many bytes", context, kind.batch, own.size_bytes, 0.0, 0.0, time_step(copy)))
    return rows


def bench_peers(context: int, heads: int, dim: int, dtype: torch.dtype) -> list[Row]:
    """Causal scaled-dot-product attention of PyTorch's backends, and fla's chunked linear attention where installed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, heads, context, dim, device="cuda", dtype=dtype) for _ in "qkv")
    size_bytes, flop = 4 * q.numel() * q.element_size(), 2 * heads * dim * context * context
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
    flop = 4 * heads * dim * dim * context
    return [*rows, Row("fla chunk_linear_attn", context, 1, size_bytes, flop, 0.0, time_s)]


def table(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """Text table; a kernel that failed its check says so instead of a time."""
    lines = [f"ceilings: copy {ceilings.copy / 1e12:.2f} TB/s, GEMM {ceilings.gemm / 1e12:.0f} TFLOP/s"]
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


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 0, 1 if a check failed, 2 without a GPU or for a wrong option."""
    parser = argparse.ArgumentParser(prog="python -m tools.kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", choices=op_names())
    parser.add_argument("--context", type=_numbers, default=[8192, 32768, 65536], help="tokens, comma-separated")
    parser.add_argument("--batch", type=_numbers, default=[1, 8], help="sequences of a decode step, comma-separated")
    parser.add_argument("--layer", help="kinds of layers, comma-separated; default: all of the op")
    parser.add_argument("--dtype", choices=OpWork.dtypes, help="default: bfloat16, where the op has it")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args(arguments)
    op = work_of(options.op)
    layers = list(op.layers) if options.layer is None else options.layer.split(",")
    if unknown := [name for name in layers if name not in op.layers]:
        print(f"error: --layer {','.join(unknown)} is unknown; known: {', '.join(op.layers)}.", file=sys.stderr)
        return 2
    if options.dtype not in (None, *op.dtypes):
        print(f"error: --dtype {options.dtype}: {options.op} has {', '.join(op.dtypes)}.", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: no CUDA device; the kernels are timed on the GPU they run on.", file=sys.stderr)
        return 2
    dtype = getattr(torch, options.dtype or op.dtypes[0])
    torch.manual_seed(0)
    ceilings = measure_ceilings(dtype)
    rows: list[Row] = []
    for context in options.context:
        rows += bench_peers(context, op.sizes["heads"], op.sizes["head_dim"], dtype)
        for name in layers:
            layer = op.layer(op.sizes, name, context)
            kinds = op.kinds(context, options.batch)
            for kind in kinds:
                rows += measure(op, layer, name, kind, context, dtype, "cuda")
            torch.cuda.empty_cache()
    print(table(rows, ceilings))
    if options.json:
        report = {
            "op": options.op,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "ceilings": asdict(ceilings),
            "rows": [{**asdict(row), "share": row.share(ceilings)} for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row.time_s is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
