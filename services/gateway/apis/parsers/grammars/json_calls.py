"""The grammars of formats in which the arguments of a call are one JSON object. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.services.gateway.apis.parsers.grammars.pieces import SPACE, CallableTool, any_of, calls, chain, json_call
from antiphon.shared.parameters.tagged_text import Choice, Json, Literal, Piece, Repeat, Tag, TaggedText
from antiphon.shared.text import channels
from antiphon.shared.text.channels import RECIPIENT

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_CALLS, _CALL, _KIMI_CALL = "[TOOL_CALLS]", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>"


def hermes(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `HermesParser`."""
    return TaggedText((Tag(_TAG, _hermes_call(tools)),))


def only_hermes(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    return calls(chain(_TAG, _hermes_call(tools)), several)


def _hermes_call(tools: Sequence[CallableTool]) -> Piece:
    return chain(SPACE, any_of(tools, json_call), SPACE, _TAG_END)


@dataclass(frozen=True, slots=True)
class ListedCalls:
    """The grammars of formats with a list of JSON calls between two tags: `HunyuanParser`, `NemotronParser`."""

    begin: str
    end: str

    def grammar(self, tools: Sequence[CallableTool]) -> TaggedText:
        """See `CallGrammar`."""
        return TaggedText((Tag(self.begin, chain(SPACE, _listed_calls(tools, several=True), SPACE, self.end)),))

    def only_calls(self, tools: Sequence[CallableTool], several: bool) -> Piece:
        """See `OnlyCalls`."""
        return chain(self.begin, SPACE, _listed_calls(tools, several=several), SPACE, self.end)


HUNYUAN = ListedCalls("<tool_calls>", "</tool_calls>")
NEMOTRON = ListedCalls("<TOOLCALL>", "</TOOLCALL>")


def _listed_calls(tools: Sequence[CallableTool], *, several: bool) -> Piece:
    return chain("[", SPACE, calls(any_of(tools, json_call), several, ","), SPACE, "]")


def llama3_json(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `Llama3JsonParser`. Output that begins with a brace or bracket is a call."""
    calls = only_llama3_json(tools, True)
    return TaggedText((Tag("<|python_tag|>", chain(SPACE, calls)),), opening=calls, not_first="{[;")


def only_llama3_json(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    return calls(any_of(tools, lambda tool: json_call(tool, "parameters")), several, ";")


def mistral(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `MistralParser`, in both forms."""
    return TaggedText((Tag(_CALLS, _mistral_calls(tools, several=True)),))


def only_mistral(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    return calls(chain(_CALLS, _mistral_calls(tools, several=several)), several)


def _mistral_calls(tools: Sequence[CallableTool], *, several: bool) -> Piece:
    listed = _listed_calls(tools, several=several)
    named = any_of(tools, lambda tool: chain(tool.name, Repeat(Literal("[ARGS]"), at_most_once=True), tool.arguments))
    return chain(SPACE, Choice((listed, named)))


def deepseek_v3(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `DeepseekV3Parser`, in both forms."""
    return TaggedText((Tag(_CALL, _deepseek_call(tools)),))


def only_deepseek_v3(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    begin, end = (Repeat(Literal(f"<｜tool▁calls▁{name}｜>"), at_most_once=True) for name in ("begin", "end"))
    return chain(begin, calls(chain(_CALL, _deepseek_call(tools)), several), end)


def _deepseek_call(tools: Sequence[CallableTool]) -> Piece:
    separator, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def call(tool: CallableTool) -> Piece:
        block = chain("function", separator, tool.name, "\n```json\n", tool.arguments, "\n```", end)
        return Choice((block, chain(tool.name, separator, tool.arguments, end)))

    return any_of(tools, call)


def kimi_k2(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `KimiK2Parser`."""
    return TaggedText((Tag(_KIMI_CALL, any_of(tools, _kimi_call)),))


def only_kimi_k2(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    begin, end = (f"<|tool_calls_section_{name}|>" for name in ("begin", "end"))
    return chain(begin, calls(chain(_KIMI_CALL, any_of(tools, _kimi_call)), several), end)


def _kimi_call(tool: CallableTool) -> Piece:
    number = Json({"type": "integer", "minimum": 0, "maximum": 9999})
    name = chain("functions.", tool.name, ":", number)
    return chain(name, "<|tool_call_argument_begin|>", tool.arguments, "<|tool_call_end|>")


def gpt_oss(tools: Sequence[CallableTool]) -> TaggedText:
    """Returns the grammar of `GptOssParser`. The recipient is the mark: no call is without it."""
    return TaggedText((Tag(RECIPIENT[1:], any_of(tools, lambda tool: _gpt_oss_call(tool, channels.CHANNEL))),))


def only_gpt_oss(tools: Sequence[CallableTool], several: bool) -> Piece:
    """See `OnlyCalls`."""
    call = chain(f"{channels.CHANNEL}commentary{RECIPIENT}", any_of(tools, _gpt_oss_call))
    return chain(call, Repeat(chain(f"{channels.END}{channels.START}assistant", call))) if several else call


def _gpt_oss_call(tool: CallableTool, channel: str = "") -> Piece:
    """Returns what follows the recipient. `channel`: the token before a channel that may follow it."""
    in_channel = [Repeat(chain(channel, "commentary"), at_most_once=True)] if channel else []
    constrained = chain(Repeat(Literal(" "), at_most_once=True), channels.CONSTRAIN, "json")
    kind = Repeat(Choice((Literal(" json"), constrained)), at_most_once=True)
    return chain(tool.name, *in_channel, kind, channels.MESSAGE, tool.arguments)
