"""Which formats an answer has, what forced calls must look like, and how reasoning tokens are counted."""

import dataclasses
from typing import Any

import msgspec
import pytest

from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.chat import chat_request, generation_request
from antiphon.services.gateway.apis.openai.schemas import ChatBody
from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat, answer_format
from antiphon.services.gateway.apis.openai.tools.forced_calls import forced_calls_schema
from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice, tool_choice
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Reasoning, joined
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.output_parser import OutputParser
from antiphon.services.gateway.apis.parsers.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.settings.allowed_values import REASONING_PARSERS, TOOL_CALL_PARSERS
from antiphon.shared.text.reasoning import ReasoningSplitter
from tests.unit.gateway.bodies import CARD, HELLO
from tests.unit.gateway.outputs import TOOLS, Output, collect, tool

NAMED = {"type": "function", "function": {"name": "now"}}
THINKER = dataclasses.replace(CARD, tool_format="mistral", reasoning_format="qwen3")


def body(**fields: Any) -> ChatBody:
    return msgspec.convert({"messages": HELLO, **fields}, ChatBody)


def chosen(card: ModelCard = THINKER, settings: Any = None, **fields: Any) -> AnswerFormat | None:
    asked = body(**fields)
    return answer_format(
        asked, generation_request(asked, card, "r"), tool_choice(asked), card, GatewaySettings(**(settings or {}))
    )


def test_the_settings_offer_the_formats_that_there_are() -> None:
    assert set(TOOL_CALL_PARSERS) == {"auto", "none", *TOOL_FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}


def test_a_request_without_tools_and_reasoning_needs_no_parser() -> None:
    assert chosen(CARD) is None
    assert chosen(CARD, tools=[], tool_choice="auto") is None
    assert chosen(CARD, tools=TOOLS, tool_choice="none") is None
    assert chosen(THINKER, {"reasoning_parser": "none"}) is None


def test_formats_come_from_the_template_unless_the_settings_name_them() -> None:
    found = chosen(tools=TOOLS)
    assert found is not None
    assert (found.tool_format, found.reasoning_format) == (TOOL_FORMATS["mistral"], REASONING_FORMATS["qwen3"])
    assert found.special_tokens == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>")
    named = chosen(settings={"tool_call_parser": "hermes", "reasoning_parser": "granite"}, tools=TOOLS)
    assert named is not None
    assert (named.tool_format, named.reasoning_format) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["granite"])


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_are_refused_where_no_format_is_known(name: str) -> None:
    tools = TOOLS if name == "tools" else [one["function"] for one in TOOLS]
    with pytest.raises(ServiceError, match="--tool-call-parser") as raised:
        chosen(CARD, **{name: tools})
    assert raised.value.param == name
    assert chosen(CARD, {"tool_call_parser": "none"}, **{name: tools}) is None


def test_output_that_follows_a_structure_is_not_parsed() -> None:
    assert chosen(tools=TOOLS, response_format={"type": "json_object"}) is None
    tag = {"begin": "<tool_call>", "schema": {}, "end": "</tool_call>"}
    structures = {"structural_tag": {"structures": [tag], "triggers": ["<tool_call>"]}}
    free = chosen(tools=TOOLS, structured_outputs=structures)
    assert free is not None
    assert free.reasoning_format is not None


def test_output_without_text_is_not_parsed() -> None:
    assert chosen(tools=TOOLS, detokenize=False) is None


def test_forced_calls_have_no_reasoning_and_need_no_format_of_the_model() -> None:
    for card, short in ((THINKER, True), (CARD, False)):
        forced = chosen(card, tools=TOOLS, tool_choice="required")
        assert forced is not None
        assert forced.reasoning_format is None
        assert (len(forced.call_id("r", 0, 0, "now")) == 9) is short


def test_ids_of_calls_are_the_same_for_the_same_place_and_short_where_the_template_needs_it() -> None:
    short, long = (AnswerFormat(choice=ToolChoice(), tool_format=TOOL_FORMATS[name]) for name in ("mistral", "hermes"))
    ids = {long.call_id("r", choice, call, "now") for choice in range(3) for call in range(3)}
    assert len(ids) == 9
    assert long.call_id("r", 0, 0, "now") in ids
    assert len(short.call_id("r", 0, 0, "now")) == 9
    assert short.call_id("r", 0, 0, "now").isalnum()


def test_ids_that_the_model_reads_again_are_numbered_through_the_conversation() -> None:
    card = dataclasses.replace(CARD, tool_format="kimi_k2")
    calls = [{"id": str(number), "function": {"name": "now"}} for number in range(3)]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}, *HELLO]
    for choice in ("auto", "required"):
        found = chosen(card, tools=TOOLS, tool_choice=choice, messages=messages)
        assert found is not None
        assert [found.call_id("r", 0, call, "get_weather") for call in range(2)] == [
            "functions.get_weather:3",
            "functions.get_weather:4",
        ]


def test_the_limit_of_reasoning_ends_the_message_of_a_channel() -> None:
    found = chosen(dataclasses.replace(CARD, reasoning_format="gpt_oss"))
    assert found is not None
    limit = found.thinking_limit(5)
    assert limit is not None
    assert (limit.opening, limit.closing) == ("<|channel|>analysis<|message|>", "<|end|>")
    assert "<|channel|>" in found.special_tokens


@pytest.mark.parametrize(
    ("reasoning", "tail", "inside"),
    [
        (ReasoningFormat(), "<|assistant|>", False),
        (ReasoningFormat(), "<think>\n", True),
        (ReasoningFormat(), "<think>\n\n</think>\n\n", False),
        (ReasoningFormat(is_implied=True), "<|assistant|>", True),
        (ReasoningFormat(is_implied=True), "<think>\n\n</think>\n\n", False),
    ],
)
def test_the_end_of_the_prompt_tells_whether_the_output_begins_within_reasoning(
    reasoning: ReasoningFormat, tail: str, inside: bool
) -> None:
    parser = AnswerFormat(choice=ToolChoice(), reasoning_format=reasoning).parser(tail)
    output = Output()
    output.add(parser.feed("Hm.</think>Yes."))
    output.add(parser.finish())
    assert (output.reasoning, output.content) == (("Hm.", "Yes.") if inside else ("", "Hm.</think>Yes."))


def test_reasoning_between_calls_stays_between_them() -> None:
    """However much text arrives at once: a call must not be interrupted."""
    answer = AnswerFormat(
        choice=ToolChoice(mode="auto", tools=tuple(TOOLS)),
        tool_format=TOOL_FORMATS["gpt_oss"],
        reasoning_format=REASONING_FORMATS["gpt_oss"],
    )
    call = "<|channel|>commentary to=functions.now json<|message|>{}<|end|><|start|>assistant"
    text = f"{call}<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
    for pieces in ([text], [*text]):
        parser = answer.parser("<|start|>assistant")
        events = joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert events == [CallStart(0, "now"), CallArguments(0, "{}"), Reasoning("Hm."), CallStart(1, "now"),
                          CallArguments(1, "{}")]  # fmt: skip


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([("<th", 1), ("ink>", 1), ("a", 1), ("b", 1), ("</think>", 1), ("c", 1), ("d", 5)], 5),
        ([("<think>ab</think>", 5), ("cd", 2)], 5),
        ([("<think>ab</think>cccccccccccccccccc", 10)], 5),
        ([("a", 1), ("<think>b</think>", 4)], 0),
        ([("<think>", 3), ("", 1)], 4),
        ([("", 1), ("x", 1)], 0),
    ],
)
def test_tokens_of_reasoning_are_counted(updates: list[tuple[str, int]], expected: int) -> None:
    parser = OutputParser(ReasoningSplitter())
    for text, count in updates:
        parser.feed(text, count)
    parser.finish()
    assert parser.num_reasoning_tokens == expected


def test_forced_calls_are_a_list_of_known_calls_or_the_arguments_of_one() -> None:
    shared = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": shared}}]
    schema = forced_calls_schema(tool_choice(body(tools=tools, tool_choice="required")))
    assert (schema["type"], schema["minItems"], schema["$defs"]) == ("array", 1, shared["$defs"])
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["get_weather", "now", "f"]
    assert schema["items"]["anyOf"][2]["properties"]["parameters"] == {
        "type": "object",
        "properties": shared["properties"],
    }
    one = forced_calls_schema(tool_choice(body(tools=tools, tool_choice="required", parallel_tool_calls=False)))
    assert one["maxItems"] == 1
    named = {"type": "function", "function": {"name": "f"}}
    assert forced_calls_schema(tool_choice(body(tools=tools, tool_choice=named))) == shared
    other = {**shared, "$defs": {"X": {"type": "string"}}}
    tools.append({"type": "function", "function": {"name": "g", "parameters": other}})
    with pytest.raises(ServiceError) as raised:
        forced_calls_schema(tool_choice(body(tools=tools, tool_choice="required")))
    assert raised.value.param == "tools[3].function.parameters.$defs.X"


@pytest.mark.parametrize(
    ("name", "kind"), [("", "json"), ("pythonic", "json"), ("qwen3_coder", "json"), ("hermes", "tagged_text")]
)
def test_forced_calls_are_in_the_models_own_format_if_that_holds_every_schema(name: str, kind: str) -> None:
    card = dataclasses.replace(CARD, tool_format=name)
    settings = GatewaySettings()
    for choice in ("required", NAMED):
        asked = body(tools=TOOLS, tool_choice=choice)
        grammar = chat_request(asked, card, "r", RequestDefaults(), settings).request.params.grammar
        assert grammar is not None
        assert grammar.kind == kind
    other = {"type": "function", "function": {"name": "other", "parameters": {"oneOf": 1}}}
    named = chat_request(body(tools=[*TOOLS, other], tool_choice=NAMED), card, "r", RequestDefaults(), settings)
    assert named.request.params.grammar is not None, "the schemas of other tools do not matter"
    assert '"other"' not in named.request.params.grammar.text
    unread = GatewaySettings(tool_call_parser="none")
    asked = body(tools=TOOLS, tool_choice="required")
    grammar = chat_request(asked, card, "r", RequestDefaults(), unread).request.params.grammar
    assert grammar is not None
    assert grammar.kind == "json"


def test_output_of_forced_calls_is_read() -> None:
    required = AnswerFormat(choice=ToolChoice(mode="required", tools=(tool("now"),)))
    hermes = dataclasses.replace(required, tool_format=TOOL_FORMATS["hermes"])
    pythonic = dataclasses.replace(required, tool_format=TOOL_FORMATS["pythonic"])
    listed = '[{"name": "now", "parameters": {}}]'
    for form, text in (
        (required, listed),
        (pythonic, listed),
        (hermes, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ):
        parser = form.parser("")
        assert collect(_Calls(parser), text) == Output(calls=[("now", "{}")])
        assert form.finish_reason("stop", parser) == "tool_calls"
    named = AnswerFormat(choice=ToolChoice(mode="named", tools=(tool("now"),), name="now"))
    parser = named.parser("")
    assert collect(_Calls(parser), "{", "}") == Output(calls=[("now", "{}")])
    assert named.finish_reason("stop", parser) == "stop"
    parser = dataclasses.replace(named, tool_format=TOOL_FORMATS["hermes"]).parser("")
    assert collect(_Calls(parser), '<tool_call>{"name": "now", ', '"arguments": {}}</tool_call>').calls == [
        ("now", "{}")
    ]
    assert named.finish_reason("stop", parser) == "stop"


class _Calls:
    """A whole parser in the place of one for calls."""

    num_calls = 0
    is_cut = False

    def __init__(self, parser: OutputParser) -> None:
        self.feed, self.finish = parser.feed, parser.finish
