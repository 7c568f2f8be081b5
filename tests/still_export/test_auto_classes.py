"""Transformers beside this package: Auto classes that know STILL models after `import still_export`, pipelines over batches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from tests.docs.stand_ins import CHAT
from tests.still_export.tiny import MIXED, still_model
from tests.still_export.training import byte_tokenizer

PROMPTS = [
    "The river",
    "No bird sings there in winter when ships go by, and the sea of stone runs",
    "So",
    "Down to a sea",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved STILL model with a tokenizer that pads, as a base's own does, on the left."""
    folder = tmp_path_factory.mktemp("model")
    still_model("llama", torch.float32, sizes=dict(vocab_size=258), layer_types=MIXED).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.padding_side = "left"
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def run(program: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    return done.stdout.strip()


FORKS = """
import json, os, sys, traceback
import torch, torch._dynamo, torch.distributed.tensor, torch.export
for line in sys.stdin:
    assert not {"still_export", "transformers"} & sys.modules.keys()
    program, folder = json.loads(line)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 1)
        sys.argv = ["-c", folder]
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            print(traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(child, 0)
    print(json.dumps(said), flush=True)
"""
"""Runs programs, each in a fork that has neither this package nor transformers, and what both take longest to import: torch."""


@pytest.fixture(scope="module")
def forked() -> Iterator[Callable[[str, Path], str]]:
    """What a program prints where torch alone has been imported."""
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def said(program: str, folder: Path) -> str:
        process.stdin.write(json.dumps([program, str(folder)]) + "\n")
        process.stdin.flush()
        return str(json.loads(process.stdout.readline())).strip()

    yield said
    process.stdin.close()
    assert process.wait() == 0


LOADS = "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import still_export; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import still_export",
        pytest.param(
            "import transformers, still_export; from transformers import AutoConfig, AutoModelForCausalLM",
            marks=pytest.mark.long,
        ),
        "import still_export, transformers.modeling_utils; from transformers import AutoModelForCausalLM",
        pytest.param(
            "import still_export, transformers.processing_utils; from transformers import AutoModelForCausalLM",
            marks=pytest.mark.long,
        ),
    ],
)
def test_auto_classes_know_still_models(imports: str, folder: Path, forked: Callable[[str, Path], str]) -> None:
    assert forked(f"import sys; {imports}; {LOADS}", folder).splitlines()[-1:] == ["StillLlamaForCausalLM"]


@pytest.mark.slow
def test_a_configuration_alone(folder: Path, forked: Callable[[str, Path], str]) -> None:
    program = "import sys, still_export; from transformers import AutoConfig; "
    program += "print(AutoConfig.from_pretrained(sys.argv[1]).model_type)"
    assert forked(program, folder).splitlines()[-1:] == ["still_llama"]


def test_importing_is_cheap(folder: Path) -> None:
    program = "import sys, still_export; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    assert run(program, folder) == "[]"


def test_a_transformers_of_another_kind_is_left_usable(tmp_path: Path) -> None:
    """One whose Auto classes this package cannot register with: a warning, and everything of its own goes on."""
    auto = tmp_path / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    for each in (auto, auto.parent, auto.parent.parent):
        (each / "__init__.py").touch()
    (auto / "configuration_auto.py").write_text("AutoConfig = 7")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import still_export; "
        "from transformers.models.auto.configuration_auto import AutoConfig; print(AutoConfig)"
    )
    assert run(program, tmp_path) == "7"


def test_pipeline_answers_batches_as_single_prompts(folder: Path) -> None:
    import still_export  # noqa: F401

    answers = pipeline("text-generation", model=str(folder), device="cpu")
    assert answers.tokenizer.padding_side == "left"
    asked = dict(max_new_tokens=7, do_sample=False, return_full_text=False)
    together = answers(PROMPTS, batch_size=4, **asked)
    alone = [answers(prompt, **asked) for prompt in PROMPTS]
    assert together == alone and len({row[0]["generated_text"] for row in alone}) > 1
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert answers(chats, batch_size=3, **asked) == [answers(chat, **asked) for chat in chats]
