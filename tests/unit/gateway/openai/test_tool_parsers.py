"""Calls of tools in the formats of different models, in pieces of any size."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.named_call import NamedCallParser
from tests.unit.gateway.outputs import TOOLS, Output, collect, parse

ROME = '{"city": "Rome"}'
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "now", "arguments": {}}'
ONE = [("get_weather", ROME)]
TWO = [("get_weather", ROME), ("now", "{}")]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def deepseek(*calls: tuple[str, str]) -> str:
    """As DeepSeek V3 writes it."""
    written = [f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{text}\n```{CALL_END}" for name, text in calls]
    return BEGIN + "\n".join(written) + END


def glm(name: str, **arguments: str) -> str:
    pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>{name}\n" + "".join(pairs) + "</tool_call>"


def coder(name: str, **arguments: str) -> str:
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n" + "".join(pairs) + "</function>\n</tool_call>"


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


WHOLE: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # hermes
    ("hermes", hermes(CALL), "", ONE),
    ("hermes", f"Let me see.\n\n{hermes(CALL)}\n{hermes(NOW)}\n", "Let me see.", TWO),
    ("hermes", f"{hermes(CALL)} Done.", "Done.", ONE),
    ("hermes", f"<tool_call>{CALL}<tool_call>{NOW}", "", TWO),
    ("hermes", f"<tool_call>[{CALL}, {NOW}]</tool_call>", "", TWO),
    ("hermes", hermes(f'{{"arguments": {ROME}, "name": "get_weather"}}'), "", ONE),
    ("hermes", hermes('{"id": [1, {"a": "}"}], "name": "now", "arguments": null}'), "", [("now", "{}")]),
    ("hermes", hermes('{"name": "now"}'), "", [("now", "{}")]),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    ("hermes", hermes('{"name": "f", "parameters": {"a": "</tool_call> } \\" \\\\"}}'), "",
     [("f", '{"a": "</tool_call> } \\" \\\\"}')]),
    ("hermes", hermes('{"name": "f", "arguments": {"a": [1, {"b": []}]}}}'), "}\n</tool_call>",
     [("f", '{"a": [1, {"b": []}]}')]),
    # llama3_json
    ("llama3_json", CALL.replace("arguments", "parameters"), "", ONE),
    ("llama3_json", f" {CALL} ; {NOW} ", "", TWO),
    ("llama3_json", f"<|python_tag|>{CALL};{NOW}", "", TWO),
    ("llama3_json", f"I call <|python_tag|>{CALL}", "I call", ONE),
    ("llama3_json", f'{{"type": "function", {NOW[1:]}', "", [("now", "{}")]),
    # mistral
    ("mistral", f"[TOOL_CALLS] [{CALL}, {NOW}]", "", TWO),
    ("mistral", f"Hm.\n[TOOL_CALLS]get_weather{ROME}[TOOL_CALLS]now{{}}", "Hm.", TWO),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ROME}", "", ONE),
    # deepseek_v3
    ("deepseek_v3", "Hm." + deepseek(("get_weather", ROME), ("now", "{}")), "Hm.", TWO),
    ("deepseek_v3", f"{BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{ROME}{CALL_END}{CALL_BEGIN}now{SEPARATOR}{{}}{CALL_END}"
     + END, "", TWO),
    ("deepseek_v3", f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}{{}}{CALL_END}{END}", "", [("function", "{}")]),
    # glm45
    ("glm45", glm("get_weather", city="Rome", days="3"), "", [("get_weather", '{"city": "Rome", "days": 3}')]),
    ("glm45", f"Hm.\n{glm('get_weather', city='Rome')}\n{glm('now')}", "Hm.", TWO),
    ("glm45", glm("get_weather", city="12", days="many"), "", [("get_weather", '{"city": "12", "days": "many"}')]),
    ("glm45", glm("other", a='{"b": [1]}', c="<b>"), "", [("other", '{"a": {"b": [1]}, "c": "<b>"}')]),
    # qwen3_coder
    ("qwen3_coder", coder("get_weather", city="two\nlines", days="3"), "",
     [("get_weather", '{"city": "two\\nlines", "days": 3}')]),
    ("qwen3_coder", coder("get_weather", city="Rome") + "\n" + coder("now"), "", TWO),
    # pythonic
    ("pythonic", "[get_weather(city='Rome'), now()]", "", TWO),
    ("pythonic", '<|python_start|>[get_weather(city="Rome")]<|python_end|>', "", ONE),
    ("pythonic", "[get_weather(city=')],', days=-3), now(a=[1, (2,)], b={'c': None}, d=true)]", "",
     [("get_weather", '{"city": ")],", "days": -3}'), ("now", '{"a": [1, [2]], "b": {"c": null}, "d": true}')]),
]  # fmt: skip
NONE: list[tuple[str, str]] = [
    *(
        (name, text)
        for name in TOOL_FORMATS
        for text in ("", "Hello.", " \n", "a <b> {c} [d]\n\n", "{", "[", '{"a": 1}')
    ),
    ("hermes", "<tool_call>"),
    ("hermes", "the tag <tool_call> and <tool_call>5"),
    ("hermes", f"<tool_call>{CALL[:-40]}"),
    ("hermes", '<tool_call>{"nome": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now" "arguments"}'),
    ("hermes", "text\n <tool_c"),
    ("llama3_json", '{"name": "Ann", "arguments": {}}'),
    ("llama3_json", '{"city": "Rome", "name": "now"}'),
    ("llama3_json", f"The JSON is {CALL}"),
    ("mistral", "[TOOL_CALLS] no call"),
    ("mistral", "[TOOL_CALLS]now"),
    ("deepseek_v3", BEGIN + "nothing"),
    ("deepseek_v3", f"{BEGIN}{CALL_BEGIN}now{SEPARATOR}5"),
    ("glm45", "<tool_call>two words"),
    ("glm45", "<tool_call>now<arg_k"),
    ("qwen3_coder", "<tool_call>\n<function=now"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "[get_weather('Rome')]"),
    ("pythonic", "[get_weather(city=Rome)]"),
    ("pythonic", "[get_weather(city=open('x'))]"),
    ("pythonic", "[get_weather(**{})]"),
    ("pythonic", "[get_weather(days=1e999)]"),
    ("pythonic", "[get_weather(city='\\ud800')]"),
    ("pythonic", "[get_weather(city='\x00')]"),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}'),
    ("pythonic", "[get_weather(days=" + "-" * 5000 + "1)]"),
    ("pythonic", "[get_weather(city="),
]
CUT: list[tuple[str, str, str, str]] = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "now", '{"a": "b'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b\\', "now", '{"a": "b\\'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a', "now", '"{\\"a'),
    ("llama3_json", '{"name": "now", "parameters": [1, ', "now", "[1, "),
    ("mistral", '[TOOL_CALLS]now{"a": {', "now", '{"a": {'),
    ("deepseek_v3", f"{BEGIN}{CALL_BEGIN}now{SEPARATOR}{{", "now", "{"),
    ("glm45", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>city</arg_key>"
     "<arg_value>Ro\n", "get_weather", '{"days": 3, "city": "Ro\\n'),
    ("glm45", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_k", "get_weather",
     '{"days": 3'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), WHOLE)
def test_calls_are_separated_from_content(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(name, text) == Output(content=content, calls=calls)
    assert parse(name, *text) == Output(content=content, calls=calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("name", "text"), NONE)
def test_text_that_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    assert parse(name, text) == Output(content=text)
    assert parse(name, *text) == Output(content=text)


@pytest.mark.parametrize(("name", "text", "function", "arguments"), CUT)
def test_a_call_whose_arguments_are_cut_is_passed_on_and_told(
    name: str, text: str, function: str, arguments: str
) -> None:
    assert parse(name, text) == parse(name, *text) == Output(calls=[(function, arguments)], cut=True)


def test_a_call_is_whole_when_its_arguments_are() -> None:
    assert parse("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}') == Output(calls=[("now", '{"a": 1}')])


def test_what_follows_a_broken_call_is_still_read() -> None:
    text = f"<tool_call>oops</tool_call>\n{hermes(CALL)}"
    assert parse("hermes", text) == Output(content="<tool_call>oops</tool_call>", calls=ONE)
    text = "[get_weather(city='Rome'), other()] and more"
    assert parse("pythonic", text) == Output(content=", other()] and more", calls=ONE)
    broken = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>oops"
    assert parse("glm45", broken) == Output(content="oops", calls=ONE)


def test_arguments_are_passed_on_as_they_arrive() -> None:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS)
    pieces = ["Hi ", "<tool", '_call>{"na', 'me": "now"', ', "arguments": ', '{"a', '": 1', "}", "}\n</tool_call>"]
    shown = [[type(event).__name__ for event in parser.feed(piece)] for piece in pieces]
    assert shown == [["Content"], [], [], [], [], ["CallStart", "CallArguments"], *[["CallArguments"]] * 2, []]


def test_the_output_of_a_named_function_is_its_arguments() -> None:
    assert collect(NamedCallParser("f"), "", "{", "}") == Output(calls=[("f", "{}")])
    assert collect(NamedCallParser("f")) == Output()


# --- any text, any cut ------------------------------------------------------------------------------------------------

PIECES: dict[str, list[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "\n", " x ", CALL, CALL[:30], CALL[30:], NOW, "[", "]", ",", "<tool", '"',
               "\\"],
    "llama3_json": ["<|python_tag|>", CALL, CALL[:30], CALL[30:], NOW, ";", " ", "{", "}", "[", '"', "x"],
    "mistral": ["[TOOL_CALLS]", "[", "]", ",", CALL, "now", "[ARGS]", "[CALL_ID]", "{}", ROME, "{", " ", "[TOOL_", '"'],
    "deepseek_v3": [BEGIN, END, CALL_BEGIN, CALL_END, SEPARATOR, "function", "now", "\n", "```json", "```", ROME, "{"],
    "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "days", "3",
              "\n"],
    "qwen3_coder": ["<tool_call>\n", "</tool_call>", "<function=", "now", ">", "<parameter=", "</parameter>",
                    "</function>", "\n", "x"],
    "pythonic": ["[", "]", "get_weather(", "now(", ")", "city=", "'", '"', "Rome", ", ", "{", "}", "\\", "days=3"],
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
@settings(max_examples=150)
@given(data=st.data())
def test_the_result_does_not_depend_on_how_the_output_is_cut(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, text)
    assert parse(name, *pieces) == whole
    assert parse(name, *text) == whole
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(text=st.text(max_size=60))
def test_ordinary_text_is_never_changed(name: str, text: str) -> None:
    output = parse(name, text)
    assert not output.calls
    assert output.content == text


@pytest.mark.parametrize(
    ("name", "unit"),
    [("hermes", "<tool_call>{"), ("hermes", hermes(CALL)), ("deepseek_v3", deepseek(("now", "{}"))),
     ("glm45", "<tool_call>a"), ("pythonic", "["), ("mistral", "[TOOL_CALLS]a"),
     ("llama3_json", '{"name": "now", "type": ')],
)  # fmt: skip
def test_the_cost_does_not_grow_faster_than_the_output(name: str, unit: str) -> None:
    text = unit * (400_000 // len(unit))
    assert len(parse(name, text).content) <= len(text)


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(
    "text",
    [" ", "\n", "x \n ", "<", '"', "{", glm("now", a="x" * 900), coder("now", a="x \n" * 300), hermes(CALL) + "  "],
)
def test_no_character_of_a_stream_is_read_again_and_again(name: str, text: str) -> None:
    parser = TOOL_FORMATS[name].parser(TOOLS)
    for character in text * (1000 // len(text) + 1):
        parser.feed(character)
        # Besides the new character, only what may be the beginning of a mark is kept for the next piece.
        assert len(parser._text) <= 1 + max(map(len, [*PIECES[name], BEGIN, SEPARATOR]))  # pyright: ignore[reportPrivateUsage]


def test_every_format_has_a_name_in_the_settings() -> None:
    made: list[Any] = [entry.parser for entry in TOOL_FORMATS.values()]
    assert len({*made}) == len(PIECES)
