"""The grammars of calls in Python's syntax. Pure."""

from collections.abc import Sequence
from keyword import iskeyword

from antiphon.services.gateway.apis.parsers.grammars.pieces import SPACE, CallableTool, any_of, arguments, chain, listed
from antiphon.shared.parameters.tagged_text import Json, Name, Piece, Repeat, Tag, TaggedText
from antiphon.shared.request.checks import refuse


def pythonic(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `PythonicParser`, with values in JSON. Output that begins with a bracket is a call."""
    calls = _python_calls(tools)
    tag = Tag("<|python_start|>", chain(SPACE, calls, SPACE, "<|python_end|>"))
    return TaggedText((tag,), opening=calls, not_first="[")


def lfm2(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Lfm2Parser`, with values in JSON."""
    return TaggedText((Tag("<|tool_call_start|>", chain(SPACE, _python_calls(tools), SPACE, "<|tool_call_end|>")),))


def _python_calls(tools: Sequence[CallableTool]) -> Piece:
    call = any_of(tools, lambda tool: chain(tool.name, "(", _keyword_arguments(tool), ")"))
    return chain("[", SPACE, call, Repeat(chain(",", SPACE, call)), "]")


def _keyword_arguments(tool: CallableTool) -> Piece:
    """Returns the grammar of a call's arguments in Python's syntax: all required ones, then any of the others."""
    if not tool.is_strict:
        one = chain(Name(), "=", Json({}))
        return Repeat(chain(one, Repeat(chain(",", SPACE, one))), at_most_once=True)
    found = arguments(tool)
    for one in found:
        if not one.key.isascii() or not one.key.isidentifier() or iskeyword(one.key):
            refuse(
                tool.path, f"has a property whose name is no name in Python, as this model's calls need: {one.key!r}"
            )
    written = {one.key: chain(one.key, "=", one.json) for one in found}
    return listed(
        [written[one.key] for one in found if one.is_required],
        [written[one.key] for one in found if not one.is_required],
    )
