"""Where a sequence goes: pure functions of what heartbeats say and of what this gateway sent since.

The cost of an engine is counted in tokens to wait for: prompt tokens that wait there, plus this prompt's tokens that
its prefix cache will not have, plus a share for each sequence that already runs. The cheapest wins; ties go to the
least used. Overlap is what this gateway has routed there before, by block hash: a wrong guess only makes it slower.

Only an engine with credit is chosen. Its heartbeat says how many sequences it wants; what this gateway has sent there
since, or sent before and has no answer for, is subtracted, and what has ended there is added. Other gateways see the
same credit, so an engine may get more than it wants; it then reports less. So that no gateway starves beside others,
each may always have a few sequences at an engine (`SHARE`).
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shared import limits
from shared.messages import EngineStatus, GatewayStatus, Heartbeat, StreamStatus

RUNNING_COST = 16
"""A running sequence delays a newcomer's first token about as much as this many prompt tokens."""


SHARE = 8
"""One part in so many of an engine's rows that a gateway may fill without credit, one at least."""


@dataclass(slots=True)
class EngineLoad:
    """What this gateway has at one engine, and what changed since the heartbeat numbered `heartbeat`."""

    heartbeat: int = -1
    tokens: int = 0
    sent: int = 0
    """Sequences sent since, or sent before and not answered when it came: the heartbeat may not count them."""
    ended: int = 0
    unanswered: set[str] = field(default_factory=set[str])
    held: set[str] = field(default_factory=set[str])
    """Sequences that were sent there and have not ended."""
    refused: bool = False
    """It took no more: it gets nothing until its next heartbeat."""
    silent: bool = False
    """It did not answer a submit: until it does, it gets one sequence at a time."""


@dataclass(slots=True)
class PrefixIndex:
    """Block hashes that were routed to one engine, oldest forgotten first."""

    capacity: int
    _hashes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remembers a prompt's blocks."""
        for block_hash in hashes:
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self.capacity:
            self._hashes.popitem(last=False)

    def overlap(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are remembered."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            count += 1
        return count


@dataclass(slots=True)
class Router:
    """This gateway's own view of engines and detokenizers between heartbeats."""

    _loads: dict[tuple[str, str], EngineLoad] = field(default_factory=dict[tuple[str, str], EngineLoad])
    _prefixes: dict[tuple[str, str], PrefixIndex] = field(default_factory=dict[tuple[str, str], PrefixIndex])
    _streams: dict[tuple[str, str], set[str]] = field(default_factory=dict[tuple[str, str], set[str]])

    def choose_engine(
        self, engines: Sequence[Heartbeat], model: str, num_tokens: int, hashes: Sequence[bytes],
        avoid: Collection[tuple[str, str]] = (), near: Collection[tuple[str, str]] = (),
    ) -> Heartbeat | None:  # fmt: skip
        """The cheapest ready engine of the model with credit; None when there is none.

        One of those in `near`, where the prompt is being computed already, goes before the others while it has a row;
        one of those in `avoid`, where a placement of the sequence failed, only if there is no other.
        """
        ready = [e for e in ready_members(engines, model) if self.credit(e) > 0]
        ready = [e for e in ready if (e.id, e.instance_id) not in avoid] or ready
        ready = [e for e in ready if (e.id, e.instance_id) in near and self._has_row(e)] or ready
        return min(ready, key=lambda e: (self._cost(e, num_tokens, hashes), self._used(e), e.id), default=None)

    def credit(self, engine: Heartbeat) -> int:
        """How many sequences this gateway may send there now; not positive: none."""
        load, status = self._load(engine), _engine_status(engine)
        if load.silent:
            return 0 if load.refused or load.unanswered else 1
        if load.refused:
            return 0
        share = max(1, status.max_num_seqs // SHARE) - len(load.held)
        return max(status.credits - load.sent + load.ended, share)

    def can_take(self, engines: Sequence[Heartbeat], model: str) -> bool:
        """Whether an engine of the model is at work: ready and answering, if only later."""
        return any(not self._load(e).silent for e in ready_members(engines, model))

    def choose_detokenizer(
        self, detokenizers: Sequence[Heartbeat], model: str, avoid: Collection[tuple[str, str]] = ()
    ) -> Heartbeat | None:
        """The model's ready detokenizer with the fewest streams, one of those in `avoid` only if there is no other."""
        ready = [d for d in ready_members(detokenizers, model) if self._num_streams(d) < limits.STREAMS_MAX]
        ready = [d for d in ready if (d.id, d.instance_id) not in avoid] or ready
        return min(ready, key=lambda d: (self._num_streams(d), d.id), default=None)

    def record_dispatch(self, engine: Heartbeat, sequence_id: str, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """A sequence is on its way to an engine."""
        load, key = self._load(engine), (engine.id, engine.instance_id)
        load.tokens += num_tokens
        load.sent += 1
        load.unanswered.add(sequence_id)
        load.held.add(sequence_id)
        self._prefixes.setdefault(key, PrefixIndex(_engine_status(engine).num_blocks)).add(hashes)

    def record_answer(self, engine: tuple[str, str], sequence_id: str, *, accepted: bool) -> None:
        """The engine has accepted or refused a sequence."""
        load = self._loads.get(engine)
        if load is not None:
            load.unanswered.discard(sequence_id)
            load.silent = False
            if not accepted:
                load.refused = True
                load.held.discard(sequence_id)

    def record_silence(self, engine: tuple[str, str], sequence_id: str) -> None:
        """The engine has not answered in time."""
        load = self._loads.get(engine)
        if load is not None:
            load.unanswered.discard(sequence_id)
            load.held.discard(sequence_id)
            load.silent = load.refused = True

    def record_end(self, engine: tuple[str, str], sequence_id: str) -> None:
        """A sequence has ended at an engine, or was taken away from it. Harmless when repeated."""
        load = self._loads.get(engine)
        if load is not None and sequence_id in load.held:
            load.held.discard(sequence_id)
            load.ended += 1

    def stream_opened(self, detokenizer: tuple[str, str], sequence_id: str) -> None:
        """A stream of ours runs there."""
        self._streams.setdefault(detokenizer, set()).add(sequence_id)

    def stream_closed(self, detokenizer: tuple[str, str], sequence_id: str) -> None:
        """A stream of ours ended there. Harmless when repeated."""
        self._streams.get(detokenizer, set[str]()).discard(sequence_id)

    def forget(self, member: tuple[str, str]) -> None:
        """The member is gone."""
        for table in (self._loads, self._prefixes, self._streams):
            table.pop(member, None)

    def _cost(self, engine: Heartbeat, num_tokens: int, hashes: Sequence[bytes]) -> int:
        status, load = _engine_status(engine), self._load(engine)
        prefixes = self._prefixes.get((engine.id, engine.instance_id))
        cached = prefixes.overlap(hashes) * status.block_size if prefixes is not None else 0
        waiting = status.num_waiting_tokens + load.tokens + max(0, num_tokens - cached)
        return waiting + RUNNING_COST * (status.num_running + status.num_waiting + load.sent)

    def _has_row(self, engine: Heartbeat) -> bool:
        status = _engine_status(engine)
        return status.num_running + status.num_waiting + self._load(engine).sent < status.max_num_seqs

    def _used(self, engine: Heartbeat) -> int:
        return _engine_status(engine).prompt_tokens

    def _num_streams(self, detokenizer: Heartbeat) -> int:
        # Other gateways' streams are known from the heartbeat, our own at once.
        reported = detokenizer.status.num_streams if isinstance(detokenizer.status, StreamStatus) else 0
        return max(reported, len(self._streams.get((detokenizer.id, detokenizer.instance_id), ())))

    def _load(self, engine: Heartbeat) -> EngineLoad:
        load = self._loads.setdefault((engine.id, engine.instance_id), EngineLoad())
        if load.heartbeat != engine.sequence:
            load.heartbeat, load.tokens, load.sent, load.ended = engine.sequence, 0, len(load.unanswered), 0
            load.refused = False
        return load


def served_models(engines: Sequence[Heartbeat]) -> Mapping[str, EngineStatus]:
    """One engine's status for each model name, among those that are ready."""
    return {_engine_status(e).model: _engine_status(e) for e in reversed(engines) if e.state == "ready"}


def model_of(member: Heartbeat) -> str:
    """Served name of the model that an engine, tokenizer or detokenizer works for; empty for a gateway."""
    return "" if isinstance(member.status, GatewayStatus) else member.status.model


def ready_members(members: Sequence[Heartbeat], model: str) -> list[Heartbeat]:
    """Those that are ready and work for the model."""
    return [member for member in members if member.state == "ready" and model_of(member) == model]


def served_configurations(engines: Sequence[Heartbeat], model: str) -> tuple[str, ...]:
    """The different configurations of a model's ready engines, sorted."""
    return tuple(sorted({_engine_status(engine).configuration for engine in ready_members(engines, model)}))


def _engine_status(engine: Heartbeat) -> EngineStatus:
    assert isinstance(engine.status, EngineStatus)
    return engine.status
