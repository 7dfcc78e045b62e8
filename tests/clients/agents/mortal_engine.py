"""An engine that is killed, as by kill -9, while it says something. Run by `launcher`.

A test writes to the file of AGENTS_ORDER a word of its own and the number of steps with sampled tokens after which the
first engine that gets there is killed. That engine removes the file, so that no other one dies.
"""

import os
import signal
import sys
from pathlib import Path

from antiphon.services.engine.service import EngineService
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings
from tests.system.mortal_engine import install

ORDER = "AGENTS_ORDER"


class Order:
    """An order for whichever engine comes first, and the steps of this one since it was given."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._order = ""
        self._steps = 0

    def pass_by(self, event: str) -> None:
        """Counts a step that samples tokens; kills the process when the order says so. Called on any thread."""
        try:
            order = self._path.read_text()
        except FileNotFoundError:
            return
        if event != "token" or not order:
            return
        self._steps = self._steps + 1 if order == self._order else 1
        self._order = order
        if self._steps > int(order.split()[1]):
            self._die()

    def _die(self) -> None:
        try:
            self._path.unlink()
        except FileNotFoundError:
            return  # another engine was a little earlier
        os.kill(os.getpid(), signal.SIGKILL)


def install_order() -> None:
    """Makes the engine of this process obey orders."""
    install(Order(Path(os.environ[ORDER])))


def build(settings: EngineSettings) -> EngineService:
    install_order()
    return EngineService(settings)


if __name__ == "__main__":
    sys.exit(main("engine", EngineSettings, build, heartbeat_thread=True))
