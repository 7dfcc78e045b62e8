"""A terminal: a command in a pane of tmux, what it shows, and keys. No fixtures."""

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.system.served import ROOT, wait_until

WAIT_S = 60.0


class Terminal:
    """A terminal of 100 columns that runs one command of `antiphon`. Its text stays when the command has ended."""

    def __init__(self, binary: str, words: Sequence[str], state: Path, environ: Mapping[str, str]) -> None:
        self._tmux = [binary, "-L", f"antiphon-test-{uuid.uuid4().hex}", "-f", os.devnull]
        own = {"XDG_STATE_HOME": str(state), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
        command = shlex.join([sys.executable, "-m", "antiphon", *words])
        # The shell prints what the command leaves behind, and the state of the terminal.
        script = f"{command}; echo exit $?; stty -a | grep -o -- '-\\?icanon'; exec cat"
        argv = [*self._tmux, "new-session", "-d", "-x", "100", "-y", "30", "bash", "-c", script]
        subprocess.run(argv, check=True, cwd=ROOT, env={**os.environ, **own, **environ}, timeout=WAIT_S)

    @property
    def text(self) -> str:
        """What the terminal shows, with what has scrolled away, in whole lines."""
        return self._ask("capture-pane", "-p", "-J", "-S", "-")

    @property
    def screen(self) -> str:
        """What the terminal shows."""
        return self._ask("capture-pane", "-p")

    @property
    def styled(self) -> str:
        """The same with escape sequences."""
        return self._ask("capture-pane", "-p", "-e", "-S", "-")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Waits until the text is shown so many times."""
        wait_until(lambda: self.text.count(text) >= times, WAIT_S, lambda: self.text)

    def wait_for_answer(self) -> None:
        """Waits until text follows the last line that was typed."""
        wait_until(lambda: self.text.rstrip().rpartition(">>> ")[2].count("\n") > 0, WAIT_S, lambda: self.text)

    def keys(self, *names: str) -> None:
        """Sends keys by tmux's names, such as `Up`, `C-c`, `Enter`."""
        self._ask("send-keys", *names)

    def line(self, text: str) -> None:
        """Types a line."""
        self._ask("send-keys", "-l", text)
        self.keys("Enter")

    def close(self) -> None:
        """Ends the command."""
        self._ask("kill-server")

    def _ask(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True, timeout=WAIT_S)
        return done.stdout
