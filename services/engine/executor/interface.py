"""The executor as the step loop sees it."""

from typing import Protocol

from services.engine.core.plan import EngineFacts, StepPlan, StepResult


class Executor(Protocol):
    """Carries out plans in order. Called from one thread only."""

    @property
    def max_in_flight(self) -> int:
        """Plans that may be launched and not yet collected; 1 means that a step is computed before the next is planned.

        With more, the next step is planned while the device computes, and `has_room` may still refuse one for now.
        """
        ...

    def facts(self) -> EngineFacts:
        """What loading the model established."""
        ...

    def has_room(self) -> bool:
        """Whether a plan can be launched now without waiting for one in flight."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan that is not empty. An exception means that the device's state is lost: the engine must end."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest plan in flight. Raises what its computation raised."""
        ...

    def close(self) -> None:
        """Frees the devices' memory. No other call may follow."""
        ...
