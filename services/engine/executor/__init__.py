"""How step plans reach the worker or workers that compute them: the interface between the step loop and the devices.

    executor.launch(plan)     starts a plan; at most `max_in_flight` are started and not collected
    executor.collect()        waits for the oldest one and returns its result

`UniprocExecutor` runs one worker in this process. An executor with several workers broadcasts the plan, which is plain
data (`services.engine.core.plan`), and returns the result of one of them.
"""

from services.engine.executor.interface import Executor
from services.engine.executor.uniproc import UniprocExecutor

__all__ = ["Executor", "UniprocExecutor"]
