"""Everything needed to run a request again: its prompts and parameters as sent to the engines, and its tokens.

Gateways keep it in memory with `--record-content-mb`, and export it as JSON, which other machines and later builds can
read: new fields are appended with a default. `version` changes only if an older reader would misread the data.
"""

from typing import Any, Literal

import msgspec

from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import FinishReason
from antiphon.shared.parameters.sampling import SamplingParams

FORMAT: Literal["antiphon-request"] = "antiphon-request"
VERSION = 1


class RecordedPrompt(msgspec.Struct, frozen=True):
    """One prompt. `end_token_ids`: tokens that end its outputs, beside the model's own."""

    token_ids: list[int]
    end_token_ids: list[int] = []


class RecordedSequence(msgspec.Struct, frozen=True):
    """One output. `engines`: the engines that computed it, in order. Without `finish_reason` it did not end."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    engines: list[str] = []


class RecordedContent(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Sequence index = prompt index * `num_sequences` + choice.

    `params` are the parameters of the first choice, with the seed that was drawn if the request gave none; `max_tokens`
    0 means as many as fit. `configuration`: that of the model's engines, see `EngineStatus.configuration`.
    """

    format: Literal["antiphon-request"] = FORMAT
    version: int = VERSION
    request_id: str
    created: float
    """Unix time in seconds."""
    model: str
    path: str
    """Directory or hub name from which the engines had loaded the model."""
    max_model_len: int
    configuration: list[str]
    adapter_version: str = ""
    """Hash of the files of the adapter, if `model` is one."""
    params: SamplingParams
    n: int
    num_sequences: int
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    shown_special_tokens: list[str] = []
    begun: list[int] = []
    """For a fork (a request that continues from a token of a recorded output): the tokens with which its outputs began.
    `sequences` contains them too."""
    num_images: int = 0
    """Number of images in the prompts. Their files are not recorded, so such a request cannot run again."""
    block_root: str = ""
    """The parent of the first block's name (`blocks.root_hash`), in hexadecimal digits. It does not tell the salt."""
    prompts: list[RecordedPrompt]
    sequences: list[RecordedSequence]


_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(RecordedContent)


def encode(content: RecordedContent) -> bytes:
    """Returns the content as JSON."""
    return _ENCODER.encode(content)


def raw(content: RecordedContent) -> msgspec.Raw:
    """Returns the content as a part of another JSON document."""
    return msgspec.Raw(encode(content))


def changed(content: RecordedContent, **fields: Any) -> RecordedContent:
    """Returns the content with other values of some fields."""
    return msgspec.structs.replace(content, **fields)


def decode(data: bytes) -> RecordedContent:
    """Returns the content of a JSON document.

    Raises ServiceError('invalid_value') if it is not a record of this version.
    """
    try:
        content = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServiceError("invalid_value", f"This is no recorded request: {error}.", param="record") from error
    if content.version != VERSION:
        message = f"The recorded request has version {content.version}; this build reads version {VERSION}."
        raise ServiceError("invalid_value", message, param="record")
    count = len(content.prompts) * content.num_sequences
    if not count or not 1 <= content.n <= content.num_sequences or len(content.sequences) != count:
        message = f"The recorded request has {len(content.sequences)} sequences instead of {count}."
        raise ServiceError("invalid_value", message, param="record")
    return content


def first_difference(recorded: RecordedSequence, token_ids: list[int]) -> int | None:
    """Returns the first position at which new tokens differ from the recorded ones; None if they are equal.

    A recorded sequence that did not end (its client disconnected, or its engine failed) is equal to a longer one that
    begins with it.
    """
    old = recorded.token_ids
    for position, (before, now) in enumerate(zip(old, token_ids, strict=False)):
        if before != now:
            return position
    if len(old) == len(token_ids) or (recorded.finish_reason is None and len(old) < len(token_ids)):
        return None
    return min(len(old), len(token_ids))
