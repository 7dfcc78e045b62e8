"""The lanes by which sequences come into a step, one module each (`lane`). `admission` is what several of them share.

`LANES` is the order in which they schedule. The canary's lane, the idle lane and the large head's lane are
optional: the core works without the module and its two lines here.
"""

from antiphon.services.engine.core.lanes.canary import CanaryLane
from antiphon.services.engine.core.lanes.idle import IdleLane
from antiphon.services.engine.core.lanes.lane import Lane
from antiphon.services.engine.core.lanes.large_head import LargeHeadLane
from antiphon.services.engine.core.lanes.running import RunningLane
from antiphon.services.engine.core.lanes.waiting import WaitingLane

LANES: tuple[type[Lane], ...] = (
    LargeHeadLane,
    RunningLane,
    WaitingLane,
    IdleLane,
    CanaryLane,
)
