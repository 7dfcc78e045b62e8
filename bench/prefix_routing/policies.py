"""The policies that the simulation compares: today's router, the router before it, and one that knows everything."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.services.gateway.guests.prefix_caches.follower import Follower
from antiphon.services.gateway.path.router import Router
from antiphon.shared.messages import BlockEvents, EngineStatus, Heartbeat
from bench.prefix_routing.engines import BLOCK_SIZE, INSTANCE, Request, SimEngine


class Policy(Protocol):
    """Places the prompts of one gateway."""

    def choose(self, beats: Sequence[Heartbeat], request: Request) -> str | None:
        """Returns the name of the engine that gets a prompt; None: it waits. Records that it is sent."""
        ...

    def answered(self, engine: str, request: Request) -> None:
        """The engine has accepted the prompt."""
        ...

    def ended(self, engine: str, request: Request) -> None:
        """The sequence has ended."""
        ...

    def events(self, engine: str, position: int, events: bytes) -> None:
        """Block events of an engine have arrived."""
        ...


class Following:
    """The product's router, with the followers of all engines."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self.router = Router()
        self.followers = {one.name: Follower(one.pool.num_blocks) for one in engines}
        for one in engines:
            follower = self.followers[one.name]
            one.follow(follower)
            self.router.follow((one.name, INSTANCE), follower.known)

    def choose(self, beats: Sequence[Heartbeat], request: Request) -> str | None:
        """See Policy."""
        chosen = self.router.choose_engine(beats, "m", request.num_tokens, request.blocks)
        if chosen is None:
            return None
        self.router.record_dispatch(chosen, str(request.number), request.num_tokens, request.blocks)
        return chosen.id

    def answered(self, engine: str, request: Request) -> None:
        """See Policy."""
        self.router.record_answer((engine, INSTANCE), str(request.number), accepted=True)

    def ended(self, engine: str, request: Request) -> None:
        """See Policy."""
        self.router.record_end((engine, INSTANCE), str(request.number))

    def events(self, engine: str, position: int, events: bytes) -> None:
        """See Policy."""
        self.followers[engine].on_events(BlockEvents(engine, INSTANCE, position, events))


@dataclass(slots=True)
class _Guess:
    """What the former router knew of an engine: the prompts that its own gateway had sent there."""

    capacity: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    heartbeat: int = -1
    tokens: int = 0
    sent: int = 0
    ended: int = 0
    unanswered: set[int] = field(default_factory=set[int])
    held: set[int] = field(default_factory=set[int])

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)

    def overlap(self, blocks: Sequence[int]) -> int:
        return next((place for place, block in enumerate(blocks) if block not in self.blocks), len(blocks))


class Guessing:
    """The router as it was: it guesses the content of caches, and counts whole prompts as waiting tokens."""

    RUNNING_COST, SHARE = 16, 8

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._guesses = {one.name: _Guess(one.pool.num_blocks) for one in engines}

    def choose(self, beats: Sequence[Heartbeat], request: Request) -> str | None:
        """See Policy."""
        ready = [beat for beat in beats if self._credit(beat) > 0]
        if not ready:
            return None

        def order(beat: Heartbeat) -> tuple[int, int, str]:
            assert isinstance(beat.status, EngineStatus)
            return self._cost(beat, request), beat.status.counters.prompt_tokens, beat.id

        chosen = min(ready, key=order)
        guess = self._guess(chosen)
        guess.tokens += request.num_tokens
        guess.sent += 1
        guess.unanswered.add(request.number)
        guess.held.add(request.number)
        guess.add(request.blocks)
        return chosen.id

    def answered(self, engine: str, request: Request) -> None:
        """See Policy."""
        self._guesses[engine].unanswered.discard(request.number)

    def ended(self, engine: str, request: Request) -> None:
        """See Policy."""
        guess = self._guesses[engine]
        guess.held.discard(request.number)
        guess.ended += 1

    def events(self, engine: str, position: int, events: bytes) -> None:
        """See Policy. It does not follow."""

    def _cost(self, beat: Heartbeat, request: Request) -> int:
        guess = self._guess(beat)
        assert isinstance(beat.status, EngineStatus)
        load = beat.status.load
        missing = max(0, request.num_tokens - guess.overlap(request.blocks) * BLOCK_SIZE)
        waiting = load.num_waiting_tokens + guess.tokens + missing
        return waiting + self.RUNNING_COST * (load.num_running + load.num_waiting + guess.sent)

    def _credit(self, beat: Heartbeat) -> int:
        guess = self._guess(beat)
        assert isinstance(beat.status, EngineStatus)
        share = max(1, beat.status.max_num_seqs // self.SHARE) - len(guess.held)
        return max(beat.status.credits - guess.sent + guess.ended, share)

    def _guess(self, beat: Heartbeat) -> _Guess:
        guess = self._guesses[beat.id]
        if guess.heartbeat != beat.sequence:
            guess.heartbeat, guess.tokens, guess.ended = beat.sequence, 0, 0
            guess.sent = len(guess.unanswered)
        return guess


class Knowing:
    """Knows the caches and the queues of all engines at once, also what is on its way to them."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._engines = {one.name: one for one in engines}

    def choose(self, beats: Sequence[Heartbeat], request: Request) -> str | None:
        """See Policy."""
        able = [one for one in self._engines.values() if one.num_unfinished < 2 * one.rows]
        if not able:
            return None
        chosen = min(able, key=lambda one: (self._cost(one, request), one.prompt_tokens, one.name))
        chosen.coming.append(request)
        return chosen.name

    def answered(self, engine: str, request: Request) -> None:
        """See Policy."""

    def ended(self, engine: str, request: Request) -> None:
        """See Policy."""

    def events(self, engine: str, position: int, events: bytes) -> None:
        """See Policy. It needs none."""

    def _cost(self, engine: SimEngine, request: Request) -> float:
        ahead, missing = engine.missing_ahead(request)
        return ahead + missing + Guessing.RUNNING_COST * engine.num_unfinished
