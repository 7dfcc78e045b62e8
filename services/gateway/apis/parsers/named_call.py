"""Parser for output that consists only of a call's arguments, because `tool_choice` names the function."""

from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Event


class NamedCallParser:
    """Passes the whole output on as the arguments of a call. It has the methods of `ToolParser`."""

    def __init__(self, name: str) -> None:
        self.num_calls = 0
        self.is_cut = False
        self._name = name

    def feed(self, text: str) -> list[Event]:
        """See ToolParser."""
        if not text:
            return []
        events: list[Event] = [] if self.num_calls else [CallStart(0, self._name)]
        self.num_calls = 1
        return [*events, CallArguments(0, text)]

    def finish(self) -> list[Event]:
        """See ToolParser. The output was constrained to JSON, so it is complete unless the maximum length ended it."""
        return []
