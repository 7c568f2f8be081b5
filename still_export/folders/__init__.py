"""Folders of models and adapters: their small files and the headers of their weights. No torch, no transformers."""
