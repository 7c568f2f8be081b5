"""A chat template's constant pieces, so that a package can talk without a template engine."""

from __future__ import annotations

from typing import Any

_SYSTEM, _USER, _ANSWER, _AGAIN = ("\ue000s\ue001", "\ue000u\ue001", "\ue000a\ue001", "\ue000v\ue001")


def chat_format(tokenizer: Any) -> dict[str, str] | None:
    """What a chat template writes around messages, or None if there is no template or it is more than text around messages.

    Args:
        tokenizer: Of transformers.

    Returns:
        `start` (before the first user message), `user_to_assistant`, `assistant_to_user`; `system_start` and `system_to_user`
        (in the place of `start`, around a system message) where the template takes one.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None

    def render(*messages: tuple[str, str]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    try:
        whole = render(("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN))
        start, rest = whole.split(_USER)
        user_to_assistant, rest = rest.split(_ANSWER)
        assistant_to_user, end = rest.split(_AGAIN)
        single = render(("user", _USER))
    except Exception:  # a template may raise anything, and may drop or repeat messages
        return None
    if end != user_to_assistant or single != start + _USER + user_to_assistant:
        return None
    found = {"start": start, "user_to_assistant": user_to_assistant, "assistant_to_user": assistant_to_user}
    try:
        with_system = render(("system", _SYSTEM), ("user", _USER))
        found["system_start"], rest = with_system.split(_SYSTEM)
        found["system_to_user"], end = rest.split(_USER)
    except Exception:
        end = ""
    if end != user_to_assistant:
        found.pop("system_start", None)
        found.pop("system_to_user", None)
    return found
