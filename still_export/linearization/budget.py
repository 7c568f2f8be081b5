"""Limits on the cost of a linearization, as users write them: "loss 2%, state 40%, found 85%, time 15"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from still_export.errors import ConfigError, unknown

ENTRY = re.compile(r"([a-z]+) (-?\d+(?:\.\d+)?)(%?)")
RANGES = {"loss": (0.0, 1000.0), "state": (1.0, 100.0), "found": (0.0, 100.0), "time": (1.0, 100_000.0)}
"""Smallest and largest value by key; all are percents except `time`, in minutes."""


@dataclass(frozen=True)
class Budget:
    """Limits on a linearized model compared with its base.

    Args:
        loss: Share by which bits per byte of held-out text may rise, at each context.
        state: Share of the base's key/value cache, at the model's own context, that the state may take; infinite = any, more than the
            cache, too, as windows are in small models.
        found: Share of the facts found by the base that must be found.
        time: Minutes on this machine, from the start to the model.
    """

    loss: float = 0.02
    state: float = math.inf
    found: float = 0.85
    time: float = 15.0

    @classmethod
    def read(cls, text: str) -> Budget:
        """Parse a text like "loss 2%, state 30%"; missing keys have defaults.

        Raises:
            ConfigError: A part is no key with its value, names a key twice or an unknown one, or is out of range.
        """
        values: dict[str, float] = {}
        for part in text.split(","):
            entry = ENTRY.fullmatch(part.strip())
            if entry is None:
                raise ConfigError(f"--budget {text!r}: {part.strip()!r} is no key with a number, as in {SHOWN!r}.")
            key, number, percent = entry[1], float(entry[2]), bool(entry[3])
            if key not in RANGES:
                raise unknown(key, RANGES, f"--budget {text!r}: {key!r}")
            if key in values:
                raise ConfigError(f"--budget {text!r} names {key} twice; give it once.")
            if percent != (key != "time"):
                unit = "minutes, without a sign" if key == "time" else "a percentage, with its sign"
                raise ConfigError(f"--budget {text!r}: {key} is {unit}, as in {SHOWN!r}.")
            least, most = RANGES[key]
            if not least <= number <= most:
                raise ConfigError(f"--budget {text!r}: {key} {entry[2]}{entry[3]} is outside {least:g} to {most:g}.")
            values[key] = number / 100 if percent else number
        return cls(**values)

    def __str__(self) -> str:
        """The budget in the format of `read`."""
        limited = [name for name in ("loss", "state", "found") if math.isfinite(getattr(self, name))]
        shares = (f"{name} {100 * getattr(self, name):.12g}%" for name in limited)
        return ", ".join([*shares, f"time {self.time:.12g}"])


SHOWN = "loss 2%, state 40%, found 85%, time 15"
