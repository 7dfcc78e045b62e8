"""One engine: a loaded model on its devices, the scheduler core and the step loop. No bus, no asyncio.

    engine = Engine.build(settings, report)    load the model, warm up, allocate the KV cache
    engine.add(spec); engine.abort(id)         queue or end a sequence, from any thread
    engine.step()                              one pass, always from the same thread; results go to `report`
    engine.wait(seconds); engine.wake()        until there may be something to compute
    engine.run_on_thread(on_exit, on_rest)     call `step` and `wait` on a thread of its own
    engine.facts, engine.counters()            properties of the loaded model; current load, from any thread
    engine.leave(keeps_weights=True)           free the KV cache, or all, for a new engine later
    engine.close()                             free the device's memory

All users assemble their engine here: the bus service, the offline `LLM`, benchmarks and tests.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.canary.canary import Canary
from antiphon.services.engine.canary.checksums import Checksums
from antiphon.services.engine.canary.guard import WeightGuard
from antiphon.services.engine.canary.measure import Golden, check_deterministic, measure
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.grammar_gate import GrammarGate, LoadAdapter
from antiphon.services.engine.kv.address import default_kv_host
from antiphon.services.engine.kv.connector import KvConnector
from antiphon.services.engine.kv.disk.tier import open_tier
from antiphon.services.engine.sleep.lent_memory import LentMemory
from antiphon.services.engine.steps.in_flight import InFlightSteps
from antiphon.services.engine.steps.loop import StepLoop, StepReport, ThreadedLoop
from antiphon.services.engine.warmup import warm_up
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.actors.imports import without_collections
from antiphon.shared.clock import Clock, SystemClock
from antiphon.shared.config import EngineSettings, check_engine
from antiphon.shared.distributed.world import NO_KV, exchanges_kv, world_size
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import EngineCounters, EngineLoad
from antiphon.shared.models.adapters import check_adapters, lora_modules, prompt_adapters, with_adapters
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.settings.kv_events import kv_events_of

if TYPE_CHECKING:
    from antiphon.services.engine.kv_events.publisher import KvEventPublisher

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE, DEFAULT_BATCH_WAIT_S = 16, 0.1
LEFT_WAIT_S = 0.02
"""Longest time between two looks at an engine that finishes its last steps."""
Report = Callable[[StepReport], None]
MakeWorker = Callable[[EngineSettings], ModelWorker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an engine has left for the next one of the same settings (`Engine.leave`). Empty: nothing."""

    counters: EngineCounters | None = None
    executor: Executor | None = None
    """Has the weights, but no KV cache; None: they were freed too."""
    golden: Golden | None = None
    sums: Checksums | None = None


class Engine:
    """An engine over an executor whose model is loaded. `build` creates one from settings.

    `report` is called on the thread that calls `step`, once for each pass that computed tokens or refused a sequence.
    """

    def __init__(
        self,
        executor: Executor,
        limits: CoreLimits,
        report: Report,
        *,
        clock: Clock | None = None,
        steps_per_report: int = 1,
        counters: EngineCounters | None = None,
    ) -> None:
        self._executor = executor
        self.limits = limits
        self.facts: EngineFacts = executor.facts()
        self._core = Core(limits, self.facts, counters)
        self._loop = StepLoop(self._core, executor, clock or SystemClock(), report, steps_per_report)
        self.connector: KvConnector | None = None
        self.canary: Canary | None = None
        """Tests the engine with a canary; None without `on_fault` or with `--canary-interval=0`."""
        self.guard: WeightGuard | None = None
        """Checks the weights in memory; None without a canary, or if this process has no weights in its memory."""
        self._sums: Checksums | None = None
        self._lent: LentMemory | None = None
        """The blocks, as the connector has them."""
        self._events: KvEventPublisher | None = None
        self._gate = GrammarGate(executor.compile_grammar, self._loop.add, self._loop.abort, self._loop.refuse)

    @classmethod
    def build(
        cls,
        settings: EngineSettings,
        report: Report,
        *,
        clock: Clock | None = None,
        make_worker: MakeWorker | None = None,
        on_fault: Callable[[str], None] | None = None,
        kept: Kept | None = None,
    ) -> "Engine":
        """Returns an engine with a loaded model. Loading takes seconds. `kept`: see `leave`.

        `make_worker` creates the worker instead of `load_model`. `on_fault`: if given, the engine tests itself, and if
        it finds a fault, it calls this function once, on another thread, with a description of the fault; `step` then
        raises WrongResultError. Raises SettingsError if settings contradict each other or the model, ServiceError if
        the model cannot be loaded.
        """
        check_engine(settings)
        check_adapters(settings)
        settings = with_adapters(with_present_names(settings))
        has_canary = on_fault is not None and settings.execution.canary_interval > 0
        has_canary_row = has_canary or settings.execution.deterministic
        with ExitStack() as unfinished:
            kept = kept or Kept()
            executor = kept.executor or _make_executor(_with_rows(settings, has_canary_row), make_worker)
            unfinished.callback(executor.close)
            if kept.executor is not None:
                executor.restore_cache()
            limits = replace(core_limits(settings, executor.facts()), has_canary_row=has_canary_row)
            if kept.executor is None:
                _try_out(executor, limits, settings)
            engine = cls(
                executor,
                limits,
                report,
                clock=clock,
                steps_per_report=settings.scheduler.num_scheduler_steps,
                counters=kept.counters,
            )
            unfinished.pop_all()
            unfinished.callback(engine.close)
            engine._connect(settings)
            engine._publish_events(settings)
            if on_fault is not None and has_canary:
                engine._watch(settings.execution.canary_interval, on_fault, kept)
            if engine.adapters is not None and kept.executor is None:
                load_modules(engine.adapters, settings)
            unfinished.pop_all()
            return engine

    @classmethod
    def of_worker(
        cls, worker: ModelWorker, limits: CoreLimits, report: Report, *, steps_per_report: int = 1
    ) -> "Engine":
        """Returns an engine without sequences for a worker whose model is already loaded."""
        return cls(Executor(worker), limits, report, steps_per_report=steps_per_report)

    def _watch(self, interval_s: float, on_fault: Callable[[str], None], kept: Kept) -> None:
        """Computes the golden value and the checksums of the weights, unless they are kept, and starts the self-tests.

        Raises ServiceError.
        """
        golden = kept.golden or measure(self._executor, self.limits)
        if golden is None:
            logger.warning("no canary: the context of %d tokens has no room for it", self.max_model_len)
            return
        wake = self._loop.wake
        canary = Canary(golden, self.facts, self.max_model_len, interval_s, wake, on_fault)
        self._loop.canary = self.canary = canary
        sums = self._sums = kept.sums or Checksums(self._executor.weight_memory())
        if sums.num_portions:
            self.guard = WeightGuard(sums, canary.report)
            self.guard.start()
        logger.info(
            "the canary runs every %.3g s and must give %s; %.1f MiB of weights are checked",
            canary.interval_s, golden.digest, sums.num_bytes / 2**20,
        )  # fmt: skip

    def _connect(self, settings: EngineSettings) -> None:
        """Starts the KV connector if the engine has a role (`--role` prefill or decode), or keeps KV on a disk.

        Raises SettingsError if it cannot exchange KV.
        """
        transfer, has_disk = settings.kv_transfer, settings.cache.kv_disk_gb > 0
        if transfer.role == "both" and not has_disk:
            return
        if not exchanges_kv(settings.parallel):
            if has_disk:
                raise SettingsError(f"--kv-disk-gb: {NO_KV}; leave it out")
            logger.warning("--role: %s: prompts are computed where requests run", NO_KV)
            return
        option = "--role" if transfer.role != "both" else "--kv-disk-gb"
        if (transfer.role == "decode" or has_disk) and not self.facts.num_host_blocks:
            raise SettingsError(f"{option}: KV arrives in host memory: give the engine some with --swap-space")
        listens = transfer.role == "prefill" or transfer.kv_replicate == "peer"
        host = (transfer.kv_host or default_kv_host(settings.nats)) if listens else None
        memory = self._lent = LentMemory(self._executor.kv_memory())
        connector = self._loop.connector = self.connector = KvConnector(
            memory,
            self._loop.wake,
            host=host,
            bind=transfer.kv_bind,
            content=self.facts.content,
            open_tier=partial(open_tier, settings, memory, self.facts) if has_disk else None,
            copies=transfer.kv_replicate == "peer",
        )
        self._core.tier.stored = connector.tier
        self._core.tier.is_copied = connector.keeper is not None

    def _publish_events(self, settings: EngineSettings) -> None:
        """Starts to publish KV events if `--kv-events-config` enables them. Raises SettingsError."""
        config = kv_events_of(settings.cache.kv_events_config)
        if config is not None and config.is_on:
            # Imported here because pyzmq is an extra.
            from antiphon.services.engine.kv_events.publisher import KvEventPublisher

            self._events = KvEventPublisher(config, self._core)

    @property
    def adapters(self) -> AdapterLibrary | None:
        """The adapters that sequences may use; None without `--enable-lora`. May be read from any thread."""
        return self._executor.adapters

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence, prompt and output; limited by the model and by the KV cache."""
        return self._core.checks.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs or any command is queued. Valid only on the thread that calls `step`."""
        return bool(self._core.sequences) or self._loop.has_commands or len(self._gate) > 0

    def add(self, spec: SequenceSpec, load_adapter: LoadAdapter | None = None) -> None:
        """Queues a sequence. The id must not be in use.

        If the sequence cannot run, no error is raised here: the report of the next step lists it as refused.

        If the sequence's adapter is not in memory, `load_adapter` is called on another thread and returns it.
        """
        self._gate.add(spec, load_adapter)

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence without a result. Does nothing if the sequence has already ended."""
        self._gate.abort(sequence_id)

    def step(self) -> bool:
        """Schedules, computes and reports one pass (see `StepLoop`). Returns False if there was nothing to compute."""
        return self._loop.step()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until there may be something to compute, `wake` is called or time is over; then returns False.

        See `StepLoop.wait`.
        """
        return self._loop.wait(timeout_s)

    def wake(self) -> None:
        """Makes a blocked `wait` return. From any thread."""
        self._loop.wake()

    def call(self, function: Callable[[Core], None]) -> None:
        """Has a function called with the core between two steps, on the thread of `step`. Returns at once."""
        self._loop.call(function)

    def record(self, wanted: bool) -> None:
        """Sets whether reports have the details of their steps. From any thread."""
        self._loop.records = wanted

    def run_on_thread(
        self, on_exit: Callable[[BaseException | None], None], on_rest: Callable[[], None]
    ) -> ThreadedLoop:
        """Starts a thread that steps the engine, see `ThreadedLoop`."""
        thread = ThreadedLoop(self._loop, on_exit, on_rest)
        thread.start()
        return thread

    @property
    def in_flight(self) -> InFlightSteps:
        """The steps that are being computed."""
        return self._loop.in_flight

    def check_idle(self) -> None:
        """Checks the invariants of an idle core, see `StepLoop.check_idle`."""
        self._loop.check_idle()

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that an error is known before a sequence with it is added. Raises ServiceError."""
        self._executor.compile_grammar(grammar)

    def load(self) -> EngineLoad:
        """Returns the current load."""
        return self._core.load()

    def counters(self) -> EngineCounters:
        """Returns the engine's totals (tokens, preemptions and others) since its start."""
        counters = self._core.counters()
        if self.connector is not None and self.connector.copies is not None:
            counters.kv_copied_tokens += self.connector.copies.num_copied * self.facts.block_size
        return counters

    def leave(self, *, keeps_weights: bool) -> Kept:
        """Computes what is left, then frees the KV cache, the swap space and, unless `keeps_weights`, the weights.

        `step` is called on this thread; the thread of `run_on_thread` must have ended. No sequence may be added.
        Returns what `build` makes a new engine of. If the worker cannot free its KV cache alone, the weights are freed
        too. The engine cannot be used afterwards.
        """
        while self.has_work or self.in_flight:
            if not self.step():
                self.wait(LEFT_WAIT_S)
        self._end_parts()
        if self._lent is not None:
            self._lent.take_back()
        counters = self.counters()
        if keeps_weights and self._executor.release_cache():
            golden = None if self.canary is None else self.canary.golden
            return Kept(counters=counters, executor=self._executor, golden=golden, sums=self._sums)
        self._executor.close()
        return Kept(counters=counters)

    def close(self) -> None:
        """Frees the device's memory. The engine cannot be used afterwards."""
        self._end_parts()
        self._executor.close()

    def _end_parts(self) -> None:
        """Ends all threads but that of `run_on_thread`."""
        self._gate.close()
        if self.guard is not None:
            self.guard.close()
        if self.connector is not None:
            self.connector.close()
        if self._events is not None:
            self._events.close()


def _try_out(executor: Executor, limits: CoreLimits, settings: EngineSettings) -> None:
    """Warms a new worker up, and checks that it is deterministic, as far as the settings ask for it."""
    if settings.execution.use_warmup:
        started = time.monotonic()
        steps = warm_up(executor, limits)
        logger.info("warmed up with %d steps in %.2f s", steps, time.monotonic() - started)
    if settings.execution.deterministic:
        check_deterministic(executor, limits)


def _with_rows(settings: EngineSettings, has_canary_row: bool) -> EngineSettings:
    """Returns the settings for the worker, with an additional row for the canary if there is one."""
    return replace(settings, max_num_seqs=settings.scheduler.max_num_seqs + 1) if has_canary_row else settings


def _make_executor(settings: EngineSettings, make_worker: MakeWorker | None) -> Executor:
    """Returns an executor of one process or of several, with the model loaded."""
    if make_worker is None and world_size(settings.parallel) > 1:
        from antiphon.services.engine.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor.start(settings)
    return Executor((make_worker or load_model)(settings))


def core_limits(settings: EngineSettings, facts: EngineFacts) -> CoreLimits:
    """Returns the scheduler's limits, with defaults filled in. Raises SettingsError if they contradict each other."""
    scheduler, cache, adapters = settings.scheduler, settings.cache, settings.adapters
    chunked = scheduler.enable_chunked_prefill and not facts.computes_whole
    asked = min(scheduler.max_num_seqs, scheduler.limit_worker_concurrency or scheduler.max_num_seqs)
    rows = min(asked, facts.max_rows or asked)
    # A text longer than the budget is computed in a step of its own.
    least = max(rows, 1 if chunked or facts.computes_whole else facts.max_model_len)
    budget, prompts = scheduler.max_num_batched_tokens, None
    if budget is None:
        budget, prompts = max(facts.step_tokens, least), facts.step_prompt_tokens if chunked else None
    if budget < least:
        raise SettingsError(
            f"--max-num-batched-tokens: {budget} is less than --max-num-seqs ({rows}) or, with "
            f"--enable-chunked-prefill=false, less than the context ({facts.max_model_len} tokens)"
        )
    gathers = scheduler.max_batch_size is not None or scheduler.batch_wait_timeout is not None
    wait_s = scheduler.batch_wait_timeout
    return CoreLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        enable_prefix_caching=cache.enable_prefix_caching and not facts.computes_whole and not facts.keeps_states,
        enable_chunked_prefill=chunked,
        kv_cache_ratio=cache.kv_cache_ratio,
        scheduler_delay_factor=scheduler.scheduler_delay_factor,
        num_speculative_tokens=scheduler.num_speculative_tokens
        if (scheduler.use_lookahead and not facts.keeps_states) or facts.has_draft_layer
        else 0,
        use_lookahead=scheduler.use_lookahead,
        max_batch_size=(scheduler.max_batch_size or DEFAULT_BATCH_SIZE) if gathers else None,
        batch_wait_timeout=DEFAULT_BATCH_WAIT_S if wait_s is None else wait_s,
        step_prompt_tokens=prompts,
        max_loras=adapters.num_lora_slots,
        max_prompt_adapters=(adapters.max_prompt_adapters or 0) if adapters.enable_prompt_adapter else 0,
    )


def load_modules(library: AdapterLibrary, settings: EngineSettings) -> None:
    """Loads the named adapters. Raises SettingsError that names the adapter if one cannot be served."""
    for module in (*lora_modules(settings), *prompt_adapters(settings)):
        try:
            library.load(module.name, module.path)
        except ServiceError as error:
            raise SettingsError(error.message) from error
        logger.info("the adapter %s is loaded from %s", module.name, module.path)


def with_present_names(settings: EngineSettings) -> EngineSettings:
    """Returns the settings with the values of deprecated flags moved to the flags that replace them. Logs a warning."""
    former = settings.execution.max_context_len_to_capture
    if former is None:
        return settings
    logger.warning("--max-context-len-to-capture is deprecated: use --max-seq-len-to-capture=%d", former)
    return replace(settings, max_seq_len_to_capture=former, max_context_len_to_capture=None)


def load_model(settings: EngineSettings) -> ModelWorker:
    """Returns a worker with a loaded model, of the backend that the settings select. Imports torch."""
    # Importing torch takes most of the start-up time; the import is here so that a service connects to the bus
    # meanwhile. A later call imports nothing, so it must not use `without_collections`, which would exclude the garbage
    # of this process from all later collections.
    is_first = "antiphon.services.engine.backends.load" not in sys.modules
    with without_collections() if is_first else nullcontext():
        from antiphon.services.engine.backends.load import load_worker
    return load_worker(settings)
