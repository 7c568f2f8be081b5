"""Hybrid attention in an engine's pages, S in float32 beside S in bfloat16 with a rest: what a step takes, and how far sums are off.

  python -m tools.benchmarks.paged_steps [--record FOLDER] steps --rows 64,32 --tokens 1100,65000 [--blocks LF=64,LS=2] [--form bfloat16]
      [--cache int8]
  python -m tools.benchmarks.paged_steps [--record FOLDER] drift --tokens 131072

One layer of Llama-3.1-8B's geometry in bfloat16, C 64, k 4. `steps`: microseconds a layer in a CUDA graph of several layers, whose states
the L2 does not hold: no row promotes, one does, all do; beside it a copy of as many bytes as a plain step must read. --blocks: other
settings of the decode kernel. --cache int8: keys and values in 8 bits. `drift`: calls of 64 tokens whose values have a mean; after each
doubling S and the outputs of a step against those of pages with float32, by Frobenius norm, with the rest and where it is dropped after
each call. --small: tiny sizes, for a CPU, where nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.narrow import widened
from still_kernels.hybrid_attention.paged import hybrid_attention_paged
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.plan.tiles import for_many_rows
from still_kernels.packing import Packing, PagedStates
from still_kernels.tile import changed
from tools.benchmarks.common import Findings, numbers, parser_of, replayed
from tools.benchmarks.geometries import LLAMA_8B
from tools.kernels.bench import median_s
from tools.kernels.ops.hybrid_attention import WORK, decode_cost, layer

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 16, "chunk_size": 8, "salient_per_chunk": 2}
L2_BYTES = 256 << 20
"""States of a graph's layers together: more than any L2 holds."""
FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


class Layer:
    """A layer whose states lie in pages of its own.

    Args:
        linear: Type of S.
        rows: Sequences.
        room: Tokens that each may have.
    """

    def __init__(self, config: HybridAttentionConfig, linear: torch.dtype, rows: int, room: int) -> None:
        self.config, self.rows = config, rows
        self.pages = Pages.of(config, config.slots_for(room), DTYPE, linear)
        count = rows * self.pages.columns
        # As bfloat16 and as the upper halves of float32 alike: any sums, any keys.
        numbers = torch.randn(count, self.pages.size_bytes // 2, device=DEVICE, dtype=torch.bfloat16)
        self.memory = numbers.view(torch.int8)
        self.views = self.pages.views(self.memory)
        self.views["z_state"].abs_()
        self.table = torch.randperm(count, device=DEVICE).to(torch.int32).view(rows, -1)

    def run(self, inputs: Inputs, length: Tensor, tokens: int, output: Tensor, table: Any = None) -> None:
        """A call with so many tokens of each row; with a table of block sizes by Triton itself."""
        start = torch.arange(0, (self.rows + 1) * tokens, tokens, device=DEVICE, dtype=torch.int32)
        packing = Packing(start, self.table, tokens, self.pages)
        if table is None:
            hybrid_attention_paged(inputs, self.config, PagedStates(self.memory, length, packing), output)
            return
        from still_kernels.hybrid_attention.launch import launch_hybrid_attention

        views = {name: view for name, view in self.views.items() if name != "kv_rest"}
        launch_hybrid_attention(
            inputs, self.config, HybridAttentionState(**views, length=length), output, packing, table
        )


def random_tokens(config: HybridAttentionConfig, tokens: int, mean: float = 0.0) -> tuple[Inputs, Tensor]:
    """Packed tokens, whose values have a mean, with a layer's maps; and room for their output."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=DTYPE)

    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    query, gate = draw(tokens, heads, dim), draw(tokens, heads, dim).sigmoid_()
    key, value = draw(tokens, kv_heads, dim), draw(tokens, kv_heads, dim) + mean
    maps = [draw(heads, config.projection_dim, dim) * dim**-0.5 for _ in "qk"]
    return Inputs(query, key, value, gate, *maps), torch.full_like(query, float("nan"))


def timed(call: Callable[[], object], count: int) -> float | None:
    """Microseconds of a `count`-th of a call in a CUDA graph, the median; without a GPU it is tried."""
    if CUDA:
        call()
        torch.cuda.synchronize()
        return round(median_s(replayed(call), 30) * 1e6 / count, 1)
    call()
    return None


def of_steps(options: argparse.Namespace, sizes: dict[str, int], findings: Findings) -> None:
    for rows, tokens in zip(numbers(options.rows), numbers(options.tokens), strict=True):
        config = replace(layer(sizes, "q_head", tokens + 64), cache=options.cache)
        inputs, output = random_tokens(config, rows)
        chunk = config.chunk_size
        plain = torch.full((rows,), tokens, device=DEVICE, dtype=torch.int32)
        plain += (plain % chunk == 0).int()
        promoting = (plain // chunk * chunk).int()
        one = torch.where(torch.arange(rows, device=DEVICE) == rows // 2, promoting, plain)
        for form in options.form.split(","):
            wide = decode_cost(config, tokens, rows)[0]
            saved = 0 if form == "float32" else 2 * rows * config.num_heads * config.state_features * config.head_dim
            if options.cache:
                kept = config.slots_for(tokens) * config.select_heads + config.num_kv_heads * 2 * chunk
                saved += rows * 2 * kept * (config.head_dim - 4)  # a byte and no more of each number, but for its scale
            count = 1 + int(L2_BYTES // wide) if CUDA else 1
            layers = [Layer(config, FORMS[form], rows, tokens + 64) for _ in range(count)]
            row = {
                "rows": rows,
                "tokens": tokens,
                "S": form,
                "cache": options.cache,
                "MB": round((wide - saved) / 1e6, 1),
                "layers": count,
            }
            half = int(wide - saved) // 2
            pairs = [torch.zeros(2, half, dtype=torch.int8, device=DEVICE) for _ in range(count)]
            row["copy_us"] = timed(lambda: [pair[0].copy_(pair[1]) for pair in pairs], count)  # noqa: B023
            for blocks in [{}, *options.blocks]:
                table = None
                if blocks:
                    table = WORK.table(config, torch.device(DEVICE), False)
                    heads = rows * config.num_heads
                    table = for_many_rows(table, 90, config.head_dim, config.projection_dim, heads)
                    table = changed(table, "decode", blocks)
                found: dict[str, Any] = {}
                for name, length in (("plain", plain), ("one_promotes", one), ("all_promote", promoting)):

                    def step() -> None:
                        for each in layers:  # noqa: B023
                            each.run(inputs, length, 1, output, table)  # noqa: B023

                    try:
                        found[f"{name}_us"] = timed(step, count)
                    except Exception as error:  # settings that do not fit, of which the next may
                        found[name] = f"{type(error).__name__}: {str(error)[:100]}"
                        break
                findings.add(**row, blocks=blocks, **found, finite=bool(output.isfinite().all()))


def of_drift(options: argparse.Namespace, sizes: dict[str, int], findings: Findings) -> None:
    tokens = numbers(options.tokens)[0]
    config = layer(sizes, "q_head", tokens + 64)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "dropped": torch.bfloat16}
    layers = {name: Layer(config, linear, 2, tokens + 64) for name, linear in kinds.items()}
    chunk, mark = config.chunk_size, min(1024, tokens)
    maps, _ = random_tokens(config, 1)

    def call(inputs: Inputs, seen: int, count: int) -> dict[str, Tensor]:
        given = Inputs(
            inputs.query, inputs.key, inputs.value, inputs.gate, maps.feature_q_weight, maps.feature_k_weight
        )
        length = torch.full((2,), seen, device=DEVICE, dtype=torch.int32)
        outputs = {}
        for name, each in layers.items():
            outputs[name] = torch.full_like(inputs.query, float("nan"))
            each.run(given, length, count, outputs[name])
            if name == "dropped":
                each.views["kv_rest"][each.table[:, 1 : each.pages.first].long()] = 0
        return outputs

    def sums(each: Layer) -> Tensor:
        first = each.table[:, 1 : each.pages.first].long()
        parts = {
            name: each.views[name][first].flatten(1, 2)[:, : config.num_heads] for name in each.views if "kv" in name
        }
        return widened(parts["kv_state"], parts["kv_rest"]) if "kv_rest" in parts else parts["kv_state"]

    def off(found: Tensor, exact: Tensor) -> float:
        return float((found.double() - exact.double()).norm() / exact.double().norm())

    for seen in range(0, tokens, chunk):
        call(random_tokens(config, 2 * chunk, 1.0)[0], seen, chunk)
        if seen + chunk == mark:
            # A step whose token the next call reads again: it promotes nothing twice, for that is when the chunk before has ended.
            read = call(random_tokens(config, 2, 1.0)[0], seen + chunk - 1, 1)
            exact = sums(layers["float32"])
            row: dict[str, Any] = {"position": mark}
            for name in ("bfloat16", "dropped"):
                row[f"{name}_sums"] = off(sums(layers[name]), exact)
                row[f"{name}_reads"] = off(read[name], read["float32"])
            findings.add(**row)
            mark *= 2


def blocks_of(text: str) -> dict[str, int]:
    """Of "LF=64,LS=2"."""
    return {name: int(value) for name, value in (part.split("=") for part in text.split(","))}


def main() -> None:
    parser = parser_of(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    steps, drift = verbs.add_parser("steps"), verbs.add_parser("drift")
    steps.add_argument("--rows", default="64,32")
    steps.add_argument("--tokens", default="1100,65000")
    steps.add_argument("--form", default=",".join(FORMS))
    steps.add_argument("--cache", choices=["int8"])
    steps.add_argument("--blocks", type=blocks_of, action="append", default=[], help="repeatable")
    drift.add_argument("--tokens", default="131072")
    for verb in (steps, drift):
        verb.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    torch.manual_seed(0)
    findings = Findings()
    run = {"steps": of_steps, "drift": of_drift}[options.verb]
    with torch.no_grad():
        run(options, SMALL if options.small else dict(WORK.sizes), findings)
    subject = {"geometry": LLAMA_8B, "dtype": str(DTYPE)[6:], "what": options.verb}
    findings.record(options.record, "hybrid attention in pages", subject)


if __name__ == "__main__":
    main()
