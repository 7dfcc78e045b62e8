"""The process of an engine whose results are only counted: `python -m bench.engine.engine_loop`.

It reads one load per line (JSON) from standard input, runs the load, and writes one line with its seconds and tokens.
Between loads it sleeps. `bench.engine.engine_stream` controls it.
"""

import argparse
import json
import sys
import time

from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams
from bench.engine.engine_stream import Work


class LoopAlone:
    """An engine with the default settings of `antiphon serve`."""

    def __init__(self, model: str, threads: int) -> None:
        settings = EngineSettings(model=model, threads=threads)
        self._engine = Engine.build(settings, self._report)
        self._left: Work = []
        self._tokens = self._number = 0

    def run(self, work: Work, streams: int) -> int:
        """Runs a load with `streams` requests at a time and returns the number of output tokens.

        A request that ends is replaced by the next one.
        """
        self._tokens, self._left = 0, work[::-1]
        for _ in range(streams):
            self._next()
        while self._engine.step():
            pass
        return self._tokens

    def _next(self) -> None:
        if self._left:
            prompt, output = self._left.pop()
            self._number += 1
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            self._engine.add(
                SequenceSpec(
                    sequence_id=f"r{self._number}", prompt_token_ids=tuple(prompt), params=params, arrival=self._number
                )
            )

    def _report(self, report: StepReport) -> None:
        for outcome in report.outcomes:
            self._tokens += len(outcome.token_ids)
            if outcome.finish_reason is not None:
                self._next()


def main() -> None:
    """Reads loads from standard input and writes results to standard output."""
    parser = argparse.ArgumentParser(description="The engine alone: one load per line on standard input.")
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    loop = LoopAlone(options.model, options.threads)
    for line in sys.stdin:
        load = json.loads(line)
        started = time.perf_counter()
        tokens = loop.run(load["work"], load["streams"])
        print(json.dumps({"wall_s": time.perf_counter() - started, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
