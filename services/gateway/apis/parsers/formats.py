"""The formats of tool calls and of reasoning, by the names of the settings `--tool-call-parser`, `--reasoning-parser`.

Tokenizers announce the same names when they recognise a model's chat template
(`antiphon.shared.text.templates.template_formats`).
"""

from dataclasses import dataclass

from antiphon.services.gateway.apis.parsers import call_grammars
from antiphon.services.gateway.apis.parsers.call_grammars import CallGrammar, OnlyCalls
from antiphon.services.gateway.apis.parsers.json_formats import (
    DeepseekV3Parser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
)
from antiphon.services.gateway.apis.parsers.pythonic import PythonicParser
from antiphon.services.gateway.apis.parsers.tagged_arguments import Glm45Parser, Qwen3CoderParser
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser
from antiphon.shared.text.reasoning import CLOSING, OPENING


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: its parser, and the grammar that constrains calls to the tools' schemas.

    `special_tokens`: tokens of the format that are special tokens of some tokenizers; the text must have them though
    special tokens are skipped. `short_ids`: the chat templates of these models accept only ids of nine letters and
    digits. `only_calls`: the grammar of forced calls; None: forced calls are not written in this format.
    """

    parser: type[ToolParser]
    grammar: CallGrammar
    special_tokens: tuple[str, ...] = ()
    short_ids: bool = False
    only_calls: OnlyCalls | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A reasoning format: the markers around the reasoning, which precedes the answer.

    `is_implied`: the output begins within the reasoning, unless the prompt ends with the closing mark.
    """

    opening: str = OPENING
    closing: str = CLOSING
    is_implied: bool = False

    def begins_inside(self, prompt_tail: str) -> bool:
        """Whether the output continues reasoning that has begun in the prompt. `prompt_tail`: the end of the prompt."""
        tail = prompt_tail.rstrip()
        return tail.endswith(self.opening) or (self.is_implied and not tail.endswith(self.closing))

    def is_open_after(self, text: str) -> bool:
        """Whether the reasoning in `text`, the beginning of an answer, has not ended, so the output continues it."""
        return text.rfind(self.opening) > text.rfind(self.closing) or (self.is_implied and self.closing not in text)


_HERMES = ToolFormat(
    parser=HermesParser,
    grammar=call_grammars.hermes,
    special_tokens=("<tool_call>", "</tool_call>"),
    only_calls=call_grammars.only_hermes,
)
_LLAMA_3 = ToolFormat(
    parser=Llama3JsonParser,
    grammar=call_grammars.llama3_json,
    special_tokens=("<|python_tag|>",),
    only_calls=call_grammars.only_llama3_json,
)
_DEEPSEEK = ToolFormat(
    parser=DeepseekV3Parser,
    grammar=call_grammars.deepseek_v3,
    special_tokens=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    only_calls=call_grammars.only_deepseek_v3,
)
_GLM = ToolFormat(
    parser=Glm45Parser,
    grammar=call_grammars.glm45,
    special_tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen3_coder": ToolFormat(
        parser=Qwen3CoderParser, grammar=call_grammars.qwen3_coder, special_tokens=("<tool_call>", "</tool_call>")
    ),
    "llama3_json": _LLAMA_3,
    "mistral": ToolFormat(
        parser=MistralParser,
        grammar=call_grammars.mistral,
        special_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        short_ids=True,
        only_calls=call_grammars.only_mistral,
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm45": _GLM,
    "glm": _GLM,
    "pythonic": ToolFormat(
        parser=PythonicParser, grammar=call_grammars.pythonic, special_tokens=("<|python_start|>", "<|python_end|>")
    ),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(is_implied=True),
    "qwen3": ReasoningFormat(),
    "glm45": ReasoningFormat(),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
