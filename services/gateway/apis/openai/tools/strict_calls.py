"""The constraint on the output if a request has strict functions and `tool_choice` is `auto`. Pure.

The output is in the model's own call format. Text outside of calls is free; every call names a function of the request,
and the arguments of a strict function follow its JSON Schema.
"""

from antiphon.services.gateway.apis.openai.tools.tool_choice import ToolChoice
from antiphon.services.gateway.apis.parsers.formats import ToolFormat
from antiphon.services.gateway.apis.parsers.grammars.pieces import callable_tools
from antiphon.services.gateway.apis.parsers.reasoning_formats import ReasoningFormat
from antiphon.shared.parameters.tagged_text import Chain, Tag, TaggedText
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.structured import Constraint, tagged_constraint


def strict_calls(
    choice: ToolChoice, tool_format: ToolFormat | None, reasoning_format: ReasoningFormat | None
) -> Constraint | None:
    """Returns the constraint; None if no function is strict, or if `tool_choice` is not `auto`.

    Raises ServiceError that names the function, for a schema that cannot be enforced in the model's format of calls.
    """
    if choice.strict_param is None or choice.mode != "auto":
        return None
    if tool_format is None:
        refuse(choice.strict_param, "must be false on this server, which reads no calls (--tool-call-parser=none)")
    grammar = tool_format.grammar(callable_tools(choice.tools, choice.places, choice.schema_param))
    if reasoning_format is not None and grammar.opening is not None:
        grammar = _after_reasoning(grammar, reasoning_format)
    return tagged_constraint(grammar, choice.schema_param)


def _after_reasoning(grammar: TaggedText, reasoning: ReasoningFormat) -> TaggedText:
    """Returns the grammar of output in which calls without a marker may also follow the reasoning."""
    ends = Tag(reasoning.closing, Chain(()))
    return TaggedText((*grammar.tags, ends), grammar.opening, grammar.not_first)
