"""Cases that hold the Triton kernels of still::SelectBlocks and still::BlockAttention to their formulas; as a program (DTYPE [NAME ...]):
run them in Triton's interpreter, print the errors; "shuffled" for DTYPE: in float32, the programs of each grid in some order.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import torch

from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.plan import tile_table as attend_table
from still_kernels.select_blocks.meaning import Inputs as SelectInputs
from still_kernels.select_blocks.meaning import naive_select_blocks
from still_kernels.select_blocks.plan import tile_table as select_table
from still_kernels.tile import TileTable, changed
from tests.still_kernels.block_attention.inputs import Layer, Split, calls
from tests.still_kernels.guards import guarded_workspaces, shuffle_programs
from tests.tolerances import REFERENCE

CLEAR = 1e-5
"""Choices whose lead is larger must be the same."""
SMALL = Layer()
CHOICE = SMALL.choice


@dataclass(frozen=True)
class Case:
    """A layer, how its sequences are cut into calls, and where that is not the usual, tokens whose workspace is kept at once; then less
    than usual is done at once elsewhere too."""

    layer: Layer = SMALL
    splits: tuple[Split, ...] = ()
    span: int = 0


CASES = {
    "steps": Case(splits=(100, 1, [1, 0], [0, 3], [1, 1], 8)),
    "prompts": Case(splits=(110, [9, 30], 1), span=42),
    "one head each": Case(Layer(heads=2, kv_heads=2, dim=7), (90, [33, 20], 1)),
    "large group": Case(
        Layer(20, 1, 16, 300, {**CHOICE, "mean_length": 9, "lse_stride": 9, "lse_length": 27, "local_blocks": 0}),
        (100, [0, 12], 2),
    ),
    "whole blocks": Case(
        Layer(
            8,
            choice={**CHOICE, "block_size": 16, "mean_stride": 4, "mean_length": 8, "lse_stride": 16, "lse_length": 32},
        ),
        (150, [30, 7], 1),
    ),
    "sinks and a window": Case(Layer(3, 1, choice={**CHOICE, "top_blocks": 4}), (100, 1)),
    "many chosen": Case(Layer(3, 1, choice={**CHOICE, "top_blocks": 12}), (222, 8, 8, 8, 1), span=100),
    "by call": Case(
        Layer(choice={**CHOICE, "dense_length": 96, "switch_by_call": 1}), ([150, 90], 8, 1, [60, 30]), span=42
    ),
    "ragged": Case(splits=([140, 9], [1, 60], 5, [1, 0])),
}


def few_at_once(table: TileTable) -> TileTable:
    """Of SelectBlocks: eight blocks are ranked at a time, and the sums of a step are shared by two programs, of eight tokens by none."""
    return changed(changed(table, "choose", {"BC": 8}), "choose_few", {"BC": 8, "few_programs": 8})


def run_case(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Clear choices that differ; greatest difference of outputs, for the blocks of the formulas, and of sums, relative above 1.

    Outputs, workspaces and what is not filled of states start as NaN, and a write outside of them is an error.
    """
    from still_kernels.block_attention.call import launch_block_attention
    from still_kernels.select_blocks.call import launch_select_blocks

    case = CASES[name]
    layer = case.layer
    tables: list[TileTable | None] = [None, None]
    if case.span:
        group = 1 << (layer.heads // layer.kv_heads - 1).bit_length()
        wide = dtype == torch.float32
        made = (
            select_table(90, layer.dim, group, wide),
            attend_table(90, layer.dim, layer.choice["block_size"], wide),
        )
        tables = [few_at_once(made[0]), made[1]]
        tables = [replace(table, host={**table.host, "span_tokens": case.span}) for table in tables if table]
    errors = {"blocks": 0.0, "sums": 0.0, "output": 0.0}
    rows = -(-layer.rows // layer.choice["mean_stride"])
    expected = torch.zeros(2, layer.kv_heads, rows, layer.dim)
    with guarded_workspaces() as guarded:
        like = torch.zeros(1, device=device)
        sums = guarded.empty(like, (2, layer.kv_heads, rows, layer.dim), torch.float32)
        kept = [guarded.empty(like, (2, layer.kv_heads, layer.rows, layer.dim), dtype) for _ in "kv"]
        for number, call in enumerate(calls(layer, case.splits, dtype)):
            f = {n: x.to(device) for n, x in call.feeds.items()}
            new = f["new_tokens"].to(torch.int32 if number % 3 else torch.int64)
            blocks = guarded.empty(like, tuple(call.blocks.shape), torch.int32)
            given = SelectInputs(f["query"], f["key"], new, f["past_length"], **layer.attributes)
            launch_select_blocks(given, sums, blocks, tables[0])
            wrong = (blocks.cpu() != call.blocks).any(-1)
            assert not wrong[call.gaps > CLEAR].any(), f"{name}: call {number}: {int(wrong.sum())} choices differ"
            errors["blocks"] = max(errors["blocks"], float(wrong.float().mean()))
            host = {n: x.float() if x.is_floating_point() else x for n, x in call.feeds.items() if n != "value"}
            _, expected = naive_select_blocks(SelectInputs(**host, **layer.attributes), expected)
            filled = torch.arange(rows) * layer.choice["mean_stride"] < (f["past_length"] + new).cpu()[:, None]
            filled = filled[:, None].expand(-1, layer.kv_heads, -1)
            assert bool(sums.cpu()[~filled].isnan().all()), f"{name}: sums written behind what is filled"
            difference = (sums.cpu()[filled] - expected[filled]).abs().max() if filled.any() else torch.tensor(0.0)
            errors["sums"] = max(errors["sums"], float(difference.nan_to_num(float("inf"))))
            output = guarded.empty(like, tuple(f["query"].shape), dtype)
            state = AttentionState(kept[0], kept[1], f["past_length"])
            inputs = Inputs(f["query"], f["key"], f["value"], new, call.blocks.to(device), layer.choice["block_size"])
            launch_block_attention(inputs, state, output, tables[1])
            apart = (output.cpu().double() - call.output).abs() / call.output.abs().clamp_min(1)
            errors["output"] = max(errors["output"], float(apart.nan_to_num(float("inf")).max()))
        guarded.check()
    return errors


def run_ties(device: str = "cpu") -> None:
    """Of blocks of equal scores the first are taken."""
    from still_kernels.select_blocks.call import launch_select_blocks

    query, key = torch.ones(1, 120, 6, 10, device=device), torch.ones(1, 120, 2, 10, device=device)
    new, past = torch.tensor([120], device=device), torch.tensor([0], device=device)
    blocks = torch.zeros(1, 120, 2, SMALL.attributes["block_slots"], dtype=torch.int32, device=device)
    given = SelectInputs(query, key, new, past, **SMALL.attributes)
    usual = select_table(90, SMALL.dim, 4, True)
    for table in (usual, few_at_once(usual), changed(usual, "choose", {"BC": 2})):
        launch_select_blocks(given, torch.zeros(1, 2, 40, 10, device=device), blocks, table)
        assert blocks[0, 119, 0].tolist()[:6] == [0, 1, 2, 7, 8, 9], blocks[0, 119, 0].tolist()


def run_published(device: str, dtype: torch.dtype) -> None:
    """MiniCPM-SALA's layer, with a dense length of 2,048: choices by the definition in float64, outputs by its attention in float64."""
    from still_kernels.block_attention.call import launch_block_attention
    from still_kernels.block_attention.meaning import block_attention
    from still_kernels.select_blocks.call import launch_select_blocks

    generator = torch.Generator(device).manual_seed(3)
    rows = 9984
    attributes = {"dense_length": 2048, "block_slots": 96}
    sums = torch.full((1, 2, rows // 16, 128), torch.nan, device=device)
    exact = sums.double()
    kept = [torch.full((1, 2, rows, 128), torch.nan, dtype=dtype, device=device) for _ in "kv"]
    empty = [torch.zeros_like(x, dtype=torch.float64) for x in kept]
    wide = AttentionState(empty[0], empty[1], torch.zeros(1, dtype=torch.int64))
    past = 0
    for tokens in (6000, 3900, 1, 5, 1):
        query, key, value = (
            torch.randn(1, tokens, heads, 128, device=device, generator=generator).to(dtype) for heads in (32, 2, 2)
        )
        new, length = torch.tensor([tokens], device=device), torch.tensor([past], device=device)
        blocks = torch.full((1, tokens, 2, 96), 113, dtype=torch.int32, device=device)
        launch_select_blocks(SelectInputs(query, key, new, length, **attributes), sums, blocks)
        margins: list[torch.Tensor] = []
        given = SelectInputs(query.double(), key.double(), new, length, **attributes)
        wanted, exact = naive_select_blocks(given, exact, watch=margins.append)
        clear = margins[0].squeeze(2).unflatten(-1, (-1, 2)).abs().amin(2) > CLEAR  # [1, T, HK]
        wrong = (blocks != wanted).any(-1)
        assert not (wrong & clear).any() and float(wrong.float().mean()) < 1e-3, (
            f"{int(wrong.sum())} of {wrong.numel()}"
        )
        output = torch.full_like(query, torch.nan)
        inputs = Inputs(query, key, value, new, blocks, 64)
        launch_block_attention(inputs, AttentionState(kept[0], kept[1], length), output)
        every = {n: getattr(inputs, n).double() for n in ("query", "key", "value")}
        expected, wide = block_attention(replace(inputs, **every), replace(wide, length=length), in_place=True)
        apart = (output.double() - expected).abs() / expected.abs().clamp_min(1)
        assert float(apart.nan_to_num(float("inf")).max()) <= REFERENCE[dtype]
        past += tokens


def run_dispatch(device: str = "cpu") -> None:
    """PyTorch's ops of a prompt and a step, by the kernels: choices and outputs are those of their definitions, blocks of 64 and of one."""
    from still_kernels.block_attention.call import block_attention
    from still_kernels.block_attention.meaning import block_attention as naive_block_attention
    from still_kernels.select_blocks.call import select_blocks

    choice = {"top_blocks": 6, "local_blocks": 2, "dense_length": 128, "block_slots": 6}
    for block_size in (64, 1):
        torch.manual_seed(0)
        rows = torch.zeros(2, 1, 2, 512, 64, device=device)
        state = right = AttentionState(rows[0], rows[1], torch.zeros(1, dtype=torch.int64, device=device))
        sums = right_sums = torch.zeros(1, 2, 32, 64, device=device)
        for tokens in (450, 1):
            query, key, value = (torch.randn(1, tokens, heads, 64, device=device) for heads in (6, 2, 2))
            new = torch.full((1,), tokens, device=device)
            given = SelectInputs(query, key, new, state.length, **choice)
            blocks, sums = select_blocks(given, sums)
            expected, right_sums = naive_select_blocks(given, right_sums)
            assert (blocks != expected).float().mean() < 1e-3 and torch.allclose(sums, right_sums, atol=1e-4)
            chosen = expected if block_size == 64 else (64 * expected).clamp_min(-1)
            inputs = Inputs(query, key, value, new, chosen, block_size)
            output, state = block_attention(inputs, state)
            wanted, right = naive_block_attention(inputs, right)
            assert (output - wanted).abs().max() <= REFERENCE[torch.float32] * wanted.abs().max()
            assert torch.equal(state.key, right.key) and torch.equal(state.length, right.length)


def main(arguments: list[str]) -> None:
    from tests.still_kernels import quick_interpreter

    quick_interpreter.install()
    kind, *names = arguments
    torch.set_num_threads(1)
    if kind == "ties":
        run_ties()
        print("{}")
        return
    if kind == "dispatch":
        from still_kernels.block_attention import call as attends
        from still_kernels.select_blocks import call as selects

        attends.has_kernels = selects.has_kernels = lambda device: True
        run_dispatch()
        print("{}")
        return
    if kind == "shuffled":
        shuffle_programs()
    if kind in ("float16", "bfloat16"):
        from tests.still_kernels import interpreter16

        interpreter16.install()
    dtype = torch.float32 if kind == "shuffled" else getattr(torch, kind)
    print(json.dumps({name: run_case(name, dtype=dtype) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
