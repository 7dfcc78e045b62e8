"""The routes of responses and conversations."""

from services.gateway.edge.http.routing.openapi import Body
from services.gateway.edge.http.routing.routes import Routes
from services.gateway.guests.responses.conversations.endpoints import ConversationEndpoints
from services.gateway.guests.responses.conversations.schemas import ChangeBody, ConversationBody, ItemsBody
from services.gateway.guests.responses.endpoints import ResponseEndpoints
from services.gateway.guests.responses.schemas import ResponsesBody
from services.gateway.guests.responses.socket.connection import SocketEndpoint

_BODY = Body(ResponsesBody, ("input",))


def add_responses(routes: Routes, endpoints: ResponseEndpoints, socket: SocketEndpoint) -> None:
    """Adds the routes of responses. `socket`: the same API on a WebSocket."""
    routes.post_resumable("/v1/responses", endpoints.create, _BODY)
    routes.post("/v1/responses/input_tokens", endpoints.count_tokens, _BODY)
    routes.post("/v1/responses/compact", endpoints.compact, _BODY)
    routes.get("/v1/responses/{response_id}", endpoints.retrieve)
    routes.delete("/v1/responses/{response_id}", endpoints.delete)
    routes.post("/v1/responses/{response_id}/cancel", endpoints.cancel)
    routes.get("/v1/responses/{response_id}/input_items", endpoints.input_items)
    routes.app.router.add_websocket_route("/v1/responses", socket.serve)


def add_conversations(routes: Routes, endpoints: ConversationEndpoints) -> None:
    """Adds the routes of conversations."""
    one, items = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"
    routes.post("/v1/conversations", endpoints.create, Body(ConversationBody))
    routes.get(one, endpoints.retrieve)
    routes.post(one, endpoints.update, Body(ChangeBody, ("metadata",)))
    routes.delete(one, endpoints.delete)
    routes.get(items, endpoints.list_items)
    routes.post(items, endpoints.create_items, Body(ItemsBody, ("items",)))
    routes.get(f"{items}/{{item_id}}", endpoints.retrieve_item)
    routes.delete(f"{items}/{{item_id}}", endpoints.delete_item)
