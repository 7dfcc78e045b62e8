"""Services as processes for tests on a real bus: started, found by their heartbeats, killed, frozen, stopped."""

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.shared.bus.transport import Delivery, Transport
from antiphon.shared.codec import Decoder
from antiphon.shared.limits import LEASE_S
from antiphon.shared.messages import Heartbeat
from antiphon.shared.subjects import Subjects
from tests.conftest import NatsServer

START_S = 60.0


@dataclass
class Roster:
    """Who has been heard, as a gateway would know it."""

    heard: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, transport: Transport, subjects: Subjects) -> None:
        decoder = Decoder([Heartbeat])

        def receive(delivery: Delivery) -> None:
            beat = decoder.decode(delivery.payload)
            self.heard[beat.id] = (beat, time.monotonic())
            self.changed.set()

        await transport.subscribe(subjects.heartbeats(), receive)
        await transport.barrier()

    def alive(self) -> list[Heartbeat]:
        """Members whose lease has not run out, freshest first."""
        now = time.monotonic()
        fresh = [(now - at, beat) for beat, at in self.heard.values() if now - at < LEASE_S]
        return [beat for _, beat in sorted(fresh, key=lambda pair: pair[0])]

    async def wait_for(self, member_id: str) -> Heartbeat:
        async with asyncio.timeout(START_S):
            while member_id not in self.heard:
                self.changed.clear()
                await self.changed.wait()
        return self.heard[member_id][0]


@dataclass
class Processes:
    """Starts services; `close` ends those that are left."""

    server: NatsServer
    namespace: str
    running: dict[str, Process] = field(default_factory=dict)

    async def start(self, service: str, member_id: str, model: Path, *flags: str) -> Process:
        self.running[member_id] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"antiphon.services.{service}", f"--nats={self.server.url}",
            f"--nats-credentials={self.server.credentials}", f"--namespace={self.namespace}",
            f"--service-id={member_id}", f"--model={model}", "--served-model-name=m", "--log-level=warning", *flags,
        )  # fmt: skip
        return self.running[member_id]

    def signal(self, member_id: str, number: signal.Signals) -> None:
        self.running[member_id].send_signal(number)

    async def ended(self, member_id: str) -> int:
        async with asyncio.timeout(START_S):
            return await self.running.pop(member_id).wait()

    async def close(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
