"""Polygraphy's command is a second opinion: a right package passes, and a fault that verify sees fails there, too."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from still_export.proof.calls_file import CALLS, COMMAND, LOADER
from still_export.proof.package import VerifyOptions, verify
from tests.still_export.conftest import Exporter


def _times(factor: float) -> Callable[[onnx.ModelProto], None]:
    """Multiply a state that an op reads."""

    def change(graph: onnx.ModelProto) -> None:
        name = "past_kv_state.0"
        kind = next(i for i in graph.graph.input if i.name == name).type.tensor_type.elem_type
        for node in graph.graph.node:
            for number, value in enumerate(node.input):
                if value == name:
                    node.input[number] = "times"
        array = np.array(factor, onnx.helper.tensor_dtype_to_np_dtype(kind))
        graph.graph.initializer.append(numpy_helper.from_array(array, "factor"))
        graph.graph.node.insert(0, helper.make_node("Mul", [name, "factor"], ["times"]))

    return change


def _epsilon(graph: onnx.ModelProto) -> None:
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 0.1


FAULTS = {"0": _times(0), "1.5": _times(1.5), "-1": _times(-1), "epsilon": _epsilon}


@pytest.mark.long
def test_polygraphy_fails_where_verify_fails(export_tiny: Exporter, tmp_path: Path) -> None:
    package = export_tiny("llama", "float16", {"native": False})
    options = VerifyOptions(lengths=(1, 17, 40), decode_steps=20, polygraphy=True)
    report = verify(package.path, options, tmp_path).report
    assert report.passed and report.command == f"sh {tmp_path / COMMAND}"
    command = (tmp_path / COMMAND).read_text()
    assert "elemwise" in command and "median" not in command

    head, _, calls = command.partition("call 0 ")
    command = (
        head + "call 0 " + "\n".join([calls.splitlines()[0], "exit $failed", ""])
    )  # one call is enough, and faster

    def run(graph: Path) -> int:
        (tmp_path / "again.sh").write_text(command.replace(str(package.model_path), str(graph)))
        return subprocess.run(["sh", tmp_path / "again.sh"], capture_output=True).returncode

    assert run(package.model_path) == 0
    for name, change in FAULTS.items():
        graph = onnx.load(package.model_path)
        change(graph)
        onnx.save(graph, tmp_path / "faulty.onnx")
        assert run(tmp_path / "faulty.onnx") == 1, name
    verify(package.path, VerifyOptions(lengths=(3,), decode_steps=1), tmp_path)
    assert not any((tmp_path / name).exists() for name in (CALLS, LOADER, COMMAND)), "a passed proof leaves none"
