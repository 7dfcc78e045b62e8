"""Attacks on the bus: by a service that was taken over, and by another user of the machine."""

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder, encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    ErrorReply,
    Heartbeat,
    Message,
    RecordList,
    RecordListQuery,
    RecordQuery,
    RecordReply,
)
from antiphon.shared.subjects import Subjects
from bench.limits_of_machine.processes import tree
from tests.attack.attack import SERVICE, USER, Attack, Skipped
from tests.attack.bus import configure, connected, members, settings_of
from tests.attack.judging import FIGURES_ONLY, Told
from tests.attack.memory import name_of
from tests.attack.place import HOST, Place

NOBODY = 65534
HOLD_S, READY_S = 8.0, 40.0
SECRET = "a prompt of somebody else"


def jetstream(place: Place, rng: random.Random) -> Told:
    """With the rights of each service: streams that take up foreign subjects, or publish on them."""
    return asyncio.run(_of_each(place, _streams_of))


def records(place: Place, rng: random.Random) -> Told:
    """With the rights of each service: the records of all keys' requests, with their content."""
    place.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 4}, key=place.alice)
    return asyncio.run(_of_each(place, _records_of))


async def _of_each(place: Place, try_one: Callable[[str, NatsTransport, Place], Awaitable[list[str]]]) -> Told:
    told = Told()
    found = [(name, pid) for name, pid in members(place.launcher).items() if name.endswith("-1")]
    for name, pid in found:
        async with connected(name, pid) as transport:
            told.broken += await try_one(name, transport, place)
    told.figures["users"] = sorted(name for name, _ in found)
    told.figures["gateways"] = sum(name.startswith("gateway") for name in members(place.launcher))
    if not found:
        told.broken.append("no service to take over")
    return told


async def _streams_of(name: str, transport: NatsTransport, place: Place) -> list[str]:
    subjects = Subjects(settings_of(members(place.launcher)[name]).namespace)
    foreign = [subjects.tokenize("*"), f"{_root(subjects)}.inbox.>", subjects.heartbeat("engine", "*")]
    tries = [(verb, *one) for one in _configurations(subjects, foreign) for verb in ("CREATE", "UPDATE")]
    answers = await asyncio.gather(*(configure(transport, *one) for one in tries))
    # Who has no permission gets no answer. One that says what is wrong with the configuration comes after it.
    answered = {(verb, stream): answer for (verb, stream, _), answer in zip(tries, answers, strict=True) if answer}
    return [
        f"{name} {verb} {stream}: {'done' if 'config' in answer else 'allowed'}"
        for (verb, stream), answer in answered.items()
    ]


def _configurations(subjects: Subjects, foreign: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Streams that services use, with subjects that they do not have, and one that would publish as the server does."""
    prefix = _root(subjects).replace(".", "-")
    base = {"storage": "memory", "retention": "limits", "num_replicas": 1, "discard": "old", "allow_direct": True}
    for name in (f"{prefix}-streams", f"KV_{prefix}-limits", f"KV_{prefix}-adapters", "taken"):
        own = [f"$KV.{name[3:]}.>"] if name.startswith("KV_") else []
        yield name, {"name": name, "subjects": [*own, *foreign], **base}
        target = {"src": own[0] if own else ">", "dest": subjects.heartbeat("engine", "evil")}
        yield name, {"name": name, "subjects": own or ["taken.>"], "republish": target, **base}


def _root(subjects: Subjects) -> str:
    """The first parts of all subjects of a deployment."""
    return subjects.heartbeats("*").partition(".hb.")[0]


async def _records_of(name: str, transport: NatsTransport, place: Place) -> list[str]:
    if name.startswith("gateway"):
        return []  # gateways ask each other: any of them may answer for all
    subjects = Subjects(settings_of(members(place.launcher)[name]).namespace)
    told: list[str] = []
    for gateway in await _gateways(transport, place):
        control = subjects.gateway_control(gateway.id, gateway.instance_id)
        for subject in (control, f"{control.rpartition('.')[0]}.peer"):
            listed = await _ask(transport, subject, RecordListQuery(key=""))
            if not isinstance(listed, RecordList) or not listed.requests:
                continue
            told.append(f"{name} reads a list of {len(listed.requests)} requests at {gateway.id}")
            content = await _ask(transport, subject, RecordQuery(listed.requests[0]["id"], "", "content"))
            if isinstance(content, RecordReply) and content.found:
                told.append(f"{name} reads the content of a request at {gateway.id}")
    return told


async def _ask(transport: NatsTransport, subject: str, query: Message) -> Message | None:
    with suppress(ServiceError, RequestTimeoutError, NoRespondersError, TimeoutError):
        answer = await transport.request(subject, encode(query), timeout_s=2.0)
        return Decoder((RecordList, RecordReply, ErrorReply)).decode(answer.payload)
    return None


async def _gateways(transport: NatsTransport, place: Place) -> list[Heartbeat]:
    """The gateways, as their heartbeats tell; who may not read these has no address to ask."""
    subjects = Subjects(settings_of(next(iter(members(place.launcher).values()))).namespace)
    decoder, found = Decoder((Heartbeat,)), dict[str, Heartbeat]()

    def hear(delivery: Any) -> None:
        beat = decoder.decode(delivery.payload)
        found[beat.id] = beat

    with suppress(ServiceError):
        await transport.subscribe(subjects.heartbeats("gateway"), hear)
        await asyncio.sleep(1.5)
    return list(found.values())


def port(place: Place, rng: random.Random) -> Told:
    """When nats-server ends (it is killed here), another user takes its port and waits for the services to log in."""
    if os.getuid() != 0:
        raise Skipped("only root can start a process of another user")
    told = Told()
    bus = urlsplit(settings_of(next(iter(members(place.launcher).values()))).nats.split(",")[0]).port or 0
    [server] = [one.pid for one in tree(place.launcher) if name_of(one) == "nats-server"]
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _other_user(bus, writer)
    os.close(writer)
    time.sleep(0.5)
    os.kill(server, signal.SIGKILL)
    with os.fdopen(reader) as pipe:
        told.figures |= json.loads(pipe.read() or "{}")
    os.wait()
    end, ready = time.monotonic() + READY_S, False
    while time.monotonic() < end and not ready:
        ready = place.ask("GET", "/readyz", timeout_s=5.0).status == 200
        time.sleep(0.0 if ready else 0.5)
    told.figures["ready_again"] = ready
    if told.figures.get("passwords_of"):
        told.broken.append(f"another user got the passwords of {', '.join(told.figures['passwords_of'])}")
    if not ready:
        told.broken.append(f"the server is not ready {READY_S:.0f} s after the end of its bus")
    return told


def _other_user(bus: int, writer: int) -> None:
    """Becomes a user without rights, takes the port as soon as it is free, and writes whose passwords came. Exits."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    got, end = set[str](), time.monotonic() + HOLD_S
    listener = _bound(bus, end)
    while listener is not None and time.monotonic() < end:
        with suppress(OSError):
            client, _ = listener.accept()
            threading.Thread(target=_log_in, args=(client, bus, got), daemon=True).start()
    os.write(writer, json.dumps({"port_taken": listener is not None, "passwords_of": sorted(got)}).encode())
    os._exit(0)


def _bound(bus: int, end: float) -> socket.socket | None:
    while time.monotonic() < end:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, bus))
        except OSError:
            listener.close()
            continue
        listener.listen(64)
        listener.settimeout(0.3)
        return listener
    return None


def _log_in(client: socket.socket, bus: int, got: set[str]) -> None:
    info = {"server_id": "X", "version": "2.15.1", "proto": 1, "host": HOST, "port": bus, "headers": True}
    info |= {"auth_required": True, "max_payload": 16_777_216, "jetstream": True}
    with suppress(OSError, ValueError, KeyError), client:
        client.settimeout(2.0)
        client.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
        data = b""
        while b"}\r\n" not in data and (more := client.recv(65536)):
            data += more
        said = json.loads(data.split(b"CONNECT ", 1)[1].split(b"\r\n")[0]) if b"CONNECT " in data else {}
        if said.get("pass"):
            got.add(said["user"])


ATTACKS = (
    Attack(
        "jetstream", "streams of the bus that read or publish foreign subjects", SERVICE, jetstream,
        "no service may create or change a stream", seconds=90.0, goal=FIGURES_ONLY,
    ),
    Attack(
        "records", "the records of all keys, asked for over the bus", SERVICE, records,
        "only gateways get an answer", seconds=60.0, goal=FIGURES_ONLY,
    ),
    Attack(
        "bus-port", "another user takes the port of the bus when it ends", USER, port,
        "it gets no password, and the server is ready again", seconds=60.0, goal=FIGURES_ONLY, kills=("nats-server",),
    ),
)  # fmt: skip
