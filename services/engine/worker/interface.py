"""The worker interface, through which the step loop uses a backend.

Implemented by the module `worker` of each backend.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.kv.pieces import NativeCopy
from antiphon.shared.parameters.grammar import Grammar

UNDER_WAY_MAX = 2
"""Maximum number of plans launched and not yet collected: the running plan and the next one in the queue."""


class WeightMemory(NamedTuple):
    """A part of the weights in this process's memory that does not change while the model is loaded."""

    name: str
    address: int
    num_bytes: int


class ModelWorker(Protocol):
    """A loaded model on a device, with its KV cache and state table. Called from one thread only."""

    def facts(self) -> EngineFacts:
        """Returns the properties of the loaded model. Valid after construction."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one plan. After an exception the worker's state is undefined and the engine must end."""
        ...

    def close(self) -> None:
        """Frees the device's memory."""
        ...


@runtime_checkable
class GrammarWorker(Protocol):
    """A worker that supports grammars (structured output)."""

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a grammar for later sequences. May be called on any thread. Raises ServiceError."""
        ...


@runtime_checkable
class KvWorker(Protocol):
    """A worker that can exchange blocks of its KV cache with other engines."""

    def kv_memory(self, native: NativeCopy | None = None) -> KvMemory:
        """Returns access to the blocks. Valid until `close`. `native`: the C++ library's copy, if there is one."""
        ...


@runtime_checkable
class AdapterWorker(Protocol):
    """A worker that can compute with LoRA adapters."""

    @property
    def adapters(self) -> AdapterLibrary | None:
        """The library of this worker's adapters; None without `--enable-lora`. May be read from any thread."""
        ...


@runtime_checkable
class WeighableWorker(Protocol):
    """A worker whose weights, or a part of them, are in host memory and can be checked."""

    def weight_memory(self) -> list[WeightMemory]:
        """Returns the places in main memory of the weights that do not change until `close`."""
        ...


@runtime_checkable
class RestingWorker(Protocol):
    """A worker that can free its KV cache, its swap space and its rows while its weights stay in host memory."""

    def release_cache(self) -> bool:
        """Frees them. No plan may be in flight. Returns False, and changes nothing, if the worker cannot do without."""
        ...

    def restore_cache(self) -> None:
        """Allocates them again, with the sizes that they had; all rows are free."""
        ...


@runtime_checkable
class PipelinedWorker(ModelWorker, Protocol):
    """A worker that accepts the next plan while the device, or another pipeline stage, computes the previous one."""

    def takes_another(self) -> bool:
        """Whether a plan can be launched now without waiting for a plan in flight."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Queues a plan after those launched before.

        At most `UNDER_WAY_MAX` plans may be in flight, or as many as there are pipeline stages.
        """
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest plan in flight and returns its result."""
        ...
