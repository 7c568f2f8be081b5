"""`still-export evaluate` of a server: what it says counts as if it were asked in this process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import still_export
from still_export.cli.main import main
from still_export.evaluation.evaluate import answered
from still_export.evaluation.served import ServedModel
from tests.still_export.serving.test_app import Served
from tests.still_export.training import byte_tokenizer


def test_a_server_is_evaluated(
    served: Served,
    byte_package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it says is what `run` says; a server that is not there, or is asked for logits, is refused."""
    model = still_export.load(byte_package, threads=1)
    address = f"http://127.0.0.1:{served.port}/v1"
    asked = ServedModel(address, 257)
    prompt = list(b"Once upon a time")
    assert asked.complete(prompt, 20) == model.generate(prompt, max_tokens=20).text
    ids = np.array([[*prompt, *b"?"]])
    right = np.array([[*prompt, *model.generate(prompt, max_tokens=1).tokens]])
    tokenizer = byte_tokenizer()
    assert (answered(asked, tokenizer, ids, [1]), answered(asked, tokenizer, right, [1])) == (0, 1)
    command = [
        "evaluate",
        address,
        "--tokenizer",
        str(byte_package),
        "--tasks",
        "needle",
        "--lengths",
        "190",
        "-o",
        str(tmp_path),
    ]
    command += ["--depths", "2", "--samples", "1", "-q"]
    for changed, said in (
        (command, ""),
        ([*command[:2], *command[4:]], "name the folder of its tokenizer"),
        ([*command, "--text", __file__], "a server does not return logits"),
        ([*command[:8], *command[10:]], "no folder for the tables. Name one with -o"),
        (["evaluate", address.replace("v1", "v2"), *command[2:]], "does not answer as OpenAI's interface does"),
    ):
        with pytest.raises(SystemExit) as end:
            main(changed)
        told = " ".join(capsys.readouterr().err.split())
        assert (int(end.value.code or 0) > 0) == bool(said) and said in told, told
    assert json.loads((tmp_path / "evaluation.json").read_text())["retrieval"][address]["needle"]["190"] == [0.0, 0.0]
