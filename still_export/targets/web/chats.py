"""Check of a package's chat template in the page's Jinja engine, which supports a part of Jinja and prints some values differently."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

from still_export.package.chat_format import read_format
from still_export.package.refusals import RunError

PAGE = Path(__file__).resolve().parents[3] / "web"
"""The web folder of a checkout, where the page is built."""
_TIMEOUT_S = 20
_USER, _ANSWER = {"role": "user", "content": " Why? \n"}, {"role": "assistant", "content": "So."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "a question": [_USER],
    "a second question": [_USER, _ANSWER, _USER],
    "an answer with its reasoning": [_USER, {**_ANSWER, "reasoning_content": "hm"}, _USER],
}
"""Messages that the page gives the template, by the feature that they test. The page uses no system message, tools or arguments."""


def warn_of_chats(manifest: dict[str, Any]) -> None:
    """Log one warning if the page, when built and with Node.js installed, renders chats differently from the model's template."""
    chat, node = read_format(manifest.get("chat")), shutil.which("node")
    if chat is None or node is None or not (PAGE / "dist/index.js").is_file():
        return
    right: dict[str, str | None] = {}
    for name, messages in CHATS.items():
        try:
            right[name] = chat.render(messages)
        except RunError:  # the template refuses this chat
            right[name] = None
    found = dict(zip(CHATS, _rendered(node, manifest["chat"]), strict=True))
    wrong = [name for name, text in right.items() if text is not None and found[name] != text]
    if wrong:
        logging.getLogger(__name__).warning(
            "the page's engine renders this model's chat template wrongly: %s. `still-export serve` renders it with Jinja, "
            "and the page that it shows asks the server.",
            ", ".join(wrong),
        )


def _rendered(node: str, chat: dict[str, Any]) -> list[str | None]:
    """Text of each of CHATS by the page's engine; None: an error."""
    request = json.dumps({"format": chat, "chats": list(CHATS.values())})
    command = [node, "chats.mjs"]
    try:
        done = subprocess.run(
            command, cwd=PAGE, input=request, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        logging.getLogger(__name__).debug("the page's engine does not run here: %s", error)
        return [None] * len(CHATS)
    texts: list[str | None] = json.loads(done.stdout)
    return texts
