"""Chat templates: the texts that transformers writes, cut where a message goes on; and what a template may not do."""

import time
from typing import Any

import pytest

from still_export.package.chat_format import MARK, ChatFormat, chat_format
from still_export.package.refusals import RunError
from still_export.package.template import TemplateRefusal
from still_export.texts.turns import turn_pieces

END = "{% if add_generation_prompt %}<|a|>{% endif %}"
TEMPLATES = {
    "plain": "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content }}<|e|>\n{% endfor %}" + END,
    "trims": "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content.strip() }}<|e|>\n{% endfor %}" + END,
    "drops thoughts": "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content.split('</think>')[-1].lstrip() }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|><think>\n{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %})"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + END,
    "blocks": "{{ bos_token }}{% for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}"
    + END,
    "reasoning": "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m | tojson }}{% endfor %}"
    + END,
    "namespace": "{% set ns = namespace(last=0, d=dict(a=1)) %}{% for m in messages[::-1] %}{% set ns.last = loop.index0 %}{% endfor %}"
    "{{ ns.last }}{{ ns.d.a }}{% for m in messages %}{{ m.content }}{% endfor %}" + END,
}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " Hi <b>\n"}],
    "systems": [{"role": role, "content": f"{role} é"} for role in ("system", "system", "user")],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm</think>\n\nYes "},
        {"role": "user", "content": ""},
    ],
    "reasoned": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes", "reasoning": "hm"},
        {"role": "user", "content": "Why"},
    ],
    "called": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "weather", "parameters": {"type": "object"}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template([messages], chat_template=template, **TOKENS, **options)
    return str(texts[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("talk", TALKS)
def test_texts_are_those_of_transformers(name: str, talk: str) -> None:
    chat, messages = ChatFormat({"default": TEMPLATES[name]}, TOKENS), TALKS[talk]
    assert chat.render(messages) == theirs(TEMPLATES[name], messages, add_generation_prompt=True)
    assert chat.render(messages, tools=TOOLS, arguments={"enable_thinking": False}, reply=False) == theirs(
        TEMPLATES[name], messages, tools=TOOLS, enable_thinking=False
    )
    if name != "reasoning":  # it writes the mark as JSON
        for begun in ("Sure, ", "Sure"):
            open_ended = [*messages, {"role": "assistant", "content": begun}]
            wanted = theirs(TEMPLATES[name], open_ended, continue_final_message=True)
            assert chat.render_open(open_ended) == wanted and wanted.rstrip().endswith("Sure,"[: len(begun.strip())])


def test_a_chat_is_cut_where_it_was_read_before() -> None:
    chat = ChatFormat({"default": TEMPLATES["plain"]}, {})
    turn = [{"role": "user", "content": "Why?"}]
    assert chat.opening("be kind") == "<|s|>be kind<|e|>\n<|u|>"
    assert chat.render_behind(turn, "user") == "Why?<|e|>\n<|a|>"
    assert chat.render_behind(turn, "answer") == "<|e|>\n<|u|>Why?<|e|>\n<|a|>"
    assert chat.render_behind([*turn, {"role": "assistant", "content": "As"}], "answer", goes_on=True).endswith(
        "<|a|>As"
    )
    with pytest.raises(RunError, match="go on with it"):
        chat.render_behind([{"role": "assistant", "content": "x"}], "user")
    with pytest.raises(RunError, match="leaves out"):
        ChatFormat({"default": "Hello"}, {}).opening()


def test_content_has_the_form_that_the_template_takes() -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    text = TEMPLATES["plain"]
    either = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "[{% for c in m.content %}{{ c.text }}{% endfor %}]{% endif %}{% endfor %}"
    )
    alone = "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    for template, said, wanted in (
        (text, parts, "<|u|>One\ntwo<|e|>\n<|a|>"),
        (either, parts, "[Onetwo]"),
        (either, "One", "One"),
        (alone, "One", "One"),
        (alone, parts, "Onetwo"),
    ):
        assert ChatFormat({"default": template}, {}).render([{"role": "user", "content": said}]) == wanted
    chat = ChatFormat({"default": text}, {})
    assert chat.render([{"role": "assistant", "content": None}], reply=False) == "<|a|><|e|>\n"
    for said, wanted in ((None, "has no content"), (5, "is a int"), (["x"], "part 1 of message 1 is of type 'str'")):
        with pytest.raises(RunError, match=wanted):
            chat.render([{"role": "user", "content": said}])


def test_arguments_of_calls_may_be_json() -> None:
    chat, talk = ChatFormat({"default": TEMPLATES["tools"]}, {}), [dict(m) for m in TALKS["called"]]
    talk[1]["tool_calls"] = [{"function": {"name": "now", "arguments": '{"city": "Bern"}'}}]
    assert "now(city=Bern;)" in chat.render(talk)
    with pytest.raises(RunError, match="tools is no argument"):
        chat.render(talk, arguments={"tools": []})


def test_a_model_with_several_templates() -> None:
    class Tokenizer:
        chat_template = {"default": "plain", "tool_use": "tools"}  # noqa: RUF012
        special_tokens_map = TOKENS

    chat = chat_format(Tokenizer())
    assert chat is not None and chat.tokens == TOKENS
    assert chat.render(TALKS["one"]) == "plain" and chat.render(TALKS["one"], tools=TOOLS) == "tools"
    with pytest.raises(RunError, match="for rag alone"):
        ChatFormat({"rag": "x"}, {}).render(TALKS["one"])
    Tokenizer.chat_template = None  # type: ignore[assignment]
    assert chat_format(Tokenizer()) is None


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 9 ** (9 ** 9) }}", "more than a second"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than a second"),
        ("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "MiB"),
        ("{{ 'x' * 10 ** 10 }}", "MiB"),
        ("{{ messages | tojson(indent=10 ** 10) }}", "MiB|runs"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "nested"),
        ("{{ ''.__class__.__mro__ }}", "fails"),
        ("{{ messages.append(1) }}", "fails"),
        ("{{ namespace(_a=1) }}", "underscore"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "underscore"),
        ("{% include '/etc/hostname' %}", "fails"),
        ("{% if %}", "not one that Jinja can read: line 1"),
        ("{{ raise_exception('no.') }}", r"refuses these messages: no\.$"),
    ],
)
def test_a_template_is_bounded(template: str, said: str) -> None:
    begun = time.process_time()
    with pytest.raises(TemplateRefusal, match=said):
        ChatFormat({"default": template}, {}).render(TALKS["one"])
    assert time.process_time() - begun < 0.5  # of this process
    assert ChatFormat({"default": "{{ messages[0].content }}"}, {}).render(TALKS["one"]) == " Hi <b>\n"


def test_marks_do_not_leak() -> None:
    for name, template in TEMPLATES.items():
        assert MARK not in ChatFormat({"default": template}, TOKENS).render(TALKS["turns"]), name


def test_pieces_of_turns() -> None:
    class Tokenizer:
        chat_template = "{% if messages[0].role != 'system' %}<s>be kind</>\n{% endif %}" + TEMPLATES["plain"]
        special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    assert turn_pieces(Tokenizer()) == {
        "start": "<s>be kind</>\n<|u|>",
        "user_to_assistant": "<|e|>\n<|a|>",
        "assistant_to_user": "<|e|>\n<|u|>",
    }
    for changed in (
        "{{ messages | map(attribute='content') | join | upper }}",
        TEMPLATES["drops thoughts"],
        "{{ 1 / 0 }}",
    ):
        Tokenizer.chat_template = changed
        assert turn_pieces(Tokenizer()) is None


@pytest.mark.parametrize(
    ("answer", "start"),
    [("<|a|><think>\n", "<think>\n"), ("<|a|><think>\n\n</think>\n\n", ""), ("{# </think> #}<|a|>", "")],
)
def test_what_of_an_answer_a_prompt_has_already(answer: str, start: str) -> None:
    text = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}{% if add_generation_prompt %}"
        + answer
        + "{% endif %}"
    )
    assert ChatFormat({"default": text}, {}).start() == start
