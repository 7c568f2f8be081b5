"""What a user gives in a model's or a package's place: refused before torch is imported, with the command to type."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from still_export.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from still_export.folders.model import check_family, check_model, check_overlay, resolve_source
from still_export.folders.sources import (
    GGUF_SOFTMAX,
    GGUF_VERBS,
    SOFTMAX,
    demand_package,
    gguf_architecture,
    local,
    look,
)
from still_export.gguf import softmax as architectures

FIRST_LOOKS = """
import contextlib, io, json, sys, time
from still_export.cli.main import main
said = []
for arguments in json.load(sys.stdin):
    begin, text = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stderr(text):
        try:
            main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code
    heavy = [name for name in ("torch", "transformers", "onnx", "onnxruntime") if name in sys.modules]
    said.append([code, text.getvalue(), heavy, time.perf_counter() - begin])
print(json.dumps(said))
"""
PACKAGE_VERBS = ("run", "serve", "verify", "bench", "prove", "build", "lower")
MODEL_VERBS = ("export", "linearize", "evaluate")


def header(path: Path, *names: str) -> None:
    """A safetensors file of tensors of one number."""
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    content = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(4 * len(names)))


def gguf_text(content: bytes) -> bytes:
    """A text as GGUF has it."""
    return struct.pack("<Q", len(content)) + content


MANY_KEYS = (
    gguf_text(b"general.file_type") + struct.pack("<II", 4, 15),
    gguf_text(b"some.floats") + struct.pack("<IIQdd", 9, 12, 2, 1.0, 2.0),
    gguf_text(b"tokenizer.ggml.tokens")
    + struct.pack("<IIQ", 9, 8, 3)
    + gguf_text(b"a")
    + gguf_text(b"")
    + gguf_text(b"ccc"),
    gguf_text(b"nested")
    + struct.pack("<IIQ", 9, 9, 2)
    + struct.pack("<IQBB", 7, 2, 0, 1)
    + struct.pack("<IQ", 8, 1)
    + gguf_text(b"x"),
)
GGUF_FILES = {
    "model.gguf": (b"llama", ()),
    "late.gguf": (b"qwen3moe", MANY_KEYS),
    "linear.gguf": (b"lfm2", MANY_KEYS),
    "unknown.gguf": (b"bert", ()),
    "LOUD.GGUF": (b"qwen3", ()),
    "sha256-f535f83ec568": (b"gemma3", MANY_KEYS),  # a blob of Ollama's
}
"""Architectures, and the keys before them."""
GGUF_SOFTMAX_FILES = ("model.gguf", "late.gguf", "LOUD.GGUF", "sha256-f535f83ec568")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind."""
    here = tmp_path_factory.mktemp("given")
    for name, model_type, tensor in (
        ("softmax", "llama", "model.norm.weight"),
        ("linear", "rwkv7", "model.norm.weight"),
        ("still", "still_llama", "model.layers.0.self_attn.feature_map_q.weight"),
    ):
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        header(here / name / "model.safetensors", tensor)
    for name, file, content in (
        ("empty", "", ""),
        ("text", "notes.txt", "hello"),
        ("cut", "config.json", '{"model_type": "lla'),
        ("list", "config.json", "[]"),
        ("nameless", "config.json", "{}"),
        ("light", "config.json", '{"model_type": "rwkv7"}'),
        ("unknown", "config.json", '{"model_type": "bert"}'),
        ("refused", "config.json", '{"model_type": "xlstm"}'),
        ("pickled", "pytorch_model.bin", ""),
        ("torn", "adapter_config.json", "{"),
    ):
        (here / name).mkdir()
        if file:
            (here / name / file).write_text(content)
    (here / "pickled" / "config.json").write_text('{"model_type": "rwkv7"}')
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "maker/base"}))
    (here / "package").mkdir()
    manifest = {"format_version": 2, "config": {"model": "/of/the model"}}
    (here / "package" / "manifest.json").write_text(json.dumps(manifest))
    for name, (architecture, before) in GGUF_FILES.items():
        entries = [*before, gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(architecture)]
        (here / name).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return here


PAIRS = [
    *((verb, kind, f"still-export {verb} {kind}-package") for verb in PACKAGE_VERBS for kind in ("linear", "still")),
    *((verb, kind, "still-export linearize {here}/" + kind) for verb in PACKAGE_VERBS for kind in ("softmax", *GGUF_SOFTMAX_FILES)),
    *((verb, "adapter", "still-export maker/base") for verb in PACKAGE_VERBS),
    *((verb, "adapter", "--overlay {here}/adapter") for verb in PACKAGE_VERBS),
    *((verb, "linear.gguf", f"still-export {verb} linear-package") for verb in PACKAGE_VERBS if verb not in GGUF_VERBS),
    *((verb, "unknown.gguf", "has architecture 'bert'") for verb in ("run", "serve", "bench")),
    *((verb, "nothing", "does not exist") for verb in (*PACKAGE_VERBS, "inspect", *MODEL_VERBS)),
    *((verb, "", "is an empty text") for verb in (*PACKAGE_VERBS, "inspect", *MODEL_VERBS)),
    *((verb, "pipe", "a named pipe") for verb in ("run", "serve", *MODEL_VERBS)),
    *((verb, "empty", "The folder is empty") for verb in MODEL_VERBS),
    *((verb, "text", "The folder contains notes.txt") for verb in MODEL_VERBS),
    *((verb, "text/notes.txt", "is a file; a model is a folder") for verb in MODEL_VERBS),
    *((verb, "cut", "config.json cannot be read as JSON") for verb in MODEL_VERBS),
    *((verb, "list", "contains a list, not an object") for verb in MODEL_VERBS),
    *((verb, "nameless", "names no model_type") for verb in MODEL_VERBS),
    *((verb, "light", "has no weights") for verb in ("export", "evaluate")),
    *((verb, "pickled", "is a pickle") for verb in ("export", "evaluate")),
    *((verb, "unknown", "is no family that STILL attention is written for") for verb in ("export", "evaluate")),
    *((verb, "refused", "is not covered: xLSTM's exponential gate") for verb in ("export", "evaluate")),
    ("lower", "linear", "Export it first: still-export {here}/linear -o"),
    ("build", "linear", "still-export {here}/linear --to trt -o"),
    ("export", "package", "still-export lower {here}/package --to TARGET"),
    ("linearize", "package", "still-export linearize '/of/the model'"),
    ("export", "adapter", "still-export export maker/base --overlay {here}/adapter"),
    ("linearize", "adapter", "still-export linearize maker/base --adapter {here}/adapter"),
    ("export", "softmax", "still-export linearize {here}/softmax -o"),
    ("export", "softmax", "--attach-untrained"),
    *(("export", name, "still-export linearize {here}/" + name) for name in GGUF_SOFTMAX_FILES),
    ("linearize", "linear", "export it directly: still-export {here}/linear --to onnx"),
    ("linearize", "still", "linearized already. Export it: still-export {here}/still --to onnx"),
]  # fmt: skip


def test_what_is_refused_is_refused_at_once(given: Path, tmp_path: Path) -> None:
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    places = {kind: str(given / kind) for _, kind, _ in PAIRS} | {"": "", "pipe": str(tmp_path / "pipe")}
    outputs = {verb: ["-o", str(tmp_path / "out")] for verb in ("export", "linearize", "lower")}
    asked = [[verb, places[kind], *outputs.get(verb, [])] for verb, kind, _ in PAIRS]
    web = ["--to", "web", "-o", str(tmp_path / "out")]
    asked.append(["export", str(given / "still"), "--dtype", "float16", *web])
    overlaid = ["export", str(given / "softmax"), "--overlay"]
    asked += [[*overlaid, str(given / name), *web] for name in ("torn", "nothing", "empty")]
    asked += [["export", str(given / "still"), "-o", str(given)], ["lower", str(given / "package"), "-o", str(given)]]
    wanted = [message.format(here=given) for _, _, message in PAIRS] + ["Export the model with --dtype float32"]
    wanted += [
        "adapter_config.json cannot be read as JSON",
        "does not exist",
        "has no weights",
        *2 * ["Choose another folder"],
    ]
    done = subprocess.run([sys.executable, "-c", FIRST_LOOKS], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for arguments, message, (code, said, heavy, seconds) in zip(asked, wanted, json.loads(done.stdout), strict=True):
        assert code == 2 and message in said and said.count("\n") == 1, (arguments, message, said)
        assert not heavy, (arguments, said, heavy)
        assert seconds < 5, arguments  # a loaded machine's; torch alone takes as long
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", GGUF_VERBS)
def test_verbs_that_take_a_gguf_file(verb: str, given: Path) -> None:
    demand_package(given / "linear.gguf", verb)


def test_a_linearized_model_of_others_is_no_plain_one(given: Path, tmp_path: Path) -> None:
    """Weights of the released code and of LoLCATs have model_type llama: their names tell."""
    from still_export.folders.sources import demand_model

    for name in ("model.layers.0.self_attn.feature_map_q.mlp.layer", "model.layers.1.self_attn.window_factors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        header(folder / "model.safetensors", "model.norm.weight", name)
        demand_model(str(folder), "export")
    demand_model(str(given / "softmax"), "export", untrained=True)
    demand_model(str(given / "softmax"), "export", overlays=[str(given / "adapter")])
    demand_model(str(given / "linear"), "export")


def test_families_of_systems_are_named_without_torch() -> None:
    """By `MODEL_TYPES` of each, so that another model_type is refused before torch is imported."""
    from importlib import import_module
    from importlib.util import find_spec

    from still_export.discovery import systems

    for system in systems():
        if find_spec(f"{system}.family"):
            names = [family.name for family in import_module(f"{system}.family").FAMILIES]
            assert sorted(import_module(system).MODEL_TYPES) == sorted(names)


def test_a_system_that_names_no_family_leaves_them_to_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    from still_export.folders import model

    check_family("rat")
    with pytest.raises(UnsupportedModelError, match="bert"):
        check_family("bert")
    monkeypatch.setattr(model, "systems", lambda: ("tests.toy_system",))
    monkeypatch.setattr(model, "find_spec", lambda name: name)
    monkeypatch.setattr(model, "import_module", lambda name: object())
    check_family("bert")
    with pytest.raises(UnsupportedModelError, match="xlstm"):
        check_family("xlstm")


def test_a_misspelt_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "a file").touch()
    with pytest.raises(ModelNotFoundError, match=r"Did you mean models/small\?"):
        check_model("modles/small")
    check_model("maker/other")  # is fetched once all flags are known to be right
    check_overlay("maker/other")
    with pytest.raises(ModelNotFoundError, match=r"hf auth login`\.$"):
        resolve_source("maker/other")


def test_softmax_families_are_those_of_the_models() -> None:
    from still_export.models import FAMILIES

    assert sorted(SOFTMAX) == sorted(FAMILIES)
    assert set(GGUF_SOFTMAX.values()) == set(SOFTMAX)
    assert set(GGUF_SOFTMAX) == {*architectures.SOFTMAX} - {"olmo2"}  # whose linear relative alone is exported


@pytest.mark.parametrize("at", range(0, 130, 7))
def test_a_damaged_header_names_no_architecture(at: int, tmp_path: Path) -> None:
    """Cut, and with a count of 2^63: neither runs for long nor fails."""
    entries = (*MANY_KEYS, gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(b"llama"))
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)
    for content in (whole[:at], whole[:at] + b"\xff" * 7 + b"\x7f" + whole[at + 8 :]):
        (tmp_path / "cut.gguf").write_bytes(content)
        gguf_architecture(tmp_path / "cut.gguf")


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):  # a socket's path is short
        made.bind(path.name)


@pytest.mark.parametrize("make, what", [
    (os.mkfifo, "a named pipe"), (sock, "a socket"), (lambda path: path.symlink_to("/dev/zero"), "a device"),
])  # fmt: skip
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/a.jinja"]
)
def test_what_is_no_file_is_not_read(make: Callable[[Path], None], what: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is {what}"):
        local(tmp_path)
    with pytest.raises(CheckpointError, match=what):
        look(tmp_path / name)


def test_paths_that_are_none() -> None:
    for source in ("", " ", "a" * 5000, "a\0b", "a/b/c"):
        with pytest.raises(ModelNotFoundError):
            local(source)
    assert look("maker/model").kind == "hub"
    assert local(Path()) == Path()
