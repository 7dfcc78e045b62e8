"""Virtual time: an asyncio event loop that never sleeps, so that hours of timeouts run in milliseconds and repeatably.

When no callback is ready, the clock jumps to the next timer. If there is no timer either, the tasks would wait forever;
the loop then raises an error that lists the waiting tasks. Used by tests, with `memory.MemoryBus` as the bus.

A `SimProcess` groups the tasks and callbacks of one simulated process, so that they can be stopped and
resumed together.

The same seed gives the same run if the code under test takes random numbers only from `random` or seeded generators and
the time only from `SimClock` or the loop, starts no threads (executors run their work at once, in zero virtual time),
and never iterates over a set. Garbage collection is off during a run, because finalizers would run at different times
in different runs.
"""

import asyncio
import contextvars
import gc
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
EPOCH_NS = 1_700_000_000_000_000_000
"""Unix time in nanoseconds at virtual time zero."""


class DeadlockError(RuntimeError):
    """Every task waits, and there is no timer that could wake one of them."""


class TimeLimitError(RuntimeError):
    """The simulation has reached its limit of virtual time."""


_PROCESS: contextvars.ContextVar["SimProcess | None"] = contextvars.ContextVar("simulated process", default=None)


class SimProcess:
    """A simulated process: all tasks and callbacks whose context descends from `context`.

    It must be created inside the loop. `stop` acts like SIGSTOP: tasks and callbacks of the process do not run until
    `resume`, but its timers expire. A killed process is one that is stopped and never resumed, so that none of its
    clean-up code runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._held: list[asyncio.Handle] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop)
        self._loop = loop
        loop.processes.append(self)

    def stop(self) -> None:
        """Stops the process: its callbacks are held from now on. May be called again."""
        self.stopped = True

    def resume(self) -> None:
        """Resumes the process, and first runs the callbacks that were held, in the order in which they became due."""
        self.stopped = False
        held, self._held = self._held, []
        for handle in held:
            self._loop.call_soon(_run_held, handle, context=self._loop.context)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Runs a coroutine as a task of this process."""
        return self._loop.create_task(work, context=self.context)

    def tasks(self) -> "list[asyncio.Task[Any]]":
        """Returns the tasks of the process that have not ended, oldest first."""
        for task in [task for task in self._tasks if task.done()]:
            del self._tasks[task]
        return list(self._tasks)

    def hold(self, handle: asyncio.Handle) -> None:
        """Keeps a callback until `resume`. Called by the loop."""
        self._held.append(handle)

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Records a task of the process. Called by the loop."""
        self._tasks[task] = None
        if len(self._tasks) > 1024:
            self.tasks()


def _run_held(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()


class _Handle(asyncio.Handle):
    """A callback that is held while its process is stopped."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)
        if process is not None and process.stopped:
            process.hold(self)
        else:
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    """A timer whose callback is held while its process is stopped."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)
        if process is not None and process.stopped:
            process.hold(self)
        else:
            super()._run()


class _JumpingSelector(selectors.BaseSelector):
    """Polls real files without waiting, and advances the loop's clock instead of sleeping."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns the files that are ready. If there are none, advances the loop's clock by `timeout` seconds."""
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
    """An event loop whose virtual time starts at zero, and which raises TimeLimitError after `limit_s` seconds."""

    _scheduled: list[asyncio.TimerHandle]
    _ready: deque[asyncio.Handle]

    def __init__(self, limit_s: float) -> None:
        self._virtual_s = 0.0
        self._limit_s = limit_s
        self.processes: list[SimProcess] = []
        self.context = contextvars.copy_context()
        """The context of callbacks that belong to no process, such as those of the network."""
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Returns the virtual time in seconds."""
        return self._virtual_s

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See BaseEventLoop. The callback is held while its process is stopped."""
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> "asyncio.Task[T]":
        """See BaseEventLoop. The context of a task determines the process that it belongs to."""
        task = super().create_task(coro, name=name, context=context)
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None:
            process.adopt(task)
        return task

    def release(self) -> None:
        """Resumes every process, so that its tasks can be cancelled."""
        for process in self.processes:
            process.resume()

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs the function immediately. With a thread, the time of the result would differ between runs."""
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
            limit_s, self._limit_s = self._limit_s, float("inf")  # no limit for the clean-up of the tasks
            self.release()
            raise TimeLimitError(f"still running after {limit_s:g} virtual seconds:\n{_waiting(self)}")


class SimClock:
    """`antiphon.shared.clock.Clock` in virtual time. It must be created inside the simulation."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def monotonic(self) -> float:
        """See Clock."""
        return self._loop.time()

    def time_ns(self) -> int:
        """See Clock."""
        return EPOCH_NS + round(self._loop.time() * 1e9)


def run_simulation(main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0, *, limit_s: float = 3600.0) -> T:
    """Runs `main()` in virtual time and returns its result.

    The module `random` is seeded with `seed` during the run. Raises DeadlockError if all tasks wait without a timer,
    and TimeLimitError after `limit_s` virtual seconds; in both cases all tasks are cancelled first.
    """
    state, collecting = random.getstate(), gc.isenabled()
    random.seed(seed)
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=lambda: SimulationLoop(limit_s)) as runner:
            return runner.run(_and_release(main()))
    finally:
        random.setstate(state)
        if collecting:
            gc.enable()


async def _and_release(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and then resumes stopped processes, so that their tasks can be cancelled."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulationLoop)
    try:
        return await work
    finally:
        loop.release()


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Returns one line for each waiting task: its name, and the file and line of its innermost frame."""
    lines: list[str] = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        frames = task.get_stack()
        place = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "not started"
        lines.append(f"  {task.get_name()} in {place}")
    return "\n".join(lines)
