"""`antiphon chaos`: runs streams on a server while its processes are killed and frozen, and reports what clients saw.

The server is started for the run, or already running (`--server` with `--run-directory`). The order is: (1) the answers
without faults, which are compared with later; (2) streams with faults; (3) no more faults, until the streams that run
have ended; (4) checks on the idle system: that nothing is left of the streams (`antiphon watch`).
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.chaos import report
from antiphon.chaos.disk import have_disks
from antiphon.chaos.options import ChaosOptions, read_options
from antiphon.chaos.schedule import Fault, make_schedule
from antiphon.chaos.server import given, own_server
from antiphon.chaos.stalls import STALL_AFTER_S, STALL_BEFORE_S
from antiphon.chaos.streams import Known, Load, StreamError, learn, make_bodies
from antiphon.chaos.targets import NATS, Injection, Injector, find_targets
from antiphon.inspect.invariants import Invariants, is_idle
from antiphon.launch.readiness import ServerAddress
from antiphon.shared import limits
from antiphon.shared.flags import SettingsError

IDLE_S = 30.0
"""Longest wait after the streams until the server is idle, seconds."""
KNOWN_ANSWERS = 24
IDLE_LOOKS = 3
"""Number of consecutive observations that must find the server idle without a breach."""
CALM_START_S, CALM_LOOK_S = 2.0, STALL_AFTER_S + STALL_BEFORE_S
"""Seconds from the start of the streams until the usual gaps between their tokens are measured, and between two
measurements."""
LOOK_S = 0.3
"""Time between two observations of the server's members, seconds."""


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code: 0 if nothing was lost, repeated or different.

    Raises SettingsError.
    """
    wanted = read_options(options)
    result = asyncio.run(_run(wanted))
    print("\n".join(report.lines(result)), file=sys.stderr if wanted.json_path == "-" else sys.stdout, flush=True)
    text = json.dumps(result.as_json(), indent=2) + "\n"
    if wanted.json_path == "-":
        sys.stdout.write(text)
    elif wanted.json_path:
        Path(wanted.json_path).write_text(text, encoding="utf-8")
    return 0 if result.passed else 1


async def _run(options: ChaosOptions) -> report.Report:
    async with _server(options) as (server, launcher):
        return await _Run(options, server, launcher).run()


class _Run:
    """One run on one server."""

    def __init__(self, options: ChaosOptions, server: ServerAddress, launcher: int) -> None:
        self._options = options
        self._server = server
        self._launcher = launcher
        self._ready: dict[str, bool] = {}
        self._injector = Injector(launcher, lambda name: self._ready.get(name, False))

    async def run(self) -> report.Report:
        """Runs it to the end. Raises SettingsError if the server gives no usable answers before the faults."""
        options = self._options
        looking = asyncio.create_task(self._look())
        try:
            known = await self._learn()
            processes = await self._processes()
            disks = have_disks({one.name: one.pid for one in find_targets(self._launcher).values()})
            minutes = 60 * options.minutes
            schedule = make_schedule(options.seed, minutes, processes, options.every_s, options.only, disks)
            say(f"{len(known)} answers known; {len(schedule)} faults in {options.minutes:g} min, seed {options.seed}")
            load = Load(self._server, known, self._gateway_failed, hang_s=options.hang_s, seed=options.seed)
            streaming = asyncio.create_task(load.run(options.streams))
            calm = await self._calm()
            injections = await self._inject(schedule)
            load.stop()
            await streaming
            breaches = await settle(self._server)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        duration_s = 60 * options.minutes
        offset_s = time.time() - time.monotonic()
        return report.make_report(
            options.seed, duration_s, injections, load.outcomes, breaches, calm=calm, offset_s=offset_s
        )

    async def _calm(self) -> list[Injection]:
        """Lets the streams run without faults. Returns moments of this period as faults of the kind `none`."""
        until = time.monotonic() + self._options.calm_s
        found: list[Injection] = []
        await asyncio.sleep(min(CALM_START_S, self._options.calm_s))
        while time.monotonic() + CALM_LOOK_S < until:
            now = time.monotonic()
            found.append(Injection(Fault(at_s=0.0, kind="none", group=report.CALM[1], targets=()), now, now))
            await asyncio.sleep(CALM_LOOK_S)
        return found

    async def _learn(self) -> list[Known]:
        model = await served_model(self._server)
        bodies = make_bodies(model, KNOWN_ANSWERS, self._options.max_tokens, self._options.seed)
        room = asyncio.Semaphore(8)

        async def one(body: dict[str, Any]) -> Known:
            async with room:
                return await learn(self._server, body, self._options.hang_s)

        try:
            return list(await asyncio.gather(*map(one, bodies)))
        except (StreamError, TimeoutError) as error:
            raise SettingsError(f"an answer without faults failed: {error or 'it took too long'}") from error

    async def _processes(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for target in sorted(find_targets(self._launcher).values(), key=lambda target: target.name):
            found.setdefault(target.service, []).append(target.name)
        if NATS not in found:
            raise SettingsError("the server has no bus of its own that could be killed: start it without --nats")
        for service, names in found.items():
            if service != NATS and len(names) < 2:
                raise SettingsError(f"there is one {service} only, so a kill must stop streams: start at least two")
        return found

    async def _inject(self, schedule: list[Fault]) -> list[Injection]:
        began = time.monotonic()

        async def one(fault: Fault) -> Injection:
            await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            injection = await self._injector.apply(fault)
            _tell(began, injection)
            return injection

        return list(await asyncio.gather(*map(one, schedule)))

    def _gateway_failed(self, since_s: float, until_s: float) -> bool:
        """Whether the fault of a gateway explains that a stream was interrupted.

        The stream ran from `since_s` to `until_s` (monotonic seconds). After SIGTERM a gateway finishes its streams,
        but it closes the connections of those that still run after `HAND_OVER_S`.
        """
        return any(
            _ends_streams(one, since_s, until_s) for one in self._injector.active if "gateway" in one.fault.group
        )

    async def _look(self) -> None:
        """Keeps the set of processes that gateways report as ready up to date."""
        while True:
            topology = await self._server.get_json("/admin/topology")
            if topology is not None:
                self._ready = {one["id"]: one["state"] == "ready" for one in topology["members"]}
            await asyncio.sleep(LOOK_S)


def _ends_streams(gateway: Injection, since_s: float, until_s: float) -> bool:
    """Whether a fault of a gateway may end a stream in this time."""
    if gateway.fault.kind == "kill":
        return since_s <= gateway.began_s <= until_s
    ended_s = gateway.ended_s or until_s
    return gateway.fault.kind == "stop" and since_s <= ended_s and ended_s - gateway.began_s >= limits.HAND_OVER_S


async def settle(server: ServerAddress) -> list[str]:
    """Waits until the server is idle, at most `IDLE_S`, and returns the breaches of its invariants."""
    deadline, invariants = time.monotonic() + IDLE_S, Invariants()
    idle_looks = 0
    found = ["the server did not answer after the faults"]
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        topology = await server.get_json("/admin/topology")
        if topology is None:
            continue
        breaches = invariants.check(topology)
        found = breaches or [f"not idle after {IDLE_S:.0f} s"]
        idle_looks = idle_looks + 1 if is_idle(topology) and not breaches else 0
        if idle_looks == IDLE_LOOKS:
            return []
    return found


async def served_model(server: ServerAddress) -> str:
    """Returns the name of the server's first model. Raises SettingsError if it lists none."""
    listed = await server.get_json("/v1/models")
    if not listed or not listed["data"]:
        raise SettingsError("the server names no model")
    return str(listed["data"][0]["id"])


def _tell(began: float, injection: Injection) -> None:
    fault = injection.fault
    what = f"{fault.kind} {', '.join(fault.targets)}" + (f" for {fault.duration_s:.1f} s" * bool(fault.duration_s))
    say(f"{injection.began_s - began:6.1f} s  {what}" + (f": {injection.problem}" * bool(injection.problem)))


@asynccontextmanager
async def _server(options: ChaosOptions) -> AsyncIterator[tuple[ServerAddress, int]]:
    if options.server:
        yield given(options.server, options.run_directory, options.api_key)
        return
    async with own_server(options.model) as started:
        yield started


def say(text: str) -> None:
    """Prints a progress message to standard error."""
    print(f"chaos    {text}", file=sys.stderr, flush=True)
