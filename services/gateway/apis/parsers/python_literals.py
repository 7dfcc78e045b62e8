"""Literals in Python's syntax, which models write in place of JSON. They are parsed, never run. Pure."""

import ast
import json
from typing import Any

from antiphon.services.gateway.apis.parsers.reader import NotACallError

_NAMES = {"true": True, "false": False, "null": None}
"""JSON's names of literals, which models write as well as Python's."""


def json_of_literal(text: str) -> str | None:
    """Returns a literal as JSON; None if the text is no literal."""
    try:
        return in_json(literal_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError, NotACallError):
        return None


def in_json(value: Any) -> str:
    """Returns the value of a literal as JSON. Raises ValueError for numbers and texts that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises ValueError for half a surrogate pair, which Python's literals may hold
    return text


def literal_value(node: ast.expr) -> Any:
    """Returns the value of an expression. Raises NotACallError if it is no literal."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal_value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise NotACallError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACallError
