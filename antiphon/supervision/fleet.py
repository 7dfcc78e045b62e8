"""Supervises child processes: restarts a child that ends, gives up on one that keeps crashing, stops them in order.

The module does not depend on what the children do. Used by `antiphon.launch.launcher`.
"""

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from antiphon.shared.distributed.world import AGAIN
from antiphon.supervision.processes import Child, ChildSpec, Sink
from antiphon.supervision.standby import Standby

CONFIGURATION_ERROR = 78
"""Exit code of a service whose settings are invalid. Such a service is not restarted."""
STABLE_S = 5.0
"""A child that has run for this many seconds counts as successfully started."""
CRASHES_MAX, WINDOW_S = 20, 600.0
"""A child with more crashes than this in the window (seconds) is given up, even if every start was successful."""
AGAIN_S = 0.5
"""Seconds before the restart of a child that requested it by its exit code, which does not count as a crash."""
REPLICAS_S = 1.0
"""Least time until the restart of a child with running replicas, seconds. In this time the replicas take over the
child's work; on a machine with few cores the start of a process would delay them.
"""
REPLICAS_LOOK_S = 0.1
"""Interval of the checks whether these replicas still run, seconds."""
STANDBY_AFTER_S = 5.0
"""Seconds after the start of a child until its standby is started, so that this does not delay the child."""
STABLE_WAIT_S = 0.1
"""Seconds before the restart of a child that had started successfully."""
KILL_WAIT_S = 5.0
"""Longest wait in seconds for the end of a process after SIGKILL."""


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Counts the crashes of one process.

    The wait is `first_s` seconds after one crash within the last `window_s` seconds and doubles with each further crash
    in this window, up to `max_s`. After more than `crashes_max` crashes in the window the process is given up.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    crashes_max: int = 5
    window_s: float = 60.0
    _crashes: deque[float] = field(default_factory=deque[float], repr=False)

    def crashed(self, now: float) -> float | None:
        """Records a crash at `now` (monotonic seconds). Returns the seconds to wait, or None to give up."""
        while self._crashes and self._crashes[0] <= now - self.window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self.crashes_max:
            return None
        return min(self.max_s, self.first_s * 2.0 ** (len(self._crashes) - 1))


@dataclass(frozen=True, slots=True)
class Failure:
    """The message for the user that says why the fleet cannot continue, and the launcher's exit code for it."""

    message: str
    exit_code: int


class RestartPolicy:
    """Decides for one child, when it ends, whether to restart it after some seconds or to give up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._starts = Backoff()
        self._crashes = Backoff(crashes_max=CRASHES_MAX, window_s=WINDOW_S, max_s=STABLE_WAIT_S)

    def after(self, exit_code: int, uptime_s: float, now: float, last_error: str = "") -> float | Failure:
        """Returns the seconds to wait before the next start, or a Failure if the child is given up.

        `now` is in monotonic seconds. `last_error` is the child's last error message, which the failure repeats so that
        the user finds it at the end of the output.
        """
        if exit_code == CONFIGURATION_ERROR:
            why = last_error or "see its message above"
            return Failure(f"{self._name} refused its configuration: {why}", CONFIGURATION_ERROR)
        if exit_code == AGAIN:
            return AGAIN_S
        wait_s = self._crashes.crashed(now)
        if uptime_s < STABLE_S and wait_s is not None:
            wait_s = self._starts.crashed(now)
        if wait_s is None:
            reason = f"{self._name} ends again and again ({describe(exit_code)} the last time)"
            return Failure(f"{reason}: {last_error or 'its output above says why'}", 1)
        return wait_s


@dataclass(slots=True, eq=False, kw_only=True)
class _Member:
    spec: ChildSpec
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    child: Child | None = None
    task: "asyncio.Task[None] | None" = None
    standby: Standby | None = None
    """Takes the child's place when it ends."""


class Fleet:
    """The children of one launcher. The future `failed` completes when the fleet cannot continue."""

    def __init__(self, sink: Sink) -> None:
        self.killed = False
        self.failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self.trials: set[str] = set()
        """Models whose processes are not restarted when they end."""
        self.on_failure: dict[str, Callable[[Failure], None]] = {}
        """By model, for models without which the fleet can continue: called when a process of the model is given up,
        unless another one of its service goes on."""
        self.on_end: Callable[[ChildSpec], None] = lambda spec: None
        """Called when a child has ended by itself."""
        self._sink = sink
        self._members: list[_Member] = []

    def start(self, specs: Iterable[ChildSpec]) -> None:
        """Starts the children concurrently and restarts them as `RestartPolicy` decides."""
        for spec in specs:
            member = _Member(spec=spec)
            member.task = asyncio.create_task(self._keep_until_stopped(member))
            self._members.append(member)

    def specs(self) -> list[ChildSpec]:
        """Returns the children that are not being stopped."""
        return [member.spec for member in self._members if not member.stopping.is_set()]

    def pids(self) -> dict[str, int]:
        """Returns the process ids of the running children by name."""
        return {m.spec.name: m.child.pid for m in self._members if m.child is not None and m.child.running}

    async def stop(self, services: Iterable[str], grace_s: float) -> None:
        """Stops the children of these services with SIGTERM, and with SIGKILL after `grace_s` seconds.

        Returns when they have ended, or `KILL_WAIT_S` after SIGKILL.
        """
        wanted = set(services)
        await self._stop([m for m in self._members if m.spec.service in wanted], grace_s)

    async def stop_model(self, model: str, grace_s: float) -> None:
        """Stops all children of a model as `stop` does, and forgets them."""
        members = [m for m in self._members if m.spec.model == model]
        await self._stop(members, grace_s)
        self._members = [m for m in self._members if m not in members]
        self.trials.discard(model)
        self.on_failure.pop(model, None)

    async def _stop(self, members: list[_Member], grace_s: float) -> None:
        for member in members:
            member.stopping.set()
            _signal(member, signal.SIGTERM)
        late = await _wait(members, grace_s)
        for member in late:
            self._sink("antiphon", f"{member.spec.name} did not end within {grace_s:.0f} s and is killed")
            _signal(member, signal.SIGKILL)
        await _wait(late, KILL_WAIT_S)

    def kill(self) -> None:
        """Kills all children. A running `stop` then returns soon."""
        self.killed |= any(m.child is not None and m.child.running for m in self._members)
        for member in self._members:
            member.stopping.set()
            _signal(member, signal.SIGKILL)

    async def _keep_until_stopped(self, member: _Member) -> None:
        try:
            await self._keep(member)
        finally:
            if member.standby is not None:
                await member.standby.end()

    async def _keep(self, member: _Member) -> None:
        policy = RestartPolicy(member.spec.name)
        while not member.stopping.is_set():
            started = time.monotonic()
            try:
                exit_code = await self._run_once(member)
            except OSError as error:
                self._give_up(member, Failure(f"{member.spec.name} cannot be started: {error}", 1))
                return
            if member.stopping.is_set():
                return
            self.on_end(member.spec)
            now = time.monotonic()
            if member.spec.model in self.trials:
                why = member.child.last_error if member.child else ""
                message = f"{member.spec.name} ended while it started ({describe(exit_code)}): "
                self._give_up(member, Failure(message + (why or "its output in the server's log says why"), exit_code))
                return
            verdict = policy.after(exit_code, now - started, now, member.child.last_error if member.child else "")
            if isinstance(verdict, Failure):
                self._give_up(member, verdict)
                return
            # The start of a standby takes little of the processor.
            has_standby = member.standby is not None and member.standby.is_ready
            wait_s = max(verdict, REPLICAS_S) if self._has_replicas(member) and not has_standby else verdict
            self._sink(
                "antiphon", f"{member.spec.name} ended ({describe(exit_code)}); it starts again in {wait_s:.1f} s"
            )
            await self._pause(member, verdict, now + wait_s)

    async def _pause(self, member: _Member, least_s: float, until: float) -> None:
        """Waits `least_s` seconds, then until the time `until` (monotonic seconds) while replicas of the child run.

        Returns early if the child is stopped.
        """
        pause_s = least_s
        while not member.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await member.stopping.wait()
            pause_s = min(REPLICAS_LOOK_S, until - time.monotonic())
            if pause_s <= 0 or not self._has_replicas(member):
                return

    def _has_replicas(self, member: _Member) -> bool:
        spec = member.spec
        others = (m for m in self._members if m is not member and m.child is not None and m.child.running)
        same = (m.child for m in others if (m.spec.service, m.spec.model) == (spec.service, spec.model))
        return any(child is not None and not child.is_stopped for child in same)

    async def _run_once(self, member: _Member) -> int:
        taken = None if member.standby is None else member.standby.take()
        if taken is None:
            member.child = Child(member.spec, self._sink)
            await member.child.start()
            ended = member.child.wait()
        else:
            member.child, ended = taken
        member.standby = Standby(member.spec, self._sink, STANDBY_AFTER_S) if member.spec.standby_argv else None
        if member.stopping.is_set():
            member.child.signal(signal.SIGTERM)
        return await ended

    def _give_up(self, member: _Member, failure: Failure) -> None:
        service, model = member.spec.service, member.spec.model
        peers = [m for m in self._members if m.spec.service == service and m.child is not None and m.child.running]
        same = sum(m.spec.model == model for m in peers)
        tell = self.on_failure.get(model)
        if tell is not None and (model in self.trials or not same or failure.exit_code == CONFIGURATION_ERROR):
            self._sink("antiphon", failure.message)
            tell(failure)
        elif peers and failure.exit_code != CONFIGURATION_ERROR:
            rest = f"{same} other {service} goes on." if same else f"The model {model!r} is not served any more."
            self._sink("antiphon", f"{failure.message} It is not started again; {rest}")
        elif not self.failed.done():
            self.failed.set_result(failure)


def describe(exit_code: int) -> str:
    """Returns an exit code in words; a negative one is the number of a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _signal(member: _Member, number: signal.Signals) -> None:
    if member.child is not None:
        member.child.signal(number)


async def _wait(members: list[_Member], timeout_s: float) -> list[_Member]:
    """Waits up to `timeout_s` seconds and returns the members that have not ended."""
    tasks = [m.task for m in members if m.task is not None]
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
    return [m for m in members if m.task is not None and not m.task.done()]
