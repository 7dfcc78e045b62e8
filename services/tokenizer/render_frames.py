"""Messages between the tokenizer and its template worker, sent as frames (`sandbox`)."""

import msgspec


class RenderSetup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The first message to a worker: the template to compile, and its limits.

    Answered by `Rendered`, with an empty text if the template compiles. `wall_s`: time limit for a job, seconds.
    """

    template: str
    constants: dict[str, str]
    output_chars_max: int
    wall_s: float
    tool_template: str | None = None
    """The template for conversations with tools, if it is a different one."""


class RenderJob(msgspec.Struct, frozen=True, array_like=True):
    """One conversation to render. Answered by `Rendered`.

    `messages` is a JSON list of objects and `variables` a JSON object, because msgpack has no integers beyond 64 bits.
    """

    messages: bytes
    add_generation_prompt: bool
    variables: bytes = b"{}"
    continue_final_message: bool = False


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The rendered text. If rendering failed, `error` is a message for the user."""

    text: str = ""
    error: str = ""
