"""What a layer costs beside full attention in ONNX Runtime on the CPU: prompts, steps and states by context.

  python -m tools.benchmarks.layer_cost FOLDER --layer allmem --lengths 4096,16384,65536

Packages of one random layer of SmolLM2-135M's geometry and a small vocabulary, in float32, one with full attention, one with the layer;
FOLDER keeps them. A prompt of 64K of full attention takes a minute or two on two cores.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from still_export.evaluation.bench import BenchOptions, bench
from still_export.graph.options import ExportOptions
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL, Deployment
from still_export.models import attach_untrained
from still_export.targets.export import export
from tools.benchmarks.common import Findings, numbers, parser_of

SIZES: dict[str, Any] = dict(
    hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, vocab_size=512
)
CHUNK = 256
"""Tokens of a chunk, as the recipes of layers that train as tokens pass have it."""


def package_of(folder: Path, layer: str, room: int) -> Path:
    """A package of one such layer, which has room for so many tokens."""
    config = LlamaConfig(**SIZES, num_hidden_layers=1, max_position_embeddings=room, tie_word_embeddings=True)
    torch.manual_seed(0)
    still = StillConfig(layer_types=(layer,), chunk_size=CHUNK, deployment=Deployment(capacity_tokens=room))
    attach_untrained(LlamaForCausalLM(config), still).save_pretrained(folder / f"{layer}-model")
    asked = ExportOptions(str(folder / f"{layer}-model"), dtype="float32")
    export(asked, folder / layer, command="benchmark", force=True)
    return folder / layer


def main() -> None:
    """As the head of the file says."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layer", default="allmem", help="name in layer_types")
    parser.add_argument("--lengths", type=numbers, default=[4096, 16384, 65536])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    setting = BenchOptions(lengths=tuple(options.lengths), threads=options.threads, steps=8)
    found, rows = Findings(), {}
    for name in (FULL, options.layer):
        package = package_of(options.folder, name, setting.room(max(options.lengths)))
        rows[name] = bench(package, setting)
        for row in rows[name]:
            found.add(layer=name, **asdict(row))
    for full, own in zip(rows[FULL], rows[options.layer], strict=True):
        ratios = {name: round(getattr(own, name) / getattr(full, name), 3) for name in ("prefill_s", "decode_ms")}
        found.add(layer=f"{options.layer} / {FULL}", length=full.length, **ratios)
    found.record(options.record, "layer_cost", {"layer": options.layer, "threads": str(options.threads)})


if __name__ == "__main__":
    main()
