"""Mamba's selective state space, the first, as linear attention: each channel is a head of one value, whose keys decay apart."""
