"""Errors a user can cause, shared by all packages; each says what is wrong, why, and what to do."""


class StillExportError(Exception):
    """Base of every error that the user, not a bug, causes. The command line turns it into exit code 2."""


class ConfigError(StillExportError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one."""


class ShapeError(StillExportError, ValueError):
    """A tensor has a shape or dtype that the op does not take."""


class CapacityError(StillExportError, ValueError):
    """A sequence is longer than its state has room for."""


class UnsupportedError(StillExportError):
    """No kernel, body or target covers the request; the message lists what is covered."""
