"""How the answer to a chat request is separated from the model's output: reasoning, calls of tools, content.

`answer_format` chooses the formats from the request, the server's settings and the model's chat template.
"""

import hashlib
from dataclasses import dataclass

from antiphon.services.gateway.apis.openai.schemas import ChatBody
from antiphon.services.gateway.apis.openai.tools.tool_choice import NO_TOOLS, ToolChoice
from antiphon.services.gateway.apis.parsers.formats import DEFAULT_ID_PATTERN, TOOL_FORMATS, ToolFormat
from antiphon.services.gateway.apis.parsers.json_formats import Llama3JsonParser
from antiphon.services.gateway.apis.parsers.named_call import NamedCallParser
from antiphon.services.gateway.apis.parsers.output_parser import CallParser, OutputParser, Splitter
from antiphon.services.gateway.apis.parsers.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard, ThinkingLimit
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import FinishReason
from antiphon.shared.request.checks import given, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The formats of one request's answer.

    `tool_format` is None if calls are not separated, `reasoning_format` if reasoning is not. `continued`: the text of
    the final message that the output continues, "" if it continues none. `num_earlier_calls`: number of calls in the
    conversation so far.
    """

    choice: ToolChoice
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    show_reasoning: bool = True
    continued: str = ""
    num_earlier_calls: int = 0

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens that must stay in the output, because they mark its parts."""
        tools = self.tool_format.special_tokens if self.tool_format is not None else ()
        reasoning = self.reasoning_format
        return tools if reasoning is None else tuple(dict.fromkeys((*tools, *reasoning.special_tokens)))

    def parser(self, prompt_tail: str) -> OutputParser:
        """Returns the parser of one output. `prompt_tail`: the last characters of the prompt."""
        return OutputParser(
            self._splitter(prompt_tail),
            self._call_parser(),
            show_reasoning=self.show_reasoning,
            parallel_calls=self.choice.parallel,
        )

    def thinking_limit(self, budget: int) -> ThinkingLimit | None:
        """Returns the limit of so many tokens of reasoning; None if reasoning is not separated."""
        reasoning = self.reasoning_format
        if reasoning is None:
            return None
        return ThinkingLimit(
            budget=budget,
            opening=reasoning.opening,
            closing=reasoning.closing,
            begins_inside=self._begins_inside,
            repeats=reasoning.repeats,
        )

    def call_id(self, request_id: str, choice: int, call: int, name: str) -> str:
        """Returns the id of a call of the function `name`, derived from request, choice and index of the call."""
        digest = hashlib.sha256(f"{request_id}/{choice}/{call}".encode()).hexdigest()
        pattern = DEFAULT_ID_PATTERN if self.tool_format is None else self.tool_format.id_pattern
        return pattern.format(digest=digest, name=name, number=self.num_earlier_calls + call)

    def finish_reason(self, reason: FinishReason, parser: OutputParser) -> str:
        """Returns the finish reason to report for an output that has been parsed to its end."""
        if reason != "stop" or not parser.has_whole_calls or self.choice.mode == "named":
            return reason
        return "function_call" if self.choice.legacy else "tool_calls"

    def _call_parser(self) -> CallParser | None:
        """Returns the parser of calls. For the forms of forced calls see `forced_calls`."""
        own = self.tool_format
        if self.choice.is_forced and (own is None or own.only_calls is None):
            named = self.choice.mode == "named"
            return NamedCallParser(self.choice.name) if named else Llama3JsonParser(self.choice.tools)
        return None if own is None else own.parser(self.choice.tools)

    def _splitter(self, prompt_tail: str) -> Splitter | None:
        reasoning = self.reasoning_format
        if reasoning is None:
            return None
        return reasoning.splitter(inside=self._begins_inside(prompt_tail))

    def _begins_inside(self, prompt_tail: str) -> bool:
        assert self.reasoning_format is not None
        if self.continued:
            return self.reasoning_format.is_open_after(self.continued)
        return self.reasoning_format.begins_inside(prompt_tail)


def answer_format(
    body: ChatBody, request: GenerationRequest, choice: ToolChoice, card: ModelCard, settings: GatewaySettings
) -> AnswerFormat | None:
    """Returns the formats of a request's answer; None if nothing has to be separated. Raises ServiceError.

    `request` is the result of `chat.generation_request` for the body, `choice` that of `tool_choice`.
    """
    calls = tool_format(choice, card, settings)
    if not request.output.detokenize:
        return None  # There is no text.
    if choice is not NO_TOOLS and choice.is_forced:
        return AnswerFormat(choice=choice, tool_format=calls, num_earlier_calls=_num_calls(body))
    grammar = request.params.grammar
    if grammar is not None and grammar.kind != "structural_tag":
        return None  # The output has the structure from its first token on, so it has no markers.
    reasoning = reasoning_format(card, settings)
    if calls is None and reasoning is None:
        return None
    return AnswerFormat(
        choice=choice,
        tool_format=calls,
        reasoning_format=reasoning,
        show_reasoning=given(body.include_reasoning, True),
        continued=_continued(body),
        num_earlier_calls=_num_calls(body),
    )


def reasoning_format(card: ModelCard, settings: GatewaySettings) -> ReasoningFormat | None:
    """Returns the model's reasoning format; None if it is unknown, or if reasoning is not to be separated."""
    return REASONING_FORMATS.get(_chosen(settings.reasoning_parser, card.reasoning_format))


def knows_calls(card: ModelCard, settings: GatewaySettings) -> bool:
    """Whether `tool_choice` `auto` is possible: the model's own call format is known."""
    return settings.enable_auto_tool_choice and _chosen(settings.tool_call_parser, card.tool_format) in TOOL_FORMATS


def tool_format(choice: ToolChoice, card: ModelCard, settings: GatewaySettings) -> ToolFormat | None:
    """Returns the model's own format of calls; None if it is unknown and calls are forced, which do not need it.

    Raises ServiceError for `tool_choice` `auto` if the format is unknown.
    """
    if choice.mode == "none":
        return None
    name = _chosen(settings.tool_call_parser, card.tool_format)
    if choice.mode == "auto":
        if not settings.enable_auto_tool_choice:
            reason = "cannot be 'auto' on this server, which was started with --enable-auto-tool-choice=false"
            refuse(choice.param, reason)
        if not name:
            message = (
                f"The chat template of the model '{card.name}' shows no known format of tool calls. Send no tools, set "
                f"'{choice.param}' to 'none', or start the server with --tool-call-parser."
            )
            raise ServiceError("unsupported_parameter", message, param=choice.tools_param)
    return TOOL_FORMATS.get(name)


def _chosen(setting: str, shown: str) -> str:
    """Returns the name of a format: that of the setting or, with `auto`, the one recognised from the chat template."""
    return shown if setting == "auto" else setting


def _continued(body: ChatBody) -> str:
    content = body.messages[-1].content if body.continue_final_message and body.messages else None
    return content if isinstance(content, str) else ""


def _num_calls(body: ChatBody) -> int:
    return sum(len(turn.tool_calls or ()) for turn in body.messages or ())
