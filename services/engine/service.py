"""The engine as a service on the bus: builds an `Engine`, runs it on a thread and keeps its status for heartbeats."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable

import msgspec

from antiphon.services.engine.actor import EngineActor
from antiphon.services.engine.adapter_actor import AdapterActor
from antiphon.services.engine.admission import StepLoop
from antiphon.services.engine.block_events.feed import BlockFeed
from antiphon.services.engine.canary.canary import WrongResultError
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.engine import Engine, Kept, MakeWorker
from antiphon.services.engine.images import ImageLoader
from antiphon.services.engine.peer_actor import PeerActor
from antiphon.services.engine.self_tests import SelfTests
from antiphon.services.engine.sessions.actor import SessionActor
from antiphon.services.engine.sleep.sleeper import Sleeper
from antiphon.services.engine.steps.loop import Driver, StepReport
from antiphon.services.engine.steps.progress import ProgressMonitor
from antiphon.services.engine.steps.reports import ReportQueue
from antiphon.services.engine.worker.capacity.memory import return_free_heap
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import sleep_to_beat
from antiphon.shared.clock import Clock
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.distributed import world
from antiphon.shared.messages import EngineLoad, EngineStatus, ModelFacts, ServiceName, ServiceState
from antiphon.shared.models.adapters import check_adapters, lora_modules, prompt_adapters, with_adapters
from antiphon.shared.models.model_files import (
    DEMO_NAME,
    described,
    given_model,
    model_aliases,
    model_directory,
    model_name,
)
from antiphon.shared.version import __version__

logger = logging.getLogger(__name__)
JOIN_S = 5.0
LAST_STEP_S = 60.0
"""Longest wait for the step that runs when the engine falls asleep. The watchdog ends the process before."""
FAULT_NOTICE_S = 3 * limits.HEARTBEAT_INTERVAL_S
"""Minimum time between the first heartbeat that reports a fault and the end of the process, seconds."""
DETERMINISTIC = "-deterministic"
"""Suffix of the configuration that a deterministic engine reports."""
SYNC_BEATS = 5
"""The desired state of the adapters is read once per this many housekeeping rounds, in case a change was missed."""


class EngineService:
    """One engine. The constructor raises SettingsError if the settings or the model's config are invalid.

    `make_worker` loads the model instead of the default loader. It runs on a thread, so that the event loop stays free.
    """

    name: ServiceName = "engine"

    def __init__(self, settings: EngineSettings, make_worker: MakeWorker | None = None) -> None:
        check_engine(settings)
        check_adapters(described(settings))
        self._settings = with_adapters(described(settings))
        self._make_worker = make_worker
        self._status: EngineStatus | None = None
        self._engine: Engine | None = None
        """None while it sleeps; `_kept` is then what it has left."""
        self._kept: Kept | None = None
        self._progress: ProgressMonitor | None = None
        self._ended: asyncio.Future[None] | None = None
        self.fault = ""

    async def start(self, host: Host) -> None:
        """See Service. Returns when the model is loaded and the step thread has started."""
        self._event_loop, self._clock = asyncio.get_running_loop(), host.clock
        self._ended = self._event_loop.create_future()
        self._reports = ReportQueue(self._report, wait=self._settings.scheduler.disable_async_output_proc)
        self._engine = await self._build(host.clock)
        self._facts = ModelFacts()
        if self._make_worker is None:
            on_device = not self.engine.facts.computes_on_host
            self._facts = await asyncio.to_thread(_read_facts, self._settings, on_device=on_device)
        self._progress = self._watch_progress()
        self._adapters = self._make_adapters(host)
        images = ImageLoader(host, model_name(self._settings)) if self.engine.facts.takes_images else None
        self.actor = EngineActor(host, self._step_loop(), adapters=self._adapters, images=images)
        self.actor.also_handles(
            SelfTests(
                *(host, lambda: self._engine, self.actor.publisher), fault=lambda: self.fault, on_fault=self._on_fault
            )
        )
        self._sleeper = self._make_sleeper()
        self.actor.also_handles(self._sleeper)
        self.blocks = BlockFeed(host, self._call_on_core, self.actor.publisher)
        self.actor.also_handles(self.blocks)
        self._refresh()
        self._peers, self._sessions = self._make_kv_actors(host)
        side_actors = self._adapters, self._peers, self._sessions
        self._side_actors = [each for each in side_actors if each is not None]
        for each in self._side_actors:
            await each.listen()
        self._side_tasks = [asyncio.create_task(each.run()) for each in self._side_actors]
        await self.actor.listen()
        self._actor_task = asyncio.create_task(self.actor.run())
        self._chores = [asyncio.create_task(self._keep_house())]
        if self._peers is not None:
            self._chores.append(asyncio.create_task(self._peers.tend()))
        self._publisher = asyncio.create_task(self._reports.run())
        self._thread: Driver | None = self._drive()

    @property
    def engine(self) -> Engine:
        """The engine, which must not sleep."""
        assert self._engine is not None, "the engine sleeps"
        return self._engine

    def status(self) -> EngineStatus:
        """See Service. The credits are computed at each call, because gateways place sequences by them."""
        assert self._status is not None
        revision = -1 if self._adapters is None else self._adapters.revision
        rows = self._status.max_num_seqs
        return msgspec.structs.replace(
            self._status,
            credits=self.actor.credits(rows),
            idle_credits=self.actor.idle_credits(rows),
            adapters_revision=revision,
            sleep=self._sleeper.status(),
            kv_copies_at="" if self._peers is None else self._peers.copies_at,
        )

    def reported_state(self) -> ServiceState | None:
        """See SelfReporting."""
        if self.fault:
            return "faulty"
        progress, engine = self._progress, self._engine
        if progress is not None and progress.check():
            if engine is not None and engine.connector is not None:
                engine.connector.stand_still()
            return "stalled"
        if self.actor.draining:
            return None
        if self.actor.resting:
            return "sleeping"
        return "draining" if self.actor.withdrawn else None

    # --- sleep, called by `Sleeper` ---

    async def fall_asleep(self, level: int) -> int:
        """See Sleepable."""
        for part in (self._adapters, self._peers):
            if part is not None:
                part.sleep()
        if self._sessions is not None:
            await self._sessions.sleep()
        self.blocks.forget()
        if self._engine is not None:
            await self._stop_steps(LAST_STEP_S)
            engine, self._engine, self._progress = self._engine, None, None
            self._kept = await asyncio.to_thread(engine.leave, keeps_weights=level == 1)
            del engine
        elif self._kept is not None and self._kept.executor is not None:
            await asyncio.to_thread(self._kept.executor.close)
            self._kept = Kept(counters=self._kept.counters)
        await asyncio.to_thread(self._return_memory)
        # Everything else stays as it was.
        self._status = msgspec.structs.replace(self.status(), load=EngineLoad(), kv_address="")
        return 1 if self._kept is not None and self._kept.executor is not None else 2

    async def wake_up(self) -> None:
        """See Sleepable."""
        kept, self._kept = self._kept, None
        self._engine = await self._build(self._clock, kept)
        self._progress = self._watch_progress()
        self.blocks.forget()  # gateways that have followed a core which is gone get a snapshot of this one
        connector = self._engine.connector
        if self._adapters is not None and self._engine.adapters is not None:
            await self._adapters.wake(self._engine.adapters)
        if self._peers is not None and connector is not None:
            self._peers.wake(connector)
        if self._sessions is not None and connector is not None and connector.tier is not None:
            self._sessions.wake(connector.tier)
        self._refresh()
        self._thread = self._drive()

    async def _stop_steps(self, timeout_s: float = JOIN_S) -> None:
        """Ends the step thread, which is not the end of the service."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            await thread.join(timeout_s)
            await self._reports.empty()

    async def run(self) -> None:
        """See Service."""
        assert self._ended is not None
        parts = {self._ended, self._actor_task, self._publisher, *self._chores, *self._side_tasks}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        # `drain` cancels the others when it has ended the service.
        for task in {self._ended} if self._ended in done else done:
            await task

    async def drain(self) -> None:
        """See Service."""
        try:
            await self.actor.drain()
        finally:
            await self._sleeper.close()
            await self._stop_steps()
            self._end(None)
            for task in (*self._chores, self._publisher):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self.blocks.close()
            await self.actor.stop()
            await self._actor_task
            for actor, task in zip(self._side_actors, self._side_tasks, strict=True):
                await actor.stop()
                await task

    async def _build(self, clock: Clock, kept: Kept | None = None) -> Engine:
        return await asyncio.to_thread(
            Engine.build,
            self._settings,
            self._reports.put,
            clock=clock,
            make_worker=self._make_worker,
            on_fault=self._on_fault,
            kept=kept,
        )

    def _watch_progress(self) -> ProgressMonitor:
        on_host = self.engine.facts.computes_on_host
        return ProgressMonitor(self.engine.in_flight, self._reports, self._clock, on_host=on_host)

    def _step_loop(self) -> StepLoop:
        """Returns what the actor uses of the engine. While that sleeps, it has no sequences."""

        def abort(name: str) -> None:
            if self._engine is not None:
                self._engine.abort(name)

        def record(wanted: bool) -> None:
            if self._engine is not None:
                self._engine.record(wanted)

        return StepLoop(
            add=lambda spec, load: self.engine.add(spec, load),
            abort=abort,
            record=record,
            exchanges_kv=self.engine.connector is not None and self._settings.kv_transfer.role != "both",
        )

    def _call_on_core(self, function: Callable[[Core], None]) -> None:
        """See `Engine.call`. A sleeping engine has no core."""
        if self._engine is not None:
            self._engine.call(function)

    def _make_sleeper(self) -> Sleeper:
        can_sleep = world.can_sleep(self._settings.parallel)
        return Sleeper(
            self.actor,
            self,
            self._clock,
            self._end,
            after_s=self._settings.cache.sleep_after,
            level=self._settings.cache.sleep_level,
            refusal="" if can_sleep else f"This engine cannot sleep: {world.NO_SLEEP}.",
        )

    def _return_memory(self) -> None:
        """Gives memory that nothing refers to any more back to the system."""
        gc.collect()
        return_free_heap()

    def _on_fault(self, fault: str) -> None:
        """Called from any thread when a self-test has found a fault."""
        self.fault = fault
        logger.critical("this engine is faulty and ends: %s", fault)
        self._event_loop.call_soon_threadsafe(
            self._event_loop.call_later, FAULT_NOTICE_S, self._end, WrongResultError(fault)
        )

    def _report(self, report: StepReport) -> None:
        if self.fault:
            return  # the latest results may be wrong; other engines compute them again
        self.actor.report(report)
        if self.blocks.is_followed:
            self.blocks.soon()
        # The process is awake anyway, so refresh the status here, at most once per heartbeat interval.
        if self._clock.monotonic() - self._refreshed_at >= limits.HEARTBEAT_INTERVAL_S:
            self._refresh()

    def _drive(self) -> Driver:
        return self.engine.run_on_thread(self._on_exit, return_free_heap)

    def _on_exit(self, error: BaseException | None) -> None:
        """Called on the step thread when that thread ends, which it does without an error only if it was told to."""
        if error is None or isinstance(error, WrongResultError):
            return  # `_on_fault` ends the process, after heartbeats have reported the fault
        self._event_loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        assert self._ended is not None
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _keep_house(self) -> None:
        number = 0
        while True:
            await sleep_to_beat(2 * limits.HEARTBEAT_INTERVAL_S)
            self.actor.sweep()
            self._sleeper.look()
            self.blocks.sweep()
            number += 1
            if self._adapters is not None and number % SYNC_BEATS == 0:
                await self._adapters.refresh()
            self._refresh()

    def _make_adapters(self, host: Host) -> AdapterActor | None:
        library, settings = self.engine.adapters, self._settings
        if library is None:
            return None
        modules = [*lora_modules(settings), *prompt_adapters(settings)]
        kept = (settings.adapters.max_cpu_loras or 0) + (settings.adapters.max_prompt_adapters or 0)
        return AdapterActor(host, library, model_name(settings), modules, kept, settings.adapters.lora_root)

    def _make_kv_actors(self, host: Host) -> tuple[PeerActor | None, SessionActor | None]:
        connector = self.engine.connector
        if connector is None or connector.tier is None:
            return None, None
        peers = PeerActor(host, connector, self.status) if connector.keeper is not None else None
        return peers, SessionActor(host, connector.tier)

    def _refresh(self) -> None:
        self._refreshed_at = self._clock.monotonic()
        if self._engine is None:
            return
        facts, settings = self.engine.facts, self._settings
        canary, connector = self.engine.canary, self.engine.connector
        self._status = EngineStatus(
            model=model_name(settings),
            model_path=given_model(settings) or DEMO_NAME,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            max_num_seqs=self.engine.limits.max_num_seqs,
            load=self.engine.load(),
            counters=self.engine.counters(),
            finished=tuple(self.actor.records.finished.items()),
            model_aliases=model_aliases(settings),
            configuration=facts.configuration + (DETERMINISTIC if settings.execution.deterministic else ""),
            content=facts.content,
            embedding_size=facts.embedding_size,
            histograms=self.actor.records.times.histograms(),
            role=settings.kv_transfer.role,
            kv_address=connector.address if connector is not None and settings.kv_transfer.role == "prefill" else "",
            kv_store="" if connector is None or connector.tier is None else connector.tier.directory_id,
            takes_images=facts.takes_images,
            golden_digest="" if canary is None else canary.golden.digest,
            canary_runs=0 if canary is None else canary.num_runs,
            batch_invariant=not facts.variant_because,
            deterministic=settings.execution.deterministic,
            generates=facts.generates,
            labels=facts.labels,
            step_tokens=self.engine.limits.step_prompt_tokens or self.engine.limits.max_num_batched_tokens,
            facts=self._facts,
            numerics=facts.numerics,
            version=__version__,
        )


def _read_facts(settings: EngineSettings, *, on_device: bool) -> ModelFacts:
    # Imported here because it imports torch, which takes seconds: the service connects to the bus first.
    from antiphon.services.engine.worker.loading.model_facts import model_facts

    return model_facts(model_directory(settings), on_device=on_device)
