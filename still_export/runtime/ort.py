"""Run an exported package with ONNX Runtime. Needs onnxruntime, numpy and, for text, tokenizers; nothing else.

Exports copy this file into the package, where run_ort.py starts it:

  python run_ort.py --prompt "The capital of France is" --tokens 20
  python run_ort.py --chat --temperature 0.7 --top-p 0.9 --seed 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package import telemetry as telemetry
from still_export.package.files import FOLD, HEAD, MODEL, Hashing, OpenFiles
from still_export.runtime.base import NUMPY_TYPES, Runner
from still_export.runtime.decoding import Guess
from still_export.runtime.head import Ahead, Head
from still_export.runtime.ort_bindings import APART, FOLDED, GUESSED, Bindings, replayed
from still_export.runtime.ort_replay import Replays
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
from still_export.runtime.ort_states import States, Values
from still_export.runtime.program import run_program
from still_export.runtime.sampling import RunError, checked_token
from still_export.runtime.speculation import Speculation
from still_graphs.states import AHEAD, IMAGE_INPUTS, LAST_HIDDEN, NEXT_TOKEN

SPARE_TOKENS = 256
"""Least room that is added when a sequence outgrows its state; an eighth more of a long one. Function bodies read every row of some
states, and copies do too, so spare room costs time."""


class OrtModel(Runner):
    """A package's model in ONNX Runtime.

    States that the manifest allows, and with kernels all states, are updated in place. The others alternate between two buffers. So a call
    allocates only its logits.

    Args:
        folder: The package.
        threads: Intra-op threads; 0: OMP_NUM_THREADS, or ONNX Runtime's choice if it is not set.
        provider: "cpu" or "cuda".
        profile: Write ONNX Runtime's profile of each session into the working directory.
        check: Compare the weights with their hashes while loading them.
        replay: Replay single steps from CUDA graphs, which needs the package's CUDA kernels; None: if it has them.
        watched: (graph with further outputs, their names). `seen` then has (lengths before, new tokens, these outputs) of each call.
        bodies: Run function bodies even if the package has kernels.

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
        graph, self.watched = watched or (MODEL, [])
        if self.native is None and keeps_codes(self.manifest, graph):
            keep_codes(options)
        self.seen: list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]] = []
        mapped = [self.folder / name for name in weights]
        self._mapped = OpenFiles(mapped if self.native is None else [*mapped, self.native])
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
        self.fold: Any = self._open_graph(FOLD) if FOLD in self.manifest["files"] else None
        self.head: Head | None = None
        if any(state.name.startswith(AHEAD) for state in self.table):
            head = self.head = Head(self, self._open_graph(HEAD))
            self.speculation = Speculation(self.guesses, lambda tokens, sequence: Ahead(head, tokens, sequence))
        others = [self.head.session] if self.head else []
        check_graph(self.session, self.manifest, self.folder / "manifest.json", *others)
        self.returns_token = any(output.name == NEXT_TOKEN for output in self.session.get_outputs())
        self.values = Values(self.device)
        self.states = States(self.table, self.values, self.native is not None)
        self.bindings, self.captures = Bindings(self), Replays(self)

    def check_files(self) -> None:
        """As of Runner: the weights and the kernels' library are mapped."""
        self._mapped.check()

    def use_adapter(self, inputs: Mapping[str, np.ndarray], digest: str) -> None:
        """As of Runner. The adapter is bound to inputs that are otherwise empty; the weights do not change.

        ONNX Runtime's own adapters (`RunOptions.add_active_adapter`) have no effect on calls with I/O binding.
        """
        dtype = self.manifest["model"]["dtype"]
        if dtype == "bfloat16" and inputs:
            raise RunError(
                "adapters are exchanged in float32 and float16 packages. Export with --overlay, or in another type."
            )
        self.bindings.adapter = {
            n: self.values.tensor(np.ascontiguousarray(x, NUMPY_TYPES[dtype]), dtype) for n, x in inputs.items()
        }
        self.adapter = digest if inputs else ""
        self.start(self.batch or 1)

    counts_rows = True

    def _clear(self) -> None:
        self.states.clear()
        if self.head:
            self.head.clear()

    def _resize(self, tokens: int) -> None:
        self.check_capacity(tokens)
        self.room = self.ample(tokens, max(SPARE_TOKENS, tokens // 8) if 0 < self.room < tokens else 0)
        self.guessed = None
        self.states.resize(self.state_shapes())
        self.bindings.clear()
        self.captures.clear()

    def feed_seen(
        self, input_ids: np.ndarray, inputs: Mapping[str, np.ndarray], new_tokens: np.ndarray | None = None
    ) -> np.ndarray:
        """`feed` for all sequences, with images.

        Args:
            inputs: `inputs_embeds` [B, T, C] replaces tokens of id -1; `position_ids` [3, B, T] are time, height and width, -1: the
                token's own position. Dimensions of 1 are repeated.

        Raises:
            RunError: The package was exported without --vision, the inputs have other names, or not all sequences are fed.
        """
        if not self.manifest.get("vision") or not set(inputs) <= set(IMAGE_INPUTS) or len(input_ids) != self.batch:
            raise RunError(
                f"given {', '.join(inputs) or 'nothing'} for {len(input_ids)} of {self.batch} sequences: packages exported with --vision "
                f"take {' and '.join(IMAGE_INPUTS)}, of all sequences at once."
            )
        types = dict(zip(IMAGE_INPUTS, (self.manifest["model"]["dtype"], "int64"), strict=True))
        self.bindings.image_inputs = {
            n: self.values.tensor(np.ascontiguousarray(x, NUMPY_TYPES[types[n]]), types[n]) for n, x in inputs.items()
        }
        try:
            return self.feed(input_ids, new_tokens)
        finally:
            self.bindings.image_inputs = {}
            self.bindings.clear()  # with the inputs of this call

    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        logits = self._call(input_ids, new_tokens, first, "logits")
        return logits[:, -1:] if self.guesses else logits

    def _guess(self, input_ids: np.ndarray, counts: np.ndarray, first: int, apart: bool, greedy: bool) -> np.ndarray:
        if apart or not self.replays or len(counts) < self.batch:
            return self._call(input_ids, counts, first, APART if apart else GUESSED)
        values = self._replay(input_ids, counts)
        self.guessed = Guess(False, 0, slice(0, self.batch), counts, input_ids.shape[1])
        if self.head:
            self._last_read = input_ids, values[LAST_HIDDEN].numpy()
        return self.values.floats(values[NEXT_TOKEN if greedy and self.returns_token else "logits"])

    def _open_graph(self, graph: str) -> Any:
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
            session.run_with_iobinding(binding, self.captures.options())
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> RunError:
        return RunError(f"ONNX Runtime cannot run {self.folder / MODEL}: {' '.join(str(error).split())}")

    def _apply(self, call: Guess, accepted: np.ndarray) -> None:
        first, count, tokens = call.first, len(accepted), call.tokens
        # If all tokens of all sequences are accepted, the states after the call are valid.
        if call.apart and count == self.batch and np.array_equal(accepted, call.new_tokens):
            self.states.swap_apart()
        elif call.apart:
            binding, inputs = self.bindings.of(first, count, tokens, FOLDED)
            inputs["new_tokens"].update_inplace(accepted)
            inputs["past_length"].update_inplace(np.ascontiguousarray(self.length[first : first + count]))
            self.run_apart(self.fold, binding)
        self._advance(slice(first, first + count), accepted)
        if self.head:
            ids, hidden = self._last_read
            self.head.add(first, ids, accepted, hidden)

    def _advance(self, sequences: slice, counts: np.ndarray) -> None:
        """The sequences have seen so many tokens more, and what was not written in place lies in the other buffers."""
        self.length = self.length.copy()  # callers may hold it
        self.length[sequences] += counts
        self.states.swap()

    def feed_greedy(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """As of Runner; logits stay on the device if the graph returns the likeliest token."""
        if not self.returns_token:
            return super().feed_greedy(input_ids, new_tokens, first)
        return self._call(input_ids, new_tokens, first, NEXT_TOKEN)

    def _call(self, input_ids: np.ndarray, new_tokens: np.ndarray | None, first: int, output: str) -> np.ndarray:
        rows, tokens = input_ids.shape
        counts = self._counts(input_ids, new_tokens)
        self.guessed = None
        self.reserve(counts, first)
        self._reserve_counted(int(counts.max(initial=0)))
        begin = first
        if self.states.spare:  # what is not written in place changes its buffer as a whole
            input_ids, counts = self._among_all(input_ids, counts, first)
            begin = 0
        sequences = slice(begin, begin + len(counts))
        host = {"input_ids": input_ids, "new_tokens": counts, "past_length": self.length[sequences]}
        if self.bindings.image_inputs:
            self.bindings.clear()
        try:
            binding, inputs = self.bindings.of(begin, len(counts), tokens, output)
            for name, array in host.items():
                inputs[name].update_inplace(np.ascontiguousarray(array, np.int64))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise self._failure(error) from error
        self.run_apart(self.session, binding)
        before = 2 + (len(replayed(self.session)) if output == APART else 0)
        others = binding.get_outputs()[before:]
        if count := len(self.watched):
            arrays = [self.values.array(value).copy() for value in others[:count]]
            self.seen.append((host["past_length"].copy(), counts, arrays))
        hidden: Any = others[count].numpy() if self.head else None
        found = self.values.floats(binding.get_outputs()[0])  # a copy: the next run writes into the same memory
        if output in (GUESSED, APART):
            self.guessed = Guess(output == APART, begin, slice(first - begin, first - begin + rows), counts, tokens)
            self._last_read = input_ids, hidden
        else:
            self._advance(sequences, counts)
            if self.head:
                self.head.add(begin, input_ids, counts, hidden)
        return found[first - begin : first - begin + rows]

    def _fill(self, sequence: int, arrays: Mapping[str, np.ndarray]) -> None:
        if self.head:
            self.head.drop(sequence)
        self.states.fill(sequence, arrays)

    def state_arrays(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self._views().items()}

    def _views(self) -> dict[str, np.ndarray]:
        if self.head:
            self.head.catch_up()
        return self.states.arrays()

    def _write_states(self, arrays: dict[str, np.ndarray]) -> None:
        self.states.write(arrays)
        self.guessed = None
        self.bindings.clear()
        self.captures.clear()
        if self.head:
            self.head.clear()

    def step(self, token: np.ndarray) -> np.ndarray:
        """As of Runner; replays a captured step if the session can."""
        if not self.replays or self.feeding.every:
            return super().step(token)
        return self.values.floats(self._stepped(token)["logits"])[:, -1]

    def _stepped(self, token: np.ndarray) -> dict[str, Any]:
        values = self._replay(token[:, None])
        self.length = self.length + 1
        if self.head:
            self.head.add(0, token[:, None], np.ones(self.batch, np.int64), values[LAST_HIDDEN].numpy())
        return values

    def _replay(self, input_ids: np.ndarray, counts: np.ndarray | None = None) -> dict[str, Any]:
        """Replay the captured call over `input_ids` [B, T] of all sequences, `counts` [B] of them new; None: one each."""
        self.guessed = None
        self.reserve(1 if counts is None else counts)
        self._reserve_counted(1 if counts is None else int(counts.max()))
        return self.captures.run(input_ids, counts)

    def greedy(self, token: np.ndarray, count: int) -> Iterator[np.ndarray]:
        """As of Runner. Reserves room for all tokens first, because a state that grows is captured again. Logits stay on the device if the
        graph returns the likeliest token."""
        if self.replays:
            self.reserve(count)
        if self.feeding.every or not (self.replays and self.returns_token):
            yield from super().greedy(token, count)
            return
        for _ in range(count):
            token = self._stepped(token)[NEXT_TOKEN].numpy()[:, -1]
            checked_token(int(token.min()))
            yield token


def main() -> int:
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
