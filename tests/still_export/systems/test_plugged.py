"""Systems are found, and nothing outside their folders names one."""

import re
from pathlib import Path

from still_export.discovery import recognised, systems
from still_export.mixers.registry import MIXERS
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_graphs.ops import OPS

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "still_export" / "systems"


def words_of_systems() -> set[str]:
    """Names of systems, of their families and of their mixers."""
    folders = [system.rpartition(".")[2] for system in systems() if system.startswith("still_export.")]
    families = [f.name for f in LINEAR_FAMILIES.values() if ".systems." in f.still_config.__module__]
    mixers = [m.name for m in MIXERS.values() if ".systems." in type(m).__module__]
    return {*folders, *families, *mixers}


def named(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower().replace("-", "_"))) & words_of_systems()


def test_nothing_outside_names_a_system() -> None:
    """But an op that has a system's name, in its folder; and assembly is inline, too."""
    rooms = [ROOT / room for room in ("still_export", "graphs", "kernels")]
    files = [path for room in rooms for path in room.rglob("*.py") if HOME not in path.parents]
    assert len(files) > 400
    ops = {op.torch_name for op in OPS.values()}
    found = {}
    for path in files:
        room, *_, op = path.relative_to(ROOT).parts[:3]
        allowed = set() if room == "still_export" else {op.partition("_")[0], "inline", *ops}
        words = named(path.read_text()) - allowed
        found |= {str(path.relative_to(ROOT)): words} if words else {}
    assert not found


def test_the_words_are_those_of_the_systems() -> None:
    """The test above can fail: every folder names itself."""
    assert {"rat", "flux", "liger_gla", "flux_qwen3", "chosen_heads"} <= words_of_systems()
    assert named('places={"full_attention": Place("chosen_heads", ())}') == {"chosen_heads"}


def test_published_folders_are_recognised_by_their_keys() -> None:
    assert recognised({"model_type": "qwen3", "toggle_type": "streaming"}) == "flux_qwen3"
    assert recognised({"model_type": "qwen3"}) == "qwen3" and recognised({}) == ""
