"""The CUDA kernels of the library for ONNX Runtime, in a stand-in for its provider and over the recording driver: no GPU is needed.

They launch what the core launches for the same call, and with STILL_TENSORRT_INCLUDE what the adapter for TensorRT does.
"""

import ctypes.util
import re
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest

from still_export.targets.trt.plugins import pack_archive
from still_graphs.ops import OpSpec
from still_kernels.swi_glu.spec import SWI_GLU
from tests.plugins import builds
from tests.plugins.builds import FOLDERS
from tests.plugins.core_abi import Core, Recorder, shapes_of
from tests.plugins.test_adapters import (
    CALLS,
    CUDA,
    all_archives,
    compile_host,
    host_arguments,
    kernels_taken,
    node_values,
    stand_in_driver,
)
from tests.still_graphs import test_functions as body
from tests.still_graphs.passes import attach_functions

pytestmark = pytest.mark.slow

Call = tuple[OpSpec, dict[str, Any], set[str], dict[str, int], tuple[str, ...], Any]


class Hosts:
    """The libraries with an archive of text, and the stand-ins that call them."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self.archives = all_archives(folder)
        self.archive = pack_archive(self.archives, folder / "kernels.bin")
        self.drivers = stand_in_driver(recorder, folder)
        include = builds.demand_headers()
        self.library = builds.optimized("still_onnxruntime", "onnxruntime/*.so", folder, self.archive)
        self.host = compile_host("onnxruntime", [include], folder)
        if FOLDERS:
            pattern = "tensorrt/libstill_tensorrt*[0-9].so"
            self.tensorrt_library = builds.optimized("all", pattern, folder, self.archive)
            self.tensorrt = compile_host("tensorrt", [FOLDERS[0], CUDA], folder)

    def run(self, call: Call, tensorrt: bool = False, **values: Any) -> list[str]:
        """Lines that a stand-in prints of a call."""
        spec, attributes, absent, sizes, *_ = call
        program = [self.tensorrt, self.tensorrt_library] if tensorrt else [self.host, self.library]
        given = host_arguments(spec, node_values(spec, attributes, absent) | values, absent, sizes)
        done = subprocess.run(
            [*program, *given, *kernels_taken(self.archives)],
            capture_output=True,
            text=True,
            env={"LD_LIBRARY_PATH": str(self.drivers)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()


@pytest.fixture(scope="session")
def hosts(recorder: Recorder, tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(tmp_path_factory.mktemp("cuda"), recorder)


def launches(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("cuLaunchKernel")]


def without_own_memory(line: str) -> str:
    """A launch without the addresses of what the recording driver allocated: counters, which each program has of its own."""
    return re.sub(r"\d+", lambda found: "own" if 1 << 28 <= int(found[0]) < 1 << 29 else found[0], line)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].name)
def test_launches_are_those_of_the_core(hosts: Hosts, core: Core, recorder: Recorder, call: Call) -> None:
    spec, attributes, absent, sizes, kernels, _ = call
    lines = hosts.run(call)
    assert lines[:2] == ["registered 0", "created 0"]
    assert lines.count("compute 0") == 5
    assert [line.split()[1] for line in launches(lines)] == [f"{k}_kernel" for k in (*kernels, *[kernels[-1]] * 3)]
    # The core with counts of ONNX Runtime's type, in the same buffers
    core.call("still_add_archive", str(hosts.archive).encode())
    for taken in kernels_taken(hosts.archives):
        recorder.arguments(*taken.removeprefix("kernel=").split(":"))
    op = core.op(spec.name, attributes, node_values(spec, attributes, absent)["absent_inputs"])
    at = {name: 0x1000 * (i + 1) for i, name in enumerate(op.names("input"))}
    at |= {tensor.name: 0x900000 + 0x10000 * i for i, tensor in enumerate(spec.outputs)}
    scratch = [int(line.split()[1]) for line in lines if line.startswith("scratch")]
    for tokens, size in zip((150, 1), scratch[:2], strict=True):
        inputs = shapes_of(spec.resolve(attributes), sizes | {"T": tokens}, "float16", "int64", absent)
        op.prepare(inputs)
        outputs = [at[name.replace("present_", "past_")] for name in op.names("output")]
        op.launch([at[name] for name in op.names("input")], outputs, 0x7000000 if size else 0, 0)
    expected = [without_own_memory(line) for line in recorder.log("cuLaunchKernel")]
    assert [without_own_memory(line) for line in launches(lines)[: len(expected)]] == expected


@pytest.mark.skipif(not FOLDERS, reason="needs STILL_TENSORRT_INCLUDE")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].name)
def test_launches_are_those_of_tensorrt(hosts: Hosts, call: Call) -> None:
    theirs = launches(hosts.run(call, tensorrt=True))
    assert theirs and launches(hosts.run(call))[: len(theirs)] == theirs


def test_streams_states_and_memory(hosts: Hosts) -> None:
    """Calls of the hybrid op: prefill, decode, then decode again, on another stream, and with present buffers of its own."""
    lines = hosts.run(CALLS[0])
    decode = launches(lines)[-4:]
    assert decode[0] == decode[1], "what was planned is kept"
    assert "stream=7" in decode[2] and "stream=0" in decode[3]
    counters = [line.split("args=")[1].split(",")[0] for line in decode]
    assert counters[0] == counters[1] == counters[3] != counters[2], "two runs at once have counters of their own"
    assert len([line for line in lines if line.startswith("cuMemAlloc")]) == 2
    copies = [line for line in lines if line.startswith("cuMemcpyDtoD")]
    assert len(copies) == 7, "of the last call alone: every state, to its present buffer"
    assert all(int(line.split()[1]) == int(line.split()[2]) + 0x100000 for line in copies)
    assert lines.index(copies[-1]) < lines.index(decode[3], lines.index(copies[0])), (
        "before the kernels, which work in place"
    )
    sizes = [int(line.split()[1]) for line in lines if line.startswith("scratch")]
    assert sizes[0] > sizes[1] > 0 and lines.count("freed 0x7000000") == len(sizes)
    modules = [i for i, line in enumerate(lines) if line.startswith("cuModuleLoadData")]
    assert len(modules) == 8 and modules[-1] < lines.index(launches(lines)[0]), "all when the node was made"


def test_what_has_no_kernel_is_refused_when_the_node_is_made(hosts: Hosts) -> None:
    lines = hosts.run(CALLS[0], activation_type="float32")
    assert lines[1].startswith("created HybridAttention: no kernel for dtype=float32, the archive has float16. Compile")


def test_the_same_library_serves_the_cpu(hosts: Hosts) -> None:
    """ONNX Runtime's CPU provider takes its own kernels, of both types, where kernels of another provider stand beside them."""
    import torch

    body.check(body.config(), [5, 1, [1, 3]], in_place=True, library=str(hosts.library))
    body.check(body.config(), [5, 1], torch.float16, library=str(hosts.library))


def test_what_has_kernels_of_the_gpu_alone_runs_by_its_body_on_the_cpu(hosts: Hosts) -> None:
    """Where there is no driver, or the session says that it is for the CPU; ONNX Runtime loads no node otherwise whose op is for another
    provider."""
    import numpy as np
    import onnxruntime

    info = onnx.helper.make_tensor_value_info
    kind = onnx.TensorProto.FLOAT16
    node = onnx.helper.make_node(SWI_GLU.name, ["x"], ["y"], domain=SWI_GLU.domain, width=4)
    graph = onnx.helper.make_graph([node], "g", [info("x", kind, ["b", "t", 8])], [info("y", kind, ["b", "t", 4])])
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(SWI_GLU.domain, SWI_GLU.version)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    attach_functions(model)
    x = np.linspace(-2, 2, 24, dtype=np.float16).reshape(1, 3, 8)
    for entry in ("cpu", "cuda", ""):
        options = onnxruntime.SessionOptions()
        if entry:
            options.add_session_config_entry("still.provider", entry)
        options.register_custom_ops_library(str(hosts.library))
        if entry == "cuda" or (not entry and ctypes.util.find_library("cuda")):
            with pytest.raises(Exception, match=SWI_GLU.name):
                onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            continue
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        gate, up = np.split(x.astype(np.float64), 2, axis=-1)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], gate / (1 + np.exp(-gate)) * up, atol=2e-3)
