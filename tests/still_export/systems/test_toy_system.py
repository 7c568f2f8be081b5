"""A package that names itself in the entry-point group is a system: found, read, exported, verified, by its folder alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from still_export import discovery
from still_export.discovery import Registry
from still_export.errors import ConfigError
from still_export.mixers.base import Mixer

ROOT = Path(__file__).resolve().parents[3]


def install(folder: Path, package: str) -> Path:
    """What pip leaves of a distribution whose entry point names `package`."""
    about = folder / "toy_system-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-system\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[still_export.systems]\ntoy = {package}\n")
    return folder


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path; systems are looked for again."""
    monkeypatch.syspath_prepend(tmp_path)
    discovery.systems.cache_clear()
    yield tmp_path
    discovery.systems.cache_clear()


def test_an_entry_point_is_found(anew: Path) -> None:
    install(anew, "tests.toy_system")
    found: Registry[Mixer] = Registry((), "mixer", "MIXERS")
    assert {"running_mean", "strided_attention"} <= set(found) and discovery.systems()[-1] == "tests.toy_system"
    assert not {"running_mean"} & set(Registry((), "recipe", "LINEARIZERS"))  # it has no such module


@pytest.mark.parametrize(
    "source, message",
    [
        ("import a_library_that_is_not_here", "broken does not load: No module named 'a_library_that_is_not_here'"),
        ("", "broken does not load: .*MIXERS"),
        ("from tests.toy_system.mixer import MIXERS as own\nMIXERS = own * 2", "adds 'running_mean', which exists"),
    ],
)
def test_a_broken_system_is_named(anew: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(anew, package := f"toy_{anew.name}_broken")
    (anew / package).mkdir()
    (anew / package / "__init__.py").write_text("")
    (anew / package / "mixer.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        list(Registry((), "mixer", "MIXERS"))
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_it_is_exported_and_proven(tmp_path: Path) -> None:
    """From a folder that says "llama" and has a key of the system's own, which is how it is recognised."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "means": True}))
    program = (
        "import sys\nfrom still_export.cli.main import main\n"
        "for words in sys.argv[1:]:\n"
        "    try:\n        main(words.split())\n"
        "    except SystemExit as end:\n        assert not end.code, words\n"
    )
    calls = (
        f"export {tmp_path}/model -o {tmp_path}/package --quiet",
        f"verify {tmp_path}/package --lengths 1,17 --decode-steps 9 --quiet",
    )
    path = f"import sys; sys.path[:0] = [{str(install(tmp_path / 'site', 'tests.toy_system'))!r}, {str(ROOT)!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + program, *calls], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    manifest = json.loads((tmp_path / "package" / "manifest.json").read_text())
    assert manifest["model"]["family"] == "toy_means" and manifest["model"]["layer_types"] == ["running_mean"] * 2
