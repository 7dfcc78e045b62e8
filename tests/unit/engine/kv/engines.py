"""Engines with roles in one process, without a bus, for tests of transfers."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.config import EngineSettings
from antiphon.shared.messages import KvOrigin, KvSource
from antiphon.shared.parameters.sampling import SamplingParams

END_S = 30.0
PROMPT = tuple(3 + (7 * number + number * number) % 250 for number in range(100))


@dataclass
class Running:
    """An engine and the tokens that it has generated."""

    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens of each prompt that were not computed for it."""
    origins: dict[str, KvOrigin] = field(default_factory=dict)
    """Where the KV of each prompt came from."""

    def take(self, report: StepReport) -> None:
        assert not report.refused, report.refused
        for outcome in report.outcomes:
            self.tokens.setdefault(outcome.sequence_id, []).extend(outcome.token_ids)
            self.cached[outcome.sequence_id] = outcome.num_cached_tokens
            if outcome.kv_origin is not None:
                self.origins[outcome.sequence_id] = outcome.kv_origin
            if outcome.finish_reason:
                self.ended.add(outcome.sequence_id)

    def compute_prompt(self, transfer_id: str, prompt: tuple[int, ...] = PROMPT) -> KvSource:
        """Has the engine compute a prompt for another one."""
        assert self.engine.connector is not None
        spec = SequenceSpec(
            sequence_id=f"p-{transfer_id}", prompt_token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=1)
        )
        self.engine.add(replace(spec, kv_transfer_id=transfer_id))
        return KvSource(transfer_id, self.engine.connector.address)

    def add(self, sequence_id: str, source: KvSource | None, prompt: tuple[int, ...] = PROMPT, **params: Any) -> None:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params})
        self.engine.add(
            SequenceSpec(sequence_id=sequence_id, prompt_token_ids=prompt, params=sampling, kv_source=source)
        )

    def idle(self) -> None:
        """All that was held has been given back."""
        core = self.engine._core
        core_idle = lambda: core.pool.num_free == core.pool.num_blocks and not core.transfers.num_saved_blocks  # noqa: E731
        deadline = time.monotonic() + END_S
        while not core_idle() or core.swap.pool.num_free < core.swap.pool.num_blocks:
            assert time.monotonic() < deadline, "something is still held"
            self.engine.step()
            time.sleep(0.005)
        invariants.check(core)


def run(*engines: Running, until: tuple[Running, str]) -> list[int]:
    """Steps all engines in turn until a sequence has ended. Returns its tokens."""
    running, name = until
    deadline = time.monotonic() + END_S
    while name not in running.ended:
        assert time.monotonic() < deadline, f"{name} has not ended"
        busy = [each.engine.step() for each in engines]
        if not any(busy):
            time.sleep(0.001)
    return running.tokens[name]


@contextlib.contextmanager
def started(model: Path, role: str = "both", **settings: Any) -> Iterator[Running]:
    """An engine until the end of the block."""
    made: list[Running] = []
    base = {"device": "cpu", "threads": 1, "kv_cache_memory_gb": 0.02, "swap_space": 0.02, "max_num_seqs": 8}
    base |= {"block_size": 16, "dtype": "float32", "model": str(model)}
    engine = Engine.build(EngineSettings(**{**base, **settings}, role=role), lambda report: made[0].take(report))
    made.append(Running(engine))
    try:
        yield made[0]
    finally:
        engine.close()
