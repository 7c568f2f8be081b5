"""Mamba (version 1) as linear attention: each channel is a head with one value and a decay per key channel."""
