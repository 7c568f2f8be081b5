"""The manifest as still_run reads it, under the sanitizers: what it needs must be there, and nothing ends the reader. Python's reader holds
all other fields (tests/still_export/package/test_manifest.py)."""

import copy
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from still_export.package import checked
from still_export.package.refusals import CheckError
from tests.plugins import builds
from tests.still_export.package.manifest_cases import BASE, BASE_FILE, changed

Reader = Callable[[bytes], str]
READ: list[tuple[str | int, ...]] = [
    ("target",),
    ("eos_token_ids",),
    ("model", "vocab_size"),
    ("model", "all_logits"),
    ("capacity", "capacity_tokens"),
    ("capacity", "bounded"),
    ("states",),
    *(("states", 0, name) for name in ("name", "shape", "dtype")),
    ("files",),
    ("files", "engine.plan", "sha256"),
    *(("states", 0, "growth", name) for name in ("rows", "per", "lag", "fixed")),
    *(("engines", 0, name) for name in ("file", "size_bytes", "tensorrt", "prefill_tokens", "archs")),
    ("trt", "version_compatible"),
]
"""Fields that still_run reads."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++"),
]


@pytest.fixture(scope="module")
def read() -> Iterator[Reader]:
    """What C++ says of a manifest; "": it accepts it."""
    program = builds.sanitized("read_manifest") / "fuzz/read_manifest"
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None

    def ask(content: bytes) -> str:
        process.stdin.write(b"%d\n%s" % (len(content), content))
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer.endswith(b"\n"), "the reader died"
        return answer.decode("utf-8", "replace")[:-1]

    yield ask
    process.stdin.close()
    assert process.wait() == 0


def python_accepts(content: bytes) -> bool:
    try:
        checked.parse_manifest(content, "manifest.json")
    except CheckError:
        return False
    return True


def test_what_it_reads_must_be_there(read: Reader) -> None:
    assert read(json.dumps(BASE).encode()) == ""
    for path in READ:
        for value in (None, [[]], -7 if path[-1] != "name" else 3):
            manifest = copy.deepcopy(BASE)
            table: Any = manifest
            for key in path[:-1]:
                table = table[key]
            if value is None:
                del table[path[-1]]
            else:
                table[path[-1]] = value
            said = read(json.dumps(manifest).encode())
            assert str(path[-1]) in said, (path, value, said)
    named = {**BASE, "files": {**BASE["files"], "../out": {"sha256": "0", "size_bytes": 1}}}
    assert "../out" in read(json.dumps(named).encode())
    assert "format version 3" in read(json.dumps({**BASE, "format_version": 3}).encode())


COMPARED = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@COMPARED
@given(seed=st.integers(0, 1 << 32))
def test_what_python_accepts_it_accepts(read: Reader, seed: int) -> None:
    content = changed(seed)
    said = read(content)
    assert not said or not python_accepts(content), said


@COMPARED
@given(at=st.integers(0, len(BASE_FILE.read_bytes()) - 1), new=st.binary(max_size=3), drop=st.integers(0, 3))
def test_damaged_files_are_answered(read: Reader, at: int, new: bytes, drop: int) -> None:
    content = BASE_FILE.read_bytes()
    content = content[:at] + new + content[at + drop :]
    said = read(content)
    assert not said or not python_accepts(content), said
