"""Time the sums of two GPUs that a step of a divided model makes: NCCL's, by its settings, and the kernel that vLLM takes for small ones.

  python -m tools.benchmarks.all_reduce [--set NCCL_MIN_NCHANNELS=32] [--set NCCL_PROTO=Simple,NCCL_ALGO=Ring] [--ranks 2]

Sums of bfloat16 in CUDA graphs of 16, as large as hidden states of Llama-3.1-8B: of one token, 64, 1,024 and 16,384. Each --set is a turn
more, of NCCL with these variables; the first has none. The last is of vLLM's kernel, where vLLM is installed.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tools.benchmarks.common import Findings, parser_of

HIDDEN, TOKENS = 4096, (1, 64, 1024, 16384)
CALLS, RUNS, WARM = 16, 12, 3


def median_us(graph: torch.cuda.CUDAGraph) -> float:
    """Of one of its sums."""
    times = []
    for run in range(WARM + RUNS):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if run >= WARM:
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def recorded(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """CALLS of them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    return graph


def work(rank: int, ranks: int, settings: dict[str, str], kernels: bool, port: int, answers: Any) -> None:
    """One rank, in a process of its own."""
    os.environ |= {**settings, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    found = {}
    kernel = None
    if kernels:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        kernel = CustomAllreduce(dist.new_group(backend="gloo"), torch.device("cuda", rank))
    for tokens in TOKENS:
        x = torch.full((tokens, HIDDEN), 1e-3, dtype=torch.bfloat16, device="cuda")
        if kernel is None:
            dist.all_reduce(x)
            found["NCCL", tokens] = median_us(recorded(lambda x=x: dist.all_reduce(x)))  # type: ignore[misc]
        elif kernel.should_custom_ar(x):
            with kernel.capture():
                graph = recorded(lambda x=x: kernel.custom_all_reduce(x))  # type: ignore[misc]
            found["vLLM's kernel", tokens] = median_us(graph)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    found = Findings()
    turns = [(given, False) for given in ("", *options.set)] + [("", True)] * bool(find_spec("vllm"))
    for number, (given, kernels) in enumerate(turns):
        settings = dict(part.split("=") for part in given.split(",") if part)
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(work, (options.ranks, settings, kernels, 29600 + number, answers), options.ranks)
        for (way, tokens), us in answers.get().items():
            size = tokens * HIDDEN * 2
            rate = round(size / us / 1e3, 1)
            found.add(way=way, settings=given, tokens=tokens, kib=size >> 10, us=round(us, 1), gb_s=rate)
    found.record(options.record, "sums of GPUs", {"ranks": str(options.ranks)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
