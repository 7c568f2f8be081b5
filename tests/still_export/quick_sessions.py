"""ONNX Runtime without making the same session again: a tiny package takes it half a second, and many tests open the same one.

Two sessions are one if the graph, the files beside it, the options, the providers and the environment of kernels are the same. A session
keeps nothing between calls. One that profiles, writes its optimized graph or has values of its own is made each time.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

MOST = 200
"""Sessions that a process keeps."""
PLAIN = (
    "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order", "graph_optimization_level",
    "inter_op_num_threads", "intra_op_num_threads", "log_severity_level", "log_verbosity_level", "use_deterministic_compute",
)  # fmt: skip
ENVIRONMENT = ("STILL_", "ORT_", "ALLOW_", "CUDA_")
SAYS = ("add_session_config_entry", "register_custom_ops_library", "add_free_dimension_override_by_name")
"""Methods of options that are written down; what another one does is not known."""


def install() -> None:
    """From now on, in this process; `__wrapped__` of `InferenceSession.__init__` is ONNX Runtime's own."""
    import onnxruntime

    made: OrderedDict[str, dict[str, Any]] = OrderedDict()
    start = onnxruntime.InferenceSession.__init__

    @functools.wraps(start)
    def started(
        self: Any, graph: Any, sess_options: Any = None, providers: Any = None, *more: Any, **named: Any
    ) -> None:
        key = None if more or named else _key(graph, sess_options, providers)
        if key is None or key not in made:
            start(self, graph, sess_options, providers, *more, **named)
            if key is not None:
                made[key] = dict(vars(self))
        else:
            vars(self).update(made[key])
        if key is not None:
            made.move_to_end(key)
        if len(made) > MOST:
            made.popitem(last=False)

    onnxruntime.InferenceSession.__init__ = started
    onnxruntime.SessionOptions = _recording(onnxruntime.SessionOptions)


def _recording(kind: Any) -> Any:
    """A class of options that write down what is said to them."""

    class SessionOptions(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.said: list[Any] | None = []

    def method(name: str) -> Any:
        own = getattr(kind, name)

        @functools.wraps(own)
        def says(self: Any, *given: Any) -> Any:
            if name not in SAYS:
                self.said = None
            elif self.said is not None:
                self.said.append(
                    (name, *map(str, given), *(_stamp(Path(x)) for x in map(str, given) if os.path.isfile(x)))
                )
            return own(self, *given)

        return says

    for name in vars(kind):
        if name.startswith(("add_", "register_")):
            setattr(SessionOptions, name, method(name))
    return SessionOptions


def _key(graph: Any, options: Any, providers: Any) -> str | None:
    said = getattr(options, "said", None if options is not None else [])
    if said is None or (options is not None and (options.enable_profiling or options.optimized_model_filepath)):
        return None
    plain = [repr(getattr(options, name)) for name in PLAIN] if options is not None else []
    around = sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT))
    if isinstance(graph, bytes):
        found: list[Any] = [hashlib.sha256(graph).hexdigest()]
        folders = [Path(entry[2]) for entry in said if entry[1].endswith("file_folder_path")]
    elif (path := Path(graph)).is_file():
        found, folders = [hashlib.sha256(path.read_bytes()).hexdigest()], [path.parent]
    else:
        return None
    found += [_stamp(file) for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    return repr((found, said, plain, providers, around))


def _stamp(path: Path) -> tuple[Any, ...]:
    state = path.stat()
    return path.name, state.st_size, state.st_mtime_ns, state.st_ino
