"""Controls a process that runs loads on the engine alone (core and worker, without bus and HTTP).

`bench.engine.engine_loop` is the process. The two are apart so that the user of `EngineAlone` does not import torch.
Used by `bench.engine.bus_tax` and `bench.run`.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
Work = list[tuple[list[int], int]]
"""(prompt_token_ids, output length) of each request."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one load."""

    wall_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.wall_s


class EngineAlone:
    """Controls the process of an engine, as a context manager.

    `model` is a directory; empty means the demo model. With `threads` 0 the engine chooses the number of threads.
    """

    def __init__(self, model: str, threads: int = 0) -> None:
        command = [sys.executable, "-m", "bench.engine.engine_loop", f"--model={model}", f"--threads={threads}"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Process id of the engine's process."""
        return self._process.pid

    def turn(self, work: Work, streams: int) -> Turn:
        """Runs a load with `streams` requests at a time; a request that ends is replaced by the next one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"work": work, "streams": streams}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine ended; its output above says why")
        return Turn(**json.loads(line))
