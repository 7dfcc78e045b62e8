"""Recognises a model's tool-call format and reasoning format from its chat template. Pure.

The template contains both, because it writes earlier calls and reasoning of a conversation in the same format. The
names are those of the gateway's settings `--tool-call-parser` and `--reasoning-parser`. Called by tokenizers, which
announce the result in their heartbeats.
"""

_TOOLS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("<｜tool▁call▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "glm45": ("<tool_call>", "<arg_key>"),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "hermes": ("<tool_call>",),
    "llama3_json": ('{"name": function name, "parameters": dictionary',),
    "pythonic": ("[func_name1(param",),
}
"""Texts that together identify a tool-call format. A format whose texts include another's is more specific."""
_REASONING: dict[str, tuple[str, ...]] = {
    "qwen3": ("</think>",),
    "mistral": ("[THINK]",),
    "granite": ("Here is my thought process:", "Here is my response:"),
}


def tool_format(template: str) -> str:
    """Returns the name of the tool-call format of a template; "" if none or several are recognised."""
    return _shown(template, _TOOLS) if "tools" in template else ""


def reasoning_format(template: str) -> str:
    """Returns the name of the reasoning format of a template; "" if none or several are recognised."""
    return _shown(template, _REASONING)


def _shown(template: str, formats: dict[str, tuple[str, ...]]) -> str:
    # Jinja templates write quotes inside of strings with a backslash.
    plain = template.replace('\\"', '"')
    shown = [name for name, marks in formats.items() if all(mark in plain for mark in marks)]
    specific = [
        name for name in shown if not any(set(formats[name]) < set(formats[other]) for other in shown if other != name)
    ]
    return specific[0] if len(specific) == 1 else ""
