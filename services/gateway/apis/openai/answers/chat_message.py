"""Encodes the events of a parser: as the message of a whole answer, or as the deltas of a stream. Pure.

A key whose name contains `content` exists only if there is text for it, because the simplest clients search a chunk for
the word `content` and expect text after it. Only whole messages always have the key `content`. Reasoning is sent under
two names, because a client knows only one of them. Other APIs use `answer_events`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, Reasoning

INVALID_JSON = "INVALID_JSON"
"""Name of the only member of a call's arguments if the model did not write a JSON object: its value is the raw text."""


def answer_events(choice: Choice, text: str) -> list[Event]:
    """Returns the new events of a choice, and removes them from the choice.

    `text`: the new text if the choice has no parser.
    """
    if choice.parser is None:
        return [Content(text)] if text else []
    events, choice.events = choice.events, []
    return events


def arguments_object(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object, for APIs that need an object instead of JSON text.

    If the text is no JSON object, because the model made a mistake or its output was cut off, the object has this text
    as its member INVALID_JSON.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


class MessageEncoder:
    """Encodes the messages of one answer."""

    def __init__(self, answer: AnswerFormat, request_id: str) -> None:
        self._answer = answer
        self._request_id = request_id

    def message(self, choice: int, events: Iterable[Event], echo: str = "") -> dict[str, Any]:
        """Returns the whole message of a choice. `echo`: text before the content of the answer.

        `content` is null if the message has calls and no text.
        """
        content, reasoning = echo, ""
        calls: list[tuple[str, list[str]]] = []
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(_, name):
                    calls.append((name, []))
                case CallArguments(_, text):
                    calls[-1][1].append(text)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message |= self._calls(choice, [(name, "".join(arguments)) for name, arguments in calls])
        return message

    def delta(self, choice: int, event: Event) -> dict[str, Any]:
        """Returns the delta of a stream's chunk for an event."""
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallStart(call, name):
                function = {"name": name, "arguments": ""}
                head = {"index": call, "id": self._id(choice, call, name), "type": "function", "function": function}
                return {"function_call": function} if self._answer.choice.legacy else {"tool_calls": [head]}
            case CallArguments(call, text):
                function = {"arguments": text}
                if self._answer.choice.legacy:
                    return {"function_call": function}
                return {"tool_calls": [{"index": call, "function": function}]}

    def _calls(self, choice: int, calls: list[tuple[str, str]]) -> dict[str, Any]:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        if self._answer.choice.legacy:
            return {"function_call": functions[0]}
        return {
            "tool_calls": [
                {"id": self._id(choice, call, function["name"]), "type": "function", "function": function}
                for call, function in enumerate(functions)
            ]
        }

    def _id(self, choice: int, call: int, name: str) -> str:
        return self._answer.call_id(self._request_id, choice, call, name)
