#!/usr/bin/env python3
"""Run an exported package with ONNX Runtime. Needs onnxruntime, numpy and, for text, tokenizers; nothing else.

Exports copy this file into the package as run_ort.py, where it is a program of its own:

  python run_ort.py --prompt "The capital of France is" --tokens 20
  python run_ort.py --chat --temperature 0.7 --top-p 0.9 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

try:
    from still_export.package.checked import (
        MODEL,
        UNTRUSTED,
        CheckError,
        Hashing,
        RunError,
        check_hash,
        external_files,
        native_file,
        read_manifest,
        trust_package,
    )
except ImportError:  # in a package, beside its own copy
    from checked import (  # type: ignore[import-not-found, no-redef]
        MODEL,
        UNTRUSTED,
        CheckError,
        Hashing,
        RunError,
        check_hash,
        external_files,
        native_file,
        read_manifest,
        trust_package,
    )

ONNX_TYPES = {"float32": 1, "int64": 7, "float16": 10, "bfloat16": 16}
NUMPY_TYPES = {"float32": np.float32, "int64": np.int64, "float16": np.float16, "bfloat16": np.uint16}


CAPACITY = "still.capacity"
"""Entry of the graph's metadata: the manifest's `capacity`, as JSON."""
SPARE_TOKENS = 256
"""Least room that is added when a sequence outgrows its state."""


def slots_for(capacity: dict[str, Any], tokens: int) -> int:
    """Salient slots that `tokens` tokens fill, by the manifest's `capacity`."""
    return int(capacity["salient_per_chunk"]) * max(0, -(-tokens // int(capacity["chunk_size"])) - 2)


def checked_prompt(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """The prompt as int64 [T].

    Raises:
        RunError: It is empty, or has ids outside the vocabulary.
    """
    prompt = np.asarray(list(tokens), np.int64)
    if prompt.size == 0:
        raise RunError("the prompt has no tokens. Give at least one.")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise RunError(f"token ids {prompt.min()}..{prompt.max()} are outside the vocabulary 0..{vocabulary - 1}.")
    return prompt


def token_ids(text: str) -> list[int]:
    """Token ids written with commas between them; raises ValueError."""
    return [int(x) for x in text.split(",")]


@dataclasses.dataclass
class Sampling:
    """How the next token is chosen: temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1 or self.seed < 0:
            raise RunError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, seed={self.seed}: "
                "temperature, top_k and seed must not be negative, top_p lies in (0, 1]."
            )
        self.random = np.random.default_rng(self.seed)

    def choose(self, logits: np.ndarray) -> int:
        """Next token from logits [V]."""
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self.temperature
        order = np.argsort(-scaled, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        probability = np.exp(scaled[order] - scaled[order[0]])
        probability /= probability.sum()
        # The smallest set whose mass reaches top_p: a token stays while the mass before it is below.
        kept = np.cumsum(probability) - probability < self.top_p
        order, probability = order[kept], probability[kept] / probability[kept].sum()
        return int(self.random.choice(order, p=probability))


MOST_THREADS = 1024
"""More than any machine has for one session; ONNX Runtime ends the process where it cannot start as many as asked for."""


def native_library(folder: Path, manifest: dict[str, Any]) -> Path | None:
    """The package's native kernel, where it is for this kind of machine and may be loaded; else one line on stderr says why not.

    Raises:
        RunError: It is not the file that was exported.
    """
    native = manifest.get("native")
    if native is None:
        return None
    if (native["system"], native["machine"]) != (platform.system(), platform.machine()):
        print(f"the native kernel is for {native['system']} {native['machine']}: running without it", file=sys.stderr)
        return None
    path = native_file(folder, manifest, native["library"])
    if path is None:
        print(f"the native kernel {folder / native['library']} {UNTRUSTED}: running without it", file=sys.stderr)
    return path


def open_session(
    folder: Path, manifest: dict[str, Any], options: Any, provider: str = "cpu", native: Path | None = None
) -> Any:
    """An onnxruntime session of the package's model.

    Args:
        options: onnxruntime.SessionOptions, completed here.
        provider: "cpu" or "cuda".
        native: Library of kernels to load, from `native_library`.

    Raises:
        RunError: The model or the kernel cannot be loaded.
    """
    import onnxruntime

    if native:
        try:
            options.register_custom_ops_library(str(native.resolve()))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(
                f"{native} cannot be loaded: {error}. Export the model again, on this machine or without --native."
            ) from error
    providers = ["CUDAExecutionProvider"] if provider == "cuda" else []
    path = folder / MODEL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[*providers, "CPUExecutionProvider"])
    except Exception as error:
        dtype = manifest["model"]["dtype"]
        advice = (
            " Its CPU provider has no bfloat16: use --provider cuda, or export float32." if dtype == "bfloat16" else ""
        )
        raise RunError(f"ONNX Runtime cannot load {path}: {' '.join(str(error).split())}.{advice}") from error


def weight_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the files that the package's graph takes its weights from; the graph itself is checked.

    Raises:
        RunError: The graph is not the one that was exported, or names a file that the manifest does not list.
    """
    path = check_hash(folder, manifest, MODEL)
    names = sorted(external_files(path.read_bytes(), str(path)))
    for name in names:
        if name not in manifest["files"]:
            raise CheckError(
                f"{path} takes weights from {name!r}, which the manifest does not list. Export the package again."
            )
    return names


def capacity_text(manifest: dict[str, Any]) -> str:
    """The manifest's `capacity` as the graph's metadata has it."""
    return json.dumps({name: manifest["capacity"][name] for name in sorted(manifest["capacity"])})


def check_graph(session: Any, manifest: dict[str, Any], source: Path) -> None:
    """Raise RunError where the manifest says otherwise than the graph about states, vocabulary or capacity."""
    inputs = {i.name: i for i in session.get_inputs()}
    outputs = {o.name: o for o in session.get_outputs()}
    types = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}

    def differs(field: str, here: Any, there: Any) -> CheckError:
        return CheckError(
            f"{source}: {field} is {here}, in {MODEL} it is {there}. Copy the package again, or export it again."
        )

    for i, state in enumerate(manifest["states"]):
        found = inputs.get(f"past_{state['name']}")
        if found is None or f"present_{state['name']}" not in outputs:
            raise differs(f"states[{i}].name", state["name"], "not there")
        if types.get(found.type) != state["dtype"]:
            raise differs(f"states[{i}].dtype", state["dtype"], found.type)
        # What a call decides has a name in the graph.
        sizes = [d if isinstance(d, int) else "" for d in found.shape]
        if sizes != [d if isinstance(d, int) else "" for d in state["shape"]]:
            raise differs(f"states[{i}].shape", state["shape"], found.shape)
    for name in inputs:
        if (
            name.startswith("past_")
            and name != "past_length"
            and name[5:] not in {s["name"] for s in manifest["states"]}
        ):
            raise differs("states", f"without {name[5:]}", "with it")
    vocabulary = outputs["logits"].shape[-1] if "logits" in outputs else None
    if vocabulary != manifest["model"]["vocab_size"]:
        raise differs("model.vocab_size", manifest["model"]["vocab_size"], vocabulary)
    recorded = session.get_modelmeta().custom_metadata_map.get(CAPACITY)
    if recorded is not None and recorded != capacity_text(manifest):
        raise differs("capacity", capacity_text(manifest), recorded)


class OrtModel:
    """A package's model with its state: feed tokens, get logits.

    The state that grows with the context is written in place where the manifest allows it; the other states alternate between
    two buffers, so a call allocates nothing but its logits.

    Args:
        folder: The package.
        threads: Intra-op threads, 0 = ONNX Runtime's choice.
        provider: "cpu" or "cuda".
        profile: Write ONNX Runtime's profile beside the working directory.
        check: Compare the weights with their hashes, beside loading them.

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
    ) -> None:
        import onnxruntime

        if not 0 <= threads <= MOST_THREADS:
            raise RunError(f"threads={threads} is outside 0..{MOST_THREADS}.")
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        weights = weight_files(self.folder, self.manifest)
        self.states: list[dict[str, Any]] = self.manifest["states"]
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
        native = native_library(self.folder, self.manifest) if self.device == "cpu" else None
        hashing = Hashing(self.folder, self.manifest, weights if check else [])
        try:
            self.session = open_session(self.folder, self.manifest, options, self.device, native)
        finally:
            hashing.finish()
        check_graph(self.session, self.manifest, self.folder / "manifest.json")
        self._value = onnxruntime.OrtValue
        self.batch = 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prefill call; longer prompts are fed in pieces, so memory does not grow with them."""
        return int(self.manifest["prefill_tokens"])

    def slots(self, tokens: int) -> int:
        """Salient slots that `tokens` tokens fill."""
        return slots_for(self.manifest["capacity"], tokens)

    def _shape(self, state: dict[str, Any]) -> list[int]:
        sizes = {"batch": self.batch, "slots": self.room_slots, "capacity": self.room}
        return [sizes.get(d, d) for d in state["shape"]]

    def start(self, batch: int = 1, tokens: int = 0) -> None:
        """Forget everything; `batch` rows, room for `tokens` tokens at once (it grows when needed)."""
        self.batch = batch
        self.length = np.zeros(batch, np.int64)
        self.room = 0
        self.room_slots = 0
        self._past: dict[str, Any] = {}
        self._resize(tokens)

    def _check_capacity(self, tokens: int) -> None:
        """Raise RunError where `tokens` tokens are more than the package can hold."""
        capacity = self.manifest["capacity"]
        if capacity["overflow"] == "error" and tokens > capacity["capacity_tokens"]:
            raise RunError(
                f"{tokens} tokens exceed this package's capacity of {capacity['capacity_tokens']} tokens. Shorten the prompt or "
                "--tokens, or export again with a larger --capacity-tokens or another --overflow."
            )

    def _resize(self, tokens: int) -> None:
        """Make room for `tokens` tokens, keeping the state. Spare room costs time, as attention reads every slot, and copies do too:
        an eighth more each time."""
        capacity = self.manifest["capacity"]
        limit = capacity["capacity_tokens"]
        spare = tokens + max(SPARE_TOKENS, tokens // 8)
        if capacity["overflow"] == "error":
            self._check_capacity(tokens)
            self.room = min(limit, spare if self.room else tokens)
            self.room_slots = max(self.room_slots, self.slots(self.room))
        else:
            self.room = spare if self.room else tokens
            self.room_slots = self.slots(limit)
        past: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        for state in self.states:
            name, shape = state["name"], self._shape(state)
            kept = self._past.get(name)
            if kept is not None and list(kept.shape()) == shape:
                past[name] = kept
            else:
                array = np.zeros(shape, NUMPY_TYPES[state["dtype"]])
                if kept is not None:
                    previous = kept.numpy()
                    array[:, :, : previous.shape[2]] = previous
                past[name] = self._tensor(array, state["dtype"])
            if not state["in_place"]:
                self._spare[name] = self._tensor(np.zeros(shape, NUMPY_TYPES[state["dtype"]]), state["dtype"])
        self._past = past
        self._bindings: dict[tuple[int, int], Any] = {}
        self._turn = 0

    def _tensor(self, array: np.ndarray, dtype: str) -> Any:
        if dtype == "bfloat16":
            return self._value.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
        return self._value.ortvalue_from_numpy(array, self.device, 0)

    def _binding(self, tokens: int) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """I/O binding for calls of `tokens` tokens in the current turn, with the arrays that it reads its inputs from."""
        key = (tokens, self._turn)
        if key not in self._bindings:
            for other in [k for k in self._bindings if k[0] not in (tokens, 1)]:
                del self._bindings[other]
            binding = self.session.io_binding()
            ids = np.zeros((self.batch, tokens), np.int64)
            counts, lengths = np.zeros(self.batch, np.int64), np.zeros(self.batch, np.int64)
            inputs = {"input_ids": ids, "new_tokens": counts, "past_length": lengths}
            for name, array in inputs.items():
                binding.bind_cpu_input(name, array) if self.device == "cuda" else binding.bind_ortvalue_input(
                    name, self._value.ortvalue_from_numpy(array)
                )
            binding.bind_output("logits", "cpu")
            binding.bind_output("present_length", "cpu")
            for state in self.states:
                name = state["name"]
                past = self._past[name]
                present = past if state["in_place"] else self._spare[name]
                binding.bind_ortvalue_input(f"past_{name}", past)
                binding.bind_ortvalue_output(f"present_{name}", present)
            self._bindings[key] = (binding, ids, counts, lengths)
        return self._bindings[key]

    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None) -> np.ndarray:
        """Run one call.

        Args:
            input_ids: int64 [B, T], right-padded.
            new_tokens: Tokens that each row brings, int64 [B]; None = T.

        Returns:
            Logits float32, [B, 1, V] of each row's last new token, or [B, T, V] if the package was exported so.
        """
        tokens = input_ids.shape[1]
        counts_in = np.full(self.batch, tokens, np.int64) if new_tokens is None else np.asarray(new_tokens, np.int64)
        needed = int((self.length + counts_in).max())
        if needed > self.room:
            self._resize(needed)
        try:
            binding, ids, counts, lengths = self._binding(tokens)
            ids[:], counts[:], lengths[:] = input_ids, counts_in, self.length
            self.session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(f"ONNX Runtime cannot run {self.folder / MODEL}: {' '.join(str(error).split())}") from error
        logits = binding.get_outputs()[0].numpy()
        self.length = self.length + counts_in
        for name, spare in self._spare.items():
            self._past[name], self._spare[name] = spare, self._past[name]
        self._turn ^= 1
        return logits

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state tensors by name; bfloat16 as uint16."""
        return {s["name"]: self._past[s["name"]].numpy().copy() for s in self.states}

    def load_state(self, arrays: dict[str, np.ndarray], length: np.ndarray) -> None:
        """Continue from `arrays` as `state_arrays` returned them, after `length` [B] tokens.

        Raises:
            RunError: A tensor is missing or has another shape or dtype.
        """
        for state in self.states:
            name, array = state["name"], arrays.get(state["name"])
            wanted = np.dtype(NUMPY_TYPES[state["dtype"]])
            shape = [d if isinstance(d, int) else "any" for d in state["shape"]]
            if array is None:
                raise RunError(f"state {name} is missing; expected {shape} {wanted}.")
            fits = len(shape) == array.ndim and all(w in ("any", g) for w, g in zip(shape, array.shape, strict=True))
            if not fits or array.dtype != wanted:
                raise RunError(f"state {name}: expected {shape} {wanted}, got {list(array.shape)} {array.dtype}.")
        self.start(len(length), int(np.max(length)))
        for state in self.states:
            name = state["name"]
            array = np.zeros(self._shape(state), NUMPY_TYPES[state["dtype"]])
            kept = arrays[name][:, :, : array.shape[2]]
            array[:, :, : kept.shape[2]] = kept
            self._past[name] = self._tensor(array, state["dtype"])
        self.length = np.asarray(length, np.int64).copy()

    def prefill(self, tokens: Iterable[int], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """Feed a prompt to the single row in pieces of `prefill_tokens`; logits [V] of its last token.

        `progress` is told the tokens fed and their total after each piece.
        """
        prompt = checked_prompt(tokens, self.manifest["model"]["vocab_size"])
        if int(self.length[0]) + prompt.size > self.room:
            self._resize(int(self.length[0]) + prompt.size)
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
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[int]:
        """Tokens that follow `prompt`, at most `count`, ending after one of `stop` (which is not yielded).

        The last one is not fed to the model.

        Raises:
            RunError: They and the prompt may exceed the capacity; nothing was fed then.
        """
        stops, prompt = set(stop), list(prompt)
        self._check_capacity(int(self.length[0]) + len(prompt) + count - 1)
        logits = self.prefill(prompt, progress)
        for step in range(count):
            token = sampling.choose(logits)
            if token in stops:
                return
            yield token
            if step + 1 < count:
                logits = self.feed(np.array([[token]], np.int64))[0, -1]


class Text:
    """The package's tokenizer and chat format."""

    def __init__(self, model: OrtModel) -> None:
        if "tokenizer.json" not in model.manifest["files"]:
            raise RunError(f"{model.folder} has no tokenizer.json; pass token ids with --prompt-ids.")
        path = check_hash(model.folder, model.manifest, "tokenizer.json")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RunError(
                "text needs the package tokenizers: pip install tokenizers; or pass --prompt-ids."
            ) from error
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except BaseException as error:  # among them the panics of its Rust side
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RunError(f"{path} is no tokenizer that can be read: {' '.join(str(error).split())}.") from error
        self.chat = model.manifest.get("chat")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Text of `tokens` as it becomes certain: never half a character."""
        seen: list[int] = []
        shown = ""
        for token in tokens:
            seen.append(token)
            text = self.tokenizer.decode(seen)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        text = self.tokenizer.decode(seen)
        if len(text) > len(shown):
            yield text[len(shown) :]

    def turn(self, message: str, first: bool, system: str | None) -> list[int]:
        """Token ids of a user's message with everything the chat format puts around it."""
        if not self.chat:
            raise RunError("this package has no chat format: its model has no chat template. Use --prompt.")
        if not first:
            before = self.chat["assistant_to_user"]
        elif system is None:
            before = self.chat["start"]
        else:
            before = self.chat["system_start"] + system + self.chat["system_to_user"]
        return self.encode(before + message + self.chat["user_to_assistant"], special=False)


def stream_answer(
    model: OrtModel,
    text: Text | None,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    stream: Any = sys.stdout,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the continuation of `prompt` to `stream` (or nowhere) as it comes; what was generated, and timings."""
    begin = time.perf_counter()
    times: list[float] = []
    generated: list[int] = []

    def tokens() -> Iterator[int]:
        for token in model.generate(prompt, count, sampling, model.manifest["eos_token_ids"], progress):
            times.append(time.perf_counter())
            generated.append(token)
            yield token

    written = []
    for piece in (f"{t} " for t in tokens()) if text is None else text.stream(tokens()):
        written.append(piece)
        if stream is not None:
            stream.write(piece)
            stream.flush()
    if stream is not None:
        stream.write("\n")
    first = times[0] - begin if times else time.perf_counter() - begin
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return {
        "prompt_tokens": len(prompt),
        "tokens": generated,
        "text": "".join(written),
        "first_token_s": round(first, 4),
        "decode_tokens_per_s": round(rate, 2),
    }


def chat(model: OrtModel, text: Text, count: int, sampling: Sampling, system: str | None) -> None:
    """Talk until the input ends."""
    first = True
    unread: list[int] = []
    while True:
        try:
            message = input("> ")
        except EOFError:
            return
        prompt = unread + text.turn(message, first, system)
        answer = stream_answer(model, text, prompt, count, sampling)["tokens"]
        # Of an answer that was cut off the model has not seen the last token.
        unread = answer[-1:] if len(answer) == count else []
        first = False


def main() -> int:
    """Program of run_ort.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).resolve().parent, help="the package (default: here)"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--prompt-ids", type=token_ids, help="token ids to continue, separated by commas")
    what.add_argument("--chat", action="store_true", help="talk with the model; ends at end of input")
    parser.add_argument("--system", help="system message of a chat")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate at most (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 = all (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0 = ONNX Runtime's choice (default)")
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--trust-native",
        action="store_true",
        help="load a native kernel that this machine did not build, and remember it",
    )
    parser.add_argument("--no-check", action="store_true", help="do not compare the weights with their hashes")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args()
    if options.no_check:
        print("--no-check: damaged weights go unnoticed", file=sys.stderr)
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        if options.trust_native:
            trust_package(options.folder)
        model = OrtModel(options.folder, options.threads, options.provider, check=not options.no_check)
        model.start()
        if options.prompt_ids:
            stream_answer(model, None, options.prompt_ids, options.tokens, sampling)
            return 0
        text = Text(model)
        if options.chat:
            chat(model, text, options.tokens, sampling, options.system)
        else:
            stream_answer(model, text, text.encode(options.prompt), options.tokens, sampling)
    except (RunError, MemoryError) as error:
        if options.debug:
            raise
        print(f"error: {error or 'out of memory'}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
