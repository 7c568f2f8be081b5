"""Faults planted in packages, to tell what verify finds: `python -m tests.faults` (docs/notebook/faults.md)."""
