"""The executor interface that the step loop uses."""

from collections.abc import Callable
from typing import Protocol

from services.engine.adapters.library import AdapterLibrary
from services.engine.core.plan import EngineFacts, StepPlan, StepResult
from services.engine.kv.layout import KvMemory
from services.engine.worker.interface import WeightMemory
from shared.parameters.grammar import Grammar


class Executor(Protocol):
    """Runs plans in order. Called from one thread only."""

    @property
    def max_in_flight(self) -> int:
        """Maximum number of plans in flight, that is, launched and not yet collected.

        1 means that each step is computed before the next is planned. With more, the next step is planned while the
        device computes; `has_room` may still be False below the maximum. With several pipeline stages
        (`EngineFacts.num_stages`) the maximum is the number of stages, and the plans in flight are computed at the same
        time.
        """
        ...

    def facts(self) -> EngineFacts:
        """Returns the properties of the loaded model and its memory."""
        ...

    def has_room(self) -> bool:
        """Returns whether a plan can be launched now without waiting for one in flight."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan, which must not be empty.

        If it raises, the state of the device is undefined and the engine must end.
        """
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest plan in flight and returns its result. Raises what its computation raised."""
        ...

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a grammar before a sequence that has it is scheduled. May be called on any thread.

        Raises ServiceError if the grammar is invalid or the model has no tokenizer.
        """
        ...

    def kv_memory(self) -> KvMemory:
        """Returns access to the blocks of the KV cache. Raises SettingsError if the worker has none."""
        ...

    @property
    def adapters(self) -> AdapterLibrary | None:
        """Returns the library of the worker's adapters; None without `--enable-lora`. May be called from any thread."""
        ...

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets a callback that is called, on any thread, when `check` would raise, so that an idle engine ends too."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if no plan can be computed any more. Cheap; called before each step."""

    def weight_memory(self) -> list[WeightMemory]:
        """Returns weights in this process's memory, which do not change until `close`: all, a part of them, or none."""
        ...

    def close(self) -> None:
        """Frees the devices' memory. No other call may follow."""
        ...
