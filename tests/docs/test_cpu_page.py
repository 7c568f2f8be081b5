"""The page of speeds on CPUs has the figures of its records, and shows what is lost."""

import copy

from tools.cpu_page import PAGE, bounds_of, machine_of, page, records, table


def test_the_page_is_of_its_records() -> None:
    assert records() and PAGE.read_text(encoding="utf-8") == page()


def test_a_loss_is_shown_as_one() -> None:
    record = copy.deepcopy(next(each for each in records() if "prompt_tokens" not in each["subject"]))
    for row in record["figures"]["rows"]:
        row["decode_ms"] = 30.0 if row["runtime"] == "still-export" else 20.0
    contexts = {row["context"] for row in record["figures"]["rows"] if "context" in row}
    assert table([record]).count("30 / 20 **1.50**") == len(contexts)


def test_a_share_of_what_the_machine_can_is_shown() -> None:
    record = copy.deepcopy(next(each for each in records() if "prompt_tokens" not in each["subject"]))
    ours = {"runtime": "still-export", "context": 1000, "decode_ms": 50.0, "prefill_s": 10.0, "peak_mb": 1.0}
    rates = {"read_gb_s": 20.0, "gemm_gflop_s": 400.0, "file_mb": 500.0, "parameters": 10**9}
    record["figures"]["rows"] = [rates, ours]
    assert bounds_of(record)[0].endswith(": steps 0.50 of 20 GB/s, prompts 0.50 of 400 GFLOP/s")


def test_processors_of_one_name_are_told_apart() -> None:
    names = [
        machine_of({"machine": {"processor": "AMD EPYC", "kind": f"x86_64 {each}"}}) for each in ("avx2", "avx512f")
    ]
    assert names == ["EPYC", "EPYC with AVX-512"]
