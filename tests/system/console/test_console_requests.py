"""The list of requests and the timeline of one in a real headless browser, against the real system."""

import json
import os
import re
import signal
import time
from threading import Thread
from typing import Any

import pytest

from antiphon.services.gateway.ops.timeline.slowness import ALARM_MIN
from tests.system.console.browser import Browser
from tests.system.console.pages import COMPLETIONS, address, plant
from tests.system.served import Served, fetch, slowed, wait_until

pytestmark = pytest.mark.system
LISTS_ONE = "document.querySelectorAll('tbody tr').length === 1"
COLOUR_OF_FAILURES = """
(() => { const one = document.createElement('span'); one.className = 'state-failed'; document.body.append(one);
  const found = getComputedStyle(one).color; one.remove(); return found; })()
"""


def engines(pids: dict[str, int]) -> list[int]:
    return [pid for name, pid in pids.items() if name.startswith("engine-")]


def test_a_request_is_found_and_its_move_to_another_engine_shows(console: Served, browser: Browser):
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    browser.open(address(console, "requests"))

    def engine() -> str:
        found = fetch(console, "GET", "/v1/requests?q=planted-1&state=running").json["data"]
        return found[0]["engines"][0] if found and found[0]["completion_tokens"] > 5 else ""

    pids = console.pids()
    with slowed(*engines(pids)):
        browser.js(
            f"{COMPLETIONS} complete({json.dumps(body)}, 'planted-1').then(() => {{ window.done = true; }}), null"
        )
        wait_until(lambda: bool(engine()), 60)
        os.kill(pids[engine()], signal.SIGKILL)
    browser.wait("window.done", 60)
    browser.fill("main input[type=search]", "planted-1")
    browser.wait(f"{LISTS_ONE} && document.querySelector('tbody').innerText.includes('completed')")
    assert re.search(r"moved \d×", browser.text("tbody"))
    browser.click("tbody a")
    browser.wait("document.querySelector('.verdict')")
    assert re.search(
        r"[Mm]oving from engine-\d to engine-\d \(the engine stopped responding\)", browser.text(".verdict")
    )
    assert re.search(r"move engine-\d to engine-\d \d", browser.text(".legend"))
    browser.wait("document.querySelectorAll('svg .step').length > 100")
    assert "the engine stopped responding" in browser.text("main")
    # Zoom and choose by keyboard, from the request to one step.
    whole = browser.text(".bar .note")
    browser.js("document.querySelector('svg.timeline').focus()")
    browser.key("+", "+")
    browser.wait(f"document.querySelector('.bar .note').innerText !== {json.dumps(whole)}")
    browser.key("ArrowRight")
    browser.wait("document.querySelector('p.chosen').innerText.startsWith('Step ')")
    assert "batch of" in browser.text("p.chosen")
    browser.key("0", "0")
    browser.wait(f"document.querySelector('.bar .note').innerText.slice(0, 4) === {json.dumps(whole[:4])}")
    assert browser.js("document.querySelectorAll('[aria-label=\"Longest gaps\"] tbody tr').length") == 10


def test_why_a_request_was_slow_is_read_at_a_glance(console: Served, browser: Browser):
    def complete(name: str, **body: Any) -> int:
        body = {"prompt": "x", "ignore_eos": True, **body}
        return fetch(console, "POST", "/v1/completions", body, **{"X-Request-Id": name}).status

    def first_sentence(name: str) -> str:
        browser.open("about:blank")
        browser.open(address(console, f"requests/{name}"))
        browser.wait("document.querySelector('.verdict strong')")
        return browser.text(".verdict strong")

    def running(name: str) -> list[Any]:
        return fetch(console, "GET", f"/v1/requests?q={name}&state=running").json["data"]

    threads = [Thread(target=complete, args=(f"ahead-{n}",), kwargs={"max_tokens": 1000}) for n in range(6)]
    with slowed(*engines(console.pids())):
        for thread in threads:
            thread.start()
        # The engines have four places together; the fifth sequence waits.
        wait_until(lambda: len(running("ahead-")) > 4, 60)
        threads.append(Thread(target=complete, args=("planted-queue",), kwargs={"max_tokens": 2}))
        threads[-1].start()
        wait_until(lambda: bool(running("planted-queue")), 60)
    for thread in threads:
        thread.join()
    assert re.match("Most of the time: waiting in the (queue of engine-|gateway for)", first_sentence("planted-queue"))
    # The requests that had the engines meanwhile are named, and one click away.
    assert re.search(
        r"Meanwhile, (the engines were|engine-\d was) computing \d+ other request", browser.text(".verdict")
    )
    assert set(re.findall(r"ahead-\d", browser.text(".meanwhile")))
    browser.click(".meanwhile a[href]")
    browser.wait("document.querySelector('h1 .mono')?.innerText.startsWith('ahead-')")
    assert complete("planted-prompt", prompt="word " * 1700, max_tokens=1) == 200
    assert re.match(
        r"Most of the time: computing the prompt of 1\d\d\d tokens on engine-", first_sentence("planted-prompt")
    )


def slow_tokenizer(served: Served, name: str) -> None:
    """Runs a request while the tokenizers stand still for about two seconds, and usual ones before: as many as tell."""

    def complete(request_id: str) -> None:
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        assert fetch(served, "POST", "/v1/completions", body, **{"X-Request-Id": request_id}).status == 200

    for number in range(ALARM_MIN):
        complete(f"usual-{number}")
    tokenizers = [pid for process, pid in served.pids().items() if process.startswith("tokenizer")]
    thread = Thread(target=complete, args=(name,))
    try:
        for pid in tokenizers:
            os.kill(pid, signal.SIGSTOP)
        thread.start()

        def has_waited() -> bool:
            found = fetch(served, "GET", f"/v1/requests?q={name}&state=running").json["data"]
            return bool(found) and found[0]["duration_s"] > 2

        wait_until(has_waited, 60)
    finally:
        for pid in tokenizers:
            os.kill(pid, signal.SIGCONT)
    thread.join()


def test_a_slow_request_stands_out_and_every_moment_of_it_has_a_lane(console: Served, browser: Browser):
    slow_tokenizer(console, "planted-tokenizer")
    browser.open(address(console, "requests"))
    marked = "[...document.querySelectorAll('tr.slow')].find((one) => one.innerText.includes('planted-tokenizer'))"
    browser.wait(f"/slow: tokenization \\d+\\.\\d s/.test({marked}?.innerText)")
    assert "tokenization" in browser.text("ul.legend"), "one word for one phase"
    # Durations have one unit and one number of decimals.
    durations = browser.js("[...document.querySelectorAll('td.duration')].map((one) => one.innerText)")
    assert len(durations) > 6
    assert all(re.fullmatch(r"\d+\.\d{3}", one) for one in durations), durations
    browser.click("[name=slow]")
    browser.wait("[...document.querySelectorAll('tbody tr')].every((one) => one.className.includes('slow'))")
    browser.fill("main input[type=search]", "planted-tokenizer")
    browser.wait(LISTS_ONE)
    browser.wait(
        "/^One request was slower than usual.*planted-tokenizer/s.test(document.querySelector('.outliers').textContent)"
    )
    browser.click("tbody a")
    browser.wait("document.querySelector('.verdict strong')")
    assert "turning the text into tokens on tokenizer-1" in browser.text(".verdict strong")
    assert "tokenizer-1 stood still or had other work" in browser.text(".verdict")
    assert re.search(r"No answer came from (one of the tokenizers|tokenizer-1) for \d+", browser.text(".verdict"))
    names = browser.text("dl.names")
    assert re.search(r"client's id \(X-Request-Id\)\s+planted-tokenizer", names)
    assert re.search(r"own id\s+[\w-]{10,}", names)
    assert re.search(r"API key\s+anonymous", names)
    # The lanes together are as long as the request; a moment that is shorter than a pixel is drawn as one.
    browser.wait("document.querySelector('.span[data-cause=delivery]')")
    # All in one look, because the timeline is drawn again when the page gets another width.
    axis, widths, tokenizing = browser.js(
        "[document.querySelector('svg.timeline').viewBox.baseVal.width - 104, "
        "[...document.querySelectorAll('.span rect')].map((one) => +one.getAttribute('width')), "
        "+document.querySelector('.span[data-cause=tokenization] rect').getAttribute('width')]"
    )
    assert axis - 1 <= sum(widths) <= axis + len(widths)
    assert tokenizing > axis / 4
    lanes = browser.js("[...document.querySelectorAll('svg.timeline > g > text')].map((one) => one.textContent)")
    assert {"gateway", "tokenizer-1", "gateway queue", "arrived", "written"} <= set(lanes)


def planted(number: int, **more: Any) -> dict[str, Any]:
    """A request as the list of requests gives it."""
    facts = {
        "id": f"r{number}",
        "client_request_id": f"job-{number}",
        "key": "anonymous",
        "created": 1.0,
        "engines": [],
    }
    facts |= {"state": "completed", "duration_s": 5.0, "phases": {"decode": 4.9}, "longest_phase": "decode"}
    facts |= {"time_to_first_token_s": 0.1, "prompt_tokens": 4, "completion_tokens": 80, "error_code": None}
    return {**facts, "moves": 0, "preemptions": 0, "slow": None, "token_s": 0.062, "usual_token_s": 0.0055, **more}


def test_of_many_slow_requests_few_stand_out_and_a_long_output_has_its_time_for_each_token(
    console: Served, browser: Browser
):
    slow = {"phase": "gateway_queue", "duration_s": 4.0, "usual_s": 0.0, "excess_s": 4.0}
    data = [planted(number, slow={**slow, "stands_out": number < 2}) for number in range(9)]
    data += [planted(20), planted(21, token_s=0.006)]
    body = {"data": data, "num_slow": 9, "silent_gateways": [], "has_more": False}
    browser.open(address(console, "requests"))
    plant(browser, **{"v1_requests?": body})
    # A list from before, too, may have nine rows that are slow: of the requests of other tests.
    browser.wait("document.querySelector('tbody tr')?.innerText.includes('job-0')")
    assert browser.js("document.querySelectorAll('tr.slow').length") == 9
    assert browser.js("document.querySelectorAll('tr.most').length") == 2
    assert browser.js("document.querySelectorAll('tbody .badge.most').length") == 2
    marks = "[...document.querySelectorAll('tbody tr')].map((one) => getComputedStyle(one.cells[0]).boxShadow)"
    found = browser.js(marks)
    assert len({*found[:2]}) == len({*found[2:9]}) == 1
    assert len({found[0], found[2], found[9]}) == 3, "those that stand out, the other slow ones, and any row"
    assert "slow: gateway queue 4.0 s" in browser.text("tbody tr:nth-child(3)")
    assert "decode, 62 ms a token (usual 5.5)" in browser.text("tbody tr:nth-child(10)")
    assert "decode, 6.0 ms a token" in browser.text("tbody tr:nth-child(11)")
    assert "usual" not in browser.text("tbody tr:nth-child(11)")
    # Those that stand out come first above the list, where the rule is told, too.
    assert browser.js("document.querySelectorAll('.outliers li .badge.most').length") == 2
    assert "at least 3 times as long as usual" in browser.js("document.querySelector('.outliers').textContent")
    assert browser.text(".outliers summary") == "9 requests were slower than usual"
    bad = browser.js(COLOUR_OF_FAILURES)
    marks = browser.js("[...document.querySelectorAll('.badge')].map((one) => getComputedStyle(one).color)")
    assert bad not in marks, "what is slow is no failure"


def test_who_cancelled_a_request_is_told(console: Served, browser: Browser):
    body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    browser.open(address(console, "requests"))

    def in_state(state: str) -> bool:
        return bool(fetch(console, "GET", f"/v1/requests?q=planted-leaver&state={state}").json["data"])

    with slowed(*engines(console.pids())):
        browser.js(
            "window.leaving = new AbortController(); fetch('v1/completions', {method: 'POST', signal: leaving.signal, "
            "headers: {'content-type': 'application/json', 'x-request-id': 'planted-leaver'}, "
            f"body: {json.dumps(json.dumps(body))}}}).then((reply) => reply.text()).catch(() => {{}}), null"
        )
        wait_until(lambda: in_state("running"), 60)
        browser.js("leaving.abort(), null")
        wait_until(lambda: in_state("cancelled"), 60)
    browser.open("about:blank")
    browser.open(address(console, "requests/planted-leaver"))
    browser.wait("document.querySelector('.verdict')")
    assert re.search(
        r"It was cancelled after .* m?s: the client closed the connection \(client_closed_request\)\.",
        browser.text(".verdict"),
    )


def answered(*data: dict[str, Any]) -> dict[str, Any]:
    """The answer of the list."""
    return {"data": [*data], "num_slow": 0, "silent_gateways": [], "has_more": False}


def test_only_failures_are_red_and_told_above_the_list(console: Served, browser: Browser):
    browser.open(address(console, "requests"))
    now = time.time()
    old = planted(1, state="failed", error_code="no_engine", created=now - 4000)
    plant(browser, **{"v1_requests?": answered(planted(0, created=now), old)})
    browser.wait("document.querySelector('tbody tr')?.innerText.includes('job-0')")
    assert browser.js("document.querySelector('.failures')") is None, "an old failure is no news"
    bad = browser.js(COLOUR_OF_FAILURES)
    every = "[...document.querySelectorAll('tbody *')]"
    colours = f"{every}.filter((one) => getComputedStyle(one).color === '{bad}')"
    assert browser.js(f"{colours}.map((one) => one.textContent)") == ["failed"]
    plant(browser, **{"v1_requests?": answered(planted(2, state="failed", error_code="no_engine", created=now))})
    browser.wait("document.querySelector('.failures')")
    assert re.fullmatch(r"1 request failed in the last 10 minutes\s+no_engine", browser.text(".failures"))


def test_rows_begin_with_time_and_state_and_fit_a_laptop(console: Served, browser: Browser):
    browser.size(1280, 800)
    browser.open(address(console, "requests"))
    long = planted(0, client_request_id="", id="ws2rNEElXtJsABOYBNfEPJ", engines=["engine-1", "engine-2"], moves=1)
    other = planted(1, key="another-team", slow={"phase": "gateway_queue", "duration_s": 4.0, "usual_s": 0.0})
    plant(browser, **{"v1_requests?": answered(long, other)})
    browser.wait("document.querySelector('tbody')?.innerText.includes('another-team')")
    first = browser.js("[...document.querySelector('tbody tr').cells].map((one) => one.innerText)")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", first[0])
    assert first[1].startswith("completed")
    assert first[2].split() == ["ws2rNEElXtJsABOYBNfEPJ", "key", "anonymous"], "the id is whole"
    assert browser.js("(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('.scroll'))")
    cut = (
        "[...document.querySelectorAll('td, td *')]"
        ".filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1)"
    )
    assert browser.js(f"{cut}.map((one) => one.outerHTML)") == []
    # The button beside an id puts it on the clipboard.
    browser.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }, null")
    browser.click("tbody button.copy")
    browser.wait("window.copied === 'ws2rNEElXtJsABOYBNfEPJ'")


def test_requests_are_cards_on_a_phone(console: Served, browser: Browser):
    browser.size(390, 844, phone=True)
    browser.open(address(console, "requests"))
    slow = {"phase": "gateway_queue", "duration_s": 4.0, "usual_s": 0.0}
    plant(
        browser, **{"v1_requests?": answered(planted(0, engines=["engine-1"], slow=slow), planted(1, state="failed"))}
    )
    browser.wait("document.querySelectorAll('.requestcards li').length === 2")
    assert browser.js("document.querySelector('tbody')") is None
    card = browser.text(".requestcards li")
    for text in ("completed", "5.000 s", "job-0", "slow: gateway queue 4.0 s", "4 tokens in, 80 out", "engine-1"):
        assert text in card
    assert browser.js("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('.requestcards *')].filter((one) => one.getBoundingClientRect().right > 382)"
    assert browser.js(f"{cut}.length") == 0
    browser.click(".requestcards a")
    browser.wait("location.hash === '#/requests/r0'")
