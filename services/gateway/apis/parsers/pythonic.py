"""Calls in Python's syntax: `[get_weather(city="Rome"), now()]`, as Llama 3.2, Llama 4 and others write them.

The text is parsed as Python, never run: only literals are arguments.
"""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.services.gateway.apis.parsers.python_literals import in_json, literal_value
from antiphon.services.gateway.apis.parsers.reader import NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser

_BETWEEN = re.compile(r"[^\"'()\[\]{}]*")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_LINE_END = re.compile(r"(?<!\\)((?:\\\\)*)(\\?)\n")
"""A line break in a string, with the backslashes before it: models write it, though Python's strings do not have it."""


class PythonicParser(ToolParser):
    """A list of calls at the beginning of the output, between `<|python_start|>` and `<|python_end|>` or without.

    A list could be ordinary text, so it is a call only if the names are those of the request's tools. A call is passed
    on when it is complete.
    """

    _BEGIN, _END = "<|python_start|>", "<|python_end|>"
    _IS_MARKED = False
    """Whether the list must stand between the marks, so that every name is that of a function."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._may_begin = True

    def _call(self) -> Steps[None]:
        if self._IS_MARKED or not self._may_begin:
            yield from self._content(self._BEGIN)
        self._may_begin = False
        yield from self._space()
        yield from self._accept(self._BEGIN)
        yield from self._space()
        yield from self._expect("[")
        while True:
            yield from self._space()
            yield from self._python_call()
            yield from self._space()
            if not (yield from self._accept(",")):
                break
        yield from self._expect("]")
        yield from self._space()
        yield from self._accept(self._END)

    def _python_call(self) -> Steps[None]:
        name = yield from self._name()
        if not self._IS_MARKED and name not in self._tools:
            raise NotACallError
        yield from self._expect("(")
        parts: list[str] = []
        yield from self._up_to_parenthesis(parts)
        arguments = _arguments_json("".join(parts))
        self._begin(name)
        self._argue(arguments)
        self._end()

    def _up_to_parenthesis(self, parts: list[str]) -> Steps[None]:
        """Reads the text up to the parenthesis that closes the call; adds it to `parts` without the parenthesis."""
        depth = 0
        while True:
            yield from self._need(1)
            mark = self._text[self._position]
            if mark in "\"'":
                string: list[str] = []
                yield from self._string(string.append, mark, _IN_STRING[mark])
                parts.append(_LINE_END.sub(_escaped, "".join(string)))
            elif mark in "([{":
                depth += 1
                parts.append(self._read(1))
            elif mark in ")]}":
                depth -= 1
                text = self._read(1)
                if depth < 0:
                    return
                parts.append(text)
            else:
                found = _BETWEEN.match(self._text, self._position)
                assert found is not None
                parts.append(self._read(len(found[0])))


class Lfm2Parser(PythonicParser):
    """`<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>`: LFM2. The calls may also be JSON objects."""

    _BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
    _IS_MARKED = True

    def _python_call(self) -> Steps[None]:
        if (yield from self._next_is("{")):
            yield from self._json_call(only_known=False)
        else:
            yield from super()._python_call()


def _escaped(line_end: re.Match[str]) -> str:
    escaped, single = line_end.groups()
    return escaped + 2 * single + "\\n"


def _arguments_json(text: str) -> str:
    """Returns the keyword arguments of a call as a JSON object. Raises NotACallError if one is no literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise NotACallError
        values = {_keyword(item): literal_value(item.value) for item in call.keywords}
        return in_json(values)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACallError from None


def _keyword(item: ast.keyword) -> str:
    if item.arg is None:  # `**…`
        raise NotACallError
    return item.arg
