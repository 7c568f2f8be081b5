"""Errors that a user can cause, shared by all packages. Each message has the fault, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class StillExportError(Exception):
    """Base of all errors caused by the user rather than by a bug. The command line exits with code 2."""


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
    """The error for a name that is not in `known`. It lists the known names and the nearest one.

    Args:
        where: Subject of the sentence, including the name: "--cpu zen9".
    """
    import difflib

    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return error(f"{where} is unknown; known: {', '.join(names)}.{hint}")
