"""All that a user runs beside the graph: a right package passes, and whatever is changed in one fails with its file named."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest

from still_export.cli.main import main
from still_export.graph.options import ExportOptions
from still_export.package.folder import Package, open_package
from still_export.package.programs import write_programs
from still_export.proof import runs as runs_of_package
from still_export.proof import sessions
from still_export.proof.answers import Decisions
from still_export.proof.derived import check_derived
from still_export.proof.package import QUICK_LEAVES_OUT, VerifyOptions, verify
from still_export.proof.package_programs import _compare_copies, _run, check_programs
from still_export.proof.prompts import Ranges
from still_export.proof.runs import (
    IN_FLOAT32,
    PORTABLE_IN_FLOAT32,
    Asking,
    compare_graphs,
    compare_runtimes,
)
from still_export.proof.sessions import Subject
from still_export.proof.torch_cases import TorchCases
from still_export.proof.verdict import Verdict
from still_export.proof.verify import Verifier
from still_export.proof.whole_package import check_files
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from still_graphs.states import StateTable
from tests.still_export.conftest import Exporter
from tests.still_export.proof.plants import planted
from tests.still_export.training import byte_tokenizer, make_base
from tests.still_export.verbs import call

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def package(exports_once: None, tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("whole")
    make_base(folder / "model")
    tokenizer = byte_tokenizer(["q z", "z q"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    settings = {"eos_token_id": [256], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "model" / "generation_config.json").write_text(json.dumps(settings))
    options = ExportOptions(str(folder / "model"), attach_untrained=True, still={"capacity_tokens": 256})
    return export(options, folder / "package", options=OrtOptions(native=False))


def model_of(package: Package) -> Path:
    return Path(package.manifest["config"]["model"])


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    said = json.loads((folder / name).read_text(encoding="utf-8"))
    change(said)
    (folder / name).write_text(json.dumps(said), encoding="utf-8")


def words_exchanged(said: Any) -> None:
    words = said["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def ids_exchanged(said: Any) -> None:
    first, second = said["added_tokens"][-2:]
    first["id"], second["id"] = second["id"], first["id"]


def other_chat(said: Any) -> None:
    templates = said["chat"]["templates"]
    templates["default"] = templates["default"].replace("<assistant>", "<assistant> ")


def chat_of_tools(said: Any) -> None:
    """A branch that no conversation reaches."""
    said["chat"]["templates"]["default"] += "{% if documents %} {% endif %}"


PADDING = dict(
    strategy={"Fixed": 16}, direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0, pad_token="!"
)
CUT = dict(direction="Right", max_length=512, strategy="LongestFirst", stride=0)
FILES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "tokenizer.json": {
        "two words exchanged": words_exchanged,
        "inputs cut to 512 tokens": lambda said: said.update(truncation=CUT),
        "inputs filled up": lambda said: said.update(padding=PADDING),
        "a special token lost": lambda said: said.update(
            added_tokens=[t for t in said["added_tokens"] if t["content"] != "<tool>"]
        ),
        "texts in lower case": lambda said: said.update(normalizer={"type": "Lowercase"}),
        "two merges exchanged, whose letters no text has": lambda said: said["model"]["merges"].reverse(),
        "a token that is special no more": lambda said: said["added_tokens"][-1].update(special=False),
        "a token that takes the blank behind it": lambda said: said["added_tokens"][-1].update(rstrip=True),
        "two special tokens exchanged": ids_exchanged,
    },
    "manifest.json: eos_token_ids": {
        "another end token": lambda said: said.update(eos_token_ids=[255]),
        "no end token": lambda said: said.update(eos_token_ids=[]),
    },
    "manifest.json: chat": {
        "another chat format": other_chat,
        "another chat format that is not asked": chat_of_tools,
        "another token of the chat format": lambda said: said["chat"]["tokens"].update(eos_token="a"),
        "an answer that begins otherwise": lambda said: said["chat"].update(start=" "),
        "no chat format": lambda said: said.update(chat=None),
    },
    "generation_config.json": {
        "another temperature": lambda said: said.update(temperature=1.5),
        "no sampling": lambda said: said.pop("do_sample"),
        "a setting of its own": lambda said: said.update(repetition_penalty=1.3),
        "another end token of the settings": lambda said: said.update(eos_token_id=[255]),
        "a beginning of its own": lambda said: said.update(bos_token_id=3),
    },
    "tokenizer_config.json": {
        "blanks cleaned up": lambda said: said.update(clean_up_tokenization_spaces=True),
        "another longest input": lambda said: said.update(model_max_length=128),
        "another end token in a file": lambda said: said.update(eos_token="a"),
    },
}


def test_every_fault_of_files_is_seen(package: Package, tmp_path: Path) -> None:
    right = check_files(package, model_of(package))
    assert right.passed and not right.not_asked, (right.checks, right.not_asked)
    assert len(right.checks) == 5
    faults = [(where, fault, change) for where, faults in FILES.items() for fault, change in faults.items()]
    for where, fault, change in [*faults, ("tokenizer_config.json", "another chat format in a file", None)]:
        with planted(package, tmp_path / fault) as folder:
            if change is None:
                (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<assistant>", ""))
            else:
                edit(folder, where.partition(":")[0], change)
        wrong = [c for c in check_files(open_package(folder), model_of(package)).checks if not c.passed]
        assert any(where in check.where for check in wrong), (fault, wrong)


@pytest.mark.parametrize(("ends", "right"), [([2], True), ([], False), ([5], False)])
def test_a_model_that_names_no_end_has_its_classs(
    package: Package, tmp_path: Path, ends: list[int], right: bool
) -> None:
    """As transformers generates with it: LlamaConfig ends at token 2."""
    source = tmp_path / "model"
    shutil.copytree(model_of(package), source)
    (source / "generation_config.json").unlink()
    edit(source, "config.json", lambda said: said.pop("eos_token_id"))
    with planted(package, tmp_path / "package") as folder:
        edit(folder, "manifest.json", lambda said: said.update(eos_token_ids=ends))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    checks = {check.name: check for check in check_files(open_package(folder), source).checks}
    assert checks["end tokens are the model's"].passed is right


def test_what_was_not_asked_is_said(export_tiny: Exporter) -> None:
    package = export_tiny()
    verdict = check_files(package, model_of(package))
    assert verdict.passed and any("token ids" in line for line in verdict.not_asked)


@pytest.mark.slow
def test_every_fault_of_programs_is_seen_and_nothing_of_a_package_runs(package: Package, tmp_path: Path) -> None:
    """The program itself, a module that it imports at its start, and one that no command needs at once."""
    right = check_programs(package)
    assert right.passed and not right.not_asked and len(right.checks) == 2, right.checks
    faults = {
        "run_ort.py": lambda text: f"open({str(tmp_path / 'ran')!r}, 'w')\n{text}",
        "runtime/runners/text.py": lambda text: f"open({str(tmp_path / 'ran')!r}, 'w')\n{text}",
        "runtime/runners/sampling.py": lambda text: text.replace("argmax", "argmin"),
    }
    for number, (name, change) in enumerate(faults.items()):
        with planted(package, tmp_path / str(number)) as folder:
            path = folder / name
            path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        copies, run = check_programs(open_package(folder)).checks
        assert not copies.passed and copies.where == name and run.passed and not (tmp_path / "ran").exists(), name


@pytest.mark.slow
def test_a_package_whose_tokenizer_has_no_tokens_is_asked_by_ids(package: Package, tmp_path: Path) -> None:
    """As transformers makes one for a folder that has none."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    with planted(package, tmp_path / "empty") as folder:
        (folder / "tokenizer.json").write_text(json.dumps(empty), encoding="utf-8")
    verdict = check_programs(open_package(folder))
    assert verdict.passed, verdict.checks


def copies(package: Package, scratch: Path) -> Verdict:
    with TemporaryDirectory(dir=scratch) as fresh:
        write_programs(Path(fresh), ["ort"])
        return _compare_copies(package, Path(fresh))


def test_programs_are_those_of_this_version(package: Package, tmp_path: Path) -> None:
    """What twelve greedy tokens do not ask: a bound of sampling, a lost file, a new one; another version's are not compared."""
    assert copies(package, tmp_path).passed
    name = "runtime/runners/sampling.py"
    changes: dict[str, Callable[[Path], Any]] = {
        name: lambda folder: (folder / name).write_text((folder / name).read_text().replace("top_p", "top_k")),
        "runtime/states.py": lambda folder: (folder / "runtime" / "states.py").unlink(),
        "runtime/more.py": lambda folder: (folder / "runtime" / "more.py").write_text(""),
    }
    for number, (where, change) in enumerate(changes.items()):
        with planted(package, tmp_path / str(number)) as folder:
            change(folder)
        (check,) = copies(open_package(folder), tmp_path).checks
        assert not check.passed and check.where == where, check
    versions = {**package.manifest["versions"], "still-export": "0.0.1"}
    older = Package(folder, {**package.manifest, "versions": versions})
    assert not copies(older, tmp_path).checks and len(copies(older, tmp_path).not_asked) == 1


@pytest.mark.slow
def test_what_another_program_reads_is_of_this_version(tmp_path: Path) -> None:
    """genai ends an answer, and draws, by a file of its own."""
    make_base(tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), attach_untrained=True, still={"capacity_tokens": 256})
    package = export(options, tmp_path / "package", to="genai")
    options = ExportOptions.from_manifest(package.manifest)
    assert check_derived(package, options).verdict.passed
    for number, change in enumerate(
        (lambda said: said["search"].update(do_sample=True), lambda said: said["model"].update(eos_token_id=[3]))
    ):
        with planted(package, tmp_path / str(number)) as folder:
            edit(folder, "genai_config.json", change)
        check = check_derived(open_package(folder), options).verdict.checks[0]
        assert not check.passed and check.where == "genai_config.json"


def every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """With those of branches."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from every_node(attribute.g.node)


def other_op(op: str, other: str) -> Callable[[onnx.ModelProto], bool]:
    """A function body with another op in the place of the first of its kind."""

    def change(model: onnx.ModelProto) -> bool:
        for function in model.functions:
            if (node := next((n for n in every_node(function.node) if n.op_type == op), None)) is not None:
                node.op_type = other
                del node.attribute[:]
                return True
        return False

    return change


NATIVE = {"library": "none.so", "system": "of no machine", "machine": "x86_64"}
GRAPHS = ("model.onnx", "portable.onnx")


def asking(package: Package) -> Asking:
    ranges = Ranges((1, 2 * StateTable.of(package.manifest).period + 1), 4, (2,))

    def options(package: Package, dtype: str) -> ExportOptions:
        return replace(ExportOptions.from_manifest(package.manifest), dtype=dtype)

    return Asking(package, options, lambda share: ranges, {}, "cpu", ())


@pytest.mark.slow
def test_every_fault_of_bodies_is_seen(export_tiny: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the graph that runs where the native kernels do not, and in the portable one. PyTorch answers once where both choose the same."""
    package = export_tiny(options={"native": False}, sizes={"num_hidden_layers": 1})
    drawn, draw = list[TorchCases](), TorchCases.draw
    monkeypatch.setattr(TorchCases, "draw", lambda self, *asked: drawn.append(self) or draw(self, *asked))
    right = compare_graphs(asking(package), {})
    assert right.passed and {each.run for each in right.outputs} == {IN_FLOAT32, PORTABLE_IN_FLOAT32}
    assert len(drawn) == 1
    exp, softmax = other_op("Exp", "Neg"), other_op("Softmax", "Identity")
    runs = {"model.onnx": IN_FLOAT32, "portable.onnx": PORTABLE_IN_FLOAT32}
    for number, changes in enumerate(({"model.onnx": exp}, {"portable.onnx": exp}, dict.fromkeys(GRAPHS, softmax))):
        with planted(package, tmp_path / str(number)) as folder:
            for name, change in changes.items():
                graph = onnx.load(package.path / name, load_external_data=False)
                assert change(graph)
                onnx.save(graph, folder / name)
        wrong = compare_graphs(asking(open_package(folder)), {})
        assert {each.run for each in wrong.mismatches} == {runs[name] for name in changes}, wrong.mismatches


@pytest.mark.slow
@pytest.mark.whole
def test_quick_says_what_it_leaves_out(export_tiny: Exporter, tmp_path: Path) -> None:
    package = export_tiny(options={"native": False}, sizes={"num_hidden_layers": 1})
    report = verify(package.path, VerifyOptions(quick=True), tmp_path).report
    assert report.passed and {"prefill 1", "prefill 65"} <= {each.case for each in report.outputs}
    assert set(QUICK_LEAVES_OUT) <= set(report.not_asked)


@pytest.mark.slow
def test_both_providers_are_asked(export_tiny: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package with kernels for GPUs, where there is one; the CPU stands for it here, and runs a fault."""
    package = export_tiny(options={"native": False}, sizes={"num_hidden_layers": 1})
    package = replace(package, manifest={**package.manifest, "native": {**NATIVE, "archs": ["sm_90"]}})
    alone = compare_runtimes(asking(package), Subject(package), 0, None)
    assert alone.passed and any("kernels for GPUs" in line for line in alone.not_asked)
    with planted(package, tmp_path / "planted") as folder:
        graph = onnx.load(package.path / "model.onnx", load_external_data=False)
        assert other_op("Exp", "Neg")(graph)
        onnx.save(graph, folder / "model.onnx")
    right = sessions.open_runner
    monkeypatch.setattr(runs_of_package, "cuda_missing", lambda: "")
    for place, wrong in ((package.path, set()), (folder, {"ONNX Runtime CUDA"})):

        def open_runner(
            path: Path, manifest: Any, runtime: str, provider: str, place: Path = place, **more: Any
        ) -> Any:
            return right(place if provider == "cuda" else path, manifest, runtime, **more)

        monkeypatch.setattr(sessions, "open_runner", open_runner)
        report = compare_runtimes(asking(package), Subject(package), 0, None)
        assert {each.run for each in report.outputs} == {"ONNX Runtime", "ONNX Runtime CUDA"} and not report.not_asked
        assert {each.run for each in report.mismatches} == wrong


@pytest.mark.slow
def test_a_second_comparison_asks_the_runtime_nothing(
    export_tiny: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = export_tiny(options={"native": False}, sizes={"num_hidden_layers": 1})
    opened, right = list[Subject](), Subject.open
    monkeypatch.setattr(Subject, "open", lambda self, *more: opened.append(self) or right(self, *more))
    verifier = Verifier(package, asking(package).cases(package), Subject(package), 4)
    first, second = (verifier.run(tmp_path / name) for name in ("first", "second"))
    assert first.passed and len(opened) == 1
    assert [vars(each) for each in first.outputs] == [vars(each) for each in second.outputs]
    assert vars(first.selections) == vars(second.selections) and first.checks == second.checks


def test_choices_are_alike_whose_numbers_are_near() -> None:
    keys = np.random.default_rng(0).standard_normal((1, 2, 6, 8))
    keys[0, 0, 5] = np.inf  # of no token
    near, far = keys + 1e-5, keys.copy()
    far[0, 1, 2] = far[0, 1, 3]
    one = Decisions(selected={0: keys})
    assert one.is_like(one) and one.is_like(Decisions(selected={0: near}), 1e-3)
    assert not one.is_like(Decisions(selected={0: near})) and not one.is_like(Decisions(selected={0: far}), 1e-3)
    assert not one.is_like(Decisions([np.zeros((1, 3, 2))], {0: keys}), 1e-3)


@pytest.mark.slow
@pytest.mark.whole
def test_verify_asks_all_of_it(package: Package, tmp_path: Path) -> None:
    """One call, one verdict: a package that is right but for a word of its tokenizer fails."""
    with planted(package, tmp_path / "other") as folder:
        edit(folder, "tokenizer.json", words_exchanged)
    report = verify(folder, VerifyOptions(lengths=(3,), decode_steps=1), tmp_path).report
    names = {check.name.partition(" ")[0] for check in report.checks}
    assert {"every", "the", "generation", "end", "portable"} <= names
    wrong = {check.where for check in report.checks if not check.passed}
    assert not report.passed and wrong == {"tokenizer.json", "tokenizer_config.json", "manifest.json: chat"}


@pytest.mark.slow
def test_a_package_whose_model_is_gone(
    export_tiny: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its graphs are compared with each other, and the verdict says against what."""

    def lost(said: Any) -> None:
        said["config"]["model"] = str(tmp_path / "gone")

    verdicts = []
    for broken in (False, True):
        with planted(export_tiny(options={"native": False}), tmp_path / str(broken)) as folder:
            edit(folder, "manifest.json", lost)
            if broken:
                graph = onnx.load(folder / "portable.onnx", load_external_data=False)
                assert other_op("Exp", "Neg")(graph)
                onnx.save(graph, folder / "portable.onnx")
        with pytest.raises(SystemExit) as end:
            main(["verify", str(folder), "--quiet"])
        said = capsys.readouterr().out
        assert "gone does not exist" in said and "name it with --model" in said
        verdicts.append((end.value.code, said.strip().splitlines()[0]))
    assert verdicts == [
        (0, "PASSED against the package's own weights"),
        (1, "FAILED against the package's own weights"),
    ]
    assert call("verify", folder, "--quiet", "--model", tmp_path / "gone") == 2


def test_what_a_program_says_is_not_changed() -> None:
    """A model may answer with a carriage return, which text mode takes for the end of a line."""
    said = _run([sys.executable, "-c", "import sys; sys.stdout.write('a' + chr(13) + 'b' + chr(13) + chr(10))"]).stdout
    assert said == "a\rb\r\n"


def test_a_process_of_its_own_has_other_packages_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packages lie in a folder of PYTHONPATH, and this project in another."""
    others, project = tmp_path / "others", tmp_path / "project"
    (project / "still_export").mkdir(parents=True)
    others.mkdir()
    (others / "only_here.py").write_text("print('seen')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(project), str(others)]))
    done = _run([sys.executable, "-c", "import only_here, sys; print([p for p in sys.path if p.endswith('project')])"])
    assert (done.returncode, done.stdout) == (0, "seen\n[]\n"), done.stderr
