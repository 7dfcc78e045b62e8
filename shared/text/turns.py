"""Chat turns as a chat template takes them: text in place of pre-tokenized content. Pure."""

from shared.codec import DecodeError, unpack_ids
from shared.errors import ServiceError
from shared.messages import ChatMessage
from shared.text.codec import Codec


def plain_messages(codec: Codec, messages: tuple[ChatMessage, ...]) -> list[dict[str, str]]:
    """The conversation as a chat template sees it.

    A pre-tokenised turn is decoded first, special tokens included: a template works on text, and what comes before and
    after a turn decides how its text is cut into tokens. Raises ServiceError for ids outside the vocabulary.
    """
    return [_plain_message(codec, message) for message in messages]


def _plain_message(codec: Codec, message: ChatMessage) -> dict[str, str]:
    token_ids = message.token_ids
    content = codec.decode(known_ids(codec, token_ids, "messages")) if token_ids else message.content
    plain = {"role": message.role, "content": content}
    return {**plain, "name": message.name} if message.name else plain


def known_ids(codec: Codec, packed: bytes, param: str) -> list[int]:
    """Unpacked token ids. Raises ServiceError, naming `param`, for ids outside the vocabulary."""
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
