"""Prompts whose parts several processes prefill, beside one process; as a program ([NAME ...]): in Triton's interpreter, over gloo."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from still_kernels.codes import rounded
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState, Inputs, parallel
from still_kernels.hybrid_attention.dispatch import hybrid_attention
from still_kernels.hybrid_attention.reference.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.reference.naive import naive_hybrid_attention

SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "feature_dim": 20,
    "chunk_size": 32,
    "salient_per_chunk": 3,
    "capacity_tokens": 704,
}
LARGE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "capacity_tokens": 8192}
BATCH = 2
SECONDS = 300
"""A process that waits longer for another is ended."""


@dataclass(frozen=True)
class Case:
    """A layer, its prompts one behind the other, and what is broken in the processes: the errors must then show it."""

    ranks: int = 2
    prompts: tuple[int, ...] = (347,)
    changes: dict[str, Any] = field(default_factory=lambda: SMALL)
    broken: str = ""
    dtype: torch.dtype = torch.float32

    def config(self) -> HybridAttentionConfig:
        """The layer."""
        return HybridAttentionConfig(**self.changes)

    def inputs(self, device: torch.device) -> Inputs:
        """All tokens."""
        config, tokens = self.config(), sum(self.prompts)
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        wide, narrow = ((BATCH, tokens, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
        heads = [draw(*wide), draw(*narrow), draw(*narrow)]
        if config.cache:
            heads[1:] = [rounded(x) for x in heads[1:]]
        weights = [draw(config.num_heads, config.projection_dim, config.head_dim) * config.head_dim**-0.5 for _ in "qk"]
        return Inputs(*(x.to(device, self.dtype) for x in (*heads, draw(*wide).sigmoid(), *weights)))


CASES = {
    "two": Case(),
    "three, continued": Case(3, (290, 390)),
    "codes, group": Case(2, (290,), {**SMALL, "cache": "int8", "select_scope": "kv_group_max"}),
    "without normalizer": Case(broken="normalizer"),
    "border off by one": Case(broken="border"),
    "earlier salient tokens missing": Case(broken="salient"),
}
ON_GPU = {
    "bfloat16": Case(2, (2397, 1301), LARGE, dtype=torch.bfloat16),
    "float32": Case(2, (1397,), LARGE),
}


def break_something(what: str) -> None:
    """Of this process: z is not passed on, or the keys of the border are one token off, or salient tokens go nowhere."""
    ours = dist.batch_isend_irecv

    def exchange(ops: list[dist.P2POp]) -> list[Any]:
        for op in ops:
            if op.op is dist.isend and what == "border" and op.tensor.dim() == 4 and op.tensor.shape[1:3] == (2, 64):
                op.tensor.copy_(op.tensor.roll(1, 2))
            if op.op is dist.isend and what == "salient" and op.tensor.dim() == 4 and op.tensor.shape[2] % 3 == 0:
                op.tensor.zero_()
        return ours(ops)

    dist.batch_isend_irecv = exchange  # type: ignore[assignment]
    if what == "normalizer":
        parallel.SUMS = ("kv_state",)


def run(case: Case, device: torch.device) -> tuple[torch.Tensor, HybridAttentionState]:
    """What this process has of the last prompt: its part's output, and the last process's state."""
    config, inputs, done = case.config(), case.inputs(device), 0
    state = HybridAttentionState.empty(config, BATCH, case.dtype, device)
    for tokens in case.prompts:
        cuts = parallel.cut_prompt(config, tokens, case.ranks, done, rest=16)
        mine = slice(*cuts[dist.get_rank() :][:2])
        output, state = parallel.prefill_part(inputs.part(mine), config, state, cuts)
        for tensor in state.tensors().values():
            dist.broadcast(tensor, case.ranks - 1)
        done += tokens
    return output, state


Answer = tuple[torch.Tensor, HybridAttentionState]


def expected(case: Case, device: torch.device) -> Answer:
    """Of one process: on a CPU by the definition in float64, on a GPU by the kernels."""
    config, inputs = case.config(), case.inputs(device)
    if device.type == "cuda":
        return hybrid_attention(inputs, config, HybridAttentionState.empty(config, BATCH, case.dtype, device))
    plain = HybridAttentionConfig(**{**case.changes, "cache": None})
    exact = Inputs(*(None if x is None else x.double() for x in inputs.tensors()))
    state = chunked_hybrid_attention(exact, plain, HybridAttentionState.empty(plain, BATCH, torch.float64))[1]
    return naive_hybrid_attention(exact, plain), state.quantized() if config.cache else state


def errors(case: Case, device: torch.device, answer: Answer | None) -> dict[str, float]:
    """Largest errors of this process's output and of the state, in parts of the largest value for sums."""
    output, state = run(case, device)
    whole, wanted_state = answer or expected(case, device)
    begin, end = parallel.cut_prompt(case.config(), case.prompts[-1], case.ranks, sum(case.prompts[:-1]), rest=16)[
        dist.get_rank() :
    ][:2]
    pairs = {"output": (output, whole[:, begin:end])}
    wanted = wanted_state.tensors()
    pairs |= {name: (tensor, wanted[name]) for name, tensor in state.tensors().items()}
    found = {}
    for name, (got, want) in pairs.items():
        if got.dtype == torch.int32:  # words of codes
            got, want = got.view(torch.int8), want.view(torch.int8)
        got, want = got.double(), want.double()
        scale = want.abs().max() if name in ("kv_state", "z_state") else want.abs().clamp_min(1)
        off = torch.where(got == want, 0.0, (got - want).abs() / scale)
        found[name] = off.nan_to_num(float("inf"), float("inf")).max().item()
    return found


def work(rank: int, case: Case, folder: str, device: str, answer: Answer | None) -> None:
    """One process: its errors into a file."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    signal.alarm(SECONDS)
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        from tests.still_kernels import quick_interpreter

        quick_interpreter.install()
        parallel.demand_kernel = lambda *given: None  # the interpreter takes what no GPU has
    store = dist.FileStore(f"{folder}/store", case.ranks)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=case.ranks)
    if case.broken:
        break_something(case.broken)
    Path(folder, str(rank)).write_text(json.dumps(errors(case, place, answer)))
    dist.barrier()
    dist.destroy_process_group()


answers: dict[str, Answer] = {}
"""By all that a case is but what is broken in it."""


def worst(case: Case, device: str) -> dict[str, float]:
    """The largest errors of all processes, by what is wrong. On a CPU they are forks, which have imported all and know the answer."""
    answer, key = None, repr(replace(case, broken=""))
    if device == "cpu":
        answer = answers[key] = answers.get(key) or expected(case, torch.device(device))
    start = "fork" if device == "cpu" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (case, folder, device, answer), nprocs=case.ranks, start_method=start)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(case.ranks)]
    return {name: max(each[name] for each in found) for name in found[0]}


def main(names: list[str]) -> None:
    """Command line."""
    from tests.still_kernels.parallel_cases import CASES, worst  # by the name under which the processes find it

    print(json.dumps({name: worst(CASES[name], "cpu") for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
