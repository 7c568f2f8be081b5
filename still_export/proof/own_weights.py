"""The proof of a package without its model: its graphs against each other, and its programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from still_export.graph.quantization.policy import rounds_activations
from still_export.package.files import MODEL, PORTABLE
from still_export.package.folder import Package, open_package
from still_export.proof.answers import Progress, silent
from still_export.proof.chains import empty_feed
from still_export.proof.package_programs import check_programs
from still_export.proof.prompts import Prompts, Ranges
from still_export.proof.sessions import Subject
from still_export.proof.texts_asked import prompt_words
from still_export.proof.verdict import Check, Verdict
from still_export.runtime.sampling import RunError
from still_export.targets.registry import packaged_target
from still_graphs.states import StateTable

STEPS = 4
"""Single tokens after the prompts."""
AGAINST = "against the package's own weights"
OFF = {"float32": 1e-3, "float16": 3e-2}
"""Allowed difference of two graphs with the same weights, relative to the spread of the logits. It replaces a measured rounding error."""
OFF_ROUNDED = 0.2
"""OFF where activations are rounded to 8 bits: ONNX Runtime's products and this project's use other blocks."""


def verify_own(path: Path, provider: str, seed: int, reason: str, progress: Progress = silent) -> Verdict:
    """Compare the graphs of a package with each other, and run its programs.

    Args:
        path: The package; its files are compared with their hashes.
        seed: Seed of the prompts.
        reason: Why the model cannot be read.

    Raises:
        PackageError: The package is damaged.
    """
    package = open_package(path)
    verdict = Verdict(not_asked=[f"the model, its weights, its tokenizer and PyTorch: {reason}"])
    progress("running the package's programs", 0, 0)
    verdict.add(check_programs(package, provider))
    manifest = package.manifest
    if not packaged_target(manifest).portable or manifest.get("speculate"):
        verdict.not_asked.append(
            "the package's graphs against each other: verify a package --to onnx, without --speculate"
        )
        return verdict
    progress("comparing the package's graphs", 0, 0)
    users = Subject(package, "ort", provider)
    right = _logits(package, users, seed)
    finite = all(np.isfinite(each).all() for each in right)
    varied = all(np.ptp(each, axis=-1).min() > 0 for each in right)
    wrong = "" if finite and varied else "they are not finite" if not finite else "they are one number"
    verdict.checks.append(
        Check("logits are finite and differ from token to token", not wrong, wrong, MODEL * bool(wrong))
    )
    ways = [(f"{MODEL} without the native kernels", MODEL)] * users.native
    ways += [(PORTABLE, PORTABLE)] * (PORTABLE in manifest["files"])
    for name, graph in ways:
        verdict.checks.append(_compare(name, package, Subject(package, "ort", bodies=True, graph=graph), seed, right))
    return verdict


def _compare(name: str, package: Package, subject: Subject, seed: int, right: list[np.ndarray]) -> Check:
    bound = OFF_ROUNDED if rounds_activations(package.manifest) else OFF[package.manifest["model"]["dtype"]]
    what = f"{name} computes what {MODEL} does"
    try:
        found = _logits(package, subject, seed)
    except RunError as error:
        return Check(what, False, str(error), subject.graph)
    off = max(float(np.abs(a - b).mean() / max(float(b.std()), 1e-30)) for a, b in zip(found, right, strict=True))
    passed = off <= bound
    return Check(what, passed, "" if passed else "logits differ, of their spread", subject.graph, off, bound)


def _logits(package: Package, subject: Subject, seed: int) -> list[np.ndarray]:
    """Of every prompt and every step, float64."""
    manifest = package.manifest
    table = StateTable.of(manifest)
    words = prompt_words(package.path, manifest)
    prompts = Prompts(manifest, partial(empty_feed, table), Ranges((1, 2 * table.period + 1), STEPS, seed=seed), words)
    found = []
    with subject.open() as session:
        for number in range(prompts.count):
            question = prompts.begin(number)
            outputs = session.carry(question.feeds)
            found += [each["logits"].astype(np.float64) for each in outputs]
            if question.steps:
                found.append(session.step(question.steps)["logits"].astype(np.float64))
    return found
