"""The messages that services exchange on the bus. Contains only data definitions, no logic.

There is one file for each service, one for heartbeats (`presence`), one for adapters, one for versions of models, one
for copies of KV, one for sessions, and one for types that several messages use (`base`). Import messages from this
package.

A message is a frozen struct that `antiphon.shared.codec` encodes as one msgpack array whose first item is the name of
the type. New fields are appended, with a default, so that an older reader skips them. The major version is part of the
subject (`antiphon.shared.subjects`). Token lists of unbounded length are `bytes`: little-endian u32 (`codec.pack_ids`).

The name of a command is a verb (`Submit`), the name of a fact is a noun (`TokenEvents`). `sequence_id` names one
sequence: a request with `n` choices or several prompts has several sequences, each with its own id. `attempt` is a
fencing token: the number of times the sequence was placed on an engine. Only the request actor in the gateway
increments it. `position` is the index of a token in the output of its sequence. The owner of a sequence is the gateway
that serves its request; a member is a running service process (id and instance id).
"""
# ruff: noqa: F401 - others import the messages from here
# pyright: reportUnusedImport=false

from antiphon.shared.messages.adapters import AdapterLoaded, AdaptersChanged, LoadAdapter
from antiphon.shared.messages.base import (
    Ack,
    ErrorReply,
    FinishReason,
    Message,
    Part,
    SequenceRef,
    ServiceName,
    ServiceState,
)
from antiphon.shared.messages.blocks import BlockEvents, BlockSnapshot, FollowBlocks
from antiphon.shared.messages.detokenizer import (
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
from antiphon.shared.messages.engine import (
    KV_MISSES,
    Cancel,
    Done,
    KvMiss,
    KvOrigin,
    KvSource,
    ProgressQuery,
    ProgressReply,
    PromptLogprobs,
    Resend,
    Retarget,
    SelfTest,
    SelfTestReply,
    SequenceMark,
    SequenceSteps,
    Sleep,
    SleepMode,
    StepEvent,
    StepEvents,
    Submit,
    SubmitBatch,
    SubmitBatchReply,
    SubmitReply,
    SubmitStatus,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    TopLogprob,
    Wake,
    Withdraw,
)
from antiphon.shared.messages.engine_counters import EngineCounters, EngineLoad, Metric
from antiphon.shared.messages.gateway import (
    OwnershipQuery,
    OwnershipReply,
    RecordList,
    RecordListQuery,
    RecordOrder,
    RecordQuery,
    RecordReply,
    RequestState,
    StreamTaken,
    UsageOutcome,
    UsageRecord,
)
from antiphon.shared.messages.kv import KvRoom, KvRoomQuery
from antiphon.shared.messages.presence import (
    DeviceMemory,
    EngineHistograms,
    EngineStatus,
    GatewayStatus,
    Heartbeat,
    HistogramCounts,
    MemberEnded,
    ModelFacts,
    PoolStatus,
    ProcessResources,
    SleepStatus,
    StreamStatus,
    VisionStatus,
)
from antiphon.shared.messages.sessions import BlockPiece, BlocksFound, BlockTaken, FindBlocks, ReadBlock, WriteBlock
from antiphon.shared.messages.tokenizer import (
    ChatMessage,
    DetokenizeReply,
    DetokenizeRequest,
    TokenizedPrompt,
    TokenizeReply,
    TokenizeRequest,
)
from antiphon.shared.messages.versions import ChangeModel, ModelsChanged
from antiphon.shared.messages.vision import (
    EncodeImage,
    ImageEncoded,
    ImageFile,
    ImagePart,
    ImageTokens,
    PromptImage,
    ReadEmbeddings,
    ReadImage,
)
