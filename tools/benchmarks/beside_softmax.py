"""Times of each linear family and system beside softmax attention of the same width and depth, on the CPU, in one table.

  python -m tools.benchmarks.beside_softmax FOLDER [--only routing_transformer,rat] [--lengths 1024,4096] [--native]

Random models of two layers, 128 channels wide, in float32 in ONNX Runtime; FOLDER keeps their packages. Numbers in brackets are multiples
of softmax' times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from still_export.evaluation.bench import BenchOptions, Measurement, bench
from still_export.graph.options import ExportOptions
from still_export.mixers.layers import FULL
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from tools.benchmarks.common import Findings, numbers, parser_of

SOFTMAX = "softmax"
WIDE: dict[str, Any] = dict(hidden_size=128, intermediate_size=256)


def model_of(family: str, room: int) -> Any:
    """A random model that transformers or the tests' formulas write."""
    from tests.still_export.linear_models import PUBLISHED, linear_model, published_pair
    from tests.still_export.tiny import still_model

    if family == SOFTMAX:
        heads = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
        sizes = {**WIDE, **heads, "vocab_size": 128, "max_position_embeddings": room}
        return still_model("llama", torch.float32, sizes=sizes, layer_types=(FULL, FULL))
    return linear_model(family, **published_pair(family) if family in PUBLISHED else WIDE)


def table(rows: dict[str, list[Measurement]]) -> str:
    """Markdown: a row a model, prompts and steps by length."""
    full = {row.length: row for row in rows[SOFTMAX]}
    heads = [f"{what} {n:,}" for n in full for what in ("prompt of", "step behind")]
    lines = [f"| model | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name, own in rows.items():
        cells = []
        for row in own:
            peer = full[row.length]
            cells.append(f"{row.prefill_s:.3g} s ({row.prefill_s / peer.prefill_s:.2g})")
            cells.append(f"{row.decode_ms:.3g} ms ({row.decode_ms / peer.decode_ms:.2g})")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def measured(names: Sequence[str], folder: Path, setting: BenchOptions, native: bool, found: Findings) -> str:
    """The table of these families, softmax first."""
    rows: dict[str, list[Measurement]] = {}
    room = setting.room(max(setting.lengths))
    for name in (SOFTMAX, *names):
        model_of(name, room).save_pretrained(folder / f"{name}-model")
        asked = ExportOptions(str(folder / f"{name}-model"), dtype="float32", still={"capacity_tokens": room})
        export(asked, folder / name, options=OrtOptions(native=native), command="benchmark", force=True)
        rows[name] = bench(folder / name, setting)
        for row in rows[name]:
            found.add(model=name, **asdict(row))
    return table(rows)


def main() -> None:
    """As the head of the file says."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="families, with commas between them; default: all")
    parser.add_argument("--lengths", type=numbers, default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--native", action="store_true", help="with the kernels for ONNX Runtime of this machine")
    options = parser.parse_args()
    if options.only:
        names = options.only.split(",")
    else:
        from tests.still_export.linear_models import FAMILIES as names  # type: ignore[no-redef]
    setting = BenchOptions(lengths=tuple(options.lengths), threads=options.threads, steps=8, rounds=options.rounds)
    found = Findings()
    print(measured(names, options.folder, setting, options.native, found))
    found.record(options.record, "beside_softmax", {"threads": str(options.threads), "native": str(options.native)})


if __name__ == "__main__":
    main()
