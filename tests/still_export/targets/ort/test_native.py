"""Packages with a native kernel: exported, run by every runner, verified; portable where the kernel is not for the machine."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import OrtValue, SessionOptions, get_available_providers

from still_export.cli.main import main
from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.folder import Package, open_package, write_manifest
from still_export.package.refusals import CheckError
from still_export.proof import kernels
from still_export.proof.sessions import Session
from still_export.runtime.ort import OrtModel
from still_export.runtime.ort_session import native_library, open_session
from still_export.runtime.ort_states import Values
from still_export.runtime.sampling import RunError, Sampling
from still_export.targets.export import export
from still_export.targets.ort.kernels import kernel_variants
from still_export.targets.ort.library import LIBRARY
from still_export.targets.ort.options import OrtOptions
from still_export.targets.ort.target import prefill_tokens
from still_graphs.ops import OPS
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import CHUNK, VOCAB
from tests.still_export.verbs import call
from tests.tolerances import MODEL

PROMPT = np.random.default_rng(3).integers(3, VOCAB, 61)
MIXED = ("hybrid_attention", "full_attention", "hybrid_attention")


@pytest.fixture
def built(kernels_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports take the library that was built once."""
    monkeypatch.setenv(CACHE_VARIABLE, str(kernels_cache))


def native(export_tiny: Exporter, **arguments: Any) -> Package:
    return export_tiny(options={"native": True}, **arguments)


def loads_kernel(folder: Path) -> bool:
    """Whether a process that runs the package maps the library."""
    code = (
        "import sys; from still_export.runtime.ort import OrtModel; model = OrtModel(sys.argv[1], threads=1); "
        "print('libstill_onnxruntime' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def verify(folder: Path, *flags: str) -> int:
    """Exit code of the verb."""
    try:
        return main(["verify", str(folder), "--lengths", "1,9,40", "--decode-steps", "10", "--quiet", *flags]) or 0
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("still", [{}, {"layer_types": MIXED}, {"select_scope": "kv_group_max"}], ids=str)
def test_equals_the_bodies(built: None, export_tiny: Exporter, still: dict[str, Any]) -> None:
    """Prefill in pieces, growing caches, state in place, promotions during decode: same logits and states."""
    answers = []
    for package in (export_tiny(**still), native(export_tiny, **still)):
        model = OrtModel(package.path, threads=1)
        model.manifest["prefill_tokens"] = 2 * CHUNK + 3
        model.start()
        logits = [model.prefill(PROMPT)]
        # Random tokens: repeated ones, as greedy decoding makes, have near ties of scores.
        for token in np.random.default_rng(4).integers(3, VOCAB, 2 * CHUNK + 5):
            logits.append(model.feed(np.array([[token]]))[0, -1].copy())
        answers.append((np.array(logits), model.state_arrays()))
    (logits, states), (native_logits, native_states) = answers
    np.testing.assert_allclose(native_logits, logits, atol=MODEL["float32"], rtol=MODEL["float32"])
    for name, array in native_states.items():
        np.testing.assert_allclose(array, states[name], atol=MODEL["float32"], rtol=MODEL["float32"], err_msg=name)


@pytest.mark.slow
def test_every_runner_loads_it_and_verify_proves_it(
    built: None, export_tiny: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    package = native(export_tiny)
    assert LIBRARY in package.manifest["files"]
    plain = export_tiny(options={"native": False})
    assert loads_kernel(package.path) and not loads_kernel(plain.path)
    assert package.model_path.read_bytes() == plain.model_path.read_bytes()
    alone = [sys.executable, "run_ort.py", "--prompt-ids", "5,6,7", "--tokens", "3"]
    done = subprocess.run(alone, cwd=package.path, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.split()) == 3, done.stderr
    assert verify(package.path) == 0
    shown = capsys.readouterr().out
    asked = " ".join(shown.split())
    assert "asked of the ONNX Runtime with the native kernel:" in asked and "asked of the graph in float32:" in asked


KERNEL_FAULTS: dict[str, Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], object]] = {
    "none": lambda found, before: None,
    "a factor on a state": lambda found, before: found["kv_state"].__imul__(1 + 1e-3),
    "one row of the output": lambda found, before: found["output"][..., -1, :].__iadd__(1e-2),
    "a state of zeros": lambda found, before: found["z_state"].fill(0),
    "a number that is none": lambda found, before: found["kv_state"].__setitem__((0, 0, 0, 0), np.nan),
    "a state that is not written": lambda found, before: found.update(
        kv_state=before.get("kv_state", found["kv_state"])
    ),
}


@pytest.mark.slow
def test_a_wrong_kernel_differs_from_its_body(
    built: None, export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of the real library are changed; the bodies' are not."""
    package, real = native(export_tiny), kernels.open_session
    spec = OPS["HybridAttention"]
    for fault, change in KERNEL_FAULTS.items():

        def opened(*arguments: Any, change: Any = change, **more: Any) -> Any:
            session = real(*arguments, **more)
            return session if arguments[4] is None else types.SimpleNamespace(run=partial(changed, session, change))

        def changed(session: Any, change: Any, names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            found, kinds = session.run(names, feed), [name.removeprefix("present_") for name in spec.output_names()]
            by_kind = dict(zip(kinds, found, strict=False))
            change(by_kind, {n.split(".")[0].removeprefix("past_"): x for n, x in feed.items()})
            return [by_kind[kind] for kind in kinds[: len(found)]]

        monkeypatch.setattr(kernels, "open_session", opened)
        checks = [*kernels.compare_kernels(package.path, package.manifest, package.path / LIBRARY, "cpu", 0)]
        assert len(checks) == 1 and checks[0].passed == (fault == "none"), (fault, checks)


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_fails_verify(
    built: None, export_tiny: Exporter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A library that another machine built, on a graph that asks its kernels for another feature map than PyTorch has."""
    folder = tmp_path / "broken"
    shutil.copytree(native(export_tiny, feature_map="softmax_pm").path, folder)
    with (folder / LIBRARY).open("ab") as library:
        library.write(b"\0")  # behind its end: it loads, and is none that this machine built

    def rehash() -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        write_manifest(folder, {k: v for k, v in manifest.items() if k not in ("format_version", "versions", "files")})

    rehash()
    assert verify(folder) == 0  # not loaded
    assert "was not built on this machine" in capfd.readouterr().err
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "feature_map":
                assert attribute.s == b"softmax_pm"
                attribute.s = b"np_softmax_pm"
    onnx.save(graph, folder / "model.onnx")
    rehash()
    assert verify(folder, "--trust-native") == 1
    assert "with the native kernel" in " ".join(capfd.readouterr().out.split())


@pytest.mark.slow
def test_replayed_steps_are_single_steps(built: None, export_tiny: Exporter) -> None:
    """The way of CUDA graphs without a graph: one binding of fixed buffers, run once with no new tokens, made again as the state grows."""
    model = OrtModel(native(export_tiny).path, threads=1)
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        found = []
        for replays in (False, True):
            model.replays = replays
            model.start(1)
            tokens = list(model.generate(range(1, 12), 60, Sampling(**sampling)))
            found.append((tokens, model.length.copy(), model.state_arrays()))
        (tokens, length, states), (theirs, their_length, their_states) = found
        assert tokens == theirs and length == their_length == 11 + 59
        assert list(model.captures.captured) == [(1, 0)]
        for name, state in states.items():
            room = tuple(slice(0, min(sizes)) for sizes in zip(state.shape, their_states[name].shape, strict=True))
            np.testing.assert_array_equal(state[room], their_states[name][room], err_msg=name)


@pytest.mark.slow
def test_other_machines_run_the_bodies(
    built: None, export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = native(export_tiny)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    model = OrtModel(package.path, threads=1)
    model.start()
    assert "running without it" in capfd.readouterr().err
    (package.path / LIBRARY).rename(package.path / "away")
    try:
        assert model.prefill(PROMPT).shape == (VOCAB,)
        OrtModel(package.path, threads=1)
        monkeypatch.undo()
        with pytest.raises(RunError, match=rf"{LIBRARY} is missing"):
            OrtModel(package.path, threads=1)
    finally:
        (package.path / "away").rename(package.path / LIBRARY)
    assert open_package(package.path)


@pytest.mark.slow
def test_the_manifest_repeats_it(built: None, export_tiny: Exporter, tmp_path: Path) -> None:
    package = native(export_tiny)
    again = export(
        ExportOptions.from_manifest(package.manifest),
        tmp_path / "again",
        options=OrtOptions.from_manifest(package.manifest),
    )
    assert again.manifest["native"] == package.manifest["native"]


def test_bfloat16_is_refused(built: None, export_tiny: Exporter) -> None:
    with pytest.raises(Exception, match="--native computes float32 and float16, not bfloat16"):
        export_tiny(dtype="bfloat16", options={"native": True, "dtype": "bfloat16"})


@pytest.mark.slow
def test_kernels_of_the_gpu_follow_from_the_graph(export_tiny: Exporter) -> None:
    """One variant for each op, with ONNX Runtime's counts; what no kernel covers is named before anything is compiled."""
    found = kernel_variants(export_tiny(layer_types=MIXED, chunk_size=32).model_path)
    ((hybrid,), (softmax,)) = found["HybridAttention"], found["Attention"]
    assert (hybrid.dtype, hybrid.count_dtype, hybrid.chunk_size) == ("float32", "int64", 32)
    assert (softmax.dtype, softmax.count_dtype, softmax.head_dim) == ("float32", "int64", hybrid.head_dim)
    with pytest.raises(UnsupportedError, match=r"no CUDA kernel covers .*sliding.* Export without --arch"):
        kernel_variants(export_tiny(local="sliding", chunk_size=32).model_path)


@pytest.mark.slow
def test_kernels_of_the_gpu_are_compiled_in(
    export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: dict[str, Any] = {}

    def compile_archive(variants: dict[str, Any], archs: tuple[str, ...], target: Path) -> Path:
        target.write_text(f"{sorted(variants)} {archs}")
        return target

    def build_with_archive(archive: Path, target: Path, include: Path | None) -> None:
        built["archive"] = archive.read_text()
        target.write_text("library")

    monkeypatch.setattr("still_export.targets.ort.kernels.compile_archive", compile_archive)
    monkeypatch.setattr("still_export.targets.ort.kernels.build_with_archive", build_with_archive)
    package = export_tiny(options={"archs": ("sm_90",)}, chunk_size=32)
    assert built["archive"] == "['GreedyToken', 'HybridAttention'] ('sm_90',)"
    assert package.manifest["native"]["archs"] == ["sm_90"] and LIBRARY in package.manifest["files"]
    assert OrtOptions.from_manifest(package.manifest).archs == ("sm_90",)
    assert package.manifest["prefill_tokens"] == 8192
    assert [prefill_tokens(("sm_90",), size) for size in (576, 1024, 1536, 2048, 4096, 8192)] == [
        8192,
        8192,
        4096,
        4096,
        2048,
        2048,
    ]
    with pytest.raises(ConfigError, match="--no-native leaves out the kernels"):
        OrtOptions(native=False, archs=("sm_90",))


@pytest.mark.slow
def test_bodies_on_cuda_are_said_to_be_slow(
    built: None, export_tiny: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    package = native(export_tiny)
    assert native_library(package.path, package.manifest, "cuda") is None
    assert "no kernels for CUDA: function bodies run" in capsys.readouterr().err
    package.manifest["native"]["archs"] = ["sm_90"]
    try:
        assert native_library(package.path, package.manifest, "cuda") == package.path / LIBRARY
    finally:
        del package.manifest["native"]["archs"]


@pytest.mark.skipif("CUDAExecutionProvider" in get_available_providers(), reason="has that provider")
def test_an_onnxruntime_without_cuda_is_told_what_to_install(
    export_tiny: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    said = r"this onnxruntime has no CUDAExecutionProvider\. Install onnxruntime-gpu, or run with --provider cpu\."
    package = export_tiny().path
    with pytest.raises(RunError, match=f"^{said}$"):
        OrtModel(package, threads=1, provider="cuda")
    for verb, more in (("run", ["--prompt-ids", "3"]), ("bench", ["--lengths", "9"]), ("verify", ["--lengths", "9"])):
        assert call(verb, package, "--provider", "cuda", "--quiet", *more)
        lines = capsys.readouterr().err.strip().splitlines()
        assert re.search(said, lines[-1]), lines
        assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_provider_that_does_not_start_is_an_error(export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime opens the session without it."""
    package, quieted = export_tiny(), []
    monkeypatch.setattr("onnxruntime.set_default_logger_severity", quieted.append)
    monkeypatch.setattr(
        "onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with pytest.raises(
        RunError, match=r"CUDA provider cannot start: .* of another CUDA than .* Install the nvidia-\* packages"
    ):
        OrtModel(package.path, threads=1, provider="cuda")
    assert quieted == [3], "bodies on CUDA would warn at every node"
    with pytest.raises(RunError, match="CUDA graphs need --provider cuda"):
        OrtModel(package.path, threads=1, replay=True)


@pytest.mark.slow
def test_a_gpu_without_kernels_is_told_what_to_export(
    built: None, export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = native(export_tiny)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Attention: the archive has sm_80, the GPU is sm_90. Compile the archive for sm_90 too")

    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    monkeypatch.setitem(package.manifest["native"], "archs", ["sm_80"])
    with pytest.raises(
        RunError, match=r"the GPU is sm_90\..*Export again with --native --arch and the name of this GPU"
    ):
        open_session(package.path, package.manifest, SessionOptions(), "cuda", package.path / LIBRARY)


def test_bfloat16_values_of_a_device() -> None:
    """numpy lacks the type: the bits go through a value of the host."""
    values = Values.__new__(Values)
    values.device = "cuda"
    values.kind = types.SimpleNamespace(
        ortvalue_from_numpy_with_onnx_type=OrtValue.ortvalue_from_numpy_with_onnx_type,
        ortvalue_from_shape_and_type=lambda shape, kind, device, index: OrtValue.ortvalue_from_shape_and_type(
            shape, kind
        ),
    )
    bits = np.array([[0x3F80, 0xC000], [0x0000, 0x7F80]], np.uint16)
    value = values.tensor(bits, "bfloat16")
    assert value.data_type() == "tensor(bfloat16)"
    np.testing.assert_array_equal(values.array(value), bits)
    np.testing.assert_array_equal(values.floats(value), [[1.0, -2.0], [0.0, np.inf]])


def test_replayed_steps_are_captured_without_tokens(
    built: None, export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that runs a call three times before it replays it, as ONNX Runtime's capture does: states are those of single steps."""
    package = native(export_tiny)
    model = OrtModel(package.path, threads=1)
    real, run, graphs = model.values.kind, model.session.run_with_iobinding, []

    class DeviceValue:
        """OrtValue of a device whose memory is here."""

        @staticmethod
        def ortvalue_from_numpy(array: np.ndarray, device: str, index: int) -> Any:
            return real.ortvalue_from_numpy(array.copy())

    def capture(binding: Any, options: Any) -> None:
        number = options.get_run_config_entry("gpu_graph_id")
        for _ in range(1 if number == "-1" or number in graphs else 3):
            run(binding, options)
        graphs.append(number)

    monkeypatch.setattr(model.values, "kind", DeviceValue)
    monkeypatch.setattr(model, "replays", True)
    monkeypatch.setattr(model.session, "run_with_iobinding", capture)
    start = {"input_ids": np.stack([PROMPT, PROMPT[::-1]]), "new_tokens": np.array([61, 40])}
    (check,) = Session(model).checks(start, 12)
    assert check.passed, check.what
    assert graphs[0] == "-1" and graphs.count("1") > 12


@pytest.mark.slow
def test_only_for_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", "maker/model", "--to", "trt", "--native", "-o", tmp_path / "x") == 2
    assert "--native" in capsys.readouterr().err


@pytest.mark.usefixtures("built")
def test_a_library_that_is_written_while_it_runs_shows(export_tiny: Exporter, tmp_path: Path) -> None:
    folder = shutil.copytree(native(export_tiny).path, tmp_path / "package")
    model = OrtModel(folder, threads=1)
    model.check_files()
    os.utime(folder / LIBRARY, ns=(1, 1))
    with pytest.raises(CheckError, match=f"{LIBRARY} was changed while it was used"):
        model.check_files()
