"""A prefill or decode instance: waits for the scheduler's message with the bus, and runs one engine on this bus.

With `--nats` the bus is known and the engine starts at once; the scheduler still checks the instance's identity.
"""

import asyncio
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from antiphon.disaggregation.instance import Deployment
from antiphon.disaggregation.instance_server import Request, Response, json_response, not_here, serve
from antiphon.disaggregation.join import HEADER, Join, Joined, bus_secret, is_signed, sign
from antiphon.launch import launcher, nats_server
from antiphon.settings import InstanceSettings
from antiphon.supervision.fleet import Fleet
from antiphon.supervision.processes import ChildSpec

SCHEDULER_SILENT_S = 10.0
"""An instance that has not heard from the scheduler for this many seconds does not count as ready."""
_READY = re.compile(r" INFO \S+ ready$")
"""The line that a service logs when it has sent its first heartbeat as ready."""


class Worker:
    """One instance and its engine. `settings` contain the engine's role; `directory` is private to this process."""

    def __init__(
        self,
        deployment: Deployment,
        settings: InstanceSettings,
        environ: Mapping[str, str],
        key: bytes,
        directory: Path,
    ) -> None:
        self._own, self._digest = deployment.own, deployment.digest
        self._settings, self._environ, self._key, self._directory = settings, environ, key, directory
        self._engines = deployment.on_host(deployment.own.server.server_ip)
        self._joined: Join | None = None
        self._wanted: asyncio.Queue[launcher.Place] = asyncio.Queue()
        self._ready_pid = 0
        self._heard_at = 0.0

    async def run(self, listener: socket.socket) -> int:
        """Runs the instance until the first signal or until its engine fails, and returns the exit code."""
        self._fleet = fleet = Fleet(launcher.print_line)
        stop = asyncio.create_task(launcher.signalled(fleet))
        starting = asyncio.create_task(self._start_engines())
        server = await serve(listener, self.answer)
        self._say_state()
        try:
            await asyncio.wait({stop, fleet.failed, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # raises: the task ends only with an exception
            failure = fleet.failed.result() if fleet.failed.done() else None
            server.close()
            launcher.print_line("antiphon", f"stopping: {failure.message}" if failure else "stopping")
            await fleet.stop(("engine",), launcher.FAILURE_GRACE_S if failure else launcher.GRACE_S)
            launcher.print_line("antiphon", f"stopped: {failure.message}" if failure else "stopped")
            return failure.exit_code if failure else (launcher.FORCED if fleet.killed else 0)
        finally:
            fleet.kill()
            server.close()
            for task in (stop, starting):
                task.cancel()
            await asyncio.gather(stop, starting, return_exceptions=True)

    def answer(self, request: Request) -> Response:
        """Answers one HTTP request."""
        if request.path == "/join" and request.method == "POST":
            return self._on_join(request)
        if request.method == "GET" and request.path in ("/health", "/readyz", "/livez"):
            state = self._state()
            is_well = state == "ready" or request.path == "/livez"
            return json_response(200 if is_well else 503, instance=self._own.name, status=state)
        return not_here(f"{self._own.name} on {self._own.server.server_ip}")

    def _on_join(self, request: Request) -> Response:
        """Obeys the scheduler's message if it is authentic and addressed to this instance."""
        if not is_signed(self._key, "join", request.body, request.headers.get(HEADER, "")):
            return json_response(403, error="the keys of scheduler and instance differ (--cluster-key-file)")
        try:
            join = msgspec.json.decode(request.body, type=Join)
        except msgspec.DecodeError as error:
            return json_response(400, error=f"not a message of a scheduler of this version: {error}")
        refused = self._refusal(join)
        if not refused:
            self._heard_at = time.monotonic()
            if not (self._joined and self._joined.epoch == join.epoch):
                self._follow(join)
        reply = Joined(
            epoch=join.epoch,
            name=self._own.name,
            table=self._digest,
            devices=",".join(self._own.device_ids),
            refused=refused,
        )
        body = msgspec.json.encode(reply)
        return Response(409 if refused else 200, body, {HEADER: sign(self._key, "joined", body)})

    def _refusal(self, join: Join) -> str:
        if join.table != self._digest:
            return "its global rank table is another one (GLOBAL_RANK_TABLE_FILE_PATH)"
        if join.name != self._own.name:
            return f"it is {self._own.name}"
        if self._joined and join.epoch < self._joined.epoch:
            return "it follows a scheduler that was started later"
        if bool(join.bus) == bool(self._settings.nats):
            return "either all instances and the scheduler have --nats, or none"
        return ""

    def _follow(self, join: Join) -> None:
        self._joined = join
        if join.bus:
            secret = bus_secret(self._key, join.epoch)
            credentials = nats_server.write_credentials(self._directory, secret, self._own.name)
            self._wanted.put_nowait(launcher.Place(join.bus, str(credentials), ""))

    async def _start_engines(self) -> None:
        """Starts the engine on each new bus that a scheduler names, after stopping the old engine.

        Runs until cancelled.
        """
        if self._settings.nats:
            self._wanted.put_nowait(launcher.Place(self._settings.nats, self._settings.nats_credentials, ""))
        while True:
            place = await self._wanted.get()
            # The old bus is gone and accepts no tokens: there is nothing to drain.
            await self._fleet.stop(("engine",), launcher.FAILURE_GRACE_S)
            self._ready_pid = 0
            launcher.print_line("antiphon", f"{self._own.name} joins the bus at {place.nats}")
            self._fleet.start([self._engine(place)])

    def _engine(self, place: launcher.Place) -> ChildSpec:
        changes = {"threads": launcher.engine_threads(self._settings, self._engines)}
        spec = launcher.service_spec("engine", self._own.name, self._settings, changes, self._environ, place)
        return replace(spec, show=self._see)

    def _see(self, line: str) -> bool:
        """Looks for the engine's ready message. Returns True: all its lines are printed."""
        if _READY.search(line):
            self._ready_pid = self._fleet.pids().get(self._own.name, 0)
            launcher.print_line("antiphon", f"{self._own.name} is ready")
        return True

    def _state(self) -> str:
        if not self._joined or time.monotonic() - self._heard_at > SCHEDULER_SILENT_S:
            return "waiting for the scheduler"
        pid = self._fleet.pids().get(self._own.name, 0)
        return "ready" if pid and pid == self._ready_pid else "starting"

    def _say_state(self) -> None:
        devices = ",".join(self._own.device_ids)
        launcher.print_line("antiphon", f"{self._own.name} (devices {devices}) listens on port {self._settings.port}")
        if not self._settings.nats:
            launcher.print_line("antiphon", "waiting for the scheduler, which starts the bus")
