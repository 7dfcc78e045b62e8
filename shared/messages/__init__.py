"""Every message that crosses the bus, and nothing else: no logic, no defaults that think.

A file for each service that messages go to and come from, one for what all of them say; users import from here.

A message is a frozen struct that `shared.codec` writes as one msgpack array, its type's name first. Fields are only
ever appended, with a default, so that an older reader skips what it does not know. The major version is part of the
subject (`shared.subjects`). Token lists of unbounded length travel as `bytes`: little-endian u32 (`codec.pack_ids`).

Names: a command is imperative (`Submit`), a fact is a noun (`TokenEvents`). `request_id` names one sequence on one
engine: a request with `n` choices or several prompts is several sequences, each with an id of its own. `attempt` counts
the placements of a sequence; the gateway's request actor alone moves it. A token's place in the output is its number.
"""

from shared.messages.base import Ack, ErrorReply, FinishReason, Message, Part, SequenceRef, ServiceName, ServiceState
from shared.messages.detokenizer import (
    CloseStream,
    OpenBatch,
    OpenBatchReply,
    OpenReply,
    OpenStream,
    PositionLogprobs,
    TextEvent,
    TextEvents,
    TokenText,
)
from shared.messages.engine import (
    Cancel,
    Done,
    ProgressQuery,
    ProgressReply,
    Resend,
    Retarget,
    SequenceMark,
    Submit,
    SubmitBatch,
    SubmitBatchReply,
    SubmitReply,
    SubmitStatus,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    TopLogprob,
)
from shared.messages.gateway import OwnershipQuery, OwnershipReply
from shared.messages.presence import (
    EngineStatus,
    GatewayStatus,
    Heartbeat,
    PoolStatus,
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
    "Message",
    "OpenBatch",
    "OpenBatchReply",
    "OpenReply",
    "OpenStream",
    "OwnershipQuery",
    "OwnershipReply",
    "Part",
    "PoolStatus",
    "PositionLogprobs",
    "ProgressQuery",
    "ProgressReply",
    "Resend",
    "Retarget",
    "SequenceMark",
    "SequenceRef",
    "ServiceName",
    "ServiceState",
    "StreamStatus",
    "Submit",
    "SubmitBatch",
    "SubmitBatchReply",
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
