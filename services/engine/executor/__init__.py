"""Executors pass step plans from the step loop to the worker or workers that compute them.

    executor.launch(plan)     starts a plan; at most `max_in_flight` plans may be started and not collected
    executor.collect()        waits for the oldest plan in flight and returns its result

`UniprocExecutor` runs one worker in this process. `MultiprocExecutor` (`multiproc`) sends each plan, which is plain
data (`services.engine.core.plan`), to several processes, and returns the result of one:

    starting         starts them on this machine, on others, or by Ray (`ray_ranks`)
    joining          how processes of other machines connect and prove who they are
    rank_processes   what is known of them here, and a watch over them
    channel          the messages to them
    adapter_parts    the parts of adapters among these
    rank             the program that they run
"""

from services.engine.executor.interface import Executor
from services.engine.executor.uniproc import UniprocExecutor

__all__ = ["Executor", "UniprocExecutor"]
