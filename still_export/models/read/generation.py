"""generation_config.json, as published folders have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

SINGLE = ("bos_token_id", "pad_token_id")


class PublishedGeneration(GenerationConfig):
    """Settings that transformers reads with a warning, such as a temperature without do_sample, are also saved with one, not refused."""

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """As of transformers, which is strict where it saves."""
        super().validate(False, user_set_attributes)


def read_generation(values: Mapping[str, Any]) -> GenerationConfig:
    """The settings of generation_config.json; of beginnings and paddings that are lists, the first.

    Raises:
        ValueError, TypeError, AttributeError, KeyError: transformers does not read them.
    """
    first = {name: (values[name] or [None])[0] for name in SINGLE if isinstance(values.get(name), list)}
    found: GenerationConfig = PublishedGeneration.from_dict({**values, **first})
    found.validate()
    return found
