"""Files of recorded calls that claim more than they have."""

import io
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from still_export.errors import PackageError
from still_export.proof import array_file
from still_export.proof.array_file import ArrayFile, written_arrays

PACKAGE: Any = SimpleNamespace(path="package", manifest={"portable": "of these weights", "files": {}})


def write(path: Path, **content: Any) -> str:
    """A file with one array; its name."""
    with written_arrays(path) as out:
        key = out.keep(np.arange(6, dtype=np.float32).reshape(2, 3))
        out.finish("head", 1, PACKAGE, {"key": key, **content})
    return key


def opened(path: Path) -> ArrayFile:
    return ArrayFile(path, "head", 1, PACKAGE, "recorded calls", "--record")


def exchange(path: Path, name: str, content: bytes, compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path) as file:
        members = {member: file.read(member) for member in file.namelist()}
    members[f"{name}.npy"] = content
    with zipfile.ZipFile(path, "w", compression) as file:
        for member, value in members.items():
            file.writestr(member, value)


def claiming(shape: tuple[int, ...], content: bytes = b"\0" * 24, dtype: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + content


def test_what_was_written_is_read(tmp_path: Path) -> None:
    key = write(tmp_path / "calls.npz")
    file = opened(tmp_path / "calls.npz")
    assert file.head["key"] == key
    np.testing.assert_array_equal(file.array(key), np.arange(6).reshape(2, 3))
    with pytest.raises(PackageError, match="holds recorded calls of format 1, this version reads format 2"):
        ArrayFile(tmp_path / "calls.npz", "head", 2, PACKAGE, "recorded calls", "--record")


@pytest.mark.parametrize("shape", [(10**13,), (10**7, 10**6), (10**30,), (7,), (5,)])
def test_an_array_that_claims_numbers_that_are_not_there(shape: tuple[int, ...], tmp_path: Path) -> None:
    key = write(tmp_path / "calls.npz")
    exchange(tmp_path / "calls.npz", key, claiming(shape))
    with pytest.raises(
        PackageError, match=r"calls.npz was changed.*claims [\d,]+ numbers, [\d,]+ bytes, and has 24 bytes"
    ):
        opened(tmp_path / "calls.npz").array(key)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", claiming((6,), dtype="|O"), b"no array at all, of any kind"])
def test_an_array_that_is_none(content: bytes, tmp_path: Path) -> None:
    key = write(tmp_path / "calls.npz")
    exchange(tmp_path / "calls.npz", key, content)
    with pytest.raises(PackageError, match="was changed after it was recorded"):
        opened(tmp_path / "calls.npz").array(key)


def test_a_head_of_gigabytes_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """39 MB of a file were 8.6 GB of memory."""
    write(tmp_path / "calls.npz", much=[0] * 100_000)
    assert opened(tmp_path / "calls.npz").head["much"]
    monkeypatch.setattr(array_file, "MOST_HEAD_BYTES", 100_000)
    with pytest.raises(
        PackageError, match=r"holds no recorded calls \(head has 3\d\d,\d\d\d bytes; at most 100,000 are read\)"
    ):
        opened(tmp_path / "calls.npz")


@pytest.mark.parametrize("head", [b"[]", b"1", b"{", b"[" * 100_000])
def test_a_head_that_is_none(head: bytes, tmp_path: Path) -> None:
    write(tmp_path / "calls.npz")
    exchange(tmp_path / "calls.npz", "head", claiming((len(head),), head, "|u1"))
    with pytest.raises(PackageError, match="holds no recorded calls"):
        opened(tmp_path / "calls.npz")


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "calls.npz").write_text(json.dumps({}))
    with pytest.raises(PackageError, match="holds no recorded calls"):
        opened(tmp_path / "calls.npz")
