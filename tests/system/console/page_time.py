"""Measures the page's own time for an answer of 10,000 tokens with probabilities: `make page-time`. Not a test.

The answer arrives as fast as the page takes it, and then at about 600 tokens a second. Time is that of all tasks of the
page's main thread, as Chromium counts it: scripts, layout and painting.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.system.console.browser import Browser, find_chromium
from tests.system.console.chat_page import ask, open_chat, plant
from tests.system.served import Served, until_the_end

TOKENS = 10_000
KINDS: dict[str, Callable[[int], str]] = {
    "prose": lambda number: f"word{number} " if number % 97 else "\n\n## Part\n\n",
    "list": lambda number: f"word{number} " if number % 12 else "\n- ",
    "table": lambda number: "| a | b |\n|---|---|\n" if not number else f"| {number} | word |\n" * (number % 4 == 0),
    "code": lambda number: "```python\n" if not number else f"x{number} = 1 " if number % 9 else "\n",
}


def main() -> int:
    """Prints a line for each kind of text. Returns the exit status."""
    binary = find_chromium()
    if binary is None:
        return 78
    profiles = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with until_the_end(Served()) as served, profiles as folder:
        browser = Browser(binary, Path(folder))
        try:
            for name, token in KINDS.items():
                deltas = [_delta(token(number)) for number in range(TOKENS)]
                at_once, paced = (_seconds(browser, served, deltas, pause) for pause in (0, 1.6))
                told = f"{name:6} {at_once:.2f} s at once, {paced:.2f} s while it arrives at 600 tokens/s"
                sys.stdout.write(told + "\n")
        finally:
            browser.close()
    return 0


def _delta(text: str) -> dict[str, Any]:
    return {"content": text}


def _seconds(browser: Browser, served: Served, deltas: Sequence[dict[str, Any]], pause_ms: float) -> float:
    browser.open("about:blank")
    open_chat(browser, served)
    plant(browser, deltas, pause_ms=pause_ms, probabilities=True)
    before = browser.task_seconds()
    ask(browser, "Go on.")
    browser.wait("document.querySelector('.turn.assistant .facts a')", 300)
    return browser.task_seconds() - before


if __name__ == "__main__":
    sys.exit(main())
