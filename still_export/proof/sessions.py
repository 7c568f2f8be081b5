"""What `verify` compares with PyTorch: the runner that users run, call by call, and polygraphy's command for the same."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from still_export.loading.runtimes import Opening, open_runner, runtime_named
from still_export.package.calls import Arrays, image_inputs, last_logits, typed_states
from still_export.package.files import MODEL
from still_export.package.folder import Package
from still_export.proof.verdict import Check
from still_export.runtime.base import NUMPY_TYPES, Runner
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import RunError
from still_export.runtime.snapshot import Snapshot, digest
from still_graphs.states import StateTable

MORE_ROWS = 3
"""Rows without a sequence when states go on in other rows."""
WIDENED = "widened"
"""Entry of a manifest that describes a graph in float32: the type of the stored weights."""


def widened_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a package's graph in float32."""
    found = copy.deepcopy(manifest)
    found[WIDENED] = found["model"]["dtype"]
    found["model"]["dtype"] = found["config"]["dtype"] = "float32"
    for state in found["states"]:
        state["dtype"] = {"float16": "float32", "bfloat16": "float32"}.get(state["dtype"], state["dtype"])
    if found["still"].get("cache") in ("float16", "bfloat16"):
        found["config"]["still"] = {**(found["config"].get("still") or {}), "cache": None}
    return found


class Session:
    """A package's runner for calls from any state, with states that grow in place as in use.

    Args:
        model: The runner.
    """

    def __init__(self, model: Runner) -> None:
        self.model = model
        self._shapes: dict[str, tuple[int, ...]] = {}

    def seen(self) -> list[np.ndarray]:
        """Watched values since the last call, in the graph's order, by token [B, N, ..]; -1: not seen. A later value replaces an earlier
        one."""
        calls, self.model.seen = getattr(self.model, "seen", []), []  # type: ignore[attr-defined]
        most = max((int((past + new).max(initial=0)) for past, new, _ in calls), default=0)
        rows = max((len(past) for past, _, _ in calls), default=0)  # a runtime may try a call of one token before
        found: list[np.ndarray] = []
        for past, new, outputs in calls:
            for number, output in enumerate(outputs):
                if output.ndim > 3:  # of several heads: numbered like the layer's `margins`
                    heads = output.shape[2]
                    output = np.where(output < 0, -1, output * heads + np.arange(heads, dtype=np.int32)[:, None])
                    output = output.reshape(*output.shape[:2], -1)
                if number == len(found):
                    found.append(np.full((rows, most, *output.shape[2:]), -1, np.int32))
                for row, (begin, count) in enumerate(zip(past, new, strict=True)):
                    found[number][row, begin : begin + count] = output[row, :count]
        return found

    def load(self, feed: Arrays) -> None:
        """Load the state in `feed`, in any float type, with room for its tokens."""
        table = self.model.table
        empty = table.shapes(len(feed["past_length"]), dict.fromkeys(table.growths, 0))
        arrays = {s.name: feed.get(s.past, np.zeros(empty[s.name])) for s in table}  # a head is called by itself
        states = {s.name: arrays[s.name].astype(NUMPY_TYPES[s.dtype], copy=False) for s in table}
        self.model.load(states, feed["past_length"], int(np.max(feed["new_tokens"])))
        self._shapes = {s.name: feed[s.past].shape for s in table if s.past in feed}

    def infer(self, feed: Arrays) -> Arrays:
        """Outputs of one call from the state in `feed`."""
        self.load(feed)
        return self._fed(feed)

    def carry(self, calls: Sequence[Arrays]) -> list[Arrays]:
        """Outputs of calls, each from the state after the previous one; the first feed has a state."""
        return [self._fed(feed) if number else self.infer(feed) for number, feed in enumerate(calls)]

    def _fed(self, feed: Arrays) -> Arrays:
        """Outputs of one call from the present state."""
        ids, new, images = feed["input_ids"], feed["new_tokens"], image_inputs(feed)
        seen: Any = self.model
        return self._outputs(seen.feed_seen(ids, images, new) if images else self.model.feed(ids, new))

    def step(self, tokens: tuple[np.ndarray, ...]) -> Arrays:
        """Outputs after `tokens` [B, 1] one by one, with all logits [B, steps, V]."""
        return self._outputs(np.concatenate([self.model.feed(token) for token in tokens], axis=1))

    def _outputs(self, logits: np.ndarray, rows: Any = slice(None)) -> Arrays:
        outputs = {"logits": logits, "present_length": self.model.length[rows]}
        for name, array in self.model.state_arrays().items():
            if name not in self._shapes:
                continue
            array = array[rows]
            # The runner may have more room than was requested, or less if sequences are empty.
            found = np.zeros(self._shapes[name], array.dtype)
            part = tuple(slice(0, min(n, m)) for n, m in zip(found.shape, array.shape, strict=True))
            found[part] = array[part]
            outputs[f"present_{name}"] = found
        return outputs

    def checks(self, start: Arrays, count: int) -> list[Check]:
        """If the runner replays steps from a CUDA graph, which is captured again when the state grows: they equal single steps bit for
        bit."""
        if not self.model.replays:
            return []
        halves = [count - count // 2, count // 2]
        replayed = self._begin(start)
        tokens = [replayed]
        for part in halves:
            self._outgrow()
            tokens += [t.copy() for t in self.model.greedy(tokens[-1], part)]
        after_replay = self.model.state_arrays()
        self._begin(start)
        wrong, done = 0, 0
        for part in halves:
            self._outgrow()
            self.model.reserve(part)
            for _ in range(part):
                logits = self.model.feed(tokens[done][:, None])[:, -1]
                done += 1
                chosen = np.take_along_axis(logits, tokens[done][:, None].astype(np.int64), axis=1)[:, 0]
                wrong += int((chosen < logits.max(-1)).sum())  # equal logits are both likeliest
        single = self.model.state_arrays()
        differing = [
            name for name, array in after_replay.items() if not np.array_equal(array, single[name], equal_nan=True)
        ]
        detail = f"{wrong} tokens and the states {', '.join(differing) or 'none'} differ"
        name = f"{count} replayed steps of {len(tokens[0])} rows equal single steps"
        return [Check(name, not wrong and not differing, detail)]

    def _outgrow(self) -> None:
        """Grow the state, within the capacity."""
        if not self.model.table.bounded or self.model.room < self.model.table.capacity_tokens:
            self.model.reserve(self.model.room + 1 - int(self.model.length.max()))

    def _begin(self, start: Arrays) -> np.ndarray:
        """Feed `start` with the least room; returns the likeliest token of each sequence, [B]."""
        self.model.start(start["input_ids"].shape[0])
        logits = self.model.feed(start["input_ids"], start["new_tokens"])
        return last_logits(logits, start["new_tokens"])[:, 0].argmax(-1).astype(np.int32)


class Guessing(Session):
    """A session whose steps are calls with guessed tokens; each sequence accepts another number of them, from none to all.

    Args:
        model: A runner that accepts guesses.
    """

    def __init__(self, model: Runner) -> None:
        super().__init__(model)
        self.random = np.random.default_rng(model.guesses)

    def step(self, tokens: tuple[np.ndarray, ...]) -> Arrays:
        """Like Session; rejected tokens are guessed after and between `tokens`."""
        model, right = self.model, np.concatenate(tokens, axis=1)
        (batch, count), vocabulary = right.shape, model.manifest["model"]["vocab_size"]
        capacity = model.table.capacity_tokens if model.table.bounded else np.iinfo(np.int64).max
        logits, done = np.zeros((batch, count, vocabulary), np.float32), np.zeros(batch, np.int64)
        while (done < count).any():
            most = np.minimum(self.random.integers(1, model.guesses + 2, batch), capacity - model.length)
            sizes: np.ndarray = np.where(done < count, most, 0)
            some = self.random.integers(1, model.guesses + 2, batch)
            chosen = np.choose(self.random.integers(3, size=batch), [sizes, np.ones_like(sizes), some])
            counts: np.ndarray = np.minimum(chosen, np.minimum(sizes, count - done))
            ids = self.random.integers(vocabulary, size=(batch, model.guesses + 1))
            for sequence, (first, accepted) in enumerate(zip(done, counts, strict=True)):
                ids[sequence, :accepted] = right[sequence, first : first + accepted]
            found = model.guess(ids, sizes)
            model.accept(counts)
            for sequence, (first, accepted) in enumerate(zip(done, counts, strict=True)):
                row = found.shape[1] - sizes[sequence]
                logits[sequence, first : first + accepted] = found[sequence, row : row + accepted]
            done += counts
        return self._outputs(logits)


class Restoring(Session):
    """A session that keeps every sequence's state before its steps, as a prefix cache and a file of `run --save-state` do, and goes on in
    other rows of a larger batch, as `serve` does."""

    rows: np.ndarray | None = None

    def carry(self, calls: Sequence[Arrays]) -> list[Arrays]:
        outputs, self.rows = super().carry(calls), None
        return outputs

    def step(self, tokens: tuple[np.ndarray, ...]) -> Arrays:
        """Like Session; the other rows of the batch have no tokens."""
        model = self.model
        if self.rows is None:
            self.rows = self._moved()
        ids, new, logits = np.zeros((model.batch, 1), np.int64), np.zeros(model.batch, np.int64), []
        new[self.rows] = 1
        for token in tokens:
            ids[self.rows] = token
            logits.append(model.feed(ids, new)[self.rows])
        return self._outputs(np.concatenate(logits, axis=1), self.rows)

    def _moved(self) -> np.ndarray:
        """Keep the states, empty the runner, and put them back; returns their new rows."""
        model, count = self.model, self.model.batch
        lengths = model.length.tolist()
        with tempfile.TemporaryDirectory(prefix="still-states-") as scratch:
            for number, length in enumerate(lengths):
                cache, key = PrefixCache(model.table, 1 << 62), [number, *range(length)]
                cache.keep(key, model.take(number), length)
                node = cache.find([*key, 0])
                if node is None:
                    raise RunError(f"the prefix cache does not find a state of {length} tokens that it keeps")
                Snapshot(cache.state(node), node.length, digest(model)).save(Path(scratch, str(number)))
            most = min(count + MORE_ROWS, model.most_rows or count + MORE_ROWS)
            model.start(most)
            rows = np.arange(most)[::-1][:count].copy()
            for number, row in enumerate(rows):
                kept = Snapshot.load(Path(scratch, str(number)))
                model.put(int(row), kept.arrays, kept.length)
        return rows


def empty_unread(table: StateTable, outputs: Arrays) -> Arrays:
    """Outputs with zeros in the rows of states that nothing reads."""
    found = {name: array.copy() for name, array in outputs.items()}
    for state in [state for state in table if state.present in outputs]:
        for sequence, length in enumerate(outputs["present_length"]):
            axis, rows = table.unread(state, int(length))
            np.moveaxis(found[state.present][sequence : sequence + 1], axis, 0)[rows] = 0
    return found


class Subject:
    """The runtime to be proven.

    Args:
        package: With an engine for this machine, if it is for TensorRT.
        runtime: Its name.
        provider: ONNX Runtime's provider.
        plugin: TensorRT plugin library to use instead of the package's.
        adapter: Inputs of a LoRA adapter, as for `Runner.use_adapter`.
        genai: Also run onnxruntime-genai.
        bodies: Run function bodies even if the package has kernels.
        graph: Graph of the package.
    """

    def __init__(
        self,
        package: Package,
        runtime: str = "ort",
        provider: str = "cpu",
        plugin: Path | None = None,
        adapter: Arrays | None = None,
        genai: bool = False,
        bodies: bool = False,
        graph: str = MODEL,
    ) -> None:
        self.genai, self.bodies, self.graph = genai, bodies, graph
        self.package, self.runtime, self.provider, self.plugin = package, runtime, provider, plugin
        self.adapter = adapter or {}
        self.record = runtime_named(runtime)
        self.name = self.record.polygraphy
        self.watch: tuple[str, ...] = ()
        """Ops whose first outputs sessions report, if the runtime can."""
        self.native = False
        """Whether the last opened session has the package's native kernels."""

    @property
    def title(self) -> str:
        """The runtime, for people."""
        if self.package.manifest.get(WIDENED):
            return "ONNX Runtime's function bodies"
        native = " with the native kernel" if self.native else ""
        return self.record.title + (" CUDA" if self.provider == "cuda" else "") + native

    @contextlib.contextmanager
    def open(self) -> Iterator[Session]:
        """Open the runner that `run` uses, or the widened graph."""
        manifest = self.package.manifest
        # The hashes were compared when the package was opened.
        model: Runner
        if manifest.get(WIDENED):
            from still_export.proof.widen import WideModel

            model = WideModel(self.package.path, manifest, self.graph, self.watch)
        else:
            model = open_runner(
                self.package.path,
                manifest,
                self.runtime,
                self.provider,
                plugin=self.plugin,
                check=False,
                watch=self.watch,
                bodies=self.bodies,
                graph=self.graph,
            )
        if self.adapter:
            model.use_adapter(self.adapter, "adapter")
        self.native = getattr(model, "native", None) is not None
        yield Session(model)

    def checks(self, count: int) -> list[Check]:
        """Checks of the engine that users run the package with, if it is not the runner, over `count` tokens."""
        if not self.genai:
            return []
        from still_export.proof.genai import genai_checks

        return genai_checks(self.package, count)

    def saved(self, feeds: list[Arrays], expected: list[Arrays]) -> tuple[list[Arrays], list[Arrays]]:
        """Calls that polygraphy's own command can repeat, with the types that it needs."""
        manifest = self.package.manifest
        calls = [
            (typed_states(f, manifest), typed_states(e, manifest))
            for f, e in zip(feeds, expected, strict=True)
            if not image_inputs(f)  # polygraphy takes no inputs that have defaults
        ]
        if manifest.get("speculate"):  # its graph has logits of several tokens
            calls = [
                (f, {n: x for n, x in e.items() if n != "logits" or f["input_ids"].shape[1] == 1}) for f, e in calls
            ]
        if self.record.engines:  # those that fit the prefill profile; the runner splits longer ones
            longest = int(manifest["engines"][0]["prefill_tokens"])
            calls = [(_for_engine(f), _for_engine(e)) for f, e in calls if f["input_ids"].shape[1] <= longest]
        return [f for f, _ in calls], [e for _, e in calls]

    def command(self) -> list[str]:
        """Polygraphy's command, without inputs and tolerances."""
        return self.record.repeat(Opening(self.package.path, self.package.manifest, self.provider, plugin=self.plugin))


def _for_engine(arrays: Arrays) -> Arrays:
    """`arrays` with counts and tokens in the engine's type, and a row of zeros in states without any (engines refuse empty ones)."""
    whole = {name: x if x.size else np.zeros(np.maximum(x.shape, 1), x.dtype) for name, x in arrays.items()}
    return {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in whole.items()}
