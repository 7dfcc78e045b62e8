"""Four engines and two gateways in simulated time, under one policy of placement."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.shared import limits
from antiphon.shared.messages import Heartbeat
from bench.prefix_routing.engines import BLOCK_SIZE, DECODE_S, Request, SimEngine
from bench.prefix_routing.policies import Policy

WIRE_S = 0.002
"""Time of a message from a process to another, seconds."""
LATE_S = 5.0
MakePolicy = Callable[[Sequence[SimEngine]], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts that begin with one of some shared prefixes, whose frequencies follow Zipf's law."""

    num_groups: int = 50
    prefix_tokens: int = 2000
    tail_tokens: int = 200
    exponent: float = 1.0
    rate_s: float = 32.0
    """Prompts in a second."""
    duration_s: float = 120.0
    blocks_an_engine: int = 2600
    num_engines: int = 4
    late_s: float = 0.0
    """When the second gateway starts; 0: at once."""
    one_gateway: bool = False
    seed: int = 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run gave. `ttft_s`: times to the first token. Tokens and times are those of the second half of the run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list[float])
    computed: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of prompts that each engine computed."""
    late_tokens: int = 0
    late_cached: int = 0
    """Of the prompts of the second gateway in the first LATE_S after its start."""
    sequences: dict[str, int] = field(default_factory=dict[str, int])
    """Sequences of each engine."""

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were in the cache."""
        return self.cached_tokens / self.prompt_tokens


def imbalance(by_engine: Mapping[str, int]) -> float:
    """Returns the largest value divided by the mean."""
    return max(by_engine.values()) * len(by_engine) / sum(by_engine.values())


def requests_of(load: Workload) -> list[Request]:
    """Returns the prompts in the order of their arrivals."""
    rng = random.Random(load.seed)
    weights = [1 / (rank + 1) ** load.exponent for rank in range(load.num_groups)]
    prefixes = [[rng.randbytes(16) for _ in range(load.prefix_tokens // BLOCK_SIZE)] for _ in weights]
    found, at = list[Request](), 0.0
    while at < load.duration_s:
        at += rng.expovariate(load.rate_s)
        prefix = rng.choices(prefixes, weights)[0]
        tail = [rng.randbytes(16) for _ in range(load.tail_tokens // BLOCK_SIZE)]
        request = Request(len(found), prefix + tail, load.prefix_tokens + load.tail_tokens)
        request.arrived_s = at
        request.gateway = int(rng.random() < 0.5 and at >= load.late_s and not load.one_gateway)
        found.append(request)
    return found


class Simulation:
    """One run. `make`: makes the policy of each gateway when the gateway starts."""

    def __init__(self, load: Workload, make: MakePolicy) -> None:
        self._load, self._make = load, make
        self._engines = {
            f"e{number}": SimEngine(f"e{number}", load.blocks_an_engine) for number in range(load.num_engines)
        }
        self._beats: list[Heartbeat] = []
        self._gateways: list[Policy] = []
        self._queues: list[deque[Request]] = [deque(), deque()]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number, self._now = 0, 0.0
        zero = dict.fromkeys(self._engines, 0)
        self._outcome = Outcome(computed=dict(zero), sequences=dict(zero))

    def run(self) -> Outcome:
        """Runs until the last prompt is computed."""
        self._start_gateway()
        self._at(self._load.late_s, self._start_gateway)
        requests = requests_of(self._load)
        for request in requests:
            self._at(request.arrived_s, lambda one=request: self._arrive(one))
        ticks = int(self._load.duration_s / limits.BLOCK_BATCH_S)
        for tick in range(ticks):
            self._at(tick * limits.BLOCK_BATCH_S, self._publish)
        for beat in range(int(self._load.duration_s / limits.HEARTBEAT_INTERVAL_S)):
            self._at(beat * limits.HEARTBEAT_INTERVAL_S, self._beat)
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            action()
        return self._outcome

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, action))

    def _start_gateway(self) -> None:
        if len(self._gateways) < (1 if self._load.one_gateway else 2):
            self._gateways.append(self._make(list(self._engines.values())))

    def _beat(self) -> None:
        self._beats = [one.heartbeat() for one in self._engines.values()]
        for gateway in range(len(self._gateways)):
            self._pump(gateway)

    def _publish(self) -> None:
        for engine in self._engines.values():
            for position, events in engine.log.take()[0]:
                for gateway in list(self._gateways):
                    gateway.events(engine.name, position, events)

    def _arrive(self, request: Request) -> None:
        self._queues[request.gateway].append(request)
        self._pump(request.gateway)

    def _pump(self, gateway: int) -> None:
        queue = self._queues[gateway]
        while queue and self._beats:
            name = self._gateways[gateway].choose(self._beats, queue[0])
            if name is None:
                return
            request = queue.popleft()
            self._at(self._now + WIRE_S, lambda one=request, engine=self._engines[name]: self._submit(one, engine))

    def _submit(self, request: Request, engine: SimEngine) -> None:
        if request in engine.coming:
            engine.coming.remove(request)
        engine.waiting.append(request)
        gateway = self._gateways[request.gateway]
        self._at(self._now + WIRE_S, lambda: gateway.answered(engine.name, request))
        self._advance(engine)

    def _advance(self, engine: SimEngine) -> None:
        seconds = engine.begin()
        if seconds is not None:
            self._at(self._now + seconds, lambda: self._first_token(engine))

    def _first_token(self, engine: SimEngine) -> None:
        request = engine.computed_prompt()
        if request.arrived_s >= self._load.duration_s / 2:
            outcome = self._outcome
            outcome.prompt_tokens += request.num_tokens
            outcome.cached_tokens += request.cached
            if request.gateway and request.arrived_s < self._load.late_s + LATE_S:
                outcome.late_tokens += request.num_tokens
                outcome.late_cached += request.cached
            outcome.ttft_s.append(self._now - request.arrived_s)
            outcome.computed[engine.name] += request.num_tokens - request.cached
            outcome.sequences[engine.name] += 1
        self._at(self._now + DECODE_S, lambda: self._end(engine, request))
        self._advance(engine)

    def _end(self, engine: SimEngine, request: Request) -> None:
        engine.end(request)
        self._at(self._now + 2 * WIRE_S, lambda: self._ended(engine, request))
        self._advance(engine)

    def _ended(self, engine: SimEngine, request: Request) -> None:
        self._gateways[request.gateway].ended(engine.name, request)
        self._pump(request.gateway)
