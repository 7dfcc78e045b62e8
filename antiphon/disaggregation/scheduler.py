"""The scheduler instance of a deployment: serves the API and computes nothing itself.

It runs the bus, the gateways, the tokenizers and the detokenizers, and joins the prefill and decode instances to the
bus, whether they start before or after it. It counts as ready when all instances have been ready once.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from antiphon.async_client import Answer, post
from antiphon.disaggregation.instance import Deployment, Instance
from antiphon.disaggregation.join import HEADER, Join, Joined, is_signed, sign
from antiphon.supervision.fleet import CONFIGURATION_ERROR, Failure
from antiphon.supervision.processes import Sink

POLL_S = 0.5
"""Interval in seconds of the messages to each instance, which also rejoin a restarted instance."""
REMINDER_S = 15.0
"""Interval in seconds of the messages about instances that do not answer."""


def new_epoch() -> int:
    """Returns the current time in nanoseconds; orders the successive schedulers of a deployment."""
    return time.time_ns()


@dataclass(slots=True, kw_only=True)
class Gathering:
    """Joins the instances of a deployment to the bus and rejoins restarted ones.

    `ports` has the port of each of `deployment.workers()`. `bus` is the bus's URL for the instances; '' if they have it
    in their settings.
    """

    deployment: Deployment
    ports: Sequence[int]
    key: bytes
    epoch: int
    bus: str
    sink: Sink
    _joined: set[str] = field(default_factory=set[str])
    _told: dict[str, str] = field(default_factory=dict[str, str])
    """The last problem of each instance that was printed."""

    async def run(self) -> Failure:
        """Runs until cancelled. Returns a failure if the instance at a port is not the expected one."""
        workers = list(zip(self.deployment.workers(), self.ports, strict=True))
        tasks = [asyncio.create_task(self._keep(position, *each)) for position, each in enumerate(workers, 1)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, position: int, worker: Instance, port: int) -> Failure:
        silent_since = time.monotonic()
        while True:
            problem, is_final = self._judge(position, worker, port, await self._ask(worker, port))
            if not problem:
                silent_since = time.monotonic()
                self._told.pop(worker.name, None)
                if worker.name not in self._joined:
                    self._joined.add(worker.name)
                    self.sink("antiphon", f"{worker.name} has joined ({worker.server.server_ip}:{port})")
            elif is_final and worker.name not in self._joined:
                return Failure(problem, CONFIGURATION_ERROR)
            elif is_final or time.monotonic() - silent_since > REMINDER_S:
                silent_since = time.monotonic()
                if self._told.get(worker.name) != problem:
                    self._told[worker.name] = problem
                    self.sink("antiphon", problem)
            await asyncio.sleep(POLL_S)

    async def _ask(self, worker: Instance, port: int) -> Answer:
        body = msgspec.json.encode(Join(self.epoch, worker.name, self.deployment.digest, self.bus))
        return await post(worker.server.server_ip, port, "/join", body, {HEADER: sign(self.key, "join", body)})

    def _judge(self, position: int, worker: Instance, port: int, answer: Answer) -> tuple[str, bool]:
        """Returns the problem of an answer ('' if none), and whether only the user can solve it."""
        where = f"NODE_PORTS position {position}, {worker.name} at {worker.server.server_ip}:{port}"
        if answer.status == 0:
            return f"{where}: does not answer; start this instance, or check host, port and firewall", False
        if answer.status == 403:
            return f"{where}: has another key; all instances need the same --cluster-key-file", True
        if answer.status not in (200, 409) or HEADER not in answer.headers:
            return f"{where}: answers, but is no instance of a deployment (start-role)", True
        if not is_signed(self.key, "joined", answer.body, answer.headers[HEADER]):
            return f"{where}: has another key; all instances need the same --cluster-key-file", True
        joined = msgspec.json.decode(answer.body, type=Joined)
        if not joined.refused:
            return "", False
        if joined.table == self.deployment.digest and joined.name != worker.name:
            return (
                f"{where}: there is {joined.name} (devices {joined.devices}). NODE_PORTS has the ports of all prefill "
                "instances and then all decode instances, in the order of the global rank table",
                True,
            )
        return f"{where}: does not follow: {joined.refused}", True
