"""Linear attention with a correction of rank one: the traced op."""
