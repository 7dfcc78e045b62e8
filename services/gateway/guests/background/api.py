"""Joins the Responses API and the recorded requests: background responses are recorded. Has no routes of its own."""

import asyncio

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.background.recorded import RecordedResponses
from antiphon.services.gateway.guests.background.requests import BackgroundStreams
from antiphon.services.gateway.guests.responses.endpoints import ResponseEndpoints


class TheApi(Api):
    """See Api."""

    always = True

    def __init__(self) -> None:
        self._responses: RecordedResponses | None = None
        self._watching: asyncio.Task[None] | None = None

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        streams, endpoints = serving.guests.offered(BackgroundStreams), serving.guests.offered(ResponseEndpoints)
        if streams is not None and endpoints is not None:
            self._responses = RecordedResponses(serving, endpoints.store, streams, endpoints.create)
            endpoints.background = self._responses

    async def answering(self) -> None:
        """See Lifetime. From now on, takes over the responses of gateways that are gone."""
        if self._responses is not None:
            self._watching = asyncio.create_task(self._responses.watch())

    async def leave(self) -> None:
        """See Lifetime. Other gateways continue the responses."""
        if self._responses is not None:
            await self._responses.leave()

    async def finish(self) -> None:
        """See Lifetime."""
        if self._watching is not None:
            self._watching.cancel()
