"""The bodies of `/v1/sessions`."""

import msgspec

from antiphon.services.gateway.apis.openai.body import StreamOptions, TokenFields


class SessionBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/sessions`, unless it is a file, whose type is `application/octet-stream`."""

    id: str
    """Id of a request, of its answer, or the client's own id of it."""


class TurnMessage(msgspec.Struct, kw_only=True):
    """A message of a next turn."""

    role: str
    content: str


class ContinueBody(TokenFields, kw_only=True):
    """Body of `POST /v1/sessions/{id}/continue`. Parameters that are not given are those of the session.

    Without `messages` and `prompt`, an output that was cut goes on, and `max_tokens` counts the whole output. With one
    of them the next turn follows the output, and `max_tokens` counts the new output only.
    """

    index: int | None = None
    """Which output of the session. Default: the first."""
    messages: list[TurnMessage] | None = None
    """The next turn of a conversation, in the form of the model's chat template."""
    prompt: str | list[int] | None = None
    """Text or token ids that follow the output as they are."""
    cache_salt: str | None = None
    """That of the recorded request, whose KV is found only with it. An imported session needs none."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
