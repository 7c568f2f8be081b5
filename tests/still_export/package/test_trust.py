"""A package from a stranger: its native code is not loaded unasked, and nothing outside of it is opened, whatever its manifest says."""

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from still_export.cli.main import main
from still_export.errors import PackageError
from still_export.package.cache import cache_folder
from still_export.package.external import check_loops, external_files
from still_export.package.files import check_name, sha256
from still_export.package.folder import open_package
from still_export.package.refusals import CheckError
from still_export.package.trust import trust, trusts
from still_export.proof.package import VerifyOptions, verify
from still_export.runtime.ort import OrtModel, RunError
from still_export.runtime.ort_session import native_library
from still_export.targets.lower import lower
from still_export.targets.ort.headers import make_cache
from still_export.targets.trt.plugins import PluginBuildError
from tests.attack.forks import DOTS
from tests.still_export.conftest import Exporter
from tests.still_export.packages import install_kernels

PROMPT = ["--prompt-ids", "5,6,7", "--tokens", "3"]


@pytest.fixture
def package(export_tiny: Exporter, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export_tiny().path, tmp_path / "package"))


def edit(folder: Path, change: Any) -> None:
    """Change the manifest as a stranger would, hashes of what is there included."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    for name, entry in manifest["files"].items():
        path = folder / name
        if path.is_file() and not entry.pop("lie", False):
            entry |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size_bytes": path.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A library that leaves a file behind when it is opened, and that file."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    trace = tmp_path / "trace"
    source = tmp_path / "hostile.c"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void run(void) {{ fclose(fopen("{trace}", "w")); }}\n'
        "void* RegisterCustomOps(void* o, void* b) { return 0; }\n"
    )
    library = tmp_path / "hostile.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library, trace


def native(library: str) -> dict[str, str]:
    return {"library": library, "system": platform.system(), "machine": platform.machine()}


def everything(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """The package through the command line, in this process, which has loaded torch, and through its own runner."""
    verbs = [
        ["run", str(folder), *PROMPT],
        ["verify", str(folder), "--lengths", "3", "--decode-steps", "2", "-q"],
        ["inspect", str(folder)],
    ]
    runner = [sys.executable, str(folder / "run_ort.py"), *PROMPT]
    return [*map(said, verbs), subprocess.run(runner, capture_output=True, text=True)]


def said(words: list[str]) -> subprocess.CompletedProcess[str]:
    """A command of still-export, its exit code and what it wrote to stderr, native code's part too."""
    code: Any = 0
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "stderr", os.fdopen(os.dup(file.fileno()), "w"))
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            main(words)
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return subprocess.CompletedProcess(words, code, stderr=file.read().decode())


def listed(manifest: dict[str, Any], name: str, library: Path) -> None:
    content = library.read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["none", "unlisted", "absolute", "parent", "link", "digest", "linked folder"])
def test_a_strangers_library_is_not_loaded(package: Path, hostile: tuple[Path, Path], lie: str) -> None:
    library, trace = hostile
    name = {
        "absolute": str(library),
        "parent": "../hostile.so",
        "linked folder": "sub/hostile.so",
    }.get(lie, "libstill_onnxruntime.so")
    if lie in ("none", "unlisted", "digest"):
        shutil.copy(library, package / name)
    if lie == "link":
        (package / name).symlink_to(library)
    if lie == "linked folder":
        (package / "sub").symlink_to(library.parent)

    def change(manifest: dict[str, Any]) -> None:
        manifest["native"] = native(name)
        if lie != "unlisted":
            listed(manifest, name, library)
        if lie == "digest":
            manifest["files"][name] |= {"sha256": "0" * 64, "lie": True}

    edit(package, change)
    done = everything(package)
    assert not trace.exists()
    for each in done:
        assert "Traceback" not in each.stderr
        if lie == "none" or (lie == "digest" and "inspect" in each.args):  # which opens the graph alone
            assert each.returncode == 0, each.stderr
        else:
            lines = [line for line in each.stderr.strip().splitlines() if not DOTS.search(line)]
            assert each.returncode == 2 and len(lines) == 1, each.stderr
    if lie == "none":
        assert "was not built on this machine" in done[0].stderr and "running without it" in done[3].stderr


@pytest.mark.slow
def test_the_user_says_so_once(package: Path, hostile: tuple[Path, Path]) -> None:
    library, trace = hostile
    shutil.copy(library, package / "kernel.so")

    def change(manifest: dict[str, Any]) -> None:
        manifest["native"] = native("kernel.so")
        listed(manifest, "kernel.so", library)

    edit(package, change)
    verb = [sys.executable, "-m", "still_export.cli.main", "run", str(package), *PROMPT]
    first = subprocess.run([*verb, "--trust-native"], capture_output=True, text=True)
    assert trace.exists(), first.stderr
    trace.unlink()
    again = subprocess.run(verb, capture_output=True, text=True)
    assert trace.exists(), f"not remembered: {again.stderr}"
    trace.unlink()
    with (package / "kernel.so").open("ab") as file:
        file.write(b"other")
    edit(package, lambda manifest: None)
    subprocess.run(verb, capture_output=True)
    assert not trace.exists()


def test_trusted_list_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("still_export.package.trust._TRUSTED", set())
    assert not trusts(sha256(tmp_path / "file"))
    trust(tmp_path / "file")
    assert "is trusted this time alone" in capsys.readouterr().err and trusts(sha256(tmp_path / "file"))


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("native code of a user without a home")
    monkeypatch.setattr("still_export.package.trust._TRUSTED", set())
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "STILL_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    trust(tmp_path / "file")
    assert trusts(sha256(tmp_path / "file"))
    with pytest.raises(PluginBuildError, match="STILL_CACHE"):
        make_cache(cache_folder() / "kernels")


def refused(folder: Path, match: str) -> None:
    for opened in (lambda: open_package(folder), lambda: OrtModel(folder, threads=1)):
        with pytest.raises((PackageError, RunError), match=match):
            opened()


def test_weights_must_be_listed_and_inside(package: Path) -> None:
    graph = onnx.load(package / "model.onnx", load_external_data=False)
    for name, match in (("other.data", "other.data"), ("../other.data", "no file inside|not list")):
        for tensor in graph.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = name
        onnx.save(graph, package / "model.onnx")
        shutil.copy(package / "model.onnx.data", package / name)
        edit(package, lambda manifest: None)
        refused(package, match)


def test_links_and_unlisted_files(package: Path) -> None:
    (package / "model.onnx.data").rename(package.parent / "weights")
    (package / "model.onnx.data").symlink_to(package.parent / "weights")
    refused(package, "symbolic link")
    (package / "model.onnx.data").unlink()
    os.link(package.parent / "weights", package / "model.onnx.data")
    open_package(package)
    edit(package, lambda manifest: manifest["files"].pop("model.onnx.data"))
    refused(package, "model.onnx.data' ?, which the manifest does not list|model.onnx.data is not listed")


@pytest.fixture
def snapshot(package: Path, tmp_path: Path) -> Path:
    """The package as Hugging Face's cache has it: a folder of links to the blobs of its repository."""
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    blobs.mkdir(parents=True)
    for path in [path for path in sorted(package.rglob("*")) if path.is_file()]:
        link = snapshot / path.relative_to(package)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_a_snapshot_of_the_hub_links_to_its_own_blobs(snapshot: Path, package: Path) -> None:
    open_package(snapshot)
    (snapshot / "model.onnx.data").unlink()
    (snapshot / "model.onnx.data").symlink_to(package / "model.onnx.data")  # of another repository
    refused(snapshot, "symbolic link")


@pytest.mark.slow
def test_a_package_of_links_is_verified_and_lowered(snapshot: Path, package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "hard", copy_function=os.link)
    for script in (snapshot / "run_ort.py", tmp_path / "hard" / "run_ort.py"):
        command = [sys.executable, str(script), "--prompt-ids", "1,2", "--tokens", "2"]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": ""})
        assert done.returncode == 0, done.stderr
    for folder in (snapshot, tmp_path / "hard"):
        assert verify(folder, VerifyOptions(lengths=(1, 65), decode_steps=4)).report.passed
        lower(folder, "web", tmp_path / f"{folder.name}-web")
        narrow = lower(folder, "onnx", tmp_path / f"{folder.name}-half", dtype="float16")
        assert open_package(narrow.path).manifest["model"]["dtype"] == "float16"


def test_weights_that_changed_are_noticed_unless_told_not_to(package: Path) -> None:
    data = bytearray((package / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (package / "model.onnx.data").write_bytes(data)
    refused(package, "model.onnx.data is not the file that was exported: its SHA-256")
    OrtModel(package, threads=1, check=False)


@pytest.mark.parametrize(
    "field, value, match",
    [
        ("capacity.capacity_tokens", 4096, "capacity.capacity_tokens is 4096, in model.onnx it is [0-9]+[.]"),
        ("capacity.bounded", False, "capacity.bounded is false, in model.onnx it is true"),
        ("model.vocab_size", 60, "model.vocab_size is 60, in model.onnx it is 61"),
        ("states", [], "states is without"),
    ],
)
def test_the_graph_knows_better(package: Path, field: str, value: Any, match: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        *path, name = field.split(".")
        table = manifest
        for part in path:
            table = table[part]
        table[name] = value

    edit(package, change)
    with pytest.raises(RunError, match=match):
        OrtModel(package, threads=1)


@pytest.mark.parametrize("place", ["graph", "If", "function", "Loop"])
@pytest.mark.parametrize("turns, ends", [
    ("initializer 3", True), ("Constant 3", True), ("value_int 3", True), ("Size", True),
    ("initializer 4611686018427387904", False), ("Constant 4611686018427387904", False), ("value_int 16777217", False),
    ("initializer -1", False), ("computed", False), ("", False),
])  # fmt: skip
def test_loops_that_may_never_end_are_refused(place: str, turns: str, ends: bool) -> None:
    """No signal stops ONNX Runtime within a call, so a stranger's 2^62 turns would hold the process for good."""
    kind, _, number = turns.partition(" ")
    value = helper.make_tensor("turns", TensorProto.INT64, [], [int(number or 1)])
    nodes = {
        "Constant": [helper.make_node("Constant", [], ["turns"], value=value)],
        "value_int": [helper.make_node("Constant", [], ["turns"], value_int=int(number or 1))],
        "Size": [helper.make_node("Size", ["x"], ["turns"])],
        "computed": [
            helper.make_node("Constant", [], ["n"], value=value),
            helper.make_node("Mul", ["n", "n"], ["turns"]),
        ],
    }.get(kind, [])
    bools = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go_on", "goes_on")]
    body = helper.make_graph([helper.make_node("Identity", ["go_on"], ["goes_on"])], "body", [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []), bools[0]], bools[1:])  # fmt: skip
    nodes.append(helper.make_node("Loop", ["turns" if kind else "", "x"], [], body=body))
    held = [value] if kind == "initializer" else []
    functions = []
    if place in ("If", "Loop"):
        inner, held = helper.make_graph(nodes, "inner", [], [], held), []
        branches = {"body": inner} if place == "Loop" else {"then_branch": inner, "else_branch": body}
        nodes = [helper.make_node(place, ["three", "x"] if place == "Loop" else ["x"], [], **branches)]
        held = [helper.make_tensor("three", TensorProto.INT64, [], [3])]
        ends = ends and place == "If"
    elif place == "function":
        functions = [helper.make_function("own", "F", ["x", "turns"], [], nodes, [])]
        nodes = [helper.make_node("F", ["x", "turns"], [], domain="own")]
        ends = ends and kind != "initializer"  # of which a function knows nothing
    graph = helper.make_graph(nodes, "graph", [helper.make_tensor_value_info("x", TensorProto.BOOL, [])], [], held)
    data = helper.make_model(graph, functions=functions).SerializeToString()
    if ends:
        check_loops(data, "m")
    else:
        with pytest.raises(CheckError, match="loop"):
            check_loops(data, "m")


def test_external_files_finds_every_tensor_of_a_model() -> None:
    """In initializers, constants of nodes, branches and functions; whatever the order of fields."""

    def tensor(name: str) -> onnx.TensorProto:
        made = onnx.TensorProto(name=name, data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
        made.external_data.add(key="location", value=name)
        made.external_data.add(key="offset", value="0")
        return made

    def constant(name: str) -> onnx.NodeProto:
        return onnx.helper.make_node("Constant", [], [name], value=tensor(name))

    branch = onnx.helper.make_graph([constant("branch")], "b", [], [])
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    sparse = onnx.helper.make_node("Constant", [], ["s"])
    sparse.attribute.add(name="sparse_value", type=11).sparse_tensor.values.CopyFrom(tensor("sparse"))
    graph = onnx.helper.make_graph([node, constant("node"), sparse], "location of nothing", [], [], [tensor("weights")])
    function = onnx.helper.make_function("d", "f", [], ["z"], [constant("function")], [])
    model = onnx.helper.make_model(graph, functions=[function])
    data = model.SerializeToString()
    assert external_files(data, "m") == {"branch", "node", "sparse", "weights", "function"}
    # Length and order as another writer may have them.
    plain = b"\x0a\x08location\x12\x07weights"
    assert data.count(plain) == 1
    turned = b"\x12\x07weights\x0a\x08location"
    assert "weights" in external_files(data.replace(plain, turned), "m")
    for cut in range(1, len(data), 7):
        try:
            external_files(data[:cut], "m")
        except CheckError:
            pass


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\\b", "C:x", "a\0b"])
def test_names_that_lead_out_are_refused(name: str) -> None:
    with pytest.raises(CheckError, match="no file inside"):
        check_name(name, "m")


def test_installed_kernels_are_trusted_and_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """still-export-kernels: its own library in a package, or in place of one for another machine; not with other versions of the ops."""
    folder = tmp_path / "package"
    library = install_kernels(tmp_path / "site", monkeypatch, platform.machine(), b"kernels")
    folder.mkdir()
    shutil.copy(library, folder / "kernel.so")
    manifest: dict[str, Any] = {"native": native("kernel.so"), "ops": {"HybridAttention": 1}, "files": {}}
    listed(manifest, "kernel.so", library)
    assert native_library(folder, manifest) == folder / "kernel.so"
    (folder / "kernel.so").write_bytes(b"other")
    listed(manifest, "kernel.so", folder / "kernel.so")
    assert native_library(folder, manifest) == library
    manifest["native"] |= {"machine": "riscv64"}
    assert native_library(folder, manifest) == library and not capsys.readouterr().err
    manifest["ops"] |= {"HybridAttention": 2}
    assert native_library(folder, manifest) is None and "is for Linux riscv64" in capsys.readouterr().err
    assert native_library(folder, manifest, "cuda") is None
