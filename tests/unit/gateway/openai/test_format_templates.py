"""What a model's chat template writes, its formats read: a message rendered as an output has the same parts again."""

import json
from typing import Any

import pytest

from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.reasoning_formats import REASONING_FORMATS
from antiphon.shared.text.templates.chat_template import ChatTemplate
from antiphon.shared.text.templates.template_formats import reasoning_format, tool_format
from tests.unit.gateway.format_templates import TEMPLATES, Written
from tests.unit.gateway.outputs import Output, tool

TOOLS = [
    tool("get_weather", city="string", days="integer", where="object", units="array", exact="boolean"),
    tool("now"),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Rome"},
    {"city": 'the "old" town, {Zürich}\\\n<b>', "days": 3, "exact": True},
    {"where": {"x": -1.5, "name": "[a, b]"}, "units": ["c", "f", 7], "days": None},
    {"units": [], "where": {}},
]
USER = {"role": "user", "content": "What is the weather?"}


def generated(written: Written, message: dict[str, Any]) -> tuple[str, str]:
    """The prompt of a message and the output that makes it."""
    template = ChatTemplate(written.template, {}, 100_000)
    prompt = template.render([USER], True, {"tools": TOOLS})
    spoken = {"role": "assistant", "thinking": message["reasoning"], **message}
    whole = template.render([USER, spoken], False, {"tools": TOOLS})
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix(written.end)


def read(written: Written, prompt: str, *pieces: str) -> Output:
    answer = AnswerFormat(
        choice=ToolChoice(mode="auto", tools=tuple(TOOLS)),
        tool_format=TOOL_FORMATS[written.tool],
        reasoning_format=REASONING_FORMATS.get(written.reasoning),
    )
    parser, output = answer.parser(prompt[-40:]), Output()
    for piece in pieces:
        output.add(parser.feed(piece, 1))
    output.add(parser.finish())
    output.cut = bool(output.calls) and not parser.has_whole_calls
    return output


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_formats_are_recognised_from_the_template(name: str) -> None:
    written = TEMPLATES[name]
    assert (tool_format(written.template), reasoning_format(written.template)) == (written.tool, written.reasoning)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("content", ["", "Let me see."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_reasoning_are_read_as_the_template_writes_them(
    name: str, content: str, arguments: dict[str, Any]
) -> None:
    written = TEMPLATES[name]
    functions = [("get_weather", arguments), ("now", dict[str, Any]())][: 2 if written.several else 1]
    calls = [
        {"id": f"functions.{function}:{number}", "function": {"name": function, "arguments": given}}
        for number, (function, given) in enumerate(functions)
    ]
    message = {"content": content, "reasoning": "Hm.\n\nRome?", "tool_calls": calls}
    prompt, text = generated(written, message)
    for output in (read(written, prompt, text), read(written, prompt, *text)):
        assert [(function, json.loads(given)) for function, given in output.calls] == functions
        assert output.content.strip() == content
        assert output.reasoning == ("Hm.\n\nRome?" if written.reasoning else "")
        assert not output.cut


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_without_calls_is_text(name: str) -> None:
    written = TEMPLATES[name]
    prompt, text = generated(written, {"content": "It is sunny: {1}, [2] and <b>.", "reasoning": "Hm."})
    for output in (read(written, prompt, text), read(written, prompt, *text)):
        assert not output.calls
        assert output.content.strip() == "It is sunny: {1}, [2] and <b>."
        assert output.reasoning == ("Hm." if written.reasoning else "")
