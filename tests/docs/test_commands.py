"""Every command of README and docs/guide, run as it stands there, in the order of the pages, over small stand-ins.

A command that cannot run in this test is in ELSEWHERE with the reason; of those, the command line of still-export still has to take
each word.
"""

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import typer.main

from still_export.cli import main as cli
from still_export.package.cache import CACHE_VARIABLE
from tests.docs.pages import GUIDE, ROOT, SESSIONS, USERS, commands, name, outputs
from tests.docs.stand_ins import CONTEXT, SHORT_CONTEXT, make_decoder, make_stand_ins

CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

SECONDS = 900
"""The most that one command may take."""


@dataclass(frozen=True)
class Elsewhere:
    """Why a command does not run here; `place` runs in its place, so that what follows finds what it would have made."""

    reason: str
    place: str = ""


NETWORK = "fetches from the network"
VISION = "needs a model that sees; tests/still_export/models/test_vision.py"
GPU = "needs a GPU with TensorRT or onnxruntime-gpu"
HEADERS = "needs the headers of TensorRT, which no package has"
REAL = "needs the real model and minutes"
TRAINING = "trains for minutes"
CALIBRATED = "needs GPTQModel; tests/still_export/graph/quantization/test_calibrate.py"
ELSEWHERE = {
    "still-export linearize BASE.gguf --adapter assets/qwen2.5-coder-1.5b-instruct-mixed -o STILL": Elsewhere(REAL),
    "still-export linearize BASE.gguf --adapter assets/smollm2-135m-instruct-mixed-2 -o FOLDER": Elsewhere(REAL),
    "python -m tools.benchmarks.block_quality BASE.gguf --blocks all,128,64,32 --model STILL --text sqlalchemy.txt "
    "--contexts 16384,32768 --text-tokens 65536 --tasks needle --lengths 16384,32768 --depths 5 --samples 2 --device cuda": Elsewhere(
        REAL
    ),
    "still-export linearize BASE.gguf --mixer blocks --top-blocks 64 --local-blocks 32 --dense-length 2048 -o BLOCKS": Elsewhere(
        REAL
    ),
    "still-export BLOCKS --to onnx --native --arch sm_90 --dtype float16 --capacity-tokens 33024 -o PACKAGE": Elsewhere(
        REAL
    ),
    "still-export BASE --overlay STILL/adapter --overlay TASK --to onnx -o PACKAGE": Elsewhere("needs LoRA of a task"),
    "still-export MODEL --vision -o VISION": Elsewhere(VISION),
    "still-export verify VISION": Elsewhere(VISION),
    "still-export bench PACKAGE --provider cuda --lengths 16384,32000": Elsewhere(GPU),
    "bash tools/env.sh cpu": Elsewhere(NETWORK),
    ". .venv/bin/activate": Elsewhere(NETWORK),
    "bash tools/demo.sh": Elsewhere(REAL),
    "python -m tools.fetch_texts TEXTS": Elsewhere(NETWORK),
    "docker build -f docker/cpu.Dockerfile -t still-export .": Elsewhere("needs Docker"),
    "python -m tools.write_chats BASE chat.txt": Elsewhere("answers 3,000 conversations, for minutes"),
    "python -m tools.benchmarks.peer BASE --work work --lengths 256,1024 --steps 8 --threads 2 -o peer.json": Elsewhere(
        "needs onnxruntime-genai", "echo [] > peer.json"
    ),
    "still-export verify GENAI --lengths 1,65 --decode-steps 72": Elsewhere("needs onnxruntime-genai"),
    "python -m tools.benchmarks.genai_turns GENAI --text letter.txt --lengths 8,16 --steps 100": Elsewhere(
        "needs onnxruntime-genai"
    ),
    "still-export linearize BASE --recipe paper --text corpus.txt --sequence-length 2048 --batch-size 16 --precision bf16 -o TRAINED": (
        Elsewhere(TRAINING)
    ),
    "still-export linearize BASE --mixer gdn --softmax-layers 4 --text corpus.txt -o GDN": Elsewhere(
        "trains for minutes a base of more layers; tests/still_export/linearization/test_mixers.py"
    ),
    "still-export MODEL --to onnx --dtype float16 --arch sm_90 -o NATIVE": Elsewhere(
        "compiles a GPU's kernels for minutes; tests/still_export/targets/ort/test_native.py compiles some"
    ),
    'still-export run DIR --provider cuda --prompt "Once upon a time"': Elsewhere(GPU),
    "still-export MODEL --to trt --arch sm_87,sm_90 --tensorrt-include TENSORRT/include -o TRT": Elsewhere(HEADERS),
    "python -m still_export.evaluation.harness run --model still-export --model_args package=BITS4 --tasks hellaswag": Elsewhere(
        "fetches a task; tests/still_export/evaluation/test_small_model.py has one of local files"
    ),
    "still-export evaluate http://127.0.0.1:8000/v1 --tokenizer MODEL --tasks niah_multikey,babi_1 --lengths 4096 -o SERVED": Elsewhere(
        "asks a server; tests/still_export/serving/test_evaluated.py does that"
    ),
    "still-export serve DIR": Elsewhere("serves until it is stopped; tests/still_export/serving/test_app.py does that"),
    'still-export run MODEL.gguf --prompt "..."': Elsewhere("needs a GGUF file of a hybrid with a vocabulary"),
    "still-export verify http://127.0.0.1:8000 --model FILE": Elsewhere(
        "asks a server; tests/still_export/serving/test_proven_server.py does that"
    ),
    "still-export build TRT": Elsewhere(GPU),
    "still-export prove TRT": Elsewhere(GPU),
    'still-export run TRT --prompt "Once upon a time"': Elsewhere(GPU),
    "still-export verify TRT": Elsewhere(GPU),
    "still-export bench TRT --lengths 1024,8000": Elsewhere(GPU),
    "still-export MODEL --to onnx --quantize int4 --quantize-method gptq --calibrate TEXT -o GPTQ": Elsewhere(
        CALIBRATED
    ),
    "still-export MODEL --to onnx --quantize int4 --quantize-method gptq --calibrate TEXT --quantize-budget +1% -o MIXED": (
        Elsewhere(CALIBRATED)
    ),
    "./TRT/still_run8 TRT --prompt-ids 1,403,407 --tokens 100": Elsewhere(GPU),
    "still-export MODEL --to trt-rtx --arch sm_89,sm_120 -o RTX": Elsewhere(
        "builds an engine for minutes; tests/still_export/cli/test_trt_cli.py for one architecture"
    ),
}

SLOW = {
    "still-export verify DECODER --model BASE",
    "still-export verify DECODER --model BASE --lengths 1,65,131",
    "still-export export --config DIR/manifest.json --capacity-tokens 1024 -o SHORTER",
    "still-export BASE --overlay STILL/adapter --to onnx -o OVERLAID",
    "still-export verify DIR --record calls.npz",
    "still-export verify DIR --calls calls.npz",
    "still-export verify WEB --record WEB/calls.npz",
    "still-export kernels build",
    "still-export MODEL --to onnx --native -o NATIVE",
    "still-export verify NATIVE --lengths 1,65 --decode-steps 4",
    "still-export MODEL --to genai --native -o GENAI",
}
"""Commands that take long; they run in the slow test, with all others."""


OF_ANOTHER_MODEL = {"still-export linearize BASE -o FIRST"}
"""Commands whose lines are a real model's, which the page says; the last one is any model's."""


def installs(command: str) -> bool:
    return command.startswith("pip install ")


def runs(command: str, slow: bool) -> bool:
    """Whether the command runs in the test of this kind."""
    return not installs(command) and command not in ELSEWHERE and (slow or command not in SLOW)


def run_here(command: str) -> None:
    """Run one command in the working folder: still-export in this process, which has loaded torch, everything else by a shell."""
    words = shlex.split(command)
    if words[0] == "still-export" and not re.search(r"[|<>&;$`*]", command):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO())
            patch.setattr(sys, "argv", words)
            try:
                cli.main(words[1:])
            except SystemExit as end:
                assert not end.code, f"{command}: exit code {end.code}"
        return
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(paths)}
    done = subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"


def shape(line: str) -> str:
    """A line but for its numbers, blanks, what is nearest to its bound, and whether the machine is busy, which differ from model to model
    and from machine to machine."""
    line = re.sub(r"(?<=nearest to its bound: ).* is (?=[\d.e-]+ off)", "a state is ", line)
    line = re.sub(r"BUSY MACHINE: (.* meanwhile)\..*", r"\1", line)
    return " ".join(re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line).split())


def unprinted(command: str, shown: list[str], printed: str) -> list[str]:
    """Lines that the page shows of a command and that it did not print; of JSON, its fields."""
    lines = [
        line for line in shown if line != "..." and not re.search(r" \.+ \d+ s$", line)
    ]  # progress: slow steps show some
    lines = lines[-1:] if command in OF_ANOTHER_MODEL else lines
    said = {shape(line) for line in printed.splitlines()}
    fields = [field for line in lines if line.startswith("{") for field in re.findall(r'"\w+":', line)]
    return [line for line in lines if not line.startswith("{") and shape(line) not in said] + [
        field for field in fields if field not in printed
    ]


def run_session(pages: list[Path], folder: Path, slow: bool, capfd: pytest.CaptureFixture[str]) -> None:
    make_stand_ins(folder, SHORT_CONTEXT if pages == SESSIONS["README"] else CONTEXT, small=pages != SESSIONS["README"])
    if slow:
        make_decoder(folder)
    for page in pages:
        for command in commands(page):
            print(f"{name(page)}: {command}")
            if runs(command, slow):
                capfd.readouterr()
                run_here(command)
                printed = "\n".join(capfd.readouterr())
                shown = outputs(page).get(command)
                if shown is not None and (missing := unprinted(command, shown, printed)):
                    pytest.fail(f"{command} does not print {missing}, but\n{printed}")
            elif command in ELSEWHERE and ELSEWHERE[command].place:
                run_here(ELSEWHERE[command].place)


@pytest.mark.slow
@pytest.mark.parametrize("session", [s if s == "README" else pytest.param(s, marks=pytest.mark.long) for s in SESSIONS])
def test_commands_run(
    session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_session(SESSIONS[session], tmp_path, slow=False, capfd=capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    "session",
    [
        pytest.param(s, marks=pytest.mark.long)
        for s, pages in SESSIONS.items()
        if SLOW & {c for p in pages for c in commands(p)}
    ],
)
def test_slow_commands_run(
    session: str,
    kernels_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(kernels_cache))
    run_session(SESSIONS[session], tmp_path, slow=True, capfd=capfd)


def test_every_page_of_the_guide_runs() -> None:
    assert set(SESSIONS["guide"]) == set(GUIDE.parent.glob("*.md"))


@pytest.mark.parametrize("page", SESSIONS["guide"], ids=name)
def test_pages_show_what_to_expect(page: Path) -> None:
    """A page with a command of still-export shows what one prints."""
    shown = outputs(page)
    assert shown or not any(command.startswith("still-export ") for command in commands(page))
    assert all(lines[-1] != "..." for lines in shown.values())


def test_another_output_is_found() -> None:
    """The comparison in `run_session` can fail: other words in any line, not other numbers."""
    shown = ["DIR: 32 files, 9 MB", "...", "tracing ... 5 s", "PASSED"]
    assert not unprinted("", shown, "DIR:  5 files, 1,024.5 MB\n0.1 s\nPASSED\n")
    assert unprinted("", shown, "DIR: 5 files and 1 MB\nFAILED: 3 outputs\n") == [shown[0], "PASSED"]
    assert unprinted("", ['{... "steps": 4, "won_s": 1}'], '{"steps": 3}') == ['"won_s":']


def test_lists_name_commands_that_are_there() -> None:
    there = {command for page in USERS for command in commands(page)}
    assert not (set(ELSEWHERE) | SLOW | OF_ANOTHER_MODEL) - there


@pytest.mark.parametrize("command", sorted(c for c in ELSEWHERE if not c.startswith("bash")))
def test_what_does_not_run_here_is_understood(command: str) -> None:
    """The command line takes each word; a tool is there and does nothing but explain itself when asked to."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        assert find_spec(words[2])
    elif words[0] == "python":
        asked = [sys.executable, str(ROOT / words[1]), "--help"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0 and said.stdout.startswith("usage:"), said.stderr[-2000:]
    elif words[0] == "still-export":
        verbs = [v.name for v in (*cli.app().registered_commands, *cli.app().registered_groups)]
        given = words[1:] if words[1] in verbs else ["export", *words[1:]]
        group = typer.main.get_command(cli.app(given[0]))
        verb = group.get_command(click.Context(group), given[0])  # type: ignore[attr-defined]
        verb.make_context(given[0], list(given[1:]))


@pytest.mark.parametrize("page", USERS, ids=name)
def test_extras_that_pages_install_exist(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command in filter(installs, commands(page)):
        if command == CPU_TORCH:
            continue
        found = re.fullmatch(r'pip install (-e "\.|"still-export)\[([\w,-]+)\]"', command)
        assert found, f"{command}: not an installation that is known here"
        assert set(found[2].split(",")) <= set(project["optional-dependencies"]), command
