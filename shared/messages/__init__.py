"""Every message that crosses the bus, and nothing else: no logic, no defaults that think.

A file for each service that messages go to and come from, one for what all of them say; users import from here.

A message is a frozen struct that `shared.codec` writes as one msgpack array, its type's name first. Fields are only
ever appended, with a default, so that an older reader skips what it does not know. The major version is part of the
subject (`shared.subjects`). Token lists of unbounded length travel as `bytes`: little-endian u32 (`codec.pack_ids`).

Names: a command is imperative (`Submit`), a fact is a noun (`TokenEvents`). `request_id` names one sequence on one
engine: a request with `n` choices or several prompts is several sequences, each with an id of its own. `epoch` counts
the placements of a sequence; the gateway's request actor alone moves it. A token's place in the output is its number.
"""

from shared.messages.base import Ack, ErrorReply, FinishReason, Message, Part, ServiceName, ServiceState
from shared.messages.detokenizer import CloseStream, OpenStream, PositionLogprobs, TextEvent, TextEvents, TokenText
from shared.messages.engine import (
    Cancel,
    Done,
    Resend,
    Retarget,
    Submit,
    SubmitReply,
    SubmitStatus,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    TopLogprob,
)
from shared.messages.presence import (
    EngineStatus,
    GatewayStatus,
    Heartbeat,
    LiveRequest,
    PoolStatus,
    SequenceMark,
    StreamStatus,
)
from shared.messages.tokenizer import (
    ChatMessage,
    DetokenizeReply,
    DetokenizeRequest,
    TokenizedPrompt,
    TokenizeReply,
    TokenizeRequest,
)

__all__ = [
    "Ack",
    "Cancel",
    "ChatMessage",
    "CloseStream",
    "DetokenizeReply",
    "DetokenizeRequest",
    "Done",
    "EngineStatus",
    "ErrorReply",
    "FinishReason",
    "GatewayStatus",
    "Heartbeat",
    "LiveRequest",
    "Message",
    "OpenStream",
    "Part",
    "PoolStatus",
    "PositionLogprobs",
    "Resend",
    "Retarget",
    "SequenceMark",
    "ServiceName",
    "ServiceState",
    "StreamStatus",
    "Submit",
    "SubmitReply",
    "SubmitStatus",
    "TextEvent",
    "TextEvents",
    "TokenEvent",
    "TokenEvents",
    "TokenLogprobs",
    "TokenText",
    "TokenizeReply",
    "TokenizeRequest",
    "TokenizedPrompt",
    "TopLogprob",
]
