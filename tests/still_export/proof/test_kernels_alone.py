"""What a kernel may err by itself: as a GPU rounds, also where sums cancel, and no more."""

import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from still_export.graph.options import ExportOptions
from still_export.package.folder import open_package
from still_export.proof import kernels
from still_export.targets.export import export
from tests.still_export.linear_models import linear_model


def test_sums_that_cancel_move_by_more_than_a_unit_of_what_is_left() -> None:
    terms = np.array([[1.0, 2.0, 3.0], [1000.0, -1000.0, 1e-3]])
    moved = kernels.moved_by_rounding(lambda feed: {"sum": feed["x"].sum(-1, keepdims=True)}, {"x": terms}, 1e-3)
    assert 1e-4 < moved["sum"][0] < 1e-2 and 0.1 < moved["sum"][1] < 10


@pytest.mark.slow
def test_a_gpu_may_round_what_it_multiplies_and_err_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jamba's states have rows of one number, which is often what is left of a sum. The kernel is the body, reading rounded numbers."""
    linear_model("jamba", hidden_size=40, mamba_d_state=22).save_pretrained(tmp_path / "model")
    export(ExportOptions(str(tmp_path / "model"), dtype="float16"), tmp_path / "package", command="test")
    package, real = open_package(tmp_path / "package"), kernels.open_session
    runner = kernels.open_runner
    monkeypatch.setattr(
        kernels,
        "open_runner",
        lambda folder, manifest, runtime, provider, **more: runner(folder, manifest, runtime, "cpu", **more),
    )

    def verdict(factor: float) -> bool:
        def opened(folder: Any, manifest: Any, options: Any, provider: str, native: Any, **more: Any) -> Any:
            session = real(folder, manifest, options, "cpu", None, **more)
            return types.SimpleNamespace(run=partial(rounded, session)) if native else session

        def rounded(session: Any, names: list[str], feed: dict[str, np.ndarray]) -> Any:
            coarse = {n: x.astype(np.float16).astype(x.dtype) if x.dtype.kind == "f" else x for n, x in feed.items()}
            return [x * x.dtype.type(factor) if x.dtype.kind == "f" else x for x in session.run(names, coarse)]

        monkeypatch.setattr(kernels, "open_session", opened)
        checks = [*kernels.compare_kernels(package.path, package.manifest, package.path, "cuda", 0)]
        assert len(checks) == 1
        return checks[0].passed

    assert verdict(1.0)
    assert not verdict(1.02)
