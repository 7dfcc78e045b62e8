"""An engine that computes nothing and says what `agent_script` says, which can be killed too. Run by `launcher`."""

import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.service import EngineService
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings
from tests.clients.agents.mortal_engine import install_order
from tests.support.agent_script import END, say
from tests.support.scripted import ScriptedWorker

NUM_BLOCKS, MAX_MODEL_LEN = 8192, 32768
TOKEN_S = 0.01


class SlowWorker(ScriptedWorker):
    """Takes a little time for each token, so that an engine can be killed between two."""

    def run(self, plan: StepPlan) -> StepResult:
        if any(one.samples for one in plan.scheduled):
            time.sleep(TOKEN_S)
        return super().run(plan)


def make_worker(settings: EngineSettings) -> ModelWorker:
    """Returns the worker, which reads prompts with the tokenizer of the settings' model."""
    tokenizer = Tokenizer.from_file(str(Path(settings.model) / "tokenizer.json"))
    return SlowWorker(tokenizer, say, END, NUM_BLOCKS, MAX_MODEL_LEN)


def build(settings: EngineSettings) -> EngineService:
    install_order()
    return EngineService(settings, make_worker)


if __name__ == "__main__":
    sys.exit(main("engine", EngineSettings, build, heartbeat_thread=True))
