"""Every target, in one list."""

from __future__ import annotations

from typing import Any

from still_export.errors import unknown
from still_export.package.files import MANIFEST
from still_export.targets.genai.target import GENAI
from still_export.targets.ort.target import ORT_CPU, ORT_CUDA
from still_export.targets.target import Target
from still_export.targets.trt.target import TRT
from still_export.targets.trt8.target import TRT8
from still_export.targets.trt_rtx.target import TRT_RTX
from still_export.targets.web.target import WEB

TARGETS: tuple[Target, ...] = (ORT_CUDA, ORT_CPU, GENAI, WEB, TRT8, TRT, TRT_RTX)
"""Records may share a name for `--to`; the first whose `takes` accepts the options is used."""


def names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(target.to for target in TARGETS))


def targets_of(name: str, where: str = "--to") -> list[Target]:
    """The record `name`, or those that `--to NAME` may mean.

    Raises:
        ConfigError: There is none.
    """
    found = [t for t in TARGETS if t.to == name] or [t for t in TARGETS if t.name == name]
    if not found:
        raise unknown(name, names(), f"{where} {name}")
    return found


def target_of(name: str, options: Any = None) -> Target:
    """The target `name` that `options` select; None: its plainest record.

    Raises:
        ConfigError: There is none.
    """
    found = targets_of(name)
    return found[-1] if options is None else next(t for t in found if len(found) == 1 or t.takes(options))


def packaged_target(manifest: dict[str, Any]) -> Target:
    """The plainest record of a package's target.

    Raises:
        ConfigError: This version does not know it.
    """
    return targets_of(manifest["target"], f"{MANIFEST}: target")[-1]
