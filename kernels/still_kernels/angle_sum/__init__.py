"""Angles that accumulate over tokens: definition."""
