"""Pages that show records: what stands between their marks is what proofs/ says of today's sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from still_export.proof import records
from still_export.proof.records import Record, make_record, read_records, write_record
from still_export.targets.registry import TARGETS
from tests.docs.pages import PAGES, ROOT, name
from tools import ledger

SPEED = {"prefill_s_at_1024": 0.05, "decode_ms_at_1024": 0.6, "peak_mb_at_1024": 116, "decode_ms_at_64": 0.5}


def proof(passed: bool = True, **subject: str) -> Record:
    given = {"package": "small", "dtype": "float16", **subject}
    return make_record("proof", "prove", given, SPEED, ["still_export.errors"], passed)


@pytest.mark.parametrize("page", ledger.PAGES)
def test_pages_say_what_the_records_say(page: str) -> None:
    """Stale rows among it: sources that a record covers and that changed since are marked on the page, or this fails."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert ledger.MARKED.search(text) and text.count("<!-- ledger: ") == text.count("<!-- ledger ends -->")
    assert ledger.filled(text, read_records(ledger.PROOFS)) == text, (
        f"{page} is not what proofs/ says: python -m tools.ledger"
    )


def test_every_page_with_marks_is_written() -> None:
    marked = {name(page) for page in PAGES if "<!-- ledger: " in page.read_text(encoding="utf-8")}
    assert marked == set(ledger.PAGES)


def test_the_tool_keeps_a_record_and_writes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "PROOFS", tmp_path / "proofs")
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    monkeypatch.setattr(ledger, "PAGES", ("page.md",))
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- ledger: speeds -->\n\nold\n\n<!-- ledger ends -->\n\nafter\n")
    made = write_record(proof(target="ort-cpu"), tmp_path)
    for _ in range(2):
        ledger.main([str(made)])
        text = page.read_text()
        assert text.startswith("before\n\n<!-- ledger: speeds -->\n\n| package |") and text.endswith(
            "|\n\n<!-- ledger ends -->\n\nafter\n"
        )
        assert "| 1,024 | 0.05 | 0.6 | 116 |" in text and "| 64 |  | 0.5 |  |" in text
    assert len(read_records(tmp_path / "proofs")) == 1 and not capsys.readouterr().out
    with monkeypatch.context() as other:
        other.setattr(records, "_hash_or_none", lambda room: "0" * 64)
        ledger.main([])
    assert capsys.readouterr().out == "prove: still_export.errors\n"
    made.write_text(made.read_text().replace("0.6", "0.5"))
    with pytest.raises(SystemExit, match=r"^2$"):
        ledger.main([str(made)])
    assert "changed after it was written. Run what made it again" in " ".join(capsys.readouterr().err.split())


def test_targets_are_told_apart() -> None:
    trt8 = {**json.loads(proof(target="trt").model_dump_json()), "versions": {"tensorrt": "8.6.1"}}
    for record, expected in (
        (proof(target="ort-cpu"), "ort-cpu"),
        (proof(target="onnx", provider="cuda"), "ort-cuda"),
        (proof(target="onnx"), "ort-cpu"),
        (proof(target="trt"), "trt"),
        (Record.model_construct(**trt8), "trt8"),
        (proof(runtime="vllm"), "vllm"),
        (proof(op="HybridAttention"), "kernels"),
    ):
        assert ledger.target_named(record) == expected


def test_targets_without_a_record_say_so_and_stale_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [proof(target="ort-cpu"), proof(False, target="ort-cpu", quantize="int4")]
    rows = ledger.targets(made).splitlines()[2:]
    assert sum("not recorded" in row for row in rows) == len(TARGETS) - 1 == len(rows) - 1
    (row,) = (row for row in rows if row.startswith("| ort-cpu "))
    assert "**1 failed**, 1 passed | float16, int4 float16 |" in row and row.endswith("| as they are |")
    assert (
        ledger.summary(made).startswith("Proofs on record: ort-cpu on ")
        and "web" in ledger.summary(made).partition("Without one: ")[2]
    )
    monkeypatch.setattr(records, "_hash_or_none", lambda room: "0" * 64)
    assert "**stale** |" in ledger.targets(made) and "**stale**" in ledger.proofs(made)


def test_families_have_a_table_of_their_own() -> None:
    def of(package: str, family: str, dtype: str, passed: bool = True) -> Record:
        return proof(passed, package=package, family=family, dtype=dtype, target="ort-cpu")

    records = [
        of("gla-float32", "gla", "float32"),
        of("gla-float16", "gla", "float16", False),
        of("qwen3_5_moe-experts-float32", "qwen3_5_moe_text", "float32"),
        of("mine", "gla", "float32"),
    ]
    rows = ledger.families(records).splitlines()
    assert rows[2] == "| `gla` | float16 failed; float32 passed |" and "`qwen3_5_moe-experts`" in rows[3]
    assert rows[4] == "" and len(rows) == 6, "another package of the family is none of them"
    assert "mine" in ledger.proofs(records) and "gla-float" not in ledger.proofs(records) + ledger.speeds(records)


def test_rows_of_benchmarks_are_tables() -> None:
    rows = {"rows": [{"context": 4096, "ms": 1.23456}, {"context": 8192, "peer_ms": 2}]}
    text = ledger.benchmarks([make_record("benchmark", "decode", {"model": "a|b"}, rows, ["still_export.errors"])])
    assert "decode, model a|b: " in text and "| context | ms | peer ms |\n" in text
    assert "| 4096 | 1.235 |  |\n| 8192 |  | 2 |\n" in text
    assert ledger.benchmarks([]) == ledger.speeds([]) == "Not recorded yet.\n"


def test_trained_models_are_a_row_a_runtime() -> None:
    def of(
        kind: Any, name: str, subject: dict[str, str], figures: dict[str, Any], passed: bool | None = None
    ) -> Record:
        made = make_record(kind, name, subject, figures, ["still_export.errors"], passed)
        return made.model_copy(update={"machine": made.machine.model_copy(update={"gpu": "a GPU"})})

    engine = {"package": "qwen-mixed-float16", "target": "trt", "dtype": "float16"}
    speed = {"worst_of_its_bound": 0.5, "prefill_s_at_4096": 0.0123, "decode_ms_at_32000": 2.5, "decode_ms_at_1024": 9}
    served = {"runtime": "vllm", "check": "quantized gptq float16 qwen-mixed"}
    rows = [
        {"load": "1 of 4096, first", "prefill_s": 9.0, "step_ms": 9.0},
        {"load": "1 of 4096, again", "prefill_s": 0.05, "step_ms": 3.25},
    ]
    text = ledger.models(
        [
            of("proof", "prove", engine, speed, True),
            of("proof", "prove", {**engine, "package": "mine-float16"}, speed, True),
            of("proof", "test", served, {"found": "ok: 36 requests, error 1.0e-02 (bound 4.0e-02)"}, True),
            of("benchmark", "vLLM", {"runtime": "vllm", "model": "qwen-mixed-gptq"}, {"rows": rows}),
            of("benchmark", "vLLM", {"runtime": "vllm", "model": "qwen"}, {"rows": rows}),
            of("proof", "test", {"runtime": "vllm", "check": "verify smollm-hybrid float16"}, {"failure": "no"}, False),
            of("benchmark", "prove", {"package": "smollm-hybrid-int4", "target": "trt", "dtype": "float16"}, {}),
        ]
    )
    first, second, base, broken, unproven = text.splitlines()[2:]
    mixed = "| Qwen2.5-Coder-1.5B, 4 softmax layers |"
    assert first.startswith(f"{mixed} float16 | trt | passed (0.5) | 0.0123 |  |  |  |  |  |  | 2.5 | a GPU | ")
    assert second.startswith(f"{mixed} int4 | vllm | passed (0.25) | 0.05 |  |  |  | 3.25 |  |  |  | a GPU | ")
    assert base.startswith("| Qwen2.5-Coder-1.5B, full attention | float16 | vllm |  | 0.05 |  |  |  | 3.25 |")
    assert broken.startswith("| SmolLM2-135M, all hybrid | float16 | vllm | failed |  |")
    assert unproven.startswith("| SmolLM2-135M, all hybrid | int4 | trt | measured |  |")


def test_packages_beside_peers_are_a_row_a_length() -> None:
    rows = [
        {"runtime": "still-export", "context": 4096, "prefill_s": 6.4, "decode_ms": 14.04, "peak_mb": 1424},
        {"runtime": "genai", "context": 4096, "prefill_s": 18.8, "decode_ms": 24.6, "peak_mb": 1350},
        {"runtime": "still-export", "context": 512, "prefill_s": 0.5, "decode_ms": 9.0, "peak_mb": 300},
    ]
    subject = {"model": "Small", "dtype": "float32", "quantize": "int4", "threads": "2"}
    made = make_record("benchmark", "beside peers Small", subject, {"rows": rows}, ["still_export.errors"])
    text = ledger.peers([made, proof()])
    assert text.startswith("| model | context | prefill, s: still-export | genai | decode, ms: still-export | genai | ")
    assert (
        "| Small | 512 | 0.5 |  | 9 |  | 300 |  |\n| Small | 4,096 | 6.4 | 18.8 | 14.04 | 24.6 | 1,424 | 1,350 |\n"
        in text
    )
    assert "\nSmall: int4, 2 threads, " in text and text.endswith("`, sources as they are.\n")
    assert "beside peers" not in ledger.benchmarks([made]) and ledger.peers([]) == "Not recorded yet.\n"


def test_an_empty_place_is_filled_and_its_neighbour_stays() -> None:
    page = "<!-- ledger: speeds -->\n\n<!-- ledger ends -->\n\nwords\n\n<!-- ledger: benchmarks -->\n\nold\n\n<!-- ledger ends -->\n"
    made = "Not recorded yet.\n\n<!-- ledger ends -->\n"
    assert (
        ledger.filled(page, []) == f"<!-- ledger: speeds -->\n\n{made}\nwords\n\n<!-- ledger: benchmarks -->\n\n{made}"
    )


def test_quality_is_a_table_a_length_and_one_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"right": 0.85, "low": 0.7, "high": 0.93, "prompts": 20}
    rows = [{"task": "babi_1", "length": n, **cell} for n in (16384, 4096)]
    figures = {"rows": [*rows, {"task": "perplexity", "positions": "0-1024", "value": 9.8765}]}
    subject = {"base": "Small", "dtype": "float16", "quantize": "int4", "target": "onnx", "provider": "cuda"}
    made = make_record("benchmark", "quality Small int4", subject, figures, ["still_export.errors"])
    text = ledger.quality([made, proof()])
    assert text.index("4,096 tokens, 20 prompts a cell") < text.index("16,384 tokens") < text.index("Perplexity")
    assert "| package | type | runtime | babi 1 |\n" in text
    assert "| Small, full attention | int4 | ort-cuda | 85% (70 to 93) |\n" in text
    assert "| Small, full attention | int4 | ort-cuda | 9.877 |\n" in text
    assert "quality Small" not in ledger.benchmarks([made]) and text.endswith("`, sources as they are.\n")
    monkeypatch.setattr(records, "_hash_or_none", lambda room: "0" * 64)
    assert ledger.quality([made]).endswith("`, sources **stale**.\n")
    assert ledger.quality([]) == "Not recorded yet.\n"
