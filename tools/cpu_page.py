"""The page "Speed on CPUs", of records of `tools.benchmarks.peers`: a table a model, with its files and machines; losses are bold.

python -m tools.cpu_page
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "docs/notebook/results/cpu", ROOT / "docs/notebook/cpu.md"
OURS, PEER = "still-export", "llama.cpp"
FIGURES = {"prefill_s": "prompt, s", "decode_ms": "a further token, ms", "peak_mb": "peak memory, MB"}
USERS = {"tokens_per_s": "tokens a second", "first_s_p50": "first token, s: median", "first_s_p95": "95th percentile"}
HEAD = """# Speed on CPUs

Published hybrids and llama.cpp on the **same GGUF file**: random weights of the published sizes, written and quantized by llama.cpp's
own tools. The package keeps every block of the file.

A cell has still-export's value / llama.cpp's and their ratio; **bold** ratios are losses. Values are medians of rounds in which both
take turns, each in a process of its own. *Start* is the time to the first token, with the process. *One core busy*: a loop runs on one of
the two cores. On the Xeon other programs ran on other cores. Below a table: rates as shares of NumPy's sum (bytes) and of a float32 GEMM.

    python -m tools.benchmarks.random_gguf lfm2-1.2b FOLDER --converter LLAMA.CPP --types Q4_K_M    # FILE
    still-export FILE --to onnx --quantize int4 -o PACKAGE
    python -m tools.benchmarks.peers PACKAGE FILE --model NAME --peers llama.cpp --lengths 128,1024,4096 --rounds 3 \\
        --record docs/notebook/results/cpu
    python -m tools.benchmarks.serve_users PACKAGE --model NAME --peer "llama-server -m FILE ..." --record docs/notebook/results/cpu
    python -m tools.cpu_page                                               # writes this page

"""
TAIL = """
[Trained models beside llama.cpp and onnxruntime-genai](onnxruntime.md#beside-genai-and-llamacpp). Missed aims:
[aims](../reference/aims.md).
"""


def records() -> list[dict[str, Any]]:
    """All of them, by their model's name; a model's users behind its contexts."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    return sorted(found, key=lambda record: (str(record["subject"]["model"]), machine_of(record), record["name"]))


def machine_of(record: dict[str, Any]) -> str:
    """Its processor's name in tables."""
    name = next(name for name in ("EPYC", "Xeon") if name in record["machine"]["processor"])
    return f"{name} with AVX-512" if name == "EPYC" and "avx512" in record["machine"]["kind"] else name


def model_of(record: dict[str, Any]) -> tuple[str, str]:
    """Its model, and of which file or under what load it was measured."""
    model, _, kind = str(record["subject"]["model"]).partition(", ")
    return model.partition(" at ")[0], kind or "Q4_K_M"


def machines(found: list[dict[str, Any]]) -> str:
    """Each machine with its runs, a line each."""
    runs: dict[str, set[str]] = {}
    for record in found:
        machine = record["machine"]
        where = f"- **{machine_of(record)}**: {machine['processor']}, {machine['cores']} cores"
        run = f"{record['subject']['threads']} threads, rounds: {record['subject']['rounds']}, {record['date'][:10]}"
        runs.setdefault(where, set()).add(f"{run}, behind commit `{record['commit'][:8]}`")
    return "\n".join(
        f"{where}\n" + "\n".join(f"  - {run}" for run in sorted(each)) for where, each in sorted(runs.items())
    )


def table(found: list[dict[str, Any]]) -> str:
    """A model's table, of all its files and machines."""
    lines = [
        f"| file, machine | context | {' | '.join(FIGURES.values())} | start, s |",
        "|---" * (3 + len(FIGURES)) + "|",
    ]
    for record in found:
        rows = {(row["runtime"], row["context"]): row for row in record["figures"]["rows"] if "context" in row}
        starts = {row["runtime"]: row["start_s"] for row in record["figures"]["rows"] if "start_s" in row}
        kind = model_of(record)[1]
        for context in sorted({context for _, context in rows}):
            cells = [beside(*(rows[name, context][figure] for name in (OURS, PEER))) for figure in FIGURES]
            start = beside(starts[OURS], starts[PEER]) if starts else ""
            lines.append(f"| {kind}, {machine_of(record)} | {context:,} | {' | '.join(cells)} | {start} |")
            starts = {}
    bounds = [line for record in found for line in bounds_of(record)]
    return "\n".join([*lines, *(["", *bounds] if bounds else [])]) + "\n"


def bounds_of(record: dict[str, Any]) -> list[str]:
    """What bounds a step and a prompt, and our share of it, where the record has its machine's rates: a step reads every weight once, a
    prompt does two operations a weight and token. Attention and states come beside, so shares fall with the length."""
    rows = record["figures"]["rows"]
    ours = {row["context"]: row for row in rows if row.get("runtime") == OURS and "context" in row}
    said = []
    for rates in (row for row in rows if "read_gb_s" in row):
        read = [rates["file_mb"] / row["decode_ms"] / rates["read_gb_s"] for row in ours.values()]
        done = [
            2e-9 * rates["parameters"] * context / row["prefill_s"] / rates["gemm_gflop_s"]
            for context, row in ours.items()
        ]
        steps, prompts = (", ".join(f"{share:.2f}" for share in shares) for shares in (read, done))
        said.append(
            f"- {model_of(record)[1]}, {machine_of(record)}: steps {steps} of {rates['read_gb_s']:.3g} GB/s, prompts {prompts} of "
            f"{rates['gemm_gflop_s']:.3g} GFLOP/s"
        )
    return said


def beside(ours: float, theirs: float) -> str:
    """Both figures, and their ratio."""
    ratio = f"{ours / theirs:.2f}"
    shown = (f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in (ours, theirs))
    return f"{' / '.join(shown)} {f'**{ratio}**' if float(ratio) > 1 else ratio}"


def users_table(record: dict[str, Any]) -> str:
    """A model's servers under their heading."""
    subject = record["subject"]
    lines = [f"| users | server | {' | '.join(USERS.values())} |", "|---" * (2 + len(USERS)) + "|"]
    for row in sorted(record["figures"]["rows"], key=lambda row: int(row["users"])):
        lines.append(f"| {row['users']} | {row['runtime']} | {' | '.join(f'{row[name]:,.4g}' for name in USERS)} |")
    asked = f"{subject['prompt_tokens']} tokens in and {subject['answer_tokens']} out, all users at once; {machine_of(record)}."
    return f"\n## Users of {subject['model']}\n\n{asked}\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """The page."""
    found = records()
    models: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        if "prompt_tokens" not in record["subject"]:
            models.setdefault(model_of(record)[0], []).append(record)
    tables = [f"\n## {model}\n\n{table(each)}" for model, each in models.items()]
    users = [users_table(record) for record in found if "prompt_tokens" in record["subject"]]
    return HEAD + machines(found) + "\n" + "".join([*tables, *users]) + TAIL


def main() -> int:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
