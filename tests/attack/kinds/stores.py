"""Attacks on what the server keeps for everybody: finished responses and resumable streams."""

import json
import random
import time
from contextlib import suppress

from tests.attack.attack import BOB, Attack
from tests.attack.judging import Told
from tests.attack.place import Place, together

RESPONSES, STREAMS = 10, 5
RESPONSE_BYTES, STREAM_BYTES = 10_000_000, 1_000_000


def responses(place: Place, rng: random.Random) -> Told:
    """Stored responses of 10 MB; those of another key must stay."""
    told, until, stored = Told(), place.until(), [0] * 4
    body = {"model": place.model, "input": "x", "max_output_tokens": 16}
    made = [place.ask("POST", "/v1/responses", body, key=place.alice).json.get("id", "") for _ in range(RESPONSES)]
    mine = [one for one in made if one]

    def send(number: int) -> None:
        while until():
            large = body | {"user": "u" * RESPONSE_BYTES}
            status = place.ask("POST", "/v1/responses", large, key=place.bob).status
            stored[number] += status == 200
            if status in (429, 503):
                time.sleep(0.5)

    together(4, send)
    kept = [place.ask("GET", f"/v1/responses/{one}", key=place.alice).status for one in mine]
    told.figures |= {"stored": sum(stored), "kept_of_another_key": kept.count(200)}
    if not mine:
        told.broken.append("the other key has no stored response")
    if kept.count(200) < len(mine):
        told.broken.append(f"{len(mine) - kept.count(200)} of {len(mine)} responses of another key are gone")
    return told


def streams(place: Place, rng: random.Random) -> Told:
    """Recorded streams with large bodies; those of another key must stay resumable."""
    told, until, recorded = Told(), place.until(), [0] * 4
    mine = [one for _ in range(STREAMS) if (one := _begun(place))]
    body = {"prompt": "x", "max_tokens": 2, "stream": True, "user": "u" * STREAM_BYTES}

    def send(number: int) -> None:
        while until():
            headers = {"X-Antiphon-Resumable": "1"}
            status = place.ask("POST", "/v1/completions", body, key=place.bob, headers=headers).status
            recorded[number] += status == 200
            if status in (429, 503):
                time.sleep(0.5)

    together(4, send)
    kept = [place.ask("GET", f"/v1/streams/{one}", key=place.alice, timeout_s=60.0).status for one in mine]
    told.figures |= {"recorded": sum(recorded), "kept_of_another_key": kept.count(200), "begun": len(mine)}
    if not mine:
        told.broken.append("the other key has no stream that can be resumed")
    if kept.count(200) < len(mine):
        told.broken.append(f"{len(mine) - kept.count(200)} of {len(mine)} streams of another key are gone")
    return told


def _begun(place: Place) -> str:
    """Begins a resumable stream of the other key, leaves it, and returns its id; empty if it has none."""
    body = json.dumps({"prompt": "mine", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    head = place.head("/v1/completions", len(body), key=place.alice)
    with suppress(OSError), place.connect() as connection, connection.makefile("rb") as lines:
        connection.sendall(head.replace(b"\r\n\r\n", b"\r\nX-Antiphon-Resumable: 1\r\n\r\n") + body)
        for line in lines:
            if line.startswith(b"id:"):
                return line[3:].strip().decode().partition(":")[0]
    return ""


ATTACKS = (
    Attack(
        "responses", "stored responses with a field of 10 MB, until the store is full", BOB, responses,
        "all stored responses of another key stay", seconds=30.0,
    ),
    Attack(
        "streams", "recorded streams of 1 MB, until the store is full", BOB, streams,
        "all streams of another key can be resumed", seconds=45.0,
    ),
)  # fmt: skip
