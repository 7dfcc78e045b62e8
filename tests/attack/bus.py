"""The bus as one process of a server sees it: with the settings and the password of that process.

Stands for a process that an attacker has taken over. Settings are read from the process's command line and environment,
so that this connects as the process does, whatever that takes.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from antiphon.shared.bus.credentials import server_urls
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import RequestTimeoutError
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import parse, parse_words
from antiphon.shared.security import tls
from antiphon.shared.security.bus_permissions import Role, permissions
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.subjects import Subjects
from bench.limits_of_machine.processes import tree
from tests.attack.memory import name_of

CONFIGURE_S = 2.0
"""Time that the server has for an answer. It gives none to who has no permission."""


def members(launcher: int) -> dict[str, int]:
    """Returns the process of each service by its id."""
    return {name: one.pid for one in tree(launcher) if (name := name_of(one)) and name != "nats-server"}


def settings_of(pid: int) -> BusSettings:
    """Returns the settings of the bus that a process was started with."""
    words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
    environ = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text("utf-8").split("\0") if "=" in entry
    )
    known = {each.name.replace("_", "-") for each in fields(BusSettings)}
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    named = parse_words(BusSettings, {flag: text for flag, text in given.items() if flag in known}, f"process {pid}")
    return replace(parse(BusSettings, argparse.Namespace(), environ), **named)


@asynccontextmanager
async def connected(member: str, pid: int) -> AsyncIterator[NatsTransport]:
    """A connection with the rights of a process."""
    settings = settings_of(pid)
    may = permissions(cast(Role, member.rpartition("-")[0]), Subjects(settings.namespace), member)
    transport = await NatsTransport.connect(
        server_urls(settings.nats),
        name=f"{member}-taken-over",
        inbox_prefix=next(one.removesuffix(".>") for one in may.subscribe if ".inbox." in one),
        credentials=settings.nats_credentials,
        tls=tls.bus_context(settings),
    )
    try:
        yield transport
    finally:
        await transport.close()


async def configure(transport: NatsTransport, verb: str, stream: str, config: dict[str, Any]) -> dict[str, Any]:
    """Asks the server to create, update or describe a stream. Returns its answer; empty if it gives none."""
    try:
        body = json.dumps(config).encode()
        answer = await transport.request(f"$JS.API.STREAM.{verb}.{stream}", body, timeout_s=CONFIGURE_S)
    except (RequestTimeoutError, ServiceError, TimeoutError, asyncio.CancelledError):
        return {}
    return json.loads(answer.payload)
