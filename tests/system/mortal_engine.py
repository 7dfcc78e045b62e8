"""An engine that is killed, as by kill -9, at a point of its work that a test chooses. Run by `mortal_launcher`.

A test writes an order, `EVENT COUNT`, to the file MORTAL_DIRECTORY/<service id>. The engine counts the events from then
on, and kills itself when COUNT of them have passed and the next one happens. It removes the order before, so that the
engine that is started in its place lives. Events:

- `prompt`: a step that computes a part of a prompt has been launched, and is being computed;
- `block`: a block of KV is about to be sent to another engine;
- `token`: a step that samples tokens has been launched.
"""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Protocol

from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.service import EngineService
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings
from tests.support.transfer_faults import Faults


class Order:
    """The order for this process, and the events since it was given."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed = Counter[str]()

    def pass_by(self, event: str) -> None:
        """Counts an event, and ends the process if the order says so. Called on any thread."""
        try:
            wanted, count = self._path.read_text().split()
        except FileNotFoundError:
            return
        self._passed[event] += 1
        if event == wanted and self._passed[event] > int(count):
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Obeyed(Protocol):
    """What is told of the engine's events."""

    def pass_by(self, event: str) -> None:
        """An event has happened. Called on any thread."""
        ...


def install(order: Obeyed) -> None:
    """Makes the engine of this process tell `order` of its events."""
    launch = Executor.launch

    def launch_and_tell(executor: Executor, plan: StepPlan) -> None:
        launch(executor, plan)
        if any(share.num_tokens > 1 + len(share.draft_token_ids) for share in plan.scheduled):
            order.pass_by("prompt")
        if any(share.samples for share in plan.scheduled):
            order.pass_by("token")

    Executor.launch = launch_and_tell  # type: ignore[method-assign]
    Faults(before=lambda: order.pass_by("block")).install()


def build(settings: EngineSettings) -> EngineService:
    install(Order(Path(os.environ["MORTAL_DIRECTORY"]) / settings.service_id))
    return EngineService(settings)


if __name__ == "__main__":
    sys.exit(main("engine", EngineSettings, build, heartbeat_thread=True))
