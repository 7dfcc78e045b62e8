"""The endpoints of conversations."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.metadata import check_metadata
from antiphon.services.gateway.apis.openai.listing import check_query, page
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.edge.http.request_body import read_fields
from antiphon.services.gateway.guests.responses import input_items
from antiphon.services.gateway.guests.responses.conversations import schemas
from antiphon.services.gateway.guests.responses.conversations.conversations import Conversations
from antiphon.services.gateway.guests.responses.conversations.record import Conversation
from antiphon.services.gateway.guests.responses.input_items import Item
from antiphon.services.gateway.guests.responses.schemas import IMAGE_URLS, INCLUDE_NAMES, LOGPROBS, REASONING
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import missing, refuse

T = TypeVar("T", bound=msgspec.Struct)


class ConversationEndpoints:
    """The endpoints of conversations."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def create(self, request: Request) -> Response:
        """Creates a conversation, which may have items from the beginning."""
        body = await _body(request, schemas.CONVERSATION_DECODER)
        check_metadata(body.metadata)
        items = _items(body.items, request.state.request_id) if body.items else []
        return json_response((await self._conversations.create(body.metadata or {}, items)).described())

    async def retrieve(self, conversation_id: str) -> Response:
        """Answers with a conversation."""
        return json_response((await self._conversations.get(conversation_id, with_images=False)).described())

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replaces the metadata of a conversation."""
        body = await _body(request, schemas.CHANGE_DECODER, required="metadata")
        check_metadata(body.metadata)
        metadata = body.metadata or {}

        def change(found: Conversation) -> Conversation:
            return msgspec.structs.replace(found, metadata=metadata)

        return json_response((await self._conversations.change(conversation_id, change)).described())

    async def delete(self, conversation_id: str) -> Response:
        """Removes a conversation and its items."""
        await self._conversations.delete(conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def list_items(
        self, request: Request, conversation_id: str, limit: int = 20, order: str = "desc", after: str | None = None
    ) -> Response:
        """Lists the items of a conversation."""
        _check_included(request, "limit", "order", "after")
        items = (await self._conversations.get(conversation_id)).items
        return json_response(page(items, limit=limit, order=order, after=after))

    async def create_items(self, request: Request, conversation_id: str) -> Response:
        """Appends items to a conversation. Answers with them."""
        _check_included(request)
        body = await _body(request, schemas.ITEMS_DECODER, required="items")
        items = _items(body.items, request.state.request_id)
        await self._conversations.append(conversation_id, items)
        return json_response(page(items, limit=len(items), order="asc", after=None))

    async def retrieve_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Answers with an item of a conversation."""
        _check_included(request)
        found = await self._conversations.get(conversation_id)
        item = next((one for one in found.items if one["id"] == item_id), None)
        if item is None:
            raise _unknown_item(item_id, conversation_id)
        return json_response(item)

    async def delete_item(self, conversation_id: str, item_id: str) -> Response:
        """Removes an item of a conversation. Answers with the conversation."""

        def change(found: Conversation) -> Conversation:
            left = [item for item in found.items if item["id"] != item_id]
            if len(left) == len(found.items):
                raise _unknown_item(item_id, conversation_id)
            return msgspec.structs.replace(found, items=left)

        return json_response((await self._conversations.change(conversation_id, change)).described())


async def _body(request: Request, decoder: "msgspec.json.Decoder[T]", required: str = "") -> T:
    data = await request_body.read(request.scope["headers"], request.receive)
    if required and required not in read_fields(data or b"{}"):
        missing(required)
    return request_fields.read(data or b"{}", decoder, schemas.RULES)


def _items(given: list[dict[str, Any]] | None, request_id: str) -> list[Item]:
    if given is not None and len(given) > limits.CONVERSATION_ADDED_MAX:
        refuse("items", f"must hold at most {limits.CONVERSATION_ADDED_MAX} items: add the others afterwards")
    return input_items.read(given, request_id, "items").items


def _check_included(request: Request, *known: str) -> None:
    """Checks the query of a request about items. What may be included of them is always there."""
    check_query(request, (*known, *INCLUDE_NAMES))
    for name in INCLUDE_NAMES:
        for value in request.query_params.getlist(name):
            if value not in (LOGPROBS, IMAGE_URLS, REASONING):
                ignore(f"include.{value}")


def _unknown_item(item_id: str, conversation_id: str) -> ServiceError:
    message = f"Item with id '{item_id[:100]}' not found in the conversation '{conversation_id[:64]}'."
    return ServiceError("not_found", message, param="item_id")
