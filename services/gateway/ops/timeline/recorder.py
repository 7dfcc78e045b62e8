"""Keeps the records of the latest requests of one gateway, and in addition those that failed and the slowest ones."""

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable

from antiphon.services.gateway.ops.timeline.request_record import RequestRecord, ToldStep
from antiphon.services.gateway.path.record import NOT_RECORDED, RecordedRequest, RequestFacts
from antiphon.shared import limits
from antiphon.shared.messages import StepEvents
from antiphon.shared.observability.step_rows import unpacked
from antiphon.shared.structures.kept import Kept

STEPS_BEFORE = 3
"""Number of last steps of each engine that are remembered, for the records of the sequences that begin next."""
ENGINES_MAX = 256
"""Maximum number of engines whose last steps are remembered: those that have reported steps most recently."""


class Recorder:
    """The records of one gateway. `capacity`: number of finished requests that are kept; 0: nothing is recorded.

    `content_bytes`: maximum size of all contents (prompts and tokens) together; 0: records have no content. The oldest
    contents of the API key that has most are dropped first.

    Besides the latest requests, `limits.RECORD_PINNED_MAX` failed ones and as many of the slowest are kept. `now`: the
    clock, in monotonic seconds.
    """

    def __init__(self, capacity: int, now: Callable[[], float] = time.monotonic, content_bytes: int = 0) -> None:
        self._capacity = capacity
        self.content_bytes = content_bytes
        self._contents: dict[str, RequestRecord] = {}
        self._kept = Kept(content_bytes)
        self._now = now
        self._running: OrderedDict[str, RequestRecord] = OrderedDict()
        self._latest: deque[RequestRecord] = deque(maxlen=capacity)
        self._failed: deque[RequestRecord] = deque(maxlen=limits.RECORD_PINNED_MAX)
        self._slowest: list[RequestRecord] = []
        self._by_id: dict[str, RequestRecord] = {}
        self._last_steps: dict[str, tuple[ToldStep, ...]] = {}
        """The last STEPS_BEFORE steps that each engine has reported. The engine that reported last is at the end."""
        self.num_unrecorded = 0
        """Requests that got no record because `limits.RECORD_RUNNING_MAX` others were in progress."""

    @property
    def is_on(self) -> bool:
        """Whether requests are recorded at all."""
        return self._capacity > 0

    def begin(self, facts: RequestFacts, received_s: float) -> RecordedRequest:
        """Returns the record of a request that begins; NOT_RECORDED if the request is not recorded."""
        if not self._capacity:
            return NOT_RECORDED
        if len(self._running) >= limits.RECORD_RUNNING_MAX:
            self.num_unrecorded += 1
            return NOT_RECORDED
        on_content = self._keep_content if self.content_bytes else None
        record = RequestRecord(facts, received_s, self._now, self._end, on_content)
        self._running[facts.request_id] = self._by_id[facts.request_id] = record
        return record

    def find(self, name: str) -> RequestRecord | None:
        """Returns a record by the server's request id, by the id of the answer (`chatcmpl-…`) or by the client's id."""
        found = self._by_id.get(name) or self._by_id.get(name.rpartition("-")[2])
        if found is not None:
            return found
        return next((one for one in self.all() if one.facts.client_request_id == name), None)

    def all(self) -> list[RequestRecord]:
        """Returns all records, the latest arrivals first."""
        return sorted(self._by_id.values(), key=lambda record: record.created, reverse=True)

    def add_steps(self, message: StepEvents) -> None:
        """Adds an engine's steps to the records of the requests that they computed."""
        last = self._last_steps.get(message.engine_id, ())
        now_s = self._now()
        recent = (*last, *((now_s, event) for event in message.steps))
        for event in message.steps:
            for ref in event.preempted:
                record, index = self._place(ref.sequence_id)
                if record is not None:
                    record.preempted(index, ref.attempt, event.step)
        for one in message.sequences:
            record, index = self._place(one.sequence_id)
            if record is not None:
                record.add_steps(index, one.attempt, unpacked(one.rows), recent, one.origin)
        self._remember(message.engine_id, recent[-STEPS_BEFORE:])

    def _remember(self, engine: str, steps: tuple[ToldStep, ...]) -> None:
        self._last_steps.pop(engine, None)
        self._last_steps[engine] = steps
        if len(self._last_steps) > ENGINES_MAX:
            del self._last_steps[next(iter(self._last_steps))]

    def _place(self, sequence_id: str) -> tuple[RequestRecord | None, int]:
        """Returns the record of a sequence and its index in it."""
        request_id, _, index = sequence_id.rpartition("-")
        record = self._by_id.get(request_id)
        return record, 0 if record is None else int(index)

    def _end(self, record: RequestRecord) -> None:
        """Moves a record to the finished ones, and forgets records that no list has any more."""
        self._running.pop(record.facts.request_id, None)
        self._keep_in(self._latest, record)
        if record.outcome == "failed":
            self._keep_in(self._failed, record)
        record.num_lists += 1
        insort(self._slowest, record, key=lambda one: -one.duration_us)
        if len(self._slowest) > limits.RECORD_PINNED_MAX:
            self._drop(self._slowest.pop())

    def _keep_in(self, records: deque[RequestRecord], record: RequestRecord) -> None:
        """Adds a record to a list of finished ones. If the list is full, its oldest record is dropped."""
        record.num_lists += 1
        if len(records) == records.maxlen:
            self._drop(records.popleft())
        records.append(record)

    def _drop(self, record: RequestRecord) -> None:
        """Forgets a record that was taken from a list, unless another list has it too."""
        record.num_lists -= 1
        if not record.num_lists:
            self._by_id.pop(record.facts.request_id, None)
            self._drop_content(record)

    def _keep_content(self, record: RequestRecord) -> None:
        name = record.facts.request_id
        if (former := self._contents.get(name)) is not None:  # a stream that was resumed has the id of its first run
            former.data = b""
        self._contents[name] = record
        for gone in self._kept.put(record.facts.key, name, len(record.data)):
            self._contents.pop(gone).data = b""

    def _drop_content(self, record: RequestRecord) -> None:
        if self._contents.get(record.facts.request_id) is record:
            del self._contents[record.facts.request_id]
            self._kept.remove(record.facts.request_id)
            record.data = b""
