"""Packages of tiny random models, exported once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from still_export.graph.options import ExportOptions
from still_export.options import names_of
from still_export.package.folder import Package, open_package
from still_export.package.trust import trust_package
from still_export.targets.ort.library import cached_library, this_cpu
from still_export.targets.ort.options import OrtOptions
from tests.kept import kept

Exporter = Callable[..., Package]


def has_torch() -> bool:
    """Whether a test of this run imports PyTorch, which takes seconds; fixtures do not import it for tests that do without."""
    return "torch" in sys.modules


@pytest.fixture(scope="session", autouse=True)
def exports_once() -> None:
    """Models that differ in weights alone are traced once in all tests of a process."""
    if not has_torch():
        return
    from tests.still_export import quick_exports

    quick_exports.install()


@pytest.fixture(autouse=True)
def graph_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify leaves out what goes through further processes and graphs, which takes seconds a package: tests of these ask them directly,
    and those marked `whole` ask all."""
    if has_torch() and request.node.get_closest_marker("whole") is None:
        from still_export.proof.verdict import Verdict

        monkeypatch.setattr("still_export.proof.package._other_files", lambda *_: Verdict())


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test exports is traced, whatever was traced before."""
    import torch

    monkeypatch.setattr(torch.export, "export", torch.export.export.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.onnx, "export", torch.onnx.export.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def export_tiny() -> Exporter:
    """Export a tiny STILL model; equal arguments share one package. `options` of the export and of ONNX Runtime, `still` of the model."""
    import torch

    from still_export.targets.export import export
    from tests.still_export import quick_exports
    from tests.still_export.packages import portable_package
    from tests.still_export.tiny import still_model

    quick_exports.install()
    opened: dict[str, Package] = {}

    def exported(
        family: str = "llama",
        dtype: str = "float32",
        options: dict[str, Any] | None = None,
        final: str = "",
        **still: Any,
    ) -> Package:
        kernels = cached_library(this_cpu())  # a package takes those that are there
        held = kernels.read_bytes() if kernels.exists() else b""
        key = repr((family, dtype, options, final, still, hashlib.sha256(held).hexdigest()))

        def make(folder: Path) -> None:
            still_model(family, getattr(torch, dtype), **still).save_pretrained(folder / "model")
            asked = options or {}
            chosen = OrtOptions(**{name: asked[name] for name in names_of(OrtOptions) if name in asked})
            request = ExportOptions(
                str(folder / "model"), **{name: asked[name] for name in asked if name not in names_of(OrtOptions)}
            )
            if final:
                portable_package(request, folder / "package", final)
            else:
                export(request, folder / "package", options=chosen, command="still-export tiny")

        if key not in opened:
            opened[key] = package = open_package(kept(key, make) / "package", check_hashes=False)
            if package.manifest.get("native"):
                trust_package(package.path)  # as the export does, for whom it was exported
        return opened[key]

    return exported
