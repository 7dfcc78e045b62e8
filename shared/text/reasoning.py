"""Separates a model's reasoning, the text in `<think>…</think>` at the start, from its answer. Pure.

Used by the gateway, for whole and streamed answers, and by the offline `LLM`.
"""

from typing import Literal, NamedTuple

OPENING, CLOSING = "<think>", "</think>"
"""The markers that most models write around their reasoning."""


class Parts(NamedTuple):
    """New text of the reasoning, and new text of the answer after it."""

    reasoning: str
    answer: str


class ReasoningSplitter:
    """Splits one output that arrives in pieces. How it is cut into pieces does not change the result.

    `opening` and `closing` mark the reasoning. `inside`: the output begins within the reasoning, because the prompt
    ends with the opening mark. Whitespace before the opening mark and line breaks at the edges of both parts are
    dropped. If the output does not begin with reasoning, the whole output is the answer.
    """

    def __init__(self, opening: str = OPENING, closing: str = CLOSING, *, inside: bool = False) -> None:
        self.found = inside
        """Whether the output has reasoning, even an empty one."""
        self._opening, self._closing, self._inside = opening, closing, inside
        self._state: Literal["start", "reasoning", "gap", "answer"] = "start"
        self._text = ""
        self._begun = False

    @property
    def in_answer(self) -> bool:
        """Whether all further text belongs to the answer."""
        return self._state in ("gap", "answer")

    @property
    def is_over(self) -> bool:
        """Whether all further text belongs to the answer unchanged."""
        return self._state == "answer"

    def feed(self, text: str) -> Parts:
        """Returns the parts that are certain after this text."""
        if self._state == "answer":
            return Parts("", text)
        self._text += text
        return self._split(ended=False)

    def finish(self) -> Parts:
        """Returns the rest of the output."""
        return self._split(ended=True)

    def _split(self, *, ended: bool) -> Parts:
        if self._state == "start" and not self._leave_start(ended):
            return Parts("", "")
        reasoning = self._reasoning(ended) if self._state == "reasoning" else ""
        answer = ""
        if self._state == "gap":
            self._text = self._text.lstrip("\n")
            self._state = "answer" if self._text else "gap"
        if self._state == "answer":
            answer, self._text = self._text, ""
        return Parts(reasoning, answer)

    def _leave_start(self, ended: bool) -> bool:
        """Determines whether the output begins with reasoning. Returns False if that is not certain yet."""
        start = self._text.lstrip()
        if start.startswith(self._opening):
            self._text, self._state, self.found = start[len(self._opening) :], "reasoning", True
        elif not ended and self._opening.startswith(start):
            return False
        else:
            self._state = "reasoning" if self._inside else "answer"
        return True

    def _reasoning(self, ended: bool) -> str:
        before, closed, after = self._text.partition(self._closing)
        if closed:
            self._text, self._state = after, "gap"
        else:
            held = 0 if ended else num_begun(before, self._closing)
            before = before[: len(before) - held]
        shown = before.rstrip("\n")
        if not closed:
            self._text = "" if ended else self._text[len(shown) :]
        if not self._begun:
            shown = shown.lstrip("\n")
            self._begun = bool(shown)
        return shown


class WrappedAnswerSplitter:
    """Splits one output whose answer is between `<answer>` and `</answer>`, which are removed if they are there.

    `reasoning` separates the reasoning before the answer.
    """

    def __init__(self, reasoning: ReasoningSplitter) -> None:
        self._reasoning = reasoning
        self._answer = ReasoningSplitter("<answer>", "</answer>")

    @property
    def found(self) -> bool:
        """Whether the output has reasoning, even an empty one."""
        return self._reasoning.found

    @property
    def is_over(self) -> bool:
        """Whether all further text belongs to the answer unchanged."""
        return self._reasoning.is_over and self._answer.is_over

    def feed(self, text: str) -> Parts:
        """Returns the parts that are certain after this text."""
        parts = self._reasoning.feed(text)
        return Parts(parts.reasoning, "".join(self._answer.feed(parts.answer)) if parts.answer else "")

    def finish(self) -> Parts:
        """Returns the rest of the output."""
        parts = self._reasoning.finish()
        answer = "".join(self._answer.feed(parts.answer)) if parts.answer else ""
        return Parts(parts.reasoning, answer + "".join(self._answer.finish()))


def num_begun(text: str, *marks: str) -> int:
    """Returns the length of the longest suffix of the text that is an incomplete beginning of a mark, such as a tag."""
    longest = 0
    for mark in marks:
        start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while start >= 0 and not mark.startswith(text[start:]):
            start = text.find(mark[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
