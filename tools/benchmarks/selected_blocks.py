"""Selected blocks beside full attention on a GPU, in MiniCPM-SALA's geometry: a step, and a prompt.

  python -m tools.benchmarks.selected_blocks --context 262144 --prompt 65536 [--blocks attend.BM=128,attend.num_warps=8]

A step is a replayed CUDA graph of several layers, so that no layer finds its cache in the chip's: still::SelectBlocks and
still::BlockAttention beside still::Attention. A prompt is one layer's, from nothing, beside PyTorch's attention by cuDNN. Prompts are of
tokens that choose alike (`alike`: queries and keys that change slowly) and of tokens that choose by chance. Needs PyTorch and Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from still_kernels.attention.call import launch_attention
from still_kernels.attention.meaning import AttentionState
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.block_attention.call import launch_block_attention
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.plan import tile_table as attend_table
from still_kernels.select_blocks.call import launch_select_blocks
from still_kernels.select_blocks.meaning import Inputs as SelectInputs
from still_kernels.select_blocks.plan import tile_table as select_table
from still_kernels.tile import TileTable, changed
from tools.benchmarks.common import Findings, in_blocks, parser_of, replayed, time_calls

HEADS, KV_HEADS, DIM, LAYERS = 32, 2, 128, 6
DTYPE = torch.float16


def tables(text: str) -> list[TileTable | None]:
    """Of SelectBlocks and BlockAttention, changed by settings like "attend.BM=128"; of "" the usual ones."""
    own = [select_table(90, DIM, HEADS // KV_HEADS, False), attend_table(90, DIM, 64, False)]
    found: list[TileTable | None] = [None, None]
    for setting in filter(None, text.split(",")):
        name, _, value = setting.partition("=")
        kernel, _, constant = name.partition(".")
        place = 1 if kernel in own[1].tiles or kernel in own[1].host else 0
        own[place] = changed(own[place], kernel, {constant or kernel: int(value)})
        found[place] = own[place]
    return found


class Layer:
    """A layer with `context` tokens behind it, at random."""

    def __init__(self, context: int, rows: int) -> None:
        shape = (1, KV_HEADS, rows, DIM)
        self.state = AttentionState(
            torch.randn(shape, device="cuda", dtype=DTYPE),
            torch.randn(shape, device="cuda", dtype=DTYPE),
            torch.tensor([context], device="cuda"),
        )
        self.sums = self.state.key.unflatten(2, (-1, 16)).float().sum(3)
        self.blocks = torch.empty(0, dtype=torch.int32)

    def select(self, query: Tensor, key: Tensor, new: Tensor, table: TileTable | None) -> None:
        """still::SelectBlocks."""
        self.blocks = torch.empty(1, query.shape[1], KV_HEADS, 128, dtype=torch.int32, device="cuda")
        launch_select_blocks(SelectInputs(query, key, new, self.state.length), self.sums, self.blocks, table)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, new: Tensor, table: TileTable | None) -> Tensor:
        """still::BlockAttention."""
        output = torch.empty_like(query)
        launch_block_attention(Inputs(query, key, value, new, self.blocks, 64), self.state, output, table)
        return output

    def full(self, query: Tensor, key: Tensor, value: Tensor, new: Tensor) -> Tensor:
        """still::Attention."""
        output = torch.empty_like(query)
        launch_attention(AttentionInputs(query, key, value, new), self.state, output)
        return output


def drawn(tokens: int, alike: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a prompt."""
    made = []
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        x = torch.randn(1, tokens, heads, DIM, device="cuda")
        if alike:
            slow = torch.randn(1, heads * DIM, tokens // 64 + 1, device="cuda")
            slow = F.interpolate(slow, size=tokens, mode="linear").unflatten(1, (heads, DIM)).permute(0, 3, 1, 2)
            x = 1.2 * slow + 0.3 * x
        made.append(x.to(DTYPE).contiguous())
    return made[0], made[1], made[2]


def over(call: Callable[[Layer], object], layers: list[Layer]) -> None:
    """A call of each layer."""
    for layer in layers:
        call(layer)


def step_rows(context: int, settings: list[TileTable | None], found: Findings) -> None:
    """A step after `context` tokens."""
    layers = [Layer(context, context + 64) for _ in range(LAYERS)]
    query, key, value = drawn(1, False)
    new = torch.ones(1, dtype=torch.int64, device="cuda")
    calls: dict[str, Callable[[Layer], object]] = {
        "select": lambda layer: layer.select(query, key, new, settings[0]),
        "attend": lambda layer: layer.attend(query, key, value, new, settings[1]),
        "full": lambda layer: layer.full(query, key, value, new),
    }
    row = {}
    for name, call in calls.items():
        replay = replayed(partial(over, call, layers))
        seconds = time_calls(in_blocks(replay, 20, torch.cuda.synchronize), 7).median / 20 / LAYERS
        row[f"{name}_us"] = round(seconds * 1e6, 2)
    row["sparse_of_full"] = round((row["select_us"] + row["attend_us"]) / row["full_us"], 3)
    found.add(step_after=context, **row)


def prompt_rows(tokens: int, settings: list[TileTable | None], found: Findings) -> None:
    """A prompt of `tokens`."""
    new = torch.tensor([tokens], device="cuda")
    for alike in (True, False):
        layer, (query, key, value) = Layer(0, tokens), drawn(tokens, alike)
        calls = {
            "select": lambda: layer.select(query, key, new, settings[0]),  # noqa: B023
            "attend": lambda: layer.attend(query, key, value, new, settings[1]),  # noqa: B023
        }
        row = {}
        for name, call in calls.items():
            row[f"{name}_ms"] = round(time_calls(in_blocks(call, 1, torch.cuda.synchronize), 3).median * 1e3, 2)
        q = query.transpose(1, 2)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for x in (key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            full = in_blocks(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, torch.cuda.synchronize)  # noqa: B023
            row["cudnn_ms"] = round(time_calls(full, 3).median * 1e3, 2)
        tile = [set(layer.blocks[0, p : p + 4, 0].flatten().tolist()) - {-1} for p in range(tokens // 2, tokens, 997)]
        row["blocks_of_4_tokens"] = round(sum(map(len, tile)) / len(tile), 1)
        row["sparse_of_cudnn"] = round((row["select_ms"] + row["attend_ms"]) / row["cudnn_ms"], 3)
        found.add(prompt=tokens, alike=alike, **row)


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=int, default=262144, help="tokens before a step; 0: no step")
    parser.add_argument("--prompt", type=int, default=65536, help="tokens of a prompt; 0: none")
    parser.add_argument("--blocks", default="", help="other block sizes of the kernels, KERNEL.NAME=VALUE,...")
    options = parser.parse_args()
    torch.manual_seed(0)
    settings, found = tables(options.blocks), Findings()
    with torch.no_grad():
        if options.context:
            step_rows(options.context, settings, found)
        if options.prompt:
            prompt_rows(options.prompt, settings, found)
    subject = {"geometry": "MiniCPM-SALA", "dtype": "float16", "device": torch.cuda.get_device_name()}
    found.record(options.record, "selected blocks, one layer", subject)
    return 0


if __name__ == "__main__":
    sys.exit(main())
