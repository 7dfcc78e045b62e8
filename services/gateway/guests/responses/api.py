"""The API of responses and conversations, and where it keeps them."""

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.responses.conversations.conversations import Conversations
from antiphon.services.gateway.guests.responses.conversations.endpoints import ConversationEndpoints
from antiphon.services.gateway.guests.responses.conversations.schemas import ChangeBody, ConversationBody, ItemsBody
from antiphon.services.gateway.guests.responses.conversations.store import ConversationStore
from antiphon.services.gateway.guests.responses.endpoints import ResponseEndpoints
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.services.gateway.guests.responses.socket.connection import SocketEndpoint
from antiphon.services.gateway.guests.responses.stored.records import LogRecords, MemoryRecords
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore

_BODY = Body(ResponsesBody, ("input",))


class TheApi(Api):
    """See Api. All gateways know the responses of each if the gateway keeps something on the bus."""

    always = True  # a gateway without the routes continues background responses of others

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api. Offers the endpoints to the other guests."""
        images = serving.guests.offered(KeptImages)
        if images is None:
            responses, said = MemoryRecords(), MemoryRecords()
        else:
            responses, said = LogRecords(images, "Responses"), LogRecords(images, "Conversations")
        conversations = Conversations(ConversationStore(said))
        endpoints = ResponseEndpoints(serving, ResponseStore(responses), conversations)
        serving.guests.offer(endpoints)
        if serving.settings.use_openai:
            _add_responses(routes, endpoints, SocketEndpoint(lambda: routes.app, serving.metrics.count_error))
            _add_conversations(routes, ConversationEndpoints(conversations))


def _add_responses(routes: Routes, endpoints: ResponseEndpoints, socket: SocketEndpoint) -> None:
    routes.post_resumable("/v1/responses", endpoints.create, _BODY)
    routes.post("/v1/responses/input_tokens", endpoints.count_tokens, _BODY)
    routes.post("/v1/responses/compact", endpoints.compact, _BODY)
    routes.get("/v1/responses/{response_id}", endpoints.retrieve)
    routes.delete("/v1/responses/{response_id}", endpoints.delete)
    routes.post("/v1/responses/{response_id}/cancel", endpoints.cancel)
    routes.get("/v1/responses/{response_id}/input_items", endpoints.input_items)
    routes.app.router.add_websocket_route("/v1/responses", socket.serve)


def _add_conversations(routes: Routes, endpoints: ConversationEndpoints) -> None:
    one, items = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"
    routes.post("/v1/conversations", endpoints.create, Body(ConversationBody))
    routes.get(one, endpoints.retrieve)
    routes.post(one, endpoints.update, Body(ChangeBody, ("metadata",)))
    routes.delete(one, endpoints.delete)
    routes.get(items, endpoints.list_items)
    routes.post(items, endpoints.create_items, Body(ItemsBody, ("items",)))
    routes.get(f"{items}/{{item_id}}", endpoints.retrieve_item)
    routes.delete(f"{items}/{{item_id}}", endpoints.delete_item)
