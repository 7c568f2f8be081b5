"""STILL models: families of transformers with their attention modules swapped."""

from still_export.models.build import attach_untrained, build_model
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.families.softmax_families import FAMILIES, Family
from still_export.models.step import forward_with_state

__all__ = ["FAMILIES", "LINEAR_FAMILIES", "Family", "attach_untrained", "build_model", "forward_with_state"]

list(LINEAR_FAMILIES)  # loads those of systems, so that transformers' Auto classes know them
