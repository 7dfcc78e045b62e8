"""What the Responses API asks of the guest that runs tools in the server (`ResponseEndpoints.server_tools`)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request

from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.serving import Detached
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.input_items import Input
from antiphon.services.gateway.guests.responses.response_object import ResponseObject
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.shared.request.conversation import Turn

StepContext = Callable[[ResponsesBody, Sequence[Turn]], RequestContext]
"""Returns the context of one model step: its body, and the conversation before it. Raises ServiceError."""


class TurnPlan(Protocol):
    """A checked request whose tools the server runs."""

    body: ResponsesBody
    """The body as the response shows it: without secrets."""
    first: ResponsesBody
    """The body by which the request is checked before its tools are known: without them."""

    def encoder(self, described: ResponseObject, context: RequestContext) -> ResponseEncoder:
        """Returns the encoder of the response, which `run` uses. Called once."""
        ...

    def run(
        self,
        request: Request,
        given: Input,
        turns: Sequence[Turn],
        context: RequestContext,
        context_of: StepContext,
    ) -> Detached:
        """Returns the run of the response. Raises ServiceError.

        `turns`: the conversation before it, with that of `given`; `context`: that of the body `first`.
        """
        ...


class ServerTools(Protocol):
    """Runs tools in the server."""

    def plan(self, body: ResponsesBody) -> TurnPlan | None:
        """Returns the plan of a request; None if it has no tool that the server runs. Raises ServiceError."""
        ...
