"""Published folders of Flux Attention, which have model_type "qwen3"."""

from still_export.discovery import Folder

FOLDERS = (Folder("flux_qwen3", lambda config: config.get("model_type") == "qwen3" and "toggle_type" in config),)
