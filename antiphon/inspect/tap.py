"""`antiphon tap`: prints the messages on the bus, decoded, one JSON object a line.

The tap is a separate subscriber. The bus drops messages for a subscriber that reads too slowly, so a tap never slows
the services; the number of lost messages is printed at the end.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.inspect.local_servers import LocalServer, local_servers
from antiphon.inspect.rendering import concerns, rendered
from antiphon.launch.nats_server import OBSERVER
from antiphon.shared import messages
from antiphon.shared.bus.credentials import server_urls
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import DecodeError, Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import Message
from antiphon.shared.security import tls
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.subjects import Subjects, new_instance_id
from antiphon.terminal.exit_codes import NotFoundError, UnreachableError
from antiphon.terminal.output import tell

CONNECT_S = 5.0
QUEUE_MAX = 10_000
"""Messages that wait to be printed; further ones are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """A bus: the URLs of its servers, separated by commas, and the path of its credentials, which may be empty."""

    url: str
    credentials: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapOptions:
    """What to print. `subject`: a pattern below the deployment's prefix; `count`: number of messages, 0: no limit."""

    subject: str = ">"
    request: str = ""
    whole: bool = False
    count: int = 0
    namespace: str = "antiphon"


def find_bus(
    url: str, credentials: str, environ: Mapping[str, str], parent: Path | None = None, *, server: str = ""
) -> Place:
    """Returns the bus that is named, or else the bus of this user's `antiphon serve` on this machine.

    `server`: the address of that server, if several run. Raises SettingsError if there is none, or more than one.
    """
    url = url or environ.get("ANTIPHON_NATS", "")
    if url:
        return Place(url, credentials or environ.get("ANTIPHON_NATS_CREDENTIALS", ""))
    servers = [one for one in local_servers(parent) if one.bus is not None]
    named = [one for one in servers if not server or one.listens_at(server)]
    if len(named) == 1:
        return _place(named[0])
    listed = "".join(
        f"\n  --server {', '.join(one.urls) or '(not known yet)'}  bus {_place(one).url}" for one in servers
    )
    if not servers:
        raise NotFoundError(
            "no `antiphon serve` of this user runs here: name the bus with --nats and --nats-credentials"
        )
    if not named:
        raise NotFoundError(f"no server of this user listens at {server}; these run here:{listed}")
    raise SettingsError(f"several servers run here, choose one of them:{listed}")


def _place(server: LocalServer) -> Place:
    assert server.bus is not None
    return Place(server.bus.as_uri(), str(server.directory / f"{OBSERVER}.credentials"))


def run(place: Place, options: TapOptions, settings: BusSettings) -> int:
    """Prints messages until `count` of them are printed or Ctrl-C. Returns an exit code.

    `settings` has the certificates of a bus with TLS.
    """
    return asyncio.run(_tap(place, options, tls.bus_context(replace(settings, nats=place.url))))


async def _tap(place: Place, options: TapOptions, context: ssl.SSLContext | None) -> int:
    subjects = Subjects(options.namespace)
    name = f"tap-{new_instance_id()}"
    try:
        transport = await NatsTransport.connect(
            server_urls(place.url),
            name=name,
            inbox_prefix=subjects.inbox(OBSERVER, name),
            credentials=place.credentials,
            tls=context,
            observes=True,
            wait_s=CONNECT_S,
        )
    except ServiceError as error:
        raise UnreachableError(error.message) from error
    waiting: asyncio.Queue[Delivery] = asyncio.Queue(QUEUE_MAX)
    dropped = 0

    def take(delivery: Delivery) -> None:
        nonlocal dropped
        try:
            waiting.put_nowait(delivery)
        except asyncio.QueueFull:
            dropped += 1

    try:
        await transport.subscribe(subjects.everything().removesuffix(">") + options.subject, take)
        await _print(waiting, options, subjects)
    finally:
        await transport.close()
        if dropped:
            tell(f"{dropped} messages came faster than they could be printed")
    return 0


async def _print(waiting: "asyncio.Queue[Delivery]", options: TapOptions, subjects: Subjects) -> None:
    types = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)]
    decoder = Decoder([kind for kind in types if kind is not Message])
    prefix, printed, began = subjects.everything().removesuffix(">"), 0, time.monotonic()
    while not options.count or printed < options.count:
        delivery = await waiting.get()
        line = _line(delivery, delivery.subject.removeprefix(prefix), decoder, options)
        if line is not None:
            print(json.dumps({"s": round(time.monotonic() - began, 4), **line}, ensure_ascii=False), flush=True)
            printed += 1


def _line(delivery: Delivery, subject: str, decoder: Decoder[Message], options: TapOptions) -> dict[str, object] | None:
    try:
        message = decoder.decode(delivery.payload)
    except DecodeError:
        unknown = {"subject": subject, "type": None, "bytes": len(delivery.payload)}
        return None if options.request else unknown
    if options.request and not concerns(message, options.request):
        return None
    return rendered(subject, message, whole=options.whole, request=options.request)
