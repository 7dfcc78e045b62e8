"""An engine whose transfers of KV go wrong, run as a process by `test_disaggregation`.

FAULT: what happens to the blocks (`tests.support.transfer_faults`), or `die`: the process is killed as by kill -9
before it sends the block number FIRST (from 0). FAULT_FILE: the process writes there which block it is at.
"""

import os
import signal
import sys
from pathlib import Path

from antiphon.services.engine.service import EngineService
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings
from tests.support.transfer_faults import Faults

if __name__ == "__main__":
    kind, first = os.environ["FAULT"], int(os.environ.get("FIRST", "0"))
    faults = Faults("none" if kind == "die" else kind, first)  # type: ignore[arg-type]

    def before() -> None:
        Path(os.environ["FAULT_FILE"]).write_text(str(faults.sent + 1))
        if kind == "die" and faults.sent >= first:
            os.kill(os.getpid(), signal.SIGKILL)

    faults.before = before
    faults.install()
    sys.exit(main("engine", EngineSettings, EngineService, heartbeat_thread=True))
