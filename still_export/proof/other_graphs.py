"""What other machines run of a package: function bodies where the native kernels are not theirs, and the portable graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from still_export.package.files import MODEL, PORTABLE
from still_export.package.folder import Package
from still_export.package.refusals import RunError
from still_export.proof.cases import CaseSource
from still_export.proof.sessions import Target
from still_export.proof.verdict import Check, Verdict
from still_export.proof.verify import Verifier

STEPS = 4
"""Single tokens behind the prompts."""
SHOWN = 4
"""Further outputs that a verdict names."""


def other_lengths(chunk: int) -> tuple[int, ...]:
    """Lengths of the prompts: one token, and the first token of a third chunk."""
    return (1, 2 * chunk + 1)


def check_other_graphs(package: Package, native: bool, cases: Callable[[], CaseSource]) -> Verdict:
    """Compare with PyTorch what runs of a package where its native kernels are not loaded, and its portable graph.

    Args:
        package: Of ONNX Runtime.
        native: Its kernels were compared.
        cases: PyTorch's answers, drawn anew.
    """
    verdict = Verdict()
    if native:
        target = Target(package, "ort", bodies=True)
        verdict.checks.append(_compare(f"{MODEL} without the native kernels", package, target, cases()))
    if PORTABLE in package.manifest["files"]:
        target = Target(package, "ort", bodies=True, graph=PORTABLE)
        verdict.checks.append(_compare(PORTABLE, package, target, cases()))
    return verdict


def _compare(what: str, package: Package, target: Target, cases: CaseSource) -> Check:
    name = f"{what} computes what PyTorch computes"
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = Verifier(package, cases, target, STEPS).run(Path(folder))
        except RunError as error:
            return Check(name, False, str(error), target.graph)
    wrong = [each.told() for each in report.mismatches]
    if report.selections.wrong:
        wrong.append(f"{report.selections.wrong} selections differ without a near tie")
    wrong += [str(check) for check in report.checks if not check.passed]
    return Check(
        name, report.passed, wrong[0] if wrong else "", target.graph * bool(wrong), notes=tuple(wrong[1 : 1 + SHOWN])
    )
