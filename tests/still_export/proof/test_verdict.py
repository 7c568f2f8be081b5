"""Verdicts add up, and say what was not asked."""

import json

from still_export.proof.verdict import Check, Verdict


def test_one_failed_check_fails_the_verdict_and_is_said_in_a_line() -> None:
    good, bad = Check("tokens", True), Check("scales", False, "twice the file's", "model.layers.3", 2.0, 0.5)
    verdict = Verdict.of([good])
    assert verdict.passed and str(good) == "tokens: yes"
    verdict.add(Verdict([bad], ["CUDA: no GPU here"]))
    verdict.add(Verdict([], ["CUDA: no GPU here"]))
    assert not verdict.passed and verdict.not_asked == ["CUDA: no GPU here"]
    assert str(bad) == "scales: NO, model.layers.3; twice the file's; 2, bound 0.5"
    assert json.loads(json.dumps(verdict.to_dict()))["checks"][1]["where"] == "model.layers.3"
