"""An engine service that computes nothing: a step takes a fixed time, and a token depends on its position only.

    python -m bench.harness.emulated_engine --step-ms=50 [flags of the engine service]

Scheduler, paged cache, bus and reports are those of the product, so that the other services get what a fast engine
would send them. Started by `bench.scale`, where the engine must not be the limit.
"""

import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from antiphon.services.engine.core.plan import EngineFacts, SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.service import EngineService
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings
from bench.harness.loads import WORD

STEP_FLAG = "--step-ms="
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 65_536, 16, 8192
_NONE = (SampledLogprobs(0.0),)


class EmulatedWorker:
    """A `ModelWorker` whose next token depends on the number of tokens only."""

    def __init__(self, settings: EngineSettings, step_s: float) -> None:
        vocabulary = Tokenizer.from_file(str(Path(settings.model) / "tokenizer.json")).get_vocab()
        self._words = sorted(index for text, index in vocabulary.items() if WORD.fullmatch(text))
        self._step_s = step_s
        self._facts = EngineFacts(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=len(vocabulary),
            computes_on_host=False,
        )

    def facts(self) -> EngineFacts:
        """See ModelWorker."""
        return self._facts

    def run(self, plan: StepPlan) -> StepResult:
        """Sleeps, and returns a word for each sequence that samples."""
        time.sleep(self._step_s)
        ends = [each.start + each.num_tokens for each in plan.scheduled if each.samples]
        token_ids = tuple((self._words[end % len(self._words)],) for end in ends)
        return StepResult(step=plan.step, token_ids=token_ids, logprobs=(_NONE,) * len(ends))

    def close(self) -> None:
        """See ModelWorker."""


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word.startswith(STEP_FLAG)]
    step_s = float(words[-1].removeprefix(STEP_FLAG)) / 1000 if words else 0.05
    flags = [word for word in sys.argv[1:] if not word.startswith(STEP_FLAG)]

    def build(settings: EngineSettings) -> EngineService:
        """Returns the service with the emulated worker."""
        return EngineService(settings, lambda resolved: EmulatedWorker(resolved, step_s))

    sys.exit(main("engine", EngineSettings, build, flags, heartbeat_thread=True))
