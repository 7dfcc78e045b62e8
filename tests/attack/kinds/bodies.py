"""Attacks with the bodies of requests: large, unfinished, abandoned; and long texts."""

import random
import socket
import time
from contextlib import suppress

from tests.attack.attack import BOB, Attack
from tests.attack.bus import members
from tests.attack.judging import Goal, Told
from tests.attack.place import Place, resident_mib, together

BODY_BYTES = 15_000_000
UNFINISHED, ABANDONED = 160, 110
LEFT_MIB = 300.0
"""What a gateway may have more after abandoned bodies than before: those of a key's four requests, and change."""
SETTLE_S = 5.0


def unfinished(place: Place, rng: random.Random) -> Told:
    """Connections that send nearly all of a large body, and then wait."""
    told, until = Told(), place.until()
    sent, held = [0] * UNFINISHED, list[socket.socket]()

    def send(number: int) -> None:
        with suppress(OSError):
            connection = place.connect()
            held.append(connection)
            connection.sendall(place.head("/v1/completions", BODY_BYTES + 100, key=place.bob))
            connection.settimeout(5.0)
            while until() and sent[number] < BODY_BYTES:
                connection.sendall(b" " * 100_000)
                sent[number] += 100_000

    together(UNFINISHED, send)
    time.sleep(1.0)
    told.figures["taken_mb"] = sum(sent) // 1_000_000
    for connection in held:
        connection.close()
    return told


def abandoned(place: Place, rng: random.Random) -> Told:
    """Streams with a large field without effect, each left after its first event."""
    told, until, statuses = Told(), place.until(), list[int]()
    gateways = [pid for name, pid in members(place.launcher).items() if name.startswith("gateway")]
    before = {pid: resident_mib(pid) for pid in gateways}
    body = b'{"prompt":"x","max_tokens":1000,"ignore_eos":true,"stream":true,"user":"' + b"u" * BODY_BYTES + b'"}'

    def send(number: int) -> None:
        while until() and len(statuses) < ABANDONED:
            with suppress(OSError), place.connect() as connection:
                connection.sendall(place.head("/v1/completions", len(body), key=place.bob) + body)
                status = connection.recv(64).split(b" ")
                statuses.append(int(status[1]) if len(status) > 1 else 0)
                if statuses[-1] in (429, 503):
                    time.sleep(0.5)

    together(4, send)
    time.sleep(SETTLE_S)
    more = {pid: resident_mib(pid) - mib for pid, mib in before.items()}
    told.figures |= {"streams": statuses.count(200), "refused": len(statuses) - statuses.count(200)}
    told.figures["mib_left"] = [round(mib) for mib in more.values()]
    if max(more.values()) > LEFT_MIB:
        told.broken.append(f"{SETTLE_S:.0f} s later a gateway has {max(more.values()):.0f} MiB more than before")
    return told


def long_texts(place: Place, rng: random.Random) -> Told:
    """Texts of 15 MB, far longer than the context: to be tokenized, counted, and as prompts."""
    told, until, statuses, slowest = Told(), place.until(), list[int](), [0.0]
    text = "a b" * (BODY_BYTES // 3)
    routes = ("/tokenize", "/v1/messages/count_tokens", "/v1/completions", "/v1/chat/completions")
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}

    def send(number: int) -> None:
        path = routes[number]
        body = chat if "messages" in path or "chat" in path else {"prompt": text, "max_tokens": 2}
        body = body | {"model": place.model}
        while until():
            began = time.monotonic()
            statuses.append(place.ask("POST", path, body, key=place.bob, timeout_s=place.seconds).status)
            slowest[0] = max(slowest[0], time.monotonic() - began)

    together(len(routes), send)
    told.figures |= {"requests": len(statuses), "statuses": sorted(set(statuses)), "slowest_s": round(slowest[0], 1)}
    return told


def search(place: Place, rng: random.Random) -> Told:
    """Searches of the records for 20,000 words."""
    told, until, statuses = Told(), place.until(), list[int]()
    for number in range(20):  # something to search in
        place.ask("POST", "/v1/completions", {"prompt": f"{number}", "max_tokens": 2}, key=place.bob)
    query = "+".join(rng.choice("abcdefgh1234") for _ in range(20_000))

    def send(number: int) -> None:
        while until():
            statuses.append(place.ask("GET", f"/v1/requests?q={query}", key=place.bob).status)

    together(6, send)
    told.figures |= {"requests": len(statuses), "statuses": sorted(set(statuses))}
    if any(not 400 <= status < 500 for status in statuses):
        told.broken.append("a search for 20,000 words was answered with something else than 4xx")
    return told


ATTACKS = (
    Attack("unfinished", "160 bodies of 15 MB of which the last bytes never come", BOB, unfinished, "", seconds=15.0),
    Attack(
        "abandoned", "streams with a field of 15 MB, left after their first byte", BOB, abandoned,
        "a gateway keeps less than 300 MiB of them", seconds=30.0,
    ),
    Attack("long-texts", "texts of 15 MB to four routes", BOB, long_texts, "", seconds=20.0),
    # Many requests that are refused at once still cost time: they are not counted by limits.
    Attack("search", "searches for 20,000 words, six at once", BOB, search, "they are refused", goal=Goal(share=0.1)),
)  # fmt: skip
