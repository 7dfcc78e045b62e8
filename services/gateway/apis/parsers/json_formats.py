"""Formats in which a call is a JSON object, or a name followed by a JSON object."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.services.gateway.apis.parsers.reader import Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3. The end tag may be missing."""

    def _call(self) -> Steps[None]:
        yield from self._content("<tool_call>")
        yield from self._space()
        yield from self._json_calls()
        yield from self._space()
        yield from self._accept("</tool_call>")


class Llama3JsonParser(ToolParser):
    """`{"name": …, "parameters": {…}}` at the beginning of the output, several separated by `;`: Llama 3.1 and later.

    `<|python_tag|>` may stand before the first call. Without this tag the text could be any JSON, so only names of
    the request's tools make it a call. A list of objects is read as well.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._may_begin = True

    def _call(self) -> Steps[None]:
        if not self._may_begin:
            yield from self._content(self._TAG)
            yield from self._space()
            yield from self._json_calls()
        else:
            self._may_begin = False
            yield from self._space()
            tagged = yield from self._accept(self._TAG)
            yield from self._space()
            yield from self._json_calls(only_known=not tagged)
        yield from self._space()
        self._may_begin = (yield from self._accept(";")) or (yield from self._next_is("{"))


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, with newer tokenizers `[TOOL_CALLS]name[ARGS]{…}` for each."""

    def _call(self) -> Steps[None]:
        yield from self._content("[TOOL_CALLS]")
        yield from self._space()
        if (yield from self._next_is("[")) or (yield from self._next_is("{")):
            yield from self._json_calls()
            return
        name = yield from self._name()
        if (yield from self._accept("[CALL_ID]")):
            yield from self._name()
        yield from self._accept("[ARGS]")
        yield from self._space()
        yield from self._choose("{")
        self._begin(name)
        yield from self._json_arguments()
        self._end()


class DeepseekV3Parser(ToolParser):
    """DeepSeek V3 and R1 (`function`, a separator, the name, a JSON code block) and V3.1 (name, separator, JSON)."""

    _CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    _SEPARATOR = "<｜tool▁sep｜>"

    def _call(self) -> Steps[None]:
        if (yield from self._content(self._CALLS_BEGIN, self._CALL_BEGIN)) == self._CALLS_BEGIN:
            yield from self._space()
            yield from self._expect(self._CALL_BEGIN)
        name = yield from self._name()
        yield from self._expect(self._SEPARATOR)
        in_block = name == "function" and not (yield from self._next_is("{"))
        if in_block:
            name = yield from self._name()
            yield from self._space()
            yield from self._expect("```json")
            yield from self._space()
        yield from self._choose("{")
        self._begin(name)
        yield from self._json_arguments()
        self._end()
        yield from self._space()
        if in_block:
            yield from self._accept("```")
        yield from self._accept(self._CALL_END)
        yield from self._space()
        yield from self._accept(self._CALLS_END)
