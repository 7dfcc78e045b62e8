"""What a parser makes of an output: its content, its reasoning and its calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.output_parser import CallParser


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool whose arguments have these types."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("get_weather", city="string", days="integer"), tool("now")]


@dataclass
class Output:
    """The parts of an output, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    cut: bool = False

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(call, name):
                    assert call == len(self.calls)
                    self.calls.append((name, ""))
                case CallArguments(call, text):
                    assert call == len(self.calls) - 1
                    self.calls[-1] = (self.calls[-1][0], self.calls[-1][1] + text)


def parse(name: str, *pieces: str) -> Output:
    """What the format of this name makes of an output that arrives in these pieces."""
    return collect(TOOL_FORMATS[name].parser(TOOLS), *pieces)


def collect(parser: CallParser, *pieces: str) -> Output:
    output = Output()
    for piece in pieces:
        output.add(parser.feed(piece))
    output.add(parser.finish())
    output.cut = parser.is_cut
    return output
