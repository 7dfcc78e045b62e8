"""How the answer to a chat request is separated from the model's output: reasoning, calls of tools, content.

`answer_format` chooses the formats from the request, the server's settings and the model's chat template.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from services.gateway.generation import ModelCard
from services.gateway.openai.forced_calls import forced_calls_schema
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.tool_choice import FORCED, ToolChoice, tool_choice
from services.gateway.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from services.gateway.parsers.json_formats import Llama3JsonParser
from services.gateway.parsers.named_call import NamedCallParser
from services.gateway.parsers.output_parser import CallParser, OutputParser
from shared.config import GatewaySettings
from shared.errors import ServiceError
from shared.messages import FinishReason
from shared.request.checks import given, refuse, unsupported
from shared.text.reasoning import ReasoningSplitter

_ID_CHARS, _SHORT_ID_CHARS = 24, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The formats of one request's answer.

    `tool_format` is None if calls are not separated, `reasoning_format` if reasoning is not. `continued`: the text of
    the final message that the output continues, "" if it continues none.
    """

    choice: ToolChoice
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    show_reasoning: bool = True
    parallel_calls: bool = True
    continued: str = ""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens that the output must have."""
        tools = self.tool_format.special_tokens if self.tool_format is not None else ()
        reasoning = self.reasoning_format
        return tools if reasoning is None else (*tools, reasoning.opening, reasoning.closing)

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """The JSON Schema that the output has to match because the request forces calls; None if it does not."""
        return forced_calls_schema(self.choice, parallel=self.parallel_calls) if self.choice.mode in FORCED else None

    def parser(self, prompt_tail: str) -> OutputParser:
        """Returns the parser of one output. `prompt_tail`: the last characters of the prompt."""
        return OutputParser(
            self._splitter(prompt_tail),
            self._call_parser(),
            show_reasoning=self.show_reasoning,
            parallel_calls=self.parallel_calls,
        )

    def call_id(self, request_id: str, choice: int, call: int) -> str:
        """Returns the id of a call of an answer: always the same for the same place."""
        digest = hashlib.sha256(f"{request_id}/{choice}/{call}".encode()).hexdigest()
        if self.tool_format is not None and self.tool_format.short_ids:
            return digest[:_SHORT_ID_CHARS]
        return f"call_{digest[:_ID_CHARS]}"

    def finish_reason(self, reason: FinishReason, parser: OutputParser) -> str:
        """Returns the finish reason to report for an output that has been parsed to its end."""
        if reason != "stop" or not parser.has_whole_calls or self.choice.mode == "named":
            return reason
        return "function_call" if self.choice.legacy else "tool_calls"

    def _call_parser(self) -> CallParser | None:
        """Returns the parser of calls. Forced calls are JSON, whatever the model's own format: see `forced_calls`."""
        match self.choice.mode:
            case "named":
                return NamedCallParser(self.choice.name)
            case "required":
                return Llama3JsonParser(self.choice.tools)
            case _:
                return self.tool_format.parser(self.choice.tools) if self.tool_format is not None else None

    def _splitter(self, prompt_tail: str) -> ReasoningSplitter | None:
        reasoning = self.reasoning_format
        if reasoning is None:
            return None
        inside = reasoning.is_open_after(self.continued) if self.continued else reasoning.begins_inside(prompt_tail)
        return ReasoningSplitter(reasoning.opening, reasoning.closing, inside=inside)


def answer_format(body: ChatBody, card: ModelCard, settings: GatewaySettings) -> AnswerFormat | None:
    """Returns the formats of a request's answer; None if nothing has to be separated. Raises ServiceError.

    The fields of the body are checked as far as `parameters.chat` checks them.
    """
    choice = tool_choice(body)
    if choice.mode in FORCED:
        param = "function_call" if choice.legacy else "tool_choice"
        unsupported(param, f"A '{param}' that forces a call is")
    tool_format = _tool_format(choice, card, settings)
    reasoning_format = _reasoning_format(choice, card, settings)
    if tool_format is None and reasoning_format is None and choice.mode not in FORCED:
        return None
    return AnswerFormat(
        choice=choice,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        show_reasoning=given(body.include_reasoning, True),
        parallel_calls=given(body.parallel_tool_calls, True) and not choice.legacy,
        continued=_continued(body),
    )


def _tool_format(choice: ToolChoice, card: ModelCard, settings: GatewaySettings) -> ToolFormat | None:
    if choice.mode != "auto":
        return None
    param = "function_call" if choice.legacy else "tool_choice"
    if not settings.enable_auto_tool_choice:
        refuse(param, "cannot be 'auto' on this server, which was started with --enable-auto-tool-choice=false")
    name = card.tool_format if settings.tool_call_parser == "auto" else settings.tool_call_parser
    if name == "none":
        return None
    if not name:
        message = (
            f"The chat template of the model '{card.name}' shows no known format of tool calls. Send no tools, set "
            "'tool_choice' to 'none', or start the server with --tool-call-parser."
        )
        raise ServiceError("unsupported_parameter", message, param="functions" if choice.legacy else "tools")
    return TOOL_FORMATS.get(name)


def _reasoning_format(choice: ToolChoice, card: ModelCard, settings: GatewaySettings) -> ReasoningFormat | None:
    """Returns the format of the reasoning; None for forced calls, whose output is JSON from its first token on."""
    if choice.mode in FORCED:
        return None
    name = card.reasoning_format if settings.reasoning_parser == "auto" else settings.reasoning_parser
    return REASONING_FORMATS.get(name)


def _continued(body: ChatBody) -> str:
    content = body.messages[-1].content if body.continue_final_message and body.messages else None
    return content if isinstance(content, str) else ""
