"""Decides which engines may get work: not those that were found wrong or are outvoted. Pure.

Engines of one model and one configuration have the same golden digest, the hash of the result of their hidden test
sequence (`EngineStatus.golden_digest`). An engine that differs from the majority of at least three such engines is
outvoted. If there are only two engines, or there is no majority, the difference is only reported, because it is unknown
which engine is right.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.services.gateway.path.router import ready_members
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared.messages import EngineStatus, Heartbeat

log = logging.getLogger(__name__)
VOTERS_MIN = 3
QUARANTINED_MAX = 1024


@dataclass(frozen=True, slots=True)
class Opinions:
    """Engines whose golden digest differs from that of peers: `outvoted` by a majority, `doubted` without one."""

    outvoted: frozenset[Address] = frozenset()
    doubted: frozenset[Address] = frozenset()


def opinions(engines: Sequence[Heartbeat]) -> Opinions:
    """Compares the golden digests of the running engines."""
    groups: dict[tuple[str, str], list[tuple[Address, str]]] = defaultdict(list)
    for engine in engines:
        status = _status(engine)
        if status.golden_digest and status.configuration:
            group = groups[status.model, status.configuration]
            group.append((Address(engine.id, engine.instance_id), status.golden_digest))
    outvoted, doubted = set[Address](), set[Address]()
    for members in groups.values():
        counts = Counter(digest for _, digest in members)
        (most, count), *others = counts.most_common()
        if not others:
            continue
        if len(members) >= VOTERS_MIN and 2 * count > len(members):
            outvoted.update(address for address, digest in members if digest != most)
        else:
            doubted.update(address for address, _ in members)
    return Opinions(frozenset(outvoted), frozenset(doubted))


@dataclass(slots=True)
class Trust:
    """The engines that this gateway does not trust.

    The instance id in an address distinguishes an engine from its restarted successor.
    """

    quarantined: dict[Address, str] = field(default_factory=dict[Address, str])
    """Engines that lost a comparison, with the reason."""
    _told: Opinions = field(default_factory=Opinions)
    _compared: tuple[Heartbeat, ...] | None = None
    """The engines of `_told`; None if they were not given as a tuple."""

    def quarantine(self, engine: Address, reason: str) -> bool:
        """Records that an engine computes wrong results. Returns False if this was already known."""
        if engine in self.quarantined:
            return False
        while len(self.quarantined) >= QUARANTINED_MAX:
            del self.quarantined[next(iter(self.quarantined))]
        self.quarantined[engine] = reason
        log.error("the engine %s (%s) gets no more work from this gateway: %s", *engine, reason)
        return True

    def trusted(self, engines: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
        """Returns the engines that may get work: `engines` itself if all may."""
        outvoted = self.opinions(engines).outvoted
        if not outvoted and not self.quarantined:
            return engines
        return [
            engine
            for engine in engines
            if (address := Address(engine.id, engine.instance_id)) not in self.quarantined and address not in outvoted
        ]

    def opinions(self, engines: Sequence[Heartbeat]) -> Opinions:
        """Compares the engines' golden digests. Logs engines that begin to differ.

        The same tuple of heartbeats is compared only once.
        """
        if engines is self._compared:
            return self._told
        self._compared = engines if isinstance(engines, tuple) else None
        found = opinions(engines)
        for address in sorted(found.outvoted - self._told.outvoted):
            log.error("the engine %s (%s) gets no work: its golden value differs from most of its peers'", *address)
        for address in sorted(found.doubted - self._told.doubted):
            log.warning("the golden value of the engine %s (%s) differs from a peer's", *address)
        self._told = found
        return found


def twins(engine: Heartbeat, engines: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Returns the other engines that must compute the same tokens as this one, to the last bit."""
    status = _status(engine)
    ready = ready_members(engines, status.model)
    return [other for other in ready if other is not engine and _comparable(status, _status(other))]


def with_twins(engines: Sequence[Heartbeat], model: str) -> list[Heartbeat]:
    """Returns the ready engines of a model that have a twin."""
    return [engine for engine in ready_members(engines, model) if twins(engine, engines)]


def _comparable(one: EngineStatus, other: EngineStatus) -> bool:
    same = one.configuration == other.configuration and one.batch_invariant and other.batch_invariant
    return same and "prefill" not in (one.role, other.role)


def _status(engine: Heartbeat) -> EngineStatus:
    assert isinstance(engine.status, EngineStatus)
    return engine.status
