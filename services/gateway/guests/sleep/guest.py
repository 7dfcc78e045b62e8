"""Wakes an engine when sequences of its model wait and no other engine takes them.

Every gateway chooses the first sleeping engine by its id, so several gateways wake the same one. If sequences still
wait when that one is ready, the next one is woken. An engine that an operator has put to sleep is left alone.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.guest import Guest
from antiphon.services.gateway.path.placement.engine_controls import EngineControls
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits
from antiphon.shared.actors.background import Background
from antiphon.shared.clock import Clock
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat, Wake

_LABELS = ("model_name", "engine")


class SleepingEngines(Guest):
    """The sleeping engines that one gateway knows. `engines` returns the last heartbeats of all that are alive."""

    def __init__(self, controls: EngineControls, engines: Callable[[], Sequence[Heartbeat]], clock: Clock) -> None:
        self.controls, self.engines = controls, engines
        self._now = clock.monotonic
        self._sleeping: dict[str, dict[str, Heartbeat]] = defaultdict(dict)
        """By model and id: the engines that a waiting sequence wakes."""
        self._told_at: dict[Address, float] = {}
        """When a sleeping engine was told to wake, monotonic seconds."""
        self._heard = asyncio.Event()
        self._orders = Background("waking an engine failed")

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """See Guest."""
        if not isinstance(beat.status, EngineStatus):
            return
        if beat.state == "sleeping" and beat.status.sleep.on_demand:
            self._sleeping[beat.status.model][beat.id] = beat
        elif self._sleeping:
            self._forget(beat.id)
        self._heard.set()

    def on_lost(self, member: Address) -> None:
        """See Guest."""
        self._forget(member.id)

    def on_waiting(self, model: str) -> None:
        """See Guest. Tells the first sleeping engine of the model to wake, again and again until it is ready."""
        sleeping = self._sleeping.get(model)
        if not sleeping:
            return
        engine, now = sleeping[min(sleeping)], self._now()
        address = Address(engine.id, engine.instance_id)
        if now - self._told_at.get(address, -limits.WAKE_AGAIN_S) >= limits.WAKE_AGAIN_S:
            self._told_at[address] = now
            self._orders.spawn(self._wake(engine))

    def collectors(self) -> Iterable[Collector]:
        """See Guest."""
        return (SleepCollector(self.engines),)

    async def until(self, done: Callable[[], bool]) -> bool:
        """Waits until heartbeats show what `done` looks for. Returns False after `limits.SLEEP_ORDER_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.SLEEP_ORDER_S):
                while not done():
                    self._heard.clear()
                    await self._heard.wait()
        return done()

    async def _wake(self, engine: Heartbeat) -> None:
        with contextlib.suppress(ServiceError):  # no answer: the next call of `on_waiting` asks again
            await self.controls.order(engine, Wake(on_demand=True))

    def _forget(self, engine_id: str) -> None:
        for model, sleeping in list(self._sleeping.items()):
            if (beat := sleeping.pop(engine_id, None)) is not None:
                self._told_at.pop(Address(beat.id, beat.instance_id), None)
            if not sleeping:
                del self._sleeping[model]


class SleepCollector(Collector):
    """Exports which engines sleep, and how long they took to wake."""

    def __init__(self, engines: Callable[[], Sequence[Heartbeat]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        level = GaugeMetricFamily(
            "antiphon:engine_sleep_level", "0: awake; 1: without KV cache; 2: without weights too", labels=_LABELS
        )
        wakes = CounterMetricFamily("antiphon:engine_wakes", "How often an engine has woken", labels=_LABELS)
        seconds = CounterMetricFamily(
            "antiphon:engine_wake_seconds", "Seconds that engines took to wake", labels=_LABELS
        )
        for beat in self._engines():
            if isinstance(beat.status, EngineStatus):
                labels, sleep = [beat.status.model, beat.id], beat.status.sleep
                level.add_metric(labels, sleep.level)
                wakes.add_metric(labels, sleep.num_wakes)
                seconds.add_metric(labels, sleep.wake_s)
        yield from (level, wakes, seconds)


def make(gateway: GatewayActor, settings: GatewaySettings) -> Guest:
    """Returns the guest of a gateway."""
    return SleepingEngines(gateway.engine_controls, gateway.engines, gateway.host.clock)
