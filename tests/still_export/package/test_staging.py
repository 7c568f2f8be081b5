"""Folders that take their place in one step: killed at every point, by two processes at once, with every umask."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from still_export.errors import PackageError
from still_export.package import staging
from still_export.package.locks import locked
from still_export.package.staging import staged_files, staged_folder

KILLED = """
import os, signal, shutil, sys
from pathlib import Path
from still_export.package import staging

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def at(number, function):
    calls = []
    def counted(*arguments, **options):
        calls.append(0)
        return kill() if len(calls) == number else function(*arguments, **options)
    return counted

target, point, exchange = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "exchange"
if not exchange:
    staging._rename = lambda *_: False
if point == "modes":
    staging.set_modes = kill
if point == "before":
    staging._put = kill
if point == "between":
    Path.rename = at(2, Path.rename)
if point == "after":
    staging.shutil.rmtree = kill
with staging.staged_folder(target, force=True) as folder:
    (folder / "file").write_text("new")
    if point == "block":
        kill()
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def make(target: Path, text: str = "old") -> Path:
    with staged_folder(target) as folder:
        (folder / "file").write_text(text)
    return target


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("point", ["block", "modes", "before", "between", "after"])
@pytest.mark.parametrize("old", [True, False])
def test_a_kill_loses_nothing_and_leaves_nothing(tmp_path: Path, point: str, old: bool, exchange: bool) -> None:
    target = tmp_path / "p"
    if old:
        make(target)
    done = run(KILLED, str(target), point, "exchange" if exchange else "no")
    happens = old or point != "between"  # one rename suffices where nothing was there
    happens = happens and not (exchange and point == "between")
    assert done.returncode == (-signal.SIGKILL if happens else 0), done.stderr
    replaced = not happens or point == "after"
    make(tmp_path / "other")  # the next export into the same parent
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"other"} | ({"p"} if old or replaced else set())
    if "p" in left:
        assert (target / "file").read_text() == ("new" if replaced else "old")


def test_the_second_of_two_exports_into_one_folder_is_refused(tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from still_export.package.staging import staged_folder\n"
        "with staged_folder(Path(sys.argv[1])): print('in', flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "p"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout and first.stdin and first.stdout.readline() == "in\n"
        with (
            pytest.raises(PackageError, match=r"another process is writing .*/p \(into"),
            staged_folder(tmp_path / "p"),
        ):
            pass
        make(tmp_path / "other")
        assert len([p for p in tmp_path.iterdir() if staging.is_staged(p.name)]) == 1  # swept is what is dead
        first.stdin.write("\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "p"]


def test_a_folder_made_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="exists"), staged_folder(tmp_path / "p") as folder:
        (folder / "file").write_text("new")
        (tmp_path / "p").mkdir()
        (tmp_path / "p" / "mine").touch()
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["mine"]
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_folders_of_others_are_not_swept(tmp_path: Path) -> None:
    names = [".p.staged", ".p.0123456789ab.stage", ".p.xyz.staged", ".hidden", "p.0123456789ab.staged"]
    for name in names:
        (tmp_path / name).mkdir()
    make(tmp_path / "p")
    assert {p.name for p in tmp_path.iterdir()} == {*names, "p"}


@pytest.mark.parametrize(
    "umask, folder_mode, file_mode", [(0o022, 0o755, 0o644), (0o002, 0o775, 0o664), (0o077, 0o700, 0o600)]
)
def test_modes_are_the_umasks(tmp_path: Path, umask: int, folder_mode: int, file_mode: int) -> None:
    before = os.umask(umask)
    try:
        with staged_folder(tmp_path / "p") as folder:
            (folder / "sub").mkdir(mode=0o700)
            for name, mode in (("private", 0o600), ("sub/open", 0o666), ("program", 0o700)):
                (folder / name).touch()
                (folder / name).chmod(mode)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "p").rglob("*")}
    assert modes == {"sub": folder_mode, "private": file_mode, "open": file_mode, "program": folder_mode}
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == folder_mode


def test_failed_replacement_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "p")

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging, "_rename", fail)
    with pytest.raises(OSError, match="Input/output"), staged_folder(tmp_path / "p", force=True):
        pass
    assert (tmp_path / "p" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_staged_files_replace_their_namesakes_alone(tmp_path: Path) -> None:
    for name in ("kept", "replaced"):
        (tmp_path / name).write_text("old")
    with pytest.raises(RuntimeError), staged_files(tmp_path) as folder:
        (folder / "replaced").write_text("half")
        raise RuntimeError
    with staged_files(tmp_path) as folder:
        (folder / "replaced").write_text("new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"kept": "old", "replaced": "new"}


def immovable(number: int) -> Callable[..., bool]:
    def refuse(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EACCES], ids=errno.errorcode.get)
def test_the_content_of_a_folder_that_cannot_be_renamed_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    target = make(tmp_path / "p")
    for name in ("sub", "kept"):
        (target / name).mkdir()
        (target / name / "file").write_text("old")
    monkeypatch.setattr(staging, "_rename", immovable(number))
    before = target.stat().st_ino
    with staged_folder(target, force=True, keep=lambda: ["kept", "file"]) as folder:
        (folder / "file").write_text("new")
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("new")
    assert target.stat().st_ino == before
    found = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*") if p.is_file()}
    assert found == {"file": "new", "inner/file": "new", "kept/file": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("inside", [False, True])
def test_an_exchange_that_is_killed_is_completed_by_the_next_process(tmp_path: Path, step: int, inside: bool) -> None:
    target = tmp_path / "p"
    target.mkdir()
    for name in ("manifest.json", "a", "b"):
        (target / name).write_text("old")
    code = """
import errno, os, signal, sys
from pathlib import Path
from still_export.package import staging

target, left = Path(sys.argv[1]), [int(sys.argv[2])]
def counted(function):
    def call(*arguments, **options):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*arguments, **options)
    return call
def refuse(*_):
    raise OSError(errno.EXDEV, "")
staging._rename = refuse
staging._stays = lambda _: sys.argv[3] == "True"
put = staging._exchange
def exchange(*arguments):
    Path.unlink, staging.shutil.move = counted(Path.unlink), counted(staging.shutil.move)
    put(*arguments)
staging._exchange = exchange
with staging.staged_folder(target, force=True) as folder:
    for name in ("manifest.json", "b", "c"):
        (folder / name).write_text("new")
"""
    done = run(code, str(target), str(step), str(inside))
    assert done.returncode == (-signal.SIGKILL if step < 7 else 0), done.stderr
    states = {p.name: p.read_text() for p in target.iterdir() if p.is_file()}
    if "manifest.json" in states and len(set(states.values())) > 1:
        pytest.fail(f"a reader takes a mixture for a package: {states}")
    place = target if inside else tmp_path
    with locked(place):
        staging.sweep(place)
    assert {p.name: p.read_text() for p in target.iterdir()} == dict.fromkeys(("manifest.json", "b", "c"), "new")
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("there", ["package", "empty", "nothing"])
def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").mkdir()
    if there == "package":
        make(tmp_path / "disk/p")
    if there == "empty":
        (tmp_path / "disk/p").mkdir()
    (tmp_path / "home/p").symlink_to(Path("../disk/p"))
    with staged_folder(tmp_path / "home/p", force=there != "nothing") as folder:
        assert folder.parent == tmp_path / "disk"
        (folder / "file").write_text("new")
    assert (tmp_path / "home/p").is_symlink() and (tmp_path / "disk/p/file").read_text() == "new"
    assert [[p.name for p in (tmp_path / d).iterdir()] for d in ("disk", "home")] == [["p"], ["p"]]


def test_files_that_are_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("old")
    (tmp_path / "results").mkdir()
    (tmp_path / "results/report").symlink_to(tmp_path / "elsewhere")
    with staged_files(tmp_path / "results") as folder:
        (folder / "report").write_text("new")
    assert (tmp_path / "results/report").is_symlink() and (tmp_path / "elsewhere").read_text() == "new"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_in_one_that_may_not_be_written_is_replaced(tmp_path: Path) -> None:
    target = make(tmp_path / "volumes/p")
    (tmp_path / "volumes").chmod(0o555)
    with staged_folder(target, force=True) as folder:
        assert folder.parent == target
        (folder / "file").write_text("new")
    (tmp_path / "volumes").chmod(0o755)
    assert {p.name: p.read_text() for p in target.iterdir()} == {"file": "new"}


def test_an_empty_folder_is_filled_without_force(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    make(tmp_path / "p")
    with pytest.raises(PackageError, match="--force"), staged_folder(tmp_path / "p"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(PackageError, match="file"), staged_folder(tmp_path / "file", force=True):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_mount_point_is_filled_and_replaced(tmp_path: Path) -> None:
    target, volume = tmp_path / "a place", tmp_path / "volume"
    target.mkdir()
    volume.mkdir()
    if subprocess.run(["mount", "--bind", volume, target], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        make(target, "first")
        with staged_folder(target, force=True) as folder:
            assert folder.parent == target
            (folder / "other").write_text("second")
        assert {p.name: p.read_text() for p in volume.iterdir()} == {"other": "second"}
    finally:
        subprocess.run(["umount", target], check=True)
    assert {p.name for p in tmp_path.iterdir()} == {"a place", "volume"}


@pytest.mark.parametrize("inside", [".", "sub"])
def test_the_working_directory_keeps_its_place(tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that is in it, or below, is not left in a deleted folder."""
    made = make(tmp_path / "here")
    (made / "sub").mkdir()
    monkeypatch.chdir(made / inside)
    before = made.stat().st_ino
    with staged_folder(Path(os.path.relpath(made)), force=True) as folder:
        (folder / "file").write_text("new")
    assert made.stat().st_ino == before and [p.name for p in made.iterdir()] == ["file"]
    assert (made / "file").read_text() == "new"


@pytest.mark.parametrize(
    "name, said", [("n" * 256, "too long"), ("n" * 240, "too long"), ("file/inside", "in its place")]
)
def test_an_impossible_place_is_refused_with_its_reason(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PackageError, match=said):
        make(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
