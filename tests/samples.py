"""One instance of every message, made from the field types: for golden bytes and codec tests."""

import types
import typing
from typing import Any, Literal, Union

import msgspec
from hypothesis import strategies as st

from antiphon.shared.messages import Message

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXT,
    bytes: st.binary(max_size=40),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    type(None): st.none(),
}


def message_types() -> list[type[Message]]:
    """Every message, by name."""
    return sorted(Message.__subclasses__(), key=lambda kind: kind.__name__)


def sample(kind: type[msgspec.Struct]) -> Any:
    """An instance with every field set, the same in every run."""
    return kind(**{name: _value(hint, name) for name, hint in typing.get_type_hints(kind).items() if _is_field(name)})


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that messages use."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(strategy, arguments))
    if origin is dict:
        return st.dictionaries(
            st.text(max_size=5), st.one_of(st.none(), st.booleans(), st.text(max_size=5)), max_size=3
        )
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if _is_field(name)}
        return st.builds(kind, **{name: strategy(hint) for name, hint in hints.items()})
    return _SCALARS[kind]


def _is_field(name: str) -> bool:
    return not name.startswith("__")


def _value(hint: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return _value(arguments[0], name)
    if origin is dict:
        return {name: [name, None, {"inner": 0.5}]}
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return (_value(arguments[0], name),)
    if origin is tuple:
        return tuple(_value(argument, name) for argument in arguments)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return sample(hint)
    number = 1 + sum(name.encode()) % 999
    return {str: f"{name} é", bytes: name.encode() + b"\xff", int: number, float: number / 8, bool: True}[hint]
