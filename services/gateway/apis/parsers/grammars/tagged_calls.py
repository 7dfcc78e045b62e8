"""The grammars of formats in which each argument of a call has its own tags. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.services.gateway.apis.parsers.grammars.pieces import (
    SPACE,
    STRING_MEMBERS,
    Argument,
    CallableTool,
    arguments,
    chain,
    check_members,
    length,
)
from antiphon.shared.parameters.tagged_text import Choice, Literal, Piece, Raw, Repeat, Tag, TaggedText
from antiphon.shared.request.checks import refuse

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_DSML = "｜DSML｜"


def glm45(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Glm45Parser`."""
    marks = _ArgumentMarks(
        before_key="<arg_key>",
        after_key="</arg_key>",
        before_string=(SPACE, "<arg_value>"),
        before_other=(SPACE, "<arg_value>"),
        after_value="</arg_value>",
    )
    calls = [chain(tool.name, SPACE, _tagged_arguments(tool, marks)) for tool in tools]
    return TaggedText((Tag(_TAG, chain(SPACE, Choice(tuple(calls)), _TAG_END)),))


def qwen3_coder(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Qwen3CoderParser`."""
    marks = _ArgumentMarks(
        before_key="<parameter=",
        after_key=">",
        before_string=("\n",),
        before_other=("\n",),
        before_end="\n",
        after_value="</parameter>",
    )
    return TaggedText((Tag(_TAG, _function_call(tools, marks, _TAG_END)),))


def seed_oss(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `SeedOssParser`."""
    marks = _ArgumentMarks(before_key="<parameter=", after_key=">", after_value="</parameter>")
    return TaggedText((Tag("<seed:tool_call>", _function_call(tools, marks, "</seed:tool_call>")),))


def _function_call(tools: Sequence[CallableTool], marks: "_ArgumentMarks", end: str) -> Piece:
    calls = [chain(tool.name, ">", SPACE, _tagged_arguments(tool, marks)) for tool in tools]
    return chain(SPACE, "<function=", Choice(tuple(calls)), "</function>", SPACE, end)


def minimax_m2(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `MinimaxM2Parser`."""
    marks = _ArgumentMarks(
        before_key='<parameter name="',
        after_key='"',
        before_string=(">",),
        before_other=(">",),
        after_value="</parameter>",
    )
    content = chain(_invocations(tools, marks, '<invoke name="', "</invoke>"), "</minimax:tool_call>")
    return TaggedText((Tag("<minimax:tool_call>", content),))


def deepseek_v32(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `DeepseekV32Parser`. The token that all of its tags have is the mark."""
    marks = _ArgumentMarks(
        before_key=f'<{_DSML}parameter name="',
        after_key='"',
        before_string=(' string="true">',),
        before_other=(' string="false">',),
        after_value=f"</{_DSML}parameter>",
    )
    invocations = _invocations(tools, marks, f'<{_DSML}invoke name="', f"</{_DSML}invoke>")
    return TaggedText((Tag(_DSML, chain("function_calls>", invocations, f"</{_DSML}function_calls>")),))


def _invocations(tools: Sequence[CallableTool], marks: "_ArgumentMarks", begin: str, end: str) -> Piece:
    """Returns the grammar of one or more calls and the whitespace around them."""
    calls = [chain(tool.name, '">', SPACE, _tagged_arguments(tool, marks)) for tool in tools]
    call = chain(begin, Choice(tuple(calls)), end, SPACE)
    return chain(SPACE, call, Repeat(call))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArgumentMarks:
    """The markup around the key and the value of an argument, in formats with tags for each argument.

    `before_string`: what stands between the key and a string, `before_other`: and a value of another type.
    `before_end`: text that ends each value and is not part of the value.
    """

    before_key: str
    after_key: str
    before_string: tuple[Piece | str, ...] = ()
    before_other: tuple[Piece | str, ...] = ()
    before_end: str = ""
    after_value: str


def _tagged_arguments(tool: CallableTool, marks: _ArgumentMarks) -> Piece:
    """Returns the grammar of a call's arguments, each with its own tags. Strings are written without quotes."""

    def argument(key: Piece, between: Sequence[Piece | str], value: Piece) -> Piece:
        return chain(marks.before_key, key, *between, value, SPACE)

    if not tool.is_strict:
        value, key = Raw(marks.after_value, marks.before_end), Raw(marks.after_key)
        betweens = dict.fromkeys((marks.before_string, marks.before_other))
        return Repeat(Choice(tuple(argument(key, between, value) for between in betweens)))
    found: list[Piece] = []
    for one in arguments(tool):
        if marks.after_key in one.key or one.key != one.key.strip() or not one.key:
            refuse(tool.path, f"has a property whose name this model's format of calls cannot hold: {one.key!r}")
        between = marks.before_string if one.schema.get("type") == "string" else marks.before_other
        piece = argument(chain(one.key, marks.after_key), between, _tagged_value(one, marks))
        found.append(piece if one.is_required else Repeat(piece, at_most_once=True))
    return chain(*found)


def _tagged_value(argument: Argument, marks: _ArgumentMarks) -> Piece:
    schema = argument.schema
    if schema.get("type") != "string":
        return chain(SPACE, argument.json, SPACE, marks.after_value)
    path = f"{argument.tool.path}.properties.{argument.key}"
    check_members(schema, STRING_MEMBERS, path)
    least, most = length(schema, "minLength", path, 0), length(schema, "maxLength", path, None)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return Raw(marks.after_value, marks.before_end, least or 0, most)
    fitting = [one for one in values if isinstance(one, str) and one == schema.get("const", one)]
    fitting = [one for one in fitting if len(one) >= (least or 0) and (most is None or len(one) <= most)]
    if not fitting or any(marks.after_value in one for one in fitting):
        refuse(path, "has no value that this model's format of calls can hold")
    return chain(Choice(tuple(map(Literal, fitting))), marks.before_end, marks.after_value)
