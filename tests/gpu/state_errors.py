"""Errors of a package's logits and states on a GPU beside those of PyTorch in the same type on the same GPU.

  python -m tests.gpu.state_errors PACKAGE ... [--provider cuda] [-o errors.json]

Both run the package's weights over one prompt and single steps; float64 on the CPU is what both err from. PyTorch runs definitions of ops,
without kernels. Exit code 1 where the package's mean error is more than LIMIT times PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from still_export.graph.options import ExportOptions
from still_export.graph.quantization.read import package_model
from still_export.mixers.cache import empty_states
from still_export.models import forward_with_state
from tests.gpu.ort_checks import opened, tokens_of, without_kernels

LIMIT = 2.0
"""Most times PyTorch's mean error: both round at other places."""
FIRST, STEPS = 150, 12
Values = dict[str, np.ndarray]


def of_package(package: Path, provider: str, open_model: Callable[..., Any]) -> Values:
    """Logits of the last step, and states."""
    model = open_model(package, provider)
    tokens = tokens_of(model, FIRST + STEPS)
    for piece in (tokens[:, :FIRST], *np.split(tokens[:, FIRST:], STEPS, axis=1)):
        logits = model.feed(piece)
    return {"logits": np.asarray(logits[0, -1], np.float64), **{k: _wide(v) for k, v in model.state_arrays().items()}}


def of_pytorch(package: Path, dtype: torch.dtype, device: str) -> Values:
    """The same by PyTorch without kernels."""
    manifest = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
    model = package_model(ExportOptions.from_manifest(manifest), package, manifest).to(device, dtype).eval()
    tokens = np.random.default_rng(0).integers(3, manifest["model"]["vocab_size"], (1, FIRST + STEPS))
    states = [
        {name: x.to(device) for name, x in layer.items()}
        for layer in empty_states(model.config, 1, dtype, capacity=FIRST + STEPS)
    ]
    past = torch.zeros(1, dtype=torch.int64, device=device)
    calls = [
        m for name, m in list(sys.modules.items()) if name.startswith("still_kernels") and hasattr(m, "has_kernels")
    ]
    with torch.no_grad():
        patches = [patch.object(module, "has_kernels", lambda *a: False) for module in calls]
        for each in patches:
            each.start()
        try:
            for piece in (tokens[:, :FIRST], *np.split(tokens[:, FIRST:], STEPS, axis=1)):
                ids = torch.from_numpy(np.ascontiguousarray(piece)).to(device)
                new = torch.full((1,), piece.shape[1], dtype=torch.int64, device=device)
                logits, states = forward_with_state(model, ids, new, past, states)
                past = past + new
        finally:
            for each in patches:
                each.stop()
    named = {f"{name}.{i}": x for i, layer in enumerate(states) for name, x in layer.items()}
    return {"logits": _wide(logits[0, -1].cpu()), **{k: _wide(v.cpu()) for k, v in named.items()}}


def _wide(values: Any) -> np.ndarray:
    tensor = torch.as_tensor(values)
    return tensor.double().numpy() if tensor.is_floating_point() else np.asarray(tensor)


def errors(found: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean error over mean size of each floating value that has one."""
    result = {}
    for name, values in exact.items():
        if values.dtype != np.float64 or name not in found:
            continue
        own = found[name][tuple(slice(0, n) for n in values.shape)]
        known = np.isfinite(values)
        if known.any() and (size := float(np.abs(values[known]).mean())) > 0:
            result[name] = float(np.abs(own[known] - values[known]).mean()) / size
    return result


def compare(package: Path, provider: str = "cuda") -> dict[str, Any]:
    """Errors by kernels, by bodies and of PyTorch, and the worst ratio of the package's to PyTorch's."""
    manifest = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, manifest["model"]["dtype"])
    exact = of_pytorch(package, torch.float64, "cpu")
    own = errors(of_pytorch(package, dtype, provider), exact)
    figures: dict[str, Any] = {"pytorch": own}
    for name, open_model in (("kernels", opened), ("bodies", without_kernels)):
        found = errors(of_package(package, provider, open_model), exact)
        ratios = {value: found[value] / max(own[value], torch.finfo(dtype).eps / 64) for value in own}
        worst = max(ratios, key=lambda value: ratios[value])
        figures[name] = {"errors": found, "worst": worst, "ratio": ratios[worst]}
    return figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--provider", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    found = {package.name: compare(package, options.provider) for package in options.packages}
    for name, figures in found.items():
        print(name, *(f"{way} {figures[way]['ratio']:.2f} ({figures[way]['worst']})" for way in ("kernels", "bodies")))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(figures[way]["ratio"] > LIMIT for figures in found.values() for way in ("kernels", "bodies")))


if __name__ == "__main__":
    sys.exit(main())
