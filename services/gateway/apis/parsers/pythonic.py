"""Calls in Python's syntax: `[get_weather(city="Rome"), now()]`, as Llama 3.2, Llama 4 and others write them.

The text is parsed as Python, never run: only literals are arguments.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.services.gateway.apis.parsers.reader import NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser

_BETWEEN = re.compile(r"[^\"'()\[\]{}]*")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_JSON_NAMES = {"true": True, "false": False, "null": None}
"""JSON's names of literals, which models write as well as Python's."""


class PythonicParser(ToolParser):
    """A list of calls at the beginning of the output, between `<|python_start|>` and `<|python_end|>` or without.

    A list could be ordinary text, so it is a call only if the names are those of the request's tools. A call is passed
    on when it is complete.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._may_begin = True

    def _call(self) -> Steps[None]:
        if not self._may_begin:
            yield from self._content("<|python_start|>")
        self._may_begin = False
        yield from self._space()
        yield from self._accept("<|python_start|>")
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
        yield from self._accept("<|python_end|>")

    def _python_call(self) -> Steps[None]:
        name = yield from self._name()
        if name not in self._tools:
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
                yield from self._string(parts.append, mark, _IN_STRING[mark])
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


def _arguments_json(text: str) -> str:
    """Returns the keyword arguments of a call as a JSON object. Raises NotACallError if one is no literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise NotACallError
        values = {_keyword(item): _literal(item.value) for item in call.keywords}
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # raises ValueError for half a surrogate pair, which Python's literals may hold
        return arguments
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACallError from None


def _keyword(item: ast.keyword) -> str:
    if item.arg is None:  # `**…`
        raise NotACallError
    return item.arg


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise NotACallError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACallError
