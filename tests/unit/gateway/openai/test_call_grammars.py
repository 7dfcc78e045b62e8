"""Grammars of calls: whatever output they allow, the calls that its parser finds follow the schemas of strict tools."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.services.gateway.apis.openai.tools.forced_calls import forced_calls
from antiphon.services.gateway.apis.openai.tools.strict_calls import strict_calls
from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.output_parser import OutputParser
from antiphon.services.gateway.apis.parsers.reasoning_formats import ReasoningFormat
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.settings.output_formats import TOOL_ALIASES
from antiphon.shared.text.grammars import constraint
from antiphon.shared.text.reasoning import ReasoningSplitter
from tests.tokenizer_files import token_id
from tests.unit.gateway.outputs import Output

END, HIDDEN = "<eos>", "<hidden>"
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 6},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
        "where": {"$ref": "#/$defs/Point"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": "string", "maxLength": 30}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": PLACE, "now": EMPTY}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY, "strict": True}},
    {"type": "function", "function": {"name": "free", "parameters": PLACE, "strict": None}},
]
CHOICE = ToolChoice(mode="auto", tools=tuple(TOOLS), places=(0, 1, 2))
NAMES = [name for name in TOOL_FORMATS if name not in TOOL_ALIASES]
ONLY_CALLS = [name for name in NAMES if TOOL_FORMATS[name].only_calls is not None]
"""The formats in which forced calls are written."""
ROME = '{"city": "Rome", "unit": "c", "days": 2}'
PIECES = [
    *("Hello. ", " ", "\n", "{", "[", ";", "}", "]", ")", '"', ",", "<", "weather", "now", "free", "(", '{"a": 1}'),
    *(HIDDEN, "\u00a0", "\x1c", "<think>", "</think>", "function", "Rome", "é", "\\", "null", "true", ROME, "{}"),
    *('{"name": "weather", "arguments": ', '{"name": "weather", "parameters": ', '"city": "R"', "city=", "days=7"),
    *(
        "<function=weather>",
        "<parameter=",
        "</arg_value>",
        "</parameter>",
        "</function>",
        "```json\n",
        "[ARGS]",
        "x" * 9,
    ),
]
"""What the walks try to write, besides the marks of the format."""
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=unit>\nc\n"
    "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "now", "arguments": {{}}}}]',
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ROME}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>c</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "pythonic": '[weather(city="Rome", unit="c", days=2), now()]',
    "gpt_oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ROME}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="unit">c</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n'
    "</invoke>\n</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n"
    "<parameter=unit>c</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
    "lfm2": '<|tool_call_start|>[weather(city="Rome", unit="c", days=2), now()]<|tool_call_end|>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="unit" string="true">c</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,unit:<|"|>c<|"|>,days:2}<tool_call|><|tool_call>call:now{}'
    "<tool_call|>",
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {ROME}}}, {{"name": "now", "arguments": {{}}}}]'
    "</TOOLCALL>",
    "hunyuan": f'<tool_calls>[{{"name": "weather", "arguments": {ROME}}}, {{"name": "now", "arguments": {{}}}}]'
    "</tool_calls>",
}
"""Each format's calls as models write them."""
OTHER_FORMS = {
    "mistral": f"Hm.[TOOL_CALLS]weather{ROME}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": f"Hm.<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>",
    "llama3_json": f'Hm. <|python_tag|>{{"name": "weather", "parameters": {ROME}}}',
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather"
    f"<|channel|>commentary json<|message|>{ROME}",
    "pythonic": 'Hm. <|python_start|>[weather(city="Rome", unit="c", days=2)]<|python_end|>',
}


@cache
def tokenizer(name: str, special: bool) -> Tokenizer:
    """One token for each byte, and the marks of the format as special tokens or not at all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    marks = (*TOOL_FORMATS[name].special_tokens, "<think>", "</think>", HIDDEN) if special else ()
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *marks)])
    return found


@cache
def matching(name: str, special: bool, forced: str = "") -> tuple[LLTokenizer, LLMatcher]:
    """The grammar of strict tools; `forced`: of forced calls, "one" or "several"."""
    vocabulary = tokenizer(name, special)
    tokens = LLTokenizer(vocabulary.to_str(), eos_token=[token_id(vocabulary, END)])
    if forced:
        choice = ToolChoice(mode="required", tools=tuple(TOOLS), places=(0, 1, 2), parallel=forced == "several")
        found = forced_calls(choice, TOOL_FORMATS[name])
        assert found.grammar.kind == "tagged_text"
    else:
        found = strict_calls(CHOICE, TOOL_FORMATS[name], ReasoningFormat())
        assert found is not None
    return tokens, constraint.compile_grammar(found.grammar, tokens)


@pytest.mark.parametrize("name", [*ONLY_CALLS, None])
def test_a_forced_call_does_without_what_cannot_be_enforced_unless_the_tool_is_strict(name: str | None) -> None:
    """`None`: a model whose format of calls is unknown."""
    tool: Any = {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}
    for is_strict in (False, True):
        asked = {"type": "function", "function": {**tool, "strict": is_strict}}
        for choice in (
            ToolChoice(mode="required", tools=(asked,), places=(0,)),
            ToolChoice(mode="named", name="f", tools=(asked,), places=(0,)),
        ):
            found = forced_calls(choice, TOOL_FORMATS[name] if name else None)
            assert found.ignored == (() if is_strict else ("not",))
            assert ('"not"' in found.grammar.text) == is_strict


def ids(name: str, special: bool, text: str, *, spelled: bool = False) -> list[int]:
    """The tokens of a text; `spelled`: without special tokens."""
    vocabulary = tokenizer(name, special)
    parts = list(text) if spelled else [text]
    return [one for part in parts for one in vocabulary.encode(part, add_special_tokens=False).ids]


def parsed(name: str, text: str) -> Output:
    parser = OutputParser(ReasoningSplitter(), TOOL_FORMATS[name].parser(TOOLS))
    output = Output()
    output.add(parser.feed(text))
    output.add(parser.finish())
    output.cut = not parser.has_whole_calls
    return output


def check(name: str, text: str) -> Output:
    """What the parser makes of an output; its whole calls of strict tools must follow their schemas."""
    output = parsed(name, text)
    for function, arguments in output.calls[:-1] if output.cut else output.calls:
        assert function in ("weather", "now", "free"), text
        if function in SCHEMAS:
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
    return output


def walk(name: str, special: bool, seed: int, forced: str = "") -> str:
    """The text of a random output that the grammar allows: pieces where they fit, else any token.

    The text may be cut off, but not forced calls.
    """
    chance = random.Random(f"{name}/{special}/{seed}{forced}")
    tokens, start = matching(name, special, forced)
    matcher, written, wish = start.deep_copy(), list[int](), list[int]()
    pieces = [*PIECES, *TOOL_FORMATS[name].special_tokens, "<tool_call>", "</tool_call>", CALLS[name]]
    end = tokens.eos_token
    while forced or len(written) < 400:
        if not wish:
            wish = ids(name, special, chance.choice(pieces), spelled=chance.random() < 0.3)
        allowed = matcher.compute_bitmask()
        if forced and allowed[end // 8] >> end % 8 & 1 and chance.random() < 0.1:
            break
        fits = bool(allowed[wish[0] // 8] >> wish[0] % 8 & 1)
        if fits and chance.random() < 0.97:
            token = wish.pop(0)
        else:
            wish = []
            token = chance.choice([one for one in range(tokens.vocab_size) if allowed[one // 8] >> one % 8 & 1])
        if token == end:
            break
        assert matcher.consume_token(token)
        written.append(token)
    vocabulary = tokenizer(name, special)
    hidden = {vocabulary.token_to_id(HIDDEN)}
    return vocabulary.decode([one for one in written if one not in hidden], skip_special_tokens=False)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_grammar_allows_calls_of_strict_tools_follow_their_schemas(name: str, special: bool) -> None:
    num_calls = sum(len(check(name, walk(name, special, seed)).calls) for seed in range(40))
    assert num_calls > 5


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("forced", ["one", "several"])
@pytest.mark.parametrize("name", ONLY_CALLS)
def test_whatever_the_grammar_of_forced_calls_allows_is_calls_and_follows_all_schemas(
    name: str, forced: str, special: bool
) -> None:
    counts = list[int]()
    for seed in range(20):
        output = parsed(name, walk(name, special, seed, forced))
        assert not output.content.strip()
        assert not output.cut
        for function, arguments in output.calls:
            jsonschema.validate(json.loads(arguments), {**SCHEMAS, "free": PLACE}[function])
        counts.append(len(output.calls))
    assert min(counts) == 1
    assert max(counts) == 1 if forced == "one" else max(counts) > 1


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ONLY_CALLS)
def test_forced_calls_are_allowed_as_models_write_them_and_nothing_else_is(name: str, special: bool) -> None:
    _, start = matching(name, special, "several")
    for before, after in (("", ""), ("\n\n", "\n")):
        matcher, written = start.deep_copy(), ids(name, special, before + CALLS[name] + after)
        assert matcher.try_consume_tokens(written) == len(written)
        assert matcher.is_accepting()
    for text in ("Hello.", "<think>", END, CALLS[name] + "Hello."):
        written = ids(name, special, text)
        assert start.deep_copy().try_consume_tokens(written) < len(written), text


@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [*CALLS.items(), *OTHER_FORMS.items(), *((name, "Hello <b> [1] {2}; 'x'\n") for name in NAMES)],
)
def test_calls_as_models_write_them_and_free_text_are_allowed(name: str, text: str, spelled: bool) -> None:
    for special in (True, False):
        _, start = matching(name, special)
        for before in ("", "<think>Hm, [a] and {b}.</think>\n\n"):
            written = ids(name, special, before + text, spelled=spelled)
            matcher = start.deep_copy()
            assert matcher.try_consume_tokens(written) == len(written), (before, special)
            assert matcher.is_accepting()
    found = check(name, text).calls
    assert [one for one, _ in found] == (["weather", "now"] if "now" in text else ["weather"] if "Rome" in text else [])
    assert all(json.loads(arguments) == json.loads(ROME) for function, arguments in found if function == "weather")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_do_not_follow_the_schema_cannot_be_written(name: str) -> None:
    _, start = matching(name, True)
    for right, wrong in [("Rome", "R"), ("city", "town"), ("2", "9"), ("weather", "wetter")]:
        written = ids(name, True, CALLS[name].replace(right, wrong, 1))
        assert start.deep_copy().try_consume_tokens(written) < len(written), wrong


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONLY_CALLS and name != "gemma4"])
@pytest.mark.parametrize(
    ("schema", "param", "told"),
    [
        ({"anyOf": [{"type": "object"}]}, "", "the member 'anyOf'"),
        ({"type": "array"}, "", "the schema of an object"),
        ({"type": "object", "required": ["x"]}, "", "requires 'x'"),
        ({"type": "object", "properties": {"x": 5}}, ".properties.x", "must be a JSON Schema"),
    ],
)
def test_schemas_that_a_format_cannot_enforce_are_refused_by_name(
    name: str, schema: Any, param: str, told: str
) -> None:
    refused(name, schema, param, told)


@pytest.mark.parametrize(
    ("name", "schema", "param", "told"),
    [
        ("glm45", {"properties": {"x": {"type": "string", "pattern": "a"}}}, ".properties.x", "the member 'pattern'"),
        ("glm45", {"properties": {"x": {"type": "string", "minLength": "a"}}}, ".properties.x.minLength", "an integer"),
        ("glm45", {"properties": {"x": {"type": "string", "enum": ["</arg_value>"]}}}, ".properties.x", "no value"),
        ("glm45", {"properties": {" x": {}}}, "", "a property whose name"),
        ("qwen3_coder", {"properties": {"a>b": {}}}, "", "a property whose name"),
        ("pythonic", {"properties": {"class": {}}}, "", "no name in Python"),
        ("minimax_m2", {"properties": {'a"b': {}}}, "", "a property whose name"),
        ("gemma4", {"properties": {"a b": {}}}, "", "a property whose name"),
        ("gemma4", {"properties": {"x": {"type": "string", "pattern": "a"}}}, ".properties.x", "the member 'pattern'"),
        ("gemma4", {"properties": {"x": {"type": "array", "maxItems": 2}}}, ".properties.x", "the member 'maxItems'"),
        ("gemma4", {"properties": {"x": {"$ref": "#/y"}}}, ".properties.x", "cannot follow"),
        ("gemma4", {"properties": {"x": {"enum": [[1]]}}}, ".properties.x", "no value"),
        (
            "gemma4",
            {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"$ref": "#/$defs/X"}}},
            ".properties.x",
            "refers to itself",
        ),
    ],
)
def test_properties_that_a_format_cannot_hold_are_refused_by_name(
    name: str, schema: Any, param: str, told: str
) -> None:
    refused(name, {"type": "object", **schema}, param, told)


@pytest.mark.parametrize("name", NAMES)
def test_members_of_a_schema_that_restrict_nothing_are_of_no_consequence(name: str) -> None:
    def grammar(**members: Any) -> Any:
        kinds: tuple[dict[str, Any], ...] = ({"type": "string"}, {"type": "number"}, {"type": "string", "enum": ["a"]})
        properties = {f"x{number}": {**kind, **members} for number, kind in enumerate(kinds)}
        parameters = {"type": "object", "properties": properties, "required": ["x0"], **members}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
        found = strict_calls(ToolChoice(mode="auto", tools=(tool,), places=(0,)), TOOL_FORMATS[name], None)
        assert found is not None
        start = constraint.compile_grammar(found.grammar, matching(name, True)[0])
        return start.compute_bitmask(), start.is_accepting()

    assert grammar(optional=True, title="T", deprecated=True, **{"x-order": 1}) == grammar()


def test_many_arguments_that_may_be_missing_make_no_large_grammar() -> None:
    properties = {f"x{number:02}": {"type": "integer", "description": "d" * 500} for number in range(60)}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    found = strict_calls(ToolChoice(mode="auto", tools=(tool,), places=(0,)), TOOL_FORMATS["pythonic"], None)
    assert found is not None
    assert len(found.grammar.text) < limits.GRAMMAR_BYTES_MAX
    start = constraint.compile_grammar(found.grammar, matching("pythonic", True)[0])
    for text, taken in (
        ("", True),
        ("x00=1", True),
        ("x59=1", True),
        ("x03=1, x04=2,x59=3", True),
        ("x04=1,x03", False),
    ):
        written = ids("pythonic", True, f"[f({text})]")
        assert (start.deep_copy().try_consume_tokens(written) == len(written)) == taken, text


def refused(name: str, schema: Any, param: str, told: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(ServiceError) as error:
        strict_calls(ToolChoice(mode="auto", tools=(TOOLS[2], tool), places=(0, 1)), TOOL_FORMATS[name], None)
    assert error.value.param == "tools[1].function.parameters" + param
    assert told in error.value.message
