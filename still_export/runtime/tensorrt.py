"""Run a package's TensorRT engine. Needs tensorrt, numpy, the CUDA driver and, for text, tokenizers; nothing else.

Exports copy this file into the package, where run_trt.py starts it:

  python run_trt.py --prompt "The capital of France is" --tokens 20
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from still_export.runtime.base import NUMPY_TYPES, Runner
from still_export.runtime.cuda_driver import Buffer, CudaError
from still_export.runtime.decoding import Guess
from still_export.runtime.program import run_program
from still_export.runtime.sampling import RunError, checked_token
from still_export.runtime.speculation import Speculation
from still_export.runtime.trt_engine import DECODE, DECODE_ROWS, GUESSES, PREFILL, TrtEngine, TrtError
from still_graphs.states import ITEM_BYTES, NEXT_TOKEN, StateTable

LOGIT_TYPES = {"float": np.float32, "half": np.float16, "bf16": np.uint16}
"""NumPy's types by TensorRT's names."""


class TrtModel(TrtEngine, Runner):
    """A package's engine with its state on the GPU: feed tokens, get logits.

    Past and present of every state are one buffer. A decode step and a call of guesses are replayed from CUDA graphs.

    Args:
        folder: The package.
        plugin: Plugin library to use instead of the package's.
        device: CUDA device.
    """

    def __init__(self, folder: Path, plugin: Path | None = None, device: int = 0) -> None:
        super().__init__(folder, plugin, device)
        self.table = StateTable.of(self.manifest)
        grows = any(rule["rows"] and not rule["fixed"] for rule in self.table.growths.values())
        self.table.bounded |= grows  # an engine's profiles end at the capacity
        self.guesses = int(self.manifest.get("speculate", 0))
        self.speculation = Speculation(self.guesses) if self.guesses else None

    replays = True
    least_rows = 1  # dimensions of length 0 crash some versions

    @property
    def prefill_tokens(self) -> int:
        return int(self.entry["prefill_tokens"])

    @property
    def most_rows(self) -> int | None:
        return int(self.entry["batch"])

    @property
    def decode_profile(self) -> str:
        """Profile of calls with one token."""
        return DECODE if self.batch == 1 else DECODE_ROWS

    def peak_mb(self) -> float:
        """Device memory used since this process began, MB, without other processes'."""
        return (self.driver.free_at_start - self.driver.memory()[0]) / 2**20

    def _clear(self) -> None:
        if not 1 <= self.batch <= self.entry["batch"]:
            raise TrtError(
                f"batch {self.batch} is outside 1..{self.entry['batch']} of the engine. Build it again: still-export build "
                f"{self.folder} --batch {self.batch}"
            )
        batch = self.batch
        self.guessed = None
        self._state: dict[str, Buffer] = {}
        self._state_shapes: dict[str, tuple[int, ...]] = {}
        vocabulary = self.manifest["model"]["vocab_size"]
        tokens = max(self.prefill_tokens, 1 + self.guesses)
        rows = self._rows(tokens)
        # Builders without strong typing may give an output another type than the graph does.
        self._logit_type = LOGIT_TYPES[str(self.engine.get_tensor_dtype("logits")).rsplit(".", 1)[-1].lower()]
        sizes = {
            "input_ids": 4 * batch * tokens,
            "new_tokens": 4 * batch,
            "past_length": 4 * batch,
            "present_length": 4 * batch,
            NEXT_TOKEN: 4 * batch * rows,
            "logits": np.dtype(self._logit_type).itemsize * batch * rows * vocabulary,
        }
        try:
            self._io = {name: Buffer(self.driver, size) for name, size in sizes.items()}
        except CudaError as error:
            raise TrtError(f"{error} Use a smaller --batch.") from error
        self._io["past_length"].zero()

    def _rows(self, tokens: int) -> int:
        """Rows of logits in a call of `tokens` tokens."""
        return tokens if self.manifest["model"]["all_logits"] else min(tokens, 1 + self.guesses)

    def _resize(self, tokens: int) -> None:
        """Grow by at least a factor of two where memory allows, so that copies are rare."""
        self.check_capacity(tokens)
        self._drop_guess()
        self._graphs: dict[str, Any] = {}  # by profile
        self._saved: dict[str, Buffer] = {}  # states before a call of guesses
        self._bound: dict[str, tuple[int, ...]] = {}
        try:
            self._grow(self.ample(tokens, max(0, 2 * self.room - tokens)))
        except CudaError:
            try:
                self._grow(tokens)
            except CudaError as error:
                raise TrtError(f"{error} {self._fitting(tokens)}") from error

    def _grow(self, room: int) -> None:
        """Grow every state to `room` tokens; if memory ends, states keep their content, some of them with more room."""
        shapes = self.table.shapes(self.batch, self.table.rows(room, self.least_rows))
        for state in self.table:
            name, item, shape = state.name, ITEM_BYTES[state.dtype], shapes[state.name]
            old, old_shape = self._state.get(name), self._state_shapes.get(name)
            if old is not None and old_shape is not None and all(n <= m for n, m in zip(shape, old_shape, strict=True)):
                continue
            buffer = Buffer(self.driver, math.prod(shape) * item)
            buffer.zero()
            if old is not None and old_shape is not None and state.growth is not None:
                axis = int(state.growth["axis"])
                pitch, old_pitch = (math.prod(x[axis:]) * item for x in (shape, old_shape))
                self.driver.copy_rows(buffer.address, pitch, old.address, old_pitch, math.prod(shape[:axis]))
                self.driver.synchronize()  # before `old` is freed
            self._state[name], self._state_shapes[name] = buffer, shape
        self.room = room

    def _fitting(self, tokens: int) -> str:
        """How much of the state would fit into free memory, for a message."""
        used = sum(buffer.size for buffer in self._state.values())
        free = used + self.driver.memory()[0]
        texts = []
        for count in {self.batch, 1}:
            least, most = 0, tokens
            while least < most:  # the largest room whose state is at most `free`
                middle = (least + most + 1) // 2
                least, most = (middle, most) if self._bytes(count, middle) <= free else (least, middle - 1)
            if least:
                texts.append(f"{least} tokens of {count} sequences" if count > 1 else f"{least} tokens of one sequence")
        return f"The state of {self.batch} sequences for {tokens} tokens does not fit; {' or '.join(texts) or 'none'} would."

    def _bytes(self, batch: int, tokens: int) -> int:
        """State memory of `batch` sequences of `tokens` tokens."""
        return self.table.size_bytes(batch, self.table.rows(tokens, self.least_rows))

    def _bind(self, profile: str, tokens: int) -> Any:
        """The profile's context with shapes and addresses for a call of `tokens` tokens."""
        context = self.contexts[profile]
        key = (self.batch, tokens, self.room, self._io["logits"].address)
        if self._bound.pop(profile, None) == key:
            self._bound[profile] = key
            return context
        shapes = {"input_ids": (self.batch, tokens), "new_tokens": (self.batch,), "past_length": (self.batch,)}
        addresses = {name: buffer.address for name, buffer in self._io.items()}
        for state in self.table:
            shapes[state.past] = self._state_shapes[state.name]
            addresses[state.past] = addresses[state.present] = self._state[state.name].address
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise TrtError(f"the engine does not accept {name} of shape {list(shape)}. {self.again}")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise TrtError(f"the engine has no tensor {name}; it was built from another graph. {self.again}")
        self._bound[profile] = key
        return context

    def _run(self, profile: str, tokens: int) -> None:
        if not self._bind(profile, tokens).execute_async_v3(self.driver.stream.value):
            raise TrtError(f"TensorRT could not run {tokens} tokens; its reason stands above. {self.memory_text()}")

    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """Like Runner; split if the call has more tokens than the engine's prefill profile."""
        (count, tokens), step = input_ids.shape, self.prefill_tokens
        counts = self._counts(input_ids, new_tokens).astype(np.int32)
        self._drop_guess()
        self.reserve(counts, first)
        sequences = slice(first, first + count)
        input_ids, counts = self._among_all(input_ids, counts, first)  # addresses inside a state may not be aligned
        if tokens <= step:
            return self._call(input_ids, counts)[sequences]
        pieces: list[np.ndarray] = []
        for begin in range(0, tokens, step):
            here = np.clip(counts - begin, 0, step).astype(np.int32)
            logits = self._call(input_ids[:, begin : begin + step], here)
            if pieces and not self.manifest["model"]["all_logits"]:
                logits = np.where((here > 0)[:, None, None], logits, pieces.pop())
            pieces.append(logits)
        return np.concatenate(pieces, axis=1)[sequences]

    def _call(self, input_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        tokens = input_ids.shape[1]
        self._write_inputs(input_ids, counts)
        self._run(self.decode_profile if tokens == 1 else PREFILL, tokens)
        self.length = self.length + counts
        rows = self._rows(tokens)
        return self._logits(rows, 1 if self.guesses else rows)

    def _write_inputs(self, input_ids: np.ndarray, counts: np.ndarray) -> None:
        """Write the inputs of a call on all sequences."""
        self._io["input_ids"].write(np.ascontiguousarray(input_ids, np.int32))
        self._io["new_tokens"].write(counts.astype(np.int32))
        self._io["past_length"].write(self.length.astype(np.int32))

    def _logits(self, rows: int, last: int) -> np.ndarray:
        """The `last` of the `rows` logits of each sequence in a call, [B, last, V]; only these leave the device."""
        found = np.empty((self.batch, last, self.manifest["model"]["vocab_size"]), self._logit_type)
        if rows == last:
            return self._floats(self._io["logits"].read(found))
        for sequence, part in enumerate(found):
            self._io["logits"].read(part, part.nbytes // last * (rows * (1 + sequence) - last))
        return self._floats(found)

    def _guess(self, input_ids: np.ndarray, counts: np.ndarray, first: int, apart: bool, greedy: bool) -> np.ndarray:
        part, tokens, most = slice(first, first + len(counts)), input_ids.shape[1], 1 + self.guesses
        self._drop_guess()
        self.reserve(counts, first)
        input_ids, counts = self._among_all(input_ids, counts, first)
        self._write_inputs(np.pad(input_ids, ((0, 0), (0, most - tokens))), counts)
        graph = self._graph(GUESSES, most)
        if apart:
            self._copy_states(back=False)
        graph.launch()
        self.guessed = Guess(apart, 0, part, counts, tokens)
        if greedy:
            return self._io[NEXT_TOKEN].read(np.empty((self.batch, most), np.int32))[part, -tokens:]
        return self._logits(most, tokens)[part]

    def _apply(self, call: Guess, accepted: np.ndarray) -> None:
        """Restore states of fixed size to those before the call, and read the accepted tokens again: engines have no graph that folds
        them."""
        if call.apart and (accepted != call.new_tokens).any():
            self._drop_guess()
            self._io["new_tokens"].write(accepted.astype(np.int32))  # the other inputs are there
            self._graphs[GUESSES].launch()
        self.length = self.length + accepted

    def _drop_guess(self) -> None:
        """Restore the states from before a call of guesses if none was accepted."""
        if self.guessed is not None and self.guessed.apart:
            self._copy_states(back=True)
        self.guessed = None

    def _copy_states(self, back: bool) -> None:
        """Save the states that rejected tokens change, or restore them."""
        for state in self.table:
            if state.apart:
                buffer = self._state[state.name]
                try:
                    saved = self._saved.get(state.name) or self._saved.setdefault(
                        state.name, Buffer(self.driver, buffer.size)
                    )
                except CudaError as error:
                    raise TrtError(
                        f"{error} Guesses over a chunk's end keep a copy of it: use a smaller batch, or --guess none."
                    ) from error
                source, target = (saved, buffer) if back else (buffer, saved)
                self.driver.copy(target.address, source.address, buffer.size)

    def _fill(self, sequence: int, arrays: Mapping[str, np.ndarray]) -> None:
        self._drop_guess()
        for state in self.table:
            shape, incoming = self._state_shapes[state.name][1:], arrays.get(state.name)
            size = math.prod(shape) * ITEM_BYTES[state.dtype]
            if incoming is None:
                if size:
                    self._state[state.name].zero(sequence * size, size)
            elif size:
                padded = np.zeros(shape, NUMPY_TYPES[state.dtype])
                padded[tuple(slice(0, n) for n in incoming.shape[1:])] = incoming[0]
                self._state[state.name].write(padded, sequence * size)
                self.driver.synchronize()  # before `padded` is freed

    def _write_states(self, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            padded = np.zeros(self._state_shapes[name], array.dtype)
            padded[tuple(slice(0, n) for n in array.shape)] = array
            self._state[name].write(padded)
            self.driver.synchronize()  # before `padded` is freed

    def _graph(self, profile: str, tokens: int) -> Any:
        """A captured call; all inputs must be set."""
        # A decode step reads the token that the previous one chose, and writes the next token and the new lengths.
        if profile not in self._graphs:
            counts = self._io["new_tokens"].read(np.empty(self.batch, np.int32))
            # Load modules and tactics before the capture; a call of 0 tokens changes no state.
            self._io["new_tokens"].write(np.zeros(self.batch, np.int32))
            self._run(profile, tokens)
            self.driver.synchronize()

            def call() -> None:
                self._run(profile, tokens)
                if profile != GUESSES:
                    size = 4 * self.batch
                    self.driver.copy(self._io["past_length"].address, self._io["present_length"].address, size)
                    self.driver.copy(self._io["input_ids"].address, self._io[NEXT_TOKEN].address, size)

            self._graphs[profile] = self.driver.capture(call)
            self._io["new_tokens"].write(counts)
        return self._graphs[profile]

    def greedy(self, token: np.ndarray, count: int) -> Iterator[np.ndarray]:
        """Tokens [B] that follow `token` [B] greedily, `count` of them, from replays of a captured step."""
        self._drop_guess()
        self.reserve(count)
        self._write_inputs(token, np.ones(self.batch))
        graph = self._graph(self.decode_profile, 1)
        for _ in range(count):
            graph.launch()
            self.length = self.length + 1
            token = self._io["input_ids"].read(np.empty(self.batch, np.int32))
            checked_token(int(token.min()))
            yield token

    def lengths_on_device(self) -> np.ndarray:
        """Tokens of every sequence, [B] int32, after the last call."""
        return self._io["present_length"].read(np.empty(self.batch, np.int32))

    def state_arrays(self) -> dict[str, np.ndarray]:
        self._drop_guess()
        self.driver.synchronize()
        shapes = ((s, self._state_shapes[s.name]) for s in self.table)
        return {s.name: self._state[s.name].read(np.empty(shape, NUMPY_TYPES[s.dtype])) for s, shape in shapes}

    def _floats(self, logits: np.ndarray) -> np.ndarray:
        """The engine's logits in float32."""
        if self._logit_type == np.uint16:  # bfloat16: the upper half of a float32
            return (logits.astype(np.uint32) << 16).view(np.float32)
        return logits.astype(np.float32)


def main() -> int:
    """Program of run_trt.py."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plugin", type=Path, help="plugin library in the place of the package's")

    def open_runner(options: argparse.Namespace) -> Runner:
        return TrtModel(options.folder, options.plugin)

    here = Path(__file__).absolute().parents[2]  # where its name is, not where a link leads
    return run_program(str(__doc__), here, open_runner, add_options, (RunError, CudaError, MemoryError))
