"""The demo model's chat template: without tools the text that it was trained on, with tools Hermes' form."""

import json
from typing import Any

import pytest

from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.text.templates.chat_template import ChatTemplate
from antiphon.shared.text.templates.template_formats import reasoning_format, tool_format
from infra.demo_model.tokenizer import CHAT_TEMPLATE, render

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "arguments": {"a": "<é>"}}} for name in ("f", "g")
]


def rendered(messages: list[Any], generate: bool = True, **variables: Any) -> str:
    return ChatTemplate(CHAT_TEMPLATE, {}, 10_000).render(messages, generate, variables)


def test_the_shipped_model_has_this_template() -> None:
    shipped = json.loads((DEMO_DIRECTORY / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert shipped["chat_template"] == CHAT_TEMPLATE
    assert (tool_format(CHAT_TEMPLATE), reasoning_format(CHAT_TEMPLATE)) == ("hermes", "")


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": " Hi\n"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": "{% x"}, {"role": "assistant", "content": ""}],
    ],
)
def test_without_tools_the_text_is_that_of_the_training(messages: list[Any], generate: bool) -> None:
    for variables in ({}, {"tools": []}):
        assert rendered(messages, generate, **variables) == render(messages, generate)


def test_tools_are_told_behind_the_system_message() -> None:
    user = {"role": "user", "content": "Hi"}
    start = rendered([{"role": "system", "content": "Be brief."}, user], tools=[TOOL])
    assert start.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in start
    assert start.endswith("</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert start.count("<|im_start|>system") == rendered([user], tools=[TOOL]).count("<|im_start|>system") == 1


def test_calls_and_results_are_written_as_the_parser_reads_them() -> None:
    result = {"role": "tool", "content": "5"}
    messages = [
        {"role": "assistant", "content": "Hm.", "tool_calls": CALLS},
        result,
        result,
        {"role": "user", "content": "?"},
    ]
    text = rendered(messages, generate=False)
    said, _, rest = text.removeprefix("<|im_start|>assistant\n").partition("<|im_end|>\n")
    assert said.startswith('Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": "<é>"}}\n</tool_call>\n<tool_call>')
    response = "\n<tool_response>\n5\n</tool_response>"
    assert rest == f"<|im_start|>user{response}{response}<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
    parser = TOOL_FORMATS["hermes"].parser([TOOL])
    parser.feed(said)
    parser.finish()
    assert parser.num_calls == 2
