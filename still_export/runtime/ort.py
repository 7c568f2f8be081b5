"""Run an exported package with ONNX Runtime. Needs onnxruntime, numpy and, for text, tokenizers; nothing else.

Exports copy this file into the package, where run_ort.py starts it:

  python run_ort.py --prompt "The capital of France is" --tokens 20
  python run_ort.py --chat --temperature 0.7 --top-p 0.9 --seed 1
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.files import FOLD, HEAD, MODEL, Hashing, Held
from still_export.runtime.base import NUMPY_TYPES, Runner
from still_export.runtime.decoding import Guess
from still_export.runtime.head import Ahead, Head
from still_export.runtime.ort_session import (
    MOST_THREADS,
    check_cuda,
    check_graph,
    check_version,
    default_threads,
    keep_codes,
    keeps_codes,
    native_library,
    open_session,
    weight_files,
)
from still_export.runtime.program import run_program
from still_export.runtime.sampling import RunError, checked_token
from still_export.runtime.speculation import Speculation
from still_graphs.states import AHEAD, GIVEN, LAST_HIDDEN, NEXT_TOKEN, REPLAY, State

ONNX_TYPES = {"float32": 1, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}
SPARE_TOKENS = 256
"""Least room that is added when a sequence outgrows its state; an eighth more of a long one. Function bodies read every row of some
states, and copies do too, so spare room costs time."""
GUESSED, APART, FOLDED = "guessed", "apart", "folded"
"""Calls of guesses that leave states as good where some do not hold, those that leave others in a second buffer, and those that take what
holds into the states before."""
ALIGNED = 32
"""Numbers of 8 bytes from input to input, a multiple: kernels read their first ones together."""
NO_GRAPH = -1
"""Number of the CUDA graph of calls that are not captured."""


class OrtModel(Runner):
    """A package's model in ONNX Runtime.

    States that the manifest allows to be written in place are, and with kernels all are; the others alternate between two buffers, so a
    call allocates nothing but its logits.

    Args:
        folder: The package.
        threads: Intra-op threads, 0 = OMP_NUM_THREADS, where that is not set ONNX Runtime's choice.
        provider: "cpu" or "cuda".
        profile: Write ONNX Runtime's profile of each session into the working directory.
        check: Compare the weights with their hashes, beside loading them.
        replay: Replay single steps from CUDA graphs, which needs the package's kernels for CUDA; None: where those are.
        watched: The graph with further outputs, and their names: `seen` has, of each call, lengths before it, new tokens, and those.
        bodies: Function bodies run, though the package has kernels.

    Raises:
        RunError: The package is damaged, or cannot run here.
    """

    def __init__(
        self,
        folder: Path,
        threads: int = 0,
        provider: str = "cpu",
        profile: bool = False,
        check: bool = True,
        replay: bool | None = None,
        watched: tuple[bytes, list[str]] | None = None,
        bodies: bool = False,
    ) -> None:
        import onnxruntime

        check_version(onnxruntime.__version__)
        if not 0 <= threads <= MOST_THREADS:
            raise RunError(f"--threads {threads} is outside 0..{MOST_THREADS}. Choose another number.")
        self._open(folder)
        weights = weight_files(self.folder, self.manifest)
        self.device = "cuda" if provider == "cuda" else "cpu"

        def session_options(graph: str = MODEL) -> Any:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads or default_threads()
            options.log_severity_level = 4  # what is wrong comes as an exception, in one line
            options.enable_profiling = profile
            options.profile_file_prefix = f"onnxruntime_profile_{Path(graph).stem}"
            return options

        options, self._session_options = session_options(), session_options
        if self.device == "cuda":
            check_cuda(onnxruntime.get_available_providers())
        self.native = None if bodies else native_library(self.folder, self.manifest, self.device)
        if self.device == "cuda" and self.native is None:
            # Its ScatterND warns once a node that indices must not repeat. Those of bodies do, with equal values, for padding alone.
            onnxruntime.set_default_logger_severity(3)
        able = self.device == "cuda" and self.native is not None
        self.reproducible = self.device == "cpu" and self.native is not None
        if replay and not able:
            raise RunError("CUDA graphs need --provider cuda and the package's kernels for CUDA (--native --arch).")
        self.replays = able if replay is None else replay
        graph, self._watched = watched or (MODEL, [])
        if self.native is None and keeps_codes(self.manifest, graph):
            keep_codes(options)
        self.seen: list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]] = []
        mapped = [self.folder / name for name in weights]
        self._mapped = Held(mapped if self.native is None else [*mapped, self.native])
        hashing = Hashing(self.folder, self.manifest, weights if check else [])
        try:
            self.session = open_session(
                self.folder, self.manifest, options, self.device, self.native, self.replays, graph
            )
        finally:
            hashing.finish()
        self.guesses = int(self.manifest.get("speculate", 0))
        self.speculation = Speculation(self.guesses) if self.guesses else None
        # Opened here, not in the midst of an answer.
        self._fold: Any = self._open_beside(FOLD) if FOLD in self.manifest["files"] else None
        self.head: Head | None = None
        if any(state.name.startswith(AHEAD) for state in self.table):
            head = self.head = Head(self, self._open_beside(HEAD))
            self.speculation = Speculation(self.guesses, lambda tokens, sequence: Ahead(head, tokens, sequence))
        others = [self.head.session] if self.head else []
        check_graph(self.session, self.manifest, self.folder / "manifest.json", *others)
        self.says_token = any(output.name == NEXT_TOKEN for output in self.session.get_outputs())
        self._value = onnxruntime.OrtValue
        self._run_options = onnxruntime.RunOptions
        self._graphs = 0  # captured so far
        self._adapter: dict[str, Any] = {}  # values of the inputs that an adapter has
        self._given: dict[str, Any] = {}  # of those that images have, for the call that is made

    def check_files(self) -> None:
        """As of Runner: the weights and the kernels' library are mapped."""
        self._mapped.check()

    def use_adapter(self, inputs: Mapping[str, np.ndarray], digest: str) -> None:
        """As of Runner. The weights stay where they are: the adapter is bound to inputs that are empty without one.

        ONNX Runtime's own adapters (`RunOptions.add_active_adapter`) do not reach a call with I/O binding.
        """
        dtype = self.manifest["model"]["dtype"]
        if dtype == "bfloat16" and inputs:
            raise RunError(
                "adapters are exchanged in float32 and float16 packages. Export with --overlay, or in another type."
            )
        self._adapter = {n: self._tensor(np.ascontiguousarray(x, NUMPY_TYPES[dtype]), dtype) for n, x in inputs.items()}
        self.adapter = digest if inputs else ""
        self.start(self.batch or 1)

    def _in_place(self, state: State) -> bool:
        """Kernels take one buffer for past and present of every state; bodies of those that the manifest names."""
        return state.in_place or self.native is not None

    counts_rows = True

    def _clear(self) -> None:
        self._past: dict[str, Any] = {}
        if self.head:
            self.head.clear()

    def _resize(self, tokens: int) -> None:
        self.check_capacity(tokens)
        self.room = self.ample(tokens, max(SPARE_TOKENS, tokens // 8) if 0 < self.room < tokens else 0)
        past: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        self._held: dict[str, Any] = {}  # where a call of guesses leaves other states
        self.guessed = None
        shapes = self.state_shapes()
        for state in self.table:
            shape, kept = shapes[state.name], self._past.get(state.name)
            if kept is not None and tuple(kept.shape()) == shape:
                past[state.name] = kept
            else:
                array = np.zeros(shape, NUMPY_TYPES[state.dtype])
                if kept is not None:
                    previous = self._array(kept)
                    array[tuple(slice(0, n) for n in previous.shape)] = previous
                past[state.name] = self._tensor(array, state.dtype)
            if not self._in_place(state):
                self._spare[state.name] = self._tensor(np.zeros(shape, NUMPY_TYPES[state.dtype]), state.dtype)
        self._past = past
        self._bindings: dict[tuple[int, int, int, int, str], Any] = {}
        self._captured: dict[tuple[int, int], Any] = {}  # by tokens, and by which buffers hold the states
        self._turn = 0

    def _tensor(self, array: np.ndarray, dtype: str) -> Any:
        """A value on the session's device; bfloat16, which numpy lacks, from uint16."""
        if dtype != "bfloat16":
            return self._value.ortvalue_from_numpy(array, self.device, 0)
        host = self._value.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
        if self.device == "cpu":
            return host
        value = self._value.ortvalue_from_shape_and_type(list(array.shape), ONNX_TYPES[dtype], self.device, 0)
        value.update_inplace(host)
        return value

    def _array(self, value: Any) -> np.ndarray:
        """The numbers of a value, for as long as no call writes them again; bfloat16 as uint16."""
        if value.data_type() != "tensor(bfloat16)":
            found: np.ndarray = value.numpy()
            return found
        array = np.empty(value.shape(), np.uint16)
        host = self._value.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES["bfloat16"])  # over the array's memory
        host.update_inplace(value)
        return array

    def _floats(self, value: Any) -> np.ndarray:
        """Logits, or tokens, as numbers that can be compared; a copy."""
        array = self._array(value)
        if array.dtype == np.uint16:  # bfloat16: the upper half of a float32
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.copy()

    @staticmethod
    def _replays(session: Any) -> list[str]:
        """The outputs of a call of guesses that the fold reads."""
        return [value.name for value in session.get_outputs() if value.name.startswith(REPLAY)]

    def _binding(self, first: int, sequences: int, tokens: int, wanted: str) -> tuple[Any, dict[str, Any]]:
        """I/O binding for calls of `tokens` tokens of so many `sequences` from `first` on in this turn that give `wanted`, with the values
        that it reads its inputs from."""
        key = (first, sequences, tokens, self._turn, wanted)
        if key not in self._bindings:
            for other in [k for k in self._bindings if k[2] > 1 + self.guesses and k[2] != tokens]:
                del self._bindings[other]
            session = self._fold if wanted == FOLDED else self.session
            shapes: dict[str, tuple[int, ...]]
            shapes = {"input_ids": (sequences, tokens), "new_tokens": (sequences,), "past_length": (sequences,)}
            if wanted == AHEAD and self.head:
                session, channels = self.head.session, self.manifest["model"]["hidden_size"]
                shapes = {AHEAD + name: shape for name, shape in shapes.items()}
                shapes[f"{AHEAD}hidden"] = sequences, tokens, channels
            binding = session.io_binding()
            # On the session's device: a host array would be copied there when it is bound, before it is filled.
            inputs = {
                n: self._value.ortvalue_from_numpy(np.zeros(s, np.int64 if len(s) < 3 else np.float32), self.device, 0)
                for n, s in shapes.items()
            }
            read = {value.name for value in session.get_inputs()}
            for name, value in (*inputs.items(), *self._adapter.items(), *self._given.items()):
                if wanted != FOLDED or name in read:  # an adapter's inputs have defaults, which a session does not name
                    binding.bind_ortvalue_input(name, value)
            given = [value.name for value in session.get_outputs()]
            replayed = self._replays(session) if wanted == APART else []
            logits = "logits" if wanted in (GUESSED, APART) else wanted
            names = (logits, "present_length", *replayed, *self._watched, LAST_HIDDEN)
            for name in names if wanted != AHEAD else (f"{AHEAD}logits", AHEAD + LAST_HIDDEN):
                if name in given:
                    binding.bind_output(name, self.device if name in replayed else "cpu")
            for state in self.table:
                past, present = self._past[state.name], self._spare.get(state.name)
                if state.past not in read:
                    continue
                if wanted == APART and present is None and state.apart:
                    if state.name not in self._held:
                        self._held[state.name] = self._tensor(
                            np.zeros(past.shape(), NUMPY_TYPES[state.dtype]), state.dtype
                        )
                    present = self._held[state.name]
                present = past if present is None else present
                shape = [sequences, *past.shape()[1:]]
                if sequences < self.batch and past.tensor_size_in_bytes():  # the batch is the first dimension
                    for bind, name, value in (
                        (binding.bind_input, state.past, past),
                        (binding.bind_output, state.present, present),
                    ):
                        address = value.data_ptr() + first * value.tensor_size_in_bytes() // self.batch
                        bind(name, self.device, 0, ONNX_TYPES[state.dtype], shape, address)
                    continue
                if sequences < self.batch:
                    past = present = self._tensor(np.zeros(shape, NUMPY_TYPES[state.dtype]), state.dtype)
                binding.bind_ortvalue_input(state.past, past)
                binding.bind_ortvalue_output(state.present, present)
            self._bindings[key] = binding, inputs
        return self._bindings[key]

    def feed_seen(
        self, input_ids: np.ndarray, given: Mapping[str, np.ndarray], new_tokens: np.ndarray | None = None
    ) -> np.ndarray:
        """As `feed`, of all sequences, with what images stand for: `inputs_embeds` [B, T, C] in the place of tokens whose id is -1,
        `position_ids` [3, B, T] in time, height and width, -1: as tokens are counted. Dimensions of 1 are repeated.

        Raises:
            RunError: The package was exported without --vision, the inputs have other names, or not all sequences are fed.
        """
        if not self.manifest.get("vision") or not set(given) <= set(GIVEN) or len(input_ids) != self.batch:
            raise RunError(
                f"given {', '.join(given) or 'nothing'} for {len(input_ids)} of {self.batch} sequences: packages exported with --vision "
                f"take {' and '.join(GIVEN)}, of all sequences at once."
            )
        types = dict(zip(GIVEN, (self.manifest["model"]["dtype"], "int64"), strict=True))
        self._given = {
            n: self._tensor(np.ascontiguousarray(x, NUMPY_TYPES[types[n]]), types[n]) for n, x in given.items()
        }
        try:
            return self.feed(input_ids, new_tokens)
        finally:
            self._given = {}
            self._bindings = {}  # with the inputs of this call

    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        logits = self._call(input_ids, new_tokens, first, "logits")
        return logits[:, -1:] if self.guesses else logits

    def _guess(self, input_ids: np.ndarray, counts: np.ndarray, first: int, apart: bool, greedy: bool) -> np.ndarray:
        if apart or not self.replays or len(counts) < self.batch:
            return self._call(input_ids, counts, first, APART if apart else GUESSED)
        values = self._replay(input_ids, counts)
        self.guessed = Guess(False, 0, slice(0, self.batch), counts, input_ids.shape[1])
        if self.head:
            self._brought = input_ids, values[LAST_HIDDEN].numpy()
        return self._floats(values[NEXT_TOKEN if greedy and self.says_token else "logits"])

    def _open_beside(self, graph: str) -> Any:
        """Session of another graph over the model's weights, whose hashes were compared."""
        names = weight_files(self.folder, self.manifest, graph)
        assert set(names) <= set(self.manifest["files"])
        options = self._session_options(graph)
        if graph == FOLD:
            options.intra_op_num_threads = 1  # threads of two pools that wait for work take it from each other
        return open_session(self.folder, self.manifest, options, self.device, self.native, graph=graph)

    def run_apart(self, session: Any, binding: Any) -> None:
        """Run a call that no CUDA graph replays.

        Raises:
            RunError: The runtime cannot.
        """
        try:
            session.run_with_iobinding(binding, self._options(NO_GRAPH))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(f"ONNX Runtime cannot run {self.folder / MODEL}: {' '.join(str(error).split())}") from error

    def _hold(self, call: Guess, accepted: np.ndarray) -> None:
        first, count, tokens = call.first, len(accepted), call.tokens
        # Where all tokens of all sequences hold, the states after the call are those.
        if call.apart and count == self.batch and np.array_equal(accepted, call.brought):
            for name, held in self._held.items():
                self._past[name], self._held[name] = held, self._past[name]
            self._turn ^= 2
        elif call.apart:
            guessed, _ = self._bindings[first, count, tokens, self._turn, APART]
            fresh = (first, count, tokens, self._turn, FOLDED) not in self._bindings
            binding, inputs = self._binding(first, count, tokens, FOLDED)
            if fresh:
                replayed = self._replays(self.session)  # behind logits and length
                for name, value in zip(replayed, guessed.get_outputs()[2:], strict=False):
                    binding.bind_ortvalue_input(name, value)
            inputs["new_tokens"].update_inplace(accepted)
            inputs["past_length"].update_inplace(np.ascontiguousarray(self.length[first : first + count]))
            self.run_apart(self._fold, binding)
        self._advance(slice(first, first + count), accepted)
        if self.head:
            ids, hidden = self._brought
            self.head.follow(first, ids, accepted, hidden)

    def _advance(self, sequences: slice, counts: np.ndarray) -> None:
        """The sequences have seen so many tokens more, and what was not written in place lies in the other buffers."""
        self.length = self.length.copy()  # callers may hold it
        self.length[sequences] += counts
        for name, spare in self._spare.items():
            self._past[name], self._spare[name] = spare, self._past[name]
        if self._spare:
            self._turn ^= 1

    def feed_greedy(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """As of Runner; logits stay on the device where the graph says which token is the likeliest."""
        if not self.says_token:
            return super().feed_greedy(input_ids, new_tokens, first)
        return self._call(input_ids, new_tokens, first, NEXT_TOKEN)

    def _call(self, input_ids: np.ndarray, new_tokens: np.ndarray | None, first: int, wanted: str) -> np.ndarray:
        """Run one call; return its output `wanted`."""
        rows, tokens = input_ids.shape
        counts = self._counts(input_ids, new_tokens)
        self.guessed = None
        self.reserve(counts, first)
        self._reserve_counted(int(counts.max(initial=0)))
        begin = first
        if self._spare:  # what is not written in place changes its buffer as a whole
            input_ids, counts = self._among_all(input_ids, counts, first)
            begin = 0
        sequences = slice(begin, begin + len(counts))
        given = {"input_ids": input_ids, "new_tokens": counts, "past_length": self.length[sequences]}
        if self._given:
            self._bindings = {}
        try:
            binding, inputs = self._binding(begin, len(counts), tokens, wanted)
            for name, array in given.items():
                inputs[name].update_inplace(np.ascontiguousarray(array, np.int64))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(f"ONNX Runtime cannot run {self.folder / MODEL}: {' '.join(str(error).split())}") from error
        self.run_apart(self.session, binding)
        before = 2 + (len(self._replays(self.session)) if wanted == APART else 0)
        others = binding.get_outputs()[before:]
        if count := len(self._watched):
            arrays = [self._array(value).copy() for value in others[:count]]
            self.seen.append((given["past_length"].copy(), counts, arrays))
        hidden: Any = others[count].numpy() if self.head else None
        found = self._floats(binding.get_outputs()[0])  # a copy: the next run writes into the same memory
        if wanted in (GUESSED, APART):
            self.guessed = Guess(wanted == APART, begin, slice(first - begin, first - begin + rows), counts, tokens)
            self._brought = input_ids, hidden
        else:
            self._advance(sequences, counts)
            if self.head:
                self.head.follow(begin, input_ids, counts, hidden)
        return found[first - begin : first - begin + rows]

    def _fill(self, sequence: int, arrays: Mapping[str, np.ndarray]) -> None:
        if self.head:
            self.head.drop(sequence)
        for state in self.table:
            value, given = self._past[state.name], arrays.get(state.name)
            array = self._array(value)
            if given is None or given.shape[1:] != array.shape[1:]:
                array[sequence] = 0
            if given is not None:
                array[sequence][tuple(slice(0, n) for n in given.shape[1:])] = given[0]
            if self.device != "cpu" or state.dtype == "bfloat16":  # a copy; elsewhere it is the value's own memory
                value.update_inplace(self._tensor(array, state.dtype))

    def state_arrays(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self._views().items()}

    def _views(self) -> dict[str, np.ndarray]:
        if self.head:
            self.head.catch_up()
        return {s.name: self._array(self._past[s.name]) for s in self.table}

    def _write_states(self, arrays: dict[str, np.ndarray]) -> None:
        for state in self.table:
            self._past[state.name] = self._tensor(arrays[state.name], state.dtype)
        self._bindings, self.guessed = {}, None
        self._captured = {}
        if self.head:
            self.head.clear()

    def _options(self, graph: int) -> Any:
        """Run options with which the CUDA provider captures and replays the graph of this number; None where it has none."""
        if not self.replays:
            return None
        options = self._run_options()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options

    def _capture(self, tokens: int) -> Any:
        """Calls of so many tokens from a CUDA graph, captured for the present buffers: session, binding, inputs to fill in, what sends
        these to the device in one copy, outputs and run options.

        ONNX Runtime runs the call more than once before it captures, so it captures with new_tokens of 0, which leaves states alone.
        """
        if (tokens, self._turn) not in self._captured:
            session = self.session
            binding = session.io_binding()
            shapes = {"input_ids": (self.batch, tokens), "new_tokens": (self.batch,), "past_length": (self.batch,)}
            apart = -(-self.batch * tokens // ALIGNED) * ALIGNED
            host = np.zeros((len(shapes), apart), np.int64)
            rows = zip(shapes.items(), host, strict=True)
            given = {name: row[: math.prod(shape)].reshape(shape) for (name, shape), row in rows}
            given["past_length"][:] = self.length
            device = self._value.ortvalue_from_numpy(host, self.device, 0)
            for place, (name, shape) in enumerate(shapes.items()):
                address = device.data_ptr() + place * host[0].nbytes
                binding.bind_input(name, self.device, 0, ONNX_TYPES["int64"], list(shape), address)
            for name, value in self._adapter.items():
                binding.bind_ortvalue_input(name, value)
            values: dict[str, Any] = {}
            shape, kind = (self.batch, tokens, self.manifest["model"]["vocab_size"]), self._logit_type()
            values["logits"] = self._tensor(np.zeros(shape, NUMPY_TYPES[kind]), kind)
            values["present_length"] = self._value.ortvalue_from_numpy(np.zeros(self.batch, np.int64), self.device, 0)
            if self.head:
                made = np.zeros((self.batch, tokens, self.manifest["model"]["hidden_size"]), np.float32)
                values[LAST_HIDDEN] = self._value.ortvalue_from_numpy(made, self.device, 0)
            if self.says_token:
                chosen = np.zeros((self.batch, tokens), np.int32)
                values[NEXT_TOKEN] = self._value.ortvalue_from_numpy(chosen, self.device, 0)
            for name, value in values.items():
                binding.bind_ortvalue_output(name, value)
            for state in self.table:
                if not state.name.startswith(AHEAD):
                    binding.bind_ortvalue_input(state.past, self._past[state.name])
                    binding.bind_ortvalue_output(state.present, self._past[state.name])
            self._graphs += 1
            options = self._options(self._graphs)
            session.run_with_iobinding(binding, options)
            given["new_tokens"][:] = 1
            send = partial(device.update_inplace, host)
            self._captured[tokens, self._turn] = session, binding, given, send, values, options
        return self._captured[tokens, self._turn]

    def _logit_type(self) -> str:
        """Of the graph's logits."""
        found = next(o.type for o in self.session.get_outputs() if o.name == "logits")
        return {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}[found]

    def step(self, token: np.ndarray) -> np.ndarray:
        """As of Runner; the replay of a captured step where the session replays."""
        if not self.replays or self.feeding.every:
            return super().step(token)
        return self._floats(self._stepped(token)["logits"])[:, -1]

    def _stepped(self, token: np.ndarray) -> dict[str, Any]:
        """What the replay of a step gives, which is read then."""
        values = self._replay(token[:, None])
        self.length = self.length + 1
        if self.head:
            self.head.follow(0, token[:, None], np.ones(self.batch, np.int64), values[LAST_HIDDEN].numpy())
        return values

    def _replay(self, input_ids: np.ndarray, counts: np.ndarray | None = None) -> dict[str, Any]:
        """Replay the captured call over `input_ids` of every sequence, [B, T], of which each brings `counts`, [B]; None: one of one.

        What it gives, on the device.
        """
        self.guessed = None
        self.reserve(1 if counts is None else counts)
        self._reserve_counted(1 if counts is None else int(counts.max()))
        session, binding, given, send, values, options = self._capture(input_ids.shape[1])
        given["input_ids"][:], given["past_length"][:] = input_ids, self.length
        if counts is not None:
            given["new_tokens"][:] = counts
        send()
        session.run_with_iobinding(binding, options)
        found: dict[str, Any] = values
        return found

    def greedy(self, token: np.ndarray, count: int) -> Iterator[np.ndarray]:
        """As of Runner; room for all first, for a state that grows is captured again. Logits stay on the device where the graph says which
        token is the likeliest."""
        if self.replays:
            self.reserve(count)
        if self.feeding.every or not (self.replays and self.says_token):
            yield from super().greedy(token, count)
            return
        for _ in range(count):
            token = self._stepped(token)[NEXT_TOKEN].numpy()[:, -1]
            checked_token(int(token.min()))
            yield token


def main() -> int:
    """Program of run_ort.py."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--threads", type=int, default=0, help="0 = OMP_NUM_THREADS, or ONNX Runtime's choice (default)"
        )
        parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
        parser.add_argument("--no-check", action="store_true", help="do not compare the weights with their hashes")

    def open_runner(options: argparse.Namespace) -> Runner:
        if options.no_check:
            print("--no-check: damaged weights go unnoticed", file=sys.stderr)
        return OrtModel(options.folder, options.threads, options.provider, check=not options.no_check)

    here = Path(__file__).absolute().parents[2]  # where its name is, not where a link leads
    return run_program(str(__doc__), here, open_runner, add_options)
