"""To and from the tokenizer pool. See the package."""

from shared.messages.base import Message, Part


class ChatMessage(Part, frozen=True, array_like=True):
    """One turn. `token_ids` (packed) replaces `content` for pre-tokenised turns."""

    role: str
    content: str
    name: str = ""
    token_ids: bytes = b""


class TokenizeRequest(Message, frozen=True, array_like=True, tag=True):
    """Text or a conversation to token ids, checked against the context length.

    Either `prompts` (one reply item each) or `messages` (one reply item: the rendered conversation) is set.
    """

    request_id: str
    model: str
    prompts: tuple[str, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    max_model_len: int = 0
    """Longest context, prompt and output together; 0: no check."""
    max_tokens: int = 0
    """Output tokens asked for; 0: as many as fit, at least one."""
    block_size: int = 0
    """Tokens per KV block to hash for placement and prefix caching; 0: no hashes."""
    cache_salt: bytes = b""
    return_tokens: bool = False
    """Also return each token's own text."""


class TokenizedPrompt(Part, frozen=True, array_like=True):
    """`block_hashes`: `shared.blocks.HASH_BYTES` for each full block, chained."""

    token_ids: bytes
    block_hashes: bytes = b""
    tokens: tuple[str, ...] = ()


class TokenizeReply(Message, frozen=True, array_like=True, tag=True):
    """One item for each prompt, or one for the conversation."""

    request_id: str
    prompts: tuple[TokenizedPrompt, ...]


class DetokenizeRequest(Message, frozen=True, array_like=True, tag=True):
    """Token ids to text, whole: the `/detokenize` endpoint, not the stream."""

    request_id: str
    model: str
    token_ids: bytes


class DetokenizeReply(Message, frozen=True, array_like=True, tag=True):
    """The text of a `DetokenizeRequest`."""

    request_id: str
    text: str
