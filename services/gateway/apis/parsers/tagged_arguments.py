"""Formats in which each argument of a call has its own tags. The parsers convert the arguments to a JSON object."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.apis.parsers.reader import NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser
from antiphon.shared.request.tools import tool_parameters

_BEGIN, _END = "<tool_call>", "</tool_call>"


class TaggedArgumentsParser(ToolParser):
    """A call between `<tool_call>` and `</tool_call>` whose arguments are pairs of a key and a text.

    The tool's JSON Schema decides how a text is read: as a string if the schema says so; else as JSON, or as a string
    if the text is not JSON. An argument is passed on when its text is complete.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._function = ""
        self._open_key: str | None = None
        """The key of the argument whose text is being read."""
        self._open_value: list[str] = []
        """The pieces of a JSON value read so far."""
        self._num_arguments = 0

    @abstractmethod
    def _head(self) -> Steps[str]:
        """Reads the function's name, up to its first argument or the end of the call, and returns it."""
        ...

    @abstractmethod
    def _next_key(self) -> Steps[str | None]:
        """Reads an argument up to its text and returns its key; None if there is no further argument."""
        ...

    @abstractmethod
    def _argument_text(self) -> Steps[str]:
        """Reads and returns the text of an argument, and reads its end."""
        ...

    @abstractmethod
    def _tail(self) -> Steps[None]:
        """Reads the end of the call. Raises NotACallError if it is missing."""
        ...

    def _call(self) -> Steps[None]:
        yield from self._content(_BEGIN)
        yield from self._space()
        self._function = yield from self._head()
        self._begin(self._function)
        self._num_arguments = 0
        try:
            while (key := (yield from self._next_key())) is not None:
                self._open_key = key
                text = yield from self._value_of(key)
                self._argue(self._before(key) + self._encoded(key, text))
                self._num_arguments += 1
                self._open_key = None
            yield from self._tail()
        except NotACallError:
            # The call has begun, so its arguments must become a complete object; the text after them is content.
            self._close()
            raise
        self._close()

    def _value_of(self, key: str) -> Steps[str]:
        """Reads the text of an argument.

        A strict function's argument is read as JSON, because it may contain the end tag.
        """
        if self._is_string(key) or not self._is_strict():
            return (yield from self._argument_text())
        yield from self._space()
        self._open_value.clear()
        yield from self._value(self._open_value.append)
        yield from self._argument_text()
        value = "".join(self._open_value)
        self._open_value.clear()
        return value

    def _cut(self, rest: str) -> None:
        """See ToolParser. The beginning of an argument's text is passed on as a truncated JSON value."""
        if self._open_key is not None:
            rest = "".join(self._open_value) + rest
            text = json.dumps(rest, ensure_ascii=False)[:-1] if self._is_string(self._open_key) else rest
            self._argue(self._before(self._open_key) + text)

    def _close(self) -> None:
        self._argue("}" if self._num_arguments else "{}")
        self._end()

    def _before(self, key: str) -> str:
        return ("{" if not self._num_arguments else ", ") + json.dumps(key, ensure_ascii=False) + ": "

    def _encoded(self, key: str, text: str) -> str:
        """Returns the text of an argument as JSON."""
        if not self._is_string(key):
            try:
                msgspec.json.decode(text)
            except (msgspec.MsgspecError, RecursionError):
                pass
            else:
                return text.strip()
        return json.dumps(text, ensure_ascii=False)

    def _is_strict(self) -> bool:
        tool = self._tools.get(self._function)
        return tool is not None and bool(tool["function"].get("strict"))

    def _is_string(self, key: str) -> bool:
        tool = self._tools.get(self._function)
        properties: Any = tool_parameters(tool).get("properties") if tool is not None else None
        schema: Any = properties.get(key) if isinstance(properties, dict) else None
        return isinstance(schema, dict) and schema.get("type") == "string"


class Glm45Parser(TaggedArgumentsParser):
    """GLM 4.5 and later: the name, then `<arg_key>…</arg_key><arg_value>…</arg_value>` for each argument."""

    _KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

    def _head(self) -> Steps[str]:
        name = yield from self._name()
        yield from self._space()
        yield from self._choose(self._KEY, _END)
        return name

    def _next_key(self) -> Steps[str | None]:
        yield from self._space()
        if (yield from self._choose(self._KEY, _END)) == _END:
            return None
        yield from self._expect(self._KEY)
        key = yield from self._until(self._KEY_END)
        yield from self._space()
        yield from self._expect(self._VALUE)
        return key.strip()

    def _argument_text(self) -> Steps[str]:
        return (yield from self._until(self._VALUE_END))

    def _tail(self) -> Steps[None]:
        yield from self._expect(_END)


class Qwen3CoderParser(TaggedArgumentsParser):
    """Qwen 3 Coder: `<function=name>`, then `<parameter=key>` and `</parameter>` around each argument's text."""

    _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"

    def _head(self) -> Steps[str]:
        yield from self._expect(self._FUNCTION)
        name = yield from self._name()
        yield from self._expect(">")
        yield from self._space()
        yield from self._choose(self._PARAMETER, self._FUNCTION_END)
        return name

    def _next_key(self) -> Steps[str | None]:
        yield from self._space()
        if (yield from self._choose(self._PARAMETER, self._FUNCTION_END)) == self._FUNCTION_END:
            return None
        yield from self._expect(self._PARAMETER)
        return (yield from self._until(">")).strip()

    def _argument_text(self) -> Steps[str]:
        text = yield from self._until(self._PARAMETER_END)
        return text.removeprefix("\n").removesuffix("\n")

    def _tail(self) -> Steps[None]:
        yield from self._expect(self._FUNCTION_END)
        yield from self._space()
        yield from self._expect(_END)
