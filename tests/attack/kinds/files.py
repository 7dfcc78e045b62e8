"""Attacks with uploaded files and batches."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from tests.attack.attack import BOB, Attack
from tests.attack.bus import members
from tests.attack.judging import FIGURES_ONLY, Told
from tests.attack.place import FORM, Place, form, line, together

LINE_BYTES = 60_000_000
EPILOGUES, EPILOGUE_BYTES = 14, 190_000_000
NAMES = (
    "utf-7''%2B2AA-",
    "unicode_escape''%5cud800",
    "undefined''x",
    "idna''x",
    "punycode''%ff",
    "utf-8''a%00b",
    "utf-8''%ff%fe",
)
"""Names of files after `filename*=`: of charsets that cannot be, and of characters that no text may have."""
ONE = {"prompt": "x", "max_tokens": 2}


def huge_line(place: Place, rng: random.Random) -> Told:
    """A batch of one line, which is JSON of many small lists; a look at it now and then makes a gateway continue it."""
    told, until = Told(), place.until()
    count = LINE_BYTES // 3
    bomb = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"x":[' + b"[]," * count + b"[]]}}\n"
    uploaded = place.upload(bomb + line(1, ONE), key=place.bob)
    if uploaded.status != 200:
        told.figures["upload"] = uploaded.status
        return told
    batch = place.batch(uploaded.json["id"], key=place.bob).json.get("id", "")
    state = ""
    while until() and state not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.5)
        state = place.ask("GET", f"/v1/batches/{batch}", key=place.bob).json.get("status", "")
    told.figures |= {"line_bytes": len(bomb), "batch": state}
    if not state or state in ("validating", "in_progress"):
        told.broken.append("the batch has not ended")
    return told


def epilogue(place: Place, rng: random.Random) -> Told:
    """Connections that upload a small form and then bytes without end behind it."""
    told, sent, answered = Told(), [0] * EPILOGUES, [b""] * EPILOGUES
    start, chunk = form(b"{}"), b"x" * 1_000_000

    def send(number: int) -> None:
        until = place.until()
        try:
            with place.connect() as connection:
                connection.settimeout(place.seconds)
                length = len(start) + EPILOGUE_BYTES + 100
                connection.sendall(place.head("/v1/files", length, key=place.bob, content_type=FORM) + start)
                while until() and sent[number] < EPILOGUE_BYTES:
                    connection.sendall(chunk)
                    sent[number] += len(chunk)
                while until() and not answered[number]:
                    answered[number] = connection.recv(12)
        except TimeoutError:
            return
        except OSError:
            answered[number] = b"closed"

    together(EPILOGUES, send)
    told.figures["taken_mb"] = sum(sent) // 1_000_000
    if not all(answered):
        told.broken.append(f"{sum(not one for one in answered)} connections were kept with what they sent")
    return told


def hidden_files(place: Place, rng: random.Random) -> Told:
    """Uploads whose names cannot be stored: what stays on the disk must be in the list of files."""
    told = Told()
    data = b"{}\n" + b"x" * 5_000_000
    before = _stored(place)
    answers = [place.upload(data, key=place.bob, disposition=f'name="file"; filename*={name}') for name in NAMES]
    after = _stored(place)
    listed = {one["id"] for one in place.ask("GET", "/v1/files", key=place.bob).json.get("data", ())}
    hidden = sorted(name for name in after - before if name not in listed)
    told.figures |= {"statuses": [one.status for one in answers], "hidden_files": len(hidden)}
    if hidden:
        told.broken.append(f"{len(hidden)} files are on the disk and in no list")
    if wrong := sum(one.failed for one in answers):
        told.broken.append(f"{wrong} uploads were answered with 5xx or not at all")
    for file in listed:
        place.ask("DELETE", f"/v1/files/{file}", key=place.bob)
    return told


def _stored(place: Place) -> set[str]:
    """The ids of the files whose data is in the directory of the server."""
    found = set[str]()
    for path in Path(place.files).glob("file-*"):
        # Uploads of others that end meanwhile take a file away.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > 1000:
                found.add(path.name.partition(".")[0])
    return found


def many_files(place: Place, rng: random.Random) -> Told:
    """Files of two bytes, as many as the server takes. Another key must still find room."""
    told, until, taken, refused = Told(), place.until(), [0] * 8, [0] * 8

    def send(number: int) -> None:
        while until():
            answer = place.upload(b"{}", key=place.bob)
            taken[number] += answer.status == 200
            refused[number] += answer.refused
            if answer.refused:
                time.sleep(0.5)

    together(8, send)
    other = place.upload(b"{}", key=place.alice)
    told.figures |= {"files": sum(taken), "refused": sum(refused), "upload_of_another_key": other.status}
    if other.status != 200:
        told.broken.append(f"the upload of another key was answered with {other.status}")
    return told


def many_batches(place: Place, rng: random.Random) -> Told:
    """Batches with long answers, until no more are taken. Another key must get a place, and keep what has ended."""
    told = Told()
    mine = place.upload(line(0, ONE), key=place.alice).json.get("id", "")
    ended = place.batch(mine, key=place.alice).json.get("id", "")
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    long = place.upload(b"".join(line(number, body) for number in range(200)), key=place.bob).json.get("id", "")
    empty = place.upload(b"{}\n", key=place.bob).json.get("id", "")
    until, made, refused = place.until(), list[str](), 0
    while until() and refused < 20:
        answer = place.batch(long, key=place.bob)
        made += [answer.json["id"]] if answer.status == 200 else []
        refused += answer.status != 200
    invalid = 0
    while until():
        invalid += place.batch(empty, key=place.bob).status == 200
    statuses = [place.batch(mine, key=place.alice).status for _ in range(4)]
    kept = place.ask("GET", f"/v1/batches/{ended}", key=place.alice).status
    told.figures |= {"batches": len(made), "invalid": invalid, "of_another_key": statuses, "its_ended_batch": kept}
    if 200 not in statuses:
        told.broken.append(f"another key's batches were refused: {statuses}")
    if kept != 200:
        told.broken.append("another key's ended batch is gone")
    for batch in made:
        place.ask("POST", f"/v1/batches/{batch}/cancel", key=place.bob)
    return told


def poison(place: Place, rng: random.Random) -> Told:
    """A batch that ends every gateway that runs it (each is killed here, which stands for that) is given up."""
    told = Told()
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "n": 4}
    file_id = place.upload(line(0, body), key=place.bob).json.get("id", "")
    batch = place.batch(file_id, key=place.bob).json.get("id", "")
    until, deaths, state = place.until(), 0, ""
    while until() and deaths < 10 and state not in ("failed", "completed", "expired"):
        time.sleep(1.0)
        for name, pid in members(place.launcher).items():
            if name.startswith("gateway"):
                os.kill(pid, signal.SIGKILL)
        deaths += 1
        state = ""
        while until() and not state:
            time.sleep(0.5)
            state = place.ask("GET", f"/v1/batches/{batch}", key=place.bob, timeout_s=2.0).json.get("status", "")
    told.figures |= {"deaths": deaths, "batch": state}
    if state != "failed":
        told.broken.append(f"the batch is {state or 'unknown'} after {deaths} ends of the gateways")
    return told


ATTACKS = (
    Attack(
        "batch-line", "a batch with one line of 60 MB of JSON", BOB, huge_line,
        "the line is an error of the batch, also after a restart", seconds=30.0, restart=True,
    ),
    Attack(
        "epilogue", "14 uploads, each with 190 MB after the end of its form", BOB, epilogue,
        "the connections are answered or closed", seconds=15.0,
    ),
    Attack(
        "hidden-files", "uploads whose names cannot be encoded", BOB, hidden_files,
        "no 5xx, and nothing on the disk that is in no list",
    ),
    Attack("many-files", "uploads of two bytes, eight at once", BOB, many_files, "another key's upload is taken"),
    Attack(
        "many-batches", "batches until no more are taken, and invalid ones", BOB, many_batches,
        "another key's batch is taken, and its ended one stays", seconds=20.0,
    ),
    Attack(
        "poison-batch", "a batch during which every gateway dies", BOB, poison, "the batch fails after its third start",
        seconds=60.0, goal=FIGURES_ONLY, kills=("gateway-1", "gateway-2"),
    ),
)  # fmt: skip
