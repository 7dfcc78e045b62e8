"""Recognises a model's tool-call format and reasoning format from its chat template. Pure.

The names and the texts that show them are in `antiphon.shared.settings.output_formats`. Called by tokenizers, which
announce the result in their heartbeats.
"""

from collections.abc import Mapping

from antiphon.shared.settings.output_formats import REASONING_MARKS, TOOL_MARKS, UNREAD_TOOL_MARKS, Marks


def tool_format(template: str) -> str:
    """Returns the name of the tool-call format of a template; "" if none or several are recognised, or one not read."""
    return _shown(template, {**TOOL_MARKS, "": UNREAD_TOOL_MARKS}) if "tools" in template else ""


def reasoning_format(template: str) -> str:
    """Returns the name of the reasoning format of a template; "" if none or several are recognised."""
    return _shown(template, REASONING_MARKS)


def _shown(template: str, formats: Mapping[str, tuple[Marks, ...]]) -> str:
    # Jinja templates write quotes inside of strings with a backslash.
    plain = template.replace('\\"', '"')
    shown = [
        (name, set(marks)) for name, each in formats.items() for marks in each if all(mark in plain for mark in marks)
    ]
    specific = {name for name, marks in shown if not any(marks < other for _, other in shown)}
    return specific.pop() if len(specific) == 1 else ""
