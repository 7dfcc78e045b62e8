"""Every bound of the system in one place, with its unit and its reason. A queue without a line here is a defect."""

PROTOCOL_VERSION = 2
"""Major version of the messages; part of every subject. 2: each model has its own tokenizers and detokenizers;
sequences wait in gateways, are sent in batches, and are not listed in heartbeats."""
MEMBER_ID_CHARS_MAX = 64
"""Characters in a service's name on the bus."""
MODEL_TOKEN_CHARS_MAX = 40
"""Characters of a model's name in subjects and in its services' names, which add up to 16 (`-detokenizer-64`)."""
MODELS_MAX = 16
"""Models that one launcher starts: each has three processes at least."""

# --- HTTP edge ---
BODY_BYTES_MAX = 16 * 2**20
"""A request body. As text it carries about 4 million tokens, as token ids with seven characters each about 2 million:
more than the context of any model, so that a prompt is refused for its tokens and not for its bytes."""
FIELD_NAME_CHARS_MAX = 64
"""Of an unknown field's name, so much is shown and compared with the known ones. No known name is longer."""
MESSAGES_MAX = 1024
PROMPTS_MAX = 32
"""Prompts in one completions request."""
CHOICES_MAX = 16
"""`n`."""
SEQUENCES_PER_REQUEST_MAX = 128
"""Prompts times choices."""
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256
STOP_TOKEN_IDS_MAX = 128
LOGPROBS_MAX = 20
"""Candidates a position (chat's `top_logprobs`); the completions endpoint allows 5."""
COMPLETION_LOGPROBS_MAX = 5
GATEWAY_REQUESTS_MAX = 16384
"""Requests in the gateway at once, those that wait for an engine included; more are refused with 503 and a time to
retry after. A waiting request costs its prompt's memory and no message on the bus."""
GATEWAY_SEQUENCES_MAX = 65536
"""Sequences of all requests in the gateway at once: prompts times choices."""
CACHE_SALT_CHARS_MAX = 256
BODY_READ_S = 60.0
"""Longest time for a request's body to arrive."""
IDLE_CONNECTION_S = 75.0
"""How long a connection without a request stays open. Longer than clients keep theirs (5 to 60 s): whoever closes first
must be the client, or its next request meets a closing connection and is lost."""
CLIENT_STALL_S = 60.0
"""Longest time for a client to take what was written; the server holds at most 64 KiB for it meanwhile."""
SLOW_CLIENT_EVENTS_MAX = 65536
"""Undelivered text events of one request before its client counts as gone."""
QUEUE_WAIT_S = 30.0
"""Longest wait for a member that can take a request (a tokenizer, a detokenizer, an engine of the model that is ready
and answers) before 503. Does not count while engines work through a queue: then a request waits for its turn."""

# --- bus ---
BUS_PAYLOAD_BYTES = 16 * 2**20
"""`max_payload` of the servers that come with the product; a connection goes by what its server says. A prompt takes 4
bytes a token and 16 a block, so with blocks of 16 tokens it carries 3 million tokens; as text, as many as a body."""
PENDING_MSGS_MAX = 65536
PENDING_BYTES_MAX = 64 * 2**20
"""Client-side buffer of one subscription: a few of the largest messages, or it would drop them."""
OUTBOUND_BYTES_MAX = 32 * 2**20
"""Client-side buffer for what is not sent yet: the largest message beside others."""
MAILBOX_MAX = 4096
"""Messages waiting for one actor."""

LIVENESS_BATCH_MAX = 1000
"""Sequences in one `ProgressQuery` or `OwnershipQuery`: about 35 KB. The oldest unconfirmed ones are asked first."""
BATCH_BYTES_MAX = 512 * 2**10
"""A `SubmitBatch` or `OpenBatch` of several sequences; below NATS's own default of 1 MiB. That of a single one may
be larger."""
SUBMIT_BATCH_MAX = 64
"""Sequences in one `SubmitBatch`: more would hold up an engine's other messages while they are admitted."""
OPEN_BATCH_MAX = 256
"""Streams in one `OpenBatch`."""

# --- timers, seconds; none of them is needed for safety, only for speed of recovery ---
HEARTBEAT_INTERVAL_S = 0.15
GATEWAY_HEARTBEAT_INTERVAL_S = 0.3
TOKENIZER_HEARTBEAT_INTERVAL_S = 0.6
"""Whoever asks a tokenizer that has died asks another one: nothing waits for this. All are multiples of the shortest,
so that processes wake at the same beats."""
FIRST_HEARTBEATS_S = 1.5 * TOKENIZER_HEARTBEAT_INTERVAL_S
"""How long a gateway that has started waits for the heartbeats of those that are alive before it answers requests."""
LEASE_S = 0.6
LEASE_INTERVALS = 3
"""Silence after which a member counts as dead: this long, and so many of its own intervals. More heartbeats cost a
small machine some of its tokens: a process that wakes beside a running model finds its code in no cache."""
SUBMIT_TIMEOUT_S = 0.5
SUBMIT_BYTES_PER_S = 8 * 2**20
"""A long prompt adds to that: slower than it is sent, decoded and queued."""
OPEN_TIMEOUT_S = 0.5
RESEND_INTERVAL_S = 0.02
"""Least time between two `Resend` of one sequence."""
STALL_S = 0.35
"""Time without text of a running sequence after which its gateway asks the engine how far it is, and then the time for
tokens that the engine says exist before the gateway rebuilds the stream."""
OWNERSHIP_CHECK_S = 2 * LEASE_S
"""Time after which an engine or a detokenizer asks a gateway whether it still owns a sequence."""
TOMBSTONE_S = 30.0
"""How long an engine remembers a cancelled or finished sequence."""
ORPHAN_S = 5.0
"""Silence of a gateway after which an engine drops its sequences."""
STEP_STALL_S = 1.5
STEP_STALL_FACTOR = 10.0
"""A step that runs for longer than both, the second times what was expected of it, counts as hanging."""
DEVICE_STEP_STALL_S = 5.0
"""The first of these on a device, where a step may have to compile a kernel that none before it needed."""
DEVICE_FIRST_STEP_S = 60.0
"""The same for a step of a size that has not run yet. On the host's processors only their idleness tells then."""
STEP_IDLE_S = 1.2
"""A step on the host's processors in which no thread has computed for this long counts as hanging. With the two
heartbeats that it takes to see that, gateways know within 2 s."""
STALL_EXIT_S = 10.0
"""An engine whose step has counted as hanging for this long ends, so that its supervisor starts it again."""
DRAIN_S = 20.0
"""Longest graceful shutdown."""
DEATHS_MAX = 3
"""Engines that may die under one sequence before it fails: it may be what kills them."""
LOSSES_MAX = 20
"""The same, with those that only fell silent for longer than a lease, as on a host that is busy with something else."""

# --- engine ---
ENGINE_WAITING_MAX = 4096
"""Sequences waiting in an engine; more are refused as busy."""
RETAINED_SEQUENCES_MAX = 8192
"""Finished sequences whose tokens are kept until their owner has them."""
TOMBSTONES_MAX = 65536

STEP_REPORTS_MAX = 64
"""Steps computed but not yet published; the step loop waits beyond."""
COMPILED_LIBRARIES_MAX = 32
"""Compiled forms of the CPU backend kept in a directory: a few instruction sets and versions, 300 KiB each."""
PACKED_FILES_MAX = 4
"""Models whose packed weights are kept in a directory."""
PACKED_BYTES_MIN = 64 * 2**20
"""Weights that are packed faster than anybody notices are not kept."""

ENGINE_QUEUE_AHEAD = 1.0
"""Sequences that an engine wants in its own queue, as a share of its rows: what it starts on between two heartbeats."""

# --- detokenizer ---
STREAMS_MAX = 8192
STREAM_EVENT_TOKENS_MAX = 64
"""Tokens in one text event: a replay of a long output is cut up, so that with log probabilities it fits the bus."""
HELD_TOKENS_MAX = 8
"""Tokens whose text is held back because it may be an unfinished character."""
HELD_EVENTS_MAX = 64
"""Token events of one stream held behind a gap."""
EARLY_EVENTS_MAX = 4096
"""Token events held because their stream is not open yet: it is opened while the engine computes the first token."""
EARLY_EVENT_S = 1.0
"""How long such an event is held; longer than the gateway waits for the answer to `OpenBatch`."""
CLOSED_STREAMS_MAX = 4096
"""Streams remembered after their end, so that their late tokens are not held."""
PROMPT_TAIL_TOKENS = 8
"""Prompt tokens that a stream gets as context."""

# --- tokenizer ---
PROMPT_CHARS_MAX = BODY_BYTES_MAX
"""Text of one request: no body has more."""
TEMPLATE_OUTPUT_CHARS_MAX = BODY_BYTES_MAX
TEMPLATE_WALL_S = 2.0
TOKENIZER_INLINE_CHARS_MAX = 2048
"""Longest text encoded on the event loop: about half a millisecond."""
TOKENIZER_INLINE_TOKENS_MAX = 4096
"""Longest list decoded on the event loop."""
TOKENIZER_JOBS_MAX = 512
"""Long texts and conversations under way in one tokenizer; one more is refused."""
TEMPLATE_WORKERS_MAX = 2
TEMPLATE_START_S = 10.0
