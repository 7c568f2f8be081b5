"""Errors a user can cause, shared by all packages; each says what is wrong, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class StillExportError(Exception):
    """Base of every error that the user, not a bug, causes. The command line turns it into exit code 2."""


class ConfigError(StillExportError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one."""


class ShapeError(StillExportError, ValueError):
    """A tensor has a shape or dtype that the op does not support."""


class CapacityError(StillExportError, ValueError):
    """A sequence is longer than its state has room for."""


class UnsupportedError(StillExportError):
    """No kernel, body or target covers the request; the message lists what is covered."""


def unknown(
    name: object, known: Iterable[str], where: str, error: type[StillExportError] = ConfigError
) -> StillExportError:
    """The error for a name that is none of `known`: it lists them, and the nearest one.

    Args:
        where: Subject of the sentence, with the name: "--cpu zen9".
        error: Its class.
    """
    import difflib

    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return error(f"{where} is unknown; known: {', '.join(names)}.{hint}")
