"""Cases that hold the Triton kernels of still::LinearAttention to the loop over tokens; as a program (DTYPE [NAME ...]): run them in
Triton's interpreter, print the errors; "shuffled" for DTYPE: in float32, the programs of each grid in some order; "cuda:DTYPE": compiled,
on a GPU.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_kernels.linear_attention.meaning import Inputs, empty_state
from still_kernels.linear_attention.pages import ALIGNMENT, Pages
from still_kernels.packing import Packing
from tests.still_kernels.guards import Guarded, guarded_workspaces, shuffle_programs
from tests.still_kernels.linear_attention.inputs import LAYERS, Call, Layer, Split, calls, error, loop, wrong_forms

KEYS, HEADS = Layer(decay=10, groups=3, keys=2), Layer()


@dataclass(frozen=True)
class Case:
    """A layer, how its sequences are cut into calls, and in what blocks."""

    layer: Layer = HEADS
    splits: tuple[Split, ...] = (70, 1, [40, 3], [0, 33], [1, 2], [1, 0], [0, 0])
    paged: bool = (
        False  # packed rows in another order, states in pages of an engine, garbage before a row's first token
    )
    chunk: int = 0  # in the interpreter: tokens of a chunk in the place of those of the table
    segment: int = 0  # chunks of a segment


CASES = {
    "head": Case(splits=(70, 1, [40, 3])),
    "key": Case(KEYS, (33, [1, 9])),
    "decode": Case(splits=(1, 1, [3, 8], [1, 0], [0, 1], [0, 0], 2)),
    "pages": Case(splits=(40, 1, [0, 33], [9, 2]), paged=True),
    **{f"rule {number}": Case(layer) for number, layer in enumerate(LAYERS)},
    "decode, one for each key": Case(KEYS, (1, [2, 1], [1, 0])),
    "decode, linear": Case(LAYERS[0], (1, [2, 1], [1, 0])),
    "decode, gated": Case(LAYERS[2], (1, [2, 1], [1, 0])),
    "decode, delta": Case(LAYERS[3], (1, [2, 1], [1, 0])),
    "pages, one for each key": Case(KEYS, ([70, 9], [0, 33], [1, 2], 20), paged=True),
    "pages, decode": Case(splits=(1, [1, 8], 2), paged=True),
    "pages, first a step": Case(KEYS, (1, [2, 70], [1, 0]), paged=True),
    "pages, segments": Case(splits=([70, 20], [66, 90]), paged=True, segment=1),
    "segments": Case(splits=([70, 20], 66, [1, 33]), segment=1),
    "segments, one for each key": Case(KEYS, ([70, 20], [66, 90]), segment=2),
    "chunks of 64": Case(splits=([130, 64], 63, [65, 1]), chunk=64),
    "chunks of 64, one for each key": Case(KEYS, ([130, 64], 63, [65, 1]), chunk=64),
    "chunks of 64, alike": Case(LAYERS[6], (200, 1, [64, 129]), chunk=64),
    "many columns": Case(Layer(dim=20, size=70, groups=6, keys=6), (40, 1, [9, 33])),
    "wide keys": Case(Layer(dim=72, size=24, heads=3, groups=3, keys=1, beta=1), (40, 1, [9, 33])),
    "wide keys, no correction": Case(Layer("gated", dim=72, size=70, heads=3, groups=3, keys=1), (40, 1, [9, 33])),
    "one head": Case(Layer(dim=1, size=1, heads=1, groups=1, keys=1, beta=1), (40, 1, [9, 33])),
    "many queries": Case(Layer("gated", groups=2, shared=5, keys=1, heads=2, decay=10), (40, 1, [9, 33])),
}


def launch_packed(
    guarded: Guarded, call: Call, state: Tensor, given: dict[str, Tensor], table: object, seen: Tensor
) -> Tensor:
    """The call with its rows one behind the other, the last one first, states in pages among those of others; the state is written back.

    seen: Tokens of each row before the call.
    """
    from still_kernels.linear_attention import call as launch

    assert call.inputs.new_tokens is not None
    counts = call.inputs.new_tokens.tolist()
    order = list(reversed(range(len(counts))))
    places = [2 * row + 1 for row in order]  # of each row's state
    device = state.device
    packed = {name: torch.cat([x[row, : counts[row]] for row in order]) for name, x in given.items()}
    start = (
        torch.tensor([0, *(counts[row] for row in order)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    )
    rows, where = 2 * len(counts) + 1, torch.tensor(places, dtype=torch.int32, device=device)
    least = Pages.of(*state.shape[1:])
    pages, length = least.padded(least.size_bytes + 2 * ALIGNMENT), seen[order].to(device)
    others = pages.view(guarded.empty(state, (rows, pages.size_bytes // 4), state.dtype).view(torch.int8))
    for row, place in zip(order, places, strict=True):
        if seen[row]:
            others[place] = state[row]
    output = guarded.empty(packed["query"], (sum(counts), *call.output.shape[2:]), packed["query"].dtype)
    packing = Packing(start, where[:, None], call.output.shape[1], pages)
    inputs = Inputs(**packed, update_rule=call.inputs.update_rule, scale=call.inputs.scale)
    launch.launch_linear_attention(inputs, others, output, packing, table, length)  # type: ignore[arg-type]
    padded = torch.zeros(call.output.shape, dtype=output.dtype, device=device)
    for i, (row, place) in enumerate(zip(order, places, strict=True)):
        padded[row, : counts[row]] = output[int(start[i]) : int(start[i + 1])]
        if seen[row] or counts[row]:
            state[row] = others[place]
    unused = [place for place in range(2 * len(counts) + 1) if place not in places]
    assert bool(others[unused].isnan().all())
    return padded


def table_of(case: Case, dtype: torch.dtype) -> object:
    """Block sizes of a case in the interpreter; None: those of the table."""
    from still_kernels.linear_attention.plan import Variant
    from still_kernels.tile import changed

    if not (case.chunk or case.segment):
        return None
    layer = case.layer
    name = str(dtype).removeprefix("torch.")
    per_key = int(layer.rule.startswith("gated") and layer.decay > 1)
    table = Variant(name, layer.dim, layer.size, layer.shared, layer.rule, per_key).table(90)
    setting = {}
    if case.chunk:
        setting = {f"{name}.C": case.chunk for name in ("prepare", "scan", "output")}
        setting["prepare.LEVELS"] = case.chunk.bit_length() - 1
    if case.segment:
        setting["segment_chunks"] = case.segment
    return changed(table, "scan", setting)  # type: ignore[arg-type]


def run_case(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Greatest error of outputs and of states, relative by Frobenius norm, over all calls.

    Outputs and workspaces start as NaN, padding is NaN, and a write outside of a buffer is an error. A row without tokens keeps its
    state to the bit.
    """
    from still_kernels.linear_attention import call as launch

    case = CASES[name]
    layer = case.layer
    table = table_of(case, dtype) if device == "cpu" else None
    errors = {"output": 0.0, "state": 0.0}
    with guarded_workspaces() as guarded:
        state = guarded.copy(empty_state(2, layer.heads, layer.dim, layer.size, torch.float32, device))
        seen = torch.zeros(2, dtype=torch.int64)
        for number, call in enumerate(calls(layer, case.splits, dtype)):
            new = call.inputs.new_tokens
            assert new is not None
            given = {n: guarded.copy(x.to(device)) for n, x in vars(call.inputs).items()
                     if isinstance(x, Tensor) and n != "new_tokens"}  # fmt: skip
            before = state.clone()
            if case.paged:
                output = launch_packed(guarded, call, state, given, table, seen)
            else:
                output = guarded.empty(given["query"], tuple(call.output.shape), dtype)
                counts = new.to(device, torch.int32 if number % 3 else torch.int64)
                inputs = replace(call.inputs, **given, new_tokens=counts)
                launch.launch_linear_attention(inputs, state, output, table=table)  # type: ignore[arg-type]
            assert torch.equal(state[new == 0], before[new == 0]), f"{name}: a row without tokens changed"
            seen = seen + new
            for row, count in enumerate(new.tolist()):
                assert not bool(output[row, count:].any()), f"{name}: output at padding"
            errors["output"] = max(errors["output"], error(output.cpu(), call.output))
            errors["state"] = max(errors["state"], error(state.cpu(), call.state))
        guarded.check()
    return errors


def run_garbage(device: str = "cpu") -> None:
    """Counts that make no sense, as a builder of engines has them: no write outside."""
    from still_kernels.linear_attention import call as launch

    for tokens, new in ((1, [2**31, -5]), (40, [10**12, -(2**40)])):
        with guarded_workspaces() as guarded:
            call = next(iter(calls(HEADS, [tokens])))
            given = {n: guarded.copy(x.to(device)) for n, x in vars(call.inputs).items()
                     if isinstance(x, Tensor) and n != "new_tokens"}  # fmt: skip
            state = guarded.copy(empty_state(2, HEADS.heads, HEADS.dim, HEADS.size, torch.float32, device))
            output = guarded.empty(given["query"], tuple(call.output.shape), torch.float32)
            counts = torch.tensor(new, device=device)
            launch.launch_linear_attention(replace(call.inputs, **given, new_tokens=counts), state, output)
            guarded.check()


def run_controls(device: str = "cpu") -> dict[str, float]:
    """Errors of the second call of a sequence as it is, and with each fault of the design."""
    from still_kernels.linear_attention import call as launch

    first, second = calls(Layer(dim=8, size=8, most_beta=1.0), [70, 33])
    state = first.state.float().to(device)

    def form(inputs: Inputs, past: Tensor) -> tuple[Tensor, Tensor]:
        present = past.clone()
        output = torch.full(second.output.shape, torch.nan, device=device)
        launch.launch_linear_attention(inputs, present, output)
        return output, present

    given = {n: x.to(device).contiguous() for n, x in vars(second.inputs).items() if isinstance(x, Tensor)}
    inputs = replace(second.inputs, **given)
    found = {"right": form(inputs, state)[0], **wrong_forms(inputs, state, form)}
    return {name: error(output.cpu(), second.output) for name, output in found.items()}


def run_resets(device: str = "cpu") -> dict[str, float]:
    """Errors with decays that forget all: logarithms of -inf, for whole heads and for single channels of keys."""
    from still_kernels.linear_attention import call as launch

    found = {}
    for name, layer in (("head", HEADS), ("key", KEYS)):
        call = next(iter(calls(layer, [70])))
        given = {n: x.to(device).contiguous() for n, x in vars(call.inputs).items() if isinstance(x, Tensor)}
        given["decay"][:, [5, 17, 64]] = -torch.inf
        given["decay"][:, 30, :, layer.decay - 1] = -torch.inf
        inputs = replace(call.inputs, **given)
        state = torch.randn(2, layer.heads, layer.dim, layer.size, generator=torch.Generator().manual_seed(1))
        wide = {n: x.cpu() if n == "new_tokens" else x.cpu().double() for n, x in given.items()}
        expected = loop(replace(call.inputs, **wide), state.double())
        state, output = state.to(device), torch.full(call.output.shape, torch.nan, device=device)
        launch.launch_linear_attention(inputs, state, output)
        found[name] = max(error(output.cpu(), expected[0]), error(state.cpu(), expected[1]))
    return found


def run_large(device: str = "cpu") -> dict[str, float]:
    """Errors with float16 activations where what is computed is beyond that type and outputs are not: a state, as sums of a long prompt are
    (small queries); products of queries and keys, as those of features that are powers (small values)."""
    from still_kernels.linear_attention import call as launch

    found = {}
    grown = {
        "state": (LAYERS[0], 1e6, {"query": 2**-10}),
        "products": (LAYERS[1], 1, {"query": 2**8, "key": 2**8, "value": 2**-10}),
    }
    for name, (layer, size, factors) in grown.items():
        call = next(iter(calls(layer, [70], torch.float16)))
        given = {n: x.to(device).contiguous() for n, x in vars(call.inputs).items() if isinstance(x, Tensor)}
        for each, factor in factors.items():
            given[each] *= factor
        inputs = replace(call.inputs, **given)
        state = size * torch.randn((2, layer.heads, layer.dim, layer.size), generator=torch.Generator().manual_seed(1))
        wide = {n: x.cpu() if n == "new_tokens" else x.cpu().double() for n, x in given.items()}
        expected = loop(replace(call.inputs, **wide), state.double())
        output = torch.full(call.output.shape, torch.nan, device=device, dtype=torch.float16)
        state = state.to(device)
        launch.launch_linear_attention(inputs, state, output)
        found[name] = max(error(output.cpu(), expected[0]), error(state.cpu(), expected[1]))
    return found


def main(arguments: list[str]) -> None:
    from tests.still_kernels import interpreter16, quick_interpreter

    kind, *names = arguments
    torch.set_num_threads(1)
    if kind.startswith("cuda:"):  # compiled: a case each process, as an illegal address ends all that follow
        dtype = getattr(torch, kind.removeprefix("cuda:"))
        print(json.dumps({name: run_case(name, "cuda", dtype) for name in names or CASES}))
        return
    quick_interpreter.install()
    interpreter16.install()
    if kind == "garbage":
        run_garbage()
        print("{}")
        return
    if kind in ("controls", "resets"):
        print(json.dumps({kind: run_controls() if kind == "controls" else run_resets()}))
        return
    if kind == "shuffled":
        shuffle_programs()
    if kind == "large":
        print(json.dumps({kind: run_large()}))
        return
    dtype = torch.float32 if kind == "shuffled" else getattr(torch, kind)
    print(json.dumps({name: run_case(name, dtype=dtype) for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
