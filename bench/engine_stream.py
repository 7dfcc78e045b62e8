"""The engine alone under the load of `bus_tax`: core and worker in this process, no bus, all streams at once."""

import sys
import time

from bench.bus_tax import parse, workload
from services.engine.core.core import Core
from services.engine.core.request import SequenceSpec
from services.engine.loop import StepLoop, StepReport
from services.engine.service import core_limits
from services.engine.worker.load import load_worker
from shared.clock import SystemClock
from shared.config import EngineSettings
from shared.sampling import SamplingParams


class Alone:
    """A step loop whose reports are only counted."""

    def __init__(self, model: str, threads: int) -> None:
        settings = EngineSettings(model=model, threads=threads)
        worker = load_worker(settings)
        self.facts = worker.facts()
        core = Core(core_limits(settings, self.facts), self.facts)
        self.loop = StepLoop(core, worker, SystemClock(), self._report)
        self.tokens = 0

    def load(self, work: list[tuple[list[int], int]], streams: int, label: str) -> float:
        """Seconds for all of (prompt, output length), `streams` at a time: one that ends lets the next one in."""
        self.tokens, self._label, self._left = 0, label, list(enumerate(work))[::-1]
        started = time.perf_counter()
        for _ in range(streams):
            self._next()
        while self.loop.step():
            pass
        return time.perf_counter() - started

    def _next(self) -> None:
        if self._left:
            number, (prompt, output) = self._left.pop()
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            self.loop.add(SequenceSpec(f"{self._label}{number}", tuple(prompt), params, arrival=number))

    def _report(self, report: StepReport) -> None:
        for outcome in report.outcomes:
            self.tokens += len(outcome.token_ids)
            if outcome.finish_reason is not None:
                self._next()


def main() -> None:
    """Loads the model, then answers each line of the input, a seed, with one line: tokens/s."""
    options = parse()
    alone = Alone(options.model, options.threads)
    for line in sys.stdin:
        wall_s = alone.load(workload(options, alone.facts.vocab_size, int(line)), options.streams, f"r{line.strip()}-")
        print(alone.tokens / wall_s, flush=True)


if __name__ == "__main__":
    main()
