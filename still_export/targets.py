"""What `verify` compares with PyTorch: a package's runtime as a function of named arrays, and polygraphy's command for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from still_export.package import Package
from still_export.runners.torch import Arrays

Infer = Callable[[Arrays], Arrays]


class OrtTarget:
    """ONNX Runtime, through polygraphy."""

    title = "ONNX Runtime"
    name = "onnxrt"

    def __init__(self, package: Package) -> None:
        self.package = package
        self.least_capacity = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Infer]:
        """The model, ready to run."""
        from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx

        with OnnxrtRunner(SessionFromOnnx(str(self.package.model_path)), name=self.name) as runner:
            yield lambda feed: {name: array.copy() for name, array in runner.infer(feed).items()}

    def saved(self, feeds: list[Arrays], expected: list[Arrays]) -> tuple[list[Arrays], list[Arrays]]:
        """Calls that polygraphy's own command can repeat, with the types that it must pass."""
        return feeds, expected

    def command(self) -> list[str]:
        """Polygraphy's command, without inputs and tolerances."""
        return ["polygraphy", "run", str(self.package.model_path), "--onnxrt"]


class TrtTarget:
    """The package's TensorRT engine, with its state in place; PyTorch stands beside it in float32.

    Args:
        package: With an engine for this machine.
        plugin: Plugin library in the place of the package's.
    """

    title = "TensorRT"
    name = "trt"

    def __init__(self, package: Package, plugin: Path | None = None) -> None:
        self.package, self.plugin = package, plugin
        self.least_capacity = 3 * int(package.manifest["capacity"]["chunk_size"])  # at least a chunk's salient slots
        self.longest = int(package.manifest["prefill_tokens"])
        self.types = {s["name"]: s["dtype"] for s in package.manifest["states"]}

    @contextlib.contextmanager
    def open(self) -> Iterator[Infer]:
        """The engine, ready to run."""
        from still_export.runners.tensorrt import TrtModel

        yield TrtModel(self.package.path, self.plugin).infer

    def saved(self, feeds: list[Arrays], expected: list[Arrays]) -> tuple[list[Arrays], list[Arrays]]:
        """Calls that fit the prefill profile, in the engine's types; longer ones the runner feeds in pieces."""
        kept = [(f, e) for f, e in zip(feeds, expected, strict=True) if f["input_ids"].shape[1] <= self.longest]
        return [self._typed(f) for f, _ in kept], [self._typed(e) for _, e in kept]

    def _typed(self, arrays: Arrays) -> Arrays:
        result = {}
        for name, array in arrays.items():
            state = name.removeprefix("past_").removeprefix("present_")
            kind = np.dtype(np.int32) if array.dtype == np.int64 else np.dtype(self.types.get(state, array.dtype))
            result[name] = array.astype(kind)
        return result

    def command(self) -> list[str]:
        """Polygraphy's command, without inputs and tolerances."""
        folder, manifest = self.package.path, self.package.manifest
        entry = manifest["engines"][0]
        library = manifest["plugins"][entry["tensorrt"].split(".")[0]].replace(".so", "_static.so")
        engine = ["polygraphy", "run", str(folder / entry["file"]), "--model-type", "engine", "--trt"]
        return [*engine, "--plugins", str(self.plugin or folder / library)]
