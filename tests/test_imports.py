"""Which rooms import which (contracts in pyproject.toml), what must load without what, and who may name an op."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from still_graphs.ops import OPS

ROOT = Path(__file__).parents[1]


def test_imports_follow_the_contracts_of_pyproject() -> None:
    """A forbidden import fails it: try `from still_export.cli import main` in still_export/errors.py."""
    done = subprocess.run(["lint-imports", "--no-logo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-800:]


@pytest.mark.parametrize(
    "module, absent",
    [
        ("still_graphs.ops", ["torch", "triton", "onnx", "numpy"]),  # and with it the spec.py of every op
        ("still_graphs.functions", ["torch", "onnxruntime"]),
        ("still_kernels.hybrid_attention.meaning.whole", ["triton", "onnx", "transformers"]),
        ("still_kernels.gated_mlp.plan", ["torch", "triton", "onnx"]),
        ("still_kernels.registry", ["torch", "triton", "onnx"]),
        pytest.param("still_export.models.load", ["onnx", "onnxruntime", "triton", "tensorrt"], marks=pytest.mark.slow),
        ("still_export.cli.main", ["torch", "transformers", "onnx", "onnxruntime"]),
        ("still_export.runtime.ort", ["torch", "transformers", "onnx"]),
        (
            "still_export.evaluation.bench",
            ["torch", "onnx", "pydantic", "ssl"],
        ),  # their memory would count as the runtime's
        *(
            (module, ["torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "safetensors"])
            for module in (
                "still_export.targets.registry",
                "still_export.engines.build",
                "still_export.runtime.tensorrt",
                "still_export.evaluation.prove",
                "still_export.proof.selections",
                "still_export.serving.server",
            )
        ),  # where TensorRT alone is
    ],
)
def test_loads_without(module: str, absent: list[str]) -> None:
    """Optional libraries load inside the function that needs them."""
    program = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-800:]


def test_records_of_ops_load_without_torch() -> None:
    """Where a package is lowered, or verified by recorded answers, there is none."""
    program = (
        "import sys; sys.modules['torch'] = None; from still_kernels.registry import *; list(map(op_of, op_names()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-800:]


# Rooms of an op, of models and their training, and of the command line, where options of a configuration are flags.
OWN = (
    *(f"kernels/still_kernels/{op.torch_name}/" for op in OPS.values()),
    "still_export/graph/quantization/",
    "still_export/mixers/",
    "still_export/models/",
    "still_export/gguf/",
    "still_export/folders/",
    "still_export/systems/",
    "still_export/linearization/",
    "still_export/cli/",
)
REGISTRATIONS = {
    **{f"still_export/targets/{name}/target.py": {"Experts"} for name in ("trt_rtx", "genai", "web")},
}
"""One line an op, and what stands in it; passes that put an op into graphs."""
NAMESAKES = {
    "still_export/targets/genai/join_states.py": {"conv_state", "recurrent_state"},
    "still_export/proof/genai.py": {"chunk_size"},
    "still_export/proof/foreign.py": {"MatMulNBits"},
    "still_export/proof/foreign_weights.py": {"MatMulNBits"},
    "graphs/still_graphs/passes/dequantize_at_load.py": {"MatMulNBits"},
    "still_export/targets/web/target.py": {"MatMulNBits", "LinearAttention"},
}
"""onnxruntime-genai's names of its tensors and options, and ops of com.microsoft, which are words of ops by chance."""


OTHERS = (
    "attention Attention key value local overflow scale activation bits block_size width cache route Route experts k score normalize "
    "epsilon scaling groups step"
)
"""Words of ops that are words of other things, too."""


def words_of_ops() -> set[str]:
    """Names of ops, states and attributes that are no words of other things."""
    words = {"salient", "slots"}
    for op in OPS.values():
        words |= {op.name, op.torch_name, *(a.name for a in op.attributes), *(s.name for s in op.states)}
    return words - set(OTHERS.split())


def test_generic_rooms_name_no_op_no_state_and_no_attribute() -> None:
    """They ask the OpSpec, the mixer, the manifest: another op touches none of them."""
    words = words_of_ops()
    found = {}
    for folder in ("graphs/still_graphs", "kernels/still_kernels", "still_export"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name.startswith(OWN):
                continue
            named = set(re.findall(r"[A-Za-z_]+", path.read_text(encoding="utf-8"))) & words
            if named - REGISTRATIONS.get(name, set()) - NAMESAKES.get(name, set()):
                found[name] = named
    assert not found


def test_generic_sources_of_the_plugins_name_no_op() -> None:
    """Core, hosts and programs take ops from specs, archives and entries; CMake finds folders of ops."""
    words = {word for op in OPS.values() for word in (op.name, op.torch_name)} - {"Attention", "attention"}
    found = {}
    for path in (ROOT / "plugins").rglob("*"):
        if path.suffix not in (".cpp", ".h", ".S", ".map"):
            continue
        if named := set(re.findall(r"[A-Za-z_]+", path.read_text(encoding="utf-8"))) & words:
            found[str(path.relative_to(ROOT))] = named
    assert not found


TOYS = {
    "tests/toy/spec.py": r"tests[./]toy|Decay",
    "tests/toy_target/target.py": r"(?i)toy.?(note|target|options)|[\"']toy[\"']",
    "tests/toy_system/family.py": r"toy_system|toy_means|running_mean",
}
"""An op, a target and a system that somebody adds: a file of each, and what would name it."""


@pytest.mark.parametrize("own", TOYS)
def test_what_is_added_is_named_nowhere_else(own: str) -> None:
    """Files edited: its folder, and a line in each list of a fixture."""
    suffixes = {".py", ".json", ".cpp", ".h", ".txt"}
    rooms = [ROOT / room for room in ("still_export", "graphs", "kernels", "plugins", "tools")]
    files = [p for room in rooms for p in room.rglob("*") if p.suffix in suffixes and p.is_file()]
    found = [p for p in files if re.search(TOYS[own], p.read_text(encoding="utf-8", errors="ignore"))]
    assert len(files) > 300 and not found
    assert re.search(TOYS[own], (ROOT / own).read_text(encoding="utf-8"))


def test_the_words_are_those_of_the_specs() -> None:
    """The test above can fail: every op brings words of its own, and its own rooms use them."""
    assert {"HybridAttention", "kv_state", "select_scope"} <= words_of_ops()
    text = (ROOT / "kernels/still_kernels/hybrid_attention/plan/launches.py").read_text(encoding="utf-8")
    assert set(re.findall(r"[A-Za-z_]+", text)) & words_of_ops()
