"""Makes attacks, each in a process of its own, which is ended if the attack does not come to its end.

An attacker has machines of its own. Its processes therefore get only the time of the processors that the server and its
other clients leave (`_give_way`): what they take from others, they take through the server.
"""

import logging
import multiprocessing
import multiprocessing.process
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.attack.attack import Attack, Skipped
from tests.attack.judging import Told
from tests.attack.kinds import ATTACKS
from tests.attack.place import Place

LATE_S = 45.0
"""Time that an attack has to come to its end after its seconds."""
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Made:
    """What an attack said, or why it did not run."""

    told: Told = field(default_factory=Told)
    skipped: str = ""


def make(attacks: Sequence[Attack], place: Place, seconds: float | None = None) -> list[Made]:
    """Makes attacks at the same time, each once, or again and again for so many seconds. Returns what each one said."""
    end = None if seconds is None else time.monotonic() + seconds
    started: list[tuple[multiprocessing.process.BaseProcess, Connection, float]] = []
    for number, attack in enumerate(attacks):
        ours, theirs = _SPAWN.Pipe(duplex=False)
        arguments = (attack.name, place.for_seconds(attack.seconds), number, end, theirs)
        process = _SPAWN.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        longest = attack.seconds if seconds is None else seconds + attack.seconds
        started.append((process, ours, time.monotonic() + longest + LATE_S))
    return [_result(*one) for one in started]


def _result(process: multiprocessing.process.BaseProcess, pipe: Connection, late: float) -> Made:
    made = Made(Told(broken=["the attack itself failed"]))
    if pipe.poll(max(0.0, late - time.monotonic())):
        with suppress(EOFError):
            made = pipe.recv()
    else:
        made = Made(Told({"ended": "by its time"}))
    process.kill()
    process.join()
    return made


def _give_way() -> None:
    os.setsid()
    os.nice(19)
    with suppress(OSError):
        # Where Linux shares processors between sessions first, nice counts only within one.
        Path("/proc/self/autogroup").write_text("19")


def _work(name: str, place: Place, number: int, end: float | None, pipe: Connection) -> None:
    _give_way()
    attack = next(one for one in ATTACKS if one.name == name)
    logging.disable(logging.CRITICAL)  # what an attack provokes is no news
    rng = random.Random(place.seed * 1000 + number)
    try:
        made = Made(attack.make(place, rng))
        while end is not None and time.monotonic() < end:
            again = attack.make(place, rng)
            # Each round says the same figures; what was broken once stays so.
            made = Made(Told(again.figures, list(dict.fromkeys([*made.told.broken, *again.broken]))))
    except Skipped as reason:
        made = Made(skipped=str(reason))
    pipe.send(made)
