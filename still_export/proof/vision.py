"""The encoder of images compared with transformers' own class, in float64: features of images of several sizes, and of two frames."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from transformers import AutoModel

from still_export.models.families.vision import Vision
from still_export.models.read.source import ModelOptions, find_source
from still_export.models.read.weights import value_of
from still_export.package.calls import Arrays
from still_export.package.files import VISION, check_hash
from still_export.package.folder import Package
from still_export.proof.cases import Case, errors_of
from still_export.proof.judge import Bounds, Judged
from still_export.proof.verdict import Check
from still_export.runtime.ort_session import open_session

GRIDS = ((1, 2, 3), (1, 5, 1), (2, 3, 2))
"""Frames, rows and columns of squares, each of which becomes one embedding."""
FEATURES = "image_embeds"


def transformers_encoder(vision: Vision, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' encoder with the weights of `vision`, computing in `dtype`."""
    model: torch.nn.Module = AutoModel.from_config(vision.config).to(dtype)
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    model.load_state_dict({n: value_of(w).to(dtype).reshape(shapes[n]) for n, w in vision.weights.items()}, assign=True)
    return model.eval()


def vision_check(package: Package, options: ModelOptions, seed: int = 0) -> Check:
    """Compare the features of vision.onnx on ONNX Runtime's CPU provider with transformers', within bounds from PyTorch's own run in the
    package's type.

    Args:
        package: Exported with --vision.
        options: The model that it was exported from, in the package's type.

    Raises:
        RunError: ONNX Runtime cannot load vision.onnx.
    """
    import onnxruntime

    vision = find_source(options).vision
    assert vision is not None
    random = np.random.default_rng(seed)
    grids = [(t, *(n * vision.settings["merge"] for n in size)) for t, *size in GRIDS]
    values = vision.settings["patch_values"]
    pixels = [random.standard_normal((t, rows * columns, values), np.float32) for t, rows, columns in grids]
    flat = torch.from_numpy(np.concatenate([each.reshape(-1, values) for each in pixels]))

    @torch.no_grad()
    def features(dtype: torch.dtype) -> Arrays:
        found = transformers_encoder(vision, dtype)(flat.to(dtype), grid_thw=torch.tensor(grids)).pooler_output
        return {FEATURES: found.double().numpy()[None]}

    dtype = package.manifest["model"]["dtype"]
    right, own = features(torch.float64), features(getattr(torch, dtype))
    rows, total = errors_of(right[FEATURES], own[FEATURES])
    case = Case("images", [{}], [right], own=[{FEATURES: rows}], own_mean={FEATURES: total / right[FEATURES].size})
    check_hash(package.path, package.manifest, VISION)
    session = open_session(package.path, package.manifest, onnxruntime.SessionOptions(), graph=VISION)
    answers = [
        session.run(None, {"pixel_values": each, "grid": np.array(size)})[0]
        for each, (_, *size) in zip(pixels, grids, strict=True)
    ]
    found: Mapping[str, np.ndarray] = {
        FEATURES: np.concatenate([x.reshape(-1, x.shape[-1]) for x in answers])[None].astype(np.float64)
    }
    report = Judged.of(case, [(right, dict(found))]).report(FEATURES, Bounds([case]))
    largest = float(np.abs(right[FEATURES]).max())
    means = f"PyTorch's own mean {report.own_mean_abs:.1e}, ours {report.mean_abs:.1e}"
    numbers = f"errors up to {report.max_abs:.1e} of {largest:.2g} ({means})"
    failed = f"row {list(report.worst_place)} errs {report.worst:.1e}, bound {report.bound:.1e}"
    return Check(f"features of images as transformers has them, {numbers}", report.passed, failed)
