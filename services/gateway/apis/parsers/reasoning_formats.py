"""The formats of reasoning, by the names of the setting `--reasoning-parser`. Each makes the splitter of an output."""

from dataclasses import dataclass

from antiphon.services.gateway.apis.parsers.output_parser import Splitter
from antiphon.shared.settings.output_formats import REASONING_ALIASES
from antiphon.shared.text import channels
from antiphon.shared.text.channels import ChannelSplitter
from antiphon.shared.text.reasoning import CLOSING, OPENING, ReasoningSplitter, WrappedAnswerSplitter


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A reasoning format: the markers around the reasoning, which precedes the answer.

    `is_implied`: the output begins within the reasoning, unless the prompt ends with the closing mark. `tokens`: the
    special tokens in the marks if these are not tokens themselves.
    """

    opening: str = OPENING
    closing: str = CLOSING
    is_implied: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens that must stay in the output, because they mark its parts."""
        return self.tokens or (self.opening, self.closing)

    @property
    def repeats(self) -> bool:
        """Whether an output may have reasoning anywhere and several times, not only at its beginning."""
        return False

    def splitter(self, *, inside: bool) -> Splitter:
        """Returns the splitter of one output. `inside`: whether the output begins within the reasoning."""
        return ReasoningSplitter(self.opening, self.closing, inside=inside)

    def begins_inside(self, prompt_tail: str) -> bool:
        """Whether the output continues reasoning that has begun in the prompt. `prompt_tail`: the end of the prompt."""
        tail = prompt_tail.rstrip()
        return tail.endswith(self.opening) or (self.is_implied and not tail.endswith(self.closing))

    def is_open_after(self, text: str) -> bool:
        """Whether the reasoning in `text`, the beginning of an answer, has not ended, so the output continues it."""
        return text.rfind(self.opening) > text.rfind(self.closing) or (self.is_implied and self.closing not in text)


@dataclass(frozen=True, slots=True)
class ChannelFormat(ReasoningFormat):
    """The messages of gpt-oss. Its marks are those of a message with reasoning."""

    opening: str = channels.REASONING_HEADER
    closing: str = channels.END
    tokens: tuple[str, ...] = channels.SPECIAL_TOKENS

    @property
    def repeats(self) -> bool:
        """See ReasoningFormat."""
        return True

    def splitter(self, *, inside: bool) -> Splitter:
        """See ReasoningFormat."""
        return ChannelSplitter(inside=inside)


@dataclass(frozen=True, slots=True)
class WrappedFormat(ReasoningFormat):
    """Reasoning between marks, and then the answer between `<answer>` and `</answer>`, which are removed."""

    def splitter(self, *, inside: bool) -> Splitter:
        """See ReasoningFormat."""
        return WrappedAnswerSplitter(ReasoningSplitter(self.opening, self.closing, inside=inside))


_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(is_implied=True),
    "qwen3": ReasoningFormat(),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "gpt_oss": ChannelFormat(),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>")),
    "hunyuan": WrappedFormat(),
}
REASONING_FORMATS = _FORMATS | {alias: _FORMATS[name] for alias, name in REASONING_ALIASES.items()}
