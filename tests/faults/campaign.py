"""Small packages with and without planted faults, verified: what is found, and how far the faults that are not move the logits."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from still_export.graph.options import ExportOptions
from still_export.package.folder import GENERATED, Package, open_package, write_manifest
from still_export.package.refusals import CheckError, RunError
from still_export.proof.answers import EMPTY, Decisions, DecisionsByCase
from still_export.proof.cases import Case
from still_export.proof.judge import Report
from still_export.proof.kernels import compare_kernels
from still_export.proof.prompts import Ranges
from still_export.proof.runs import DrawnOnce, judge, torch_cases
from still_export.proof.sessions import Session, Subject, widened_manifest
from still_export.proof.texts_asked import prompt_words
from still_export.proof.verify import Verifier
from still_export.proof.widen import WideModel
from still_export.runtime import ort
from still_export.targets.export import export
from tests.faults import graph, native, runner, states, weights  # noqa: F401 (they register faults)
from tests.faults.registry import FAULTS, Fault
from tests.still_export.linear_models import linear_model
from tests.still_export.tiny import CHUNK, MIXED, still_model

MOST = 8
"""Answers of a case that are kept, the clean package's first."""
LENGTHS, STEPS = (1, CHUNK + 1, 6 * CHUNK), 3 * CHUNK
WIDE = dict(hidden_size=96, intermediate_size=128, head_dim=16)
MODELS: dict[str, Callable[[], Any]] = {
    "hybrid": lambda: still_model("llama", torch.float32, seed=3, sizes=WIDE, layer_types=MIXED),
    "grouped": lambda: still_model("qwen2", torch.float32, seed=4, select_scope="kv_group_max"),
    **{name: lambda name=name: linear_model(name) for name in ("qwen3_5_text", "falcon_h1", "gla", "lfm2")},
}
TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "float16 cache": {"still": {"cache": "float16"}},
    "int8 cache": {"still": {"cache": "int8"}},
    "int4": {"quantize": "int4"},
}
ANYWHERE = {"weights", "states", "runner"}
PLACES = {"float32": ANYWHERE | {"graph", "kernels"}, "native": {"native"}, "torch": ANYWHERE}
"""Where faults are planted, by what is compared: the graph in float32 by its ops' bodies, the native kernels in the package's type, with
faults in them, and PyTorch's runner."""
RUNTIMES = tuple(PLACES)


def package_of(folder: Path, model: str, kind: str) -> Package:
    """The package, made once."""
    source, package = folder / model, folder / f"{model}-{kind.replace(' ', '-')}"
    if not package.exists():
        if not source.exists():
            MODELS[model]().save_pretrained(source)
        export(ExportOptions(str(source), **TYPES[kind]), package, command="faults")
    return open_package(package)


def options_of(package: Package, dtype: str) -> ExportOptions:
    return replace(ExportOptions.from_manifest(package.manifest), dtype=dtype)


def widened(package: Package) -> Package:
    return Package(package.path, widened_manifest(package.manifest))


class Drawn(DrawnOnce):
    """Cases of prompts drawn once and judged often; of each what PyTorch answered to what a runtime chose."""

    def __init__(self, package: Package, seed: int) -> None:
        ranges, words = Ranges(LENGTHS, STEPS, (4,), seed=seed), prompt_words(package.path, package.manifest)
        super().__init__(torch_cases(package, options_of, ranges, {}, "cpu", words))
        self.known: dict[int, list[tuple[Decisions, Case]]] = {number: [] for number in range(self.count)}
        self.disturbed = False

    @property
    def cases(self) -> list[list[Case]]:
        return [[case for _, case in known] for known in self.known.values()]

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
        decisions = {number: decisions.get(number, Decisions()) for number in numbers}
        new = [n for n in numbers if not any(decisions[n].is_like(other) for other, _ in self.known[n])]
        for number, case in zip(new, self.source.draw(new, decisions) if new else [], strict=True):
            del self.known[number][MOST:]
            self.known[number].insert(1, (decisions[number], case))
        if not self.disturbed:
            known = {n: next(case for other, case in self.known[n] if decisions[n].is_like(other)) for n in numbers}
            self._drawn, self._decisions = known, decisions
        self.disturbed = False
        return [replace(self._drawn[number]) for number in numbers]

    def _drawn_again(self, *args: Any) -> Iterator[tuple[int, Case, Case]]:
        """Like DrawnOnce, for the next `draw` alone: the next fault has bounds of its own."""
        self.disturbed = True
        return super()._drawn_again(*args)


@dataclass
class Outcome:
    """What verify said of a package with a fault.

    Args:
        moved: How far the fault moved any logit, in parts of their spread; infinity where that is no number.
        changed: Whether any output differs at all.
        refused: The runtime does not run it.
    """

    fault: str
    where: str
    found: bool
    moved: float = 0.0
    changed: bool = True
    refused: bool = False


@dataclass
class Broken:
    """A package on a runtime; `package` is widened for "float32"."""

    package: Package
    runtime: str
    drawn: Drawn
    scratch: Path
    right: dict[str, Any] = field(default_factory=dict)
    """By name of a case, the outputs of the package without faults."""

    def open(self, folder: Path | None = None, arrays: dict[str, np.ndarray] | None = None) -> Any:
        if self.runtime == "torch":
            from still_export.loading.runtimes import open_runner

            model = open_runner(self.package.path, self.package.manifest, "torch")
            parameters = dict(model.model.named_parameters())
            for name, array in (arrays or {}).items():
                parameters[name].data.copy_(torch.from_numpy(array))
            return model
        if self.runtime == "float32":
            return WideModel((opened := widened(open_package(folder or self.package.path))).path, opened.manifest)
        library = native.build(self.package.path.parent / "native")
        with mock.patch.object(ort, "native_library", lambda *_: library):
            return ort.OrtModel(self.package.path, threads=1, check=False)

    def judge(self, model: Any) -> tuple[Report, list[Any]]:
        verifier = Verifier(self.package, self.drawn, Subject(self.package))
        questions = [self.drawn.begin(number) for number in range(self.drawn.count)]
        answers = verifier.ask(Session(model), questions)
        verifier.answered = questions, answers
        report, drawn = judge(verifier, self.drawn), self.drawn.draw(range(self.drawn.count), answers.decisions)
        return report, [(case, case.pairs(answers.cases[number].outputs)) for number, case in enumerate(drawn)]

    def clean(self) -> Report:
        report, settled = self.judge(self.open())
        self.right = {case.name: [actual for _, actual in pairs] for case, pairs in settled}
        return report

    def with_fault(self, fault: Fault, seed: int) -> Outcome | None:
        """Plant a fault; None where there is nothing of its kind."""
        random = np.random.default_rng([seed, sum(fault.name.encode())])
        try:
            model = self._planted(fault, random)
            if model is None:
                return None
            report, settled = self.judge(model)
            found = not report.passed or not self._kernels_hold()
        except RunError as error:  # what the runtime says of a graph that is none
            if isinstance(error, CheckError):  # of the files that were planted in: nothing was judged
                raise
            return Outcome(fault.name, fault.where, True, np.inf, refused=True)
        finally:
            if self.runtime == "native":
                native.switch(native.build(self.package.path.parent / "native"), 0)
        moved, changed = 0.0, report.selections.wrong > 0
        for case, pairs in settled:
            for (_, actual), right in zip(pairs, self.right[case.name], strict=False):
                spread = float(right["logits"].std()) or 1.0
                off = np.abs(actual["logits"] - right["logits"]).max(initial=0) / spread
                moved = max(moved, float(off) if np.isfinite(off) else np.inf)
                changed |= any(not np.array_equal(actual[n], right[n], equal_nan=True) for n in right)
        return Outcome(fault.name, fault.where, found, moved, changed)

    def _kernels_hold(self) -> bool:
        """Whether the kernels by themselves, with their fault, err no further than the bodies."""
        if self.runtime != "native":
            return True
        library = native.build(self.package.path.parent / "native")
        return all(c.passed for c in compare_kernels(self.package.path, self.package.manifest, library, "cpu", 0))

    def _planted(self, fault: Fault, random: np.random.Generator) -> Any:
        if fault.where in ("states", "runner"):
            model = self.open()
            return None if fault.plant(random, model) is False else model
        if fault.where == "native":
            model = self.open()
            ops = {
                node.op_type.lower()
                for node in onnx.load(self.package.path / "model.onnx", load_external_data=False).graph.node
            }
            return None if fault.plant(random, (model.native, ops)) is False else model
        if self.runtime == "torch":
            parameters = self.open().model.named_parameters()
            arrays = {name: p.detach().float().numpy().copy() for name, p in parameters}
            before = {name: array.copy() for name, array in arrays.items()}
            if fault.plant(random, arrays) is False:
                return None
            changed = {n: a for n, a in arrays.items() if not np.array_equal(a, before[n], equal_nan=True)}
            return self.open(arrays=changed)
        folder = self.scratch / "faulty"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.package.path, folder)
        graph_ = onnx.load(folder / "model.onnx")
        if fault.where == "weights":
            tensors = {t.name: t for t in graph_.graph.initializer}
            arrays = {name: numpy_helper.to_array(tensor).copy() for name, tensor in tensors.items()}
            if fault.plant(random, arrays) is False:
                return None
            for name, tensor in tensors.items():
                tensor.CopyFrom(numpy_helper.from_array(arrays[name], name))
        elif fault.plant(random, graph_) is False:
            return None
        onnx.save(graph_, folder / "model.onnx")
        kept = {k: v for k, v in self.package.manifest.items() if k not in GENERATED}
        write_manifest(folder, {name: x for name, x in kept.items() if name != "widened"})
        return self.open(folder)


def outcomes(subject: Broken, seeds: Sequence[int], faults: Sequence[Fault] = ()) -> Iterator[Outcome]:
    for fault in faults or FAULTS:
        if fault.where in PLACES[subject.runtime]:
            for seed in seeds:
                outcome = subject.with_fault(fault, seed)
                if outcome is None:
                    break
                if outcome.changed:
                    yield outcome
