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
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_BEGIN, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
TO_NOW = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>"
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


def invoke(name: str, **arguments: str) -> str:
    """As MiniMax M2 writes it."""
    pairs = [f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()]
    return f'<invoke name="{name}">\n' + "".join(pairs) + "</invoke>\n"


def dsml(text: str) -> str:
    """A call of MiniMax M2 as DeepSeek V3.2 writes it."""
    marked = text.replace("</", "</｜DSML｜").replace("<invoke", "<｜DSML｜invoke").replace("<param", "<｜DSML｜param")
    return f"<｜DSML｜function_calls>\n{marked}</｜DSML｜function_calls>"


def kimi(*calls: tuple[str, str]) -> str:
    written = [f"{KIMI_BEGIN}{name}{KIMI_ARGUMENTS}{text}{KIMI_END}" for name, text in calls]
    return SECTION + "".join(written) + SECTION_END


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
    # Python's literals are read where the schema allows their values: a text stays one.
    ("qwen3_coder", coder("get_weather", city="None", days="None"), "",
     [("get_weather", '{"city": "None", "days": null}')]),
    ("qwen3_coder", coder("get_weather", days="{'a': 1}"), "", [("get_weather", '{"days": "{\'a\': 1}"}')]),
    ("qwen3_coder", coder("other", a="True"), "", [("other", '{"a": "True"}')]),
    # pythonic
    ("pythonic", "[get_weather(city='Rome'), now()]", "", TWO),
    ("pythonic", '<|python_start|>[get_weather(city="Rome")]<|python_end|>', "", ONE),
    ("pythonic", "[get_weather(city=')],', days=-3), now(a=[1, (2,)], b={'c': None}, d=true)]", "",
     [("get_weather", '{"city": ")],", "days": -3}'), ("now", '{"a": [1, [2]], "b": {"c": null}, "d": true}')]),
    # gpt_oss
    ("gpt_oss", TO_WEATHER + ROME + "<|call|>", "", ONE),
    ("gpt_oss", f"Hm.{TO_WEATHER}{ROME}<|end|>{TO_NOW}{{}}", "Hm.", TWO),
    ("gpt_oss", " to=functions.now<|channel|>commentary code<|message|>{}<|call|>", "", [("now", "{}")]),
    ("gpt_oss", "<|channel|>analysis to=functions.now<|message|><|call|>Done.", "Done.", [("now", "{}")]),
    # kimi_k2
    ("kimi_k2", "Hm." + kimi(("functions.get_weather:0", ROME), ("functions.now:1", "{}")), "Hm.", TWO),
    ("kimi_k2", f"{KIMI_BEGIN}get_weather{KIMI_ARGUMENTS}{ROME}{KIMI_END}", "", ONE),
    # minimax_m2
    ("minimax_m2", f"<minimax:tool_call>\n{invoke('get_weather', city='Rome')}{invoke('now')}</minimax:tool_call>", "",
     TWO),
    ("minimax_m2", f"<minimax:tool_call>{invoke('get_weather', city='12', days='12')}</minimax:tool_call>\nDone.",
     "Done.", [("get_weather", '{"city": "12", "days": 12}')]),
    # seed_oss
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nRome</parameter>\n</function>\n"
     "</seed:tool_call>", "", [("get_weather", '{"city": "\\nRome"}')]),
    # lfm2
    ("lfm2", "Hm.<|tool_call_start|>[get_weather(city='Rome'), now()]<|tool_call_end|>", "Hm.", TWO),
    ("lfm2", "<|tool_call_start|>[other(a=1)]<|tool_call_end|> Done.", "Done.", [("other", '{"a": 1}')]),
    ("lfm2", f"<|tool_call_start|>[{CALL}, {NOW}]<|tool_call_end|>", "", TWO),
    # deepseek_v32
    ("deepseek_v32", "Hm.\n\n" + dsml(invoke("get_weather", city="Rome") + invoke("now")), "Hm.", TWO),
    ("deepseek_v32", dsml(invoke("other", a="1", b="2").replace('"a"', '"a" string="true"').replace('"b"',
     '"b" string="false"')), "", [("other", '{"a": "1", "b": 2}')]),
    # gemma4
    ("gemma4", 'Hm.<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
     "Hm.", TWO),
    ("gemma4", '<|tool_call>call:a.b{ x : [1, {<|"|>y z<|"|>:<|"|>}"<|"|>}], u:none , w:-2.5e3,v:{}}<tool_call|>', "",
     [("a.b", '{"x": [1, {"y z": "}\\""}], "u": "none", "w": -2.5e3, "v": {}}')]),
    # nemotron, hunyuan
    ("nemotron", f"Hm.\n<TOOLCALL>[{CALL}, {NOW}]</TOOLCALL>", "Hm.", TWO),
    ("hunyuan", f"<tool_calls>[{CALL}, {NOW}]</tool_calls>", "", TWO),
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
    ("gpt_oss", "<|channel|>final<|message|>Hello.<|return|>"),
    ("gpt_oss", "<|channel|>commentary to=python code<|message|>print(1)<|call|>"),
    ("gpt_oss", TO_WEATHER + "no JSON"),
    ("gpt_oss", TO_WEATHER[:-3]),
    ("gpt_oss", " to=functions. none"),
    ("kimi_k2", SECTION + "nothing" + SECTION_END),
    ("kimi_k2", f"{KIMI_BEGIN}functions.now:0{KIMI_ARGUMENTS}5"),
    ("kimi_k2", f"{KIMI_BEGIN}functions.:0{KIMI_ARGUMENTS}{{}}"),
    ("minimax_m2", "<minimax:tool_call>\nnothing</minimax:tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="now">5'),
    ("seed_oss", "<seed:tool_call>\n<function=now"),
    ("lfm2", "[get_weather(city='Rome')]"),
    ("lfm2", "<|tool_call_start|>[get_weather('Rome')]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[{}]<|tool_call_end|>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\n<invoke"),
    ("gemma4", "<|tool_call>call:two words{}"),
    ("gemma4", "<|tool_call>now{}<tool_call|>"),
    ("nemotron", "<TOOLCALL>now</TOOLCALL>"),
    ("hunyuan", "<tool_calls>[]</tool_calls>"),
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
    ("gpt_oss", TO_WEATHER + '{"city": "R', "get_weather", '{"city": "R'),
    ("kimi_k2", f"{SECTION}{KIMI_BEGIN}functions.now:0{KIMI_ARGUMENTS}{{", "now", "{"),
    ("minimax_m2", '<minimax:tool_call><invoke name="get_weather"><parameter name="days">3</parameter>'
     '<parameter name="city">Ro\n', "get_weather", '{"days": 3, "city": "Ro\\n'),
    ("gemma4", '<|tool_call>call:get_weather{days:3,city:<|"|>Ro\n', "get_weather", '{"days": 3, "city": "Ro\\n'),
    ("gemma4", "<|tool_call>call:get_weather{where:{x:[1,", "get_weather", '{"where": {"x": [1, '),
    ("gemma4", "<|tool_call>call:get_weather{exact:tr", "get_weather", '{"exact": tr'),
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
    text = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:}<tool_call|>'
    assert parse("gemma4", text) == parse("gemma4", *text) == Output(content=",days:}<tool_call|>", calls=ONE)
    text = f"<minimax:tool_call>{invoke('get_weather', city='Rome')}oops</minimax:tool_call>"
    assert parse("minimax_m2", text) == Output(content="oops</minimax:tool_call>", calls=ONE)
    nested = "<|tool_call>call:now{a:" + "[" * 9000
    assert parse("gemma4", nested, "]" * 9000) == Output(content="a:" + "[" * 9000 + "]" * 9000, calls=[("now", "{}")])
    text = '<|tool_call>call:now{a:}<tool_call|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>,'
    assert parse("gemma4", text).calls == [("now", "{}"), ("get_weather", '{"city": "Rome"')]
    wrong = '<minimax:tool_call><invoke name="now"><parameter name="a" b>'
    assert parse("minimax_m2", wrong) == Output(content='<parameter name="a" b>', calls=[("now", "{}")])
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
    "gpt_oss": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "assistant",
                "commentary", " to=functions.now", " to=functions.", "json", "final", ROME, "{", " ", "x"],
    "kimi_k2": [SECTION, SECTION_END, KIMI_BEGIN, KIMI_END, KIMI_ARGUMENTS, "functions.now:0", "now", ROME, "{", "\n"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">', "</invoke>",
                   '<parameter name="', "days", '">', "3", "</parameter>", "\n"],
    "seed_oss": ["<seed:tool_call>\n", "</seed:tool_call>", "<function=", "now", ">", "<parameter=", "</parameter>",
                 "</function>", "\n", "x"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "now(", ")", "city=", "'", "Rome", ", ", "{", CALL],
    "deepseek_v32": ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="now">',
                     "</｜DSML｜invoke>", '<｜DSML｜parameter name="', 'a"', ' string="true"', ">", "3",
                     "</｜DSML｜parameter>", "\n"],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:", "now{", "a", ":", '<|"|>', "{", "}", "[", "]", ",", "1", "\n"],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", "[", "]", ",", CALL, CALL[:30], CALL[30:], NOW, "{", '"', "\n"],
    "hunyuan": ["<tool_calls>", "</tool_calls>", "[", "]", ",", CALL, CALL[:30], CALL[30:], NOW, "{", '"', "\n"],
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
     ("llama3_json", '{"name": "now", "type": '), ("gemma4", "<|tool_call>call:a{b:["), ("gpt_oss", "<|start|>a"),
     ("gpt_oss", TO_NOW), ("kimi_k2", SECTION), ("minimax_m2", f"<minimax:tool_call>{invoke('now', a='1')}"),
     ("deepseek_v32", "<｜DSML｜function_calls>"), ("lfm2", "<|tool_call_start|>[")],
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
