"""Records how a stream outlives its engine, and draws the recording: `make kill-picture`. Not a test.

It starts the real system with two engines and the demo model, streams a completion undisturbed, streams it again with
the same seed, kills the engine that computes it (SIGKILL), and writes docs/screenshots/kill.svg.
"""

import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from antiphon.client import stream
from tests.system.console.kill_picture import Piece, Recording, draw
from tests.system.served import ROOT, Served, fetch, until_the_end, wait_until

PICTURE = ROOT / "docs" / "screenshots" / "kill.svg"
PROMPT, SEED, MAX_TOKENS = "Once upon a time", 7, 160
KILLED_AFTER = 50
"""Tokens of the stream after which the engine is killed, or a few more: the kill takes a moment."""


def main() -> None:
    """Records, compares and draws. Raises SystemExit if the texts differ or the stream did not move in its midst."""
    with until_the_end(Served("--engines=2")) as served:
        recording = _record(served)
    if not recording.is_proof():
        raise SystemExit(f"not what the picture would say: {recording}")
    PICTURE.write_text(draw(recording), encoding="utf-8")


def _record(served: Served) -> Recording:
    undisturbed = "".join(piece.text for piece in _pieces(served, "undisturbed", time.monotonic()))
    pids, kill = served.pids(), _Kill(served, "killed")
    pieces: list[Piece] = []
    started = time.monotonic()
    for piece in _pieces(served, "killed", started):
        pieces.append(piece)
        if sum(one.num_tokens for one in pieces) >= KILLED_AFTER:
            kill.due.set()
    kill.join()
    return Recording(
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{os.cpu_count()} cores, {_processor()}",
        prompt=PROMPT,
        seed=SEED,
        pids={name: pid for name, pid in sorted(pids.items()) if name.startswith("engine")},
        killed=kill.engine,
        killed_s=round(kill.moment - started, 4),
        num_tokens_before=_num_tokens_moved(served, "killed"),
        pieces=pieces,
        undisturbed=undisturbed,
    )


class _Kill(threading.Thread):
    """Kills the engine of a request as soon as it is due. A thread, so that the stream is read meanwhile."""

    def __init__(self, served: Served, name: str) -> None:
        super().__init__()
        self.due = threading.Event()
        self.engine, self.moment = "", 0.0
        self._served, self._name = served, name
        self.start()

    def run(self) -> None:
        wait_until(lambda: bool(self._engines()), 20)
        [self.engine] = self._engines()
        pid = self._served.pids()[self.engine]
        assert self.due.wait(20)
        self.moment = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    def _engines(self) -> list[str]:
        found = fetch(self._served, "GET", f"/v1/requests?q={self._name}&all=true").json["data"]
        return found[0]["engines"] if found else []


def _num_tokens_moved(served: Served, name: str) -> int:
    """Returns the tokens of output that a request's last engine got with the prompt: it computes them in one go."""
    timeline = fetch(served, "GET", f"/v1/requests/{name}/timeline").json
    steps = timeline["sequences"][0]["attempts"][-1]["steps"]
    ends = [step["position"] + step["num_tokens"] for step in steps if step["kind"] == "prefill"]
    return max(ends) - timeline["prompt_tokens"]


def _pieces(served: Served, name: str, started: float) -> Iterator[Piece]:
    """Streams the completion under a request id; yields its pieces of text as they arrive."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "seed": SEED, "temperature": 0.8, "return_token_ids": True}
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    for chunk in stream(url, body | {"ignore_eos": True}, headers={"X-Request-Id": name}):
        for choice in chunk["choices"]:
            yield Piece(round(time.monotonic() - started, 4), len(choice.get("token_ids") or ()), choice["text"])


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
