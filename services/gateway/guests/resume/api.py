"""The API of resumable streams: `GET` and `DELETE /v1/streams/{id}`."""

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.routing.routes import EventStream, Routes
from antiphon.services.gateway.guests.resume.streams import Streams


class TheApi(Api):
    """See Api."""

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        streams = serving.guests.offered(Streams)
        if streams is not None:
            routes.get("/v1/streams/{stream_id}", streams.retrieve, EventStream)
            routes.delete("/v1/streams/{stream_id}", streams.end)
