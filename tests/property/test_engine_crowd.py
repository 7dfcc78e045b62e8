"""Many seeded runs of the core in which sequences meet: preempted and swapped, forked, guessing, choices of one prompt.

The operations and what must hold are those of `test_engine_core`; there they come in any order, here they are dealt so
that rare meetings are common.
"""

import random
from collections import Counter

import pytest

from antiphon.services.engine.core.lanes import running
from tests.property.test_engine_core import EngineCoreMachine
from tests.support.slow import slow_but

RUNS = 60


def crowded(draw: random.Random, kind: str) -> EngineCoreMachine:
    """A pool that is too small for what wants to run, with everything switched on that makes sequences meet."""
    machine = EngineCoreMachine()
    block_size = draw.choice([2, 4, 4])
    machine.start(
        num_blocks=draw.randint(16, 40) // block_size,
        block_size=block_size,
        max_num_seqs=draw.randint(2, 5),
        budget=draw.choice([3, 4, 5, 6, 8, 24]),
        prompts=draw.choice([None, None, 2, 5]),
        caching=draw.random() < (0.3 if kind == "plain" else 0.8),
        chunked=draw.random() < 0.8,
        depth=draw.choice([1, 1, 2, 3]),
        num_draft_tokens=draw.choice([0, 4]),
        num_host_blocks=draw.choice([0, 5, 20, 20]),
        ratio=None,
        delay=0.0,
        clock=False,
        rank=draw.choice([0, 0, -1, 1]),
        crowd=[(draw.randint(0, 2), draw.randint(3, 12)) for _ in range(draw.randint(2, 6))],
        num_stages=draw.choice([1, 1, 2, 3]),
        waits=draw.choice([0.0, 0.3, 0.8]),
        spare_states=draw.choice([0, 2, 20, 20, 22]) if kind == "states" else None,
        interval=draw.randint(1, 4),
        drafting=draw.choice(["text", "text", "layer", "both"]),
        windowed=draw.randint(1, 3) if kind == "windows" else 0,
        window=draw.randint(1, 10),
        tier=draw.choice([0, 2, 8]),
    )
    return machine


def submit_something(machine: EngineCoreMachine, draw: random.Random) -> None:
    machine.submit(
        family=draw.randint(0, 1),
        shared=draw.choice([4, 8, 12, 20, 20, 20]),
        tail=[draw.randint(20, 21) for _ in range(draw.randint(0, 2))],
        output=[draw.choice([10, 11]) for _ in range(draw.randint(0, 2))],
        max_tokens=draw.randint(3, 12),
        min_tokens=0,
        flags=(draw.random() < 0.8, draw.random() < 0.2, False),
        salt=draw.choice([b"", b"", b"tenant"]),
        priority=draw.choice([0, 0, 0, 1, -1]),
        arrival=0,
        num_hashes=99,
        source=draw.choice([None, None, draw.randrange(1000)]),
        choices=draw.choice([1, 2, 3, 4]),
        spread=draw.choice([0, 0, 1, -1]),
        clamped=True,
        client=draw.choice([("", 0), ("", 0), ("a", 0), ("b", 1)]),
        width=draw.choice([0, 0, 2, 3]),
        reports=draw.random() < 0.2,
        transfer=draw.choice(["", "", "load", "load", "save"]),
        idle=draw.choice([0.0, 0.0, 0.0, 1e9]),
    )


@pytest.mark.matrix("P-01", "P-08")
@pytest.mark.parametrize("kind", ["plain", "states", "windows"])
@pytest.mark.parametrize("seed", slow_but(range(3), range(8)))
def test_in_a_crowd_nothing_is_lost_shared_by_mistake_or_left_behind(
    seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kind`: of the model: with recurrent states, with windows behind which blocks are freed, or neither."""
    seen: Counter[str] = Counter()
    monkeypatch.setattr(running, "TRIED_MAX", 1)
    for run in range(RUNS):
        draw = random.Random(f"{seed}/{run}")
        machine = crowded(draw, kind)
        for _ in range(30):
            action = draw.choices(["advance", "submit", "transfer", "abort"], [6, 2, 2, 1])[0]
            if action == "advance":
                machine.advance(draw.randrange(2**16), draw.randint(1, 5))
            elif action == "submit":
                submit_something(machine, draw)
                machine.take_meta()
            elif action == "transfer":
                machine.take_meta()
                if machine.transfers.busy:
                    machine.end_transfer(draw.randrange(1000), draw.choice([0.0, 0.5, 1.0, 1.0]))
            elif machine.live:
                machine.abort(draw.randrange(1000))
            machine.holds_together()
        machine.teardown()
        seen += machine.seen()
    wanted = ["preempted", "idle ones preempted", "beams preempted", "right guesses", "wrong guesses", "saved"]
    wanted += ["waited for a mask", "from the tier"]
    wanted += ["swapped in", "loaded"] + (["states read", "snapshots used"] if kind == "states" else ["copied"])
    wanted += ["steps beyond a window", "windows reused"] if kind == "windows" else []
    assert min(seen[what] for what in wanted) > 0, seen
