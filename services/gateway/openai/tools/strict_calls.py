"""What output must match if a request has strict functions and leaves it to the model whether it calls one. Pure.

The output is in the model's own format of calls. Its text stays free; the arguments of a call of a strict function
follow the function's JSON Schema, and calls name functions of the request.
"""

from services.gateway.openai.tools.tool_choice import ToolChoice
from services.gateway.parsers.call_grammars import callable_tools
from services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from shared.parameters.tagged_text import Chain, Tag, TaggedText
from shared.request.checks import refuse
from shared.request.structured import Constraint, tagged_constraint


def strict_calls(
    choice: ToolChoice, tool_format: ToolFormat | None, reasoning_format: ReasoningFormat | None
) -> Constraint | None:
    """Returns the constraint of the output; None if no function is strict, or none may be called by the model's choice.

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
    """Returns the grammar of output in which calls without a mark may also stand behind the reasoning."""
    ends = Tag(reasoning.closing, Chain(()))
    return TaggedText((*grammar.tags, ends), grammar.opening, grammar.not_first)
