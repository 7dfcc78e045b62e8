"""The charts and the page of an engine in a real headless browser, against the real system."""

import json
import re
import time
from typing import Any

import pytest

from tests.system.console.browser import Browser
from tests.system.console.pages import COMPLETIONS, address, load, plant, show, unload
from tests.system.served import Served, fetch, wait_until

pytestmark = pytest.mark.system
# What is written on canvases: the labels of the axes.
NOTE_TEXTS = """
(() => { window.written = new Set(); const real = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
    window.written.add(text); return real.call(this, text, ...more); }; })()
"""
WRITTEN = "[...window.written]"


def chart(title: str) -> str:
    """The chart of a title, as JavaScript."""
    return f"[...document.querySelectorAll('.chart')].find((one) => one.innerText.includes({json.dumps(title)}))"


def moves(browser: Browser, title: str) -> None:
    browser.wait(f"/[1-9]/.test({chart(title)}?.querySelector('.value')?.innerText ?? '')")


def history(count: int = 60, **series: Any) -> dict[str, Any]:
    """An answer of the endpoint: a point each 2 seconds, the last one just now."""
    now = round(time.time())
    names = ("ttft_mean_s", "ttft_p95_s", "itl_mean_s", "itl_p95_s")
    zeros = ("generated_tokens_per_s", "prompt_tokens_per_s", "requests_per_s", "errors_per_s", "running", "waiting")
    filled: dict[str, list[float | None]] = {name: [None] * count for name in names}
    filled |= {name: [0.0] * count for name in (*zeros, "kv_cache_share", "preemptions_per_s")}
    return {
        "object": "history",
        "interval_s": 2.0,
        "now": now,
        "time": [now - 2 * (count - 1 - index) for index in range(count)],
        "series": {**filled, **series},
        "engines": {},
        "events": [{"time": now - 40, "kind": "lost", "service": "engine", "id": "engine-7"}],
    }


def test_charts_move_under_load_and_keep_what_they_showed(console: Served, browser: Browser):
    browser.open(address(console, "charts"))
    load(browser, 30)
    for title in ("Time to first token", "Time between tokens", "Tokens per second", "Requests per second"):
        moves(browser, title)
    unload(browser)
    browser.js("[...document.querySelectorAll('.ranges button')].at(-1).click()")
    first = first_moment(browser)
    # Left and returned to, they are there at once, before the server is asked again.
    show(browser, "requests")
    browser.wait("document.querySelector('.filters')")
    browser.js(
        "(() => { const real = window.fetch; window.fetch = (url, ...more) => String(url).includes('history') "
        "? new Promise(() => {}) : real(url, ...more); })()"
    )
    show(browser, "charts")
    browser.wait("document.querySelectorAll('.chart canvas').length === 7")
    assert first_moment(browser) == first
    # After a reload they come from the server.
    browser.js("location.reload(), null")
    browser.wait("window.load === undefined && document.querySelectorAll('.chart canvas').length === 7")
    assert first_moment(browser) == first


def first_moment(browser: Browser) -> str:
    """Goes to the first moment of a chart by keyboard. Returns its time."""
    browser.js("document.querySelector('.plot').focus()")
    browser.key("Home")
    browser.wait("/^\\d/.test(document.querySelector('.when').innerText)")
    return browser.text(".when")


def test_the_values_of_a_moment_are_read_by_pointer_and_by_keyboard(console: Served, browser: Browser):
    browser.open(address(console, "requests"))
    rising = [float(10 * index) for index in range(60)]
    found = history(generated_tokens_per_s=rising, ttft_mean_s=[None] * 59 + [0.25])
    plant(browser, admin_history=found)
    show(browser, "charts")
    browser.wait(f"{chart('Tokens per second')}?.innerText.includes('590')")
    assert browser.text(".when") == "now"
    assert "250 ms" in browser.js(f"{chart('Time to first token')}.innerText")
    browser.hover(".plot")
    browser.wait("/^\\d\\d:\\d\\d:\\d\\d$/.test(document.querySelector('.when').innerText)")
    # All charts show the same moment.
    assert len(set(browser.js("[...document.querySelectorAll('.when')].map((one) => one.innerText)"))) == 1
    browser.js("document.querySelector('.plot').focus()")
    browser.key("Home")
    browser.wait("document.querySelector('.value').innerText === '0'")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    browser.wait("document.querySelector('.value').innerText === '20'")
    # A screen reader hears them as well.
    assert "generated 20" in browser.js("document.querySelector('.plot').ariaLabel")
    browser.key("Escape")
    browser.wait("document.querySelector('.when').innerText === 'now'")


def test_axes_have_labels_and_events_are_named(console: Served, browser: Browser):
    browser.open(address(console, "requests"))
    browser.js(NOTE_TEXTS)
    found = history(kv_cache_share=[0.4] * 60, generated_tokens_per_s=[250.0] * 60, running=[2.0] * 60)
    plant(browser, admin_history=found)
    show(browser, "charts")
    browser.wait(f"{WRITTEN}.length > 8")
    written = browser.js(WRITTEN)
    assert len([one for one in written if re.fullmatch(r"\d\d:\d\d", one)]) >= 3
    assert {"0", "100", "200", "300"} <= set(written), "three parts of a round number"
    assert {"50 %", "100 %"} <= set(written), "the cache is drawn against all of it"
    assert browser.text(".events li").endswith("engine-7 was lost")
    # At the moment of the event the chart names it.
    browser.js("document.querySelector('.plot').focus()")
    browser.key("Home")
    for _ in range(39):
        browser.key("ArrowRight")
    browser.wait("document.querySelector('.values .event')?.innerText === 'engine-7 lost'")


def test_what_had_nothing_says_so_and_the_time_shown_is_chosen(console: Served, browser: Browser):
    browser.open(address(console, "requests"))
    earlier = [*[5.0] * 100, *[0.0] * 300]
    plant(browser, admin_history=history(400, generated_tokens_per_s=earlier))
    show(browser, "charts")
    browser.wait("document.querySelectorAll('.silence').length > 3")
    assert browser.text(".silence") == "No requests in this time"
    assert "µs" not in browser.text("main")
    tokens = chart("Tokens per second")
    assert browser.js(f"!!{tokens}.querySelector('.silence')"), "nothing in the last five minutes"
    browser.js("[...document.querySelectorAll('.ranges button')].at(1).click()")
    browser.wait(f"!{tokens}.querySelector('.silence')")
    # The choice stays.
    show(browser, "requests")
    show(browser, "charts")
    browser.wait("document.querySelector('.ranges [aria-pressed=true]')?.innerText === '15 min'")


def test_an_engine_shows_its_work_and_its_requests(console: Served, browser: Browser):
    browser.open(address(console, "overview"))
    # Long enough for all that is looked at. They end when the browser leaves the page.
    body = {"prompt": "x y z", "max_tokens": 1500, "n": 8, "ignore_eos": True, "stream": True}
    browser.js(f"{COMPLETIONS} for (const one of [1, 2]) complete({json.dumps(body)}, `batch-${{one}}`), null")

    def engines() -> list[str]:
        found = fetch(console, "GET", "/v1/requests?q=batch-1&state=running").json["data"]
        return found[0]["engines"] if found else []

    wait_until(lambda: bool(engines()), 60)
    name = engines()[0]
    browser.click(f"a.box[aria-label^={name}]")
    browser.wait("document.querySelector('[aria-label=\"Requests of the engine\"]')?.innerText.includes('batch-1')")
    browser.wait("document.querySelector('meter')?.value > 0")
    assert name in browser.js("document.title")
    for title in ("Sequences", "KV cache in use", "Tokens per second", "Steps per second"):
        moves(browser, title)
    assert "generated tokens" in browser.text("dl.facts")
