"""The request bodies of Ollama's API as structs, and the fields that are refused or have no effect.

The names of the structs begin with the API's name in `/openapi.json`, where all APIs share one list of schemas.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules, Requirement


class OllamaFunctionCall(msgspec.Struct, kw_only=True):
    """The name of a called function, and its arguments.

    `index` has no effect: the order of the calls in the message counts.
    """

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant has made in an earlier message."""

    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str = ""
    images: list[str] | None = None
    """Images before the text of the message: files in base64."""
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    """In a message of a tool: the function whose result it is."""
    tool_call_id: str | None = None
    """In a message of a tool: the id of the call whose result it is."""
    thinking: str | None = None
    """The reasoning of an assistant's message."""


class OllamaFields(msgspec.Struct, kw_only=True):
    """Fields that chat and generate have in common. None means the default."""

    model: str | None = None
    options: dict[str, Any] | None = None
    """Sampling options. `options` reads them."""
    format: Any = None
    """Structure of the output: "json" for any JSON object, or a JSON Schema. `convert` reads it."""
    stream: bool | None = None
    """Whether the answer is streamed; the default is true."""
    think: Any = None
    """Whether the answer shows the model's reasoning; the default is true. `convert` reads it."""
    logprobs: bool | None = None
    """Whether the answer has the log probability of each token."""
    top_logprobs: int | None = None
    """Number of the most likely tokens to report with each token."""
    keep_alive: str | float | None = None
    """No effect: models stay loaded. 0 without a prompt is answered as if the model were unloaded."""


class OllamaChatBody(OllamaFields, kw_only=True):
    """Body of `/api/chat`: a conversation to continue. Without messages only the model's name is checked."""

    messages: list[OllamaMessage] | None = None
    tools: list[Any] | None = None
    """Functions that the model may call, in OpenAI's form, see `antiphon.shared.request.tools`."""


class OllamaGenerateBody(OllamaFields, kw_only=True):
    """Body of `/api/generate`: a prompt to answer. Without a prompt and images the model is only looked up."""

    prompt: str | None = None
    suffix: str | None = None
    """Text after the output, which fills the gap between prompt and suffix. Needs a tokenizer with tokens for it."""
    system: str | None = None
    images: list[str] | None = None
    """Images before the prompt: files in base64."""
    raw: bool | None = None
    """Whether the prompt is continued as it is, without the chat template."""


class OllamaShowBody(msgspec.Struct, kw_only=True):
    """Body of `/api/show`: the model to describe. `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    """No effect: the description is always complete."""


class OllamaEmbeddingFields(msgspec.Struct, kw_only=True):
    """Fields that the bodies for embeddings have in common. Options have no effect, because nothing is generated."""

    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaEmbedBody(OllamaEmbeddingFields, kw_only=True):
    """Body of `/api/embed`: one or several texts."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    """Whether a text that is longer than the context is cut at its end; the default is true."""
    dimensions: int | None = None
    """Number of leading components to keep."""


class OllamaEmbeddingsBody(OllamaEmbeddingFields, kw_only=True):
    """Body of `/api/embeddings`: one text."""

    prompt: str | None = None


class OllamaModelBody(msgspec.Struct, kw_only=True):
    """Body of the requests that manage a model. `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaCopyBody(msgspec.Struct, kw_only=True):
    """Body of `/api/copy`."""

    source: str | None = None
    destination: str | None = None


CHAT_DECODER = msgspec.json.Decoder(OllamaChatBody)
GENERATE_DECODER = msgspec.json.Decoder(OllamaGenerateBody)
SHOW_DECODER = msgspec.json.Decoder(OllamaShowBody)
EMBED_DECODER = msgspec.json.Decoder(OllamaEmbedBody)
EMBEDDINGS_DECODER = msgspec.json.Decoder(OllamaEmbeddingsBody)
MODEL_DECODER = msgspec.json.Decoder(OllamaModelBody)
COPY_DECODER = msgspec.json.Decoder(OllamaCopyBody)
_EMPTY = Requirement((None, [], {}, ""))
RULES = FieldRules(
    hints=frozenset(
        {
            # which messages or tokens Ollama drops if the context overflows: here a prompt that is too long is
            # refused, and an answer ends at the context length
            "truncate",
            "shift",
        }
    ),
    requirements={
        "template": _EMPTY,
        "context": Requirement((None, []), "Send the conversation to /api/chat."),
    },
    elsewhere={
        "messages": "Conversations go to /api/chat.",
        "images": "Send the images of a message in its field 'images'.",
        "tools": "Conversations with tools go to /api/chat.",
        "prompt": "Prompts go to /api/generate.",
        "suffix": "Prompts with a suffix go to /api/generate.",
        "system": "Send a message with the role 'system'.",
        "raw": "Prompts go to /api/generate.",
        "temperature": "Send it in 'options'.",
        "max_tokens": "Send it as 'num_predict' in 'options'.",
    },
    messages=FieldRules(),
    message=OllamaMessage,
)
"""The rules of chat and generate."""
EMBED_RULES = FieldRules(
    elsewhere={"prompt": "Texts go in 'input'.", "input": "The text goes in 'prompt', several texts to /api/embed."}
)
MANAGE_RULES = FieldRules(hints=frozenset({"insecure", "username", "password"}))
