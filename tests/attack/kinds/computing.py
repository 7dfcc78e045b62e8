"""Attacks on the time of gateways and engines: replays without limits, grammars whose masks cost much."""

import random
import time
from typing import Any

from tests.attack.attack import BOB, Attack
from tests.attack.judging import Told
from tests.attack.place import Answer, Place, together

SEQUENCES = 60_000
LITERAL = "a{60000}"
CHOICES = 128


def recorded(place: Place) -> dict[str, Any]:
    """Returns the record of a request of the attacker's, as the server gives it."""
    body = {"prompt": "x", "max_tokens": 2}
    asked = place.ask("POST", "/v1/completions", body, key=place.bob).json.get("id", "")
    return place.ask("GET", f"/v1/requests/{asked}/record", key=place.bob).json


def replay(place: Place, rng: random.Random) -> Told:
    """Records that no request could have made: very many sequences, stop strings, tokens that do not exist."""
    told, record = Told(), recorded(place)
    if "sequences" not in record:
        told.broken.append(f"no record of a request to begin with: {str(record)[:200]}")
        return told
    changes: dict[str, dict[str, Any]] = {
        "60,000 sequences": {
            "n": SEQUENCES, "num_sequences": SEQUENCES, "sequences": [{"token_ids": []}] * SEQUENCES,
        },
        "5,000 stop strings": {
            "n": 64, "num_sequences": 64, "sequences": [{"token_ids": []}] * 64,
            "stop": [f"{number:06d}{'z' * 1000}" for number in range(5000)],
        },
        "a negative token": {"begun": [-5]},
        "a token of 2**40": {"begun": [2**40]},
        "a recorded token of 2**70": {"sequences": [{"token_ids": [2**70]}]},
    }  # fmt: skip
    until = place.until()
    statuses: dict[str, int] = {}
    for name, change in changes.items():
        if until():
            statuses[name] = place.ask("POST", "/v1/replay", {"record": record | change}, key=place.bob).status
    told.figures["statuses"] = statuses
    if wrong := [name for name, status in statuses.items() if not 400 <= status < 500]:
        told.broken.append(f"not answered with 4xx: {', '.join(wrong)}")
    return told


def masks_of_many(place: Place, rng: random.Random) -> Told:
    """Requests of 128 and fewer sequences, whose grammar is a literal of 60,000 characters: a key may have so many."""
    told, until, answers = Told(), place.until(), list[Answer]()
    body = {"prompt": "aab", "max_tokens": 200, "temperature": 1.0, "guided_regex": LITERAL}
    for choices in (CHOICES, 32, 8, 4):
        if until():
            asked = body | {"n": choices}
            answers.append(place.ask("POST", "/v1/completions", asked, key=place.bob, timeout_s=place.seconds))
    _tell(told, answers)
    return told


def masks_of_one(place: Place, rng: random.Random) -> Told:
    """Eight requests of one sequence, one after the other on each of the key's four places, with such grammars."""
    told, until, answers = Told(), place.until(), list[Answer]()
    grammars: tuple[dict[str, Any], ...] = (
        {"guided_regex": LITERAL},
        {"guided_choice": ["b" * 60_000, "c"]},
        {"guided_json": {"const": "d" * 60_000}},
        {"guided_grammar": 'root ::= ("a" root root | "b" root root root | "")'},
    )

    def send(number: int) -> None:
        while until():
            body = {"prompt": "aab", "max_tokens": 200, **grammars[number % len(grammars)]}
            answers.append(place.ask("POST", "/v1/completions", body, key=place.bob, timeout_s=place.seconds))
            if answers[-1].refused:
                time.sleep(0.2)

    together(8, send)
    _tell(told, answers)
    return told


def _tell(told: Told, answers: list[Answer]) -> None:
    codes = [one.json.get("error", {}).get("code", "") if one.status != 200 else "" for one in answers]
    told.figures |= {"statuses": sorted({one.status for one in answers}), "codes": sorted(set(codes) - {""})}
    # Status 0: the time of the attack ended first, which says nothing.
    if wrong := [one.status for one in answers if one.status and one.failed]:
        told.broken.append(f"answered with {sorted(set(wrong))}")


ATTACKS = (
    Attack(
        "replay", "POST /v1/replay with 60,000 sequences, 5,000 stop strings, tokens that do not exist", BOB, replay,
        "each is refused with 4xx", seconds=40.0,
    ),
    Attack(
        "masks-of-many", "requests with n=128, 32, 8, 4 and the grammar a{60000}", BOB, masks_of_many, "no 5xx",
        seconds=20.0,
    ),
    Attack("masks-of-one", "eight requests with long literals as grammars", BOB, masks_of_one, "no 5xx", seconds=20.0),
)  # fmt: skip
