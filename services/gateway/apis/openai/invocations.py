"""`POST /invocations`: the one endpoint that Amazon SageMaker calls. The fields of the body say which request it is."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from antiphon.services.gateway.apis.openai.chat import ChatEndpoint
from antiphon.services.gateway.apis.openai.completions import CompletionEndpoint
from antiphon.services.gateway.apis.openai.pooling.endpoints import PoolingEndpoints
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.request_body import read_fields
from antiphon.shared.errors import ServiceError


class InvocationEndpoint:
    """Passes a request to the endpoint of chat, completions or embeddings."""

    def __init__(self, serving: Serving, pooling: PoolingEndpoints) -> None:
        self._endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "messages": ChatEndpoint(serving).chat_completions,
            "prompt": CompletionEndpoint(serving).completions,
            "input": pooling.embeddings,
        }

    async def invocations(self, request: Request) -> Response:
        """Answers as the endpoint whose main field the body has. Raises ServiceError."""
        data = await request_body.read(request.scope["headers"], request.receive)
        fields = read_fields(data)
        for name, endpoint in self._endpoints.items():
            if name in fields:
                return await endpoint(Request(request.scope, _again(data, request.receive)))
        message = "Missing required parameter: 'messages' (chat), 'prompt' (completions) or 'input' (embeddings)."
        raise ServiceError("missing_required_parameter", message, param="messages")


def _again(data: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives a body that has been read, then what the connection gives."""
    unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again
