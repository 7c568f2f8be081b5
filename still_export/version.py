"""Of this package; what writes it into files is below the package's `__init__`."""

__version__ = "0.1.0"
