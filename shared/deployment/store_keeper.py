"""Makes the logs and stores of a deployment, and makes them again when a bus that kept them in memory was restarted.

It is the only part of a deployment that may (`antiphon.shared.security.bus_permissions`, role `setup`). `antiphon
serve` has it in its launcher. Where each service is started separately it is a process of its own, `antiphon service
setup`. Without it services work, but wait for the stores that do not exist yet.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from antiphon.shared import limits
from antiphon.shared.bus.credentials import server_urls
from antiphon.shared.bus.durable_log import LogConfig, Storage
from antiphon.shared.bus.key_value import BucketConfig
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.deployment.stores import stores
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, add_flags, normalise, parse
from antiphon.shared.observability.logs import configure_logging
from antiphon.shared.security import tls
from antiphon.shared.settings.records import KeeperSettings
from antiphon.shared.subjects import Subjects, safe_token

log = logging.getLogger(__name__)

NAME = "setup"
"""The user of the bus that makes the stores, and the role of that user."""
CONNECT_S = 60.0
TIMEOUT_S = 2.0
"""Time limit of one request to the bus, seconds."""
LOOK_S = 10.0
"""Seconds between two looks whether everything exists: servers of a cluster may lose it while the connection lives."""
AGAIN_S = 0.1
"""Seconds before the first repetition of what has failed; the wait doubles up to `LOOK_S`."""
EXIT_FAULT, EXIT_CONFIG = 13, 78

Tell = Callable[[str], object]


async def keep(settings: KeeperSettings, tell: Tell) -> None:
    """Makes the stores, and keeps them until it is cancelled. `tell` gets each new problem.

    Raises ServiceError if the bus does not answer, SettingsError if it refuses this user.
    """
    subjects, name = Subjects(settings.namespace), settings.service_id
    while True:
        returned = asyncio.Event()
        transport = await NatsTransport.connect(
            server_urls(settings.nats),
            name=name,
            inbox_prefix=subjects.inbox(NAME, name),
            credentials=settings.nats_credentials,
            tls=tls.bus_context(settings),
            wait_s=CONNECT_S,
            on_reconnect=returned.set,
        )
        lost = asyncio.create_task(transport.lost())
        lost.add_done_callback(lambda _, returned=returned: returned.set())
        try:
            await _keep_on(transport, settings, returned, lost, tell)
        finally:
            lost.cancel()
            await transport.close()


async def _keep_on(
    transport: NatsTransport, settings: KeeperSettings, returned: asyncio.Event, lost: "asyncio.Task[None]", tell: Tell
) -> None:
    """Keeps the stores until the connection is `lost` for good. `returned`: set when it is back, or lost."""
    storages: dict[str, Storage] = {"memory": "memory", "file": "file"}
    wanted = stores(Subjects(settings.namespace), storages.get(settings.stream_store))
    told, again_s = "", AGAIN_S
    while not lost.done():
        returned.clear()
        problem = await _make_all(transport, wanted, settings.bus_replicas)
        if problem and problem != told and transport.connected:
            tell(problem)
        told, again_s = problem, min(2 * again_s, LOOK_S) if problem else AGAIN_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(again_s if problem else LOOK_S):
                await returned.wait()


async def _make_all(transport: NatsTransport, wanted: Sequence[LogConfig | BucketConfig], replicas: int) -> str:
    """Makes all stores, each whatever becomes of the others. Returns the first problem; empty if there is none."""
    making = (transport.make_store(each, replicas=replicas, timeout_s=TIMEOUT_S) for each in wanted)
    results = await asyncio.gather(*making, return_exceptions=True)
    failed = [each for each in results if isinstance(each, BaseException)]
    for each in failed:
        if not isinstance(each, ServiceError):
            raise each
    return str(failed[0]) if failed else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program until a signal. Returns its exit code."""
    parser = argparse.ArgumentParser(prog=f"antiphon service {NAME}", allow_abbrev=False)
    add_flags(parser, KeeperSettings)
    try:
        settings = parse(KeeperSettings, parser.parse_args(normalise(sys.argv[1:] if argv is None else argv)))
    except SettingsError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return EXIT_CONFIG
    if not settings.service_id:
        name = safe_token(f"{NAME}-{socket.gethostname()}-{os.getpid()}", limits.MEMBER_ID_CHARS_MAX)
        settings = dataclasses.replace(settings, service_id=name)
    configure_logging(settings.log_level, settings.service_id, settings.log_format)
    return asyncio.run(_until_signalled(settings))


async def _until_signalled(settings: KeeperSettings) -> int:
    keeping = asyncio.create_task(keep(settings, log.warning))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, keeping.cancel)
    try:
        await keeping
    except asyncio.CancelledError:
        return 0
    except (ServiceError, SettingsError) as error:
        log.critical("%s", error)
        return EXIT_FAULT if isinstance(error, ServiceError) else EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
