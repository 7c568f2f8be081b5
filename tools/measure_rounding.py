#!/usr/bin/env python3
"""How far PyTorch's own half precision is off float32 on prompts of one token, by output: what `verify` bounds short prompts with.

  PYTHONPATH=.:kernels:graphs python tools/measure_rounding.py PACKAGE --prompts 192

PACKAGE is a float16 package whose model still lies where it was exported from. Columns: the largest median error of a head (of the logits,
of a row), at 50, 90 and 99 % of the prompts and at the worst.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from still_export.cli.verify import _options
from still_export.graph.quantization.read import held_model
from still_export.package.calls import next_feed
from still_export.package.folder import open_package
from still_export.proof.cases import part_medians
from still_export.runtime.torch import TorchModel

HELD = ("logits", "present_window_key.", "present_window_value.")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--prompts", type=int, default=192)
    options = parser.parse_args()
    package = open_package(options.package)
    manifest = package.manifest
    prompts = np.random.default_rng(5).integers(0, manifest["model"]["vocab_size"], (options.prompts, 1))
    sides = []
    for dtype in ("float32", manifest["model"]["dtype"]):
        model = TorchModel(manifest, held_model(_options(package, None, dtype), package.path, manifest))
        sides.append(model.infer({**next_feed({}, prompts), **model.empty_feed(options.prompts, 1)}))
    for name in (n for n in sides[0] if n.startswith(HELD)):
        medians = np.reshape(part_medians(*(side[name] for side in sides)), (options.prompts, -1)).max(1)
        print(f"{name:28}" + "".join(f"{x:10.1e}" for x in np.quantile(medians, [0.5, 0.9, 0.99, 1])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
