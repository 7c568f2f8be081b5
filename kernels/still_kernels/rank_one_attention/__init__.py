"""Linear attention whose state each token multiplies with a diagonal matrix and one of rank one: definition and chunks."""
