"""The engine alone, in a process that takes loads: core and worker, no bus, no HTTP. The other side of the bus tax.

Reads one load a line (JSON), runs it, writes one line with its seconds and tokens. `EngineAlone` is the handle of such
a process; between loads it sleeps. Used by `bench.bus_tax` and `bench.run`.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
Work = list[tuple[list[int], int]]
"""(prompt_token_ids, output length) of each request."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load that has run."""

    wall_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.wall_s


class EngineAlone:
    """A handle; a context manager. `model`: a directory, or empty for the demo model; 0 `threads`: as it decides."""

    def __init__(self, model: str, threads: int = 0) -> None:
        command = [sys.executable, "-m", "bench.engine_stream", f"--model={model}", f"--threads={threads}"]
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
        """Of its process."""
        return self._process.pid

    def turn(self, work: Work, streams: int) -> Turn:
        """Runs a load, `streams` requests at a time: one that ends lets the next one in."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"work": work, "streams": streams}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine ended; its output above says why")
        return Turn(**json.loads(line))


def main() -> None:
    """The process itself."""
    parser = argparse.ArgumentParser(description="The engine alone: a load a line on standard input.")
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    # Only this process needs the engine; whoever holds the handle stays without torch.
    from bench.engine_loop import LoopAlone

    loop = LoopAlone(options.model, options.threads)
    for line in sys.stdin:
        load = json.loads(line)
        started = time.perf_counter()
        tokens = loop.run(load["work"], load["streams"])
        print(json.dumps({"wall_s": time.perf_counter() - started, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
