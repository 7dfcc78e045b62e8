"""Formats in which a call is a JSON object, or a name followed by a JSON object."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.services.gateway.apis.parsers.reader import NotACallError, Steps
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3. The end tag may be missing."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def _call(self) -> Steps[None]:
        yield from self._content(self._BEGIN)
        yield from self._space()
        yield from self._json_calls()
        yield from self._space()
        yield from self._accept(self._END)


class HunyuanParser(HermesParser):
    """`<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>`: Hunyuan A13B."""

    _BEGIN, _END = "<tool_calls>", "</tool_calls>"


class NemotronParser(HermesParser):
    """`<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>`: Nemotron Nano 2 and Nemotron Super 1.5."""

    _BEGIN, _END = "<TOOLCALL>", "</TOOLCALL>"


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


class KimiK2Parser(ToolParser):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section: Kimi K2."""

    _SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def _call(self) -> Steps[None]:
        if (yield from self._content(self._SECTION, self._BEGIN)) == self._SECTION:
            yield from self._space()
            yield from self._expect(self._BEGIN)
        yield from self._space()
        name = (yield from self._name()).removeprefix("functions.").partition(":")[0]
        if not name:
            raise NotACallError
        yield from self._space()
        yield from self._expect(self._ARGUMENTS)
        yield from self._space()
        yield from self._choose("{")
        self._begin(name)
        yield from self._json_arguments()
        self._end()
        yield from self._space()
        yield from self._accept(self._END)
        yield from self._space()
        yield from self._accept(self._SECTION_END)
