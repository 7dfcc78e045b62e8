"""Reads text that arrives in pieces from front to back, as if it were whole.

The methods are generators: they yield when they need text that has not arrived, and return what they have read.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: yields when it needs more text, and returns its result."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^\s,{}\[\]\"<]*")


class NotACallError(Exception):
    """Raised if a text that began like a call is not a call in this format."""


class EndedError(Exception):
    """Raised if the output ends where the parser needs more text."""


class TextReader:
    """Reads the text of one output."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        """Index in `_text` of the first character that has not been read."""
        self._ended = False
        """Whether `_text` is all that will arrive."""

    def _space(self) -> Steps[None]:
        """Reads whitespace."""
        yield from self._match(_SPACE)

    def _name(self) -> Steps[str]:
        """Reads a function's name and returns it. Raises NotACallError if there is none."""
        name = yield from self._match(_NAME)
        if not name:
            raise NotACallError
        return name

    def _next_is(self, text: str) -> Steps[bool]:
        """Returns whether the next text is `text`, without reading it."""
        while not self._text.startswith(text, self._position):
            if not text.startswith(self._beginning(len(text))) or self._ended:
                return False
            yield from self._more()
        return True

    def _accept(self, text: str) -> Steps[bool]:
        """Reads `text` if it comes next. Returns whether it did."""
        found = yield from self._next_is(text)
        if found:
            self._read(len(text))
        return found

    def _choose(self, *texts: str) -> Steps[str]:
        """Returns which of the texts comes next, without reading it. Raises NotACallError if none does."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._position):
                    return text
            if not any(text.startswith(self._beginning(len(text))) for text in texts):
                raise NotACallError
            yield from self._more()

    def _expect(self, text: str) -> Steps[None]:
        """Reads `text`. Raises NotACallError if it does not come next."""
        yield from self._choose(text)
        self._read(len(text))

    def _until(self, mark: str) -> Steps[str]:
        """Reads text up to and including `mark` and returns it without the mark. A call must have begun."""
        parts: list[str] = []
        try:
            while (place := self._text.find(mark, self._position)) < 0:
                parts.append(self._read(max(0, len(self._text) - self._position - len(mark) + 1)))
                yield from self._more()
        except EndedError:
            self._text, self._position = "".join(parts) + self._text[self._position :], 0
            raise
        parts.append(self._read(place + len(mark) - self._position)[: -len(mark)])
        return "".join(parts)

    def _value(self, keep: Callable[[str], None]) -> Steps[None]:
        """Reads a JSON value, without validating its content, and calls `keep` with each piece of its text."""
        depth = 0
        while True:
            yield from self._need(1)
            mark = self._text[self._position]
            if mark == '"':
                yield from self._string(keep)
            elif mark in "{[":
                depth += 1
                keep(self._read(1))
            elif mark in "}]":
                if not depth:
                    raise NotACallError
                depth -= 1
                keep(self._read(1))
            elif depth:
                found = _BETWEEN.match(self._text, self._position)
                assert found is not None
                keep(self._read(len(found[0])))
                continue
            else:
                scalar = yield from self._match(_SCALAR)
                if not scalar:
                    raise NotACallError
                keep(scalar)
            if not depth:
                return

    def _value_text(self) -> Steps[str]:
        """Reads a JSON value and returns its text."""
        parts: list[str] = []
        yield from self._value(parts.append)
        return "".join(parts)

    def _string(
        self, keep: Callable[[str], None], quote: str = '"', inner: "re.Pattern[str]" = _IN_STRING
    ) -> Steps[None]:
        """Reads a string with its quotes. `inner` matches text without the quote and backslashes."""
        keep(self._read(1))
        while True:
            found = inner.match(self._text, self._position)
            assert found is not None
            keep(self._read(len(found[0])))
            yield from self._need(1)
            mark = self._text[self._position]
            if mark == quote:
                keep(self._read(1))
                return
            if mark == "\\":
                yield from self._need(2)
                keep(self._read(2))

    def _match(self, pattern: "re.Pattern[str]") -> Steps[str]:
        """Reads and returns the longest match of `pattern`, which must match the empty text and each prefix."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._position)
            assert found is not None
            parts.append(self._read(len(found[0])))
            if self._position < len(self._text) or self._ended:
                return "".join(parts)
            yield from self._more()

    def _beginning(self, count: int) -> str:
        """Returns the first characters of the text that has not been read, at most `count`."""
        return self._text[self._position : self._position + count]

    def _need(self, count: int) -> Steps[None]:
        while len(self._text) - self._position < count:
            yield from self._more()

    def _more(self) -> Steps[None]:
        if self._ended:
            raise EndedError
        yield

    def _read(self, count: int) -> str:
        """Reads text."""
        text = self._text[self._position : self._position + count]
        self._position += count
        return text
