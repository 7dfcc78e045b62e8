"""A served model and terminals for the tests of commands that talk to people."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models import make_model
from tests.system.served import Served, serve_tiny, until_the_end
from tests.system.terminal.tmux import Terminal

Open = Callable[..., Terminal]
"""Starts a command of `antiphon` in a terminal of its own."""


@pytest.fixture(scope="package")
def tmux() -> str:
    binary = shutil.which("tmux")
    if binary is None and not os.environ.get("CI"):
        pytest.skip("no tmux here (Debian: apt-get install tmux)")
    assert binary is not None, "no tmux: .ci/run installs Debian's tmux"
    return binary


@pytest.fixture(scope="package")
def talker(tmux: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model goes on for as long as it may: its context has room for thousands of tokens."""
    model = make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)
    with until_the_end(serve_tiny(model, "--record-content-mb=8")) as started:
        yield started


@pytest.fixture
def open_terminal(tmux: str, talker: Served, tmp_path: Path) -> Iterator[Open]:
    """Commands ask the server; their state is in `tmp_path`."""
    opened: list[Terminal] = []

    def start(*words: str, **environ: str) -> Terminal:
        opened.append(Terminal(tmux, words, tmp_path, {"ANTIPHON_SERVER": talker.url, **environ}))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()
