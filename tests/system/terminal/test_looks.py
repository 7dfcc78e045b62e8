"""`antiphon top` and `watch` in a real terminal: they redraw, end by a key, and leave the terminal as it was."""

import pytest

from tests.system.terminal.conftest import Open

pytestmark = [pytest.mark.system, pytest.mark.nats]


@pytest.mark.parametrize("key", ["q", "C-c"])
def test_top_redraws_and_gives_the_terminal_back(open_terminal: Open, key: str) -> None:
    terminal = open_terminal("top", "--interval=0.1")
    terminal.wait_for("engine-1")
    terminal.wait_for("q or Ctrl-C ends")
    assert terminal.screen.count("engine-1") == 1, "each look replaces the one before"
    terminal.keys(key)
    terminal.wait_for("\nicanon")
    assert "engine-1" not in terminal.text
    assert ("exit 0" if key == "q" else "exit 130") in terminal.text


def test_watch_shows_that_it_looks(open_terminal: Open) -> None:
    terminal = open_terminal("watch", "--interval=0.1")
    terminal.wait_for("look 3: 4 processes, 0 breaches so far")
    terminal.keys("C-c")
    terminal.wait_for("exit 130")
    assert "nothing is wrong" not in terminal.text
