"""Checks of tools and of the other variables that a request gives to the chat template."""

import json
from typing import Any

import pytest

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.tools import (
    checked_documents,
    checked_functions,
    checked_template_kwargs,
    checked_tools,
    template_variables,
    tool_name,
    tool_parameters,
)

GOOD: dict[str, Any] = {"type": "function", "function": {"name": "get_weather-2", "parameters": {"type": "object"}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def test_tools_are_passed_on_as_they_were_written() -> None:
    own = {"type": "function", "function": {"name": "f", "strict": True, "returns": {}}, "own": 1}
    assert checked_tools([GOOD, own]) == [GOOD, own]
    assert checked_tools(None) == checked_tools([]) == []
    assert (tool_name(GOOD), tool_parameters(GOOD)) == ("get_weather-2", {"type": "object"})
    assert tool_parameters(own) == {"type": "object"}


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ("f", "invalid_value", "tools[1]"),
        ({"function": {"name": "f"}}, "missing_required_parameter", "tools[1].type"),
        ({"type": "custom", "custom": {"name": "f"}}, "unsupported_parameter", "tools[1].type"),
        ({"type": "function"}, "missing_required_parameter", "tools[1].function"),
        ({"type": "function", "function": []}, "invalid_value", "tools[1].function"),
        ({"type": "function", "function": {}}, "missing_required_parameter", "tools[1].function.name"),
        (tool(name="get weather"), "invalid_value", "tools[1].function.name"),
        (tool(name="x" * 65), "invalid_value", "tools[1].function.name"),
        (tool(name="f\n"), "invalid_value", "tools[1].function.name"),
        (tool(name=5), "invalid_value", "tools[1].function.name"),
        (tool(parameters=[]), "invalid_value", "tools[1].function.parameters"),
        (tool(description=5), "invalid_value", "tools[1].function.description"),
        (tool(parameters=json.loads('{"a":' * 99 + "1" + "}" * 99)), "invalid_value", "tools[1].function"),
    ],
)
def test_a_wrong_tool_is_refused_where_it_stands(wrong: Any, code: str, param: str) -> None:
    with pytest.raises(ServiceError) as raised:
        checked_tools([GOOD, wrong])
    assert (raised.value.code, raised.value.param) == (code, param)


def test_the_number_of_tools_is_limited() -> None:
    assert len(checked_tools([GOOD] * limits.TOOLS_MAX)) == limits.TOOLS_MAX
    for check, param in ((checked_tools, "tools"), (checked_functions, "functions")):
        with pytest.raises(ServiceError, match=f"'{param}' must hold at most 128"):
            check([GOOD] * (limits.TOOLS_MAX + 1))


def test_functions_are_tools_in_the_former_form() -> None:
    assert checked_functions([GOOD["function"]]) == [GOOD]
    with pytest.raises(ServiceError) as raised:
        checked_functions([GOOD["function"], {"name": "?"}])
    assert raised.value.param == "functions[1].name"


def test_variables_of_the_template_cannot_replace_fields_of_the_request() -> None:
    assert checked_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ServiceError) as raised:
            checked_template_kwargs({name: 1})
        assert raised.value.param == f"chat_template_kwargs.{name}"
    with pytest.raises(ServiceError, match=r"documents\[1\]"):
        checked_documents([{}, "x"])


def test_no_variables_are_no_bytes() -> None:
    assert template_variables([], [], {}) == b""
    assert json.loads(template_variables([GOOD], [{"title": "t"}], {"k": 1})) == {
        "tools": [GOOD],
        "documents": [{"title": "t"}],
        "k": 1,
    }
