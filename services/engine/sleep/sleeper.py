"""Decides when an engine falls asleep and wakes: on orders from the bus, and by itself after a time without sequences.

    awake      --Sleep, or --sleep-after-->  drowsy    submits are refused; the last sequences end or move
    drowsy     --no sequence is left-->      asleep    the memory is free
    drowsy     --Wake-->                     awake
    asleep     --Wake-->                     waking    --> awake

One task changes the engine, towards the state that was wanted last, so orders may come at any time and in any number.
Runs on the event loop. `service` frees the memory and allocates it again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from antiphon.services.engine.actor import EngineActor
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.clock import Clock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Ack, Sleep, SleepStatus, Wake

logger = logging.getLogger(__name__)
LEVELS, MODES = (1, 2), ("wait", "keep", "abort")
AWAKE = 0


class Sleepable(Protocol):
    """What falls asleep: the engine of a service. No sequence waits or runs when it does."""

    async def fall_asleep(self, level: int) -> int:
        """Frees memory; a sleeping engine frees more. Returns the level at which it sleeps: at least `level`."""
        ...

    async def wake_up(self) -> None:
        """Allocates and loads again what was freed. Raises what prevents it; the process must then end."""
        ...


class Sleeper:
    """The sleep of one engine. `on_error` ends the process, because the engine can neither sleep nor compute.

    `after_s`: see `--sleep-after`, 0: never; `level`: the level then. `refusal`: why the engine cannot sleep; "": it
    can.
    """

    def __init__(
        self,
        actor: EngineActor,
        engine: Sleepable,
        clock: Clock,
        on_error: Callable[[BaseException], None],
        *,
        after_s: float = 0.0,
        level: int = 1,
        refusal: str = "",
    ) -> None:
        self._actor, self._engine, self._clock, self._on_error = actor, engine, clock, on_error
        self._after_s, self._after_level, self._refusal = after_s, level, refusal
        self._level = self._wanted = AWAKE
        self._mode = "wait"
        self._on_demand = False
        self._num_wakes, self._wake_s, self._last_wake_s = 0, 0.0, 0.0
        self._used_at = clock.monotonic()
        self._looked = asyncio.Event()
        """Set at each `look` while sequences are awaited."""
        self._task: asyncio.Task[None] | None = None

    # --- orders ---

    @handles(Sleep)
    def on_sleep(self, envelope: Envelope[Sleep]) -> Ack:
        """Makes the engine fall asleep, or sleep more deeply. Raises ServiceError if it cannot sleep."""
        message = envelope.message
        if self._refusal:
            raise ServiceError("unsupported_parameter", self._refusal)
        if message.level not in LEVELS or message.mode not in MODES:
            raise ServiceError("invalid_value", "An engine sleeps at level 1 or 2, with mode wait, keep or abort.")
        self._fall_asleep(message.level, message.mode, on_demand=message.on_demand)
        return Ack("")

    @handles(Wake)
    def on_wake(self, envelope: Envelope[Wake]) -> Ack:
        """Wakes the engine, unless a waiting sequence asks for it and an operator has put it to sleep."""
        if envelope.message.on_demand and not self._on_demand:
            return Ack("")
        self._wanted, self._on_demand = AWAKE, False
        self._used_at = self._clock.monotonic()
        self._looked.set()
        self._go()
        return Ack("")

    # --- called by the service ---

    def look(self) -> None:
        """Puts the engine to sleep if it has had no sequence for `after_s`. Called a few times a second."""
        now = self._clock.monotonic()
        if self._actor.sequences.num_live or self._actor.draining:
            self._used_at = now
        idle_s = now - max(self._used_at, self._actor.submitted_at)
        if self._after_s and not self._actor.resting and idle_s >= self._after_s:
            logger.info("no sequence for %.3g s: this engine falls asleep", idle_s)
            self._fall_asleep(self._after_level, "wait", on_demand=True)
        self._looked.set()

    @property
    def busy(self) -> bool:
        """Whether the engine falls asleep or wakes at this moment."""
        return self._task is not None and not self._task.done()

    def status(self) -> SleepStatus:
        """Returns the state for heartbeats. May be called from any thread."""
        return SleepStatus(
            level=self._level,
            on_demand=self._on_demand,
            num_wakes=self._num_wakes,
            wake_s=self._wake_s,
            last_wake_s=self._last_wake_s,
        )

    async def close(self) -> None:
        """Ends falling asleep, or waking, because the process ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- inside ---

    def _fall_asleep(self, level: int, mode: str, *, on_demand: bool) -> None:
        """Refuses sequences from now on, in this pass of the event loop: none can come between."""
        self._wanted, self._mode = max(level, self._level, self._wanted), mode
        self._on_demand = on_demand
        self._actor.resting = True
        self._looked.set()
        self._go()

    def _go(self) -> None:
        if not self.busy:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        """Changes the engine until it is as wanted."""
        try:
            while self._level != self._wanted:
                if self._wanted == AWAKE:
                    await self._wake_up()
                elif self._level != AWAKE or await self._is_quiet():
                    self._level = await self._engine.fall_asleep(self._wanted)
                    self._wanted = max(self._wanted, self._level) if self._wanted else AWAKE
                    logger.info("this engine sleeps at level %d", self._level)
        except Exception as error:  # of any kind: an engine that cannot wake must be started again
            logger.critical("this engine can neither sleep nor compute and ends", exc_info=True)
            self._on_error(error)
            return
        if self._level == AWAKE:
            self._actor.resting = False

    async def _is_quiet(self) -> bool:
        """Waits until no sequence is left. Returns False if the engine shall be awake after all."""
        while self._wanted != AWAKE and self._actor.sequences.num_live:
            if self._mode == "keep":
                self._actor.hand_over()
            elif self._mode == "abort":
                text = "The engine was put to sleep (mode=abort). Send the request again."
                self._actor.refuse_all(ServiceError("no_engine", text, retry_after_s=1.0))
            if self._actor.sequences.num_live:
                self._looked.clear()
                await self._looked.wait()
        return self._wanted != AWAKE

    async def _wake_up(self) -> None:
        began = self._clock.monotonic()
        await self._engine.wake_up()
        took_s = self._clock.monotonic() - began
        self._level = AWAKE
        self._num_wakes, self._wake_s, self._last_wake_s = self._num_wakes + 1, self._wake_s + took_s, took_s
        self._used_at = self._clock.monotonic()
        logger.info("this engine woke in %.2f s", took_s)
