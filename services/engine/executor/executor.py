"""The executor of the step loop, with one worker in this process. `multiproc` extends it to several processes."""

from collections import deque
from collections.abc import Callable

from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.backends.cpu.library import compiled_copy
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.worker.interface import (
    UNDER_WAY_MAX,
    AdapterWorker,
    GrammarWorker,
    KvWorker,
    ModelWorker,
    PipelinedWorker,
    RestingWorker,
    WeighableWorker,
    WeightMemory,
)
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.grammar import Grammar


class Executor:
    """Runs plans in order. Called from one thread only.

    A worker that is not a `PipelinedWorker` computes the step within `launch`.
    """

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self._pipelined = worker if isinstance(worker, PipelinedWorker) else None
        self._computed: deque[StepResult] = deque()
        self.num_in_flight = 0
        """Number of plans launched and not yet collected."""

    @property
    def max_in_flight(self) -> int:
        """Maximum number of plans in flight, that is, launched and not yet collected.

        1 means that each step is computed before the next is planned. With more, the next step is planned while the
        device computes; `has_room` may still be False below the maximum. With several pipeline stages
        (`EngineFacts.num_stages`) the maximum is the number of stages, and the plans in flight are computed at the same
        time.
        """
        return 1 if self._pipelined is None else max(UNDER_WAY_MAX, self.facts().num_stages)

    def facts(self) -> EngineFacts:
        """Returns the properties of the loaded model and its memory."""
        return self.worker.facts()

    def has_room(self) -> bool:
        """Returns whether a plan can be launched now without waiting for one in flight."""
        if self.num_in_flight >= self.max_in_flight:
            return False
        return self._pipelined is None or self._pipelined.takes_another()

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan, which must not be empty.

        If it raises, the state of the device is undefined and the engine must end.
        """
        if self._pipelined is None:
            self._computed.append(self.worker.run(plan))
        else:
            self._pipelined.launch(plan)
        self.num_in_flight += 1

    def collect(self) -> StepResult:
        """Waits for the oldest plan in flight and returns its result. Raises what its computation raised."""
        self.num_in_flight -= 1
        return self._computed.popleft() if self._pipelined is None else self._pipelined.collect()

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a grammar before a sequence that has it is scheduled. May be called on any thread.

        Raises ServiceError if the grammar is invalid or the model has no tokenizer.
        """
        if not isinstance(self.worker, GrammarWorker):
            raise ServiceError("unsupported_parameter", "This engine has no structured output.")
        self.worker.compile_grammar(grammar)

    def kv_memory(self) -> KvMemory:
        """Returns access to the blocks of the KV cache. Raises SettingsError if the worker has none."""
        if not isinstance(self.worker, KvWorker):
            raise SettingsError("--role: this engine's backend cannot exchange KV; leave the option out")
        return self.worker.kv_memory(compiled_copy())

    @property
    def adapters(self) -> AdapterLibrary | None:
        """Returns the library of the worker's adapters; None without `--enable-lora`. May be called from any thread."""
        return self.worker.adapters if isinstance(self.worker, AdapterWorker) else None

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets a callback that is called, on any thread, when `check` would raise, so that an idle engine ends too."""

    def check(self) -> None:
        """Raises RuntimeError if no plan can be computed any more. Cheap; called before each step."""

    def weight_memory(self) -> list[WeightMemory]:
        """Returns weights in this process's memory, which do not change until `close`: all, a part of them, or none."""
        return self.worker.weight_memory() if isinstance(self.worker, WeighableWorker) else []

    def release_cache(self) -> bool:
        """Frees the KV cache but not the weights. Returns False, and changes nothing, if the worker cannot.

        No plan may be in flight, and none may be launched before `restore_cache`.
        """
        return isinstance(self.worker, RestingWorker) and self.worker.release_cache()

    def restore_cache(self) -> None:
        """Allocates what `release_cache` has freed."""
        assert isinstance(self.worker, RestingWorker), "this worker has not released its cache"
        self.worker.restore_cache()

    def close(self) -> None:
        """Frees the devices' memory. No other call may follow."""
        self.worker.close()
