"""What a runtime is: one record that says what opens packages with it. Everything else asks the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.package.files import MODEL
from still_export.runtime.base import Runner


@dataclass(frozen=True)
class Opening:
    """A package that a runner is to open: provider of ONNX Runtime, threads (0: the runtime's choice), TensorRT's plugin library in the
    place of the package's, whether weights are compared with their hashes, ops whose first outputs a proof asks for; `bodies`: function
    bodies run though there are kernels; `graph`: another one of the package, over the same weights; `tensors`: of the graph, which are
    asked for behind its outputs."""

    folder: Path
    manifest: dict[str, Any]
    provider: str = "cpu"
    threads: int = 0
    plugin: Path | None = None
    check: bool = True
    watch: tuple[str, ...] = ()
    bodies: bool = False
    graph: str = MODEL
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runtime:
    """What runs packages here.

    Args:
        name: As `--runtime` has it.
        title: For people.
        open: The runner of a package; raises RunError where it does not run here.
        repeat: The command that repeats a call with polygraphy.
        polygraphy: The runtime's name there.
        modules: Python modules without which it cannot start.
        providers: That `--provider` may name beside cpu.
        engines: It runs what `still-export build` makes, with counts in int32 and prompts of at most a profile's tokens.
        graphs: It reads ONNX graphs themselves: function bodies, the package's other graphs, and a graph with further outputs.
    """

    name: str
    title: str
    open: Callable[[Opening], Runner]
    repeat: Callable[[Opening], list[str]]
    polygraphy: str
    modules: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    engines: bool = False
    graphs: bool = False
