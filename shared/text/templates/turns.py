"""Converts chat turns to the input of a chat template: pre-tokenized content becomes text. Pure."""

from typing import Any

import msgspec

from antiphon.shared.codec import DecodeError, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage
from antiphon.shared.text.codec import Codec


def plain_messages(codec: Codec, messages: tuple[ChatMessage, ...]) -> list[dict[str, Any]]:
    """Returns the conversation as the input of a chat template.

    A pre-tokenized turn is decoded first, including special tokens, because a template works on text and the
    tokenization of a turn depends on the text before and after it. Raises ServiceError for ids outside the vocabulary.
    """
    return [_plain_message(codec, message) for message in messages]


def json_object(data: bytes, param: str) -> dict[str, Any]:
    """Returns a JSON object of a message between services; {} for no bytes. Raises ServiceError naming `param`."""
    if not data:
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise ServiceError("invalid_value", f"'{param}' is not a JSON object.", param=param) from None


def _plain_message(codec: Codec, message: ChatMessage) -> dict[str, Any]:
    token_ids = message.token_ids
    content = codec.decode(known_ids(codec, token_ids, "messages")) if token_ids else message.content
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        plain["name"] = message.name
    plain |= json_object(message.fields, "messages")
    if "reasoning" in plain and not (content and "tool_calls" in plain):
        # Another name of templates for it. In a message with calls they refuse it beside a text.
        plain["thinking"] = plain["reasoning"]
    return plain


def known_ids(codec: Codec, packed: bytes, param: str) -> list[int]:
    """Returns unpacked token ids. Raises ServiceError that names `param` for ids outside the vocabulary."""
    try:
        token_ids = unpack_ids(packed)
    except DecodeError:
        raise ServiceError("invalid_value", f"'{param}' is not a list of token ids.", param=param) from None
    unknown = next((i for i in token_ids if not codec.knows(i)), None)
    if unknown is not None:
        raise ServiceError(
            "invalid_value", f"'{param}' holds the token id {unknown}, outside the vocabulary.", param=param
        )
    return token_ids
