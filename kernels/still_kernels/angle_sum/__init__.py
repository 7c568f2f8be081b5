"""Angles that add up over tokens: definition."""
