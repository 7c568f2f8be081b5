"""What a model's author states of it: licence and base models, of a GGUF file's keys or the header of a model card."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from still_export.folders.files import Files

CARD = "README.md"
FIELDS = ("name", "license", "license_name", "license_link", "base_model")
LONGEST, MOST = 300, 32
"""Characters of a text, and entries of a list, that are kept."""


def gguf_origin(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the keys of a GGUF file state, in the names of model cards."""

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    count = value("general.base_model.count")
    bases = [
        value(f"general.base_model.{n}.repo_url") or value(f"general.base_model.{n}.name")
        for n in range(min(count, MOST) if isinstance(count, int) else 0)
    ]
    return _known(
        {
            "name": value("general.name"),
            "license": value("general.license"),
            "license_name": value("general.license.name"),
            "license_link": value("general.license.link"),
            "base_model": bases,
        }
    )


def card_origin(folder: Files) -> dict[str, Any]:
    """What the header of the folder's model card states; {}: there is none."""
    if not folder.has(CARD):
        return {}
    from huggingface_hub import metadata_load

    try:
        return _known(metadata_load(folder.path / CARD) or {})
    except Exception as error:  # of YAML, and of text that is no UTF-8
        logging.getLogger(__name__).warning(
            "%s: its header is no YAML (%s), so the package states no licence and no base model",
            folder.path / CARD,
            str(error).partition("\n")[0],
        )
        return {}


def model_license(origin: Mapping[str, Any]) -> str:
    """ONNX's `model_license`: the licence's known name or address."""
    named = origin.get("license", "")
    return str(origin.get("license_link") or origin.get("license_name") or named) if named in ("", "other") else named


def _known(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields with printable texts; `base_model` is a list."""
    found = {}
    for name in FIELDS:
        values = stated.get(name)
        texts = [_text(value) for value in (values if isinstance(values, list) else [values])[:MOST]]
        if texts := [text for text in texts if text]:
            found[name] = texts if name == "base_model" else texts[0]
    return found


def _text(value: Any) -> str:
    return "".join(c for c in value if c.isprintable())[:LONGEST] if isinstance(value, str) else ""
