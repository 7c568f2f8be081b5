"""The package's version; files that record it are written below the package's `__init__`."""

__version__ = "0.2.0"
