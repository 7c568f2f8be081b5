"""Folders that are written completely or not at all, by one process at a time, even if the process is killed.

A folder is written next to its final place as `.NAME.TOKEN.staged` and then renamed in one step. A killed process leaves it; the next
process that writes into the same parent removes it, unless its writer is alive and has a file in it locked.

Some folders cannot be renamed: mount points, those of a container's lower layers, those in a folder of somebody else. The working directory
should not be: its shell would be left in a deleted folder. Their content is exchanged instead: the new folder is renamed to
`.NAME.TOKEN.whole`, the old entries are deleted, the new ones moved. A process that is killed then leaves no readable package, and the next
one completes the exchange. Symbolic links are followed, not replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from still_export.errors import PackageError
from still_export.package.files import MANIFEST
from still_export.package.locks import LOCKS, hold, is_held, locked

ALIVE = ".alive"
"""File in a staged folder that its writer keeps locked."""

OUTDATED = ".outdated"
"""File in a folder of the kind "whole": names of the old entries that are to be deleted, before the new ones are moved."""

_STAGED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.(?P<kind>staged|old|whole)")
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2
_HERE = -100  # its AT_FDCWD
_NO_SUCH_RENAME = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""Errors of kernels and file systems without renameat2 flags."""
NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The system's words for a full disk, a used up quota, and a file longer than the file system or `ulimit -f` allows."""
SHORT_WRITE = re.compile(
    r"\d+ requested and \d+ written|problem writing element \d+ to file|unexpected pos \d+ vs \d+|file write failed"
)
"""What NumPy and PyTorch say of a write that ended early; they drop the system's error."""
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_IMMOVABLE = (errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES)
"""Errors of renaming mount points, folders of lower layers, and folders in a folder of somebody else."""


def lacks_room(error: BaseException) -> str:
    """Why nothing more can be written, with the file if it is known; "" if `error` has another reason.

    Libraries wrap the system's error in their own: safetensors, tokenizers, PyTorch's checkpoints.
    """
    said = str(error)
    reason = next((words for words in NO_ROOM if words in said), "")
    if not reason and getattr(error, "errno", None) is None and SHORT_WRITE.search(said):
        reason = NO_ROOM[0]
    place = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return f"{reason} ({place})" if reason and place else reason


def is_staged(name: str) -> bool:
    """Whether `name` is that of a staged folder, of a running or killed process."""
    return _STAGED.fullmatch(name) is not None


@contextlib.contextmanager
def staged_folder(
    target: Path,
    force: bool = False,
    replaceable: Callable[[Path], bool] = lambda folder: True,
    kind: str = "folder",
    keep: Callable[[], Iterable[str]] = tuple,
) -> Iterator[Path]:
    """A new folder that replaces `target` when the block ends, and is deleted if the block fails.

    Files and folders in it get the modes of the umask.

    Args:
        target: If it is a link, the folder that it names is replaced.
        replaceable: Whether `force` may delete an existing folder with content.
        kind: Kind of such folders, for messages.
        keep: Returns entries of the replaced folder that move into the new one, unless it has them.

    Raises:
        PackageError: `target` has content without `force`, or is not replaceable; another process is writing it; the disk is full, or the
            place may not be written.
    """
    target = real_place(target)
    with _explained(target):
        place = target if _stays(target) else target.parent
        if place.is_dir():
            with locked(place):
                sweep(place)  # first, because it restores what was moved aside
        _check_target(target, force, replaceable, kind)
        place.mkdir(parents=True, exist_ok=True)
        with _staging(target, place) as staging:
            yield staging
            set_modes(staging)
            with locked(place):
                _check_target(target, force, replaceable, kind)  # another process may have created it meanwhile
                (staging / ALIVE).unlink(missing_ok=True)
                _put(staging, target, keep())


@contextlib.contextmanager
def staged_files(folder: Path) -> Iterator[Path]:
    """A new folder whose files replace those of the same names in `folder` when the block ends; a link's target is replaced.

    Raises:
        PackageError: See `staged_folder`.
    """
    folder = real_place(folder)
    with _explained(folder), _staging(folder / "files", folder, alone=False) as staging:
        yield staging
        set_modes(staging)
        for path in sorted(staging.iterdir()):
            if path.name != ALIVE:
                _replace_file(path, real_place(folder / path.name))


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all. Raises PackageError as `staged_folder` does."""
    with staged_files(path.parent) as work:
        (work / path.name).write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """`write_whole` of JSON with an indent of 1."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def _replace_file(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in _IMMOVABLE:
            raise
        shutil.copyfile(source, target)  # a mounted file, or one that a link has on another disk


def real_place(path: Path) -> Path:
    """`path` with links followed, whether or not something is there."""
    return Path(os.path.realpath(path))


def sweep(parent: Path) -> None:
    """Remove folders that killed processes left in `parent`, and restore a folder that one had moved. The caller has the parent's lock."""
    if not LOCKS:
        return
    for path in sorted(parent.glob(".*.staged")) + sorted(parent.glob(".*.old")) + sorted(parent.glob(".*.whole")):
        match = _STAGED.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if match["kind"] == "whole":
            inside = match["name"] == parent.name and not (parent / match["name"]).exists()
            _exchange(path, parent if inside else parent / match["name"])
        elif match["kind"] == "old" and not (parent / match["name"]).exists():
            path.rename(parent / match["name"])
        elif match["kind"] == "old" or writer_lives(path) is False:
            shutil.rmtree(path, ignore_errors=True)


def set_modes(folder: Path) -> None:
    """Give everything in `folder` the umask's mode; some libraries create files that only their owner can read."""
    umasked = folder.stat().st_mode & 0o777  # of a folder made a moment ago
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        mode = path.stat().st_mode
        executable = path.is_dir() or mode & 0o100
        path.chmod(mode & ~0o777 | umasked & (0o777 if executable else 0o666))


@contextlib.contextmanager
def _staging(target: Path, place: Path, alone: bool = True) -> Iterator[Path]:
    """A new folder in `place` for `target`, locked while this process lives; deleted at the end if it is still there."""
    staging = place / f".{target.name}.{secrets.token_hex(6)}.staged"
    with locked(place):
        sweep(place)
        others = [p for p in place.glob(".*.staged") if _name(p) == target.name and writer_lives(p)]
        if alone and others:
            raise PackageError(
                f"another process is writing {target} (into {others[0].name}). Wait until it is done, or choose another folder."
            )
        staging.mkdir()
        lock = _hold(staging)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _name(path: Path) -> str:
    match = _STAGED.fullmatch(path.name)
    return match["name"] if match else ""


def demand_free(target: Path, force: bool) -> None:
    """Raise PackageError if `target` is a file or no possible name, or has content and `force` is not given."""
    with _explained(target):
        if target.exists() and not target.is_dir():
            raise PackageError(f"{target} is a file, not a folder. Choose another place for the package.")
        if not force and _entries(target):
            raise PackageError(f"{target} exists. Choose another folder, or replace it with --force.")


def _entries(folder: Path) -> list[str]:
    """What a folder contains; of none, nothing."""
    return [entry.name for entry in folder.iterdir() if not is_staged(entry.name)] if folder.exists() else []


def _check_target(target: Path, force: bool, replaceable: Callable[[Path], bool], kind: str) -> None:
    demand_free(target, force)
    if _entries(target) and not replaceable(target):
        # It may be the model itself, a home or the working directory.
        raise PackageError(f"{target} is no {kind}, so --force does not delete it. Choose another folder.")


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn operating system errors of a full or unwritable place into PackageError."""
    try:
        yield
    except Exception as error:
        place = target if os.path.isdir(target) else target.parent
        if reason := lacks_room(error):
            free = shutil.disk_usage(place).free >> 20 if place.is_dir() else 0
            raise PackageError(
                f"cannot write {target} ({free} MiB free): {reason}. Nothing was left there. Free space or choose another folder."
            ) from error
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            why = "a file or a link is in its place" if error.errno == errno.EEXIST else error.strerror
            raise PackageError(f"cannot write {target}: {why}. Choose a folder that you may write.") from error
        raise


def _hold(staging: Path) -> int | None:
    """Lock the file that shows that this process lives."""
    if not LOCKS:
        return None
    handle = os.open(staging / ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
    hold(handle)
    return handle


def writer_lives(staging: Path) -> bool | None:
    """Whether the writer of a staged folder lives; None: unknown."""
    try:
        handle = os.open(staging / ALIVE, os.O_RDWR)
    except FileNotFoundError:
        return False  # killed at its start or end
    except OSError:
        return None
    try:
        return is_held(handle)
    finally:
        os.close(handle)


def _stays(target: Path) -> bool:
    """Whether `target` is a folder that cannot be renamed, as far as that shows beforehand, or that this program was started in."""
    if not target.is_dir():
        return False
    if os.path.ismount(target) or not os.access(target.parent, os.W_OK | os.X_OK):
        return True
    with contextlib.suppress(FileNotFoundError):  # the working directory itself is deleted
        if Path.cwd().is_relative_to(target):
            return True
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # Bind mounts of the same file system show nowhere else. Spaces and such are written as octal numbers.
    places = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in mounts)
    return str(target) in places


def _put(staging: Path, target: Path, keep: Iterable[str]) -> None:
    """Move `staging` to `target`, in one step if possible; the old folder is then at `staging` or deleted, except entries in `keep`."""
    keep = tuple(keep)
    if staging.parent == target:
        _exchange_content(staging, target, keep)
        return
    try:
        if _rename(staging, target, _EXCHANGE if target.exists() else _NO_REPLACE):
            _move_missing(staging, target, keep)
            return
        if not target.exists():
            staging.rename(target)
            return
        # Two steps: a process killed between them leaves the old folder under a name that the next one restores.
        aside = staging.with_suffix(".old")
        target.rename(aside)
        try:
            staging.rename(target)
        except BaseException:
            aside.rename(target)
            raise
    except OSError as error:
        if error.errno not in _IMMOVABLE or not target.is_dir():
            raise
        _exchange_content(staging, target, keep)
        return
    _move_missing(aside, target, keep)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange_content(staging: Path, target: Path, keep: Collection[str]) -> None:
    """Replace the entries of `target`, except those in `keep` that `staging` lacks, by those of `staging`."""
    new = {entry.name for entry in staging.iterdir()}
    old = [name for name in _entries(target) if name in new or name not in keep]
    (staging / OUTDATED).write_text(json.dumps(old))
    whole = staging.with_suffix(".whole")
    staging.rename(whole)
    _exchange(whole, target)


def _exchange(whole: Path, target: Path) -> None:
    """Complete an exchange of content: delete the outdated entries of `target`, then move in those of `whole`."""
    target.mkdir(exist_ok=True)
    if (whole / OUTDATED).exists():
        for name in sorted(json.loads((whole / OUTDATED).read_text()), key=_readable):
            entry = target / name
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
        (whole / OUTDATED).unlink()
    for entry in sorted(whole.iterdir(), key=lambda entry: _readable(entry.name), reverse=True):
        shutil.move(entry, target / entry.name)
    whole.rmdir()


def _readable(name: str) -> bool:
    """Sorts what makes a folder a package or a model first, so that it is none while its files are exchanged."""
    return name not in (MANIFEST, "config.json")


def _move_missing(old: Path, new: Path, names: Iterable[str]) -> None:
    for name in names:
        if (old / name).exists() and not (new / name).exists():
            (old / name).rename(new / name)


def _rename(source: Path, target: Path, flags: int) -> bool:
    """renameat2; False if kernel, library or file system lack it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if call is None:
        return False
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_SUCH_RENAME:
        return False
    raise OSError(number, os.strerror(number), str(target))
