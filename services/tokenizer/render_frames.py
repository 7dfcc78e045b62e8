"""What the tokenizer and its template worker say to each other over pipes: a length (big-endian), then msgpack."""

import msgspec

LENGTH_BYTES = 4


class RenderSetup(msgspec.Struct, frozen=True, array_like=True):
    """The first frame to a worker: what to compile, and its limits. Answered by `Rendered` with an empty text."""

    template: str
    constants: dict[str, str]
    output_chars_max: int
    wall_s: float


class RenderJob(msgspec.Struct, frozen=True, array_like=True):
    """One conversation. Answered by `Rendered`."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The text, or in `error` a sentence for the user."""

    text: str = ""
    error: str = ""


_ENCODER = msgspec.msgpack.Encoder()


def pack_frame(message: msgspec.Struct) -> bytes:
    """A message with its length in front."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data
