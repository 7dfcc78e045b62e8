"""Where a sequence goes: pure functions of what heartbeats say and of what this gateway sent since.

The cost of an engine is counted in tokens to wait for: prompt tokens that wait there, plus this prompt's tokens that
its prefix cache will not have, plus a share for each sequence that already runs. The cheapest wins; ties go to the
least used. Overlap is what this gateway has routed there before, by block hash: a wrong guess only makes it slower.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shared.messages import EngineStatus, GatewayStatus, Heartbeat, StreamStatus

RUNNING_COST = 16
"""A running sequence delays a newcomer's first token about as much as this many prompt tokens."""


@dataclass(slots=True)
class Sent:
    """What this gateway placed on one engine since the heartbeat numbered `sequence`."""

    sequence: int = -1
    tokens: int = 0
    sequences: int = 0


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
class PlacementBoard:
    """This gateway's own view of engines and detokenizers between heartbeats."""

    _sent: dict[tuple[str, str], Sent] = field(default_factory=dict)
    _prefixes: dict[tuple[str, str], PrefixIndex] = field(default_factory=dict)
    _streams: dict[tuple[str, str], int] = field(default_factory=dict)

    def choose_engine(
        self, engines: Sequence[Heartbeat], model: str, num_tokens: int, hashes: Sequence[bytes],
        avoid: Collection[tuple[str, str]] = (), near: Collection[tuple[str, str]] = (),
    ) -> Heartbeat | None:  # fmt: skip
        """The cheapest ready engine that serves the model; None when there is none.

        One of those in `near`, where the prompt is being computed already, goes before the others while it has a row.
        """
        ready = [e for e in ready_members(engines, model) if (e.id, e.boot) not in avoid]
        ready = [e for e in ready if (e.id, e.boot) in near and self._has_row(e)] or ready
        return min(ready, key=lambda e: (self._cost(e, num_tokens, hashes), self._used(e), e.id), default=None)

    def choose_detokenizer(
        self, detokenizers: Sequence[Heartbeat], model: str, avoid: Collection[tuple[str, str]] = ()
    ) -> Heartbeat | None:
        """The model's ready detokenizer with the fewest streams; None when there is none."""
        ready = [d for d in ready_members(detokenizers, model) if (d.id, d.boot) not in avoid]
        return min(ready, key=lambda d: (self._load(d), d.id), default=None)

    def placed(self, engine: Heartbeat, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """Remembers what an engine was given."""
        status = _engine_status(engine)
        sent = self._since(engine)
        sent.tokens += num_tokens
        sent.sequences += 1
        key = (engine.id, engine.boot)
        self._prefixes.setdefault(key, PrefixIndex(status.num_blocks)).add(hashes)

    def stream_opened(self, detokenizer: tuple[str, str]) -> None:
        """A stream of ours runs there."""
        self._streams[detokenizer] = self._streams.get(detokenizer, 0) + 1

    def stream_closed(self, detokenizer: tuple[str, str]) -> None:
        """A stream of ours ended there."""
        self._streams[detokenizer] = max(0, self._streams.get(detokenizer, 0) - 1)

    def forget(self, member: tuple[str, str]) -> None:
        """The member is gone."""
        for table in (self._sent, self._prefixes, self._streams):
            table.pop(member, None)

    def _cost(self, engine: Heartbeat, num_tokens: int, hashes: Sequence[bytes]) -> int:
        status, sent = _engine_status(engine), self._since(engine)
        prefixes = self._prefixes.get((engine.id, engine.boot))
        cached = prefixes.overlap(hashes) * status.block_size if prefixes is not None else 0
        waiting = status.num_waiting_tokens + sent.tokens + max(0, num_tokens - cached)
        return waiting + RUNNING_COST * (status.num_running + status.num_waiting + sent.sequences)

    def _has_row(self, engine: Heartbeat) -> bool:
        status = _engine_status(engine)
        return status.num_running + status.num_waiting + self._since(engine).sequences < status.max_num_seqs

    def _used(self, engine: Heartbeat) -> int:
        return _engine_status(engine).prompt_tokens

    def _load(self, detokenizer: Heartbeat) -> int:
        # Other gateways' streams are known from the heartbeat, our own at once.
        reported = detokenizer.status.num_streams if isinstance(detokenizer.status, StreamStatus) else 0
        return max(reported, self._streams.get((detokenizer.id, detokenizer.boot), 0))

    def _since(self, engine: Heartbeat) -> Sent:
        key = (engine.id, engine.boot)
        sent = self._sent.get(key)
        if sent is None or sent.sequence != engine.sequence:
            sent = self._sent[key] = Sent(engine.sequence)
        return sent


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
