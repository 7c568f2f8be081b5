"""Errors that a package raises.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations


class RunError(ValueError):
    """The package cannot run this request; the message says why and what to do."""


class CheckError(RunError):
    """A file of the package is invalid; the message names the file and the field."""
