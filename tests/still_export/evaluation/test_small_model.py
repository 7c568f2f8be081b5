"""The repository's own model: it finds facts in 4096 tokens through ONNX Runtime, by its salient tokens."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from still_export.evaluation.bench import BenchOptions
from still_export.evaluation.evaluate import DEFAULT_HAYSTACK, answered, bits_per_byte, load_any, without
from still_export.evaluation.models import _measured
from still_export.evaluation.packages import open_model
from still_export.evaluation.synthetic import PromptWriter
from still_export.graph.options import ExportOptions
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL, HYBRID
from still_export.models.load import load_model, load_tokenizer
from still_export.models.read.rows import DIAGONAL, SCALE
from still_export.package.folder import open_package
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from still_export.texts.replies import greedy, replies
from still_export.texts.tasks import TASKS, TaskWriter
from still_export.texts.texts import tokenize
from tests.still_export.verbs import call
from tests.tolerances import MODEL

SMALL = Path(__file__).parents[3] / "assets" / "small"
LENGTHS = (1024, 4096)


def test_lengths_beyond_its_capacity_get_room() -> None:
    rooms = {}
    for tokens in (4096, 6000):
        config = load_any(str(SMALL), None, "float32", tokens=tokens)["still"].config
        rooms[tokens] = config.still.deployment.capacity(config)
    assert rooms[4096] >= 4096 and rooms[6000] == max(6000, rooms[4096]) and rooms[6000] > rooms[4096]


def prompts(length: int, count: int) -> list[tuple[np.ndarray, int]]:
    """Needle prompts at `count` depths, with their answers' lengths."""
    tokenizer = load_tokenizer(SMALL)
    writer = TaskWriter(tokenizer, tokenize(DEFAULT_HAYSTACK, tokenizer, 1024))
    rng = np.random.default_rng(length)
    return [writer.prompt(TASKS["needle"], length, i / max(1, count - 1), rng) for i in range(count)]


def test_fits_the_repository() -> None:
    assert sum(path.stat().st_size for path in SMALL.rglob("*") if path.is_file()) < 6_000_000
    assert load_model(SMALL).dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "layers", "heads", "softmax", "most_bytes"),
    [
        ("smollm2-135m-instruct-mixed-2", 30, 9, (17, 18), 8_000_000),
        ("smollm2-135m-instruct-hybrid", 30, 9, (), 8_000_000),
        ("qwen2.5-coder-1.5b-instruct-mixed", 28, 12, (14, 16, 19, 23), 12_000_000),
    ],
)
def test_adapters_are_complete(name: str, layers: int, heads: int, softmax: tuple[int, ...], most_bytes: int) -> None:
    """Their bases are too large for a test; tools/demo.sh runs one of them with its own."""
    folder = SMALL.parent / name
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sum(path.stat().st_size for path in folder.iterdir()) < most_bytes
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    still = StillConfig.from_dict(json.loads((folder / "adapter_config.json").read_text())["still_config"])
    assert still.window_factors is not None and [len(row) for row in still.window_factors] == [heads] * layers
    targets = [f"{p}_proj.lora_{m}.default.weight" for p in "qkvog" for m in "AB"]
    names = ["feature_q_weight", "feature_k_weight", "g_proj.bias", *targets]
    hybrid = [layer for layer in range(layers) if layer not in softmax]
    assert still.layer_types == (tuple(HYBRID if i in hybrid else FULL for i in range(layers)) if softmax else None)
    few = {name for name, tensor in tensors.items() if tensor.dtype in (torch.int8, torch.uint8)}
    near_one = {name for name in few if tensors[name].dtype == torch.uint8}
    # Where the base's own projections stay, in layers that were softmax while the others were trained, gates alone have LoRA.
    bare = (
        {f"model.layers.{i}.self_attn.{p}_proj." for i in (17, 18) for p in "qkvo"} if name.endswith("-hybrid") else ()
    )
    expected = {f"model.layers.{i}.self_attn.{part}" for i in hybrid for part in names}
    own = {n for n in expected if not n.startswith(tuple(bare))}
    assert set(tensors) == own | {name + SCALE for name in few} | {name + DIAGONAL for name in near_one}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "package"
    export(ExportOptions(model=str(SMALL), dtype="float32"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_finds_needles_through_onnx_runtime(package: Path, length: int) -> None:
    model = OrtModel(package, threads=1)
    found = []
    for ids, count in prompts(length, 8):
        model.start()
        answer = list(model.generate(ids[:-count].tolist(), count, Sampling()))
        found.append(answer == ids[-count:].tolist())
    assert sum(found) >= 7


def test_without_salient_tokens_it_finds_less() -> None:
    model = load_model(SMALL, dtype="float32")
    asked = prompts(1024, 6)
    with torch.no_grad(), without(model, "no_salient_tokens"):
        hits = sum(answered(model, None, ids[None], [count]) for ids, count in asked)
    assert hits <= 2


@pytest.mark.slow
def test_a_package_is_a_model(package: Path) -> None:
    """Logits of the last tokens and of all, from a package that gives one a call; answers of prompts of different lengths."""
    model = load_model(SMALL, dtype="float32")
    opened = open_model(open_package(package), BenchOptions(threads=1))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1024, (2, 150)))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    for kept in (0, 1, 3):
        ours = opened(ids, logits_to_keep=kept).logits
        torch.testing.assert_close(ours, whole[:, -kept:], rtol=0, atol=MODEL["float32"] * float(whole.abs().max()))
    tokenizer, asked = load_tokenizer(SMALL), [prompt[0][:-4].tolist() for prompt in prompts(300, 2)]
    asked[1] = asked[1][20:]
    assert greedy(opened, tokenizer, asked, 8) == greedy(model, tokenizer, asked, 8)
    writer = PromptWriter(tokenizer, "babi_1", [tokenize(DEFAULT_HAYSTACK, tokenizer, 1024)], [])
    told = [writer.prompt(400, 0.5, 0, np.random.default_rng(seed)).ids.tolist() for seed in range(2)]
    assert replies(opened, tokenizer, told, 8) == replies(model, tokenizer, told, 8)
    right = wrong = 0
    for row, count in prompts(600, 4):
        planted = row.copy()
        planted[-count:] = np.roll(row[-count:], 1) if len(set(row[-count:])) > 1 else row[-count:] + 1
        right, wrong = (n + answered(opened, tokenizer, x[None], [count]) for n, x in ((right, row), (wrong, planted)))
    assert right >= 3 and wrong == 0


@pytest.mark.slow
def test_a_package_of_all_logits_is_read_in_whole_calls(tmp_path: Path) -> None:
    export(
        ExportOptions(model=str(SMALL), dtype="float32", all_logits=True),
        tmp_path / "all",
        options=OrtOptions(prefill_tokens=64),
    )
    opened = open_model(open_package(tmp_path / "all"), BenchOptions(threads=1))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1024, (2, 150)))
    with torch.no_grad():
        whole = load_model(SMALL, dtype="float32")(ids, use_cache=False).logits
    for kept in (0, 3):
        ours = opened(ids, logits_to_keep=kept).logits
        torch.testing.assert_close(ours, whole[:, -kept:], rtol=0, atol=MODEL["float32"] * float(whole.abs().max()))


def test_costs_are_measured_where_every_package_has_room_for_steps() -> None:
    """A prompt as long as the capacity can be asked for; behind it no step can be timed."""

    def package(tokens: int, bounded: bool = True) -> Any:
        return SimpleNamespace(manifest={"capacity": {"capacity_tokens": tokens, "bounded": bounded}})

    setting = BenchOptions()
    for tokens, expected in ((4096, 4096 - setting.room(0)), (600, 600)):
        length = _measured(tokens, {"a": package(4096), "b": package(64, bounded=False)}, setting)
        assert length == expected and setting.room(length) <= 4096


@pytest.mark.slow
def test_packages_are_evaluated_side_by_side(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(package, other)
    text = tmp_path / "text.txt"
    text.write_text(DEFAULT_HAYSTACK)
    asked = ["--text", str(text), "--contexts", "64", "--text-tokens", "256", "--tasks", "needle"]
    asked += ["--lengths", "600", "--depths", "2", "--samples", "1", "--threads", "1"]
    report = tmp_path / "which.html"
    command = [
        "evaluate",
        str(package),
        str(other),
        *asked,
        "--json",
        "-o",
        str(tmp_path / "out"),
        "--report",
        str(report),
    ]
    assert call(*command) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["bits_per_byte"]) == list(found["costs"]) == list(found["retrieval"]) == ["package", "other"]
    assert found["bits_per_byte"]["package"] == found["bits_per_byte"]["other"]
    model = load_model(SMALL, dtype="float32")
    bits = bits_per_byte(model, load_tokenizer(SMALL), DEFAULT_HAYSTACK, 64, 256)
    assert found["bits_per_byte"]["other"]["text.txt @ 64"] == pytest.approx(bits, rel=1e-4)
    measured = {"size, MB", "peak, MB", "prefill 600, s", "decode 600, ms", "decode, ± %"}
    assert set(found["costs"]["other"]) == {*measured, "used by other programs, %"}
    # In a process of its own, which has not what this one has: PyTorch.
    assert found["costs"]["other"]["peak, MB"] < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - 50
    assert "Size, memory and speed" in report.read_text() and "Quality over cost" not in report.read_text(), (
        "two are no plot"
    )
    assert call("evaluate", package, SMALL, *asked) == 2
    assert "several at once must be packages" in capsys.readouterr().err.replace("\n", " ")
    assert call("evaluate", package, "--lengths", 1000000) == 2
    assert "tokens; 1000000 are needed" in capsys.readouterr().err.replace("\n", " ")
    assert call("evaluate", package, "--tasks", "") == 2
    assert "nothing to measure" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["still-export", "still-export-torch"])
def test_lm_eval_measures_packages_and_models(kind: str, package: Path, tmp_path: Path) -> None:
    """A choice and a continuation of local files, by lm-evaluation-harness itself, as PyTorch gives them."""
    pytest.importorskip("lm_eval")
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"q": f"The road climbs {word}", "a": [" to the mill", " east", " up"], "n": 0}) + "\n"
            for word in "xyz"
        )
    )
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{a}}",
        "doc_to_target": "{{n}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "local.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "still_export.evaluation.harness", "run", "--model", kind, "--model_args"]
    named = f"package={package},threads=1" if kind == "still-export" else f"model={SMALL},dtype=float32"
    command += [named, "--device", "cpu", "--tasks", "local", "--include_path", str(tmp_path), "--log_samples"]
    done = subprocess.run([*command, "--output_path", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_local_*.jsonl")
    model, tokenizer = load_model(SMALL, dtype="float32"), load_tokenizer(SMALL)
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        context = tokenizer(sample["doc"]["q"])["input_ids"]
        for choice, ((given, _),) in zip(sample["doc"]["a"], sample["resps"], strict=True):
            whole = tokenizer(sample["doc"]["q"] + choice)["input_ids"]
            with torch.no_grad():
                scores = model(torch.tensor([whole]), use_cache=False).logits[0].double().log_softmax(-1)
            wanted = sum(float(scores[i - 1, whole[i]]) for i in range(len(context), len(whole)))
            assert float(given) == pytest.approx(wanted, rel=1e-3)
