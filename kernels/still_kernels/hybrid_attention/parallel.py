"""Prefill of a long prompt by several processes, each with a part of its tokens and a GPU of its own (sequence parallelism).

What a part needs of those before it are the last 2C tokens, the salient tokens, and S and z. None of them needs attention: a process
scores and selects, sends its salient tokens to those behind it while it makes features and adds them up, sends S and z, and then attends.
Nothing goes to an earlier part. The kernels are those of one call, which is cut where others are waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError, UnsupportedError
from still_kernels import launcher
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.dispatch import (
    Result,
    demand_contiguous,
    demand_kernel,
    with_contiguous_heads,
    with_weights_of_tokens,
)
from still_kernels.hybrid_attention.inputs import Inputs
from still_kernels.hybrid_attention.state import HybridAttentionState, state_names

REST, AHEAD = 1900, 1320
"""Salient slots that a token's other work takes as long as, and of it what goes ahead of the sums: of 180,928 tokens of Llama-3.1-8B's
geometry on an H100 scores, features and sums take 6.4 ms, the linear part 2.9 ms, and 5,654 slots for each token 27.9 ms."""
SUMS = ("kv_state", "z_state")


def cut_prompt(
    config: HybridAttentionConfig, tokens: int, parts: int, past: int = 0, rest: float = REST
) -> tuple[int, ...]:
    """Where the parts of a prompt begin, and where it ends: positions, all but the first and the last multiples of C.

    The cost model: a token at position p costs `rest + p k / C`, in salient slots that it reads; every part is done at the same time. A
    part behind the first waits for the first's sums, which is longer than its own take. Early parts have more tokens: of 262,144 in two
    parts the first has 70%.

    Args:
        past: Tokens before the prompt, which is then continued.
        rest: Of the layer around it, too, where processes share whole models: its FLOP a token over 4 H D, the FLOP of a slot.

    Raises:
        ShapeError: A part would have fewer than 2C tokens.
    """
    chunk, end, slope = config.chunk_size, past + tokens, config.salient_per_chunk / config.chunk_size

    ahead = min(AHEAD, rest * AHEAD / REST)

    def reached(begin: float, each: float, spent: float) -> float:
        """Where a part ends whose tokens cost `each` beside their slots."""
        if slope == 0:
            return begin + spent / each
        return (sqrt((each + slope * begin) ** 2 + 2 * slope * max(spent, 0.0)) - each) / slope

    def ends(spent: float) -> list[float]:
        """Of the parts, where all are done after `spent`."""
        found = [reached(past, rest, spent)]
        for _ in range(1, parts):
            found.append(reached(found[-1], rest - ahead, spent - ahead * (found[0] - past)))
        return found

    low, high = 0.0, rest * tokens + slope * (end**2 - past**2) / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ends(middle)[-1] < end else (low, middle)
    cuts = [past, *(round(position / chunk) * chunk for position in ends(high)[:-1])]
    cuts.append(end)
    _check_cuts(cuts, chunk)
    return tuple(cuts)


def _check_cuts(cuts: Sequence[int], chunk: int) -> None:
    short = any(end - begin < 2 * chunk for begin, end in pairwise(cuts))
    if short or any(cut % chunk for cut in cuts[1:-1]):
        raise ShapeError(
            f"parts from {list(cuts)}: each has at least 2C={2 * chunk} tokens, and all but the first begin with a chunk. "
            "Take fewer processes, or prefill so few tokens in one."
        )


def prefill_part(
    inputs: Inputs,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    cuts: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Result:
    """This process's part of a prefill; all of the group call it.

    Args:
        inputs: Tokens from `cuts[rank]` to `cuts[rank + 1]`, all rows equally long.
        state: Of the tokens before `cuts[0]`, with slots for all up to `cuts[-1]`; the same everywhere. Written in place.
        cuts: As of `cut_prompt`.
        group: The processes in order of the parts; None: all.

    Returns:
        Output of the part [B, T, H, D], and the state behind it: that of the last process is the prompt's. For another prompt behind it, or
        steps in all processes, broadcast its tensors. A call takes 41 KB of workspace for each token of the part at Llama-3.1-8B's sizes.

    Raises:
        UnsupportedError: No kernel covers the layer, or its cache folds. ShapeError, CapacityError: Something does not fit.
    """
    from still_kernels.hybrid_attention.launch import as_codes, laid_out

    rank, parts = dist.get_rank(group), dist.get_world_size(group)
    batch, tokens = inputs.check(config, whole=True)
    state.check(config, batch)
    demand_kernel(config, inputs.query.dtype, inputs.query.device)
    demand_contiguous(state.tensors())
    _check_cuts(cuts, config.chunk_size)
    if config.overflow != "error":
        raise UnsupportedError(
            f"overflow={config.overflow!r}: parts are prefilled with 'error' alone, where slots do not move."
        )
    if len(cuts) != parts + 1 or cuts[rank + 1] - cuts[rank] != tokens:
        raise ShapeError(f"{tokens} tokens in part {rank} of {parts}, cut at {list(cuts)}.")
    if config.slots_for(cuts[-1]) > state.slots:
        raise CapacityError(
            f"{cuts[-1]} tokens need {config.slots_for(cuts[-1])} salient slots, the state has {state.slots}."
        )

    earlier, later = range(rank), range(rank + 1, parts)
    held = {**state.tensors(), "length": torch.full_like(state.length, cuts[rank])}
    window = {name: torch.empty_like(x) for name, x in held.items() if name.startswith("window_")}  # behind the part
    given = replace(with_contiguous_heads(with_weights_of_tokens(inputs)), new_tokens=inputs.counts())
    output = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    prepared, tensors = laid_out(given, config, HybridAttentionState(**held), output, undivided=True)
    for name, shape, dtype in prepared.workspace:
        tensors[name] = launcher.allocate(output, shape, dtype)

    def run(*names: str, **instead: Tensor) -> None:
        chosen = tuple(step for step in prepared.launches if step.name.removesuffix("_tma") in names)
        launcher.Launcher().run(replace(prepared, launches=chosen), {**tensors, **as_codes(instead)}, output)

    def hand_on(sent: list[Tensor], received: dict[int, list[Tensor]], to: Iterable[int]) -> list[Any]:
        pairs: list[Any] = [(dist.isend, x, peer) for peer in to for x in sent]
        pairs += [(dist.irecv, x, peer) for peer, xs in received.items() for x in xs]
        moved = [dist.P2POp(move, x, group=group, group_peer=peer) for move, x, peer in pairs if x.numel()]
        return dist.batch_isend_irecv(moved) if moved else []

    def border(names: list[str]) -> list[Any]:
        """The window behind each part to the next one; what is still under way where nothing is received."""
        received = {peer: [held[name] for name in names] for peer in earlier[-1:]}
        works = hand_on([window[name] for name in names], received, later[:1])
        return _wait(works) if received else works

    run("commit", **window)  # keys and values: scores are not there yet
    works = border([name for name in window if name != "window_score"])
    run("score")
    run("commit", **window)
    works += border(["window_score"])
    run("select")
    salient = [name for name in state_names(config) if name.startswith("salient_")]
    slots = [slice(config.slots_for(begin), config.slots_for(end)) for begin, end in pairwise(cuts)]
    caches = {part: [held[name][:, :, slots[part]].contiguous() for name in salient] for part in (*earlier, rank)}
    own = caches.pop(rank)
    works += hand_on(own, caches, later)
    if earlier:  # the sums from before the prompt are in those of the first part
        for name in SUMS:
            held[name].zero_()
    run("unpack")  # the ring, for scan
    run("features", *(["scan"] if later else []))
    sums = {part: [torch.empty_like(held[name]) for name in SUMS] for part in earlier}
    # Sends are waited for, too: a kernel that fills the GPU and the one that sends would wait for each other's multiprocessors.
    _wait(works + hand_on([held[name] for name in SUMS], sums, later))
    if earlier:
        for part, arrived in caches.items():
            for name, rows in zip(salient, arrived, strict=True):
                held[name][:, :, slots[part]] = rows
        for index, name in enumerate(SUMS):
            held[name].copy_(torch.stack([each[index] for each in sums.values()]).sum(0))
        run("scan")
    run("unpack", "linear", "attend")
    return output, HybridAttentionState(**{**held, **window, "length": held["length"] + tokens})


def _wait(works: list[Any]) -> list[Any]:
    """None is left then: gloo waits for ever for what it has waited for."""
    for work in works:
        work.wait()
    return []
