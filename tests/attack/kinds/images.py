"""Attacks with images."""

import base64
import random
import struct
import threading
import time
import zlib
from typing import Any

from tests.attack.attack import BOB, Attack
from tests.attack.judging import Goal, Told
from tests.attack.place import Answer, Place, together

SIDE, FILES = 8000, 16
VICTIM_S = 20.0
"""Longest time for another client's small image."""


def png(width: int, height: int, number: int, bits: int = 1) -> bytes:
    """Returns a grey image, which compresses well. Those with different numbers are different files."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" * (1 + width * bits // 8)) * height, 9)
    parts = chunk(b"IHDR", head) + chunk(b"tEXt", b"n\0%d" % number) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def chat(place: Place, files: list[bytes]) -> dict[str, Any]:
    """Returns a request about these images."""
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "x"}]
    return {"model": place.model, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}


def large(place: Place, rng: random.Random) -> Told:
    """Two requests with 16 small files of 64 megapixels each. Another key's small image must be answered."""
    told, answers, slowest, wrong = Told(), list[Answer](), 0.0, 0
    bodies = [chat(place, [png(SIDE, SIDE, number * FILES + one) for one in range(FILES)]) for number in range(2)]
    until = place.until()

    def send(number: int) -> None:
        answers.append(
            place.ask("POST", "/v1/chat/completions", bodies[number], key=place.bob, timeout_s=place.seconds)
        )

    attack = threading.Thread(target=together, args=(2, send), daemon=True)
    attack.start()
    number = 1000
    while until() and attack.is_alive():
        number, began = number + 1, time.monotonic()
        small = chat(place, [png(64, 48, number, 8)])
        status = place.ask("POST", "/v1/chat/completions", small, key=place.alice, timeout_s=70.0).status
        slowest, wrong = max(slowest, time.monotonic() - began), wrong + (status != 200)
        time.sleep(0.5)
    told.figures |= {"answers": [one.status for one in answers], "small_image_s": round(slowest, 1), "failed": wrong}
    if wrong:
        told.broken.append(f"{wrong} small images of another key were not answered")
    if slowest > VICTIM_S:
        told.broken.append(f"a small image of another key took {slowest:.0f} s")
    return told


ATTACKS = (
    Attack(
        "large-images", "two requests with 16 images of 64 megapixels each", BOB, large,
        "another key's small image is answered within 20 s", server="images", seconds=60.0,
        goal=Goal(rss_mib=2048.0),
    ),
)  # fmt: skip
