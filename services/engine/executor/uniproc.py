"""An executor with one worker in this process, called directly."""

from collections import deque
from collections.abc import Callable

from services.engine.adapters.library import AdapterLibrary
from services.engine.backends.cpu.library import compiled_copy
from services.engine.core.plan import EngineFacts, StepPlan, StepResult
from services.engine.kv.layout import KvMemory
from services.engine.worker.interface import (
    UNDER_WAY_MAX,
    AdapterWorker,
    GrammarWorker,
    KvWorker,
    ModelWorker,
    PipelinedWorker,
    WeighableWorker,
    WeightMemory,
)
from shared.errors import ServiceError
from shared.flags import SettingsError
from shared.parameters.grammar import Grammar


class UniprocExecutor:
    """An Executor with one worker. A worker that is not a `PipelinedWorker` computes the step within `launch`."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self._pipelined = worker if isinstance(worker, PipelinedWorker) else None
        self._computed: deque[StepResult] = deque()
        self.num_in_flight = 0
        """Number of plans launched and not yet collected."""

    @property
    def max_in_flight(self) -> int:
        """See Executor."""
        return 1 if self._pipelined is None else max(UNDER_WAY_MAX, self.facts().num_stages)

    def facts(self) -> EngineFacts:
        """See Executor."""
        return self.worker.facts()

    def has_room(self) -> bool:
        """See Executor."""
        if self.num_in_flight >= self.max_in_flight:
            return False
        return self._pipelined is None or self._pipelined.takes_another()

    def launch(self, plan: StepPlan) -> None:
        """See Executor."""
        if self._pipelined is None:
            self._computed.append(self.worker.run(plan))
        else:
            self._pipelined.launch(plan)
        self.num_in_flight += 1

    def collect(self) -> StepResult:
        """See Executor."""
        self.num_in_flight -= 1
        return self._computed.popleft() if self._pipelined is None else self._pipelined.collect()

    def compile_grammar(self, grammar: Grammar) -> None:
        """See Executor."""
        if not isinstance(self.worker, GrammarWorker):
            raise ServiceError("unsupported_parameter", "This engine has no structured output.")
        self.worker.compile_grammar(grammar)

    def kv_memory(self) -> KvMemory:
        """See Executor."""
        if not isinstance(self.worker, KvWorker):
            raise SettingsError("--role: this engine's backend cannot exchange KV; leave the option out")
        return self.worker.kv_memory(compiled_copy())

    @property
    def adapters(self) -> AdapterLibrary | None:
        """See Executor."""
        return self.worker.adapters if isinstance(self.worker, AdapterWorker) else None

    def watch(self, wake: Callable[[], None]) -> None:
        """See Executor. The callback is not needed: the worker is in this process."""

    def check(self) -> None:
        """See Executor."""

    def weight_memory(self) -> list[WeightMemory]:
        """See Executor."""
        return self.worker.weight_memory() if isinstance(self.worker, WeighableWorker) else []

    def close(self) -> None:
        """See Executor."""
        self.worker.close()
