"""The stored state of a stream: its record, and the journal of tokens that each gateway has accepted. Pure."""

import msgspec

from antiphon.services.gateway.guests.offers import RecordedOutput
from antiphon.services.gateway.guests.resume.body_images import BodyImage, FetchedImage
from antiphon.shared.codec import TOKEN_BYTES, pack_ids, unpack_ids


class Progress(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Tokens of one sequence from position `first` on, packed, and the sequence's state after them.

    `num_cached`: prompt tokens that were taken from the prefix cache.
    """

    index: int
    first: int
    tokens: bytes
    cumulative_logprob: float = 0.0
    num_cached: int = 0
    ended: bool = False
    last_from: int = 0
    """Position of the first of the tokens that arrived last, and the cumulative log probability before it."""
    last_from_logprob: float = 0.0
    engine: tuple[str, str] | None = None
    """Id and instance id of the engine on which the sequence runs; None: the same as before."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + len(self.tokens) // TOKEN_BYTES

    def accepted(self) -> "Accepted":
        """Returns the accepted tokens of the sequence. Only if the progress begins with the first token."""
        found = Accepted()
        found.add(self)
        return found


class StreamRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A stream's record: everything that another gateway needs to continue it. It has no API key, only the key's name.

    `fence`: fencing token, incremented with each takeover. `journal_from`: sequence number in the journal from which on
    the owner's entries for the stream can be found; `progress` has the tokens before. Times are Unix seconds;
    `renewed_at` is when the owner last wrote the record.
    """

    request_id: str
    path: str
    body: bytes
    key_name: str
    client_request_id: str
    timeout: str
    created: int
    seed: int | None
    owner_id: str
    owner_instance_id: str
    fence: int
    renewed_at: float
    outlives_client: bool
    journal_from: int
    progress: tuple[Progress, ...] = ()
    images: tuple[BodyImage, ...] = ()
    """The images that were taken out of the body. Their files, and those of `fetched`, are in the log of
    responses."""
    fetched: tuple[FetchedImage, ...] = ()
    starts: int = 1
    """How often the request was started without getting further than `num_known`; the former gateways have died."""
    num_known: int = 0
    """Length of the known output at the last start: its tokens and stored events, and one for each sequence that had
    ended."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of the request that the answer depends on (`StreamBook.kept_headers`)."""
    num_prompt_tokens: int = 0
    """Of all prompts; 0: not known yet. Written when the record is renewed."""


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """The progress of one stream since the owner's previous entry."""

    request_id: str
    fence: int
    progress: tuple[Progress, ...]
    num_prompt_tokens: int = 0


_RECORDS = msgspec.msgpack.Decoder(StreamRecord)
_ENTRIES = msgspec.msgpack.Decoder(tuple[JournalEntry, ...])
_encode = msgspec.msgpack.Encoder().encode


def encoded(record: StreamRecord | tuple[JournalEntry, ...]) -> bytes:
    """Returns a record or a message of the journal as bytes."""
    return _encode(record)


def decoded_record(data: bytes) -> StreamRecord:
    """Returns a record. Raises msgspec.DecodeError."""
    return _RECORDS.decode(data)


def decoded_entries(data: bytes) -> tuple[JournalEntry, ...]:
    """Returns the entries of a message of the journal. Raises msgspec.DecodeError."""
    return _ENTRIES.decode(data)


class Accepted:
    """The tokens of one sequence that are known to be accepted."""

    __slots__ = ("cumulative_logprob", "ended", "engine", "last_from", "last_from_logprob", "num_cached", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.num_cached = 0
        self.ended = False
        self.last_from, self.last_from_logprob = 0, 0.0
        self.engine: tuple[str, str] | None = None

    def without_last(self) -> "Accepted":
        """Returns the accepted tokens without those that arrived last."""
        found = Accepted()
        found.token_ids, found.num_cached = self.token_ids[: self.last_from], self.num_cached
        found.cumulative_logprob, found.engine = self.last_from_logprob, self.engine
        return found

    def add(self, progress: Progress) -> None:
        """Adds progress that continues or repeats what is known. Progress after a gap is left out."""
        if progress.first > len(self.token_ids) or progress.end < len(self.token_ids):
            return
        self.token_ids[progress.first :] = unpack_ids(progress.tokens)
        self.cumulative_logprob, self.ended = progress.cumulative_logprob, self.ended or progress.ended
        self.num_cached = max(self.num_cached, progress.num_cached)
        self.last_from, self.last_from_logprob = progress.last_from, progress.last_from_logprob
        self.engine = progress.engine or self.engine

    def progress(self, index: int) -> Progress:
        """Returns all tokens, as the progress of sequence `index`."""
        return Progress(
            index=index,
            first=0,
            tokens=pack_ids(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            num_cached=self.num_cached,
            ended=self.ended,
            last_from=self.last_from,
            last_from_logprob=self.last_from_logprob,
            engine=self.engine,
        )


def accepted_of(record: StreamRecord, entries: list[JournalEntry]) -> list[Accepted]:
    """Returns the known output of each sequence, from a record and the journal of its owner, in order."""
    found: dict[int, Accepted] = {}
    journal = (entry for entry in entries if (entry.request_id, entry.fence) == (record.request_id, record.fence))
    for progress in (*record.progress, *(one for entry in journal for one in entry.progress)):
        found.setdefault(progress.index, Accepted()).add(progress)
    return [found.get(index) or Accepted() for index in range(max(found, default=-1) + 1)]


def output_of(record: StreamRecord, entries: list[JournalEntry], until: float) -> RecordedOutput:
    """Returns how much output a request is known to have. `until`: Unix time up to which it can be continued."""
    accepted = accepted_of(record, entries)
    own = [entry.num_prompt_tokens for entry in entries if entry.request_id == record.request_id]
    return RecordedOutput(
        until=until,
        ended=bool(accepted) and all(one.ended for one in accepted),
        prompt_tokens=max([record.num_prompt_tokens, *own]),
        cached_tokens=max((one.num_cached for one in accepted), default=0),
        completion_tokens=sum(len(one.token_ids) for one in accepted),
    )
