"""Prefill of one hybrid attention layer of Llama-3.1-8B's geometry by several GPUs, a part of the prompt in each, beside one GPU.

  python -m tools.benchmarks.parts_of_prompt --gpus 2 --tokens 65536,262144 [--profile]

bfloat16, C 64, k 4. The first process times the whole prompt by itself, then all prefill their parts; they begin together (an all-reduce
goes ahead on each GPU) and a call has taken as long as the slowest of them, by events. The part's output is compared with that of one GPU.
`--rest` is the cost model's (default that of the kernels); `--profile` prints each process's kernels. Needs GPUs that reach each other;
with TRITON_INTERPRET=1 and `--small` it tries itself on a CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from still_kernels.hybrid_attention import HybridAttentionState, Inputs, parallel
from still_kernels.hybrid_attention.dispatch import hybrid_attention
from still_kernels.hybrid_attention.work import layer
from still_kernels.work import relative_error
from tools.benchmarks.common import Findings, numbers, parser_of
from tools.benchmarks.geometries import GEOMETRIES, LLAMA_8B

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 48, "chunk_size": 32, "salient_per_chunk": 3}


def sizes(small: bool) -> dict[str, int]:
    """Of the layer."""
    if small:
        return SMALL
    names = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    return {
        **{ours: GEOMETRIES[LLAMA_8B][theirs] for ours, theirs in names.items()},
        "chunk_size": 64,
        "salient_per_chunk": 4,
    }


def milliseconds(call: Callable[[], Any], cuda: bool, together: bool) -> float:
    """Of one call; `together`: all processes begin at once, and the slowest counts."""
    flag = torch.zeros(1, device="cuda" if cuda else "cpu")
    if together:
        dist.all_reduce(flag)
    if cuda:
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        flag.fill_(begin.elapsed_time(end))
    else:
        start = time.perf_counter()
        call()
        flag.fill_((time.perf_counter() - start) * 1e3)
    if together:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag.item()


def profile(call: Callable[[], Any]) -> str:
    """A call's kernels by the time that they take: microseconds, launches, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
    return "\n".join(f"{each.self_device_time_total:12.1f}{each.count:5}  {each.key[:90]}" for each in rows[:14])


def work(rank: int, store: str, options: Namespace) -> None:
    """One process."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        parallel.demand_kernel = lambda *given: None  # the interpreter runs them
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # what is sent goes ahead of kernels that are under way
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.FileStore(store, options.gpus), rank=rank, world_size=options.gpus
    )
    found, dtype = Findings(), torch.bfloat16 if cuda else torch.float32
    for tokens in numbers(options.tokens):
        config = layer(sizes(options.small), "q_head", tokens)
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator, dtype=dtype)  # noqa: B023

        wide, narrow = ((1, tokens, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
        maps = (config.num_heads, config.projection_dim, config.head_dim)
        whole = Inputs(
            draw(*wide),
            draw(*narrow),
            draw(*narrow),
            draw(*wide).sigmoid_(),
            *(draw(*maps) * config.head_dim**-0.5 for _ in "qk"),
        )
        cuts = parallel.cut_prompt(config, tokens, options.gpus, rest=options.rest)
        own = slice(cuts[rank], cuts[rank + 1])
        part = whole.part(own)
        state = HybridAttentionState.empty(config, 1, dtype, device)

        def alone() -> torch.Tensor:
            for tensor in (state.kv_state, state.z_state, state.length):  # noqa: B023
                tensor.zero_()
            return hybrid_attention(whole, config, state, in_place=True)[0]  # noqa: B023

        def together() -> torch.Tensor:
            for tensor in (state.kv_state, state.z_state, state.length):  # noqa: B023
                tensor.zero_()
            return parallel.prefill_part(part, config, state, cuts)[0]  # noqa: B023

        with torch.no_grad():
            expected = alone()[:, own].clone()
            error = relative_error(together(), expected)
            del expected
            one = [milliseconds(alone, cuda, False) for _ in range(options.runs + 1)] if rank == 0 and cuda else []
            dist.barrier()
            many = [milliseconds(together, cuda, True) for _ in range(options.runs + 2)]
            if options.profile and cuda:
                print(f"part {rank} of {tokens} tokens, us\n{profile(together)}", flush=True)
        if rank == 0:
            row: dict[str, Any] = {"tokens": tokens, "gpus": options.gpus, "cuts": list(cuts), "error": error}
            row["parts_ms"] = round(statistics.median(many[2:]), 3)
            if one:
                row["one_ms"] = round(statistics.median(one[1:]), 3)
                row["faster"] = round(row["one_ms"] / row["parts_ms"], 3)
            found.add(**row, parts_best_ms=round(min(many[2:]), 3))
        else:
            print(f"part {rank}: error {error:.1e}", flush=True)
        dist.barrier()
    if rank == 0:
        subject = {"geometry": LLAMA_8B, "dtype": str(dtype)[6:]}
        found.record(options.record, "a prompt in parts, one layer", subject)
    dist.destroy_process_group()


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", default="65536,262144")
    parser.add_argument("--rest", type=float, default=parallel.REST)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (f"{folder}/store", options), nprocs=options.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
