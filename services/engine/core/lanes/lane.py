"""A lane: one kind of sequences, and when it is scheduled. `scheduler` calls the lanes in the order of `LANES`."""

from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.services.engine.core.lanes.admission import Admission
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.policy.step_times import StepTimes
from antiphon.services.engine.core.residency import Residency
from antiphon.services.engine.core.sequence import Sequence
from antiphon.services.engine.core.step_builder import StepBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The objects that the lanes of one scheduler share. `num_stages`: see `EngineFacts`."""

    limits: CoreLimits
    num_stages: int
    residency: Residency
    admission: Admission
    times: StepTimes


class Lane:
    """Schedules sequences into the plan of a step. A lane's own state is in its object.

    By default a lane has no sequences of its own and takes them from the queue or from the running ones.
    """

    takes_leftovers = False
    """Whether the lane schedules even if an earlier one has closed the step (`StepBuilder.closed`)."""
    sleeps = False
    """Whether the lane has nothing to do in any step, until a sequence that it owns is added."""

    def __init__(self, shared: Shared) -> None:
        self._limits, self._num_stages = shared.limits, shared.num_stages
        self._residency, self._admission = shared.residency, shared.admission

    def begin(self, builder: StepBuilder) -> None:
        """Does what must precede the work of all lanes in a step."""

    def schedule(self, builder: StepBuilder) -> None:
        """Schedules the lane's sequences, as far as the plan has room."""
        raise NotImplementedError

    def owns(self, sequence: Sequence) -> bool:
        """Whether the sequence waits in this lane while it waits."""
        return False

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence that the lane owns."""
        self._residency.queue_of(sequence).push(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Removes a waiting sequence that the lane owns. Its status has just become finished."""
        self._residency.forget(sequence)

    def waiting(self) -> Iterable[Sequence]:
        """Returns the waiting sequences that the lane owns, in no particular order."""
        return ()
