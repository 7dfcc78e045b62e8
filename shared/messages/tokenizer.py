"""Messages to and from the tokenizers of a model. See the package."""

from antiphon.shared.messages.base import Message, Part
from antiphon.shared.messages.vision import ImageTokens
from antiphon.shared.parameters.grammar import Grammar


class ChatMessage(Part, frozen=True, array_like=True, kw_only=True):
    """One message of a conversation. If `token_ids` (packed) is set, it replaces `content`."""

    role: str
    content: str
    name: str = ""
    token_ids: bytes = b""
    fields: bytes = b""
    """A JSON object: the message's other fields for the chat template, such as `tool_calls`. Empty: none. A member
    `content` of this object replaces the text of the message; messages with images have a list of parts there.
    """


class TokenizeRequest(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Converts texts or a conversation to token ids and checks their number against the context length.

    Either `prompts` (one reply item for each) or `messages` (one reply item, for the rendered conversation) is set.
    """

    request_id: str
    model: str
    prompts: tuple[str, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    max_model_len: int = 0
    """Context length in tokens, prompt and output together; 0: no check."""
    max_tokens: int = 0
    """Number of output tokens requested; 0: as many as fit, at least one."""
    block_size: int = 0
    """Tokens in a KV block; each full block is hashed, for placement and prefix caching. 0: no hashes."""
    cache_salt: bytes = b""
    return_tokens: bool = False
    """Whether the reply also has each token as the vocabulary writes it."""
    bad_words: tuple[str, ...] = ()
    """Texts to convert to token ids, in the forms in which they occur in an output."""
    grammar: Grammar | None = None
    """A grammar to check; the request is refused if the grammar cannot be used. A request with a grammar or `bad_words`
    need not have `prompts` or `messages`."""
    grammar_param: str = ""
    """Name of the user's field that the grammar comes from, for errors."""
    truncate_prompt_tokens: int = 0
    """Number of last tokens to keep of each prompt; 0: all, -1: as many as fit before `max_tokens`."""
    suffix: str = ""
    """Text after the output. If set, each prompt is encoded so that the model fills in the text between it and the
    suffix.
    """
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, which the output then continues."""
    template_variables: bytes = b""
    """A JSON object: further variables of the chat template, such as `tools`. Empty: none."""
    generates: bool = True
    """Whether the context must have room for output. False for embeddings: the prompt may fill the whole context."""
    prompt_names: tuple[str, ...] = ()
    """For each prompt, its name in the user's request, for errors; empty: all are `prompt`."""
    images: tuple[ImageTokens, ...] = ()
    """The images of the conversation, in order. Each image token is repeated as often as the image needs."""
    second_prompts: tuple[str, ...] = ()
    """For each of `prompts`, the second text of a pair; both texts become one prompt. Empty: there are no pairs."""
    client: str = ""
    """The client that the request comes from. Long texts of several clients are encoded in turns."""
    text_bytes_max: int = 0
    """Largest size of the text of a prompt, bytes of UTF-8; 0: no limit. The gateway checks `prompts`, the tokenizer
    checks what the chat template makes of `messages`."""
    marks: tuple[str, ...] = ()
    """Further texts to convert to token ids as they are, such as the marks around a model's reasoning."""


class TokenizedPrompt(Part, frozen=True, array_like=True, kw_only=True):
    """A prompt as token ids. `block_hashes` has a chained hash of `blocks.HASH_BYTES` for each full KV block."""

    token_ids: bytes
    block_hashes: bytes = b""
    tokens: tuple[str, ...] = ()
    tail: str = ""
    """The last `limits.PROMPT_TAIL_CHARS` characters of a rendered conversation; empty for other prompts."""
    image_starts: tuple[int, ...] = ()
    """Index of the first token of each image."""
    num_first_tokens: int = 0
    """For a pair of texts: see `PoolingParams`."""


class TokenizeReply(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """The reply to a `TokenizeRequest`: one item for each prompt, or one for the conversation."""

    request_id: str
    prompts: tuple[TokenizedPrompt, ...]
    bad_words: tuple[bytes, ...] = ()
    """Packed token ids of the request's `bad_words`: each word at the start of a text and after a space."""
    end_token_ids: tuple[int, ...] = ()
    """Further end tokens besides the model's own: those of the conversation template, or of a suffix."""
    tokenizer_id: str = ""
    """The process that answers, for the record of the request."""
    marks: tuple[bytes, ...] = ()
    """Packed token ids of the request's `marks`."""


class DetokenizeRequest(Message, frozen=True, array_like=True, tag=True):
    """Converts token ids to text in one piece, for the `/detokenize` endpoint; streams use detokenizers."""

    request_id: str
    model: str
    token_ids: bytes
    return_tokens: bool = False
    """Whether the reply also has the text of each token."""


class DetokenizeReply(Message, frozen=True, array_like=True, tag=True):
    """The reply to a `DetokenizeRequest`."""

    request_id: str
    text: str
    tokens: tuple[str, ...] = ()
    """The text of each token inside a longer text, if requested; U+FFFD for a part of a character."""
