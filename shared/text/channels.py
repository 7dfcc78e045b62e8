"""Separates the reasoning of gpt-oss from the rest of an output. Pure.

The output is a sequence of messages: a header, `<|message|>`, a text, and `<|end|>`, `<|call|>` or `<|return|>`. The
header names a channel: `analysis` is the reasoning; `final` and `commentary` are for the user. A header with a
recipient (`to=functions.get_weather`) makes the message a call. Messages of the user's channels are returned without
their headers and calls with them, as the parser of calls reads them.
"""

import re
from typing import Literal

from antiphon.shared.text.reasoning import Parts, num_begun

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
SPECIAL_TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
REASONING_HEADER = f"{CHANNEL}analysis{MESSAGE}"
RECIPIENT = " to=functions."

_HEADER_CHARS_MAX = 512
"""A longer text is no header. Bounds the text that is held and read again when more arrives."""
_SPACE = re.compile(r"\s+")
_WORDS = r"[\w.= -]*"
_HEADER = re.compile("".join([_WORDS, *(f"(?:{re.escape(mark)}{_WORDS})?" for mark in (START, CHANNEL, CONSTRAIN))]))
"""Matches each header, and each beginning of a header that does not end within a special token."""
_CUT = re.compile(
    rf"(?:{re.escape(START)}\w*)?(?: to=[\w.-]*)?"
    rf"(?:{re.escape(CHANNEL)}\w*(?: to=[\w.-]*)? ?)?(?:{re.escape(CONSTRAIN)}\w*)?"
)
"""Matches the beginnings of the headers that models write."""
_BORDERS = (START, CHANNEL, END, CALL, RETURN)
_BEGIN = re.compile("|".join(map(re.escape, (START, CHANNEL))))
_BORDER = re.compile("|".join(map(re.escape, _BORDERS)))


class ChannelSplitter:
    """Splits one output that arrives in pieces, as `ReasoningSplitter` does for other models.

    The end of the prompt may have begun the first message. `inside`: the prompt ends with the header of reasoning.
    Messages of one kind are separated by a line break. Text that is not in a message is part of the answer, and so is
    what looks like a header and is none; an incomplete header at the end of the output is dropped.
    """

    is_over = False
    """The answer may be followed by further reasoning."""

    def __init__(self, *, inside: bool = False) -> None:
        self.found = inside
        """Whether the output has reasoning, even an empty one."""
        self._state: Literal["start", "header", "body", "between"] = "body" if inside else "start"
        self._kind: Literal["reasoning", "answer", "call"] = "reasoning" if inside else "answer"
        self._text = ""
        self._at = 0
        """Index in `_text` of the first character that has not been handled."""
        self._parts: dict[str, list[str]] = {"reasoning": [], "answer": []}
        self._said: set[str] = set()
        """The kinds of messages that have had text."""
        self._is_new = False
        """Whether the message has had no text."""

    @property
    def _turns_back(self) -> bool:
        """Whether reasoning comes next, and text of the answer before it has not been returned."""
        return self._state == "body" and self._kind == "reasoning" and bool(self._parts["answer"])

    def feed(self, text: str) -> Parts:
        """Returns the parts that are certain after this text, up to further reasoning after the answer.

        The parts after them are returned for an empty text.
        """
        self._text += text
        return self._split(ended=False)

    def finish(self) -> Parts:
        """Returns the rest of the output, as `feed` does: until there are no parts."""
        return self._split(ended=True)

    def _split(self, *, ended: bool) -> Parts:
        steps = {"start": self._start, "header": self._header, "body": self._body, "between": self._between}
        while self._at < len(self._text) and not self._turns_back and steps[self._state](ended):
            pass
        self._text, self._at = self._text[self._at :], 0
        parts = Parts("".join(self._parts["reasoning"]), "".join(self._parts["answer"]))
        for each in self._parts.values():
            each.clear()
        return parts

    # Each step handles the text in one state. It returns False if it needs more text.

    def _start(self, ended: bool) -> bool:
        """Determines whether the output begins with a header, with or without its first token."""
        start = self._text.lstrip(" ")
        first = (START, CHANNEL, MESSAGE, RECIPIENT[1:])
        if not ended and any(mark.startswith(start) for mark in first):
            return False
        self._state = "header" if start.startswith(first) else "body"
        return True

    def _header(self, ended: bool) -> bool:
        longest = self._at + _HEADER_CHARS_MAX + len(MESSAGE)
        end = self._text.find(MESSAGE, self._at, longest)
        if end >= 0 and _HEADER.fullmatch(self._text, self._at, end):
            self._begin(self._text[self._at : end])
            return True
        header = self._text[self._at : longest]
        known = header[: len(header) - num_begun(header, *SPECIAL_TOKENS)]
        if end >= 0 or len(self._text) >= longest or not _HEADER.fullmatch(known):
            self._no_header()
        elif not ended:
            return False
        elif _CUT.fullmatch(known):
            self._at = len(self._text)
        else:
            self._no_header()
        return True

    def _begin(self, header: str) -> None:
        is_reasoning = f"{CHANNEL}analysis" in header
        is_call = " to=" in f" {header}" and (not is_reasoning or RECIPIENT in f" {header}")
        self._kind = "call" if is_call else "reasoning" if is_reasoning else "answer"
        self._state, self._is_new = "body", not is_call
        self.found = self.found or self._kind == "reasoning"
        self._at += len(header) + len(MESSAGE)
        if is_call:
            self._say(header + MESSAGE)

    def _no_header(self) -> None:
        """Passes the token that looked like the beginning of a header on, and the text after it."""
        begin = _BEGIN.match(self._text, self._at)
        self._state, self._kind, self._is_new = "body", "answer", False
        self._say_up_to(self._at if begin is None else begin.end())

    def _body(self, ended: bool) -> bool:
        borders = _BEGIN if self._kind == "call" else _BORDER
        found = borders.search(self._text, self._at)
        if found is None:
            self._say_up_to(len(self._text) - (0 if ended else num_begun(self._text[self._at :], *_BORDERS)))
            return False
        self._say_up_to(found.start())
        if found[0] in (START, CHANNEL):
            self._state = "header"
        else:
            self._at, self._state = found.end(), "between"
        return True

    def _between(self, ended: bool) -> bool:
        """Determines whether another message begins after the end of one."""
        space = _SPACE.match(self._text, self._at)
        self._at = self._at if space is None else space.end()
        beginning = self._text[self._at : self._at + max(map(len, _BORDERS)) + 1]
        if not beginning or (not ended and any(mark.startswith(beginning) for mark in _BORDERS)):
            return False
        border = _BORDER.match(beginning)
        if border is None:
            self._state, self._kind, self._is_new = "body", "answer", True
        elif border[0] in (START, CHANNEL):
            self._state = "header"
        else:
            self._at += len(border[0])
        return True

    def _say_up_to(self, end: int) -> None:
        self._say(self._text[self._at : end])
        self._at = end

    def _say(self, text: str) -> None:
        if not text:
            return
        kind = "reasoning" if self._kind == "reasoning" else "answer"
        if self._is_new and kind in self._said:
            self._parts[kind].append("\n")
        self._is_new = False
        if self._kind != "call":
            self._said.add(kind)
        self._parts[kind].append(text)
