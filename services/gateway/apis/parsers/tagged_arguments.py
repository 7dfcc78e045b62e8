"""Formats in which each argument of a call has its own tags. The parsers convert the arguments to a JSON object."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.apis.parsers.python_literals import json_of_literal
from antiphon.services.gateway.apis.parsers.reader import NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser
from antiphon.shared.request.tools import tool_parameters

_KINDS = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
"""The types of JSON values by the first character."""


class TaggedArgumentsParser(ToolParser):
    """A call between two tags whose arguments are pairs of a key and a text.

    The tool's JSON Schema decides how a text is read: as a string if the schema says so; else as JSON, as one of
    Python's literals where the schema allows its value, or as a string. An argument is passed on when its text is
    complete.
    """

    _BEGIN, _END = "<tool_call>", "</tool_call>"

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

    def _opening(self) -> Steps[None]:
        """Reads content up to a call, and its first tag."""
        yield from self._content(self._BEGIN)

    def _call(self) -> Steps[None]:
        yield from self._opening()
        yield from self._space()
        self._function = yield from self._head()
        self._begin(self._function)
        self._num_arguments = 0
        try:
            while (yield from self._argument()):
                pass
            self._in_call = True
            yield from self._tail()
        except NotACallError:
            # The call has begun, so its arguments must become a complete object; the text after them is content.
            self._close()
            raise
        self._close()

    def _argument(self) -> Steps[bool]:
        """Reads an argument and passes it on. Returns whether there was one. What is read of a wrong one is held."""
        self._in_call, self._open_key = False, None
        self._held.clear()
        self._open_value.clear()
        key = self._open_key = yield from self._next_key()
        if key is None:
            self._held.clear()
            return False
        text = yield from self._value_of(key)
        self._argue(self._before(key) + self._encoded(key, text))
        self._num_arguments += 1
        self._open_key = None
        return True

    def _value_of(self, key: str) -> Steps[str]:
        """Reads the text of an argument.

        A strict function's argument is read as JSON, because it may contain the end tag.
        """
        if self._is_string(key) or not self._is_strict():
            return (yield from self._argument_text())
        yield from self._space()
        yield from self._value(self._open_value.append)
        yield from self._argument_text()
        return "".join(self._open_value)

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
                literal = self._literal(key, text)
                if literal is not None:
                    return literal
            else:
                return text.strip()
        return json.dumps(text, ensure_ascii=False)

    def _literal(self, key: str, text: str) -> str | None:
        """Returns the JSON of one of Python's literals, if the schema allows such a value; else None."""
        types = _types(self._schema(key))
        literal = json_of_literal(text) if types else None
        kind = _KINDS.get(literal[0]) if literal is not None else None
        return literal if kind in types or (kind == "null" and "string" not in types) else None

    def _is_strict(self) -> bool:
        tool = self._tools.get(self._function)
        return tool is not None and bool(tool["function"].get("strict"))

    def _is_string(self, key: str) -> bool:
        return self._schema(key).get("type") == "string"

    def _schema(self, key: str) -> Mapping[str, Any]:
        """Returns the schema of an argument; an empty one if it is not known."""
        tool = self._tools.get(self._function)
        properties: Any = tool_parameters(tool).get("properties") if tool is not None else None
        schema: Any = properties.get(key) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a schema names, also those of its alternatives."""
    named: Any = schema.get("type", ())
    found = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)}
    alternatives: Any = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return found.union(*(_types(one) for one in alternatives if isinstance(one, dict)))


class Glm45Parser(TaggedArgumentsParser):
    """GLM 4.5 and later: the name, then `<arg_key>…</arg_key><arg_value>…</arg_value>` for each argument."""

    _KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

    def _head(self) -> Steps[str]:
        name = yield from self._name()
        yield from self._space()
        yield from self._choose(self._KEY, self._END)
        return name

    def _next_key(self) -> Steps[str | None]:
        yield from self._space()
        if (yield from self._choose(self._KEY, self._END)) == self._END:
            return None
        yield from self._expect(self._KEY)
        key = yield from self._until(self._KEY_END)
        yield from self._space()
        yield from self._expect(self._VALUE)
        return key.strip()

    def _argument_text(self) -> Steps[str]:
        return (yield from self._until(self._VALUE_END))

    def _tail(self) -> Steps[None]:
        yield from self._expect(self._END)


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
        yield from self._expect(self._END)


class SeedOssParser(Qwen3CoderParser):
    """Seed-OSS: as Qwen 3 Coder, between other tags, and without line breaks around an argument's text."""

    _BEGIN, _END = "<seed:tool_call>", "</seed:tool_call>"

    def _argument_text(self) -> Steps[str]:
        return (yield from self._until(self._PARAMETER_END))


class MinimaxM2Parser(TaggedArgumentsParser):
    """MiniMax M2: `<invoke name="…">`, then `<parameter name="…">` and `</parameter>` around each argument's text.

    There may be several calls between the tags.
    """

    _BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
    _CALL, _CALL_END = '<invoke name="', "</invoke>"
    _PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._has_further = False
        """Whether another call follows between the same tags."""

    def _opening(self) -> Steps[None]:
        if not self._has_further:
            yield from self._content(self._BEGIN)
        self._has_further = False

    def _head(self) -> Steps[str]:
        yield from self._expect(self._CALL)
        name = yield from self._name()
        yield from self._expect('">')
        yield from self._space()
        yield from self._choose(self._PARAMETER, self._CALL_END)
        return name

    def _next_key(self) -> Steps[str | None]:
        yield from self._space()
        if (yield from self._choose(self._PARAMETER, self._CALL_END)) == self._CALL_END:
            return None
        yield from self._expect(self._PARAMETER)
        key = yield from self._until('"')
        yield from self._attributes()
        yield from self._expect(">")
        return key

    def _attributes(self) -> Steps[None]:
        """Reads what stands behind the key of an argument."""
        yield from ()

    def _argument_text(self) -> Steps[str]:
        return (yield from self._until(self._PARAMETER_END))

    def _tail(self) -> Steps[None]:
        yield from self._expect(self._CALL_END)
        yield from self._space()
        self._has_further = not (yield from self._accept(self._END)) and (yield from self._next_is(self._CALL))


class DeepseekV32Parser(MinimaxM2Parser):
    """DeepSeek V3.2: as MiniMax M2 with other names of the tags. An attribute says whether an argument is a string."""

    _BEGIN, _END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    _CALL, _CALL_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    _PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
    _STRING, _OTHER = ' string="true"', ' string="false"'

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._said: bool | None = None
        """Whether the text of the argument is a string; None if the attribute is missing."""

    def _attributes(self) -> Steps[None]:
        said = yield from self._choose(self._STRING, self._OTHER, ">")
        self._said = None if said == ">" else said == self._STRING
        if self._said is not None:
            yield from self._expect(said)

    def _is_string(self, key: str) -> bool:
        return super()._is_string(key) if self._said is None else self._said
