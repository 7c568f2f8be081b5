"""Write what pages say of records in proofs/: the ledger's page, and tables of other pages that stand between marks.

usage: python -m tools.ledger [RECORD ...]

Records that are named, from `still-export prove` here or on another machine, are read, checked and kept in proofs/ first. A page marks its
place with `<!-- ledger: NAME -->` and `<!-- ledger ends -->`, each on a line of its own; tests/docs/test_ledger.py compares. Which rooms
made a record stale is printed.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.proof.ledger import commit_of, newest, sources_of, table
from still_export.proof.records import Record, read_record, read_records, write_record
from still_export.targets.registry import TARGETS

ROOT = Path(__file__).resolve().parents[1]
PROOFS = ROOT / "proofs"
PAGES = (
    *("docs/reference/ledger.md", "docs/reference/targets.md", "docs/reference/linear-families.md"),
    *("docs/notebook/quality.md", "docs/notebook/trained.md", "docs/notebook/onnxruntime.md", "README.md"),
)
QUALITY = "quality "
"""How records of tools/benchmarks/quality.py begin: they have a page of their own."""
PEERS = "beside peers "
"""And those of tools/benchmarks/peers.py."""
MARKED = re.compile(r"(<!-- ledger: (\w+) -->\n)(?:(?!<!-- ledger).)*(<!-- ledger ends -->)", re.DOTALL)
"""From one mark to its end, never over the next one: a place may be empty."""
WIDTH = 138
SPEED = re.compile(r"(prefill_s|decode_ms|peak_mb)_at_(\d+)")

TRAINED = {
    "qwen-mixed": "Qwen2.5-Coder-1.5B, 4 softmax layers",
    "qwen": "Qwen2.5-Coder-1.5B, full attention",
    "smollm-mixed-2": "SmolLM2-135M, 2 softmax layers",
    "smollm-hybrid": "SmolLM2-135M, all hybrid",
    "smollm": "SmolLM2-135M, full attention",
}
"""Trained models, by the folders of their packages and of vLLM."""
NAME = "|".join(TRAINED)
PACKAGE = re.compile(rf"(?:trt-)?({NAME})-(float16|int4)(?:\.built)?")
CHECKED = re.compile(rf"(verify|quantized gptq float16) ({NAME})(?: float16)?")
ERROR = re.compile(r"error ([\d.e+-]+) \(bound ([\d.e+-]+)\)")
LOAD = re.compile(r"1 of (\d+), again")
CONTEXTS = {"4096": "4K", "8000": "8K", "16384": "16K", "32000": "32K", "32768": "32K"}


def target_named(record: Record) -> str:
    """The target's record that a proof is of; manifests name what `--to` takes. Kernels and engines of others have names of their own."""
    subject = record.subject
    name = subject.get("target") or subject.get("runtime") or ("kernels" if "op" in subject else record.name)
    kinds = {t.to for t in TARGETS if name in (t.name, t.to)}
    found = [t.name for t in TARGETS if t.to in kinds]
    marks = {"cuda": subject.get("provider") == "cuda", "8": record.versions.get("tensorrt", "").startswith("8.")}
    for mark, meant in marks.items():
        found = [each for each in found if each.endswith(mark) == meant] or found
    return found[0] if found else name


def sentence(parts: Iterable[str]) -> str:
    """One of them all, in lines of a page's width."""
    return textwrap.fill(f"{'; '.join(parts)}.", WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def machine_of(record: Record) -> str:
    return record.machine.gpu or record.machine.processor


def run_of(record: Record) -> str:
    """Where and when a record was made, of which sources."""
    return f"{machine_of(record)}, {record.date:%Y-%m-%d}, {commit_of(record)}, sources {sources_of([record])}"


def markdown(head: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> str:
    """A table; "not recorded" where there is no row."""
    lines = [head, ("---",) * len(head), *rows]
    text = "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    return text if len(lines) > 2 else "Not recorded yet.\n"


def model_of_family(record: Record) -> str:
    """The small random model of tests/prove_families.py that a record is of; empty: another package."""
    package, family = record.subject.get("package", ""), record.subject.get("family", "-")
    return (
        package.removesuffix(f"-{record.subject['dtype']}") if package.startswith(family.removesuffix("_text")) else ""
    )


def proofs(records: list[Record]) -> str:
    """All but those of families, which have a page of their own."""
    return table(record for record in records if not model_of_family(record))


def families(records: list[Record]) -> str:
    """Small random models by family and runtime: the verdict of each type, and how near the worst output came to its bound."""
    found: dict[str, dict[str, list[Record]]] = {}
    for record in newest(records):
        if name := model_of_family(record):
            found.setdefault(name, {}).setdefault(target_named(record), []).append(record)
    columns = sorted({target for row in found.values() for target in row})

    def cell(held: list[Record]) -> str:
        shares = (r.figures.get("worst_of_its_bound") for r in held)
        words = ([r.subject["dtype"], r.verdict, *([f"({s})"] if s else [])] for r, s in zip(held, shares, strict=True))
        return "; ".join(map(" ".join, words))

    rows = [
        (f"`{name}`", *(cell(row.get(target, [])) or "not recorded" for target in columns))
        for name, row in sorted(found.items())
    ]
    machines = sorted({run_of(r) for row in found.values() for held in row.values() for r in held})
    return markdown(("model", *columns), rows) + (f"\n{sentence(machines)}" if machines else "")


def targets(records: list[Record]) -> str:
    """Each target with the proofs that there are of it, by machine."""

    def key(record: Record) -> tuple[str, str]:
        return target_named(record), machine_of(record)

    rows: list[tuple[str, ...]] = []
    for (target, machine), group in groupby(sorted((r for r in newest(records) if r.kind == "proof"), key=key), key):
        found = list(group)
        types = sorted({f"{r.subject.get('quantize', '')} {r.subject.get('dtype', '')}".strip() for r in found} - {""})
        failed = sum(r.verdict == "failed" for r in found)
        last = max(found, key=lambda r: r.date)
        rows.append(
            (
                target,
                f"{len(found)} passed" if not failed else f"**{failed} failed**, {len(found) - failed} passed",
                ", ".join(types),
                machine,
                f"{last.date:%Y-%m-%d}, {commit_of(last)}",
                sources_of(found),
            )
        )
    left = [t.name for t in TARGETS if t.name not in {row[0] for row in rows}]
    rows += [(name, "not recorded", "", "", "", "") for name in left]
    return markdown(("target", "proofs", "types", "machine", "newest", "sources"), sorted(rows))


def speeds(records: list[Record]) -> str:
    """Prefill, decode and memory by context, of `still-export prove`."""
    rows = []
    for record in newest(records):
        if model_of_family(record):
            continue
        by_length: dict[int, dict[str, float]] = {}
        for name, value in record.figures.items():
            if (found := SPEED.fullmatch(name)) and isinstance(value, int | float):
                by_length.setdefault(int(found[2]), {})[found[1]] = value
        subject = record.subject
        what = (
            subject.get("package", record.name),
            target_named(record),
            subject.get("quantize") or subject.get("dtype"),
        )
        for length, row in sorted(by_length.items()):
            figures = (f"{row[name]:.3g}" if name in row else "" for name in ("prefill_s", "decode_ms", "peak_mb"))
            rows.append((*what, machine_of(record), f"{length:,}", *figures, f"{record.date:%Y-%m-%d}"))
    return markdown(
        ("package", "target", "type", "machine", "context", "prefill, s", "decode, ms", "peak, MB", "date"), rows
    )


def models(records: list[Record]) -> str:
    """Trained models on GPUs: what their proofs said and how fast they are, vLLM's full attention among them."""
    said: dict[tuple[str, ...], str] = {}
    speed: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    runs: dict[tuple[str, ...], list[Record]] = {}
    for record in newest(records):
        subject, gpu = record.subject, record.machine.gpu or ""
        key: tuple[str, ...] = ()
        if check := CHECKED.fullmatch(subject.get("check", "")):
            key = (check[2], "int4" if check[1].startswith("quantized") else "float16", "vllm", gpu)
            error = ERROR.search(str(record.figures.get("found")))  # a check that broke found nothing
            said[key] = record.verdict + (f" ({float(error[1]) / float(error[2]):.2f})" if error else "")
        elif package := PACKAGE.fullmatch(subject.get("package", "")):
            key = (package[1], package[2], target_named(record), gpu)
            share = record.figures.get("worst_of_its_bound")
            said[key] = record.verdict + (f" ({share})" if share is not None else "")
            speed[key] = {
                (at[1], CONTEXTS[at[2]]): value
                for name, value in record.figures.items()
                if (at := SPEED.fullmatch(name)) and at[2] in CONTEXTS and isinstance(value, int | float)
            }
        elif subject.get("runtime") == "vllm" and subject.get("model", "").removesuffix("-gptq") in TRAINED:
            name = subject["model"]
            key = (name.removesuffix("-gptq"), "int4" if name.endswith("-gptq") else "float16", "vllm", gpu)
            speed[key] = {}
            for row in _rows(record):
                if (load := LOAD.fullmatch(row["load"])) and load[1] in CONTEXTS:
                    times = {"prefill_s": row["prefill_s"], "decode_ms": row["step_ms"]}
                    speed[key] |= {(name, CONTEXTS[load[1]]): value for name, value in times.items()}
        if key:
            runs.setdefault(key, []).append(record)
    order = list(TRAINED)
    columns = [(name, at) for name in ("prefill_s", "decode_ms") for at in dict.fromkeys(CONTEXTS.values())]
    rows = []
    for key in sorted(runs, key=lambda each: (order.index(each[0]), each[1:])):
        cells = (f"{speed.get(key, {})[at]:.3g}" if at in speed.get(key, {}) else "" for at in columns)
        last = f"{max(record.date for record in runs[key]):%Y-%m-%d}, {sources_of(runs[key])}"
        rows.append((TRAINED[key[0]], *key[1:3], said.get(key, ""), *cells, key[3], last))
    words = [f"{'prefill, s' if name == 'prefill_s' else 'decode, ms'}: {at}" for name, at in columns]
    return markdown(("model", "type", "runtime", "verify", *words, "machine", "newest, sources"), rows)


def benchmarks(records: list[Record]) -> str:
    """What the tools of tools/benchmarks measured, a table each."""
    parts = []
    for record in newest(records):
        rows: Any = record.figures.get("rows") if not record.name.startswith((QUALITY, PEERS)) else None
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(name for row in rows for name in row))
            cells = ([f"{v:.4g}" if isinstance(v := row.get(c, ""), float) else v for c in columns] for row in rows)
            subject = [f"{name} {value}" for name, value in record.subject.items() if value != record.name]
            about = sentence([f"{', '.join([record.name, *subject])}: {run_of(record)}"])
            parts.append(f"{about}\n{markdown(tuple(name.replace('_', ' ') for name in columns), cells)}")
    return "\n".join(parts) or "Not recorded yet.\n"


def peers(records: list[Record]) -> str:
    """Packages beside their bases in other runtimes: a row a length, a column a figure and runtime."""
    named = [r for r in newest(records) if r.name.startswith(PEERS)]
    names = list(dict.fromkeys(row["runtime"] for r in named for row in _rows(r)))
    figures = {"prefill_s": "prefill, s", "decode_ms": "decode, ms", "peak_mb": "peak, MB"}
    rows = []
    for record in named:
        by_length: dict[int, dict[str, dict[str, float]]] = {}
        for row in _rows(record):
            by_length.setdefault(row["context"], {})[row["runtime"]] = row
        for length, of in sorted(by_length.items()):
            cells = (f"{of[name][figure]:,.4g}" if name in of else "" for figure in figures for name in names)
            rows.append((record.subject["model"], f"{length:,}", *cells))
    head = [f"{words}: {name}" if i == 0 else name for words in figures.values() for i, name in enumerate(names)]
    kinds = {
        f"{r.subject['model']}: {r.subject.get('quantize') or r.subject['dtype']}, {r.subject['threads']} threads, {run_of(r)}": None
        for r in named
    }
    return markdown(("model", "context", *head), rows) + (f"\n{sentence(kinds)}" if kinds else "")


def _rows(record: Record) -> list[dict[str, Any]]:
    rows: Any = record.figures["rows"]
    return list(rows)


def quality(records: list[Record]) -> str:
    """What packages know at length: a table a length with the share of right answers by task, and one of perplexity by position. A run may
    measure a part: each cell is the newest."""
    named: list[Record] = []
    known: set[tuple[Any, ...]] = set()
    for record in sorted(records, key=lambda r: r.date, reverse=True):
        if record.name.startswith(QUALITY):
            cells = {(record.name, target_named(record), row.get("length"), row["task"]) for row in _rows(record)}
            if cells - known:
                named.append(record)
            known |= cells
    named.reverse()
    found: dict[str, dict[str, dict[str, str]]] = {}  # by table, by package, by column
    for record in sorted(named, key=lambda r: (r.subject["base"], r.subject.get("adapter", ""), r.name)):
        subject = record.subject
        kind = subject.get("quantize") or subject["dtype"]
        what = f"{subject['base']}, {subject.get('adapter') or 'full attention'} | {kind} | {target_named(record)}"
        rows: Any = record.figures["rows"]
        for row in rows:
            table, column, cell = "Perplexity", row.get("positions", ""), f"{row.get('value', 0):.3f}"
            if "length" in row:
                table, column = (
                    f"{row['length']:,} tokens, {row['prompts']} prompts a cell",
                    row["task"].replace("_", " "),
                )
                cell = f"{row['right']:.0%} ({100 * row['low']:.0f} to {100 * row['high']:.0f})"
            found.setdefault(table, {}).setdefault(what, {})[column] = cell
    parts = []
    for table, packages in sorted(found.items(), key=lambda each: (each[0] == "Perplexity", len(each[0]), each[0])):
        columns = list(dict.fromkeys(column for row in packages.values() for column in row))
        lines = [("package | type | runtime", *columns), ("--- | --- | ---", *["---"] * len(columns))]
        lines += [(what, *(row.get(column, "") for column in columns)) for what, row in packages.items()]
        parts.append(f"{table}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    machines = sorted({run_of(r) for r in named})
    return "\n".join([*parts, sentence(machines)] if parts else ["Not recorded yet.\n"])


def summary(records: list[Record]) -> str:
    """One sentence: which targets have a record, and which have none."""
    found = [r for r in newest(records) if r.kind == "proof" and r.verdict == "passed"]
    by_target = {
        name: sorted({machine_of(r) for r in found if target_named(r) == name}) for name in map(target_named, found)
    }
    have = "; ".join(f"{name} on {', '.join(machines)}" for name, machines in sorted(by_target.items()))
    left = ", ".join(t.name for t in TARGETS if t.name not in by_target)
    text = f"Proofs on record: {have or 'none'}. Without one: {left or 'none'}."
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


TABLES: dict[str, Callable[[list[Record]], str]] = {
    made.__name__: made for made in (proofs, families, targets, speeds, models, peers, benchmarks, quality, summary)
}


def filled(page: str, records: list[Record]) -> str:
    """A page's text with what stands between its marks made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](records)}\n{found[3]}", page)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path)
    try:
        for record in [read_record(path) for path in parser.parse_args(arguments).records]:
            write_record(record, PROOFS)
    except ConfigError as error:
        parser.error(str(error))
    records = read_records(PROOFS)
    for record in newest(records):
        if rooms := record.stale_rooms():
            print(f"{record.name}: {', '.join(rooms)}")
    for page in (ROOT / name for name in PAGES):
        page.write_text(filled(page.read_text(encoding="utf-8"), records), encoding="utf-8")


if __name__ == "__main__":
    main()
