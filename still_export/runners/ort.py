"""Run an exported package with ONNX Runtime. Needs onnxruntime, numpy and, for text, tokenizers; nothing else.

Exports copy this file into the package, where run_ort.py starts it:

  python run_ort.py --prompt "The capital of France is" --tokens 20
  python run_ort.py --chat --temperature 0.7 --top-p 0.9 --seed 1
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from still_export.runners.base import NUMPY_TYPES, Runner
from still_export.runners.sampling import RunError
from still_export.runners.text import run_program

ONNX_TYPES = {"float32": 1, "int64": 7, "float16": 10, "bfloat16": 16}

SPARE_TOKENS = 256
"""Least room that is added when a sequence outgrows its state; an eighth more of a long one. Function bodies read every row of some
states, and copies do too, so spare room costs time."""


def native_here(manifest: dict[str, Any]) -> bool:
    """Whether the package has a native kernel for this kind of machine."""
    native = manifest.get("native")
    return native is not None and (native["system"], native["machine"]) == (platform.system(), platform.machine())


def open_session(folder: Path, manifest: dict[str, Any], options: Any, provider: str = "cpu") -> Any:
    """An onnxruntime session of the package's model, with its native kernel where it has one for this kind of machine.

    Args:
        options: onnxruntime.SessionOptions, completed here.
        provider: "cpu" or "cuda".

    Raises:
        RunError: The model or the kernel cannot be loaded.
    """
    import onnxruntime

    native = manifest.get("native") if provider == "cpu" else None
    if native and native_here(manifest):
        try:
            options.register_custom_ops_library(str(folder.resolve() / native["library"]))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(
                f"{folder / native['library']} cannot be loaded: {error}. Export the model again, on this machine or without --native."
            ) from error
    elif native:
        made = f"{native['system']} {native['machine']}"
        print(f"the native kernel is for {made}: running without it", file=sys.stderr)
    providers = ["CUDAExecutionProvider"] if provider == "cuda" else []
    path = folder / "model.onnx"
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[*providers, "CPUExecutionProvider"])
    except Exception as error:
        dtype = manifest["model"]["dtype"]
        advice = (
            " Its CPU provider has no bfloat16: use --provider cuda, or export float32." if dtype == "bfloat16" else ""
        )
        raise RunError(f"ONNX Runtime cannot load {path}: {error}.{advice}") from error


class OrtModel(Runner):
    """A package's model in ONNX Runtime.

    States that the manifest allows to be written in place are; the others alternate between two buffers, so a call allocates nothing
    but its logits.

    Args:
        folder: The package.
        threads: Intra-op threads, 0 = ONNX Runtime's choice.
        provider: "cpu" or "cuda".
        profile: Write ONNX Runtime's profile beside the working directory.
    """

    def __init__(self, folder: Path, threads: int = 0, provider: str = "cpu", profile: bool = False) -> None:
        import onnxruntime

        self._open(folder)
        self.device = "cuda" if provider == "cuda" else "cpu"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_profiling = profile
        options.log_severity_level = 3
        providers = ["CUDAExecutionProvider"] if self.device == "cuda" else []
        missing = set(providers) - set(onnxruntime.get_available_providers())
        if missing:
            raise RunError(
                f"this onnxruntime has no {missing.pop()}. Install onnxruntime-gpu, or run with --provider cpu."
            )
        self.session = open_session(self.folder, self.manifest, options, self.device)
        self._value = onnxruntime.OrtValue

    def _clear(self) -> None:
        self._past: dict[str, Any] = {}

    def _resize(self, tokens: int) -> None:
        self.check_capacity(tokens)
        self.room = self.ample(tokens, max(SPARE_TOKENS, tokens // 8) if self.room else 0)
        past: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        shapes = self.state_shapes()
        for state in self.table:
            shape, kept = shapes[state.name], self._past.get(state.name)
            if kept is not None and tuple(kept.shape()) == shape:
                past[state.name] = kept
            else:
                array = np.zeros(shape, NUMPY_TYPES[state.dtype])
                if kept is not None:
                    previous = kept.numpy()
                    array[tuple(slice(0, n) for n in previous.shape)] = previous
                past[state.name] = self._tensor(array, state.dtype)
            if not state.in_place:
                self._spare[state.name] = self._tensor(np.zeros(shape, NUMPY_TYPES[state.dtype]), state.dtype)
        self._past = past
        self._bindings: dict[tuple[int, int], Any] = {}
        self._turn = 0

    def _tensor(self, array: np.ndarray, dtype: str) -> Any:
        if dtype == "bfloat16":
            return self._value.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
        return self._value.ortvalue_from_numpy(array, self.device, 0)

    def _binding(self, tokens: int) -> tuple[Any, dict[str, Any]]:
        """I/O binding for calls of `tokens` tokens in the current turn, with the values that it reads its inputs from."""
        key = (tokens, self._turn)
        if key not in self._bindings:
            for other in [k for k in self._bindings if k[0] not in (tokens, 1)]:
                del self._bindings[other]
            binding = self.session.io_binding()
            shapes = {"input_ids": (self.batch, tokens), "new_tokens": (self.batch,), "past_length": (self.batch,)}
            # On the session's device: a host array would be copied there when it is bound, before it is filled.
            inputs = {
                n: self._value.ortvalue_from_numpy(np.zeros(s, np.int64), self.device, 0) for n, s in shapes.items()
            }
            for name, value in inputs.items():
                binding.bind_ortvalue_input(name, value)
            binding.bind_output("logits", "cpu")
            binding.bind_output("present_length", "cpu")
            for state in self.table:
                past = self._past[state.name]
                binding.bind_ortvalue_input(state.past, past)
                binding.bind_ortvalue_output(state.present, past if state.in_place else self._spare[state.name])
            self._bindings[key] = binding, inputs
        return self._bindings[key]

    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None) -> np.ndarray:
        tokens = input_ids.shape[1]
        counts = np.full(self.batch, tokens, np.int64) if new_tokens is None else np.asarray(new_tokens, np.int64)
        self.reserve(int(counts.max()))
        binding, inputs = self._binding(tokens)
        given = {"input_ids": input_ids, "new_tokens": counts, "past_length": self.length}
        for name, array in given.items():
            inputs[name].update_inplace(np.ascontiguousarray(array, np.int64))
        self.session.run_with_iobinding(binding)
        logits: np.ndarray = binding.get_outputs()[0].numpy().copy()  # the next run writes into the same memory
        self.length = self.length + counts
        for name, spare in self._spare.items():
            self._past[name], self._spare[name] = spare, self._past[name]
        self._turn ^= 1
        return logits

    def state_arrays(self) -> dict[str, np.ndarray]:
        return {s.name: self._past[s.name].numpy().copy() for s in self.table}

    def _write_states(self, arrays: dict[str, np.ndarray]) -> None:
        for state in self.table:
            self._past[state.name] = self._tensor(arrays[state.name], state.dtype)
        self._bindings = {}


def main() -> int:
    """Program of run_ort.py."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--threads", type=int, default=0, help="0 = ONNX Runtime's choice (default)")
        parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")

    def open_runner(options: argparse.Namespace) -> Runner:
        return OrtModel(options.folder, options.threads, options.provider)

    here = Path(__file__).resolve().parents[2]
    return run_program(str(__doc__), here, open_runner, add_options)
