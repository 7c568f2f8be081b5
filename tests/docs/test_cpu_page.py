"""The page of speeds on CPUs has the figures of its records, and shows what is lost."""

from __future__ import annotations

import copy

from tools.cpu_page import PAGE, page, records, table


def test_the_page_is_of_its_records() -> None:
    assert records() and PAGE.read_text(encoding="utf-8") == page()


def test_a_loss_is_shown_as_one() -> None:
    record = copy.deepcopy(next(each for each in records() if "prompt_tokens" not in each["subject"]))
    for row in record["figures"]["rows"]:
        row["decode_ms"] = 30.0 if row["runtime"] == "still-export" else 20.0
    contexts = {row["context"] for row in record["figures"]["rows"] if "context" in row}
    assert table([record]).count("30 / 20 **1.50**") == len(contexts)
