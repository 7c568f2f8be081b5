"""The manifest as still_run reads it: the same accepted and refused as by the reader that packages carry, under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from still_export.package import checked
from still_export.package.refusals import CheckError
from tests.manifest_cases import BASE_FILE, cases, changed
from tests.plugins import builds

Reader = Callable[[bytes], str]

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


def python_says(content: bytes) -> str:
    """What the reader of packages says; "": it accepts it."""
    try:
        checked.parse_manifest(content, "manifest.json")
    except CheckError as error:
        return str(error)
    return ""


def test_the_cases(read: Reader) -> None:
    """In the same words; where more than one thing is wrong, readers may find another one first."""
    for case in cases():
        said = read(case.content)
        assert (case.says or "") in said and bool(said) == (case.says is not None), f"{case.name}: {said}"


COMPARED = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@COMPARED
@given(seed=st.integers(0, 1 << 32))
def test_changed_manifests_are_accepted_by_both_or_neither(read: Reader, seed: int) -> None:
    content = changed(seed)
    python, cpp = python_says(content), read(content)
    assert bool(python) == bool(cpp), (python, cpp)


@COMPARED
@given(at=st.integers(0, len(BASE_FILE.read_bytes()) - 1), new=st.binary(max_size=3), drop=st.integers(0, 3))
def test_damaged_files_are_accepted_by_both_or_neither(read: Reader, at: int, new: bytes, drop: int) -> None:
    content = BASE_FILE.read_bytes()
    content = content[:at] + new + content[at + drop :]
    python, cpp = python_says(content), read(content)
    assert bool(python) == bool(cpp), (python, cpp)
