"""The command line: what a user types, sees, and gets as exit code."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.cli.errors import as_typed
from still_export.cli.main import PANELS, VERBS, app
from still_export.cli.output import Output
from still_export.errors import ConfigError
from still_export.evaluation.bench import BenchOptions, Measurement, OtherPrograms, busy, load_of
from still_export.graph.options import ExportOptions
from still_export.options import flag_of
from still_export.runtime.options import AnswerOptions
from still_export.runtime.sampling import RunError
from still_export.runtime.snapshot import Snapshot
from still_export.serving.options import ServeOptions
from still_export.targets.registry import TARGETS
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import plain_model, still_model
from tests.still_export.verbs import call

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model"
    still_model("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "plain"
    plain_model("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_export_run_verify_inspect_bench(model: Path, tmp_path: Path, capsys: Capture) -> None:
    """The whole way, in the exact short form, each verb naming the next."""
    package = tmp_path / "package"
    assert call(model, "--to", "onnx", "-o", package) == 0
    assert f"still-export run {package} --prompt-ids 1,2,3" in capsys.readouterr().out  # it has no tokenizer

    assert call("run", package, "--prompt-ids", "5,6,7", "--max-new-tokens", "4", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4

    ci = tmp_path / "ci" / "junit.xml"
    assert call("verify", package, "--lengths", "1,40", "--decode-steps", "10", "--junit", ci, "--polygraphy") == 0
    assert 'failures="0"' in ci.read_text()
    shown = capsys.readouterr().out
    assert shown.startswith("PASSED\n") and "prompts of 1, 40 tokens" in shown
    (command,) = (line.partition("polygraphy: ")[2] for line in shown.splitlines() if "by polygraphy: sh " in line)
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    assert done.returncode == 0 and "Pass Rate: 100.00%" in done.stdout, done.stdout[-2000:]

    assert call("inspect", package, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"]["still::HybridAttention"] == 3
    (kind,) = found["layers"]
    assert kind["layers"] == [0, 1, 2] and kind["growing"] == ["salient_key", "salient_value"]
    assert found["precision"]["weights"] == "float32" and "window_key" in found["precision"]["states in float32"]
    assert found["here"][0]["what"] == "ONNX Runtime, CPU" and found["here"][0]["able"]
    sizes = {row["tokens"]: row["state_bytes"] for row in found["state"]}
    from still_export.runtime.ort import OrtModel

    runner = OrtModel(package)
    runner.start(tokens=256)
    assert list(sizes) == [256] == [found["capacity"]["capacity_tokens"]]
    assert sizes[256] == sum(array.nbytes for array in runner.state_arrays().values())

    assert call("bench", package, "--lengths", "40,100", "--steps", "3", "--quiet", "-o", tmp_path / "bench") == 0
    bench = tmp_path / "bench" / "bench.json"
    content = json.loads(bench.read_text())
    assert [row["length"] for row in content["rows"]] == [40, 100] and all(
        row["decode_ms"] > 0 for row in content["rows"]
    )
    assert capsys.readouterr().out.splitlines()[-2].endswith(content["load"]) and {
        row["rounds"] for row in content["rows"]
    } == {3}
    assert call("bench", package, "--lengths", "40", "--rounds", "1", "--beside", bench, "-o", tmp_path / "more") == 0
    assert "one round; " in (said := capsys.readouterr().out) and "ratio to the other" in said

    capsys.readouterr()
    assert call("inspect", package) == 0
    said = capsys.readouterr().out.splitlines()
    first = said[-5:]  # what a terminal shows
    assert said[-9].endswith("more files: --json lists them")
    assert [line.split(":")[0] for line in first] == ["what", "size", "length", "speed", "next"]
    assert first[0].startswith("what: model: llama, 3 layers") and first[2] == "length: 256 tokens, then refuses more"
    assert f"still-export bench {package}" in first[3] and f"still-export run {package}" in first[4]
    (package / "bench").mkdir()
    for is_busy in (False, True):
        (package / "bench/bench.json").write_text(json.dumps({**content, "busy": is_busy}))
        assert call("inspect", package) == 0
        shown = capsys.readouterr().out
        assert ("speed: here " in shown and "ms a token after 100" in shown) != is_busy and "MiB" not in shown


@pytest.mark.slow
def test_verify_of_a_half_precision_package(export_tiny: Exporter, tmp_path: Path, capsys: Capture) -> None:
    """PyTorch's calls are in float32; the package takes and is saved in its own type, which polygraphy's command repeats."""
    package = export_tiny("llama", "float16").path
    assert call("verify", package, "--lengths", "17", "--decode-steps", "9", "-o", tmp_path, "--polygraphy") == 0
    assert "nearest to its bound: " in capsys.readouterr().out
    done = subprocess.run(["sh", tmp_path / "polygraphy.sh"], capture_output=True, text=True)
    assert done.returncode == 0 and "Pass Rate: 100.00%" in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
def test_manifest_repeats_the_export(export_tiny: Exporter, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    package = export_tiny()
    request.getfixturevalue("traced_anew")
    assert call("export", "--config", package.path / "manifest.json", "-o", tmp_path / "again", "--quiet") == 0
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "again" / name).read_bytes() == (package.path / name).read_bytes()


@pytest.mark.parametrize("config", [0.5, {}, {"model": "x", "overlays": 1.5}])
def test_a_manifest_without_options_is_named(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"manifest\.json: config"):
        ExportOptions.from_manifest({"config": config})


@pytest.mark.slow
def test_choices_of_deployment_go_with_what_was_trained(export_tiny: Exporter, model: Path, tmp_path: Path) -> None:
    """How long the context may be and in which pieces a prompt is read is not what training fixed."""
    choices = ("--capacity-tokens", "300", "--overflow", "fold_oldest", "--prefill-tokens", "40", "--quiet")
    assert call(model, "--to", "onnx", "-o", tmp_path / "package", *choices) == 0
    manifest = json.loads((tmp_path / "package" / "manifest.json").read_text())
    assert manifest["capacity"] == {"capacity_tokens": 300, "bounded": False} and manifest["prefill_tokens"] == 40
    before = export_tiny().manifest["still"]
    assert manifest["still"] == {**before, "capacity_tokens": 300, "overflow": "fold_oldest"}


def test_manifest_names_the_model_and_its_overlays_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """verify reads both again, perhaps from another working directory; hub ids stay what they are."""
    seen = []

    def export(asked: ExportOptions, *_: object, **__: object) -> None:
        seen.append(asked)
        raise ConfigError("enough")

    monkeypatch.setattr("still_export.targets.export.export", export)
    for name in ("check_model", "check_overlay"):  # of folders that are empty, and a hub that is not asked
        monkeypatch.setattr(f"still_export.cli.export.{name}", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    assert call("base", "--overlay", "adapter", "--overlay", "org/maps", "-o", "p") == 2
    assert seen[0].model == str(tmp_path / "base")
    assert seen[0].overlays == (str(tmp_path / "adapter"), "org/maps")


@pytest.mark.slow
def test_verify_finds_another_model(export_tiny: Exporter, tmp_path: Path, capsys: Capture) -> None:
    """A model that differs in one weight of layer 1: exit 1, the layer named, and polygraphy says the same."""
    changed = still_model("llama", torch.float32)
    with torch.no_grad():
        changed.model.layers[1].self_attn.feature_k_weight[2] += 0.5
    changed.save_pretrained(tmp_path / "changed")
    arguments = (
        "--model",
        tmp_path / "changed",
        "--lengths",
        "40",
        "--decode-steps",
        "9",
        "-o",
        tmp_path / "report",
        "--json",
    )
    assert call("verify", export_tiny().path, *arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and report["first_diverging_layer"] == 1
    done = subprocess.run(shlex.split(report["polygraphy"]), capture_output=True, text=True)
    assert done.returncode == 1


def test_attach_untrained_is_asked_for(plain: Path, tmp_path: Path, capsys: Capture) -> None:
    assert call(plain, "--to", "onnx", "-o", tmp_path / "p") == 2
    message = capsys.readouterr().err
    assert "plain softmax" in message and "--attach-untrained" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("{model}", "--to", "onnx"), "-o DIR"),
        (("{model}", "--to", "onxx", "-o", "{out}"), "unknown"),
        (("{model}", "--to", "onnx", "-o", "{exists}"), "--force"),
        (("{empty}", "--to", "onnx", "-o", "{out}"), "config.json"),
        (("no/such/model/at-all", "--to", "onnx", "-o", "{out}"), "does not exist"),
        (("{model}", "--to", "onnx", "-o", "{out}", "--chunk-size", "16"), "configuration of its own"),
        (("run", "{empty}", "--prompt", "x"), "no exported package"),
        (("run", "{exists}", "--prompt", "x", "--prompt-ids", "5"), "give one of"),
        (("verify", "{exists}", "--lengths", "a"), "numbers"),
        (("verify", "{exists}", "--lengths", "8,0"), "outside 1..256"),
        (("verify", "{exists}", "--lengths", "257"), "outside 1..256"),
        (("verfy", "{exists}"), "Did you mean 'verify'?"),
        (
            ("{model}", "--to", "onnx", "-o", "{out}", "--batch", "2"),
            "--batch: for --to trt",
        ),
        (("{model}", "--to", "onnx", "-o", "{out}", "--arch", "sm_90", "--no-native"), "--no-native leaves"),
        (("{model}", "--to", "onnx", "-o", "{out}", "--prefill-tokens", "0"), "--prefill-tokens 0"),
        (
            ("{model}", "--to", "onnx", "-o", "{out}", "--capacity-tokens", "ten"),
            "--capacity-tokens ten: give a whole number",
        ),
        (
            ("{model}", "--to", "onnx", "-o", "{out}", "--capacity-tokens", "3"),
            "--capacity-tokens 3 is less than a chunk",
        ),
        (
            ("{model}", "--to", "onnx", "-o", "{out}", "--capacty-tokens", "8"),
            "--capacty-tokens is no flag here; near it: --capacity",
        ),
        (("run", "{exists}", "--prompt", "x", "--tokens", "-1"), "--tokens -1: it must be at least 1"),
        (("run", "{exists}", "--prompt-ids", "5", "--tokens=900"), "/manifest.json --capacity-tokens ... -o OTHER"),
        (("run", "{exists}", "--prompt", "x", "--top-p", "7"), "--top-p 7: it must be at most 1"),
        (("run", "{exists}", "--prompt", "x", "--temperature"), "--temperature needs a value"),
        (("run", "{exists}", "--prompt", "x", "--prefix-cache", "2Gx"), "no size"),
        (("run", "{exists}", "--prompt", "x", "--when-full", "dorp"), "Did you mean 'drop'?"),
        (("run", "{exists}", "--prompt-file", "none.txt"), "--prompt-file none.txt: there is no such file"),
        (("run", "{exists}", "--prompt", ""), "the prompt is empty"),
        (("run", "{exists}", "--prompt", "x", "--system", "be kind"), "--system and --chat-template-kwargs are for"),
        (("run", "{exists}", "--prompt", "x", "--guess", "lookup"), "accepts no guesses: export it with --speculate"),
        (("run", "{exists}", "--chat", "--json"), "--json prints one answer"),
        (("run", "{exists}", "--prompt", "x", "--save-state", "{empty}"), "is a folder. Name a file"),
        (("run", "{exists}", "more", "--prompt", "x"), "more: one word too many"),
        (("run",), "Missing argument"),
        (("verify", "{exists}", "--calls", "none.npz"), "--calls none.npz: there is no such file"),
        (("verify", "{exists}", "--model", "{plain}"), "--model is a plain softmax model"),
        (("verify", "{exists}", "--reference-device", "gpu"), "known: cpu, cuda"),
        (("build", "{exists}"), "has no engines"),
        (("prove", "{empty}"), "no exported package"),
        (("serve", "{text}"), "is a file, not an exported package"),
        (("inspect", "{empty}"), "no exported package"),
        (("export", "--config", "{empty}/none.json", "-o", "{out}"), "none.json: there is no such file"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_bad_input(
    arguments: tuple[str, ...],
    message: str,
    model: Path,
    plain: Path,
    export_tiny: Exporter,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """An error begins with what was typed, the folder or the verb, ends with something to type, and leaves nothing behind."""
    empty = tmp_path / "empty"
    empty.mkdir()
    places = {"model": model, "plain": plain, "out": tmp_path / "out", "exists": export_tiny().path, "empty": empty}
    typed = [a.format(**places, text=__file__) for a in arguments]
    assert call(*typed) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert message in said
    kind, _, sentence = said.partition(": ")
    verb = typed[0] if typed[0] in VERBS else "export"
    assert kind.endswith("Error") and (
        sentence.startswith((verb, *typed[:2])) or any(word in sentence for word in typed[:2])
    )
    assert re.search("still-export |pip install |--force|Give |Did you mean", sentence)
    assert [x.name for x in tmp_path.iterdir()] == ["empty"] and not list(empty.iterdir())


@pytest.mark.parametrize("command", ["run --prompt-ids 5", "verify", "prove"])
def test_changed_file_is_refused(command: str, export_tiny: Exporter, tmp_path: Path, capsys: Capture) -> None:
    package = tmp_path / "package"
    shutil.copytree(export_tiny().path, package)
    with (package / "model.onnx.data").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    verb, *flags = command.split()
    assert call(verb, package, *flags) == 2
    said = capsys.readouterr()
    assert "SHA-256" in said.err and "PASSED" not in said.out


def test_prompt_beyond_the_capacity(export_tiny: Exporter, capsys: Capture) -> None:
    assert call("run", export_tiny().path, "--prompt-ids", ",".join(["5"] * 257), "--tokens", "1") == 2
    assert "capacity of 256 tokens" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing(
    number: int, model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import still_export.graph.lower

    def interrupt(traced: object, weights: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(still_export.graph.lower, "lower_program", interrupt)
    assert call(model, "--to", "onnx", "-o", tmp_path / "p") == 2
    assert "Interrupted" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["verify", "bench", "evaluate"])
def test_results_that_cannot_be_written_are_refused_before_the_work(
    verb: str, model: Path, export_tiny: Exporter, tmp_path: Path, capsys: Capture
) -> None:
    """A package may lie on a read-only disk; here a file is in the way."""
    (tmp_path / "file").touch()
    place = export_tiny().path if verb in ("verify", "bench") else model
    assert call(verb, place, "-o", tmp_path / "file" / "results") == 2
    assert "Choose another folder with -o" in capsys.readouterr().err


@pytest.mark.slow
def test_version_and_help(capsys: Capture) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("still-export ")
    assert call("--help") == 0
    assert "install-completion" not in capsys.readouterr().out
    for verb in ("export", "run", "verify", "inspect", "bench"):
        assert call(verb, "--help") == 0
        assert "Example" in capsys.readouterr().out
    names = [command.name for command in app("export").registered_commands]
    assert len(names) == len(set(names)) > 5, "every call registers the verbs again"


def test_help_has_what_everyone_needs_first_and_groups_by_target(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    app.cache_clear()  # help is plain in narrow terminals

    def groups(verb: str) -> dict[str, set[str]]:
        assert call(verb, "--help") == 0
        parts = re.split(r"╭─ (.+?) ─+╮", capsys.readouterr().out)[1:]
        found = zip(parts[::2], parts[1::2], strict=True)
        return {title: set(re.findall(r"^│[ *]+(--[a-z0-9-]+)", text, re.M)) for title, text in found}

    exported, lowered = groups("export"), groups("lower")
    assert len(exported["Options"]) <= 15 and {"--to", "--dtype", "--quantize"} < exported["Options"]
    targets = {title: flags for title, flags in exported.items() if title.startswith("With --to")}
    assert targets == {title: flags for title, flags in lowered.items() if title.startswith("With --to")}
    for target in TARGETS:
        for name in target.flags:
            (title,) = (
                title for title, flags in targets.items() if flag_of(target.options, name).split("/")[0] in flags
            )
            assert target.to in title.removeprefix("With --to ").split(", ")
    everywhere = [flag for flags in exported.values() for flag in flags]
    assert len(everywhere) == len(set(everywhere))


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing, arguments, extra",
    [
        ("onnxruntime", ("run", "{package}", "--prompt-ids", "5"), "onnx"),
        ("onnxscript", ("{model}", "-q", "-o", "{out}"), "onnx"),
        ("triton", ("{plain}", "--attach-untrained", "--to", "trt", "-q", "-o", "{out}"), "gpu"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    missing: str,
    arguments: tuple[str, ...],
    extra: str,
    model: Path,
    plain: Path,
    export_tiny: Exporter,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch and transformers alone install by themselves; what a verb needs beside them is an extra."""
    places = {"model": model, "plain": plain, "package": export_tiny().path, "out": tmp_path / "out"}
    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert call(*(a.format(**places) for a in arguments)) == 2
    assert f"pip install 'still-export[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["-", "=-", "/dev/stdin", "<(cat)", "<(cat) --prompt-ids 5"])
def test_a_flag_reads_pipes(named: str) -> None:
    """A pipe is read once and its file as often as a verb looks: `--text` is checked before it is tokenized."""
    program = (
        "import sys; from pathlib import Path; from still_export.cli.main import _as_files\n"
        "words = _as_files(sys.argv[1:]); path = Path(words[2].partition('=')[2] or words[3])\n"
        "print([path.read_text(), path.read_text()], words[4:])"
    )
    flag = f"--text{named}" if named.startswith("=") else f"--text {named}"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} evaluate package {flag}"
    done = subprocess.run(["bash", "-c", command], input="a text", capture_output=True, text=True)
    assert done.stdout.strip() == f"['a text', 'a text'] {['--prompt-ids', '5'] if '5' in named else []}", done.stderr


def test_running_needs_no_torch(export_tiny: Exporter) -> None:
    """`still-export run` on an edge box: neither torch nor transformers is imported."""
    program = (
        "import sys; from still_export.cli.main import main\n"
        f"try: main(['run', {str(export_tiny().path)!r}, '--prompt-ids', '5,6', '--tokens', '2'])\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AssertionError" not in done.stderr and len(done.stdout.split()) == 2, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("linearize", "{plain}", "-o", "{out}", "--budget", "time 1min"),
        ("linearize", "{plain}", "-o", "{out}", "--text", "nothere.txt"),
        ("linearize", "{plain}", "-o", "{plain}"),
        ("linearize", "{plain}", "-o", "{out}", "--resume"),
        ("linearize", "{plain}", "--rank-layers", "-o", "{out}", "--text", "nothere.txt"),
        ("export", "{linear}", "--to", "onnx", "-o", "{out}", "--calibrate", "nothere.txt"),
        ("run", "{package}", "--prompt-ids", "3", "--adapter", "nothere"),
        ("verify", "{package}", "--model", "nothere"),
        ("verify", "{package}", "--text", "nothere.txt"),
        ("verify", "{package}", "--adapter", "nothere"),
        ("verify", "{foreign}", "--model", "nothere"),
        ("evaluate", "{package}", "--text", "nothere.txt"),
        ("evaluate", "{package}", "--text=nothere.txt"),
        ("evaluate", "{linear}", "--teacher", "nothere"),
        ("evaluate", "{package}", "--tokenizer", "nothere"),
        ("bench", "{package}", "--lengths", "0"),
        ("bench", "{package}", "--lengths", "100000"),
    ],
    ids=lambda words: " ".join(word for word in words if "{" not in word),
)
def test_arguments_are_looked_at_before_the_work(
    words: tuple[str, ...],
    plain: Path,
    model: Path,
    export_tiny: Exporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error comes before "loading": a module that takes seconds is not imported for it."""
    monkeypatch.setattr(Output, "waiting", lambda *_: pytest.fail("it loads first"))
    monkeypatch.setattr(Output, "bar", lambda *_: pytest.fail("it measures first"))
    monkeypatch.setattr(Output, "phases", lambda *_: pytest.fail("it verifies first"))
    monkeypatch.setattr(Output, "steps", lambda *_: pytest.fail("it compares first"))
    places = {
        "plain": plain,
        "linear": model,
        "package": export_tiny().path,
        "out": tmp_path / "out",
        "foreign": tmp_path,
    }
    (tmp_path / "genai_config.json").write_text("{}")
    assert call(*(word.format(**places) for word in words)) == 2


SWALLOWED = """
import sys, time
from importlib import import_module
from pathlib import Path
import still_export.engines.build as engines
from still_export.cli.main import main
def build(package, options, progress):
    folder = Path(sys.argv[1])
    (folder / engines.BEFORE).mkdir()
    (folder / ".engine.plan.part").touch()
    print("building", flush=True)
    while True:
        try:
            time.sleep(0.02)
        except BaseException:
            pass
engines.build_engines, engines.reopen = build, lambda folder: None
main(["build", sys.argv[1], "--quiet"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_ends_at_a_signal_though_tensorrt_swallows_what_is_raised(number: int, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with subprocess.Popen(
        [sys.executable, "-c", SWALLOWED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "building\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 2
    assert said == "Interrupted: nothing half-written was left behind.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_full_disk_is_no_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(typed: list[str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"/dev/full/state cannot be written: .* choose another file"):
        Snapshot({}, 0, "package", "text", ()).save("/dev/full/state")
    monkeypatch.setattr("still_export.cli.main._look_ahead", fail)
    assert call("doctor") == 2 and "DiskFull: " in capsys.readouterr().err


def test_bench_measures_what_fits() -> None:
    def manifest(tokens: int) -> dict[str, Any]:
        return {"capacity": {"capacity_tokens": tokens, "bounded": True}}

    options = BenchOptions(steps=8)
    assert options.fitting_lengths(manifest(4096)) == (1024,) and options.fitting_lengths(manifest(256)) == (247,)
    with pytest.raises(ConfigError, match="--steps 8: this package has room for 9 tokens"):
        options.fitting_lengths(manifest(9))


def test_other_programs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(others: float | None) -> Measurement:
        return Measurement(1024, 0.5, 12.5, 300.0, others_cores=others, cores=16)

    assert [busy([row(0.1), row(others)]) for others in (None, 1.5, 1.7)] == [False, False, True]
    assert "known" in load_of([row(None)]) and "1.5 of 16" in load_of([row(1.5)]) and "BUSY" in load_of([row(1.7)])
    others = OtherPrograms()
    busy_loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1)
        assert (others.cores() or 0) > 0.3
    finally:
        busy_loop.kill()
        busy_loop.wait()
    monkeypatch.setattr(OtherPrograms, "_now", staticmethod(iter([(10.0, 2.0, 0.0), (30.0, 12.0, 4.0)]).__next__))
    assert OtherPrograms().cores() == 2.5  # of 20 s of all, 10 s are this process's own


def test_the_help_groups_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places) and len(set(places)) == len(PANELS)
    assert sorted(verb for verbs in PANELS.values() for verb in verbs) == sorted([*VERBS, "kernels"])


@pytest.mark.parametrize("verb", ["run", "serve", "bench", "prove", "evaluate", "build", "lower", "export"])
def test_defaults_and_limits_stand_in_records(verb: str) -> None:
    """What a verb states itself are files and switches."""
    function = getattr(import_module(f"still_export.cli.{verb}"), verb)
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "flags"]
    flags = [(p, next(iter(getattr(p.annotation, "__metadata__", ())))) for p in own]
    assert VERBS[verb]
    assert not [p.name for p, flag in flags if p.default not in (None, False, inspect.Parameter.empty)]
    assert not [p.name for p, flag in flags if (flag.min, flag.max) != (None, None)]


def test_a_servers_key_may_stand_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    """As of `env` of an option, and within the limits of its record."""
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setenv("STILL_API_KEY", " ")
    assert call("serve", tmp_path) == 2 and "--api-key (or STILL_API_KEY) is empty" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--api-key \(or STILL_API_KEY\) is empty"):
        ServeOptions(api_key=" ")
    with pytest.raises(ConfigError, match="--port 70000: it must be at most 65535"):
        ServeOptions(port=70000)
    for origin in ("chat.example.com", "https://chat.example.com/page", ""):
        with pytest.raises(ConfigError, match="--allowed-origin"):
            ServeOptions(allowed_origin=(origin,))
    with pytest.raises(ConfigError, match="--when-full wait is unknown; known: ask, drop, stop"):
        AnswerOptions(when_full="wait")


def test_an_unsupported_model_ends_with_a_command() -> None:
    said = as_typed("head_dim=96 in config.json.", "UnsupportedModelError", ["export", "some model", "-o", "p"])
    assert said.startswith("export some model: ") and said.endswith("still-export inspect 'some model'")


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_help_is_not_cut_and_looks_at_no_file(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    app.cache_clear()
    assert call("run", "missing", "--prompt-file", "nowhere", "--load-state=nothing", "-h") == 0
    said = capsys.readouterr().out
    app.cache_clear()
    assert "…" not in said and max(map(len, said.splitlines())) <= columns
    for flag in ("--chat-template-kwargs", "--prompt-file", "--save-state", "--no-check"):
        assert flag in said, flag
