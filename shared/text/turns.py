"""Converts chat turns to the input of a chat template: pre-tokenized content becomes text. Pure."""

from shared.codec import DecodeError, unpack_ids
from shared.errors import ServiceError
from shared.messages import ChatMessage
from shared.text.codec import Codec


def plain_messages(codec: Codec, messages: tuple[ChatMessage, ...]) -> list[dict[str, str]]:
    """Returns the conversation as the input of a chat template.

    A pre-tokenized turn is decoded first, including special tokens, because a template works on text and the
    tokenization of a turn depends on the text before and after it. Raises ServiceError for ids outside the vocabulary.
    """
    return [_plain_message(codec, message) for message in messages]


def _plain_message(codec: Codec, message: ChatMessage) -> dict[str, str]:
    token_ids = message.token_ids
    content = codec.decode(known_ids(codec, token_ids, "messages")) if token_ids else message.content
    plain = {"role": message.role, "content": content}
    return {**plain, "name": message.name} if message.name else plain


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
