"""The overview in a real headless browser: the sentence, the picture of the topology, and its processes."""

import json
import os
import re
import signal
from typing import Any

import pytest

from tests.system.console.browser import Browser
from tests.system.console.pages import address, load, plant, show, unload
from tests.system.served import Served, wait_until

pytestmark = pytest.mark.system
SENTENCE = "document.querySelector('.system')?.innerText ?? ''"
FLOWS = "document.querySelectorAll('.arrow.requests').length && document.querySelectorAll('.arrow.tokens').length"
IDLE = "document.querySelector('.arrow') && !document.querySelector('.arrow:not(.idle)')"
READY = "/^All \\d processes are ready\\./"


def member(service: str, name: str, state: str = "ready", **load: Any) -> dict[str, Any]:
    """A member as the endpoint gives it."""
    resources = {"cpu_s": 1.0, "num_cores": 4, "rss_bytes": 300 << 20, "gpus": []}
    facts: dict[str, Any] = {"service": service, "id": name, "instance_id": f"run-of-{name}", "state": state}
    facts |= {"heartbeat_age_s": 0.1, "heartbeat_interval_s": 0.15, "messages_received": 1, "messages_sent": 1}
    return {**facts, "resources": resources, "load": {"model": "demo", "num_requests": 0, **load}}


def lost(name: str, service: str = "engine", age_s: float = 3.2) -> dict[str, Any]:
    return {"service": service, "id": name, "instance_id": "before", "age_s": age_s, "reason": "its process ended"}


def topology(*members: dict[str, Any], lost: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    body = {"object": "topology", "version": "1", "gateway": "gateway-1", "uptime_s": 7300.0, "now_s": 1.0}
    return {**body, "members": [*members], "lost": lost or []}


OTHERS = (
    member("gateway", "gateway-1", num_requests=3),
    member("tokenizer", "tokenizer-1"),
    member("detokenizer", "detokenizer-1"),
)
FACTS = {"num_blocks": 100, "num_free_blocks": 60, "num_running": 2, "num_waiting": 1, "finished": []}


def engine(number: int, state: str = "ready", **load: Any) -> dict[str, Any]:
    return member("engine", f"engine-{number}", state, **{**FACTS, **load})


@pytest.mark.parametrize(
    ("found", "tone", "sentence"),
    [
        (
            topology(*OTHERS, engine(1), engine(2)),
            "good",
            "All 5 processes are ready. 3 requests run, 412 tokens/s.",
        ),
        (
            topology(*OTHERS, engine(1), lost=[lost("engine-2")]),
            "bad",
            "engine-2 was lost 3 s ago; its requests run on engine-1.",
        ),
        (
            topology(*OTHERS, engine(1), engine(2), engine(3), lost=[lost("engine-4", age_s=200)]),
            "bad",
            "engine-4 was lost 3 min ago; its requests run on the other 3 engines.",
        ),
        (
            topology(*OTHERS, engine(1), engine(2), lost=[lost("engine-2")]),
            "good",
            "All 5 processes are ready. engine-2 was lost 3 s ago and is back. 3 requests run, 412 tokens/s.",
        ),
        (
            topology(*OTHERS, lost=[lost("engine-1")]),
            "bad",
            "No engine is ready: requests wait. engine-1 was lost 3 s ago.",
        ),
        (
            topology(OTHERS[0], OTHERS[2], engine(1)),
            "bad",
            "No tokenizer is ready: requests wait.",
        ),
        (
            topology(*OTHERS, engine(1), engine(2, "starting")),
            "warn",
            "engine-2 is starting. The other 4 processes are ready. 3 requests run, 412 tokens/s.",
        ),
        (
            topology(*OTHERS, engine(1), engine(2, "stalled")),
            "bad",
            "engine-2 makes no progress; others do its work.",
        ),
        (
            topology(*OTHERS, engine(1), engine(2, model="other")),
            "bad",
            "No tokenizer of the model other is ready: requests wait.",
        ),
        (
            topology(*OTHERS, engine(1), member("tokenizer", "tokenizer-2"), lost=[lost("tokenizer-1", "tokenizer")]),
            "good",
            "All 5 processes are ready. tokenizer-1 was lost 3 s ago and is back. 3 requests run, 412 tokens/s.",
        ),
    ],
)
def test_one_sentence_says_the_state_of_the_system(
    console: Served, browser: Browser, found: dict[str, Any], tone: str, sentence: str
):
    browser.open(address(console, "requests"))
    told = browser.js(
        f"import('/console/console/state.js').then((one) => one.stateOf({json.dumps(found)}, 412))",
    )
    assert told == {"tone": tone, "text": sentence}


def test_the_overview_shows_every_process_and_its_details(console: Served, browser: Browser):
    browser.open(address(console, "overview"))
    for name in ("gateway-1", "tokenizer-1", "engine-1", "engine-2", "detokenizer-1"):
        browser.wait(f"document.querySelector('.box[aria-label^={name}]')?.innerText.includes('MiB')")
        browser.wait(f"[...document.querySelectorAll('.processes td')].some((one) => one.innerText === '{name}')")
    browser.wait(f"{READY}.test({SENTENCE})")
    assert browser.js("document.querySelector('.system').classList.contains('good')")
    assert browser.js("document.title") == "Overview · Antiphon"
    for word in ("credits", "instance", "messages/s"):
        assert word not in browser.text("main")
    browser.click(".box[aria-label^=gateway-1]")
    browser.wait("document.querySelector('.details')?.innerText.includes('messages on the bus')")
    assert "requests so far" in browser.text(".details")
    browser.click(".details .close")
    browser.wait("!document.querySelector('.details')")
    show(browser, "topology")
    browser.wait("document.querySelector('.picture')")
    # The sentence stands on the other views as well.
    for view in ("requests", "charts"):
        show(browser, view)
        browser.wait(f"{READY}.test(document.querySelector('.statelink .system')?.innerText)")


def test_dots_move_along_the_arrows_while_requests_run(console: Served, browser: Browser):
    browser.size(1280, 800)
    browser.open(address(console, "overview"))
    browser.wait(IDLE)
    assert browser.js("document.querySelectorAll('.dots circle').length") == 0
    load(browser)
    browser.wait(FLOWS)
    browser.wait("document.querySelector('.dots circle.requests') && document.querySelector('.dots circle.tokens')")
    browser.js("window.dot = [...document.querySelectorAll('.dots circle')].at(-1), null")
    where = "dot.getAttribute('cx') + ' ' + dot.getAttribute('cy')"
    before = browser.js(where)
    browser.wait(f"{where} !== {json.dumps(before)}")
    # Who asks for little motion gets arrows whose width tells the same.
    browser.scheme("light", reduced_motion=True)
    browser.wait("!document.querySelector('.dots circle')")
    browser.wait("[...document.querySelectorAll('.arrow')].some((one) => +one.getAttribute('stroke-width') > 1.5)")
    browser.scheme("light")
    browser.wait("document.querySelector('.dots circle')")
    unload(browser)
    browser.wait(f"{IDLE} && !document.querySelector('.dots circle')")


def test_a_killed_engine_shows_at_once_and_so_does_its_return(console: Served, browser: Browser):
    browser.open(address(console, "overview"))
    browser.wait(f"{READY}.test({SENTENCE})")
    load(browser)
    browser.wait(FLOWS)
    # The process that would start the engine again stands still, so that the loss stays to be looked at.
    console.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(console.pids()["engine-2"], signal.SIGKILL)
        browser.wait("document.querySelector('.box.gone')")
        assert re.search(r"engine-2\s+lost\s+lost \d+ s ago", browser.text(".box.gone"))
        told = r"/^engine-2 was lost \d+ s ago; (its requests run on|new requests go to) engine-1\.$/"
        browser.wait(f"{told}.test({SENTENCE})")
        assert browser.js("document.querySelector('.system').classList.contains('bad')")
        broken = browser.js("[...document.querySelectorAll('.arrow.broken')].map((one) => one.dataset.key)")
        assert broken
        assert all("engine-2" in key for key in broken)
        browser.wait("document.querySelector('.arrow.tokens[data-key*=engine-1]')")
    finally:
        console.process.send_signal(signal.SIGCONT)
    browser.wait("!document.querySelector('.box.gone') && document.querySelector('.box.back[aria-label^=engine-2]')")
    browser.wait(f"/^All \\d processes are ready\\. engine-2 was lost \\d+ s ago and is back\\./.test({SENTENCE})")
    assert browser.js("document.querySelectorAll('.arrow.broken').length") == 0
    unload(browser)
    wait_until(lambda: "engine-2" in console.pids(), 60)


@pytest.mark.parametrize("width", [1280, 390])
def test_many_processes_of_a_service_are_a_box_that_opens_to_a_list(console: Served, browser: Browser, width: int):
    browser.size(width, 800, phone=width < 500)
    browser.open(address(console, "requests"))
    engines = [engine(number) for number in range(1, 13) if number not in (4, 7, 9)]
    engines += [engine(4, num_free_blocks=2), engine(7, "draining")]
    plant(browser, admin_topology=topology(*OTHERS, *engines, lost=[lost("engine-9")]))
    show(browser, "overview")
    browser.wait("document.querySelector('.box.group')")
    box = browser.text(".box.group")
    for text in ("11 engines", "22 running, 11 waiting", "10 ready, 1 draining, 1 lost", "engine-9 lost 3 s ago"):
        assert text in box
    # Beside the box of the group there are the three other processes.
    assert browser.js("document.querySelectorAll('.box').length") == 4
    assert browser.js("document.querySelectorAll('.processes tr a').length") == 0
    browser.click(".box.group")
    browser.wait("document.querySelectorAll('.processes tr a').length === 11")
    assert "engine-9" in browser.text(".processes tr.gone")
    assert browser.js("document.querySelector('.box.group').getAttribute('aria-expanded')") == "true"
    browser.click(".box.group")
    browser.wait("document.querySelectorAll('.processes tr a').length === 0")
    assert browser.js("document.documentElement.scrollWidth") <= width
    # Nothing in the picture is cut off or lies on something else.
    assert browser.js(
        "[...document.querySelectorAll('.picture li, .clients')].map((one) => one.getBoundingClientRect()).every("
        "(a, n, all) => a.left >= 0 && a.right <= innerWidth && all.every((b, m) => m === n || a.right <= b.left || "
        "b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top))"
    )


def test_images_have_their_box_and_a_server_that_is_gone_is_told(console: Served, browser: Browser):
    browser.open(address(console, "requests"))
    plant(browser, admin_topology=topology(*OTHERS, engine(1), member("vision", "vision-1")))
    show(browser, "overview")
    browser.wait("document.querySelector('.box[aria-label^=vision-1]')")
    browser.wait('document.querySelector(\'.arrow[data-key*="vision-1"][data-key*="engine-1"]\')')
    browser.js("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')), null")
    browser.wait("document.querySelector('.system.bad')?.innerText.startsWith('The server does not answer.')")
    assert browser.js("document.querySelectorAll('.box').length") == 5, "the last picture stays"


def test_a_key_that_may_not_see_the_system_sees_no_sentence(console: Served, browser: Browser):
    browser.open(address(console, "chat"))
    refusal = json.dumps({"error": {"message": "The API key 'team' lacks the scope 'admin'."}})
    browser.js(
        "(() => { window.asked = 0; const real = window.fetch; window.fetch = (url, ...more) => { "
        "if (!String(url).includes('admin/')) return real(url, ...more); window.asked += 1;"
        f"return Promise.resolve(new Response({json.dumps(refusal)}, {{status: 403}})); }}; }})()"
    )
    show(browser, "requests")
    browser.wait("document.querySelector('.filters') && window.asked && !document.querySelector('.system')")
    show(browser, "overview")
    browser.wait("document.querySelector('.system')?.innerText.includes('lacks the scope')")
    show(browser, "charts")
    browser.wait("document.querySelector('[role=alert]')?.innerText.includes('lacks the scope')")
    assert browser.js("window.asked") == 4, "nobody asks again"
