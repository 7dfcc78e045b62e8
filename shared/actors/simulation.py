"""Virtual time: an asyncio loop that never sleeps, so that hours of timeouts run in milliseconds, the same every time.

When nothing is ready the clock jumps to the next timer. When there is no timer either, nothing can ever happen again:
that is an error, and it says who waits. Used by tests, with `memory.MemoryBus` as the bus.

The same seed gives the same run as long as the code under test takes its randomness from `random` or from seeded
generators, its time from `SimClock` or the loop, starts no threads (executors run their work in place, in no time), and
never iterates over a set.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
EPOCH_NS = 1_700_000_000_000_000_000
"""Wall time at virtual time zero."""


class DeadlockError(RuntimeError):
    """Every task waits for something that cannot happen any more."""


class TimeLimitError(RuntimeError):
    """The simulation went on for longer than it may: something never ends."""


class _JumpingSelector(selectors.BaseSelector):
    """Looks at real files without waiting, and moves the loop's clock instead of sleeping."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Asks the loop to jump by `timeout` seconds when no file is ready."""
        ready = self._real.select(0)
        if not ready and (timeout is None or timeout > 0):
            self._advance(timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """See selectors.BaseSelector."""
        return self._real.get_map()

    def close(self) -> None:
        """See selectors.BaseSelector."""
        self._real.close()


class SimulationLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at zero and jumps. `limit_s` bounds it."""

    def __init__(self, limit_s: float) -> None:
        self._virtual_s = 0.0
        self._limit_s = limit_s
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs the function here and now: a thread would finish at its own time, differently in every run."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise DeadlockError(f"at {self._virtual_s:.3f} s every task waits and no timer is set:\n{_waiting(self)}")
        self._virtual_s += seconds
        if self._virtual_s > self._limit_s:
            limit_s, self._limit_s = self._limit_s, float("inf")  # the tasks' own clean-up may take its time
            raise TimeLimitError(f"still running after {limit_s:g} virtual seconds:\n{_waiting(self)}")


class SimClock:
    """`shared.clock.Clock` in virtual time; to be made inside the simulation."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def monotonic(self) -> float:
        """See Clock."""
        return self._loop.time()

    def time_ns(self) -> int:
        """See Clock."""
        return EPOCH_NS + round(self._loop.time() * 1e9)


def run_simulation(main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0, *, limit_s: float = 3600.0) -> T:
    """Runs `main()` in virtual time and returns what it returns.

    The module `random` is seeded for the duration. Raises DeadlockError, and TimeLimitError after `limit_s` virtual
    seconds; in both cases every task has been cancelled by then.
    """
    state = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=lambda: SimulationLoop(limit_s)) as runner:
            return runner.run(main())
    finally:
        random.setstate(state)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    """One line for each task that waits: its name and the innermost place."""
    lines: list[str] = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        frames = task.get_stack()
        place = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "not started"
        lines.append(f"  {task.get_name()} in {place}")
    return "\n".join(lines)
