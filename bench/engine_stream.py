"""The engine alone under the load of `bus_tax`: core and worker in this process, no bus, all streams at once."""

import argparse
import json
import time

from bench.bus_tax import prompts
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

    def __init__(self, model: str) -> None:
        settings = EngineSettings(model=model)
        worker = load_worker(settings)
        self.facts = worker.facts()
        core = Core(core_limits(settings, self.facts), self.facts)
        self.loop = StepLoop(core, worker, SystemClock(), self._report)
        self.tokens = 0

    def load(self, ids: list[list[int]], output: int, label: str) -> float:
        """Seconds for all of them."""
        self.tokens = 0
        started = time.perf_counter()
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        for number, prompt in enumerate(ids):
            self.loop.add(SequenceSpec(f"{label}{number}", tuple(prompt), params, arrival=number))
        while self.loop.step():
            pass
        return time.perf_counter() - started

    def _report(self, report: StepReport) -> None:
        self.tokens += sum(len(outcome.token_ids) for outcome in report.outcomes)


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    alone = Alone(options.model)
    vocab = alone.facts.vocab_size
    alone.load(prompts(options.streams, options.input, vocab, 1000 + options.seed), options.output, "warm")
    wall_s = alone.load(prompts(options.streams, options.input, vocab, options.seed), options.output, "r")
    print(json.dumps({"tokens_per_s": round(alone.tokens / wall_s, 1), "wall_s": round(wall_s, 3)}))


if __name__ == "__main__":
    main()
