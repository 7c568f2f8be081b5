"""What all runners share: state capacity, calls, saving and restoring states. No torch, no runtime.

Exports copy this file into packages, with the other runners (`still_export.package.programs`).
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.checked import read_manifest
from still_export.runtime.decoding import Decoder, Guess
from still_export.runtime.sampling import RunError, likeliest
from still_graphs.states import AHEAD, ANY, StateTable

NUMPY_TYPES = {
    "float32": np.float32,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""NumPy's type of a state's elements; uint16 for bfloat16, which NumPy lacks."""

SPARE_ROWS = 256
"""Least rows added when a counted state is full; long states grow by an eighth."""


def peak_mb() -> float:
    """Peak memory of this process, MB; NaN on Windows, whose standard library does not tell."""
    if sys.platform == "win32":
        return math.nan
    try:  # ru_maxrss includes the parent's memory before exec
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class Runner(Decoder):
    """A package's model with its state: feed tokens, get logits.

    Subclasses are runtimes. `batch` sequences have seen `length` [B] tokens each; the state has room for `room` tokens each and grows when
    needed.
    """

    folder: Path
    table: StateTable
    batch: int = 0
    room: int = 0
    replays = False
    """Whether `step` and `greedy` replay a captured step."""
    least_rows = 0
    """Least rows of a growing state."""
    counts_rows = False
    """Whether states with counted rows (`Growth.counted`) grow by their rows, instead of reserving the most that tokens could need."""
    reproducible = False
    """Whether a sequence's numbers are independent of the others in a call, and of splits of a prompt at multiples of 64 tokens."""
    guesses = 0
    """Most guesses in one call; 0: no `guess` and `accept`."""
    head: Any = None
    """Guesses tokens ahead (`still_export.runtime.head`); None: the package, or this runner, has none."""
    adapter = ""
    """Digest of the LoRA adapter in use; empty: none."""

    def _open(self, folder: Path) -> None:
        """Read the package's manifest."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.table = StateTable.of(self.manifest)

    def check_files(self) -> None:
        """Raise CheckError if a file that the runtime still reads was changed; runners that have everything in memory check nothing."""

    def use_adapter(self, inputs: Mapping[str, np.ndarray], digest: str) -> None:
        """Add a LoRA adapter to the weights, replacing the one before; empties the states.

        Args:
            inputs: By name, as `still_export.models.read.adapters` makes them; empty: none.
            digest: Of them.

        Raises:
            RunError: This runner takes none.
        """
        if inputs:
            raise RunError(
                "adapters are exchanged by ONNX Runtime's runner alone: --runtime ort, or export with --overlay."
            )

    @property
    def most_rows(self) -> int | None:
        """Most sequences; None: limited by memory."""
        return None

    def start(self, batch: int = 1, tokens: int = 0) -> None:
        """Empty the states; reserve `batch` sequences with room for `tokens` tokens.

        Raises:
            RunError: More sequences or tokens than the package allows, or out of memory.
        """
        self.batch, self.room = batch, 0
        self.length = np.zeros(batch, np.int64)
        counted = {n: int(rule["rows"]) for n, rule in self.table.growths.items() if rule.get("counted")}
        self._counted_rows = counted if self.counts_rows else {}
        self._used_rows = dict(self._counted_rows)  # upper bounds by dimension, without the newest tokens' rows
        self._clear()
        self._resize(tokens)

    def reserve(self, tokens: int | np.ndarray, first: int = 0) -> None:
        """Reserve room for `tokens` more tokens of every sequence, or [R] of the sequences from `first` on; the state stays.

        Raises:
            RunError: They exceed the package's capacity; nothing is changed then.
        """
        seen = self.length if np.ndim(tokens) == 0 else self.length[first : first + np.size(tokens)]
        needed = int((seen + tokens).max())
        self.check_capacity(needed)
        if needed > self.room:
            self._resize(needed)

    def _reserve_counted(self, tokens: int, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Reserve room in counted states for `tokens` more tokens, or for them after `arrays`, states of sequences."""
        if not self._counted_rows:
            return
        used = {} if arrays is None else self._rows_used(arrays)
        most = {n: max(rows, used[n]) if used else rows for n, rows in self._used_rows.items()}
        if any(rows + tokens > self._counted_rows[n] for n, rows in most.items()) and not used:
            most = self._rows_used(self._views())
        self._used_rows = {n: rows + tokens for n, rows in most.items()}
        full = {n: rows for n, rows in self._used_rows.items() if rows > self._counted_rows[n]}
        if full:
            self._counted_rows |= {n: rows + max(SPARE_ROWS, rows // 8) for n, rows in full.items()}
            self._resize(self.room)

    def _rows_used(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Used rows of counted states by dimension, with the newest tokens' rows."""
        found = dict.fromkeys(self._counted_rows, 0)
        for state in self.table:
            if state.growth and (name := state.growth.get("counted")):
                counts, dimension = arrays[f"{name}.{state.layer}"], state.growth["dimension"]
                rows = int(state.growth["rows"]) * (int(counts.max(initial=0)) + 1)
                found[dimension] = max(found[dimension], rows)
        return found

    def rows(self, tokens: int) -> dict[str, int]:
        """Size of every growing dimension for `tokens` tokens, in this runner's states."""
        most = self.table.rows(tokens, self.least_rows)
        return most | {n: min(most[n], rows) for n, rows in self._counted_rows.items()}

    def check_capacity(self, tokens: int) -> None:
        """Raise RunError if `tokens` tokens exceed the package's capacity."""
        if self.table.bounded and tokens > self.table.capacity_tokens:
            raise RunError(
                f"{tokens} tokens exceed this package's capacity of {self.table.capacity_tokens} tokens. Shorten the prompt or "
                "--tokens, or export again with a larger --capacity-tokens."
            )

    def ample(self, tokens: int, spare: int) -> int:
        """Room for `tokens` tokens and `spare` more, within the capacity."""
        return min(tokens + spare, self.table.capacity_tokens) if self.table.bounded else tokens + spare

    @abstractmethod
    def _clear(self) -> None:
        """Drop the state; `_resize` makes an empty one."""

    @abstractmethod
    def _resize(self, tokens: int) -> None:
        """Grow the state to at least `tokens` tokens."""

    @abstractmethod
    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """Run one call on the R sequences from `first` on; the others are unchanged.

        Args:
            input_ids: Integers [R, T], right-padded.
            new_tokens: Number of new tokens of each sequence, [R]; None = T.
            first: Of the sequences.

        Returns:
            Logits float32, [R, 1, V] of each sequence's last new token, or [R, T, V] if the package was exported so.
        """

    def feed_greedy(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """Like `feed`, but returns the likeliest tokens.

        Returns:
            Integers [R, 1], or [R, T] where `feed` returns logits of every token; -1 where they are no finite numbers.
        """
        return likeliest(self.feed(input_ids, new_tokens, first))

    @staticmethod
    def _counts(input_ids: np.ndarray, new_tokens: np.ndarray | None) -> np.ndarray:
        """Number of new tokens of each sequence, [R]."""
        count, tokens = input_ids.shape
        return np.full(count, tokens, np.int64) if new_tokens is None else np.asarray(new_tokens, np.int64)

    def guess(
        self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0, greedy: bool = False
    ) -> np.ndarray:
        """Like `feed`, for at most 1 + `guesses` tokens, but states change only with `accept`.

        Returns:
            Logits float32 [R, T, V], or with `greedy` the likeliest tokens [R, T]. A sequence with n new tokens uses its last n rows.

        Raises:
            RunError: The package was exported without --speculate, this runner accepts no guesses, or they are too many.
        """
        if not self.guesses:
            raise RunError(
                "this runner accepts no guesses: use --runtime ort or trt, and a package exported with --speculate."
            )
        if input_ids.shape[1] > 1 + self.guesses:
            raise RunError(
                f"{input_ids.shape[1] - 1} guesses in one call, and this package takes {self.guesses}. Export with a larger --speculate."
            )
        chunk, counts = self.table.settled, self._counts(input_ids, new_tokens)
        place = self.length[first : first + len(counts)] % chunk
        inner = (place > 0) | (chunk == ANY)  # the first token of a chunk promotes another one
        settled = (counts == 0) | inner & (place + counts <= chunk)
        found = self._guess(input_ids, counts, first, not settled.all(), greedy)
        return likeliest(found) if greedy and found.ndim > 2 else found

    def _guess(self, input_ids: np.ndarray, counts: np.ndarray, first: int, apart: bool, greedy: bool) -> np.ndarray:
        """See `guess`; stores the call in `guessed` and may return logits even with `greedy`."""
        raise NotImplementedError

    def accept(self, accepted: np.ndarray) -> None:
        """Accept the first `accepted` [R] tokens of each sequence in the last `guess`.

        Raises:
            RunError: More than were guessed, or nothing was guessed.
        """
        call = self.guessed
        if call is None:
            raise RunError("nothing was guessed, or another call was made since.")
        counts, new_tokens = np.asarray(accepted, np.int64), call.new_tokens[call.part]
        if counts.shape != new_tokens.shape or (counts < 0).any() or (counts > new_tokens).any():
            raise RunError(
                f"accepted={counts.tolist()} of the {new_tokens.tolist()} tokens of the last guess. Accept at most these."
            )
        all_counts = np.zeros_like(call.new_tokens)
        all_counts[call.part] = counts
        self._apply(call, all_counts)
        self.guessed = None

    def _apply(self, call: Guess, accepted: np.ndarray) -> None:
        """Set states and lengths to those after the first `accepted` [R] tokens of the call."""
        raise NotImplementedError

    def forget(self, sequence: int) -> None:
        """Empty one sequence; room and other sequences are unchanged."""
        self.put(sequence, {}, 0)

    def put(self, sequence: int, arrays: Mapping[str, np.ndarray], length: int) -> None:
        """Set one sequence to `arrays`, which `take` returned after `length` tokens; the others are unchanged.

        Raises:
            RunError: They exceed the package's capacity; nothing is changed then.
        """
        self.check_capacity(length)
        if length > self.room:
            self._resize(length)
        if arrays:
            self._reserve_counted(0, arrays)
        self._fill(sequence, arrays)
        self.length = self.length.copy()  # the caller may keep it
        self.length[sequence] = length

    def take(self, sequence: int = 0) -> dict[str, np.ndarray]:
        """The state of one sequence by name, [1, ...], cut to used rows; the next call may overwrite it."""
        length = int(self.length[sequence])
        arrays = {n: array[sequence : sequence + 1] for n, array in self._views().items()}
        used = self._rows_used(arrays) if self._counted_rows else {}

        def shapes(tokens: int) -> dict[str, tuple[int, ...]]:
            rows = self.table.rows(tokens)
            return self.table.shapes(1, rows | {n: min(rows[n], most) for n, most in used.items()})

        heads = shapes(max(length - 1, 0))  # the first token has no row there
        sizes = shapes(length) | {name: shape for name, shape in heads.items() if name.startswith(AHEAD)}
        return {n: array[tuple(slice(0, size) for size in sizes[n])] for n, array in arrays.items()}

    @abstractmethod
    def _fill(self, sequence: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write `arrays` [1, ...] over one sequence of every state; missing parts become zeros, the empty state."""

    def _views(self) -> dict[str, np.ndarray]:
        """The state tensors by name; may be views."""
        return self.state_arrays()

    def _among_all(self, input_ids: np.ndarray, counts: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        """A call on some sequences as one on all [B]; the others get no new tokens."""
        if len(input_ids) == self.batch:
            return input_ids, counts
        sequences = slice(first, first + len(input_ids))
        ids = np.zeros((self.batch, input_ids.shape[1]), input_ids.dtype)
        new = np.zeros(self.batch, counts.dtype)
        ids[sequences], new[sequences] = input_ids, counts
        return ids, new

    @abstractmethod
    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state tensors by name; bfloat16 as uint16."""

    @abstractmethod
    def _write_states(self, arrays: dict[str, np.ndarray]) -> None:
        """Copy `arrays` into the state's tensors, which have the same shapes and types."""

    def load(self, arrays: dict[str, np.ndarray], length: np.ndarray, more: int = 0) -> None:
        """Continue from `arrays` as `state_arrays` returned them, after `length` [B] tokens, with room for `more`.

        Raises:
            RunError: A tensor is missing or has another shape or dtype.
        """
        for state in self.table:
            array, dtype = arrays.get(state.name), np.dtype(NUMPY_TYPES[state.dtype])
            shape = [d if isinstance(d, int) else "any" for d in state.shape]
            if array is None:
                raise RunError(f"state {state.name} is missing; expected {shape} {dtype}.")
            fits = len(shape) == array.ndim and all(w in ("any", g) for w, g in zip(shape, array.shape, strict=True))
            if not fits or array.dtype != dtype:
                raise RunError(f"state {state.name}: expected {shape} {dtype}, got {list(array.shape)} {array.dtype}.")
        self.start(len(length), int(np.max(length)) + more)
        self._reserve_counted(more, arrays)
        states = {}
        shapes = self.state_shapes()
        for state in self.table:
            target = np.zeros(shapes[state.name], NUMPY_TYPES[state.dtype])
            # Rows after `length` tokens are empty: a smaller room loses nothing.
            part = tuple(slice(0, min(n, m)) for n, m in zip(arrays[state.name].shape, target.shape, strict=True))
            target[part] = arrays[state.name][part]
            states[state.name] = target
        self._write_states(states)
        self.length = np.asarray(length, np.int64).copy()

    def peak_mb(self) -> float:
        """Peak memory of the process, MB; overridden by runtimes with device memory."""
        return peak_mb()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every state with the present room."""
        return self.table.shapes(self.batch, self.rows(self.room))
