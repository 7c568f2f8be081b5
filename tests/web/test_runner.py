"""The npm package in Node: the same tokens as `run`, greedy and drawn, a snapshot of its own, and PyTorch's recorded calls."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from still_export.graph.options import ExportOptions
from still_export.runtime.conversation import Conversation
from still_export.runtime.ort import OrtModel
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import Sampling
from still_export.runtime.snapshot import Snapshot
from still_export.runtime.text import Text
from still_export.targets.export import export
from still_export.targets.web.chats import CHATS, warn_of_chats
from tests.gpu.prepare import TASKS
from tests.still_export.evaluation.test_tasks import task_of
from tests.task_checks import PIECES
from tests.web.conftest import WEB

pytestmark = pytest.mark.slow


def answered(package: Path, **asked: Any) -> dict[str, Any]:
    command = ["node", str(WEB / "run.mjs"), str(package), json.dumps(asked)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # type: ignore[no-any-return]


def test_tokens_are_those_of_run(dist: Path, package: Path, tmp_path: Path) -> None:
    file = tmp_path / "read.safetensors"
    said = answered(package, prompt="The ship", tokens=24, snapshot=str(file), calls="calls.npz")
    model = OrtModel(package, threads=1)
    model.start()
    assert said["tokens"] == said["again"] == list(model.generate(said["ids"], 24, Sampling()))
    assert Snapshot.load(file).length == len(said["ids"]) - 1
    assert said["verdicts"] and all(v["passed"] for v in said["verdicts"])


@pytest.mark.parametrize(("seed", "top_k", "top_p"), [(3, 0, 1.0), (2**40 + 7, 20, 1.0), (0, 0, 0.7)])
def test_draws_are_those_of_run(dist: Path, package: Path, seed: int, top_k: int, top_p: float) -> None:
    said = answered(package, prompt="The ship", tokens=24, temperature=0.8, topK=top_k, topP=top_p, seed=seed)
    model = OrtModel(package, threads=1)
    model.start()
    sampling = Sampling(0.8, top_k=top_k, top_p=top_p, seed=seed)
    assert said["tokens"] == list(model.generate(said["ids"], 24, sampling))


PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}", PARTS])
def test_a_chat_is_that_of_run(dist: Path, package: Path, tmp_path: Path, template: str) -> None:
    """Also where the prompt opens thoughts, which later turns do not have."""
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    end = "{% if add_generation_prompt %}<assistant>{% if think %}<think>\n{% endif %}{% endif %}"
    text = "{% for m in messages %}<{{ m['role'] }}>" + template + "\n{% endfor %}" + end
    thinks = {"think": "yes"} if "think" in template else {}
    manifest["chat"] = {"templates": {"default": text}, "tokens": thinks}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    messages = ["Who?", " Where was it\n", "Why?"]
    said = answered(folder, chat=messages, tokens=12)
    model = OrtModel(folder, threads=1)
    for prefixes in (None, PrefixCache(model.table, 1 << 28)):
        talked = Conversation(model, Text(model), 12, Sampling(), prefixes=prefixes)
        answers = [talked.ask(message, None) for message in messages]
        assert said["answers"] == [answer.text for answer in answers]
        assert said["length"] == model.length[0]
    assert answers[-1].cached_tokens > len(talked._prompt([], messages[0])), "what every turn begins with was kept"


@pytest.mark.parametrize(
    "content, wrong",
    [
        ("{{ m.content }}", []),
        (PARTS, []),
        ("{{ m.content.rsplit('?', 1)[0] }}", list(CHATS)),
        ("{% if m.reasoning_content %}{{ '%s' % m.reasoning_content }}{% endif %}{{ m.content }}", [*CHATS][2:]),
        ("{% do m %}", []),
    ],
)
def test_chats_that_the_engine_renders_otherwise_are_named(
    dist: Path, content: str, wrong: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that the template itself refuses."""
    text = "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}"
    warn_of_chats({"chat": {"templates": {"default": text}, "tokens": {}}})
    assert [record.args for record in caplog.records] == ([(", ".join(wrong),)] if wrong else [])


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_a_trained_task_is_solved(dist: Path, tmp_path: Path, name: str) -> None:
    options = ExportOptions(str(WEB.parent / "assets/tasks" / name), dtype="float32")
    made = export(options, tmp_path / "package", to="web", command="test").path
    task = task_of(name)
    likeliest = answered(made, texts=task.ids.tolist(), pieces=PIECES)["likeliest"]
    assert task.queries.sum() > 100 and task.wrong(np.array(likeliest).T) == 0
