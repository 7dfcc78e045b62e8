"""The engine as a service on the bus: builds an `Engine`, runs it on a thread and keeps its status for heartbeats."""

import asyncio
import contextlib
import logging

import msgspec

from antiphon.services.engine.actor import EngineActor
from antiphon.services.engine.adapter_actor import AdapterActor
from antiphon.services.engine.admission import StepLoop
from antiphon.services.engine.block_events.feed import BlockFeed
from antiphon.services.engine.canary.canary import WrongResultError
from antiphon.services.engine.engine import Engine, MakeWorker
from antiphon.services.engine.images import ImageLoader
from antiphon.services.engine.peer_actor import PeerActor
from antiphon.services.engine.self_tests import SelfTests
from antiphon.services.engine.sessions.actor import SessionActor
from antiphon.services.engine.steps.loop import Driver, StepReport
from antiphon.services.engine.steps.progress import ProgressMonitor
from antiphon.services.engine.steps.reports import ReportQueue
from antiphon.services.engine.worker.capacity.memory import return_free_heap
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import sleep_to_beat
from antiphon.shared.clock import Clock
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.messages import EngineStatus, ModelFacts, ServiceName, ServiceState
from antiphon.shared.models.adapters import check_adapters, lora_modules, prompt_adapters, with_adapters
from antiphon.shared.models.model_files import (
    DEMO_NAME,
    described,
    given_model,
    model_aliases,
    model_directory,
    model_name,
)

logger = logging.getLogger(__name__)
JOIN_S = 5.0
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
        self._ended: asyncio.Future[None] | None = None
        self.fault = ""

    async def start(self, host: Host) -> None:
        """See Service. Returns when the model is loaded and the step thread has started."""
        self._event_loop, self._clock = asyncio.get_running_loop(), host.clock
        self._ended = self._event_loop.create_future()
        self._reports = ReportQueue(self._report, wait=self._settings.scheduler.disable_async_output_proc)
        self.engine = await self._build(host.clock)
        self._facts = await asyncio.to_thread(self._read_facts)
        self._progress = ProgressMonitor(
            self.engine.in_flight, self._reports, host.clock, on_host=self.engine.facts.computes_on_host
        )
        self._adapters = self._make_adapters(host)
        loop = StepLoop(
            add=self.engine.add,
            abort=self.engine.abort,
            record=self.engine.record,
            exchanges_kv=self.engine.connector is not None and self._settings.kv_transfer.role != "both",
        )
        self.actor = EngineActor(host, loop, adapters=self._adapters, images=self._make_images(host))
        self.actor.also_handles(
            SelfTests(host, self.engine, self.actor.publisher, fault=lambda: self.fault, on_fault=self._on_fault)
        )
        self.blocks = BlockFeed(host, self.engine.call, self.actor.publisher)
        self.actor.also_handles(self.blocks)
        self._refresh()
        self._peers = self._make_peers(host)
        side_actors = self._adapters, self._peers, self._make_sessions(host)
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
        self._thread = self._drive()

    def status(self) -> EngineStatus:
        """See Service. The credits are computed at each call, because gateways place sequences by them."""
        assert self._status is not None
        revision = -1 if self._adapters is None else self._adapters.revision
        rows = self.engine.limits.max_num_seqs
        return msgspec.structs.replace(
            self._status,
            credits=self.actor.credits(rows),
            idle_credits=self.actor.idle_credits(rows),
            adapters_revision=revision,
            kv_copies_at="" if self._peers is None else self._peers.copies_at,
        )

    def reported_state(self) -> ServiceState | None:
        """See SelfReporting."""
        if self.fault:
            return "faulty"
        if self._progress.check():
            if self.engine.connector is not None:
                self.engine.connector.stand_still()
            return "stalled"
        return "draining" if self.actor.withdrawn else None

    async def run(self) -> None:
        """See Service."""
        assert self._ended is not None
        parts = {self._ended, self._actor_task, self._publisher, *self._chores, *self._side_tasks}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def drain(self) -> None:
        """See Service."""
        try:
            await self.actor.drain()
        finally:
            self._thread.stop()
            await self._thread.join(JOIN_S)
            await self._reports.empty()
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

    async def _build(self, clock: Clock) -> Engine:
        return await asyncio.to_thread(
            Engine.build,
            self._settings,
            self._reports.put,
            clock=clock,
            make_worker=self._make_worker,
            on_fault=self._on_fault,
        )

    def _read_facts(self) -> ModelFacts:
        if self._make_worker is not None:
            return ModelFacts()
        # Imported here because it imports torch, which takes seconds: the service connects to the bus first.
        from antiphon.services.engine.worker.loading.model_facts import model_facts

        return model_facts(model_directory(self._settings), on_device=not self.engine.facts.computes_on_host)

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
        """Called on the step thread when that thread ends."""
        if isinstance(error, WrongResultError):
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

    def _make_peers(self, host: Host) -> PeerActor | None:
        connector = self.engine.connector
        if connector is None or connector.keeper is None:
            return None
        return PeerActor(host, connector, self.status)

    def _make_sessions(self, host: Host) -> SessionActor | None:
        connector = self.engine.connector
        return None if connector is None or connector.tier is None else SessionActor(host, connector.tier)

    def _make_images(self, host: Host) -> ImageLoader | None:
        return ImageLoader(host, model_name(self._settings)) if self.engine.facts.takes_images else None

    def _refresh(self) -> None:
        self._refreshed_at = self._clock.monotonic()
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
        )
