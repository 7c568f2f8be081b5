"""Texts and prompts for training, proof and evaluation."""
