"""The engine as a service: loads the model, runs the step loop on a thread, and keeps its status for heartbeats."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from services.engine.actor import EngineActor
from services.engine.core.core import Core
from services.engine.core.plan import CoreLimits, EngineFacts
from services.engine.loop import Driver, StepLoop, StepReport, ThreadedLoop
from services.engine.reports import ReportQueue
from services.engine.warmup import warm_up
from services.engine.worker.memory import return_free_heap
from services.engine.worker.seam import ModelWorker
from shared import limits
from shared.actors.host import Host
from shared.actors.presence import sleep_to_beat
from shared.config import EngineSettings, SettingsError
from shared.messages import EngineStatus, ServiceName
from shared.model_files import DEMO_NAME, model_name

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE, DEFAULT_BATCH_WAIT_S = 16, 0.1
JOIN_S = 5.0


class EngineService:
    """One engine. `make_worker` loads the model; it runs on a thread, so the bus is reached meanwhile.

    Raises SettingsError for settings that contradict each other.
    """

    name: ServiceName = "engine"

    def __init__(
        self, settings: EngineSettings, make_worker: Callable[[EngineSettings], ModelWorker] | None = None
    ) -> None:
        if settings.use_lookahead and not settings.use_v2_block_manager:
            raise SettingsError("--use-lookahead needs --use-v2-block-manager: add it")
        self._settings = with_present_names(settings)
        self._make_worker = make_worker or _load_worker
        self._status: EngineStatus | None = None
        self._ended: asyncio.Future[None] | None = None

    async def start(self, host: Host) -> None:
        """See Service. Returns when the model is loaded."""
        self._event_loop, self._clock = asyncio.get_running_loop(), host.clock
        self._ended = self._event_loop.create_future()
        worker = await self._load()
        self._facts = worker.facts()
        bounds = self._bounds = core_limits(self._settings, self._facts)
        if self._settings.use_warmup:
            await self._warm_up(worker, bounds)
        self._core = Core(bounds, self._facts)
        self._reports = ReportQueue(self._report, wait=self._settings.disable_async_output_proc)
        self._steps = StepLoop(self._core, worker, host.clock, self._reports.put, self._settings.num_scheduler_steps)
        self.actor = EngineActor(host, self._steps.add, self._steps.abort)
        self._refresh()
        await self.actor.listen()
        self._actor_task = asyncio.create_task(self.actor.run())
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._publisher = asyncio.create_task(self._reports.run())
        self._thread = self._drive()

    def status(self) -> EngineStatus:
        """See Service."""
        assert self._status is not None
        return self._status

    async def run(self) -> None:
        """See Service."""
        assert self._ended is not None
        parts = {self._ended, self._actor_task, self._housekeeping, self._publisher}
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
            for task in (self._housekeeping, self._publisher):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await self.actor.stop()
            await self._actor_task

    async def _load(self) -> ModelWorker:
        return await asyncio.to_thread(self._make_worker, self._settings)

    async def _warm_up(self, worker: ModelWorker, bounds: CoreLimits) -> None:
        started = time.monotonic()
        steps = await asyncio.to_thread(warm_up, worker, bounds)
        logger.info("warmed up with %d steps in %.2f s", steps, time.monotonic() - started)

    async def _report(self, report: StepReport) -> None:
        await self.actor.report(report)
        # The process is awake: the next look at the house can wait.
        if self._clock.monotonic() - self._refreshed_at >= limits.HEARTBEAT_INTERVAL_S:
            self._refresh()

    def _drive(self) -> Driver:
        thread = ThreadedLoop(self._steps, self._on_exit, return_free_heap)
        thread.start()
        return thread

    def _on_exit(self, error: BaseException | None) -> None:
        """Called on the step thread."""
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
        while True:
            await sleep_to_beat(2 * limits.HEARTBEAT_INTERVAL_S)
            self.actor.sweep()
            self._refresh()

    def _refresh(self) -> None:
        self._refreshed_at = self._clock.monotonic()
        core, facts, settings = self._core.counters(), self._facts, self._settings
        self._status = EngineStatus(
            model_name(settings),
            settings.model or DEMO_NAME,
            facts.max_model_len,
            facts.vocab_size,
            facts.block_size,
            facts.num_blocks,
            core.num_free_blocks,
            self._bounds.max_num_seqs,
            core.num_running,
            core.num_waiting,
            core.num_waiting_tokens,
            core.step,
            core.prompt_tokens,
            core.generation_tokens,
            core.prefix_cache_queries,
            core.prefix_cache_hits,
            core.preemptions,
            self.actor.ledger.marks(),
            tuple(self.actor.finished.items()),
            core.cached_tokens,
            core.swapped_out_blocks,
            core.swapped_in_blocks,
            core.drafted_tokens,
            core.accepted_tokens,
        )


def core_limits(settings: EngineSettings, facts: EngineFacts) -> CoreLimits:
    """The scheduler's bounds, with defaults filled in. Raises SettingsError for bounds that contradict each other."""
    chunked = settings.enable_chunked_prefill
    rows = min(settings.max_num_seqs, settings.limit_worker_concurrency or settings.max_num_seqs)
    least = max(rows, 1 if chunked else facts.max_model_len)
    budget, prompts = settings.max_num_batched_tokens, None
    if budget is None:
        budget, prompts = max(facts.step_tokens, least), facts.step_prompt_tokens if chunked else None
    if budget < least:
        raise SettingsError(
            f"--max-num-batched-tokens: {budget} is less than --max-num-seqs ({rows}) or, with "
            f"--enable-chunked-prefill=false, less than the context ({facts.max_model_len} tokens)"
        )
    gathers = settings.max_batch_size is not None or settings.batch_wait_timeout is not None
    wait_s = settings.batch_wait_timeout
    return CoreLimits(
        rows,
        budget,
        settings.enable_prefix_caching,
        chunked,
        settings.kv_cache_ratio,
        settings.scheduler_delay_factor,
        settings.num_speculative_tokens if settings.use_lookahead else 0,
        (settings.max_batch_size or DEFAULT_BATCH_SIZE) if gathers else None,
        DEFAULT_BATCH_WAIT_S if wait_s is None else wait_s,
        prompts,
    )


def with_present_names(settings: EngineSettings) -> EngineSettings:
    """The settings with what was given under a former name under its present one."""
    former = settings.max_context_len_to_capture
    if former is None:
        return settings
    logger.warning("--max-context-len-to-capture is deprecated: use --max-seq-len-to-capture=%d", former)
    return replace(settings, max_seq_len_to_capture=former, max_context_len_to_capture=None)


def _load_worker(settings: EngineSettings) -> ModelWorker:
    # Imported here, when the bus is reached: torch takes most of the start-up time. What imports make stays: looking
    # through it again and again would take a tenth of that time, and as long again when all is ready.
    gc.disable()
    try:
        from services.engine.worker.load import load_worker
    finally:
        gc.freeze()
        gc.enable()
    return load_worker(settings)
