"""Linear attention whose state is multiplied by a diagonal plus a rank-one matrix: definition."""
