"""What a softmax model loses when its tokens read chosen blocks, by the number of blocks: bits per byte, retrieval and time of a prompt.

  python -m tools.benchmarks.block_quality BASE --blocks all,128,64,32 --text held_out.txt --contexts 16384,32768 \
      --tasks needle --lengths 16384,32768 --depths 5 --samples 2 --device cuda

Nothing is trained. Of the blocks of 64 tokens half are the latest ones; `all` is the base. Each number of blocks is also a model folder:
`still-export linearize BASE --mixer blocks --top-blocks N --local-blocks N/2 --dense-length 2048 -o DIR`. Any other --model is measured
beside them, as STILL's of the same base.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from still_export.evaluation.evaluate import EvaluationOptions, load_any, measure, pick_device
from still_export.mixers.block_attention.mixer import BlockSelected
from still_export.mixers.block_attention.settings import checked_choice
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import SELECTED
from still_export.models.load import load_model, load_tokenizer, open_source
from tools.benchmarks.common import Findings, numbers, parser_of, time_calls

ALL, DENSE = "all", 2048


def variants(given: Namespace, longest: int) -> Iterator[tuple[str, Any]]:
    """Names and models, one after another; those of chosen blocks are one model whose choice changes."""
    layers = open_source(given.base, attach_untrained=True).config.num_hidden_layers
    chosen = StillConfig(layer_types=(SELECTED,) * layers, dense_length=DENSE)
    model = load_model(given.base, attach_untrained=True, still_config=chosen, dtype=given.dtype)
    for name in given.blocks.split(","):
        blocks = longest if name == ALL else int(name)
        local = min(blocks // 2, 32)
        choice = {"top_blocks": blocks, "local_blocks": local, "dense_length": longest if name == ALL else DENSE}
        for module in model.modules():
            if isinstance(module, BlockSelected):
                module.choice = checked_choice(choice, f"--blocks {name}")
        yield f"{name} blocks", model
    for path in given.model:
        yield path, load_any(path, None, given.dtype, tokens=longest)["still"]


@torch.no_grad()
def prompt_ms(model: Any, tokens: int) -> float:
    """Median milliseconds of a forward pass over `tokens` random tokens, with the logits of the last."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)

    def call() -> None:
        model(ids, use_cache=False, logits_to_keep=1).logits.sum().item()

    return 1e3 * time_calls(call, 3).median


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("base")
    parser.add_argument("--blocks", default="all,128,64,32")
    parser.add_argument("--model", action="append", default=[], help="a STILL folder of the same base, repeatable")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--contexts", type=numbers, default=[16384])
    parser.add_argument("--text-tokens", type=int, default=65536)
    parser.add_argument("--tasks", default="needle")
    parser.add_argument("--lengths", type=numbers, default=[16384])
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    options = EvaluationOptions(
        texts=tuple(given.text),
        context_lengths=tuple(given.contexts),
        text_tokens=given.text_tokens,
        tasks=tuple(filter(None, given.tasks.split(","))),
        lengths=tuple(given.lengths),
        depths=given.depths,
        samples=given.samples,
        variants=("still",),
    )
    found, device, tokenizer = Findings(), pick_device(given.device), load_tokenizer(given.base)
    longest = max(*options.context_lengths, *options.lengths)
    for name, model in variants(given, longest):
        begin = time.monotonic()
        result = measure({name: model}, tokenizer, options, device=device)
        cells = {f"{t} {n}": result.accuracy(name, t, n) for t in options.tasks for n in options.lengths}
        times = {f"prompt_ms {n}": round(prompt_ms(model, n), 1) for n in options.context_lengths}
        bits = {text: round(value, 4) for text, value in result.bits_per_byte[name].items()}
        found.add(model=name, prompts=result.prompts, **bits, **cells, **times, seconds=round(time.monotonic() - begin))
    found.record(given.record, "quality by blocks", {"base": given.base})
    return 0


if __name__ == "__main__":
    sys.exit(main())
