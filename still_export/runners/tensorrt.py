#!/usr/bin/env python3
"""Run a package's TensorRT engine. Needs tensorrt, numpy, the CUDA driver and, for text, tokenizers; nothing else.

Exports copy this file into the package as run_trt.py, where it is a program of its own:

  python run_trt.py --prompt "The capital of France is" --tokens 20
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

try:
    from still_export.package.checked import RunError, trust_package
    from still_export.runners.cuda_driver import Buffer, CudaError
    from still_export.runners.ort import Sampling, Text, checked_prompt, slots_for, stream_answer, token_ids
    from still_export.runners.trt_engine import DECODE, DECODE_ROWS, PREFILL, TrtEngine, TrtError
except ImportError:  # in a package, beside its own copies
    from checked import RunError, trust_package  # type: ignore[import-not-found, no-redef]
    from cuda_driver import Buffer, CudaError  # type: ignore[import-not-found, no-redef]
    from run_ort import (  # type: ignore[import-not-found, no-redef]
        Sampling,
        Text,
        checked_prompt,
        slots_for,
        stream_answer,
        token_ids,
    )
    from trt_engine import DECODE, DECODE_ROWS, PREFILL, TrtEngine, TrtError  # type: ignore[import-not-found, no-redef]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
NUMPY_TYPES |= {"float": np.float32, "half": np.float16, "bf16": np.uint16}  # TensorRT's names


class TrtModel(TrtEngine):
    """A package's engine with its state on the GPU: feed tokens, get logits.

    Past and present of every state are one buffer. A decode step is replayed from a CUDA graph.

    Args:
        folder: The package.
        plugin: Plugin library in the place of the package's.
        device: CUDA device.
    """

    def __init__(self, folder: Path, plugin: Path | None = None, device: int = 0) -> None:
        super().__init__(folder, plugin, device)
        self.states: list[dict[str, Any]] = self.manifest["states"]
        self.batch = 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prefill call; longer prompts are fed in pieces."""
        return int(self.entry["prefill_tokens"])

    @property
    def decode_profile(self) -> int:
        """Profile of calls of one token."""
        return DECODE if self.batch == 1 else DECODE_ROWS

    def slots(self, tokens: int) -> int:
        """Salient slots that `tokens` tokens fill, at least 1."""
        return max(1, slots_for(self.manifest["capacity"], tokens))

    def state_bytes(self) -> int:
        """Device memory of the state."""
        return sum(buffer.size for buffer in self._state.values())

    def start(self, batch: int = 1, tokens: int = 0, slots: int = 0) -> None:
        """Forget everything; `batch` rows, room for `tokens` tokens at once (it grows when needed; 0 = the least), `slots` at least."""
        if not 1 <= batch <= self.entry["batch"]:
            raise TrtError(
                f"batch {batch} is outside 1..{self.entry['batch']} of the engine. Build it again: still-export build {self.folder} "
                f"--batch {batch}"
            )
        self.batch, self.room, self.room_slots = batch, 0, slots
        self.length = np.zeros(batch, np.int64)
        self._state: dict[str, Buffer] = {}
        self._state_shapes: dict[str, tuple[int, ...]] = {}
        vocabulary = self.manifest["model"]["vocab_size"]
        rows = self.prefill_tokens if self.manifest["model"]["all_logits"] else 1
        # Builders without strong typing may give an output another type than the graph does.
        self._logit_type = NUMPY_TYPES[str(self.engine.get_tensor_dtype("logits")).rsplit(".", 1)[-1].lower()]
        sizes = {
            "input_ids": 4 * batch * self.prefill_tokens,
            "new_tokens": 4 * batch,
            "past_length": 4 * batch,
            "present_length": 4 * batch,
            "next_token": 4 * batch * rows,
            "logits": np.dtype(self._logit_type).itemsize * batch * rows * vocabulary,
        }
        try:
            self._io = {name: Buffer(self.driver, size) for name, size in sizes.items()}
        except CudaError as error:
            raise TrtError(f"{error} Use a smaller batch.") from error
        self._resize(tokens)
        for buffer in self._state.values():
            buffer.zero()
        self._io["past_length"].zero()

    def _resize(self, tokens: int) -> None:
        """Make room for `tokens` tokens, keeping the state; at least doubles where memory allows, so that copies stay rare."""
        capacity = self.manifest["capacity"]
        limit, bounded = capacity["capacity_tokens"], capacity["overflow"] == "error"
        if bounded and tokens > limit:
            raise TrtError(
                f"{tokens} tokens exceed this package's capacity of {limit} tokens. Shorten the prompt or --tokens, or export again "
                "with a larger --capacity-tokens or another --overflow."
            )
        self._graph: Any = None
        self._bound: list[tuple[int, ...] | None] = [None] * len(self.contexts)
        ample = max(tokens, 2 * self.room)
        try:
            self._grow(min(limit, ample) if bounded else ample)
        except CudaError:
            try:
                self._grow(tokens)
            except CudaError as error:
                raise TrtError(f"{error} {self._fitting(tokens)}") from error

    def _grow(self, room: int) -> None:
        """Give every state room for `room` tokens; where memory ends, the state is as it was, some of it roomier."""
        capacity = self.manifest["capacity"]
        bounded = capacity["overflow"] == "error"
        slots = max(self.room_slots, self.slots(room if bounded else capacity["capacity_tokens"]))
        sizes = {"batch": self.batch, "slots": slots, "capacity": max(1, room)}
        for state in self.states:
            name, item = state["name"], ITEM_BYTES[state["dtype"]]
            shape = tuple(sizes.get(d, d) for d in state["shape"])
            old, old_shape = self._state.get(name), self._state_shapes.get(name)
            if old is not None and old_shape is not None and all(n <= m for n, m in zip(shape, old_shape, strict=True)):
                continue
            buffer = Buffer(self.driver, int(np.prod(shape)) * item)
            buffer.zero()
            if old is not None and old_shape is not None:  # only axis 2 grows
                pitch, old_pitch = (int(np.prod(x[2:])) * item for x in (shape, old_shape))
                self.driver.copy_rows(buffer.address, pitch, old.address, old_pitch, shape[0] * shape[1])
                self.driver.synchronize()  # before `old` is freed
            self._state[name], self._state_shapes[name] = buffer, shape
        self.room, self.room_slots = room, slots

    def _fitting(self, tokens: int) -> str:
        """What of the state would fit into the memory that is free beside it, for a message."""
        held = sum(buffer.size for buffer in self._state.values())
        free = held + self.driver.memory()[0]
        texts = []
        for rows in {self.batch, 1}:
            least, most = 0, tokens
            while least < most:  # the largest room whose state is at most `free`
                middle = (least + most + 1) // 2
                least, most = (middle, most) if self._bytes(rows, middle) <= free else (least, middle - 1)
            if least:
                texts.append(f"{least} tokens of {rows} rows" if rows > 1 else f"{least} tokens of one row")
        return f"The state of {self.batch} rows for {tokens} tokens does not fit; {' or '.join(texts) or 'none'} would."

    def _bytes(self, batch: int, tokens: int) -> int:
        """State memory of `batch` rows of `tokens` tokens."""
        capacity = self.manifest["capacity"]
        slots = self.slots(tokens if capacity["overflow"] == "error" else capacity["capacity_tokens"])
        sizes = {"batch": batch, "slots": slots, "capacity": max(1, tokens)}
        shapes = ((s, [sizes.get(d, d) for d in s["shape"]]) for s in self.states)
        return sum(int(np.prod(shape)) * ITEM_BYTES[s["dtype"]] for s, shape in shapes)

    def _bind(self, profile: int, tokens: int) -> Any:
        """The profile's context with shapes and addresses of a call of `tokens` tokens."""
        context = self.contexts[profile]
        key = (self.batch, tokens, self.room, self.room_slots, self._io["logits"].address)
        if self._bound[profile] == key:
            return context
        self._bound[profile] = None
        shapes = {"input_ids": (self.batch, tokens), "new_tokens": (self.batch,), "past_length": (self.batch,)}
        addresses = {name: buffer.address for name, buffer in self._io.items()}
        for state in self.states:
            name = state["name"]
            shapes[f"past_{name}"] = self._state_shapes[name]
            addresses[f"past_{name}"] = addresses[f"present_{name}"] = self._state[name].address
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise TrtError(f"the engine does not take {name} of shape {list(shape)}. {self.again}")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise TrtError(f"the engine has no tensor {name}; it was built from another graph. {self.again}")
        self._bound[profile] = key
        return context

    def _run(self, profile: int, tokens: int) -> None:
        if not self._bind(profile, tokens).execute_async_v3(self.driver.stream.value):
            raise TrtError(f"TensorRT could not run {tokens} tokens; its reason stands above. {self.memory_text()}")

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens, keeping the state."""
        needed = int(self.length.max()) + tokens
        if needed > self.room:
            self._resize(needed)

    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None) -> np.ndarray:
        """Run one call, in pieces where it has more tokens than the engine's prefill profile.

        Args:
            input_ids: [B, T], right-padded.
            new_tokens: Tokens that each row brings, [B]; None = T.

        Returns:
            Logits, [B, 1, V] of each row's last new token, or [B, T, V] if the package was exported so.
        """
        tokens, step = input_ids.shape[1], self.prefill_tokens
        counts = np.full(self.batch, tokens, np.int32) if new_tokens is None else np.asarray(new_tokens, np.int32)
        self.reserve(int(counts.max()))
        if tokens <= step:
            return self._call(input_ids, counts)
        pieces: list[np.ndarray] = []
        for begin in range(0, tokens, step):
            here = np.clip(counts - begin, 0, step).astype(np.int32)
            logits = self._call(input_ids[:, begin : begin + step], here)
            if pieces and not self.manifest["model"]["all_logits"]:
                logits = np.where((here > 0)[:, None, None], logits, pieces.pop())
            pieces.append(logits)
        return np.concatenate(pieces, axis=1)

    def _call(self, input_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        tokens = input_ids.shape[1]
        self._io["input_ids"].write(np.ascontiguousarray(input_ids, np.int32))
        self._io["new_tokens"].write(counts)
        self._io["past_length"].write(self.length.astype(np.int32))
        self._run(self.decode_profile if tokens == 1 else PREFILL, tokens)
        self.length = self.length + counts
        rows = tokens if self.manifest["model"]["all_logits"] else 1
        return self._io["logits"].read(
            np.empty((self.batch, rows, self.manifest["model"]["vocab_size"]), self._logit_type)
        )

    def load(self, feed: dict[str, np.ndarray]) -> None:
        """Start from the state that `feed` holds as `past_*`, with its room at least."""
        given = {s["name"]: feed[f"past_{s['name']}"] for s in self.states}

        def room(symbol: str) -> int:
            return max((given[s["name"]].shape[2] for s in self.states if symbol in s["shape"]), default=0)

        self.start(feed["input_ids"].shape[0], room("capacity"), max(1, room("slots")))
        self.length = np.asarray(feed["past_length"], np.int64)
        self.reserve(int(np.max(feed["new_tokens"])))
        for state in self.states:
            name, array = state["name"], given[state["name"]]
            held = np.zeros(self._state_shapes[name], NUMPY_TYPES[state["dtype"]])
            held[tuple(slice(0, n) for n in array.shape)] = array
            self._state[name].write(held)
            self.driver.synchronize()  # before `held` is freed

    def _decode_graph(self) -> Any:
        """The captured decode step: it reads the token it chose before, and leaves the next one and the longer lengths behind."""
        if self._graph is None:
            # Modules and tactics must be there before the capture; a step of 0 tokens changes no state.
            self._io["new_tokens"].write(np.zeros(self.batch, np.int32))
            self._run(self.decode_profile, 1)
            self.driver.synchronize()

            def step() -> None:
                self._run(self.decode_profile, 1)
                self.driver.copy(self._io["past_length"].address, self._io["present_length"].address, 4 * self.batch)
                self.driver.copy(self._io["input_ids"].address, self._io["next_token"].address, 4 * self.batch)

            self._graph = self.driver.capture(step)
        return self._graph

    def greedy(self, token: np.ndarray, count: int) -> Iterator[np.ndarray]:
        """Tokens [B] that follow `token` [B] greedily, `count` of them, from replays of a captured step."""
        self.reserve(count)
        self._io["past_length"].write(self.length.astype(np.int32))
        self._io["input_ids"].write(np.ascontiguousarray(token, np.int32))
        graph = self._decode_graph()
        self._io["new_tokens"].write(np.ones(self.batch, np.int32))
        for _ in range(count):
            graph.launch()
            self.length = self.length + 1
            yield self._io["input_ids"].read(np.empty(self.batch, np.int32))

    def lengths_on_device(self) -> np.ndarray:
        """Tokens of every row, [B] int32, as the last call left them."""
        return self._io["present_length"].read(np.empty(self.batch, np.int32))

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state tensors by name; bfloat16 as uint16."""
        self.driver.synchronize()
        return {
            s["name"]: self._state[s["name"]].read(np.empty(self._state_shapes[s["name"]], NUMPY_TYPES[s["dtype"]]))
            for s in self.states
        }

    def prefill(self, tokens: Iterable[int], progress: Any = None) -> np.ndarray:
        """Feed a prompt to the single row in pieces of `prefill_tokens`; logits [V] of its last token."""
        prompt = checked_prompt(tokens, self.manifest["model"]["vocab_size"]).astype(np.int32)
        self.reserve(prompt.size)
        for start in range(0, prompt.size, self.prefill_tokens):
            logits = self.feed(prompt[None, start : start + self.prefill_tokens])
            if progress is not None:
                progress(min(start + self.prefill_tokens, prompt.size), prompt.size)
        return logits[0, -1]

    def generate(
        self,
        prompt: Iterable[int],
        count: int,
        sampling: Sampling,
        stop: Iterable[int] = (),
        progress: Any = None,
    ) -> Iterator[int]:
        """Tokens that follow `prompt`, at most `count`, ending after one of `stop` (which is not yielded)."""
        stops, prompt = set(stop), list(prompt)
        self.reserve(len(prompt) + count)
        token = sampling.choose(self.floats(self.prefill(prompt, progress)))
        rest = (
            self.greedy(np.array([token]), count - 1)
            if sampling.temperature == 0
            else self._sampled(token, count - 1, sampling)
        )
        while token not in stops:
            yield token
            following = next(rest, None)
            if following is None:
                return
            token = int(following[0])

    def _sampled(self, token: int, count: int, sampling: Sampling) -> Iterator[np.ndarray]:
        for _ in range(count):
            logits = self.feed(np.array([[token]], np.int32))
            token = sampling.choose(self.floats(logits[0, -1]))
            yield np.array([token])

    def floats(self, logits: np.ndarray) -> np.ndarray:
        """Logits as the engine gave them, in float32."""
        if self._logit_type == np.uint16:  # bfloat16: the upper half of a float32
            return (logits.astype(np.uint32) << 16).view(np.float32)
        return logits.astype(np.float32)


def main() -> int:
    """Program of run_trt.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).resolve().parent, help="the package (default: here)"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--prompt-ids", type=token_ids, help="token ids to continue, separated by commas")
    parser.add_argument("--plugin", type=Path, help="plugin library in the place of the package's")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate at most (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 = all (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trust-native",
        action="store_true",
        help="load engine and plugin that this machine did not build, and remember them",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args()
    try:
        if options.trust_native:
            trust_package(options.folder)
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        model: Any = TrtModel(options.folder, options.plugin)
        model.start()
        text = None if options.prompt_ids else Text(model)
        prompt = options.prompt_ids if text is None else text.encode(options.prompt)
        answer = stream_answer(model, text, prompt, options.tokens, sampling)
        print({k: v for k, v in answer.items() if k not in ("tokens", "text")}, file=sys.stderr)
    except (RunError, CudaError, MemoryError) as error:
        if options.debug:
            raise
        print(f"error: {error or 'out of memory'}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
