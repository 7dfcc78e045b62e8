"""The base class of the parsers for tool calls. It handles text in pieces, content, and text that may become a call.

A format implements its syntax as a generator, `_call` (see `reader`), which `feed` continues when text arrives. Text
that the generator has read is held back until it is certain that a call has begun, that is, until the name of the call
and the beginning of its arguments are known. If the text is not a call, the held text becomes content.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, joined
from antiphon.services.gateway.apis.parsers.reader import EndedError, NotACallError, Reader, Steps
from antiphon.shared.request.tools import tool_name
from antiphon.shared.text.reasoning import num_begun

_ARGUMENTS = ("arguments", "parameters")
"""Names of the member of a call that holds its arguments."""
_MEMBERS = ("name", "type", "id", *_ARGUMENTS)


class ToolParser(Reader, ABC):
    """Separates the calls of tools from the content of one output.

    `tools`: the checked tools of the request. They are needed for formats in which ordinary text could look like a
    call, and for the types of arguments.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self.num_calls = 0
        """Number of calls that have begun."""
        self._tools = {tool_name(tool): tool for tool in tools}
        self._after_call = False
        """Whether a call has ended and only whitespace has been read since."""
        self._argued = self._complete = True
        self._events: list[Event] = []
        self._steps = self._parse()

    @property
    def is_cut(self) -> bool:
        """Whether the output ends within the arguments of a call. Valid after `finish`."""
        return not self._complete

    def feed(self, text: str) -> list[Event]:
        """Returns the events that are certain after this text."""
        return self._continued(text) if text else []

    def finish(self) -> list[Event]:
        """Returns the rest of the output. `feed` must not be called afterwards."""
        self._ended = True
        return self._continued("")

    @abstractmethod
    def _call(self) -> Steps[None]:
        """Reads content up to the next call, then the call. Raises NotACallError if the text is not a call."""
        ...

    # --- for formats: calls -------------------------------------------------------------------------------------------

    def _content(self, *marks: str) -> Steps[str]:
        """Passes text on as content up to the first of `marks`, reads the mark and returns it.

        Whitespace before the mark is held with it, because it is dropped before a call.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self._text, self._position)
            if found is not None:
                self._say_up_to(found.start())
                self._read(found.end() - self._position)
                return found[0]
            # Nothing but the beginning of a mark stays unread, so that each character is searched only once.
            self._say_up_to(len(self._text) - num_begun(self._text[self._position :], *marks))
            yield from self._more()

    def _begin(self, name: str) -> None:
        """Begins a call. The held text is part of it and is dropped."""
        self._held.clear()
        self._in_call, self._argued, self._complete = True, False, False
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        """Appends text to the arguments of the call."""
        self._argued = True
        self._events.append(CallArguments(self.num_calls - 1, text))

    def _end(self) -> None:
        """Ends the call."""
        if not self._argued:
            self._argue("{}")
        self._in_call, self._after_call, self._complete = False, True, True

    def _cut(self, rest: str) -> None:
        """Called with the unread text if the output ends within the arguments of a call."""
        self._argue(rest)

    def _json_calls(self, *, only_known: bool = False) -> Steps[None]:
        """Reads an object with `name` and `arguments` (or `parameters`), or a list of such objects.

        `only_known`: the text could be any JSON, so it is a call only if the name is that of a tool.
        """
        if not (yield from self._accept("[")):
            yield from self._json_call(only_known)
            return
        while True:
            yield from self._space()
            yield from self._json_call(only_known)
            yield from self._space()
            if not (yield from self._accept(",")):
                yield from self._expect("]")
                return

    def _json_arguments(self) -> Steps[None]:
        """Reads a JSON value and passes it on as the arguments of the call while it arrives.

        A string is taken as the text of the arguments, and null as an empty object.
        """
        yield from self._space()
        as_text = yield from self._next_is('"')
        if not as_text and not (yield from self._next_is("n")):
            yield from self._value(self._argue)
        else:
            parts: list[str] = []
            try:
                yield from self._value(parts.append)
            except EndedError:
                self._argue("".join(parts))
                raise
            self._argue(_arguments_text("".join(parts)))
        self._complete = True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _parse(self) -> Steps[None]:
        try:
            while True:
                if self._after_call:
                    yield from self._space()
                    self._held.clear()
                try:
                    yield from self._call()
                except NotACallError:
                    self._give_up()
                self._held.clear()
        except EndedError:
            rest = self._text[self._position :]
            if not self._complete:
                self._cut(rest)
            elif not self._in_call:
                self._release("".join(self._held) + rest)

    def _give_up(self) -> None:
        """Ends a call whose closing markup is wrong, or passes the held text on as content."""
        if self._in_call:
            self._end()
            return
        self._release("".join(self._held))

    def _release(self, text: str) -> None:
        text = text.lstrip() if self._after_call else text
        if text:
            self._events.append(Content(text))
            self._after_call = False

    def _json_call(self, only_known: bool) -> Steps[None]:
        yield from self._expect("{")
        name = early = ""
        begun = False
        while True:
            yield from self._space()
            if (yield from self._accept("}")):
                break
            key = yield from self._member_key()
            if key == "name" and not name:
                name = _string_value((yield from self._value_text()))
                if not name or (only_known and name not in self._tools):
                    raise NotACallError
            elif key in _ARGUMENTS and name and not begun:
                self._begin(name)
                begun = True
                yield from self._json_arguments()
            elif key in _ARGUMENTS and not begun:
                early = yield from self._value_text()
            elif only_known and key not in _MEMBERS:
                raise NotACallError
            else:
                yield from self._value_text()
            yield from self._space()
            if not (yield from self._accept(",")):
                yield from self._expect("}")
                break
        if not name:
            raise NotACallError
        if not begun:
            self._begin(name)
            self._argue(_arguments_text(early))
        self._end()

    def _member_key(self) -> Steps[str]:
        """Reads a member's key and the colon after it."""
        yield from self._space()
        yield from self._choose('"')
        key = _string_value((yield from self._value_text()))
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        return key

    def _say_up_to(self, end: int) -> None:
        """Passes held text and the text before index `end` on as content, and reads and holds whitespace before it."""
        text = self._text[self._position : end].rstrip()
        if text:
            self._events.append(Content("".join(self._held) + text))
            self._held.clear()
            self._position += len(text)
            self._after_call = False
        if self._position < end:
            self._read(end - self._position)

    def _continued(self, text: str) -> list[Event]:
        self._text = self._text[self._position :] + text
        self._position = 0
        next(self._steps, None)
        events, self._events = joined(self._events), []
        return events


def _string_value(text: str) -> str:
    """Returns the value of a JSON string. Raises NotACallError if the text is not a JSON string."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError:
        raise NotACallError from None


def _arguments_text(text: str) -> str:
    """Returns the arguments of a call whose value is the JSON text `text`; see `_json_arguments`."""
    if text in ("", "null"):
        return "{}"
    try:
        return _string_value(text) if text.startswith('"') else text
    except NotACallError:
        return text
