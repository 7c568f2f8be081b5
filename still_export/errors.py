"""Errors a user can cause while reading, running or exporting a model; those of the lower packages are re-exported."""

from __future__ import annotations

from still_graphs.errors import CapacityError, ConfigError, ShapeError, StillExportError, UnsupportedError, unknown

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ModelNotFoundError",
    "NotLinearizedError",
    "PackageError",
    "PaddingError",
    "ShapeError",
    "StillExportError",
    "TrainingError",
    "UnsupportedError",
    "UnsupportedModelError",
    "unknown",
]


class ModelNotFoundError(StillExportError):
    """The path or hub id names no model that can be read."""


class CheckpointError(StillExportError):
    """The model's files are damaged, incomplete or of a refused format, or have values that are not finite."""


class NotLinearizedError(StillExportError):
    """The model is a plain softmax Transformer, and untrained STILL attention was not requested."""


class UnsupportedModelError(UnsupportedError):
    """The family, or a variant of its attention, is not covered."""


class PaddingError(StillExportError, ValueError):
    """A batch has padding between tokens, or its mask or positions contradict the cache."""


class PackageError(StillExportError):
    """An exported package is missing, damaged, of another version, or cannot be written."""


class DataError(StillExportError):
    """A text is empty, binary, too short, or does not fit the model."""


class TrainingError(StillExportError):
    """Training cannot go on: values are not finite, memory is too small, or the folder belongs to another run."""
