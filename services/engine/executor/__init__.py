"""Executors pass step plans from the step loop to the worker or workers that compute them.

    executor.launch(plan)     starts a plan; at most `max_in_flight` plans may be started and not collected
    executor.collect()        waits for the oldest plan in flight and returns its result

`Executor` runs one worker in this process. `MultiprocExecutor` (`multiproc`) also sends each plan, which is plain
data (`antiphon.services.engine.core.plan`), to several processes, and returns the result of one:

    starting         starts the ranks on this machine, on others, or by Ray (`ray_ranks`)
    joining          how ranks of other machines connect and authenticate
    rank_processes   the other ranks as the first one sees them; detects when one has ended
    channel          the messages to the other ranks
    adapter_parts    messages with parts of adapters
    rank             the program of the other ranks
"""

from antiphon.services.engine.executor.executor import Executor

__all__ = ["Executor"]
