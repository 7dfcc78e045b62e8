"""Executors pass step plans from the step loop to the worker or workers that compute them.

    executor.launch(plan)     starts a plan; at most `max_in_flight` plans may be started and not collected
    executor.collect()        waits for the oldest plan in flight and returns its result

`UniprocExecutor` runs one worker in this process. An executor with several workers would broadcast the plan, which is
plain data (`services.engine.core.plan`), and return the result of one worker.
"""

from services.engine.executor.interface import Executor
from services.engine.executor.uniproc import UniprocExecutor

__all__ = ["Executor", "UniprocExecutor"]
