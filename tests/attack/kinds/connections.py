"""Attacks with connections alone: no key is needed."""

import random
import select
import socket
import time
from contextlib import suppress

from tests.attack.attack import NO_KEY, Attack
from tests.attack.judging import Goal, Told
from tests.attack.place import Place

CONNECTIONS, DRIP_S = 700, 1.0
CLOSED_S = 5.0
"""Longest time for which a connection may stay that has got its answer: the server promises two seconds."""


def slow(place: Place, rng: random.Random) -> Told:
    """Requests without a key whose bodies come byte by byte, on more connections than the server has descriptors."""
    told, until = Told(), place.until()
    held: dict[socket.socket, float] = {}
    answered: dict[socket.socket, float] = {}
    opened, late, good, bad, sent = 0, 0, 0, 0, time.monotonic()
    head = place.head("/v1/completions", 1_000_000) + b"{"
    while until():
        for _ in range(20):
            if len(held) < CONNECTIONS:
                with suppress(OSError):
                    connection = place.connect(2.0)
                    connection.setblocking(False)
                    connection.send(head)
                    held[connection] = time.monotonic()
                    opened += 1
        _read(held, answered)
        if time.monotonic() - sent > DRIP_S:
            sent = time.monotonic()
            for connection in held:
                with suppress(OSError):
                    connection.send(b" ")
            late = max(late, sum(sent - since > CLOSED_S for since in answered.values()))
            answer = place.ask(
                "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}, key=place.alice, timeout_s=5.0
            )
            good, bad = good + (answer.status == 200), bad + (answer.status != 200)
    for connection in held:
        connection.close()
    told.figures |= {"opened": opened, "answered_and_kept": late, "requests_answered": good, "requests_failed": bad}
    if late:
        told.broken.append(f"{late} connections were kept for more than {CLOSED_S:.0f} s after their answer")
    if bad:
        told.broken.append(f"{bad} of {good + bad} requests with a key failed")
    return told


def _read(held: dict[socket.socket, float], answered: dict[socket.socket, float]) -> None:
    """Notes which connections have got an answer, and forgets those that the server has closed."""
    poll = select.poll()
    by_number = {connection.fileno(): connection for connection in held}
    for number in by_number:
        poll.register(number, select.POLLIN)
    for number, _ in poll.poll(50):
        connection = by_number[number]
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            continue
        except OSError:
            data = b""
        if data:
            answered.setdefault(connection, time.monotonic())
        else:
            connection.close()
            del held[connection]
            answered.pop(connection, None)


def framing(place: Place, rng: random.Random) -> Told:
    """Requests for tunnels and for other protocols, one and thousands at a time, and heads that are not complete."""
    asking = b"connection: upgrade\r\nupgrade: h2c\r\n"
    heads = [
        *(
            b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target
            for target in (b"/", b"*", b"/v1/models", b"127.0.0.1:22")
        ),
        b"CONNECT / HTTP/1.1\r\nhost: x\r\n" + asking + b"\r\n",
        1000 * (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + asking + b"\r\n"),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\0" * 1000,
    ]
    told, until = Told(), place.until()
    sent, unanswered, wrong = 0, 0, 0
    while until():
        with suppress(OSError), place.connect(5.0) as connection:
            connection.sendall(rng.choice(heads))
            sent += 1
            answer = connection.recv(65536)
            unanswered += not answer
            wrong += answer.startswith(b"HTTP/1.1 5")
    told.figures |= {"sent": sent, "unanswered": unanswered, "5xx": wrong}
    if unanswered or wrong:
        told.broken.append(f"of {sent} requests {unanswered} got no answer and {wrong} a 5xx")
    return told


ATTACKS = (
    Attack(
        "slow-connections", "700 connections whose bodies come byte by byte; the server has 256 descriptors", NO_KEY,
        slow, "connections are closed after their answer; requests with a key are answered", server="few-files",
        seconds=20.0, goal=Goal(share=0.1),
    ),
    Attack(
        "framing", "requests for tunnels and other protocols, also 1,000 in one read, and broken heads", NO_KEY,
        framing, "each is answered, none with a 5xx",
    ),
)  # fmt: skip
