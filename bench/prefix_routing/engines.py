"""Engines for the simulation: the product's block pool and block log, and a plain model of their time."""

from collections import deque
from dataclasses import dataclass, field

from antiphon.services.engine.block_events.log import BlockLog
from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.gateway.guests.prefix_caches.follower import Follower
from antiphon.shared import limits
from antiphon.shared.blocks import HASH_BYTES, block_name, block_names, pack_block_events
from antiphon.shared.messages import BlockSnapshot, EngineCounters, EngineLoad, EngineStatus, Heartbeat

BLOCK_SIZE = 16
ROWS = 32
INSTANCE = "i"
PREFILL_TOKENS_S = 12_000.0
"""Prompt tokens that an engine computes in a second."""
DECODE_S = 2.0
"""Time for which a sequence keeps its row and its blocks after its prompt is computed, seconds."""


@dataclass(eq=False, slots=True)
class Request:
    """A prompt: the hashes of its full blocks, and its length in tokens."""

    number: int
    hashes: list[bytes]
    num_tokens: int
    output: int = 10
    """Blocks of the output."""
    blocks: list[int] = field(default_factory=list)
    """The short names of its blocks."""
    gateway: int = 0
    arrived_s: float = 0.0
    cached: int = 0
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = block_names(b"".join(self.hashes))
        assert all(len(one) == HASH_BYTES for one in self.hashes)


class SimEngine:
    """One engine. It computes prompts one after another, and outputs beside them."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.pool = BlockPool(num_blocks)
        self.log = BlockLog()
        self.pool.watchers = (self.log,)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.current: Request | None = None
        self.computed = 0
        """Tokens of prompts that were computed."""
        self.prompt_tokens = 0
        self.beats = 0
        self.rows = ROWS
        self.coming: list[Request] = []
        """Prompts on their way, if the policy knows of them."""
        self.current_until_s = 0.0

    @property
    def num_unfinished(self) -> int:
        """Sequences here and on their way."""
        return len(self.running) + len(self.waiting) + len(self.coming)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that wait, as a heartbeat tells them."""
        return sum(one.num_tokens for one in self.waiting)

    def follow(self, follower: Follower) -> None:
        """Gives a gateway that begins to follow a snapshot. Events that are not taken yet come after it."""
        names = pack_block_events([block_name(one) for one in self.pool.content()])
        position = self.log.end + self.log.num_untaken
        follower.on_snapshot(
            BlockSnapshot(
                engine_id=self.name,
                engine_instance_id=INSTANCE,
                position=position,
                part=0,
                num_parts=1,
                names=names,
            ),
            0.0,
        )

    def missing_ahead(self, request: Request) -> tuple[int, int]:
        """Returns the tokens to compute before a prompt that came now, and those of the prompt itself."""
        queue, known, ahead = [*self.waiting, *self.coming], set[bytes](), 0
        if self.current is not None:
            known.update(self.current.hashes)
        for one in (*queue, request):
            hits = 0
            for block_hash in one.hashes[: (one.num_tokens - 1) // BLOCK_SIZE]:
                if block_hash not in known and self.pool.find(block_hash) is None:
                    break
                hits += 1
            missing = one.num_tokens - hits * BLOCK_SIZE
            if one is request:
                return ahead, missing
            known.update(one.hashes)
            ahead += missing
        raise AssertionError

    def begin(self) -> float | None:
        """Begins the next prompt if there is room. Returns the seconds until it is computed; None: nothing begins."""
        if self.current is not None or not self.waiting or len(self.running) >= ROWS:
            return None
        request = self.waiting[0]
        hits = self._hits(request)
        self.pool.share(hits)
        own = self.pool.allocate(-(-request.num_tokens // BLOCK_SIZE) + request.output - len(hits))
        if own is None:
            self.pool.free(hits)
            return None
        self.waiting.popleft()
        request.table, request.cached = hits + own, len(hits) * BLOCK_SIZE
        self.current = self.running[request.number] = request
        self.prompt_tokens += request.num_tokens
        missing = request.num_tokens - request.cached
        self.computed += missing
        return missing / PREFILL_TOKENS_S

    def computed_prompt(self) -> Request:
        """The current prompt is computed: its blocks are named."""
        request, self.current = self.current, None
        assert request is not None
        for block, block_hash in zip(request.table, request.hashes, strict=False):
            if self.pool.hash_of(block) is None:
                self.pool.register(block, block_hash)
        return request

    def end(self, request: Request) -> None:
        """An output is complete."""
        del self.running[request.number]
        self.pool.free(request.table)

    def heartbeat(self) -> Heartbeat:
        """Returns the next heartbeat."""
        self.beats += 1
        num_sequences = len(self.running) + len(self.waiting)
        load = EngineLoad(
            num_free_blocks=self.pool.num_free,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_waiting_tokens=self.waiting_tokens,
        )
        status = EngineStatus(
            model="m",
            model_path="m",
            max_model_len=4096,
            vocab_size=1000,
            block_size=BLOCK_SIZE,
            num_blocks=self.pool.num_blocks,
            max_num_seqs=ROWS,
            load=load,
            counters=EngineCounters(prompt_tokens=self.prompt_tokens),
            credits=2 * ROWS - num_sequences,
        )
        return Heartbeat(
            service="engine",
            id=self.name,
            instance_id=INSTANCE,
            protocol=limits.PROTOCOL_VERSION,
            state="ready",
            sequence=self.beats,
            interval_s=limits.HEARTBEAT_INTERVAL_S,
            status=status,
        )

    def _hits(self, request: Request) -> list[int]:
        hits: list[int] = []
        for block_hash in request.hashes[: (request.num_tokens - 1) // BLOCK_SIZE]:
            if (block := self.pool.find(block_hash)) is None:
                break
            hits.append(block)
        return hits
