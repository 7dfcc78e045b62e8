"""All limits of the system, each with its unit and its reason. Every queue must have its limit here.

Those of uploaded files and batches are in `antiphon.shared.files.limits`.
"""

PROTOCOL_VERSION = 3
"""Major version of the messages, part of every subject. In version 2 each model has its own tokenizers and
detokenizers; sequences wait in gateways, are sent in batches, and are not listed in heartbeats. In version 3 the load
and the counters of an engine are parts of its status."""
MEMBER_ID_CHARS_MAX = 64
"""Characters in a service id. The id is a part of the service's subjects, so this bounds the length of subjects."""
MODEL_TOKEN_CHARS_MAX = 40
"""Characters of a model's name in subjects and in the ids of its services. An id adds at most 16 characters
(`-detokenizer-64`)."""
MODEL_NAME_CHARS_MAX = 256
"""Characters in a model's name that a setting gives. The names are in every heartbeat and in the labels of metrics."""
MODEL_ALIASES_MAX = 64
"""Further names of one model. They are in every heartbeat of its engines, which then has at most about 17 KiB."""
MODELS_MAX = 16
"""Models that one launcher starts. Each model needs at least three processes, so this bounds the number of
processes."""
UNLOADED_MODELS_MAX = 16
"""Models that are not served any more, or could not be loaded, of which a deployment remembers why."""
MODEL_SETTINGS_BYTES_MAX = 16 * 1024
"""Bytes of the settings, as JSON, with which a model is loaded by an order. All gateways are told of them."""

# --- HTTP edge ---
BODY_BYTES_MAX = 16 * 2**20
"""Size of a request body. It has room for about 4 million tokens as text, or 2 million token ids of seven characters
each. This is more than the context of any model, so a long prompt is refused for its tokens, not for its bytes."""
BODIES_BYTES_MAX = 256 * 2**20
"""Bytes of all request bodies in a gateway, from their arrival to the end of their requests; further ones are refused
with 503. One API key may have a half. Bounds memory: 16,384 requests with 16 KiB each, or 16 of the largest bodies."""
JSON_VALUES_MAX = 2**21
"""JSON values in a request body, or in a line of a batch. Decoding them takes up to about a tenth of a second, in which
a process does nothing else, and up to 150 MB. Room for a prompt of 2 million token ids."""
SEARCH_CHARS_MAX = 200
"""Characters in a search among recorded requests. Each is longer than a request's id."""
SEARCH_WORDS_MAX = 8
"""Words in a search among recorded requests. A gateway looks for each of them in every record."""
IGNORED_NAMES_MAX = 16
"""Fields without effect that a request's answer names in a header."""
IGNORED_BYTES_MAX = 1024
"""Size of that header. Names are made up by clients, and proxies have limits for headers."""
IGNORED_LOGGED_MAX = 256
"""Names of such fields that a gateway logs, each once. Clients may make up any number of names."""
FIELD_NAME_CHARS_MAX = 64
"""Characters of an unknown field's name that are shown in the error and compared with the known names. No known name is
longer."""
MESSAGES_MAX = 4096
"""Messages in one chat request. Bounds the work of checking them and of rendering the chat template."""
TOOLS_MAX = 128
"""Tools in one chat request, and calls in one message, as many as in OpenAI's API."""
TOOL_NAME_CHARS_MAX = 64
"""Characters in the name of a tool, as many as in OpenAI's API."""
JSON_DEPTH_MAX = 64
"""Nesting of tools, of a call's arguments and of template variables. Tools of real programs are nested a few levels
 deep; deeper values could exhaust the stack of a process that walks through them."""
PROMPTS_MAX = 1024
"""Prompts in one completions request, and in one `TokenizeRequest`. Each prompt is a sequence at least."""
EMBEDDING_INPUTS_MAX = 2048
"""Inputs of one embeddings request, or documents of one rerank request: as many as in OpenAI's API. Each is a sequence,
and the vectors of all of them are in one answer."""
CONVERSATIONS_MAX = 64
"""Conversations in one request to `/generate`. All are rendered at the same time, each as one job of a tokenizer."""
CHOICES_MAX = 128
"""Choices for each prompt (`n`), as many as in OpenAI's API. Each choice is a sequence."""
SEQUENCES_PER_REQUEST_MAX = 1024
"""Sequences of one request: prompts times choices. Bounds what a single request adds to the queue."""
REQUEST_TOKENS_MAX = 2**24
"""Prompt tokens of all sequences of one request: the tokens of its prompts times `n`. Each sequence carries its prompt
to the engine, so this bounds a request's traffic to 64 MiB. Enough for 128 choices of a prompt of 131072 tokens."""
CLIENT_REQUEST_ID_CHARS_MAX = 256
"""Characters in the `request_id` of a request to `/generate`, which every part of its answer repeats."""
STOP_STRINGS_MAX = 16
"""Stop strings in one request. The detokenizer searches all new text for each of them."""
STOP_STRING_CHARS_MAX = 256
"""Characters in one stop string. The detokenizer holds back text that may be the beginning of a stop string, so this
bounds how far a stream lags behind its tokens."""
STOP_TOKEN_IDS_MAX = 128
"""Stop token ids in one request. They are part of the `Submit` of each sequence, so this bounds its size."""
LOGIT_BIAS_MAX = 1024
"""Keys of `logit_bias` in one request. They are part of the `Submit` of each sequence, so this bounds its size."""
ALLOWED_TOKEN_IDS_MAX = 4096
"""Ids in `allowed_token_ids` of one request; bounded for the same reason."""
BAD_WORDS_MAX = 256
"""Words in `bad_words` of one request. A word counts once for each form in which it is forbidden: at the start of a
text, and after a space."""
THINKING_MARK_TOKENS_MAX = 64
"""Tokens in each of the marks around a model's reasoning, if it has a budget."""
BAD_WORD_TOKENS_MAX = 64
"""Tokens in one word of `bad_words`."""
GRAMMAR_BYTES_MAX = 64 * 2**10
"""Length of a regular expression or grammar in UTF-8, and of one text in a JSON Schema: the time for a mask grows with
the length of a text that must be written. It is part of the `Submit` of each sequence."""
SCHEMA_BYTES_MAX = 256 * 2**10
"""Length of a JSON Schema. It is part of the `Submit` of each sequence, as are the prompt's tokens, which take as many
bytes if they are 65536."""
GRAMMARS_BYTES_MAX = 64 * 2**20
"""Length of a request's grammar times its sequences, as much as `REQUEST_TOKENS_MAX` allows for prompts: 256 sequences
with the longest schema, or all of `SEQUENCES_PER_REQUEST_MAX` with one of 64 KiB."""
SCHEMA_DEPTH_MAX = 64
"""Levels of a JSON Schema in which keywords that cannot be enforced are left out. Bounds the recursion; the compiler of
grammars refuses schemas that are about as deep."""
SCHEMA_COMPARISONS_MAX = 1024
"""Comparisons of the parts of a schema's `oneOf`, to see whether they exclude each other: two parts at a time, and each
property that both require. Bounds the time to some milliseconds; enough for 45 parts."""
LOGPROBS_MAX = 20
"""Candidates reported for each position (`top_logprobs` of chat), as many as in OpenAI's API."""
COMPLETION_LOGPROBS_MAX = 5
"""Candidates reported for each position at `/v1/completions` (`logprobs`), as many as in OpenAI's API."""
PROMPT_LOGPROBS_MAX = 2**20
"""Log probabilities of one prompt in an answer: tokens times candidates, the token itself included. Bounds the size of
the answer (about 60 MB) and of the messages before it."""
GATEWAY_REQUESTS_MAX = 16384
"""Requests in the gateway at the same time, including those that wait for an engine. Further requests are refused with
503 and a time to retry after. A waiting request costs the memory of its prompt and no message on the bus."""
GATEWAY_SEQUENCES_MAX = 65536
"""Sequences (prompts times choices) of all requests in the gateway at the same time. Further requests are refused with
503. Bounds memory, because one request may have many sequences."""
BUS_WAIT_S = 2.0
"""How long a new request waits in a gateway without a connection to the bus before it is refused with 503. To connect
to another server, or to a restarted one, takes less time than this; clients wait longer than this."""
BUS_WAITERS_MAX = 1024
"""Requests in one gateway that wait for the bus (`BUS_WAIT_S`). Further requests are refused with 503 at once, so that
the bus is not flooded when it is back."""
GATEWAY_IDLE_SEQUENCES_MAX = 8192
"""Sequences of the idle lane (requests that use only the capacity that all others leave) among `GATEWAY_SEQUENCES_MAX`.
Further requests for the lane are refused with 503, so that idle work cannot fill the gateway."""
IDLE_S = 300.0
"""Longest time for which a request of the tier `flex` stays in the idle lane, in seconds. Then it becomes an ordinary
request, so that it ends within the 10 minutes for which OpenAI's clients wait."""
CACHE_SALT_CHARS_MAX = 256
"""Characters in `cache_salt`. The salt is part of the `Submit` of each sequence, so this bounds its size."""
ADAPTER_NAME_CHARS_MAX = 128
"""Characters in the name of an adapter, which requests give in `model`. All names of a model are in one entry of a
store, so this bounds its size."""
ADAPTERS_MAX = 1024
"""Adapters of one model. Their names, paths and versions are one entry of a store, of at most about 512 KiB."""
ADAPTER_PATH_CHARS_MAX = 1024
"""Characters in the path of an adapter's directory, as many as usual systems allow in a few levels of directories."""
ADAPTERS_REPLACED_S = 60.0
"""How long engines keep an adapter that was replaced or unloaded for requests that were accepted before. Longer than a
request waits for a place in ordinary load."""
ADAPTER_LOAD_TIMEOUT_S = 120.0
"""Time limit for an engine to load an adapter on request: enough to read a few GiB from a slow disk."""
ADAPTER_STORE_TIMEOUT_S = 2.0
"""Time limit of one operation of the store of adapters."""
KEY_NAME_CHARS_MAX = 64
"""Characters in the name of an API key. The name is part of usage records and of keys in the store of limits."""
API_KEYS_MAX = 10_000
"""Keys in a key file. Bounds the time to read it and the memory for the state of each key."""
REQUEST_ID_HEADER_CHARS_MAX = 128
"""Characters in an `X-Request-Id` of a client, which is repeated in the response and in the usage record."""
QUOTA_LEASE_S = 1.0
"""How long a gateway keeps its reserved share of a key's quota. The share is the quota that the key gains in this time:
most requests need no round trip, and an unused share is returned soon."""
QUOTA_HOLD_S = 10.0
"""How long the requests in progress of a gateway count towards a key's limit after the gateway has last confirmed
them. Frees the places of a gateway that has died."""
QUOTA_ENTRY_S = 3600.0
"""How long the store keeps the state of an unused key's limits. The token buckets of its limits are full again after a
minute, or later if answers were longer than estimated."""
QUOTA_STORE_TIMEOUT_S = 0.25
"""Time limit of one operation of the store of limits. A request waits for it."""
QUOTA_STORE_RETRY_S = 5.0
"""Time after a failure of the store of limits for which each gateway counts alone."""
OUTPUT_ESTIMATE_TOKENS = 256
"""Output tokens that are reserved from a key's limit for a choice without `max_tokens`, until its length is known."""
USAGE_QUEUE_MAX = 10_000
"""Usage records that wait for one receiver; further ones are dropped and counted. Bounds memory while it is down."""
USAGE_BATCH_MAX = 500
"""Usage records that are delivered together. Keeps one delivery below 500 KiB."""
USAGE_LOG_BYTES = {"memory": 32 * 2**20, "file": 128 * 2**20}
"""Size of the log with usage records: about 70,000 in memory. A record that no sink has taken waits there until the log
is full; then the oldest are dropped."""
USAGE_LOG_AGE_S = 7 * 24 * 3600.0
"""How long a usage record is kept. For this time a request cannot get a second one."""
USAGE_LOG_WAIT_S = 10.0
"""How long a gateway that starts waits for the log of usage records. Without it, records go directly to the sink."""
USAGE_LOST_S = 10.0
"""How long nobody runs a request that has no usage record, before the request counts as lost. Longer than a gateway
stands still because its machine is busy."""
USAGE_LOOK_S = 5.0
"""Interval in which a gateway looks again at requests that nobody runs."""
USAGE_LOOK_ALL_S = 300.0
"""Interval in which a gateway looks for such requests although no gateway has ended."""
USAGE_TAIL_BYTES = 2**20
"""Size of the end of a file of usage records in which its sink looks for records that it has: several batches."""
USAGE_POLL_S = 1.0
"""Interval in which the gateway that feeds a sink looks for records of other gateways."""
USAGE_FLUSH_S = 5.0
"""How long a gateway that shuts down waits for a receiver to accept the last usage records."""
STREAM_RESUME_S = 600.0
"""How long a stream can be resumed after a gateway has last written the stream's record. Longer than clients retry."""
ATTEMPTS_PER_RUN = 1000
"""Range of attempt numbers for each fencing token of a stream, so that the first attempt of a run that resumes the
stream is higher than all attempts of former runs. Above the number of losses that a sequence survives (`LOSSES_MAX`).
"""
STREAM_FORGOTTEN_S = 3600.0
"""How long the record of a stream is kept. After `STREAM_RESUME_S` its client gets the error `stream_expired`."""
STREAM_RENEW_S = 30.0
"""Interval in which the record of a running stream is written again, with its tokens so far. This limits how much of a
gateway's journal (the log of the tokens that its streams have accepted) another gateway must read when it takes the
stream over: 120 messages."""
STREAM_JOURNAL_S = 0.25
"""Interval in which a gateway writes the tokens of its streams to its journal. If the gateway dies, the tokens of the
last interval are computed again."""
STREAM_FLUSH_S = 0.1
"""Interval in which a gateway writes the events of a background response to their log, where clients read them."""
STREAM_STORE_TIMEOUT_S = 2.0
"""Time limit of one operation of the store of streams. The token path does not wait for it."""
STREAM_STORE_AWAY_S = 10.0
"""While the store of streams is unavailable, a stream that asks to be resumable still begins as a resumable one for
this long. A bus that is restarted is back within this time, and the records of such streams are written then."""
LOG_EMPTY_S = 120.0
"""How long a log on the bus keeps the empty message that replaces a dropped entry, in seconds. For this time a gateway
that was frozen cannot write to the entry again. Longer would only cost space."""
STREAM_STORE_BYTES = {"memory": 64 * 2**20, "file": 512 * 2**20}
"""Size of the log with the records of streams, and of the log with the journals: each may have this size. Each gateway
fills a part of the first, in which the API key that has most loses its oldest records first. Of the second the oldest
messages are dropped."""
STREAM_BODY_BYTES_MAX = 2**20
"""Size of the body of a request whose stream is recorded. Room for contexts of 200000 tokens; longer requests are
served, but cannot be resumed."""
STREAM_SEQUENCES_MAX = 32
"""Sequences of a request whose stream is recorded. The id of each event that is sent to the client has, for every
sequence, the number of tokens and characters sent so far, so this bounds the size of an id to about 400 bytes."""
STREAM_JOURNAL_BYTES_MAX = 512 * 2**10
"""Approximate size of one message of a journal. New tokens that need more are divided among several messages."""
IDEMPOTENCY_S = 600.0
"""How long an answer is kept for repetitions of its request (`Idempotency-Key`). Longer than clients retry."""
IDEMPOTENCY_LOG_AGE_S = 3600.0
"""How long the bus knows of a request with an `Idempotency-Key` whose gateway has not answered it."""
IDEMPOTENCY_LOG_BYTES = {"memory": 16 * 2**20, "file": 128 * 2**20}
"""Size of the log with these requests and their answers. Each gateway fills a part of it, in which the API key that has
most loses its oldest answers first."""
IDEMPOTENCY_SHARED_BYTES_MAX = 512 * 2**10
"""Size of an answer that gateways share: it fits into a message of any NATS server. Larger ones have 100,000 tokens;
only the gateway that has answered can repeat them."""
IDEMPOTENCY_ANSWERS_MAX = 1024
"""Answers that a gateway keeps for repetitions; the API key that has most loses its oldest. Also the largest number of
requests with an `Idempotency-Key` in progress."""
IDEMPOTENCY_BYTES_MAX = 64 * 2**20
"""Size of the answers that a gateway keeps for repetitions. Bounds memory."""
RECORD_STEPS_MAX = 2048
"""Steps kept in the record of one request, over all its sequences; further ones are counted only. Bounds memory: a step
takes 80 bytes."""
RECORD_PIECES_MAX = 2048
"""Pieces of output kept in the record of one request. A piece has the times of its arrival and of its writing to the
client, and takes 32 bytes."""
RECORD_MARKS_MAX = 1024
"""Other events kept in the record of one request: placements, losses, preemptions."""
RECORD_PINNED_MAX = 32
"""Failed requests, and as many of the slowest, whose records a gateway keeps in addition to those of the latest."""
RECORD_RUNNING_MAX = 1024
"""Requests in progress that a gateway records at the same time; further ones are served without a record."""
RECORD_LIST_MAX = 1500
"""Recorded requests in one answer between gateways: all that a gateway keeps by default, those in progress included."""
RECORD_QUERY_S = 1.0
"""Time for another gateway to answer about its recorded requests. The result names gateways that did not answer."""
STEP_EVENTS_S = 0.1
"""Longest time that an engine collects the events of its steps before it sends them. One message for several short
steps costs the engine less than a message for each."""
STEP_EVENTS_MAX = 64
"""Steps in one message of step events."""
COMPACTION_TOKENS_MAX = 1024
"""Tokens of the summary of a conversation (`/v1/responses/compact`)."""
IDENTIFIER_CHARS_MAX = 512
"""Characters in a client's own `user`, `safety_identifier` or `prompt_cache_key` of a response. They are stored and
returned. OpenAI's API allows 64, which is enough for an id; this leaves room for longer ones."""
METADATA_PAIRS_MAX = 16
"""Pairs in the `metadata` of a response or a batch, as many as in OpenAI's API. Metadata is stored and returned."""
METADATA_KEY_CHARS_MAX = 64
"""Characters in a key of `metadata`, as many as in OpenAI's API."""
METADATA_VALUE_CHARS_MAX = 512
"""Characters in a value of `metadata`, as many as in OpenAI's API."""
RESPONSES_BYTES_MAX = 256 * 2**20
"""Size of the responses that the bus keeps for `/v1/responses`, or one gateway alone. On the bus each gateway fills a
part of it. The API key that has most loses its oldest ones first."""
RESPONSE_TTL_S = 24 * 3600.0
"""How long a stored response can be retrieved and continued: a working day and the night after it."""
TEMPORARY_LEFTOVERS_MAX = 100
"""Temporary directories of killed gateways that a gateway removes when it starts; the next gateway removes the rest."""
BACKGROUND_RECORD_BYTES = {"memory": 32 * 2**20, "file": 64 * 2**20}
"""Size of the records of responses that run in the background: their bodies, and their tokens so far. For each gateway
a part, of which those of one API key take at most what they leave to others."""
BACKGROUND_EVENT_BYTES = {"memory": 40 * 2**20, "file": 192 * 2**20}
"""Size of the log with the events of background responses. Of ended ones each gateway keeps what fits into its part, in
which the API key that has most loses its oldest ones first."""
BACKGROUND_BATCH_BYTES_MAX = 4 * 2**20
"""Approximate size of one message with events of a background response. Room for all events of an output of 16000
tokens."""
BACKGROUND_RETRY_S = 600.0
"""How long a gateway that has taken over a background response tries to run it while the response's model has no
engine."""
BACKGROUND_RESPONSES_MAX = 256
"""Responses that run in the background of one gateway; further ones are refused with 503. No client waits for them, so
nothing else limits the memory of their events."""
HEADER_BYTES_MAX = 64 * 2**10
"""Size of a request's line and headers together."""
HEADER_READ_S = 30.0
"""Longest time for the request line and headers to arrive, from the connection or from their first byte on."""
BODY_READ_S = 60.0
"""Longest time for a request's body to arrive. Ends requests whose client stops sending."""
IDLE_CONNECTION_S = 75.0
"""How long a connection without a request stays open. This is longer than clients keep idle connections (5 to 60 s), so
that the client closes first: a request sent on a connection that the server is closing would be lost."""
SOCKET_PING_S = 20.0
"""Interval of pings on a WebSocket: proxies close a connection that is silent for a minute. A client may answer them
late, because simple ones read only while they wait for a response; the connection is broken if its machine does not
even acknowledge them for `CLIENT_STALL_S`."""
SOCKET_AGE_S = 3600.0
"""How long a WebSocket of `/v1/responses` may last, as in OpenAI's API. A response that is in progress then is
completed."""
SOCKET_MESSAGES_MAX = 16
"""Messages of one WebSocket that wait until the response before them is complete; further ones are refused."""
SOCKET_ARRIVALS_MAX = 256
"""Messages of one WebSocket that may arrive at once, in one piece of what the network delivers. With more, the
connection is closed: no client has a use for so many, and each takes memory beyond its bytes."""
SOCKET_PIECES_MAX = 4096
"""Pieces (frames) of one message on a WebSocket, each of which takes memory beyond its bytes. A client that divides the
largest message into pieces of 4 KiB needs as many."""
SOCKET_PONG_BYTES_MAX = 2**18
"""Bytes that wait to be sent on a WebSocket, from which on its client's pings are not answered: it does not read."""
SOCKET_RESPONSES_MAX = 4
"""Responses of one WebSocket that it can continue although they are not stored: the last one, and a few before it."""
SOCKET_RESPONSES_BYTES_MAX = 128 * 2**20
"""Size of these responses of all WebSockets of one gateway. The API key that has most loses its oldest ones first."""
CONVERSATION_ADDED_MAX = 20
"""Items that are added to a conversation at once, as in OpenAI's API."""
CONVERSATION_TRIES = 8
"""Attempts to change a conversation that others change at the same time."""
LINGER_S = 2.0
"""How long a connection stays open after an answer that ends it, so that a client that still sends reads the answer."""
CONNECTIONS_MAX = 2 * GATEWAY_REQUESTS_MAX
"""Open connections of one gateway; fewer if the process may have fewer descriptors. Bounds memory."""
DESCRIPTORS_RESERVED = 320
"""Descriptors that a gateway keeps for running batches (four each), images from the network and the bus; an idle one
has a dozen open."""
CLIENT_STALL_S = 60.0
"""Longest time for a client to accept written data before its connection counts as broken. The server buffers at most
64 KiB for the client meanwhile."""
SLOW_CLIENT_EVENTS_MAX = 65536
"""Updates of one request that its client has not received. With more, the request fails with `timeout`, so that a slow
client cannot fill the gateway's memory."""
TURNS_AT_ONCE = 8
"""Largest number of requests that a gateway prepares (reads, checks, tokenizes) at the same time. Requests of different
API keys get this work in turn."""
TURN_S = 0.05
"""Longest time for which a request counts towards `TURNS_AT_ONCE`. If it is not prepared by then, its preparation
continues, and the next request may begin."""
QUEUE_WAIT_S = 30.0
"""Longest time for which a request waits until its model has a tokenizer, a detokenizer and an engine that are ready
and respond; then it fails with 503. The wait for a busy engine has no other limit than `--max-queue-wait`."""

# --- bus ---
BUS_PAYLOAD_BYTES = 16 * 2**20
"""`max_payload` of the NATS servers that Antiphon starts and configures; a connection uses the value that its server
reports. A prompt takes 4 bytes per token and 16 bytes per KV block, so with blocks of 16 tokens a message has room for
3 million token ids; as text it has room for as many tokens as a request body."""
OUTBOUND_BYTES_MAX = 32 * 2**20
"""Client-side buffer of data that is not sent yet. It has room for one of the largest messages and others."""
MAILBOX_MAX = 4096
"""Messages that wait for one actor. Bounds memory and delay: a further request is answered with `server_is_overloaded`,
a further one-way message is dropped and counted."""

LIVENESS_BATCH_MAX = 1000
"""Sequences in one `ProgressQuery` or `OwnershipQuery`. Keeps the message small (about 35 KB) whatever the number of
sequences. The sequences that have been unconfirmed for the longest time come first."""
BATCH_BYTES_MAX = 512 * 2**10
"""Size of a `SubmitBatch` or `OpenBatch` with several items. It is below NATS's default `max_payload` of 1 MiB. A batch
with a single item may be larger."""
SUBMIT_BATCH_MAX = 64
"""Sequences in one `SubmitBatch`. While an engine admits a batch, its other messages wait."""
OPEN_BATCH_MAX = 256
"""Streams in one `OpenBatch`. While a detokenizer opens the streams of a batch, its other messages wait."""

# --- timers, in seconds: they affect how fast the system recovers, not whether its results are correct ---
HEARTBEAT_INTERVAL_S = 0.15
"""Interval of the heartbeats of engines and detokenizers. Shorter intervals would reduce the throughput of a small
machine: the code of a process that wakes beside a running model is in none of the processor's caches."""
GATEWAY_HEARTBEAT_INTERVAL_S = 0.3
"""Interval of the heartbeats of gateways. Engines and detokenizers need them only to notice after `ORPHAN_S` that a
gateway is gone, so the interval can be longer."""
TOKENIZER_HEARTBEAT_INTERVAL_S = 0.6
"""Interval of the heartbeats of tokenizers. It can be long because a gateway asks another tokenizer when one does not
answer, without waiting for its lease. The three intervals are multiples of the shortest, so that the processes of a
machine wake at the same moments."""
FIRST_HEARTBEATS_S = 1.5 * TOKENIZER_HEARTBEAT_INTERVAL_S
"""How long a new gateway waits for heartbeats before it answers requests. Every living member sends a heartbeat in this
time."""
LEASE_S = 0.4
"""Time without a heartbeat and without an answer after which a member counts as dead, unless
`LEASE_INTERVALS` of its intervals are longer. Leases are checked when heartbeats are due: a frozen member counts as
dead at the third heartbeat that is missing, so that two lost or late ones do not count as a death."""
LEASE_INTERVALS = 2.5
"""Number of its own heartbeat intervals for which a member may be silent before it counts as dead. It gives members
with longer intervals a longer lease."""
LONE_SILENCE_S = 10.0
"""Silence after which the only engine or detokenizer of a model counts as lost, if its process is not known to have
ended. Before that nothing is gained: nobody else could do its work, and a process that only got no processor goes on
where it was. As long as a hanging engine has before it ends itself (`STALL_EXIT_S`)."""
STATUS_AGE_MAX_S = 2.0
"""Age of its last heartbeat up to which answers renew the lease of a member. The load and state in an older
heartbeat say nothing any more, so the member then counts as dead although something of it still answers."""
RECONNECT_S = 0.6
"""After a process was disconnected from the bus, no lease ends and no member is asked for this time: after a restart of
the bus, the other processes connect again one after the other."""
LOG_LINES_MAX = 4096
"""Lines of a log that wait for a reader that stalls (about 1 MB); further lines are dropped and counted."""
LOST_MEMBERS_S = 600.0
"""How long a gateway tells that a member was lost (`GET /admin/topology`), so that an operator who looks sees it."""
LOST_MEMBERS_MAX = 64
"""Lost members that a gateway remembers, so that a process that ends again and again does not fill its memory."""
MEMBER_CHANGES_MAX = 1024
"""Members that joined, drained or were lost, which a gateway remembers for the charts; about 300 KB."""
HISTORY_INTERVAL_S = 2.0
"""Time between two points of a gateway's history. A shorter one would show the noise of single requests."""
HISTORY_POINTS = 1800
"""Points of a gateway's history: an hour."""
HISTORY_ENGINES_MAX = 64
"""Engines of which a gateway keeps a history; each takes 160 KB."""
PROBE_INTERVALS = 1.5
"""Heartbeat intervals of silence after which a gateway asks the bus whether the process of an engine or a detokenizer
still exists. One heartbeat is then missing. A process that has ended is known before its lease expires."""
SUBMIT_TIMEOUT_S = 0.5
"""Time to wait for the answer to a `SubmitBatch`, besides the time for its size (`SUBMIT_BYTES_PER_S`). The batch is
then sent once more; after a second timeout the engine counts as not answering."""
SUBMIT_BYTES_PER_S = 8 * 2**20
"""Bytes per second: the size of a `SubmitBatch` divided by this is added to `SUBMIT_TIMEOUT_S`. Sending, decoding and
queueing a long prompt is faster than this."""
OPEN_TIMEOUT_S = 0.5
"""Time to wait for the answer to `OpenBatch`, `OpenStream` and `Retarget` before another member is tried."""
RESEND_INTERVAL_S = 0.02
"""Shortest time between two `Resend` for one sequence, so that a gap causes one `Resend` and not one for each event
that arrives after it."""
STALL_S = 0.35
"""Time without text of a running sequence after which its gateway asks the engine for the sequence's progress. If the
engine has more tokens and they do not arrive within this time either, the gateway rebuilds the stream."""
OWNERSHIP_CHECK_S = 1.2
"""Time without confirmation of a sequence after which an engine asks the gateway whether it still owns the sequence.
Detokenizers ask after `ORPHAN_S`."""
TOMBSTONE_S = 30.0
"""How long an engine remembers that a sequence was cancelled or released by its owner, so that it refuses a late
`Submit` of the sequence."""
ORPHAN_S = 5.0
"""Silence of a gateway after which engines drop its sequences and detokenizers its streams. A detokenizer also asks the
gateway about a stream after this time without tokens."""
LOCKSTEP_VOTE_S = 10.0
"""Two engines may run a request in lockstep: both compute it, and their tokens are compared. If the tokens differ, a
third engine must compute one token within this time, as its vote on which of the two engines is wrong."""
LOCKSTEP_TRIES = 3
"""How often a gateway tries to find out which of two engines that differ is wrong, before the request fails. The tries
are `LOCKSTEP_GRACE_S` apart, because another engine that can vote may be busy or starting."""
LOCKSTEP_GRACE_S = 2.0
"""How long after a model last had two comparable engines a request that asks for lockstep is still accepted. It waits
for the second engine, because heartbeats may only be late."""
SLEEP_ORDER_S = 600.0
"""How long a client waits for the answer to `/sleep` or `/wake_up`: engines may have requests, or files to load."""
WAKE_AGAIN_S = 1.0
"""Time between two `Wake` of a gateway whose sequences wait for an engine that sleeps."""
SELF_TEST_S = 10.0
"""Time in which an engine must answer a gateway that asks it to test itself."""
STEP_STALL_S = 1.5
"""A step on the host's processors counts as hanging only when it has run for longer than this, see `STEP_STALL_FACTOR`.
For a step of a few milliseconds a delay by more than that factor is normal on a busy host."""
STEP_STALL_FACTOR = 10.0
"""A step counts as hanging when its run time exceeds both `STEP_STALL_S` (on a device `DEVICE_STEP_STALL_S`) and this
factor times its expected duration."""
DEVICE_STEP_STALL_S = 5.0
"""Takes the place of `STEP_STALL_S` on a device, where a step may have to compile a kernel that no earlier step
needed."""
DEVICE_FIRST_STEP_S = 60.0
"""Run time with which a step on a device counts as hanging if no step of its size has ended yet, so that no duration is
expected. On the host's processors such a step is judged by `STEP_IDLE_S` alone."""
STEP_IDLE_S = 1.2
"""A step on the host's processors counts as hanging if no thread has computed for this long. The watchdog needs two
heartbeats to see this, so gateways know of it within 2 s."""
STALL_EXIT_S = 10.0
"""If a step has counted as hanging for this long, the engine process exits, so that its supervisor starts it again."""
DRAIN_S = 20.0
"""Longest graceful shutdown: running requests may end in this time, then the process exits."""
HAND_OVER_S = DRAIN_S - 2.0
"""An engine that drains hands over the sequences that still run after this many seconds. Gateways move most of them
earlier: as soon as another engine has room. A gateway that drains ends the requests that still run after this many
seconds: clients that can resume their streams are disconnected, others get an error."""
WAITING_LOOK_S = 0.05
"""Time between two checks for connections that wait in the listening sockets of the other gateways. A connection that
its own gateway does not accept waits between one and two of these times."""
WAITING_ACCEPTED_MAX = 64
"""Connections that a gateway accepts at once from the listening socket of another one, so that several gateways share
them."""
ACCEPT_LINGER_S = 0.25
"""Time between the end of accepting connections in a draining gateway and the closing of its listening socket and of
idle connections."""
FIRST_REQUEST_S = 2.0
"""Longest wait of a draining gateway for a request on a connection that has not sent one, or has sent a part of one."""
DEATHS_MAX = 3
"""Engines that may die while they run a sequence, at about the same output token, before the sequence fails. The
sequence itself may be what kills them."""
DEATH_TOKENS = 16
"""Output tokens since the last loss of an engine after which earlier deaths no longer count: a sequence that kills
engines does not get past the token at which it kills them. More than the number of tokens whose events are lost with an
engine."""
STARTS_MAX = 3
"""How often recorded work is started without getting further before it fails: batches, background responses, resumed
streams. The work itself may be what ends its gateways; a few starts are left for deaths that have other causes."""
LOSSES_MAX = 20
"""How often a sequence may lose its engine before it fails. Engines that were only silent for longer than a lease, as
on a host that is busy with other work, count too."""

# --- engine ---
ENGINE_WAITING_MAX = 4096
"""Unfinished sequences in an engine, running and waiting ones; further ones are refused as busy. Bounds the engine's
queue, to which several gateways may send at the same time."""
RETAINED_SEQUENCES_MAX = 8192
"""Sequences of which an engine keeps the tokens: unfinished ones, and finished ones until their owner has the tokens.
Further ones are refused as busy. Bounds memory."""
TOMBSTONES_MAX = 65536
"""Tombstones in an engine (see `TOMBSTONE_S`). Bounds memory: if there are more, the oldest are dropped early."""

STEP_REPORTS_MAX = 64
"""Reports of computed steps that are not published yet. With more the step loop waits, so that publishing keeps up."""
COMPILED_GRAMMARS_MAX = 256
"""Compiled grammars that an engine keeps. One takes kilobytes, a hostile one some megabytes."""
MASKS_STEP_LEAST_S = 0.005
"""Seconds of processor time that a step has at least for the masks of grammars; further masks wait for the next step.
It has as much as the rest of the step takes, so that most steps take at most twice as long. Masks of common schemas
take 10 to 100 microseconds each."""
MASKS_STEP_MOST_S = 0.020
"""Seconds of processor time that a step has at most for the masks of grammars, however long the rest takes."""
MASK_COST_S = 0.004
"""Seconds of processor time that a grammar may take for each token of a sequence, on average."""
MASK_EXCESS_S = 0.06
"""Seconds by which a sequence's grammar may exceed `MASK_COST_S` in all before the sequence ends with an error. A step
counts for at most a quarter of it, so that a few slow masks, or pauses of the thread, do not end a sequence."""
COMPILED_LIBRARIES_MAX = 32
"""Compiled libraries of the CPU backend that are kept in a directory: enough for a few instruction sets and versions,
of 300 KiB each."""
PACKED_FILES_MAX = 4
"""Models whose packed weights are kept in a directory. Bounds disk space: a file is as large as the packed weights."""
PACKED_BYTES_MIN = 64 * 2**20
"""Packed weights smaller than this are not kept in a file: packing them at each start takes no noticeable time."""

ENGINE_QUEUE_AHEAD = 1.0
"""Sequences that an engine wants in its own queue, as a multiple of its batch slots. The engine starts them between two
heartbeats, before gateways see its new credit."""

# --- following the content of prefix caches ---
BLOCK_BATCH_S = 0.05
"""Least time between two messages with events of a prefix cache, seconds. A prompt that comes sooner is placed by what
its gateway has sent itself."""
BLOCK_EVENTS_BATCH = 8192
"""Events in one message, or blocks in a piece of a snapshot: 64 KiB."""
BLOCK_EVENTS_MAX = 2**18
"""Events that the event loop of an engine has not taken yet. With more all are dropped, and followers get a snapshot.
Four times the blocks of a large cache."""
BLOCK_EVENTS_KEPT = 2**16
"""Events that an engine keeps for followers that missed some: 512 KiB. For older ones followers get a snapshot."""
BLOCK_PIECES_AT_ONCE = 8
"""Pieces of snapshots that an engine sends every `BLOCK_BATCH_S`: 512 KiB, so that tokens need not wait for them."""
BLOCK_LEASE_S = 5.0
"""Time for which an engine tells a gateway of its blocks without a renewal, seconds."""
BLOCK_RENEWAL_S = 1.0
"""Interval of renewals, seconds. Each says how far the gateway has got, so that a lost event is sent again."""
BLOCK_RETRY_S = 0.3
"""Time after which a gateway asks again for events or a snapshot that it lacks, seconds."""
BLOCK_FOLLOWERS_MAX = 64
"""Gateways that follow one engine; further ones estimate the content of its cache. Bounds memory and messages."""
BLOCK_BATCHES_HELD = 256
"""Messages with events that a gateway holds until what is missing before them has arrived. With more it begins anew."""
BLOCKS_FOLLOWED_MAX = 2**21
"""Blocks of all engines whose caches a gateway follows: at most about 300 MB. It estimates the content of the others.
"""

# --- transfers of KV between engines ---
KV_TRANSFER_TOKENS_MIN = 16
"""Minimum number of missing prompt tokens for which a decode engine uses a transfer. To compute fewer tokens itself
takes about as long as a decode step, which is less than a transfer."""
KV_CONNECT_S = 1.0
"""Longest time to connect to the engine that has the KV, seconds. After it the receiver computes the prompt itself."""
KV_ALIVE_S = 0.2
"""Interval of the sender's `Alive` messages while it has no block to send, seconds."""
KV_SILENCE_S = 1.0
"""Silence of the sender, also within a block, after which the receiver computes the rest itself. Five times
`KV_ALIVE_S`."""
KV_PROGRESS_S = 30.0
"""Time without a new block after which the receiver computes the rest itself, although the sender is alive."""
KV_ARRIVAL_S = 2.0
"""How long a sender waits for the announcement of a transfer that a receiver requests, seconds. Both engines get the
request at the same time; placing a sequence takes at most twice `SUBMIT_TIMEOUT_S`."""
KV_LEASE_S = 20.0
"""How long a sender keeps the blocks of a transfer that no engine fetches, seconds. Then they are freed."""
KV_TIER_TOKENS_MIN = 256
"""Tokens from which on the KV of a sequence is written to the disk, and missing tokens from which on it is read. Fewer
are computed in about the time of a read."""
KV_STORES_MAX = 2048
"""Blocks that wait to be written to the disk. Further ones are not written."""
KV_KEEP_S_MAX = 24 * 3600.0
"""How long a request can have the KV of its prompt kept on the disk, seconds."""
KV_COPIES_WAITING_MAX = 16_384
"""Stored blocks whose copies wait to be sent to another engine. Further ones are not copied."""
KV_COPIES_KNOWN_MAX = 65_536
"""Blocks that an engine knows to have been copied. If their place is lost, they are copied to another one."""
KV_COPIES_OFFER_MAX = 16
"""Blocks that are offered at once."""
KV_COPIES_SILENCE_S = 10.0
"""Silence of the engine that keeps copies after which another one is asked, seconds. It writes its own blocks first."""
KV_COPIES_AVOID_S = 30.0
"""How long an engine is not asked again that did not keep copies, seconds."""
KV_COPIES_FROM_MAX = 16
"""Engines whose copies one engine keeps."""
KV_LOADS_MAX = 256
"""Loads in progress in one engine, each with a connection. Further ones wait."""
KV_FETCHES_MAX = 1024
"""Connections of receivers to one sender; further ones are closed at once, and the receivers compute themselves."""
KV_HEADER_BYTES_MAX = 4 * 2**20
"""Size of a message's header: room for the hashes of 200,000 blocks."""
KV_SHARED_BYTES = 4 * 2**20
"""Shared memory of one transfer between engines of one machine; its places for blocks are reused. It is small because
more was not faster, and because new pages cost more than the copies."""
KV_SHARED_BYTES_MAX = 32 * 2**20
"""Shared memory of one transfer for blocks so large that `KV_SHARED_BYTES` holds fewer than two of them. Larger ones go
through a socket."""
KV_BATCH_BYTES = 2**20
"""Bytes of a group of small KV blocks in shared memory. One message announces the blocks of a group, and one answer
frees the places of a group."""
KV_SHARED_KEPT_MAX = 8
"""Shared memories of ended transfers that a receiver keeps for the next ones."""
KV_SHARED_KEPT_S = 30.0
"""Time after which a receiver frees shared memory that it has not used again, seconds. A sender waits twice as long."""
KV_SHARED_MAPPED_MAX = 64
"""Shared memories of ended transfers that a sender keeps. The next transfer to a receiver whose memory the sender has
dropped goes through a socket."""

# --- detokenizer ---
STREAMS_MAX = 8192
"""Open streams in one detokenizer; further ones are refused as overload, and gateways choose another detokenizer.
Bounds memory."""
PROMPT_LOGPROBS_TOKENS_MAX = 128
"""Prompt tokens in one event with log probabilities of a prompt. With the most candidates and their text the event has
about 100 KB, which fits into a bus message."""
STREAM_EVENT_TOKENS_MAX = 64
"""Tokens in one text event. The replay of a long output is split, so that each event fits into a bus message even with
log probabilities."""
HELD_TOKENS_MAX = 8
"""Tokens whose text is held back because it ends with an incomplete character. With more the text is sent as it is, so
that invalid bytes do not stop a stream."""
HELD_EVENTS_MAX = 64
"""Token events of one stream that are held after a gap. Further ones are dropped: the engine's answer to `Resend` has
all tokens from the gap on."""
EARLY_EVENTS_MAX = 4096
"""Token events held in one detokenizer because their stream is not open yet: a stream is opened while the engine
computes the first token."""
EARLY_EVENT_S = 1.0
"""How long an event is held for a stream that is not open. Longer than the gateway waits for the answer to
`OpenBatch`."""
CLOSED_STREAMS_MAX = 4096
"""Closed streams that a detokenizer remembers, so that it does not hold their late tokens as early ones."""
PROMPT_TAIL_CHARS = 64
"""Last characters of a rendered conversation that the gateway gets, to detect whether the output begins within
reasoning. Longer than any tag that begins or ends the reasoning."""
PROMPT_TAIL_TOKENS = 8
"""Last tokens of the prompt that a stream gets as context, in which its first output tokens are decoded."""

# --- tokenizer ---
PROMPT_CHARS_MAX = BODY_BYTES_MAX
"""Characters of text in one request. A request body cannot have more."""
TEMPLATE_OUTPUT_CHARS_MAX = BODY_BYTES_MAX
"""Characters of a rendered conversation, the same as for other text. A chat template may produce more text than it is
given."""
TEMPLATE_WALL_S = 2.0
"""Longest time to render a conversation; then the worker process is killed. A chat template is code that comes with the
model and may run without end."""
TOKENIZE_CHARS_MAX = 65536
"""Characters in one `TokenizeRequest` with several prompts, so that its reply fits into a message of NATS's default
size. A single prompt may be longer."""
TOKENIZE_REQUESTS_MAX = 64
"""Concurrent `TokenizeRequest`s of one request, so that one with many texts does not fill the tokenizers' queues."""
TOKENIZER_INLINE_CHARS_MAX = 2048
"""Longest text encoded on the event loop, in about half a millisecond. Longer texts are encoded on a thread."""
TOKENIZER_INLINE_TOKENS_MAX = 4096
"""Longest token list decoded on the event loop. Longer lists are decoded on a thread."""
TEXT_BYTES_PER_TOKEN = 16
"""Bytes of a text for each token of the context; longer texts are refused before they are encoded (ADR 73). Texts have
3 to 10. Encoding takes up to 320 times the text's size of memory: 5 KiB for each token of the context."""
TEXT_BYTES_ANY = 64 * 2**10
"""Bytes of a text that is encoded for any context. Takes 20 MiB and a twentieth of a second."""
TEXT_BYTES_COUNTED = 2**20
"""Bytes of a text that may exceed the context, because its tokens are only counted, or cut off."""
TOKENIZER_LONG_BYTES_MAX = 2**20
"""Bytes of long texts that a tokenizer encodes at a time (up to 320 MiB of memory); a longer one is encoded alone."""
TOKENIZER_JOBS_BYTES_MAX = 64 * 2**20
"""Bytes of all long texts and conversations in a tokenizer, of one client a half. Bounds memory and waiting time."""
GRAMMAR_WALL_S = 2.0
"""Seconds for checking one grammar; a large schema takes a tenth of a second."""
GRAMMAR_START_S = 10.0
"""Seconds for the start of the process that checks grammars."""
GRAMMAR_VERDICTS_MAX = 256
"""Checked grammars whose verdicts a tokenizer keeps; with the longest grammars, 64 MiB."""
TEMPLATE_WORKERS_MAX = 2
"""Processes of one tokenizer that render chat templates: two, so that one slow conversation does not stop the
others."""
TEMPLATE_START_S = 10.0
"""Longest time for a rendering process to start and compile the template. It usually starts within a tenth of a second;
a busy machine may need longer."""

# --- logs ---
LOG_INTERVAL_S = 1.0
"""Shortest time between two log lines about one kind of malformed input, seconds. Bounds what a flood of it writes."""
LOG_KINDS_MAX = 64
"""Kinds of such lines that one part of a process tells apart; further kinds share one line in the interval."""

# --- images ---
IMAGE_BYTES_MAX = 12 * 2**20
"""Size of the file of one image; encoded in base64 it fills a request body."""
IMAGES_BYTES_MAX = BODY_BYTES_MAX
"""Bytes of the files of all images of a request, those from the network included."""
IMAGES_MAX = 32
"""Images in one request."""
IMAGE_PIXELS_MAX = 36 * 10**6
"""Pixels of one decoded image: a page of A4 with 600 dpi, a screen of 8K. Takes 15 bytes each while it is scaled."""
IMAGE_JPEG_PIXELS_MAX = 64 * 10**6
"""Pixels of a JPEG file, as cameras make them. Above `IMAGE_PIXELS_MAX` it is decoded at half its width and height."""
IMAGES_PIXELS_MAX = 4 * IMAGE_PIXELS_MAX
"""Pixels of all images of a request: twelve of 12 megapixels. Decoding and scaling takes a core a few seconds."""
IMAGES_AT_ONCE = 4
"""Images of one request in the image services at a time. Bounds how far it exceeds `IMAGES_PIXELS_MAX`."""
IMAGE_PART_BYTES = BATCH_BYTES_MAX
"""Bytes of a file or of embeddings in one message."""
IMAGE_READS_MAX = 4
"""Parts of one image that are requested concurrently."""
IMAGE_ENCODE_S = 60.0
"""Time limit for computing the embeddings of one image, seconds: on a CPU a large image takes many seconds."""
IMAGE_READ_S = 5.0
"""Time limit for reading one part of an image or of its embeddings, seconds."""
IMAGE_FETCH_S = 10.0
"""Time limit for downloading an image, seconds."""
VISION_JOBS_MAX = 128
"""Images that an image service works on or keeps waiting, of one client a half. Bounds waiting time."""
VISION_FILES_MAX = 2
"""Files of images that an image service has in memory at a time: one is encoded while the next one is read."""
VISION_CACHE_BYTES = 512 * 2**20
"""Size of an image service's LRU cache of embeddings."""
ENGINE_IMAGE_BYTES_MAX = 2 * 2**30
"""Embeddings of waiting and running sequences in one engine; further sequences with images are refused as busy."""
ENGINE_IMAGE_CACHE_BYTES = 256 * 2**20
"""Size of an engine's cache of embeddings for further requests with the same images."""
GATEWAY_IMAGE_BYTES_MAX = 512 * 2**20
"""Files of images of all requests of a gateway; further requests with images are refused as overload."""

# --- tools that the server runs ---
TOOL_SERVERS_MAX = 8
"""MCP servers of one response. Each is asked for its tools before the model runs."""
TOOLS_LISTED_MAX = 128
"""Tools of one MCP server that a response may have. The model reads all of them; more make its prompt useless."""
TOOL_LIST_S = 10.0
"""Time limit for connecting to an MCP server and for each page of its list of tools, seconds."""
TOOL_CALL_S = 60.0
"""Time limit of one call of a tool, seconds, unless the operator's file sets another one."""
TOOL_CALL_S_MAX = 600.0
"""Longest time limit of a call that the operator's file may set, seconds."""
TOOL_ANSWER_BYTES_MAX = 2**20
"""Bytes that are read of one answer of an MCP server. With its event it fits into one message on the bus."""
TOOL_OUTPUT_CHARS_MAX = 128 * 2**10
"""Characters of a result that the model is given and the response has. The rest is cut off, and the text says so."""
TURN_BYTES_MAX = 2 * 2**20
"""Bytes of all lists of tools and results of one response, as JSON. The response repeats them in its last event and in
its record, each of which is one message on the bus."""
TOOL_TRIES = 3
"""How often an idempotent call is sent, with the same key, until its result is known."""
TURN_STEPS_MAX = 64
"""Model steps of one response. The last one is run without tools, so that the response ends with an answer."""
TURN_CALLS_MAX = 128
"""Calls of tools of one response; `max_tool_calls` may set fewer. Further ones are answered with an error."""
TOOL_THREADS = 64
"""Calls of tools that one gateway makes at the same time; further ones wait. Each has a thread and a connection."""
TOOL_SERVERS_FILE_BYTES_MAX = 2**20
"""Size of the operator's file of MCP servers."""

# --- sessions that travel ---
SESSION_PIECE_BYTES = BATCH_BYTES_MAX
"""Bytes of a block of KV in one message."""
SESSION_NAMES_MAX = 1024
"""Names of blocks in one `FindBlocks`: below 64 KiB."""
SESSION_SUFFIXES_MAX = 64
"""Blocks that are looked for beside one: the groups of windowed layers, or the pieces of a state."""
SESSION_SUFFIX_BYTES = 2
"""Bytes that tell the blocks of one place apart."""
SESSION_FRAME_BYTES = 64 * 2**20
"""Size of a block, or of a head, in a session file. Bounds what a gateway and an engine hold of it."""
SESSION_BYTES_MAX = 256 * 2**30
"""Size of an imported file: far above that of the longest contexts. It is not stored, but passed on block by block."""
SESSION_DRAINED_BYTES = 64 * 2**20
"""Bytes of a refused file that a gateway still reads, so that its sender gets the reason."""
SESSION_MOVES_MAX = 2
"""Exports and imports of a gateway at a time: each holds a block and derives a key with 32 MiB."""
SESSION_WRITES_MAX = 4
"""Blocks that an engine receives at a time; beyond, the one that was begun first is dropped."""
SESSION_BLOCK_S = 10.0
"""Time limit for an engine's answer about blocks, seconds: a slow disk, or an index that is read first."""
SESSION_BLOCKS_MAX = 2**20
"""Blocks of one session: sixteen million tokens."""
SESSIONS_MAX = 1000
"""Sessions that a key's list has; the oldest leave it."""

# --- receipts ---
RECEIPT_KEYS_MAX = 64
"""Keys of a key file: a new one each month for five years. All are published and read at each check."""
RECEIPT_BYTES_MAX = 64 * 2**20
"""Size of a file with an answer and its receipt, or of a line of many: far above an answer of a full context."""

# --- command line ---

CHAT_HISTORY_LINES_MAX = 1000
"""Lines that `antiphon chat` remembers for its prompt: some weeks of use, and a file of less than a megabyte."""
