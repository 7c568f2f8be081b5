"""Run decoder graphs of other exporters with ONNX Runtime: calls, and states between them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import PackageError, UnsupportedError
from still_export.package.refusals import first_line

GENAI_CONFIG = "genai_config.json"
PAIRS = (("prefill.onnx", "decode.onnx"), ("decoder_model.onnx", "decoder_with_past_model.onnx"))
"""File names of separate graphs for prompts and steps."""
FILES = ("model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx", "decoder.onnx")
"""File names of a single decoder graph."""

TOKENS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
KEEP, BRANCH = "num_logits_to_keep", "use_cache_branch"
"""Inputs of transformers.js's and optimum's graphs: how many tokens get logits, and whether there are past states."""
TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
ROWS = 3
"""Rows of positions in models that also read images; equal for text."""


@dataclass(frozen=True)
class ForeignState:
    """A state: input `past`, output `present`.

    Args:
        name: What both names share: "layers.0.key".
        shape: Of an empty sequence, without the first dimension, which is the batch.
        grows: It has a dimension of tokens.
    """

    name: str
    past: str
    present: str
    dtype: Any
    shape: tuple[int, ...]
    grows: bool


def shared_name(name: str) -> str:
    """The name of a state without the words for past and present."""
    return re.sub(r"(^|(?<=[._]))(past_key_values|present_key_values|past|present|input|output|cache)[._]?", "", name)


class Graph:
    """One ONNX file, and the meaning of its inputs.

    Args:
        path: The ONNX file.
        head_size: Of a dimension that neither grows nor is the batch and has only a name.

    Raises:
        PackageError: ONNX Runtime cannot read it.
        UnsupportedError: It has inputs of unknown meaning or type, or a state that no output goes on from.
    """

    def __init__(self, path: Path, head_size: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise PackageError(f"{path}: ONNX Runtime cannot read it: {first_line(error)}") from error
        self.path = path
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.outputs = {o.name: o for o in self.session.get_outputs()}
        if TOKENS not in self.inputs or "logits" not in self.outputs:
            raise UnsupportedError(
                f"{path} is no decoder: it has no {TOKENS} and logits, but {', '.join(self.inputs)}."
            )
        if odd := [f"{i.name} ({i.type})" for i in self.inputs.values() if i.type not in TYPES]:
            raise UnsupportedError(
                f"{path} has inputs of a type that NumPy has not: {', '.join(odd)}. Export it in float32 or float16."
            )
        self.presents = {shared_name(name): name for name in self.outputs if name != "logits"}
        self.states: list[ForeignState] = []
        unknown = []
        for name in self.inputs:
            if name in (TOKENS, MASK, POSITIONS, KEEP, BRANCH):
                continue
            present = self.presents.get(shared_name(name))
            if present is None or len(self.inputs[name].shape) != len(self.outputs[present].shape):
                unknown.append(name)
            else:
                self.states.append(self._state(name, present, head_size))
        if unknown:
            raise UnsupportedError(
                f"{path} has inputs that are neither {TOKENS}, {MASK}, {POSITIONS} nor a past with its present: {', '.join(unknown)}."
            )

    def _state(self, past: str, present: str, head_size: int) -> ForeignState:
        """The state in `past` and `present`; its growing dimension has different names in the two."""
        past_value, present_value = self.inputs[past], self.outputs[present]
        shape, grows = [], False
        for axis, (size, after) in enumerate(zip(past_value.shape, present_value.shape, strict=True)):
            if axis == 0:
                continue
            if isinstance(size, int):
                shape.append(size)
            elif size != after:
                shape.append(0)
                grows = True
            else:
                shape.append(head_size)
        return ForeignState(shared_name(past), past, present, TYPES[past_value.type], tuple(shape), grows)

    def one_token(self) -> bool:
        """Whether its calls have one token each."""
        return self.inputs[TOKENS].shape[1] == 1


class ForeignModel:
    """A decoder of another exporter.

    Args:
        path: A folder with genai_config.json, with a graph named as optimum-onnx and transformers.exporters name it, or an ONNX file.
        head_size: Of the model, unless genai_config.json has one.

    Raises:
        PackageError: Nothing is there, or it cannot be read.
        UnsupportedError: It has no states, or unknown inputs.
    """

    def __init__(self, path: Path, head_size: int) -> None:
        files = graph_files(path)
        config = _genai_config(path)
        head_size = config.get("head_size", head_size)
        self.first, self.next = (Graph(file, head_size) for file in (files[0], files[-1]))
        if not self.next.states:
            raise UnsupportedError(
                f"{files[-1]} has no past and present states, so each call forgets the conversation: export the decoder "
                "with its cache."
            )
        self.states = self.next.states
        self.apart = len(files) > 1
        self.batch = 0
        self.arrays: dict[str, np.ndarray] = {}
        self.mask = np.zeros((0, 0), np.int64)

    def takes(self, name: str) -> bool:
        """Whether every call has an input of that name."""
        return name in self.first.inputs and name in self.next.inputs

    def start(self, batch: int) -> None:
        """Empty the states."""
        self.batch, self.arrays, self.mask = batch, {}, np.zeros((batch, 0), np.int64)

    def feed(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Logits [B, T, vocabulary] of more tokens [B, T].

        Args:
            mask: [B, T], 0 for padding; None: there is none.

        Raises:
            UnsupportedError: The call does not fit the graph, or ONNX Runtime refuses it.
        """
        graph = self.next if self.arrays or not self.apart else self.first
        self.mask = np.concatenate([self.mask, np.ones_like(tokens) if mask is None else mask], 1)
        positions = (self.mask.cumsum(1) - 1).clip(0)[:, -tokens.shape[1] :]
        inputs: dict[str, np.ndarray] = {TOKENS: tokens}
        if MASK in graph.inputs:
            inputs[MASK] = self.mask
        if POSITIONS in graph.inputs:
            wide = len(graph.inputs[POSITIONS].shape) == ROWS
            inputs[POSITIONS] = np.stack([positions] * ROWS) if wide else positions
        if KEEP in graph.inputs:
            inputs[KEEP] = np.full(graph.inputs[KEEP].shape, tokens.shape[1])
        if BRANCH in graph.inputs:
            inputs[BRANCH] = np.array([bool(self.arrays)])
        for state in graph.states:
            empty = np.zeros((self.batch, *state.shape), state.dtype)
            inputs[state.past] = self.arrays.get(state.name, empty)
        inputs = {name: x.astype(TYPES[graph.inputs[name].type], copy=False) for name, x in inputs.items()}
        names = ["logits", *graph.presents.values()]
        try:
            found = dict(zip(names, graph.session.run(names, inputs), strict=True))
        except Exception as error:  # what ONNX Runtime raises has no common class
            raise UnsupportedError(
                f"{graph.path.name} refuses {list(tokens.shape)} tokens: {_reason(error)}"
            ) from error
        self.arrays = self.arrays | {name: found[present] for name, present in graph.presents.items()}
        logits: np.ndarray = found["logits"]
        return logits.astype(np.float32)


def graph_files(path: Path) -> list[Path]:
    """The graph of a decoder, or those for prompts and for steps.

    Raises:
        PackageError: There is none.
    """
    if path.is_file():
        return [path]
    if name := _genai_config(path).get("filename"):
        return [path / name]
    for folder in (path, path / "onnx"):
        for pair in PAIRS:
            if all((folder / name).is_file() for name in pair):
                return [folder / name for name in pair]
        for name in FILES:
            if (folder / name).is_file():
                return [folder / name]
    found = sorted(path.glob("*.onnx"))
    if len(found) == 1:
        return found
    several = f"has {len(found)} graphs" if found else "has no ONNX graph"
    raise PackageError(f"{path} {several}: name the decoder's file, or its folder with {GENAI_CONFIG} or {FILES[0]}.")


def _genai_config(path: Path) -> Mapping[str, Any]:
    """The decoder's entry in a folder's genai_config.json."""
    file = path / GENAI_CONFIG
    if not file.is_file():
        return {}
    try:
        decoder = json.loads(file.read_text(encoding="utf-8"))["model"]["decoder"]
        return {name: decoder[name] for name in ("filename", "head_size") if name in decoder}
    except (ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{file} does not say what the decoder is: {error!r}.") from error


def _reason(error: Exception) -> str:
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", first_line(error))[:200]
