"""Check of a package's chat template in onnxruntime-genai, whose own engine supports a part of Jinja."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from still_export.package.chat_format import read_format
from still_export.package.refusals import RunError

_CALL = {"type": "function", "function": {"name": "now", "arguments": '{"city": "Bern"}'}}
_TOOL = {
    "name": "now",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
_USER, _ANSWER = (
    {"role": "user", "content": " Why? \n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."},
)
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a question": ([_USER], []),
    "a system message": ([{"role": "system", "content": "Be brief."}, _USER], []),
    "an answer with its reasoning": ([_USER, _ANSWER, _USER], []),
    "tools": ([_USER], [{"type": "function", "function": _TOOL}]),
    "a tool's result": (
        [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "8:00"}],
        [{"type": "function", "function": _TOOL}],
    ),
}
"""Messages and tools, by the feature that they test."""


def warn_of_chats(folder: Path, manifest: dict[str, Any]) -> None:
    """Log one warning if genai, when installed, renders chats differently from the model's template."""
    chat = read_format(manifest.get("chat"))
    if chat is None:
        return
    try:
        import onnxruntime_genai as og
    except ImportError:
        return
    try:
        tokenizer = og.Tokenizer(og.Model(str(folder)))
    except Exception as error:  # built for another processor, or too little memory
        logging.getLogger(__name__).debug("genai does not load %s here: %s", folder, error)
        return
    wrong = []
    for name, (messages, tools) in CHATS.items():
        try:
            right = chat.render(messages, tools=tools or None)
        except RunError:
            continue  # the template refuses this chat
        try:
            with_tools = {"tools": json.dumps(tools)} if tools else {}
            found = tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True, **with_tools)
        except Exception:
            found = None
        if found != right:
            wrong.append(name)
    if wrong:
        logging.getLogger(__name__).warning(
            "onnxruntime-genai's own engine renders this model's chat template wrongly: %s. Programs that use genai should render it "
            "with Jinja, as `still-export run --chat` does, and give genai token ids.",
            ", ".join(wrong),
        )
