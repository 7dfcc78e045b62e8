"""Gives the Responses API the tools that this gateway runs. Has no routes of its own."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.endpoints import ResponseEndpoints
from antiphon.services.gateway.guests.responses.input_items import Input
from antiphon.services.gateway.guests.responses.response_object import ResponseObject
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.services.gateway.guests.responses.server_tools.items import approved_ids
from antiphon.services.gateway.guests.responses.server_tools.seam import StepContext
from antiphon.services.gateway.guests.turns.encoder import TurnEncoder
from antiphon.services.gateway.guests.turns.mcp.exchange import Lines
from antiphon.services.gateway.guests.turns.plan import has_server_tools, own_tools, shown, uses
from antiphon.services.gateway.guests.turns.toolbox import Toolbox
from antiphon.services.gateway.guests.turns.turn import TurnRun
from antiphon.shared import limits
from antiphon.shared.request.conversation import Turn
from antiphon.shared.security.public_addresses import listed
from antiphon.shared.settings.mcp_servers import read_mcp_servers


class TheApi(Api):
    """See Api. Implements `seam.ServerTools`."""

    always = True  # a gateway without the routes continues responses of others

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api. Raises SettingsError if the operator's file cannot be used."""
        self._serving = serving
        self._servers = read_mcp_servers(serving.settings.mcp_servers)
        self._hosts = listed(serving.settings.allowed_mcp_hosts)
        self._threads = ThreadPoolExecutor(limits.TOOL_THREADS, "tool")
        self._lines = Lines()
        if (endpoints := serving.guests.offered(ResponseEndpoints)) is not None:
            endpoints.server_tools = self

    def plan(self, body: ResponsesBody) -> "Plan | None":
        """See ServerTools."""
        if not has_server_tools(body):
            return None
        toolbox = Toolbox(uses(body, self._servers, self._hosts), self._threads, self._lines)
        return Plan(self._serving, body, toolbox)

    async def finish(self) -> None:
        """See Lifetime. Hangs up, so that no thread of a call keeps the process."""
        self._lines.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class Plan:
    """Implements `seam.TurnPlan`."""

    def __init__(self, serving: Serving, body: ResponsesBody, toolbox: Toolbox) -> None:
        self.body = shown(body)
        self.first = replace(body, tools=own_tools(body), tool_choice=None)
        self._serving, self._toolbox = serving, toolbox

    def encoder(self, described: ResponseObject, context: RequestContext) -> ResponseEncoder:
        """See TurnPlan."""
        self._encoder = TurnEncoder(described, context, self._toolbox, waits=bool(self.body.background))
        return self._encoder

    def run(
        self,
        request: Request,
        given: Input,
        turns: Sequence[Turn],
        context: RequestContext,
        context_of: StepContext,
    ) -> TurnRun:
        """See TurnPlan."""
        body = replace(self.first, tool_choice=self.body.tool_choice, seed=context.request.params.seed)
        return TurnRun(
            request,
            self._serving,
            self._encoder,
            self._toolbox,
            body=body,
            turns=turns,
            approved=approved_ids(given.items),
            context_of=context_of,
        )
