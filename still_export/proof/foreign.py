"""The proof of packages that other exporters made, against their model: logits, prompts in pieces, batches, padding, and keys and values
where tensor names identify them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import ConfigError, UnsupportedError
from still_export.package.refusals import first_line
from still_export.proof.foreign_weights import NotDecoded
from still_export.proof.server import activations_in_8_bits
from still_export.proof.verdict import Check
from still_export.runtime.foreign import MASK, TOKENS, ForeignModel, ForeignState

LENGTHS = (1, 7, 64, 65, 131)
"""Prompt lengths: traces are short, and chunks of linear attention have 64 tokens."""

FACTOR = 16
"""Allowed multiple of PyTorch's own rounding error; clean packages of other exporters reach 2."""

STEPS = 24
"""Single tokens after a prompt."""

LEAST = 1e-6
"""Least bound, relative to a value's size: float32 has 24 bits."""

ROUNDED = 3
"""Allowed multiple of the error of PyTorch's run with activations in 8 bits, for packages that round them."""

FLIPS = 0.05
"""Allowed difference of a package's answers from each other in standard deviations of the logits, if its activations are rounded to 8 bits
and its weights are not decoded here: sums near a rounding boundary may flip."""

QUANTIZED = ("MatMulNBits", "GatherBlockQuantized", "QMoE", "DequantizeLinear")
INTEGER = ("MatMulInteger", "DynamicQuantizeMatMul")


class Reference:
    """A model by its own class in transformers, in float64 and in the package's type.

    Args:
        model: Folder or hub id.
        half: The package computes in float16.

    Raises:
        ConfigError: transformers cannot read it.
    """

    def __init__(self, model: str, half: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from still_export.proof.other_readers import by_pytorch

        self.model = by_pytorch(_read(AutoModelForCausalLM, model, dtype=torch.float32).eval())
        self.dtype = torch.float16 if half else torch.float32

    def take_weights(self, files: set[Path]) -> int:
        """Compute with a decoder's own low-bit weights from now on; their number. Raises NotDecoded."""
        from still_export.proof.foreign_weights import take_weights

        return take_weights(self.model, files)

    def run(self, sequences: np.ndarray, exact: bool, rounds: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(logits [B, T, vocabulary], keys and values by "layer.key") of whole sequences [B, T]; `rounds`: activations in 8 bits."""
        import torch

        from still_export.mixers.cache_layer import CACHE

        self.model.to(torch.float64 if exact else self.dtype)
        with torch.no_grad(), activations_in_8_bits(self.model) if rounds else nullcontext():
            result = self.model(torch.from_numpy(sequences), use_cache=True)
        caches = {}
        for index, layer in enumerate(getattr(getattr(result, CACHE), "layers", ())):
            for kind in ("key", "value"):
                tensor = getattr(layer, f"{kind}s", None)
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 4:  # [B, heads, T, D]
                    caches[f"{index}.{kind}"] = tensor.double().numpy()
        logits: np.ndarray = result.logits.double().numpy()
        self.model.to(torch.float32)
        return logits, caches


@dataclass
class ForeignReport:
    """What was compared.

    unseen: What could not be, and why.
    quantized: The package's weights are not the model's, and not decoded: its calls are compared with each other.
    decoded: Number of low-bit weights that the reference took from the package.
    rounds: Its activations are rounded to 8 bits, too.
    """

    checks: list[Check] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    quantized: bool = False
    rounds: bool = False
    decoded: int = 0

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


class ForeignProof:
    """Compares a package with its model.

    Args:
        path: See ForeignModel.
        model: Folder or hub id of the model that it was made from.

    Raises:
        ConfigError: The model cannot be read, or is another one.
        PackageError: The package cannot be read.
        UnsupportedError: It has no states, or inputs of unknown meaning.
    """

    def __init__(self, path: Path, model: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> None:
        from transformers import AutoConfig

        config = _read(AutoConfig, model).get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.package = ForeignModel(path, size)
        width = self.package.next.outputs["logits"].shape[-1]
        if isinstance(width, int) and width != config.vocab_size:
            raise ConfigError(
                f"--model {model}: {path} gives logits of {width} tokens, the model {config.vocab_size}. Name the one it was made from."
            )
        self.report = _report(self.package)
        self.reference = Reference(model, any(s.dtype == np.float16 for s in self.package.states))
        if self.report.quantized:
            self._decode()
        limit = getattr(config, "max_position_embeddings", max(lengths) + 1)
        self.lengths = tuple(n for n in lengths if n <= limit)
        if not self.lengths:
            raise ConfigError(f"--lengths {','.join(map(str, lengths))}: the model has {limit} positions.")
        draw = np.random.default_rng(seed)
        self.sequences = draw.integers(0, config.vocab_size, (2, max(self.lengths)))

    def _decode(self) -> None:
        """Let the reference compute with the package's low-bit weights, or say why it cannot."""
        try:
            self.report.decoded = self.reference.take_weights({self.package.first.path, self.package.next.path})
            self.report.quantized = False
        except NotDecoded as error:
            self.report.unseen.append(f"low-bit weights against the model's: {error}")
            width = self.package.next.outputs["logits"].shape[1]
            if (
                isinstance(self.package.next.inputs[TOKENS].shape[1], str)
                and width != self.package.next.inputs[TOKENS].shape[1]
            ):
                raise UnsupportedError(
                    f"{self.package.next.path} gives logits of the last token alone, and its weights are not decoded here ({error}), so "
                    "there is nothing to compare the others with. Export it with logits of all tokens."
                ) from error

    @cached_property
    def exact(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Answers of the model in float64; for a quantized package its own answers to whole prompts."""
        if not self.report.quantized:
            return self.reference.run(self.sequences, exact=True)
        logits = []
        for sequence in self.sequences:
            self.package.start(1)
            logits.append(self.package.feed(sequence[None]))
        return np.concatenate(logits).astype(np.float64), {}

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Allowed error by output, from the errors of the model in its own type against float64."""
        exact, caches = self.reference.run(self.sequences, exact=True)
        rounded, others = self.reference.run(self.sequences, exact=False)

        def bound(a: np.ndarray, b: np.ndarray) -> float:
            return max(FACTOR * float(np.abs(a - b).max()), LEAST * float(np.abs(a).max()))

        logits = bound(exact, rounded)
        if self.report.rounds and self.report.quantized:
            logits = max(logits, FLIPS * float(self.exact[0].std()))
        elif self.report.rounds:
            eight, cached = self.reference.run(self.sequences, exact=True, rounds=True)
            logits = max(logits, ROUNDED * float(np.abs(exact - eight).max()))
            error = {name: ROUNDED * float(np.abs(x - cached[name]).max()) for name, x in caches.items()}
            return {"logits": logits, **{n: max(bound(x, others[n]), error[n]) for n, x in caches.items()}}
        return {"logits": logits, **{name: bound(x, others[name]) for name, x in caches.items()}}

    def run(self) -> ForeignReport:
        """Every comparison that the package's inputs allow."""
        most = self.lengths[-1]
        steps = min(STEPS, most - 1)
        for length in self.lengths:
            self._compare(f"a prompt of {length}", 1, [length])
        self._compare("two rows", 2, [most])
        if self.package.apart and self.package.next.one_token():
            self.report.unseen.append("a prompt in pieces: its graph of steps takes one token a call")
        else:
            for counts in ([most // 2, 1], [1], [most // 3, *[17] * (most // 34)]):
                pieces = [*counts, most - sum(counts)]
                self._compare(f"in pieces of {', '.join(map(str, pieces))}", 1, pieces)
        if steps:
            for n in (1, 2):
                self._compare(f"{steps} steps behind {most - steps}, batch {n}", n, [most - steps, *[1] * steps])
            self._padding(most, steps)
        self._unseen_states()
        return self.report

    def _compare(self, name: str, batch: int, pieces: list[int]) -> None:
        """Compare the first `batch` sequences, read in calls of `pieces` tokens."""
        ends = list(accumulate(pieces))
        exact, caches = self.exact

        def read() -> Iterator[tuple[str, float]]:
            self.package.start(batch)
            for begin, end in zip([0, *ends], ends, strict=False):
                found = self.package.feed(self.sequences[:batch, begin:end])
                yield "logits", _off(found, exact[:batch, end - found.shape[1] : end])
            for state, key in self._named():
                cache = self.package.arrays[state.name]
                if key in caches and cache.shape[2] == ends[-1]:
                    yield key, _off(cache, caches[key][:batch, :, : ends[-1]])

        self.report.checks.append(self._result(name, read))

    def _padding(self, most: int, steps: int) -> None:
        """Compare a shorter and a longer sequence in one call, and steps after it, padded left or right: one side must match."""
        if not self.package.takes(MASK):
            self.report.unseen.append(f"padding: there is no {MASK}")
            return
        long = most - steps
        short, results = max(1, long // 2), []
        for side, place in (("left", slice(long - short, long)), ("right", slice(0, short))):
            tokens, mask = self.sequences[:, :long].copy(), np.ones((2, long), np.int64)
            tokens[1], mask[1] = self.sequences[0, 0], 0
            tokens[1, place], mask[1, place] = self.sequences[1, :short], 1

            def read(
                tokens: np.ndarray = tokens, mask: np.ndarray = mask, place: slice = place
            ) -> Iterator[tuple[str, float]]:
                self.package.start(2)
                found = self.package.feed(tokens, mask)
                if found.shape[1] == long:
                    yield "logits", _off(found[1, place], self.exact[0][1, :short])
                    yield "logits", _off(found[0], self.exact[0][0, :long])
                for step in range(steps):
                    at = [long + step, short + step]
                    found = self.package.feed(self.sequences[[0, 1], at][:, None])
                    yield "logits", _off(found[:, -1], self.exact[0][[0, 1], at])

            results.append(self._result(f"padding on the {side}", read))
        if any(check.passed for check in results):
            self.report.unseen += [f"{check.name} does not hold: {check.what}" for check in results if not check.passed]
            results = [check for check in results if check.passed]
        self.report.checks += results

    def _result(self, name: str, read: Callable[[], Iterator[tuple[str, float]]]) -> Check:
        """The check of the value with the largest share of its bound."""
        try:
            found = list(read())
        except UnsupportedError as error:
            return Check(name, False, str(error))
        worst, off = max(found, key=lambda pair: pair[1] / self.bounds[pair[0]])
        wrong = dict.fromkeys(what for what, error in found if error > self.bounds[what])
        where = f" (wrong: {', '.join(wrong)})" if wrong else ""
        return Check(name, not wrong, f"{worst} off by {off:.2g}, bound {self.bounds[worst]:.2g}{where}")

    def _named(self) -> Iterator[tuple[ForeignState, str]]:
        """States whose names have layer and kind, with the reference's name."""
        for state in self.package.states:
            if found := re.search(r"(\d+)\D*?(key|value)s?\b", state.name):
                yield state, f"{found[1]}.{found[2]}"

    def _unseen_states(self) -> None:
        if self.report.decoded:
            self.report.unseen.append(
                f"what quantizing costs: PyTorch computes with the package's own numbers of {self.report.decoded} low-bit weights"
            )
        if self.report.quantized:
            self.report.unseen.append(
                "what quantizing costs: its weights are not the model's, so calls are compared with its own"
            )
            if self.report.rounds:
                self.report.unseen.append(
                    f"faults that move logits by less than {self.bounds['logits']:.2g}: activations are rounded"
                )
            return
        known = {state.name for state, key in self._named() if key in self.exact[1]}
        others = [state.name for state in self.package.states if state.name not in known]
        if others:
            shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            self.report.unseen.append(
                f"{len(others)} states by themselves ({shown}); logits of later calls show what is wrong in them"
            )


def _report(package: ForeignModel) -> ForeignReport:
    """An empty report with the roundings that the graph's nodes show."""
    import onnx

    files = {package.first.path, package.next.path}
    nodes = [node for file in files for node in onnx.load(file, load_external_data=False).graph.node]
    levels = {a.i for node in nodes for a in node.attribute if a.name == "accuracy_level"}
    kinds, integer = {node.op_type for node in nodes}, set(INTEGER)
    return ForeignReport(quantized=bool(kinds & {*QUANTIZED, *integer}), rounds=4 in levels or bool(kinds & integer))


def _read(kind: Any, model: str, **how: Any) -> Any:
    """What a class of transformers reads of a model."""
    try:
        return kind.from_pretrained(model, trust_remote_code=False, **how)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {model}: transformers cannot read it: {first_line(error)}") from error


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; infinity if a number is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    error = np.abs(found.astype(np.float64) - expected)
    return float(error.max()) if np.isfinite(error).all() else float("inf")
