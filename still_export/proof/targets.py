"""What `verify` compares with PyTorch: a package's runtime as a function of named arrays, and polygraphy's command for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from still_export.package.calls import Arrays, last_logits, typed_states
from still_export.package.folder import MANIFEST, Package, as_package_errors
from still_export.proof.cases import chain
from still_export.runners.ort import check_graph, native_library, open_session


@dataclass(frozen=True)
class Check:
    """Something that must hold of a runtime by itself."""

    name: str
    passed: bool
    detail: str = ""


class Session(Protocol):
    """A package's runtime, ready to run."""

    def infer(self, feed: Arrays) -> Arrays:
        """Outputs of one call whose state is given."""

    def decode(self, start: Arrays, steps: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Arrays]:
        """Logits [B, 1 + steps, V] after the call `start` and after every step, and the last outputs; the state is the runtime's own."""

    def checks(self, start: Arrays, count: int) -> list[Check]:
        """What the runtime promises beyond single calls, shown on `count` tokens after `start`."""


class OrtSession:
    """ONNX Runtime, through polygraphy."""

    def __init__(self, runner: Any, manifest: dict[str, Any]) -> None:
        self.runner = runner
        self.manifest = manifest

    def infer(self, feed: Arrays) -> Arrays:
        """Outputs of one call whose state is given, in whatever float type."""
        outputs = self.runner.infer(typed_states(feed, self.manifest))
        return {name: array.copy() for name, array in outputs.items()}

    def decode(self, start: Arrays, steps: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Arrays]:
        """Each call starts from the outputs of the one before."""
        return chain(self.infer, start, steps)

    def checks(self, start: Arrays, count: int) -> list[Check]:
        """None: there is no other way through this runtime."""
        return []


class OrtTarget:
    """ONNX Runtime, through polygraphy."""

    name = "onnxrt"

    def __init__(self, package: Package) -> None:
        self.package = package
        with as_package_errors():
            self.native = native_library(package.path, package.manifest)
        self.title = "ONNX Runtime" + (" with the native kernel" if self.native else "")

    @contextlib.contextmanager
    def open(self) -> Iterator[Session]:
        """The model, ready to run, with what `run` loads: a native kernel is verified where the package has one for this machine."""
        import onnxruntime
        from polygraphy.backend.onnxrt import OnnxrtRunner

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = open_session(self.package.path, self.package.manifest, options, native=self.native)
        check_graph(session, self.package.manifest, self.package.path / MANIFEST)
        with OnnxrtRunner(session, name=self.name) as runner:
            yield OrtSession(runner, self.package.manifest)

    def saved(self, feeds: list[Arrays], expected: list[Arrays]) -> tuple[list[Arrays], list[Arrays]]:
        """Calls that polygraphy's own command can repeat, with the types that it must pass."""
        manifest = self.package.manifest
        return [typed_states(f, manifest) for f in feeds], [typed_states(e, manifest) for e in expected]

    def command(self) -> list[str]:
        """Polygraphy's command, without inputs and tolerances; it loads no custom op library, so it runs the function bodies."""
        return ["polygraphy", "run", str(self.package.model_path), "--onnxrt"]


class TrtSession:
    """The package's own runner: prompts in pieces, the state in place on the device, steps replayed from a CUDA graph."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def infer(self, feed: Arrays) -> Arrays:
        """Outputs of one call whose state is given."""
        self.model.load(feed)
        logits = self.model.feed(feed["input_ids"], feed["new_tokens"])
        return self._outputs(feed, logits)

    def decode(self, start: Arrays, steps: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Arrays]:
        """The state stays where it is; only tokens and logits travel."""
        self.model.load(start)
        first = self.model.floats(self.model.feed(start["input_ids"], start["new_tokens"]))
        logits = [last_logits(first, start["new_tokens"])]
        logits += [self.model.floats(self.model.feed(token)) for token in steps]
        return np.concatenate(logits, axis=1), self._outputs(start, logits[-1])

    def _outputs(self, feed: Arrays, logits: np.ndarray) -> Arrays:
        outputs = {"logits": self.model.floats(logits), "present_length": self.model.length}
        for name, array in self.model.state_arrays().items():
            # The runner may have more room than was given.
            outputs[f"present_{name}"] = array[tuple(slice(0, n) for n in feed[f"past_{name}"].shape)].copy()
        return outputs

    def checks(self, start: Arrays, count: int) -> list[Check]:
        """Steps replayed from a CUDA graph, captured again when the state grows half way, equal single steps bit for bit."""
        halves = [count - count // 2, count // 2]
        replayed = self._begin(start)
        tokens = [replayed]
        for part in halves:
            self._outgrow()
            tokens += [t.copy() for t in self.model.greedy(tokens[-1], part)]
        kept = self.model.state_arrays()
        self._begin(start)
        wrong, done = 0, 0
        for part in halves:
            self._outgrow()
            self.model.reserve(part)
            for _ in range(part):
                logits = self.model.floats(self.model.feed(tokens[done][:, None]))[:, -1]
                done += 1
                chosen = np.take_along_axis(logits, tokens[done][:, None].astype(np.int64), axis=1)[:, 0]
                wrong += int((chosen < logits.max(-1)).sum())  # of equal logits either is likeliest
        single = self.model.state_arrays()
        differing = [name for name, array in kept.items() if not np.array_equal(array, single[name], equal_nan=True)]
        detail = f"{wrong} tokens and the states {', '.join(differing) or 'none'} differ"
        name = f"{count} replayed steps of {len(tokens[0])} rows equal single steps"
        return [Check(name, not wrong and not differing, detail)]

    def _outgrow(self) -> None:
        """Move the state to more room, where the capacity allows it."""
        capacity = self.model.manifest["capacity"]
        if capacity["overflow"] != "error" or self.model.room < capacity["capacity_tokens"]:
            self.model.reserve(self.model.room + 1 - int(self.model.length.max()))

    def _begin(self, start: Arrays) -> np.ndarray:
        """Feed `start` with the least room; the likeliest token of each row, [B]."""
        self.model.start(start["input_ids"].shape[0])
        logits = self.model.floats(self.model.feed(start["input_ids"], start["new_tokens"]))
        return last_logits(logits, start["new_tokens"])[:, 0].argmax(-1).astype(np.int32)


class TrtTarget:
    """The package's TensorRT engine, with its state in place.

    Args:
        package: With an engine for this machine.
        plugin: Plugin library in the place of the package's.
    """

    title = "TensorRT"
    name = "trt"

    def __init__(self, package: Package, plugin: Path | None = None) -> None:
        self.package, self.plugin = package, plugin
        self.longest = int(package.manifest["engines"][0]["prefill_tokens"])

    @contextlib.contextmanager
    def open(self) -> Iterator[Session]:
        """The engine, ready to run."""
        from still_export.runners.tensorrt import TrtModel

        yield TrtSession(TrtModel(self.package.path, self.plugin))

    def saved(self, feeds: list[Arrays], expected: list[Arrays]) -> tuple[list[Arrays], list[Arrays]]:
        """Calls that fit the prefill profile, in the engine's types; longer ones the runner feeds in pieces."""
        kept = [(f, e) for f, e in zip(feeds, expected, strict=True) if f["input_ids"].shape[1] <= self.longest]
        return [self._typed(f) for f, _ in kept], [self._typed(e) for _, e in kept]

    def _typed(self, arrays: Arrays) -> Arrays:
        typed = typed_states(arrays, self.package.manifest)
        return {name: array.astype(np.int32) if array.dtype == np.int64 else array for name, array in typed.items()}

    def command(self) -> list[str]:
        """Polygraphy's command, without inputs and tolerances."""
        folder, manifest = self.package.path, self.package.manifest
        entry = manifest["engines"][0]
        library = self.plugin or folder / manifest["plugins"][entry["tensorrt"].split(".")[0]]
        # Polygraphy only opens libraries: the variant that registers itself.
        itself = library.with_name(f"{library.stem.removesuffix('_static')}_static.so")
        engine = ["polygraphy", "run", str(folder / entry["file"]), "--model-type", "engine", "--trt"]
        return [*engine, "--plugins", str(itself)]
