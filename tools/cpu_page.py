"""The page "Speed on CPUs", of records of `tools.benchmarks.peers`: a table a model, with its machine, and ratios above one in bold.

python -m tools.cpu_page
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "docs/notebook/results/cpu", ROOT / "docs/reference/cpu.md"
OURS, PEER = "still-export", "llama.cpp"
FIGURES = {"prefill_s": "prompt, s", "decode_ms": "a further token, ms", "peak_mb": "peak memory, MB"}
USERS = {"tokens_per_s": "tokens a second", "first_s_p50": "first token, s: median", "first_s_p95": "95th percentile"}
HEAD = """# Speed on CPUs

Published hybrids beside llama.cpp on the **same GGUF file**: weights of the published shape with random values, written and quantized by
llama.cpp's own tools. The package keeps every block of the file. Each cell is the median of the rounds, in which both take turns, each in a
process of its own. **Bold** ratios are losses: llama.cpp is quicker there, or takes less.

    python -m tools.benchmarks.random_gguf lfm2-1.2b FOLDER --converter LLAMA.CPP --types Q4_K_M    # FILE
    still-export FILE --to onnx --quantize int4 -o PACKAGE
    python -m tools.benchmarks.peers PACKAGE FILE --model NAME --peers llama.cpp --lengths 128,1024,4096 --rounds 3 \\
        --record docs/notebook/results/cpu
    python -m tools.benchmarks.serve_users PACKAGE --model NAME --peer "llama-server -m FILE ..." --record docs/notebook/results/cpu
    python -m tools.cpu_page                                               # writes this page
"""
TAIL = """
Trained models beside llama.cpp and onnxruntime-genai: [the notebook](../notebook/onnxruntime.md#beside-genai-and-llamacpp). Aims that
these figures miss: [aims](aims.md).
"""


def records() -> list[dict[str, Any]]:
    """All of them, by their model's name; a model's users behind its contexts."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    return sorted(found, key=lambda record: (str(record["subject"]["model"]), record["name"]))


def table(record: dict[str, Any]) -> str:
    """A model's table under its heading."""
    subject, found = record["subject"], record["figures"]["rows"]
    rows = {(row["runtime"], row["context"]): row for row in found if "context" in row}
    starts = {row["runtime"]: row["start_s"] for row in found if "start_s" in row}
    head = [name for title in FIGURES.values() for name in (f"{title}: ours", PEER, "ratio")]
    lines = [f"| context | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for context in sorted({context for _, context in rows}):
        cells = [f"{context:,}"]
        for figure in FIGURES:
            ours, theirs = (rows[name, context][figure] for name in (OURS, PEER))
            ratio = f"{ours / theirs:.2f}"
            cells += [f"{ours:,.4g}", f"{theirs:,.4g}", f"**{ratio}**" if float(ratio) > 1 else ratio]
        lines.append(f"| {' | '.join(cells)} |")
    if starts:
        ratio = starts[OURS] / starts[PEER]
        lines += ["", f"Start to the first token: {starts[OURS]} s, llama.cpp {starts[PEER]} s, ratio {ratio:.2f}."]
    return f"\n## {subject['model']}\n\n{_where(record)}\n\n" + "\n".join(lines) + "\n"


def users_table(record: dict[str, Any]) -> str:
    """A model's servers under their heading."""
    subject = record["subject"]
    lines = [f"| users | server | {' | '.join(USERS.values())} |", "|---" * (2 + len(USERS)) + "|"]
    for row in sorted(record["figures"]["rows"], key=lambda row: int(row["users"])):
        lines.append(f"| {row['users']} | {row['runtime']} | {' | '.join(f'{row[name]:,.4g}' for name in USERS)} |")
    asked = f"{subject['prompt_tokens']} tokens in and {subject['answer_tokens']} out, all users at once"
    return f"\n## Users of {subject['model']}\n\n{asked}; {_where(record)}\n\n" + "\n".join(lines) + "\n"


def _where(record: dict[str, Any]) -> str:
    """The machine and the run."""
    subject, machine = record["subject"], record["machine"]
    where = f"{machine['processor']} ({machine['kind']}), {machine['cores']} cores, {subject['threads']} threads"
    return f"{where}; {subject['rounds']} rounds, {record['date'][:10]}, commit `{record['commit'][:8]}`."


def page() -> str:
    """The page."""
    tables = [(users_table if "prompt_tokens" in record["subject"] else table)(record) for record in records()]
    return HEAD + "".join(tables) + TAIL


def main() -> int:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
