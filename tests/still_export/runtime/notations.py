"""How published models write the call now(city="Bern", days=3), and which model uses which notation."""

from __future__ import annotations

from dataclasses import dataclass

GIVEN = '{"city": "Bern", "days": 3}'
NAMED = f'{{"name": "now", "arguments": {GIVEN}}}'
PARAMETERS = f'{{"name": "now", "parameters": {GIVEN}}}'
XML = "<function=now>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
PYTHON = 'now(city="Bern", days=3)'


@dataclass(frozen=True)
class Notation:
    """An answer that is this call; `begins`: the mark by which templates and tokenizers show the notation, if it has one."""

    written: str
    begins: str = ""


NOTATIONS = {
    "hermes": Notation(f"<tool_call>\n{NAMED}\n</tool_call>", "<tool_call>"),
    "qwen xml": Notation(f"<tool_call>\n{XML}\n</tool_call>", "<tool_call>"),
    "xml without a mark": Notation(XML, "<function="),
    "arg_key": Notation(
        "<tool_call>now\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        "<tool_call>",
    ),
    "hunyuan": Notation(
        f"<tool_calls>\n<tool_call>now\n```json\n{GIVEN}\n```\n</tool_call>\n</tool_calls>", "<tool_calls>"
    ),
    "json in tool_calls": Notation(f"<tool_calls>[\n{NAMED}\n]</tool_calls>", "<tool_calls>"),
    "lines in tool_calls": Notation(f"<tool_calls>\n{NAMED}\n</tool_calls>", "<tool_calls>"),
    "mistral list": Notation(f'[TOOL_CALLS] [{NAMED[:-1]}, "id": "abcdefghi"}}]', "[TOOL_CALLS]"),
    "mistral args": Notation(f"[TOOL_CALLS]now[ARGS]{GIVEN}", "[TOOL_CALLS]"),
    "mistral ids": Notation(f"[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{GIVEN}", "[TOOL_CALLS]"),
    "llama json": Notation(PARAMETERS, "<|python_tag|>"),
    "llama tag": Notation(f"<|python_tag|>{PARAMETERS}<|eom_id|>", "<|python_tag|>"),
    "llama function": Notation(f"<function=now>{GIVEN}</function>", "<function="),
    "pythonic": Notation(f"[{PYTHON}]"),
    "llama 4": Notation(f"<|python_start|>[{PYTHON}]<|python_end|>", "<|python_start|>"),
    "lfm2": Notation(f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>", "<|tool_call_start|>"),
    "olmo": Notation(f"<function_calls>\n{PYTHON}\n</function_calls>", "<function_calls>"),
    "nemotron": Notation(f"<TOOLCALL>[{NAMED}]</TOOLCALL>", "<TOOLCALL>"),
    "granite": Notation(f"<|tool_call|>[{NAMED}]", "<|tool_call|>"),
    "phi": Notation(f"<|tool_call|>[{NAMED}]<|/tool_call|>", "<|tool_call|>"),
    "kimi": Notation(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        f"{GIVEN}<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>",
    ),
    "deepseek": Notation(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{GIVEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "deepseek 3.1": Notation(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{GIVEN}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "dsml": Notation(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "<｜DSML｜function_calls>",
    ),
    "minimax m2": Notation(
        '<minimax:tool_call>\n<invoke name="now">\n<parameter name="city">Bern</parameter>\n<parameter name="days">3</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "<minimax:tool_call>",
    ),
    "seed": Notation(f"<seed:tool_call>\n{XML}\n</seed:tool_call>", "<seed:tool_call>"),
    "longcat": Notation(f"<longcat_tool_call>{NAMED}</longcat_tool_call>", "<longcat_tool_call>"),
    "command": Notation(
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "now", "parameters": {GIVEN}}}]<|END_ACTION|>',
        "<|START_ACTION|>",
    ),
    "internlm": Notation(f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>", "<|action_start|>"),
    "apertus": Notation(f'<|tools_prefix|>[{{"now": {GIVEN}}}]<|tools_suffix|>'),
    "functiongemma": Notation(
        "<start_function_call>call:now{city:<escape>Bern<escape>,days:3}<end_function_call>", "<start_function_call>"
    ),
    "gemma 4": Notation('<|tool_call>call:now{city:<|"|>Bern<|"|>,days:3}<tool_call|>', "<|tool_call>"),
    "functools": Notation(f" functools[{NAMED}]", "functools["),
}
MODELS = {
    **dict.fromkeys(
        (
            *("Qwen2.5-0.5B-Instruct", "Qwen2.5-7B-Instruct", "QwQ-32B", "Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"),
            *(
                "Qwen3-Next-80B-A3B-Instruct",
                "Hermes-2-Pro-Llama-3-8B",
                "Hermes-3-Llama-3.1-8B",
                "Falcon-H1-0.5B-Instruct",
            ),
            *("Falcon-H1-34B-Instruct", "granite-4.0-h-tiny", "granite-4.0-h-small", "granite-4.0-1b", "SmolLM3-3B"),
            *(
                "Ling-mini-2.0",
                "Ring-mini-linear-2.0",
                "Ling-flash-2.0",
                "EXAONE-4.0-1.2B",
                "ERNIE-4.5-21B-A3B-Thinking",
            ),
            *("MiMo-7B-RL"),
        ),
        "hermes",
    ),
    **dict.fromkeys(
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen3.5-0.8B", "Qwen3.5-9B", "Nemotron-3-Nano-30B-A3B"),
        "qwen xml",
    ),
    "Qwen3-Coder-480B-A35B-Instruct": "xml without a mark",
    **dict.fromkeys(("GLM-4.5", "GLM-4.5-Air", "GLM-4.6"), "arg_key"),
    "Hunyuan-1.8B-Instruct": "hunyuan",
    **dict.fromkeys(("AI21-Jamba-1.5-Mini", "AI21-Jamba-Reasoning-3B", "Hunyuan-A13B-Instruct"), "json in tool_calls"),
    **dict.fromkeys(("MiniMax-M1-80k", "MiniMax-Text-01"), "lines in tool_calls"),
    **dict.fromkeys(
        ("Mistral-7B-Instruct-v0.3", "Mistral-Nemo-Instruct-2407", "Mistral-Small-24B-Instruct-2501"), "mistral list"
    ),
    **dict.fromkeys(("Ministral-3-8B-Instruct-2512", "Devstral-Small-2507"), "mistral args"),
    **dict.fromkeys(("Mistral-Small-3.2-24B-Instruct-2506", "Magistral-Small-2506"), "mistral ids"),
    **dict.fromkeys(("Llama-3.1-8B-Instruct", "Llama-3.2-3B-Instruct", "Llama-3.3-70B-Instruct"), "llama json"),
    "Meta-Llama-3.1-70B-Instruct": "llama tag",
    "functionary-medium-v3.1": "llama function",
    **dict.fromkeys(("Llama-3.2-1B-Instruct", "ToolACE-2-Llama-3.1-8B", "LFM2.5-1.2B-Instruct"), "pythonic"),
    **dict.fromkeys(("Llama-4-Scout-17B-16E-Instruct", "Llama-4-Maverick-17B-128E-Instruct"), "llama 4"),
    **dict.fromkeys(("LFM2-350M", "LFM2-1.2B", "LFM2-1.2B-Tool", "LFM2-8B-A1B"), "lfm2"),
    **dict.fromkeys(("Olmo-3-7B-Instruct"), "olmo"),
    **dict.fromkeys(("NVIDIA-Nemotron-Nano-9B-v2", "NVIDIA-Nemotron-Nano-12B-v2"), "nemotron"),
    **dict.fromkeys(("granite-3.1-8b-instruct", "granite-3.3-2b-instruct"), "granite"),
    "Phi-4-mini-instruct": "phi",
    **dict.fromkeys(("Kimi-K2-Instruct", "Kimi-K2-Thinking", "Kimi-Linear-48B-A3B-Instruct"), "kimi"),
    **dict.fromkeys(("DeepSeek-R1", "DeepSeek-V3", "DeepSeek-R1-Distill-Qwen-1.5B"), "deepseek"),
    "DeepSeek-V3.1": "deepseek 3.1",
    "DeepSeek-V3.2": "dsml",
    **dict.fromkeys(("MiniMax-M2", "MiniMax-M2.1"), "minimax m2"),
    "Seed-OSS-36B-Instruct": "seed",
    "LongCat-Flash-Chat": "longcat",
    **dict.fromkeys(("c4ai-command-r7b-12-2024", "command-a-03-2025"), "command"),
    **dict.fromkeys(("internlm2_5-7b-chat", "internlm3-8b-instruct"), "internlm"),
    "Apertus-8B-Instruct-2509": "apertus",
    "functiongemma-270m-it": "functiongemma",
    "gemma-4-E2B-it": "gemma 4",
    "firefunction-v2": "functools",
}
