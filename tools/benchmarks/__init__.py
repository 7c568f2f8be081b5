"""Benchmarks, a file each: `python -m tools.benchmarks.NAME --help`, from the root of a clone."""

from still_export.package import telemetry as telemetry
