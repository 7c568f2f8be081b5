"""The traced form of still::AngleSum, which other mixers call."""
