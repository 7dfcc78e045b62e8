"""Takes the screenshots of the console in docs: `make screenshots`. Not a test.

It starts the real system with two engines and the demo model, loads it, kills an engine, and writes PNG files: those
that pages of the documentation show to docs/screenshots, and every view at the widths of a laptop and of a phone, light
and dark, empty and full, to docs/screenshots/console.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from tests.system.console import chat_screenshots
from tests.system.console.browser import Browser, find_chromium
from tests.system.served import ROOT, Served, fetch, until_the_end, wait_until

FOLDER = ROOT / "docs" / "screenshots"
VIEWS = FOLDER / "console"
LAPTOP, PHONE = (1280, 800), (390, 844)
LOOKS = [(name, size, scheme) for name, size in (("", LAPTOP), ("-phone", PHONE)) for scheme in ("light", "dark")]
COLOURS = 255
"""Of a file's palette, which makes files a third as large. The choice of colours keeps those of small areas."""


def main() -> int:
    """Writes all images. Returns the exit status."""
    binary = find_chromium()
    if binary is None:
        return 78
    VIEWS.mkdir(parents=True, exist_ok=True)
    # Chromium's own children still write to its profile for a moment after its end.
    profiles = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with until_the_end(Served("--engines=2", "--gateways=1", "--record-content-mb=8")) as served, profiles as profile:
        browser = Browser(binary, Path(profile))
        try:
            _views(browser, served)
            chat_screenshots.take(browser, served, VIEWS, _save)
            browser.size(*LAPTOP)
            browser.scheme("light")
            _fork(browser, served)
            _slow(browser, served)
        finally:
            browser.close()
    return 0


def _views(browser: Browser, served: Served) -> None:
    """The views beside the chat: without requests, under load, and after an engine was killed."""
    shown = "document.querySelector('.system')"
    for view in ("overview", "charts", "requests"):
        _looks(browser, served, view, f"{view}-empty", shown)
    with _load(served, "job"):
        time.sleep(60)  # charts are of a minute with something in it, and nobody waits for anything else
        _looks(browser, served, "overview", "overview", "document.querySelector('.dots circle.tokens')")
        _looks(browser, served, "charts", "charts", shown)
        _looks(browser, served, "topology/engine-1", "engine", "document.querySelector('canvas')")
        _looks(browser, served, "requests", "requests", "document.querySelector('.phase')")
        # What would start the engine again stands still, so that the loss can be shown.
        served.process.send_signal(signal.SIGSTOP)
        long = threading.Thread(target=_complete, args=(served, "moved", 1500))
        long.start()
        killed = _engine_of(served, "moved")
        os.kill(served.pids()[killed], signal.SIGKILL)
        _looks(browser, served, "overview", "overview-lost", "document.querySelector('.box.gone')")
        served.process.send_signal(signal.SIGCONT)
    long.join()
    wait_until(lambda: killed in served.pids(), 60)
    _looks(browser, served, "requests/moved", "request", "document.querySelector('svg .step')")


def _looks(browser: Browser, served: Served, view: str, name: str, shown: str) -> None:
    for more, size, scheme in LOOKS:
        browser.size(*size, phone=size == PHONE)
        browser.scheme(scheme)
        _open(browser, served, view)
        browser.wait(shown)
        # The rates of a picture are differences of answers, a second apart each.
        browser.wait("performance.now() > 3500")
        _save(browser, VIEWS / f"{name}{more}-{scheme}.png")


def _save(browser: Browser, path: Path) -> None:
    browser.screenshot(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


@contextmanager
def _load(served: Served, name: str) -> Iterator[None]:
    """Runs requests of different lengths, four at the same time."""
    ended = threading.Event()

    def run(place: int) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            _complete(served, f"{name}-{place}-{number}", 40 + 97 * (number * place) % 400)
            ended.wait(0.3 * place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(1, 5)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


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
    _save(browser, FOLDER / "fork.png")


def _slow(browser: Browser, served: Served) -> None:
    """A request whose tokenizer stood still, among usual ones."""
    for number in range(24):
        if number == 15:
            tokenizers = [pid for name, pid in served.pids().items() if name.startswith("tokenizer")]
            for pid in tokenizers:
                os.kill(pid, signal.SIGSTOP)
            thread = threading.Thread(target=_short, args=(served, number))
            thread.start()
            wait_until(lambda: _waited_s(served, "order-15") > 2.5, 60)
            for pid in tokenizers:
                os.kill(pid, signal.SIGCONT)
            thread.join()
        else:
            _short(served, number)
    _open(browser, served, "requests")
    browser.fill("main input[type=search]", "order-")
    browser.wait("/^One request was/.test(document.querySelector('.outliers')?.innerText)")
    browser.click(".outliers summary")
    _save(browser, FOLDER / "requests.png")
    _open(browser, served, "requests/order-15")
    browser.wait("document.querySelectorAll('svg .step').length > 10")
    _save(browser, FOLDER / "slow.png")


def _short(served: Served, number: int) -> None:
    _complete(served, f"order-{number}", 20 + 20 * (number % 3))


def _waited_s(served: Served, name: str) -> float:
    found = fetch(served, "GET", f"/v1/requests?q={name}&state=running").json["data"]
    return found[0]["duration_s"] if found else 0.0


def _complete(served: Served, name: str, max_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    fetch(served, "POST", "/v1/completions", body, **{"X-Request-Id": name})


def _engine_of(served: Served, name: str) -> str:
    """The engine of a request, as soon as it has generated tokens."""

    def engines() -> list[str]:
        found = fetch(served, "GET", f"/v1/requests?q={name}&state=running").json["data"]
        return found[0]["engines"] if found and found[0]["completion_tokens"] else []

    wait_until(lambda: bool(engines()), 60)
    return engines()[0]


def _open(browser: Browser, served: Served, view: str) -> None:
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{served.port}/#/{view}")


if __name__ == "__main__":
    sys.exit(main())
