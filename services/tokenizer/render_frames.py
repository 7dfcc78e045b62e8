"""Messages between the tokenizer and its template worker, sent as frames (`sandbox`)."""

import msgspec


class RenderSetup(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a worker: the template to compile, and its limits.

    Answered by `Rendered`, with an empty text if the template compiles. `wall_s`: time limit for a job, seconds.
    """

    template: str
    constants: dict[str, str]
    output_chars_max: int
    wall_s: float


class RenderJob(msgspec.Struct, frozen=True, array_like=True):
    """One conversation to render. Answered by `Rendered`."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The rendered text. If rendering failed, `error` is a message for the user."""

    text: str = ""
    error: str = ""
