"""Takes the screenshots of the console in docs: `make screenshots`. Not a test.

It starts the real system with two engines and the demo model, loads it, kills an engine, and writes PNG files to
docs/screenshots.
"""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests.system.console.browser import Browser, find_chromium
from tests.system.served import ROOT, Served, fetch, until_the_end, wait_until

FOLDER = ROOT / "docs" / "screenshots"
STORY = {"prompt": "Once upon a time", "max_tokens": 1200, "ignore_eos": True}


def main() -> int:
    """Writes all images. Returns the exit status."""
    binary = find_chromium()
    if binary is None:
        return 78
    FOLDER.mkdir(exist_ok=True)
    # Chromium's own children still write to its profile for a moment after its end.
    profiles = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with until_the_end(Served("--engines=2", "--gateways=1", "--record-content-mb=8")) as served, profiles as profile:
        browser = Browser(binary, Path(profile))
        try:
            browser.size(1200, 760)
            browser.scheme("light")
            _chat(browser, served)
            _under_load(browser, served)
            _fork(browser, served)
            _slow(browser, served)
        finally:
            browser.close()
    return 0


def _chat(browser: Browser, served: Served) -> None:
    _open(browser, served, "chat")
    browser.wait("document.querySelectorAll('option').length > 1")
    browser.fill("input[name=temperature]", "0")
    browser.fill(".ask textarea", "What is 12 + 7?")
    browser.wait("!document.querySelector('[name=send]').disabled")
    browser.key("Enter", "\r")
    browser.wait("document.querySelector('.message.assistant .facts')")
    browser.hover(".message.assistant .token")
    browser.wait("document.querySelector('.probabilities')")
    browser.screenshot(FOLDER / "chat.png")


def _under_load(browser: Browser, served: Served) -> None:
    threads = [threading.Thread(target=_complete, args=(served, number)) for number in range(6)]
    for thread in threads:
        thread.start()
    _open(browser, served, "topology")
    browser.wait("/tokens\\/s\\s+[1-9]/.test(document.querySelector('[aria-label=engine-1]')?.innerText ?? '')")
    browser.screenshot(FOLDER / "topology.png")
    os.kill(served.pids()[_engine_of(served, "story-0")], signal.SIGKILL)
    for thread in threads:
        thread.join()
    _open(browser, served, "requests/story-0")
    browser.wait("document.querySelectorAll('svg .step').length > 100")
    browser.screenshot(FOLDER / "timeline.png")


def _fork(browser: Browser, served: Served) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 7}
    fetch(served, "POST", "/v1/completions", body, **{"X-Request-Id": "once"})
    _open(browser, served, "requests/once")
    browser.click("[name=replay]")
    browser.wait("document.querySelector('.comparison .equal')")
    browser.click("#token-12")
    browser.fill("form.fork [name=seed]", "8")
    browser.click("[name=fork]")
    browser.wait("document.querySelector('.pane .facts')?.innerText.includes('length')")
    browser.js("[...document.querySelectorAll('h2')].find((one) => one.innerText === 'Output').scrollIntoView()")
    browser.screenshot(FOLDER / "fork.png")


def _slow(browser: Browser, served: Served) -> None:
    """A request whose tokenizer stood still, among usual ones."""
    for number in range(24):
        if number == 15:
            tokenizers = [pid for name, pid in served.pids().items() if name.startswith("tokenizer")]
            for pid in tokenizers:
                os.kill(pid, signal.SIGSTOP)
            thread = threading.Thread(target=_short, args=(served, number))
            thread.start()
            wait_until(lambda: _waited_s(served, "order-15") > 2.5, 20)
            for pid in tokenizers:
                os.kill(pid, signal.SIGCONT)
            thread.join()
        else:
            _short(served, number)
    _open(browser, served, "requests")
    browser.fill("input[type=search]", "order-")
    browser.wait("/^One request was/.test(document.querySelector('.outliers')?.innerText)")
    browser.screenshot(FOLDER / "requests.png")
    _open(browser, served, "requests/order-15")
    browser.wait("document.querySelectorAll('svg .step').length > 10")
    browser.screenshot(FOLDER / "slow.png")


def _short(served: Served, number: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20 + 20 * (number % 3), "ignore_eos": True}
    fetch(served, "POST", "/v1/completions", body, **{"X-Request-Id": f"order-{number}"})


def _waited_s(served: Served, name: str) -> float:
    found = fetch(served, "GET", f"/v1/requests?q={name}&state=running").json["data"]
    return found[0]["duration_s"] if found else 0.0


def _open(browser: Browser, served: Served, view: str) -> None:
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{served.port}/#/{view}")


def _complete(served: Served, number: int) -> None:
    fetch(served, "POST", "/v1/completions", STORY, **{"X-Request-Id": f"story-{number}"})


def _engine_of(served: Served, name: str) -> str:
    def engines() -> list[str]:
        found = fetch(served, "GET", f"/v1/requests?q={name}&state=running").json["data"]
        return found[0]["engines"] if found and found[0]["completion_tokens"] > 50 else []

    wait_until(lambda: bool(engines()), 20)
    return engines()[0]


if __name__ == "__main__":
    sys.exit(main())
