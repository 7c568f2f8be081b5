"""The graph of steps of a small model for GPUs, by its bodies on the CPU: who has one, and that its numbers are those of the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from still_export.package.files import MODEL, STEP
from still_export.runtime import ort
from still_export.runtime.ort import OrtModel
from still_export.targets.ort.kernels import kernel_variants
from still_kernels.common import cuda_function
from tests.still_export.conftest import Exporter

SIZES = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 16}
"""Multiples of 16, which the kernel has."""


@pytest.fixture
def exported(export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What exports for sm_90 without compiling anything."""
    monkeypatch.setattr("still_export.targets.ort.kernels.compile_archive", lambda variants, archs, target: target)
    monkeypatch.setattr(
        "still_export.targets.ort.kernels.build_with_archive", lambda archive, target, include: target.write_text("-")
    )
    monkeypatch.setattr(cuda_function, "can_compile", lambda: True)
    monkeypatch.setattr(ort, "native_library", lambda *given: None)

    def run(archs: tuple[str, ...] = ("sm_90",), **changes: Any) -> Any:
        return export_tiny(
            **{"options": {"archs": archs}, "dtype": "float16", "chunk_size": 32, "sizes": SIZES, **changes}
        )

    return run


def test_its_numbers_are_those_of_the_other(exported: Any) -> None:
    """Over the same weights; calls of one token of one sequence are its, and what else there is is not."""
    package = exported()
    assert {"BetweenAttention", "RotaryQkv"} <= package.manifest["ops"].keys()
    assert len(kernel_variants(package.path / STEP)["BetweenAttention"]) == 1
    assert "BetweenAttention" not in kernel_variants(package.path / MODEL)
    model = OrtModel(package.path, threads=1)
    step = model._open_beside(STEP)
    found = []
    for session in (model.session, step):
        model._step = session
        assert model._session(1, 1) is session and model._session(2, 1) is model._session(1, 2) is model.session
        model.start(1)
        calls = [np.arange(1, 41), *([token] for token in range(40, 60))]
        rows = [model.feed(np.array([call]))[:, -1] for call in calls]
        found.append((np.concatenate(rows), model.state_arrays()))
    (logits, states), (theirs, their_states) = found
    np.testing.assert_allclose(theirs, logits, rtol=0, atol=2e-2 * np.abs(logits).max())
    assert not np.array_equal(theirs[1:], logits[1:]) and np.array_equal(theirs[0], logits[0])
    for name, state in states.items():
        mine, other = (x.astype(float).clip(-1e4, 1e4) for x in (state, their_states[name]))  # scores may be infinite
        np.testing.assert_allclose(
            other, mine, atol=2e-2 * np.abs(mine[np.abs(mine) < 1e4]).max(initial=1.0), err_msg=name
        )


@pytest.mark.parametrize(
    ("archs", "changes"),
    [(("sm_80", "sm_90"), {}), (("sm_90",), {"dtype": "float32"}), (("sm_90",), {"sizes": {**SIZES, "intermediate_size": 44}})],
    ids=str,
)  # fmt: skip
def test_who_has_none(exported: Any, archs: tuple[str, ...], changes: dict[str, Any]) -> None:
    """Where another GPU has no such kernel, or another type, or other sizes."""
    assert STEP not in exported(archs, **changes).manifest["files"]


def test_without_a_compiler_there_is_none(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_function, "can_compile", lambda: False)
    package = exported(chunk_size=64)  # another package than that of others
    assert STEP not in package.manifest["files"] and "BetweenAttention" not in package.manifest["ops"]
