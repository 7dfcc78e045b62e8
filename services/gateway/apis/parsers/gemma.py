"""Calls of Gemma 4, whose arguments are objects without quotes around keys and with a token around strings."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.apis.parsers.reader import EndedError, NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tagged_arguments import TaggedArgumentsParser

QUOTE = '<|"|>'
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
"""What the published chat template, and so perhaps the model, writes in place of JSON's names."""
_DEPTH_MAX = 64
"""Levels of values within values. Bounds the depth of the generators that read them."""
_KEY = re.compile(r"[^\s:,{}\[\]<]*")
_SCALAR = re.compile(r"[^,{}\[\]<]*")


class Gemma4Parser(TaggedArgumentsParser):
    """`<|tool_call>call:NAME{city:<|"|>Rome<|"|>,days:3}<tool_call|>`: Gemma 4."""

    _BEGIN, _END = "<|tool_call>", "<tool_call|>"

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._in_string = False

    def _head(self) -> Steps[str]:
        yield from self._expect("call:")
        name = yield from self._name()
        yield from self._expect("{")
        return name

    def _next_key(self) -> Steps[str | None]:
        yield from self._space()
        if self._num_arguments and (yield from self._choose(",", "}")) == ",":
            yield from self._expect(",")
            yield from self._space()
        if (yield from self._next_is("}")):
            return None
        return (yield from self._key())

    def _value_of(self, key: str) -> Steps[str]:
        """See TaggedArgumentsParser. Returns the value as JSON."""
        self._in_string = False
        yield from self._space()
        yield from self._gemma_value(0)
        return "".join(self._open_value)

    def _encoded(self, key: str, text: str) -> str:
        return text

    def _argument_text(self) -> Steps[str]:
        return (yield from self._until(QUOTE))

    def _tail(self) -> Steps[None]:
        yield from self._expect("}")
        yield from self._space()
        yield from self._accept(self._END)

    def _cut(self, rest: str) -> None:
        """See ToolParser. What has been read of an argument is passed on as a truncated JSON value."""
        if self._open_key is not None:
            rest = json.dumps(rest, ensure_ascii=False)[:-1] if self._in_string else rest
            self._argue(self._before(self._open_key) + "".join(self._open_value) + rest)

    def _key(self) -> Steps[str]:
        if (yield from self._accept(QUOTE)):
            key = yield from self._until(QUOTE)
        else:
            key = yield from self._match(_KEY)
        yield from self._space()
        yield from self._expect(":")
        return key

    def _gemma_value(self, depth: int) -> Steps[None]:
        """Reads a value and adds its JSON to the open value."""
        if depth > _DEPTH_MAX:
            raise NotACallError
        if (yield from self._next_is(QUOTE)):
            yield from self._expect(QUOTE)
            self._in_string = True
            text = yield from self._argument_text()
            self._in_string = False
            self._open_value.append(json.dumps(text, ensure_ascii=False))
        elif (yield from self._next_is("{")):
            yield from self._members("{", "}", depth)
        elif (yield from self._next_is("[")):
            yield from self._members("[", "]", depth)
        else:
            yield from self._scalar()

    def _scalar(self) -> Steps[None]:
        text = (yield from self._match(_SCALAR)).strip()
        try:
            yield from self._need(1)
        except EndedError:
            self._open_value.append(text)
            raise
        if not text:
            yield from self._choose(QUOTE)
        self._open_value.append(_scalar_json(text))

    def _members(self, begin: str, end: str, depth: int) -> Steps[None]:
        """Reads an object or a list."""
        yield from self._expect(begin)
        self._open_value.append(begin)
        yield from self._space()
        has_members = False
        while not (yield from self._accept(end)):
            if has_members:
                yield from self._expect(",")
                yield from self._space()
                self._open_value.append(", ")
            if begin == "{":
                self._open_value.append(json.dumps((yield from self._key()), ensure_ascii=False) + ": ")
                yield from self._space()
            yield from self._gemma_value(depth + 1)
            yield from self._space()
            has_members = True
        self._open_value.append(end)


def _scalar_json(text: str) -> str:
    """Returns the JSON of a value without marks: a number, true, false or null; other text is taken as a string."""
    text = _PYTHON_NAMES.get(text, text)
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return json.dumps(text, ensure_ascii=False)
    return text
