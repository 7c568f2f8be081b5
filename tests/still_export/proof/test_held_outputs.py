"""Outputs with searched codes beside those with plainly rounded ones: right codes pass, codes that err together fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from still_export.graph.options import ExportOptions
from still_export.models.read.source import find_source
from still_export.models.read.weights import value_of
from still_export.package.folder import Package
from still_export.proof.held_outputs import check_outputs
from still_export.proof.held_weights import check_weights
from still_export.proof.verdict import Verdict
from tests.still_export.conftest import Exporter
from tests.still_export.proof.plants import searched_copy, with_weights
from tests.still_export.proof.test_held_weights import DOWN, LAYERS, SIZES, layer

NAME = layer(1, DOWN)


@pytest.fixture
def searched(export_tiny: Exporter, tmp_path: Path) -> Package:
    """No worse than a search finds."""
    int4 = export_tiny("llama", options={"quantize": "int4", "native": False}, sizes=SIZES, layer_types=LAYERS)
    return searched_copy(int4, tmp_path / "searched")


def source_of(package: Package) -> Any:
    return find_source(replace(ExportOptions.from_manifest(package.manifest), dtype="float32"))


def outputs(package: Package) -> Verdict:
    return check_outputs(package.path, package.manifest, source_of(package), ())


def test_codes_that_err_together_fail(searched: Package, tmp_path: Path) -> None:
    """Each lies within a step of its weight, and within what a block may lose; their errors add up against alike inputs."""
    right = outputs(searched).checks[0]
    assert right.passed and right.value is not None and 0.5 < right.value < 1.5, right
    assert int(right.name.split()[2]) >= 7 * len(LAYERS) - 7
    weight = value_of(source_of(searched).weights[NAME]).numpy()

    def rounded_away(weights: dict[str, np.ndarray]) -> None:
        """Each to the next code above its weight, not to the nearest."""
        blocks, scales = weights[f"{NAME}.blocks"], weights[f"{NAME}.scales"]
        zeros = weights[f"{NAME}.zero_points"]
        steps = np.repeat(scales.reshape(weight.shape[0], -1).astype(np.float64), blocks.shape[-1] * 2, 1)
        packed = zeros.reshape(weight.shape[0], -1)
        zero = np.stack([packed & 15, packed >> 4], -1).reshape(weight.shape[0], -1)[
            :, : weight.shape[1] // (blocks.shape[-1] * 2)
        ]
        zero = np.repeat(zero, blocks.shape[-1] * 2, 1)
        codes = np.clip(np.ceil(weight / steps - 1e-6) + zero, 0, 15).astype(np.uint8)
        blocks[...] = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(blocks.shape)

    planted = with_weights(searched, tmp_path / "up", rounded_away)
    assert check_weights(planted.path, planted.manifest, source_of(planted)).passed
    found = outputs(planted).checks[0]
    assert not found.passed and found.where == NAME and "plain rounding" in found.what, found


def test_packages_without_searched_codes_are_not_asked(export_tiny: Exporter) -> None:
    int4 = export_tiny("llama", options={"quantize": "int4", "native": False}, sizes=SIZES, layer_types=LAYERS)
    assert not outputs(int4).checks and not outputs(int4).not_asked
