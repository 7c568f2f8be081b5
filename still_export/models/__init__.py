"""STILL models: families of transformers with their attention modules swapped."""

from still_export.models.ambient import import_without_docstrings

import_without_docstrings()

from still_export.models.build import attach_untrained, build_model  # noqa: E402
from still_export.models.families.linear_families import LINEAR_FAMILIES  # noqa: E402
from still_export.models.families.softmax_families import FAMILIES, Family  # noqa: E402
from still_export.models.step import forward_with_state  # noqa: E402

__all__ = ["FAMILIES", "LINEAR_FAMILIES", "Family", "attach_untrained", "build_model", "forward_with_state"]

list(LINEAR_FAMILIES)  # loads those of systems, so that transformers' Auto classes know them
