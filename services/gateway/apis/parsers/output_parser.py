"""The parser of one output: separates the reasoning, then the calls of tools, from the content."""

from collections.abc import Iterable
from typing import Protocol

from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, Reasoning, joined
from antiphon.shared.text.reasoning import Parts


class Splitter(Protocol):
    """Separates reasoning from the rest of the output: a `ReasoningSplitter`, or the one of another format."""

    @property
    def found(self) -> bool:
        """Whether the output has reasoning, even an empty one."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all further text belongs to the answer unchanged."""
        ...

    def feed(self, text: str) -> Parts:
        """Returns the parts that are certain after this text, up to further reasoning after the answer.

        The parts after them are returned for an empty text.
        """
        ...

    def finish(self) -> Parts:
        """Returns the rest of the output, as `feed` does: until there are no parts."""
        ...


class CallParser(Protocol):
    """Separates calls of tools from content: a `ToolParser`, or a `NamedCallParser`."""

    num_calls: int

    @property
    def is_cut(self) -> bool:
        """Whether the output ends within the arguments of a call. Valid after `finish`."""
        ...

    def feed(self, text: str) -> list[Event]:
        """Returns the events that are certain after this text."""
        ...

    def finish(self) -> list[Event]:
        """Returns the rest of the output."""
        ...


class OutputParser:
    """Parses the output of one sequence. Without `reasoning` or `calls`, that part is not separated.

    `show_reasoning`: whether the events include the reasoning. `parallel_calls`: whether they include calls after the
    first.
    """

    def __init__(
        self,
        reasoning: Splitter | None = None,
        calls: CallParser | None = None,
        *,
        show_reasoning: bool = True,
        parallel_calls: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._show_reasoning = show_reasoning
        self._parallel_calls = parallel_calls
        self._num_before_answer = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning and its markers.

        Tokens that arrive together with the end of the reasoning count in proportion to their text.
        """
        return self._num_before_answer if self._reasoning is not None and self._reasoning.found else 0

    @property
    def has_whole_calls(self) -> bool:
        """Whether the output has calls and the last one is complete. Valid after `finish`."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_cut

    def feed(self, text: str, num_tokens: int = 0) -> list[Event]:
        """Returns the events that are certain after this text, which has `num_tokens` tokens."""
        if self._reasoning is None or self._reasoning.is_over:
            return self._content(text)
        events: list[Event] = []
        num_in_answer, parts = 0, self._reasoning.feed(text)
        while any(parts):
            num_in_answer += len(parts.answer)
            events += self._shown(parts)
            parts = self._reasoning.feed("")
        in_answer = round(num_tokens * num_in_answer / len(text)) if num_in_answer and text else 0
        self._num_before_answer += num_tokens - min(in_answer, num_tokens)
        return joined(events)

    def finish(self) -> list[Event]:
        """Returns the rest of the output. `feed` must not be called afterwards."""
        events: list[Event] = []
        while self._reasoning is not None and any(parts := self._reasoning.finish()):
            events += self._shown(parts)
        if self._calls is not None:
            events += self._of_calls(self._calls.finish())
        return joined(events)

    def _shown(self, parts: Parts) -> list[Event]:
        reasoning = parts.reasoning if self._show_reasoning else ""
        return joined([Reasoning(reasoning), *self._content(parts.answer)])

    def _content(self, text: str) -> list[Event]:
        if self._calls is None:
            return [Content(text)] if text else []
        return self._of_calls(self._calls.feed(text))

    def _of_calls(self, events: Iterable[Event]) -> list[Event]:
        if self._parallel_calls:
            return list(events)
        return [event for event in events if not isinstance(event, CallStart | CallArguments) or event.call == 0]
