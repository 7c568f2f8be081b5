"""A chat template's text around turns, for training rows made of pieces."""

from __future__ import annotations

from typing import Any

from still_export.package.chat_format import chat_format
from still_export.package.refusals import RunError

_USER, _ANSWER, _AGAIN = "\ue000u\ue001", "\ue000a\ue001", "\ue000v\ue001"


def turn_pieces(tokenizer: Any) -> dict[str, str] | None:
    """The template's text around messages, if it is the same for all turns; else None.

    Returns:
        `start` (before the first user message), `user_to_assistant`, `assistant_to_user`.
    """
    chat = chat_format(tokenizer)
    if chat is None:
        return None
    turns = [
        {"role": role, "content": text} for role, text in (("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN))
    ]
    try:
        start, rest = chat.render(turns).split(_USER)
        user_to_assistant, rest = rest.split(_ANSWER)
        assistant_to_user, end = rest.split(_AGAIN)
        single = chat.render(turns[:1])
    except (RunError, ValueError):  # the template refuses them, or drops or repeats one
        return None
    if end != user_to_assistant or single != start + _USER + user_to_assistant:
        return None
    return {"start": start, "user_to_assistant": user_to_assistant, "assistant_to_user": assistant_to_user}
