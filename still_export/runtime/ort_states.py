"""Values of ONNX Runtime on one device, and the states of a model's sequences in them. Exports copy this file into packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from still_export.runtime.base import NUMPY_TYPES
from still_graphs.states import State, StateTable

ONNX_TYPES = {"float32": 1, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}


class Values:
    """Values on a device, made from NumPy's arrays and read back; bfloat16, which NumPy lacks, is uint16 there."""

    def __init__(self, device: str) -> None:
        from onnxruntime import OrtValue

        self.device, self.kind = device, OrtValue

    def tensor(self, array: np.ndarray, dtype: str) -> Any:
        if dtype != "bfloat16":
            return self.kind.ortvalue_from_numpy(array, self.device, 0)
        host = self.kind.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
        if self.device == "cpu":
            return host
        value = self.kind.ortvalue_from_shape_and_type(list(array.shape), ONNX_TYPES[dtype], self.device, 0)
        value.update_inplace(host)
        return value

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        return self.tensor(np.zeros(shape, NUMPY_TYPES[dtype]), dtype)

    def array(self, value: Any) -> np.ndarray:
        """The numbers of a value, for as long as no call writes them again."""
        if value.data_type() != "tensor(bfloat16)":
            found: np.ndarray = value.numpy()
            return found
        array = np.empty(value.shape(), np.uint16)
        host = self.kind.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES["bfloat16"])  # over the array's memory
        host.update_inplace(value)
        return array

    def floats(self, value: Any) -> np.ndarray:
        """A copy of logits or tokens, as numbers that can be compared."""
        array = self.array(value)
        if array.dtype == np.uint16:  # bfloat16: the upper half of a float32
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.copy()


class States:
    """The states of all sequences. A state that is updated in place has one buffer; the others have two that alternate.

    Attributes:
        past: Buffers that the next call reads, by state.
        spare: Buffers that it writes, of states that are not updated in place.
        apart: Buffers that a call with guesses writes instead, so that earlier states stay.
        turn: Number of the buffers with the current states.
    """

    def __init__(self, table: StateTable, values: Values, native: bool) -> None:
        self.table, self.values, self.native = table, values, native
        self.past: dict[str, Any] = {}

    def in_place(self, state: State) -> bool:
        """Kernels update every state in place; function bodies only those that the manifest lists."""
        return state.in_place or self.native

    def clear(self) -> None:
        self.past = {}

    def resize(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate buffers of these shapes by state; their content stays."""
        past: dict[str, Any] = {}
        for state in self.table:
            shape, current = shapes[state.name], self.past.get(state.name)
            if current is not None and tuple(current.shape()) == shape:
                past[state.name] = current
                continue
            array = np.zeros(shape, NUMPY_TYPES[state.dtype])
            if current is not None:
                previous = self.values.array(current)
                array[tuple(slice(0, n) for n in previous.shape)] = previous
            past[state.name] = self.values.tensor(array, state.dtype)
        self.past, self.turn = past, 0
        self.spare = {s.name: self.values.zeros(shapes[s.name], s.dtype) for s in self.table if not self.in_place(s)}
        self.apart: dict[str, Any] = {}

    def present(self, state: State, apart: bool) -> Any:
        """Where a call writes a state; with `apart` one of guesses."""
        past = self.past[state.name]
        if state.name in self.spare or not (apart and state.apart):
            return self.spare.get(state.name, past)
        if state.name not in self.apart:
            self.apart[state.name] = self.values.zeros(past.shape(), state.dtype)
        return self.apart[state.name]

    def swap(self) -> None:
        """After a call: the states that it did not write in place lie in the spare buffers."""
        self._swap(self.spare, 1)

    def swap_apart(self) -> None:
        """After a call whose guesses are all accepted, use the states in `apart`."""
        self._swap(self.apart, 2)

    def _swap(self, others: dict[str, Any], turn: int) -> None:
        for name, other in others.items():
            self.past[name], others[name] = other, self.past[name]
        self.turn ^= turn if others else 0

    def arrays(self) -> dict[str, np.ndarray]:
        return {s.name: self.values.array(self.past[s.name]) for s in self.table}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        for state in self.table:
            self.past[state.name] = self.values.tensor(arrays[state.name], state.dtype)

    def fill(self, sequence: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrite one sequence with `arrays` [1, ...], and with zeros elsewhere."""
        for state in self.table:
            value, source = self.past[state.name], arrays.get(state.name)
            array = self.values.array(value)
            if source is None or source.shape[1:] != array.shape[1:]:
                array[sequence] = 0
            if source is not None:
                array[sequence][tuple(slice(0, n) for n in source.shape[1:])] = source[0]
            if self.values.device != "cpu" or state.dtype == "bfloat16":  # a copy; elsewhere the value's own memory
                value.update_inplace(self.values.tensor(array, state.dtype))
