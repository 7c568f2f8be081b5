"""Folders of the system that say "llama": `means` is true in them. Neither torch nor transformers."""

from still_export.discovery import Folder

FOLDERS = (Folder("toy_means", lambda config: config.get("model_type") == "llama" and config.get("means") is True),)
