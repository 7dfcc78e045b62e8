"""Calls as messages with a recipient, the format of gpt-oss. The messages are described in `shared.text.channels`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.services.gateway.apis.parsers.reader import NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser
from antiphon.shared.text.channels import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, RETURN, START

_ENDS = (CALL, END, RETURN)
_WORDS = re.compile(r"[\w.= -]*")
_FUNCTION = re.compile(rf"(?:^|\s){re.escape(RECIPIENT[1:])}([\w-]+)")


class GptOssParser(ToolParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`: gpt-oss.

    The recipient may also stand before the channel, behind `<|start|>assistant`. The prompt ends with these, so a
    recipient at the beginning of the output begins a call as well. A message without arguments has none.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._may_begin = True

    def _call(self) -> Steps[None]:
        if self._may_begin:
            self._may_begin = False
            yield from self._space()
            yield from self._choose(RECIPIENT[1:])
        else:
            yield from self._content(START, CHANNEL)
        name = yield from self._header()
        yield from self._space()
        has_arguments = (yield from self._choose("{", *_ENDS)) == "{"
        self._begin(name)
        if has_arguments:
            yield from self._json_arguments()
        self._end()
        yield from self._space()
        for mark in _ENDS:
            if (yield from self._accept(mark)):
                break

    def _header(self) -> Steps[str]:
        """Reads the rest of a message's header and returns the name of the function that it calls."""
        name = ""
        while True:
            found = _FUNCTION.search((yield from self._match(_WORDS)))
            name = found[1] if found is not None else name
            mark = yield from self._choose(CHANNEL, CONSTRAIN, MESSAGE)
            if mark == MESSAGE and not name:
                raise NotACallError
            yield from self._expect(mark)
            if mark == MESSAGE:
                return name
