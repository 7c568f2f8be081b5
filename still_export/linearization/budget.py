"""The budget of a linearization, in the user's words: "loss 2%, state 40%, found 85%, everyday 98%, time 15"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from still_export.errors import ConfigError, unknown

ENTRY = re.compile(r"([a-z]+) (-?\d+(?:\.\d+)?)(%?)")
RANGES = {
    "loss": (0.0, 1000.0),
    "state": (1.0, 100.0),
    "found": (0.0, 100.0),
    "everyday": (0.0, 100.0),
    "time": (1.0, 100_000.0),
}
"""Least and greatest value by key; all but the minutes of `time` are percentages."""


MET, BROKEN, UNMEASURED = "met", "NOT met", "NOT MEASURED"
"""Verdicts on a promise."""


@dataclass(frozen=True)
class Budget:
    """Limits for a linearized model relative to its base.

    Args:
        loss: Largest relative increase of bits per byte of held-out text, at any context.
        state: Largest state as a share of the base's key/value cache at the model's context. Infinite: any size, even above the cache, as
            for windows in small models.
        found: Smallest share of the facts found by the base that must also be found.
        everyday: Smallest share of the base's right answers to everyday questions that the model must also give.
        time: Minutes on this machine from the start to the finished model.
    """

    loss: float = 0.02
    state: float = math.inf
    found: float = 0.85
    everyday: float = 0.98
    time: float = 15.0

    @classmethod
    def read(cls, text: str) -> Budget:
        """Parse a budget like "loss 2%, state 30%"; missing keys have their defaults.

        Raises:
            ConfigError: A part is not a key with a value, a key is unknown or repeated, or a value is out of range.
        """
        values: dict[str, float] = {}
        for part in text.split(","):
            entry = ENTRY.fullmatch(part.strip())
            if entry is None:
                raise ConfigError(f"--budget {text!r}: {part.strip()!r} is not a key with a number, as in {SHOWN!r}.")
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
        limited = [name for name in ("loss", "state", "found", "everyday") if math.isfinite(getattr(self, name))]
        shares = (f"{name} {100 * getattr(self, name):.12g}%" for name in limited)
        return ", ".join([*shares, f"time {self.time:.12g}"])


SHOWN = "loss 2%, state 40%, found 85%, everyday 98%, time 15"
