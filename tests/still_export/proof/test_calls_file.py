"""What polygraphy reads is what was written."""

from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.comparator import RunResults
from polygraphy.json import load_json

from still_export.package.folder import Package
from still_export.proof.calls_file import PART, CallsFile
from still_export.proof.cases import Case
from still_export.proof.sessions import Subject

MANIFEST: dict[str, Any] = {"target": "onnx", "states": [{"name": "key.0", "dtype": "float16"}], "engines": []}


def test_polygraphy_reads_the_calls_of_every_case(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cases = []
    for number, rows in enumerate((1, 2, PART // 8)):
        feed = {"input_ids": np.array([[number, 7]]), "past_key.0": rng.standard_normal((1, rows, 2))}
        out = {"logits": rng.standard_normal((1, 1, 5), np.float32), "present_key.0": np.zeros((1, 3, rows))}
        cases.append(Case(f"case {number}", [feed] * (number + 1), [out] * (number + 1)))
    with CallsFile(tmp_path, Subject(Package(tmp_path, MANIFEST))) as file:
        for case in cases:
            file.add(case)
    inputs, results = load_json(str(tmp_path / "inputs.json")), RunResults.load(str(tmp_path / "outputs.json"))
    ((name, outputs),) = results.items()
    assert name == "pytorch" and len(inputs) == len(outputs) == 6
    feeds = [feed for case in cases for feed in case.feeds]
    expected = [out for case in cases for out in case.expected]
    for found, right in zip([*inputs, *outputs], [*feeds, *expected], strict=True):
        assert list(found) == list(right)
        for key, x in right.items():
            kind = np.float16 if "key" in key else x.dtype
            np.testing.assert_array_equal(found[key], x.astype(kind))
            assert np.asarray(found[key]).dtype == kind
