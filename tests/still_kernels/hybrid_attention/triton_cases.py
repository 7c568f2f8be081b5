"""Cases that hold the Triton kernels to the chunked form; as a program (DTYPE [NAME ...]): run them in Triton's
interpreter, print the errors; "shuffled" for DTYPE: in float32, the programs of each grid in some order; "rest": in float32, with S in
bfloat16.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from still_kernels.codes import rounded
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.narrow import narrowed, widened
from still_kernels.hybrid_attention.paged import GROWING, LINEAR
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.plan.tiles import HEAD_DIMS, tile_table
from still_kernels.packing import Packing
from still_kernels.tile import TileTable, changed
from tests.still_kernels.guards import Guarded, guarded_workspaces, shuffle_programs

SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "feature_dim": 20,
    "chunk_size": 32,
    "salient_per_chunk": 3,
    "capacity_tokens": 416,
}
"""All dimensions differ, none is a power of two that the kernels would not have to mask."""

Call = tuple[int, list[int]]
STEP: Call = (1, [1, 1])
PROMOTING: list[Call] = [(62, [62, 61]), *[STEP] * 4, (34, [0, 34]), STEP, STEP]
"""Both rows pass the start of a chunk within single steps; then a row without tokens."""
CROSSING: list[Call] = [(33, [33, 7]), (70, [70, 0]), STEP, (1, [0, 1]), (90, [64, 90]), STEP]
"""Calls that begin and end anywhere in a chunk."""


SHORT: tuple[Call, ...] = ((66, [66, 35]), (1, [1, 0]))


@dataclass(frozen=True)
class Case:
    """A layer, the calls (T, tokens of each row) it gets, and what the inputs are."""

    changes: dict[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = tuple(CROSSING)
    inputs: str = "random"
    packed: bool = False  # through query_start and state_row, the rows in another order and among others
    paged: bool = False  # packed, the states in pages of an engine, which hold garbage where the rows have nothing
    rest: bool = False  # paged, S in bfloat16 beside what rounding took
    wide: bool = False  # in the interpreter: block sizes of float32 in the place of those of 16 bits
    tiles: dict[str, dict[str, int]] = field(default_factory=dict)  # in the interpreter: other block sizes, by kernel

    def config(self) -> HybridAttentionConfig:
        """The layer."""
        return HybridAttentionConfig(**{**SMALL, **self.changes})

    def table(self) -> TileTable:
        """Block sizes in the interpreter."""
        config = self.config()
        table = tile_table(90, config.head_dim, config.chunk_size, config.projection_dim, self.wide)
        for kernel, setting in self.tiles.items():
            table = changed(table, kernel, setting)
        return table


CASES = {
    "crossing": Case(),
    "promoting": Case(calls=tuple(PROMOTING)),
    "group max": Case({"select_scope": "kv_group_max", "num_heads": 6}, tuple(PROMOTING)),
    "half of a group": Case(
        {"select_scope": "kv_group_mean", "num_heads": 8, "salient_per_chunk": 15}, ((95, [94, 95]), STEP, STEP, STEP)
    ),
    "group mean": Case(
        {"select_scope": "kv_group_mean", "num_heads": 8, "num_kv_heads": 1},
        ((66, [66, 35]), STEP, (31, [31, 30])),
        wide=True,
    ),
    "fold decode": Case({"overflow": "fold_oldest", "capacity_tokens": 96}, ((126, [126, 125]), *[STEP] * 4)),
    "fold oldest": Case(
        {"overflow": "fold_oldest", "capacity_tokens": 128},
        ((100, [100, 40]), (90, [64, 90]), (1, [0, 1]), (33, [33, 32])),
    ),
    "fold everything": Case(
        {"overflow": "fold_oldest", "capacity_tokens": 64, "select_scope": "kv_group_max"},
        ((98, [98, 95]), STEP, STEP),
    ),
    "packed": Case({"select_scope": "kv_group_max"}, ((66, [66, 35]), (30, [0, 30]), STEP, (2, [2, 1])), packed=True),
    "packed, folding": Case(
        {"overflow": "fold_oldest", "capacity_tokens": 96}, ((70, [70, 33]), (64, [40, 64])), packed=True, wide=True
    ),
    "paged": Case(
        {"select_scope": "kv_group_max"}, ((62, [62, 1]), *[STEP] * 3, (66, [66, 62]), STEP, (2, [0, 2])), paged=True
    ),
    "paged from the first token": Case(
        {"chunk_size": 32}, (STEP, STEP, (61, [61, 60]), *[STEP] * 4, (100, [0, 100])), paged=True, wide=True
    ),
    "paged, folding oldest": Case(
        {"overflow": "fold_oldest", "capacity_tokens": 96}, ((63, [63, 62]), STEP, STEP, (64, [40, 64])), paged=True
    ),
    "paged, several pages": Case(
        {"salient_per_chunk": 32, "capacity_tokens": 384},
        ((290, [290, 194]), STEP, (30, [29, 30]), STEP, STEP),  # a step begins the third page
        paged=True,
    ),
    "paged, several pages of a group": Case(
        {"salient_per_chunk": 31, "capacity_tokens": 384, "select_scope": "kv_group_max"},
        ((318, [318, 226]), STEP, STEP, STEP),  # a chunk's rows in two pages
        paged=True,
    ),
    "paged, many rows": Case(
        {"num_heads": 6, "window_factor": (0.5, 1.0, 2.0, 0.1, 0.3, 0.7)},
        ((62, [62, 1]), *[STEP] * 3, (66, [33, 62]), STEP, (1, [0, 1])),
        paged=True,
        tiles={"decode": {"LF": 16, "WG": 1}},
    ),
    "relu, many rows": Case(
        {"feature_map": "relu", "gate": "none", "select_scope": "kv_group_max"},
        ((63, [63, 62]), STEP, STEP),
        tiles={"decode": {"LF": 16, "WG": 1}},
    ),
    "released": Case({"profile": "released"}, ((66, [66, 35]), (30, [0, 30]))),
    "released decode": Case({"profile": "released"}, (STEP, STEP, (28, [28, 1]), *[STEP] * 3)),
    "window factor, no gate": Case({"window_factor": (0.5, 1.0, 2.0, 0.1), "gate": "none"}, SHORT),
    "no salient": Case({"salient_per_chunk": 0}, SHORT),
    "all salient": Case({"salient_per_chunk": 32}, ((98, [98, 95]), STEP)),
    "wide heads": Case({"head_dim": 72, "num_heads": 2, "num_kv_heads": 1}, ((66, [66, 35]), STEP), wide=True),
    "many features": Case(
        {"feature_dim": 200, "chunk_size": 64, "capacity_tokens": 832}, ((126, [126, 125]), *[STEP] * 4)
    ),
    "few splits": Case(
        {"salient_per_chunk": 32}, ((287, [287, 260]), STEP, STEP), tiles={"decode": {"decode_programs": 1}}
    ),
    "few splits, group": Case(
        {"salient_per_chunk": 32, "select_scope": "kv_group_mean"},
        ((287, [287, 260]), STEP, STEP),
        tiles={"decode": {"decode_programs": 1}},
    ),
    "many parts, group": Case(
        {"salient_per_chunk": 32, "select_scope": "kv_group_max", "capacity_tokens": 960},
        ((126, [126, 125]), STEP, STEP),
    ),
    "softmax_pm": Case({"feature_map": "softmax_pm"}, SHORT),
    "softmax": Case({"feature_map": "softmax"}, SHORT),
    "relu": Case({"feature_map": "relu"}, SHORT),
    "softmax decode": Case({"feature_map": "softmax"}, ((63, [63, 62]), STEP, STEP, STEP)),
    "relu decode": Case({"feature_map": "relu"}, ((63, [63, 62]), STEP, STEP, STEP)),
    "elu_plus_one": Case({"feature_map": "elu_plus_one"}, SHORT),
    "chunk 128": Case({"chunk_size": 128}, ((255, [255, 130]), STEP, STEP, (3, [1, 3]))),
    "equal logits": Case({}, ((100, [100, 66]), STEP), "equal"),
    "one huge logit": Case({}, ((63, [63, 62]), STEP, STEP), "huge"),
    "tied keys": Case({}, ((100, [100, 66]), STEP), "tied"),
    "identity": Case({"feature_map": "identity"}, SHORT, "positive"),
    "wide blocks": Case(calls=((33, [33, 7]), (131, [70, 131])), wide=True),
    "chunk 64": Case({"chunk_size": 64}, ((200, [200, 65]), (70, [64, 70]))),
    "chunk 256": Case({"chunk_size": 256, "capacity_tokens": 1024}, ((514, [514, 300]),)),
    "other blocks": Case(
        calls=((33, [33, 7]), (131, [70, 131])),
        tiles={
            "scan": {"EVERY": 1, "FB": 32, "DB": 16},
            "linear": {"EVERY": 1, "BM": 32, "TB": 1},
            "attend": {"BM": 64, "BN": 32},
        },
    ),
    **{
        f"head size {size}": Case({"head_dim": size, "feature_dim": size}, ((66, [66, 35]), *[STEP] * 2, (30, [0, 30])))
        for size in HEAD_DIMS
    },
    "codes": Case({"cache": "int8"}, (*CROSSING, *PROMOTING)),
    "codes, group max": Case(
        {"cache": "int8", "select_scope": "kv_group_max", "num_heads": 6, "capacity_tokens": 448}, tuple(PROMOTING)
    ),
    "codes, fold oldest": Case(
        {"cache": "int8", "overflow": "fold_oldest", "capacity_tokens": 96}, ((126, [126, 125]), *[STEP] * 4)
    ),
    "codes, packed": Case({"cache": "int8"}, ((66, [66, 35]), (30, [0, 30]), STEP, (2, [2, 1])), packed=True),
    "codes, released": Case({"cache": "int8", "profile": "released"}, (STEP, (58, [58, 29]), *[STEP] * 6)),
    "codes, wide heads": Case(
        {"cache": "int8", "head_dim": 72, "num_heads": 2, "num_kv_heads": 1}, ((66, [66, 35]), STEP), wide=True
    ),
    "codes, paged": Case(
        {"cache": "int8", "salient_per_chunk": 15, "capacity_tokens": 384},
        # a step's rows in two pages
        (STEP, (61, [61, 60]), *[STEP] * 3, (225, [225, 129]), STEP, (30, [29, 30]), STEP, STEP),
        paged=True,
    ),
    "codes, paged, many rows": Case(
        {"cache": "int8", "num_heads": 6},
        ((62, [62, 1]), *[STEP] * 3, (66, [33, 62]), STEP, (1, [0, 1])),
        paged=True,
        tiles={"decode": {"LF": 16, "WG": 1}},
    ),
    "codes, paged pages of a group": Case(
        {"cache": "int8", "salient_per_chunk": 31, "capacity_tokens": 384, "select_scope": "kv_group_max"},
        ((318, [318, 226]), STEP, STEP, STEP),
        paged=True,
    ),
    "codes, paged, folding oldest": Case(
        {"cache": "int8", "overflow": "fold_oldest", "capacity_tokens": 96, "select_scope": "kv_group_mean"},
        ((63, [63, 62]), STEP, STEP, (64, [40, 64])),
        paged=True,
    ),
    "many chunks": Case({"capacity_tokens": 512}, ((30, [30, 5]), (390, [390, 161]), STEP)),
}


WITH_REST = {
    "steps": Case(calls=((62, [62, 1]), *[STEP] * 3, (66, [66, 62]), *[STEP] * 2, (2, [0, 2])), paged=True, rest=True),
    "many rows": Case(
        {"select_scope": "kv_group_max"},
        ((94, [94, 62]), *[STEP] * 3, (31, [31, 30]), STEP, STEP),
        paged=True,
        rest=True,
        tiles={"decode": {"LF": 16, "WG": 1}},
    ),
    "rest, fold oldest": Case(
        {"overflow": "fold_oldest", "capacity_tokens": 96},
        ((63, [63, 62]), STEP, STEP, (64, [40, 64])),
        paged=True,
        rest=True,
    ),
    "codes beside a rest": Case(
        {"cache": "int8"},
        ((62, [62, 1]), *[STEP] * 3, (66, [66, 62]), *[STEP] * 2, (2, [0, 2])),
        paged=True,
        rest=True,
        tiles={"decode": {"LF": 16, "WG": 1}},
    ),
    "rounds": Case(
        {"chunk_size": 64, "capacity_tokens": 832, "feature_map": "relu"},
        ((190, [190, 127]), STEP, STEP, STEP),
        paged=True,
        rest=True,
        tiles={"decode": {"RB": 32}},
    ),
}
"""Cases of float32 in which the interpreter has to know bfloat16, and what a step reads of S is rounded to it."""
assert not CASES.keys() & WITH_REST.keys(), "of one name only one would run"


def case_inputs(case: Case, batch: int, tokens: int, generator: torch.Generator) -> list[torch.Tensor | None]:
    """query, key, value, gate of one call on the CPU."""
    config = case.config()
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    query, gate = (torch.randn(batch, tokens, heads, dim, generator=generator) for _ in "qg")
    key, value = (torch.randn(batch, tokens, kv_heads, dim, generator=generator) for _ in "kv")
    if case.inputs == "equal":
        query = torch.zeros_like(query)
    elif case.inputs == "positive":  # features of either sign make denominators that pass through zero
        query, key = query.abs(), key.abs()
    elif case.inputs == "huge":
        key[:, ::17] *= 60
    elif case.inputs == "tied":
        key[:], query[:] = key[:, :1], query[:, :1]
    return [query, key, value, torch.sigmoid(gate) if config.gate == "channel" else None]


def run_case(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Greatest difference of each result, relative above 1, from the chunked form, over all calls of a case; NaN where one is NaN.

    The chunked form runs on the same inputs in float64; with 16 bits on a GPU in that type, with its rounding. Where it runs in
    float64 "output norm" is the distance of the outputs by Frobenius norm. In float32 it errs itself, by 1.1e-5 among huge logits.

    Outputs and workspaces start as garbage, and a write outside of them or of a state is an error. Every call works on a
    copy of the state, as a host with separate past and present buffers has it.
    """
    with guarded_workspaces() as guarded:
        return _errors_of(guarded, name, device, dtype)


def _errors_of(guarded: Guarded, name: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    from still_kernels.hybrid_attention import launch

    case = {**CASES, **WITH_REST}[name]
    config = case.config()
    table = case.table() if device == "cpu" else None
    generator = torch.Generator().manual_seed(len(name))
    batch = 2
    shape = (config.num_heads, config.projection_dim, config.head_dim)
    weights = [(torch.randn(shape, generator=generator) * config.head_dim**-0.5).to(device, dtype) for _ in "qk"]
    if case.inputs == "positive":
        weights = [weight.abs() for weight in weights]
    exact = torch.float64 if device == "cpu" or dtype == torch.float32 else dtype
    codes = config.cache == "int8"
    # What enters is rounded to what codes hold, so the definition is that of numbers: the chunked form keeps them as they are read.
    plain = replace(config, cache=None)
    expected_state = HybridAttentionState.empty(plain, batch, exact, device)
    state = HybridAttentionState.empty(config, batch, dtype, device)
    errors: dict[str, float] = {}
    for number, (tokens, counts) in enumerate(case.calls):
        tensors = [None if x is None else x.to(device, dtype) for x in case_inputs(case, batch, tokens, generator)]
        if codes:
            tensors[1:3] = [rounded(x) for x in tensors[1:3] if x is not None]
        new = torch.tensor(counts, dtype=torch.int32 if number % 3 else torch.int64, device=device)
        arguments = Inputs(*(None if x is None else x.to(exact) for x in (*tensors, *weights)), new)
        expected, expected_state = chunked_hybrid_attention(arguments, plain, expected_state)
        state = HybridAttentionState(**{n: guarded.copy(t) for n, t in state.tensors().items()})
        inputs = Inputs(*tensors, *weights, new)
        if case.packed or case.paged:
            output = _launch_packed(guarded, inputs, config, state, table, case)
        else:
            output = guarded.empty(tensors[0], tuple(tensors[0].shape), dtype)
            length = guarded.empty(state.length, (batch,), state.length.dtype)
            launch.launch_hybrid_attention(inputs, config, state, output, None, table, length)
        guarded.check()
        state.length.add_(new)
        if tokens == 1 and not (case.packed or case.paged):
            state.length.copy_(length)
        if exact != dtype:
            distance = (output.double() - expected).norm() / expected.norm()
            errors["output norm"] = max(errors.get("output norm", 0.0), distance.item())
        pairs = {"output": (output, expected)}
        wanted_states = (expected_state.quantized() if codes else expected_state).tensors()
        pairs |= {n: (t, wanted_states[n]) for n, t in state.tensors().items() if t.numel()}
        for what, (got, wanted) in pairs.items():
            if got.dtype == torch.int32:  # words of codes
                got, wanted = got.view(torch.int8), wanted.view(torch.int8)
            scale = wanted.double().abs()
            if what in ("kv_state", "z_state"):
                scale = scale.max()  # sums of rounded terms of either sign
            difference = (got.double() - wanted.double()).abs() / scale.clamp_min(1)
            difference = torch.where(got == wanted, 0.0, difference)
            errors[what] = max(errors.get(what, 0.0), difference.nan_to_num(float("inf"), float("inf")).max().item())
    return errors


def run_garbage() -> None:
    """Launches with lengths and counts that make no sense; fails if one writes outside its buffers or does not end."""
    with guarded_workspaces() as guarded:
        _run_garbage(guarded)


def _run_garbage(guarded: Guarded) -> None:
    from still_kernels.hybrid_attention import launch

    for overflow in ("error", "fold_oldest"):
        case = Case({"overflow": overflow, "capacity_tokens": 160})
        config = case.config()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(4, 20, 24, generator=generator) for _ in "qk"]
        for tokens in (1, 40):
            inputs = case_inputs(case, 2, tokens, generator)
            empty = HybridAttentionState.empty(config, 2)
            state = HybridAttentionState(**{n: guarded.copy(t) for n, t in empty.tensors().items()})
            state.length.copy_(torch.tensor([-77, 2**40 + 5 * 32]))
            output = guarded.empty(inputs[0], tuple(inputs[0].shape), torch.float32)
            new = torch.tensor([2**31, 10**12])
            launch.launch_hybrid_attention(Inputs(*inputs, *weights, new), config, state, output)
            guarded.check()


def run_unused(name: str, dtype: torch.dtype) -> None:
    """A case twice, slots without a token holding zeros and then NaN; fails where that makes a difference."""
    from still_kernels.hybrid_attention import launch

    case = CASES[name]
    config, table = case.config(), case.table()
    generator = torch.Generator().manual_seed(0)
    shape = (config.num_heads, config.projection_dim, config.head_dim)
    weights = [(torch.randn(shape, generator=generator) * config.head_dim**-0.5).to(dtype) for _ in "qk"]
    zeros, unknown = (HybridAttentionState.empty(config, 2, dtype) for _ in range(2))
    for tensor_name, tensor in unknown.tensors().items():
        if tensor_name.startswith(("window", "salient")):
            tensor.fill_(float("nan"))
    for tokens, counts in case.calls:
        inputs = [None if x is None else x.to(dtype) for x in case_inputs(case, 2, tokens, generator)]
        new, outputs = torch.tensor(counts), []
        for state in (zeros, unknown):
            outputs.append(torch.full_like(inputs[0], float("nan")))
            launch.launch_hybrid_attention(Inputs(*inputs, *weights, new), config, state, outputs[-1], table=table)
            state.length.add_(new)
        assert torch.equal(*outputs) and torch.equal(zeros.kv_state, unknown.kv_state), f"{name}, {tokens} tokens"


def _pages(config: HybridAttentionConfig, slots: int, dtype: torch.dtype, rest: bool) -> Pages:
    """Pages with room for one head of S less than the layer has, and some bytes that nothing uses."""
    found = Pages.of(config, slots, dtype, torch.bfloat16 if rest else torch.float32)
    heads = max(1, config.num_heads - 1)
    states = tuple((n, (heads, *s[1:]) if n in LINEAR else s, t, o) for n, s, t, o in found.states)
    return replace(found, heads=heads, states=states, size_bytes=found.size_bytes + 64 * found.row_bytes)


def _places(pages: Pages, pids: list[int], views: dict[str, torch.Tensor], name: str, count: int) -> Iterator[Any]:
    """Where the `count` heads or slots of a row's state lie: (which of the state, view of its place); pids are the row's pages."""
    view = views[name]
    if name in LINEAR:
        for head in range(count):
            yield head, view[pids[1 + head // pages.heads], head % pages.heads]
    elif name in GROWING:
        for slot in range(count):
            page = pids[pages.first + 2 * (slot // pages.rows) + name.startswith("salient_value")]
            yield (slice(None), slot), view[page, :, slot % pages.rows]
    else:
        yield slice(None), view[pids[0]]


def _in_pages(
    guarded: Guarded, rows: dict[str, torch.Tensor], length: torch.Tensor, after: torch.Tensor, config: HybridAttentionConfig, pages: Pages
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """The states of rows [3, ...] after `length` tokens in pages, which hold NaN where those have nothing; and the rows' table, with the
    pages that they need for `after` tokens. Page 0 is behind those, nobody's and full of NaN."""
    device = length.device
    memory = guarded.empty(length, ((3 * pages.columns + 2) * pages.size_bytes // 4,), torch.float32).view(torch.int8)
    views = pages.views(memory.view(-1, pages.size_bytes))
    free = (1 + torch.randperm(3 * pages.columns + 1, generator=torch.Generator().manual_seed(3))).tolist()
    table = torch.zeros(3, pages.columns, dtype=torch.int32)
    for row, tokens in enumerate(after.tolist()):
        for column in range(pages.count(min(pages.slots, config.slots_for(tokens)))):
            table[row, column] = free.pop()
        for name, tensor in rows.items():
            mine = _own(name, tensor[row : row + 1], length[row : row + 1], config)[0]
            held = torch.where(mine, tensor[row], float("nan") if tensor.is_floating_point() else 113)
            count = tensor.shape[1] if name in LINEAR else min(pages.slots, config.slots_for(int(length[row])))
            for which, place in _places(pages, table[row].tolist(), views, name, count):
                place.copy_(held[which])
    return views, table.to(device)


def _from_pages(
    pages: Pages, pids: list[int], views: dict[str, torch.Tensor], name: str, into: torch.Tensor, slots: int
) -> None:
    """Read a row's state [heads, ...] back, of the salient cache `slots` slots."""
    for which, place in _places(pages, pids, views, name, into.shape[0] if name in LINEAR else slots):
        into[which] = place


def _own(name: str, tensor: torch.Tensor, length: torch.Tensor, config: HybridAttentionConfig) -> torch.Tensor:
    """What of a state is of its rows' `length` tokens, bool, as many dimensions."""
    if name in (*LINEAR, "z_state"):
        own = (length > 2 * config.chunk_size)[:, None]
    elif name.startswith("window"):
        own = torch.arange(tensor.shape[2], device=tensor.device) < length[:, None]
    else:
        filled = torch.tensor([config.slots_for(n) for n in length.tolist()], device=tensor.device)
        own = torch.arange(tensor.shape[2], device=tensor.device) < filled[:, None]
    return own.view(len(own), 1, -1, *[1] * (tensor.dim() - 3))


def _launch_packed(
    guarded: Guarded,
    inputs: Inputs,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    table: TileTable | None,
    case: Case,
) -> torch.Tensor:
    """The call with packed tokens on rows 2 and 0 of a state of three; returns the padded output, writes the rows back."""
    from still_kernels.hybrid_attention import launch

    new, tensors = inputs.counts(), (inputs.query, inputs.key, inputs.value, inputs.gate)
    rows = torch.tensor([2, 0], dtype=torch.int32, device=new.device)
    wide = {n: torch.cat([t[1:], torch.full_like(t[:1], 5), t[:1]]) for n, t in state.tensors().items()}
    pages = None
    if case.paged:
        pages = _pages(config, state.slots, inputs.query.dtype, case.rest)
        if case.rest:
            wide["kv_state"], wide["kv_rest"] = narrowed(wide["kv_state"])
        length = wide.pop("length")
        now, after = length.clone(), length.clone()
        after[rows.long()] += new.to(after.dtype)
        now[1] = after[1] = 2 * config.chunk_size + 1  # nobody's turn
        before, owned = _in_pages(guarded, wide, now, after, config, pages)
        seen = {n: view.clone() for n, view in before.items()}
        wide = {**before, "length": guarded.copy(length[rows.long()])}
    else:
        wide = {n: guarded.copy(t) for n, t in wide.items()}
    packed = [None if x is None else torch.cat([x[b, :n] for b, n in enumerate(new.tolist())]) for x in tensors]
    start = torch.cat([new.new_zeros(1), new.cumsum(0)]).to(torch.int32)
    output = guarded.empty(packed[0], tuple(packed[0].shape), packed[0].dtype)
    given = Inputs(*packed, inputs.feature_q_weight, inputs.feature_k_weight)
    packing = Packing(start, rows if pages is None else owned[rows.long()].contiguous(), inputs.query.shape[1], pages)
    named = {n: t for n, t in wide.items() if n != "kv_rest"}
    launch.launch_hybrid_attention(given, config, HybridAttentionState(**named), output, packing, table)
    past = wide.pop("length")
    if pages is not None:
        used = owned[rows.long()].unique().tolist()
        idle = [page for page in range(len(wide["z_state"])) if page not in used or page == 0]
        for name in wide:
            assert torch.equal(wide[name][idle].nan_to_num(), seen[name][idle].nan_to_num()), (
                f"{name}: a page of others changed"
            )
        read = {}
        for name in wide:
            kind = wide[name].dtype
            shape = state.kv_state if name == "kv_rest" else getattr(state, name)
            read[name] = found = torch.zeros_like(shape, dtype=kind)
            for b, row in enumerate(rows.tolist()):
                slots = min(pages.slots, config.slots_for(int(state.length[b] + new[b])))
                _from_pages(pages, owned[row].tolist(), wide, name, found[b], slots)
        if case.rest:
            read["kv_state"] = widened(read["kv_state"], read.pop("kv_rest"))
        for name, found in read.items():
            getattr(state, name).copy_(torch.where(_own(name, found, state.length + new, config), found, 0))
        wide = {}
    for name, tensor in state.tensors().items():
        if name in wide:
            others = (wide[name][1] != 5).nonzero().tolist()
            assert not others, (
                f"{name}: a row that had no part in a call of {new.tolist()} changed at {len(others)} places, {others[0]} to {others[-1]}; "
                f"rows {rows.tolist()}, lengths {past.tolist()}, tokens {start.tolist()}"
            )
            tensor.copy_(wide[name][rows.long()])
    padded = torch.zeros_like(inputs.query)
    for b, n in enumerate(new.tolist()):
        padded[b, :n] = output[int(start[b]) : int(start[b]) + n]
    return padded


if __name__ == "__main__":
    from tests.still_kernels import quick_interpreter

    quick_interpreter.install()
    dtype, *names = sys.argv[1:]
    if dtype in ("float16", "bfloat16", "unused", "rest"):
        from tests.still_kernels import interpreter16

        interpreter16.install()
    if dtype == "shuffled":
        shuffle_programs()
    if dtype in ("shuffled", "rest"):
        dtype = "float32"
    if dtype == "garbage":
        run_garbage()
        print("{}")
    elif dtype == "unused":
        for case_name in names:
            run_unused(case_name, torch.bfloat16)
        print("{}")
    else:
        print(json.dumps({name: run_case(name, "cpu", getattr(torch, dtype)) for name in names or CASES}))
