"""The console in a real headless browser, against the real system with the demo model."""

import json
import os
import re
import signal
from threading import Thread
from typing import Any

import pytest

from tests.system.console.browser import Browser
from tests.system.console.pages import address
from tests.system.served import Served, fetch, until_the_end, wait_until

pytestmark = pytest.mark.system
QUESTION = "What is 12 + 7?"
HAS_MODEL = "[...document.querySelectorAll('option')].some((one) => one.value === 'antiphon-demo')"
LISTS_ONE = "document.querySelectorAll('tbody tr').length === 1"
COMPLETIONS = """
const complete = (body, id) => fetch('v1/completions', {
  method: 'POST', headers: {'content-type': 'application/json', 'x-request-id': id}, body: JSON.stringify(body),
}).then((reply) => reply.text());
"""


def ask(browser: Browser, text: str) -> None:
    browser.fill(".ask textarea", text)
    browser.wait("!document.querySelector('[name=send]').disabled")
    browser.key("Enter", "\r")


def finished(browser: Browser, count: int = 1) -> None:
    browser.wait(f"document.querySelectorAll('.message.assistant .facts').length >= {count}")
    browser.wait("document.querySelector('[name=send]')")


def settings(browser: Browser, **values: str) -> None:
    for name, value in values.items():
        browser.fill(f"input[name={name}]", value)


def test_a_chat_streams_and_shows_the_probabilities_of_tokens(console: Served, browser: Browser):
    browser.open(address(console))
    browser.wait(HAS_MODEL)
    settings(browser, temperature="0", max_tokens="40")
    ask(browser, QUESTION)
    finished(browser)
    assert "19" in browser.text(".message.assistant")
    assert browser.js("document.querySelectorAll('.message.assistant .token').length") > 1
    browser.hover(".message.assistant .token")
    browser.wait("document.querySelector('.probabilities')?.innerText.includes('%')")
    assert browser.js("document.querySelectorAll('.probabilities span').length") == 5
    # By keyboard, too: the tokens are one stop of the Tab key, and the arrow keys go along.
    assert browser.js("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    browser.js("document.querySelector('.token[tabindex=\"0\"]').focus()")
    browser.key("Home")
    browser.key("ArrowRight")
    assert browser.js("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    assert "first token" in browser.text(".message.assistant .facts")
    # The answer is generated anew, with the same words at temperature 0, and the conversation is no longer.
    before = browser.text(".message.assistant")
    browser.click("[name=again]")
    browser.wait("document.querySelector('[name=stop]') || true")
    finished(browser)
    assert browser.js("document.querySelectorAll('.message').length") == 2
    assert before.split("\n")[0] == browser.text(".message.assistant").split("\n")[0]
    # From the answer to its timeline.
    browser.click(".message.assistant .facts a")
    browser.wait("document.querySelector('.verdict')")
    assert all(url.startswith((f"http://127.0.0.1:{console.port}/", "data:")) for url in browser.requested)


def test_an_answer_can_be_stopped(console: Served, browser: Browser):
    browser.open(address(console, "chat"))
    settings(browser, max_tokens="1500", temperature="1.9")
    browser.click("[name=probabilities]")
    # The page itself presses the button, because the small model may end within milliseconds.
    browser.js(
        "(() => { new MutationObserver(() => {"
        "if (document.querySelector('.message.assistant')?.innerText.length)"
        "document.querySelector('[name=stop]')?.click(); })"
        ".observe(document.body, {childList: true, subtree: true, characterData: true}); })()"
    )
    ask(browser, "Tell me a very long story.")
    finished(browser)
    found = browser.text(".message.assistant .facts")
    assert "stop" in found, browser.text()  # "stopped", or the model itself had ended
    wait_until(lambda: not fetch(console, "GET", "/v1/requests?state=running").json["data"], 10)


def test_the_topology_shows_every_process(console: Served, browser: Browser):
    browser.open(address(console, "topology"))
    for name in ("gateway-1", "tokenizer-1", "engine-1", "engine-2", "detokenizer-1"):
        browser.wait(f"document.querySelector('[aria-label={name}]')")
    browser.wait("document.querySelector('[aria-label=engine-1]').innerText.includes('ready')")
    browser.wait("/messages\\/s\\s+[\\d.]+/.test(document.querySelector('[aria-label=gateway-1]').innerText)")


def test_a_request_is_found_and_its_move_to_another_engine_shows(console: Served, browser: Browser):
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    browser.open(address(console, "requests"))
    browser.js(f"{COMPLETIONS} complete({json.dumps(body)}, 'planted-1').then(() => {{ window.done = true; }}), null")

    def engine() -> str:
        found = fetch(console, "GET", "/v1/requests?q=planted-1&state=running").json["data"]
        return found[0]["engines"][0] if found and found[0]["completion_tokens"] > 5 else ""

    wait_until(lambda: bool(engine()), 20)
    os.kill(console.pids()[engine()], signal.SIGKILL)
    browser.wait("window.done", 60)
    browser.fill("input[type=search]", "planted-1")
    browser.wait(f"{LISTS_ONE} && document.querySelector('tbody').innerText.includes('completed')")
    assert "moved 1×" in browser.text("tbody")
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

    def running() -> list[Any]:
        return fetch(console, "GET", "/v1/requests?q=ahead-&state=running").json["data"]

    threads = [Thread(target=complete, args=(f"ahead-{n}",), kwargs={"max_tokens": 1000}) for n in range(6)]
    for thread in threads:
        thread.start()
    # The engines have four places together; the fifth sequence waits.
    wait_until(lambda: len(running()) > 4, 20)
    assert complete("planted-queue", max_tokens=2) == 200
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
    """Runs a request while the tokenizers stand still for about two seconds, and a few usual ones before."""

    def complete(request_id: str) -> None:
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        assert fetch(served, "POST", "/v1/completions", body, **{"X-Request-Id": request_id}).status == 200

    for number in range(6):
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

        wait_until(has_waited, 30)
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
    browser.fill("input[type=search]", "planted-tokenizer")
    browser.wait(LISTS_ONE)
    browser.wait(
        "/^One request was much slower.*planted-tokenizer/s.test(document.querySelector('.outliers').innerText)"
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
    body = json.dumps({"data": data, "num_slow": 9, "silent_gateways": [], "has_more": False})
    browser.open(address(console, "requests"))
    browser.js(
        "(() => { const real = window.fetch; window.fetch = (url, ...more) => String(url).includes('v1/requests?') "
        f"? Promise.resolve(new Response({json.dumps(body)})) : real(url, ...more); }})()"
    )
    # A list from before, too, may have nine rows that are slow: of the requests of other tests.
    browser.wait("document.querySelector('tbody tr')?.innerText.includes('job-0')")
    assert browser.js("document.querySelectorAll('tr.slow').length") == 9
    assert browser.js("document.querySelectorAll('tr.most').length") == 2
    assert browser.js("document.querySelectorAll('tbody .badge.most').length") == 2
    grounds = "[...document.querySelectorAll('tbody tr')].map((one) => getComputedStyle(one).backgroundColor)"
    found = browser.js(grounds)
    assert len({*found[:2]}) == len({*found[2:]}) == len({*found}) - 1 == 1, "the others look like any row"
    assert "slow: gateway queue 4.0 s" in browser.text("tbody tr:nth-child(3)")
    assert "decode, 62 ms a token (usual 5.5)" in browser.text("tbody tr:nth-child(10)")
    assert "decode, 6.0 ms a token" in browser.text("tbody tr:nth-child(11)")
    assert "usual" not in browser.text("tbody tr:nth-child(11)")
    # Those that stand out come first above the list, where the rule is told, too.
    assert browser.js("document.querySelectorAll('.outliers li .badge.most').length") == 2
    assert "at least 3 times as long as usual" in browser.text(".outliers")


def test_who_cancelled_a_request_is_told(console: Served, browser: Browser):
    body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    browser.open(address(console, "requests"))
    browser.js(
        "window.leaving = new AbortController(); fetch('v1/completions', {method: 'POST', signal: leaving.signal, "
        "headers: {'content-type': 'application/json', 'x-request-id': 'planted-leaver'}, "
        f"body: {json.dumps(json.dumps(body))}}}).then((reply) => reply.text()).catch(() => {{}}), null"
    )

    def in_state(state: str) -> bool:
        return bool(fetch(console, "GET", f"/v1/requests?q=planted-leaver&state={state}").json["data"])

    wait_until(lambda: in_state("running"), 20)
    browser.js("leaving.abort(), null")
    wait_until(lambda: in_state("cancelled"), 20)
    browser.open("about:blank")
    browser.open(address(console, "requests/planted-leaver"))
    browser.wait("document.querySelector('.verdict')")
    assert re.search(
        r"It was cancelled after .* m?s: the client closed the connection \(client_closed_request\)\.",
        browser.text(".verdict"),
    )


def test_an_engine_shows_its_batch_blocks_and_requests(console: Served, browser: Browser):
    browser.open(address(console, "topology"))
    # Long enough for all that is looked at. They end when the browser leaves the page.
    body = {"prompt": "x y z", "max_tokens": 1500, "n": 8, "ignore_eos": True, "stream": True}
    browser.js(f"{COMPLETIONS} for (const one of [1, 2]) complete({json.dumps(body)}, `batch-${{one}}`), null")

    def engines() -> list[str]:
        found = fetch(console, "GET", "/v1/requests?q=batch-1&state=running").json["data"]
        return found[0]["engines"] if found else []

    wait_until(lambda: bool(engines()), 20)
    name = engines()[0]
    browser.click(f"[aria-label={name}] a")
    browser.wait("document.querySelector('[aria-label=\"Requests of the engine\"]')?.innerText.includes('batch-1')")
    browser.wait("document.querySelector('meter')?.value > 0")
    for title in ("Sequences", "KV blocks", "Tokens per second", "New tokens per step"):
        browser.wait(
            f"[...document.querySelectorAll('.chart')].some((one) => one.innerText.includes({json.dumps(title)}) "
            "&& /[1-9]/.test(one.querySelector('.value')?.innerText ?? ''))"
        )
    assert "generated tokens" in browser.text("dl.card")


def test_the_model_calls_a_tool_and_gets_the_result(console: Served, browser: Browser):
    browser.open(address(console, "chat"))
    browser.wait(HAS_MODEL)
    settings(browser, temperature="0", max_tokens="120")
    browser.click("summary")
    browser.click("[name=example]")
    browser.js(
        "(() => { const one = document.querySelector('[name=tool_choice]'); one.value = 'required';"
        "one.dispatchEvent(new Event('change')); })()"
    )
    ask(browser, "What is the weather in Paris?")
    finished(browser)
    assert browser.text(".call strong") == "get_weather"
    assert "city" in json.loads(browser.text(".call code"))
    browser.fill("[name=result]", "sunny, 21 degrees")
    browser.js(
        "(() => { const one = document.querySelector('[name=tool_choice]'); one.value = 'none';"
        "one.dispatchEvent(new Event('change')); })()"
    )
    browser.click("[name=results]")
    finished(browser, 2)
    assert "sunny, 21 degrees" in browser.text(".message.tool")
    assert browser.js("document.querySelector('[role=alert]')") is None
    # What is not JSON is told at once, and nothing is sent.
    browser.fill("[name=tools]", "{oops")
    ask(browser, "And tomorrow?")
    browser.wait("document.querySelector('[role=alert]')?.innerText.includes('not JSON')")


def test_a_image_is_shown_and_a_model_without_eyes_says_so(console: Served, browser: Browser):
    browser.open(address(console, "chat"))
    browser.wait(HAS_MODEL)
    browser.js(
        "(async () => { const canvas = Object.assign(document.createElement('canvas'), {width: 8, height: 8});"
        "const data = new DataTransfer();"
        "data.items.add(new File([await new Promise((done) => canvas.toBlob(done))], 'red.png', {type: 'image/png'}));"
        "const field = document.querySelector('[name=images]'); field.files = data.files;"
        "field.dispatchEvent(new Event('change')); })()"
    )
    browser.wait("document.querySelector('.images img')?.naturalWidth === 8")
    ask(browser, "What do you see?")
    browser.wait("document.querySelector('.message.user img')?.naturalWidth === 8")
    browser.wait("document.querySelector('[role=alert]')?.innerText.includes('--enable-mm')")
    assert browser.js("document.querySelector('.images')") is None


def test_charts_move_under_load(console: Served, browser: Browser):
    browser.open(address(console, "charts"))
    body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True}
    browser.js(f"{COMPLETIONS} window.load = setInterval(() => complete({json.dumps(body)}, 'load'), 300), null")
    for title in ("Time to first token", "Inter-token latency", "Tokens per second"):
        browser.wait(
            f"[...document.querySelectorAll('.chart')].some((one) => one.innerText.includes({json.dumps(title)}) "
            "&& /[1-9]/.test(one.querySelector('.value')?.innerText ?? ''))"
        )
    browser.js("clearInterval(window.load), null")


@pytest.mark.parametrize("view", ["chat", "topology", "requests", "charts"])
def test_every_view_fits_a_phone_and_follows_the_system_s_colours(console: Served, browser: Browser, view: str):
    browser.size(360, 740, phone=True)
    grounds: set[str] = set()
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        browser.open(address(console, view))
        browser.wait("document.querySelector('main h1')")
        grounds.add(browser.js("getComputedStyle(document.body).backgroundColor"))
        assert browser.js("document.documentElement.scrollWidth") <= 360, "the page itself does not scroll sideways"
    assert len(grounds) == 2
    assert browser.js(
        "[...document.querySelectorAll('button, input, select, textarea, a')].every((one) => one.tabIndex >= 0 && "
        "(one.textContent || one.ariaLabel || one.labels?.length))"
    ), "everything can be reached with the keyboard and has a name"


def test_it_works_by_keyboard_alone(console: Served, browser: Browser):
    browser.open(address(console))
    browser.wait("document.querySelector('nav a')")
    for _ in range(2):
        browser.key("Tab")
    assert browser.js("document.activeElement.innerText") == "Topology"
    browser.key("Enter", "\r")
    browser.wait("location.hash === '#/topology' && document.querySelector('[aria-label=engine-1]')")


def test_it_asks_for_a_key_where_keys_are_on(browser: Browser):
    with until_the_end(Served("--api-keys=sk-test-1")) as served:
        browser.open(address(served))
        browser.wait("document.querySelector('dialog[open]')")
        assert "API key" in browser.text("dialog")
        browser.fill("dialog input", "sk-test-1")
        browser.key("Enter", "\r")
        browser.wait(f"!document.querySelector('dialog') && {HAS_MODEL}")
        ask(browser, QUESTION)
        finished(browser)
        assert browser.js("sessionStorage.getItem('antiphon-key')") == "sk-test-1"
        assert browser.js("Object.values(localStorage).every((one) => !one.includes('sk-test'))")
        # This server keeps no prompts and tokens: the buttons tell how to start one that does.
        browser.click(".message.assistant .facts a")
        for name in ("replay", "fork"):
            browser.click(f"button[name={name}]")
            browser.wait("document.querySelector('main').innerText.includes('antiphon serve --record-content-mb')")


def test_the_files_have_a_strict_policy_and_name_no_other_host(console: Served):
    page = fetch(console, "GET", "/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    tag = page.headers["etag"]
    assert fetch(console, "GET", "/", **{"If-None-Match": tag}).status == 304
    for name in (
        "app.js",
        "api.js",
        "style.css",
        "chat.js",
        "message.js",
        "topology.js",
        "requests.js",
        "timeline.js",
        "charts.js",
        "chart.js",
        "engine.js",
        "rerun.js",
        "phases.js",
    ):
        reply = fetch(console, "GET", f"/console/{name}")
        assert reply.status == 200
        assert b"https://" not in reply.body
        assert b"http://" not in reply.body
    assert fetch(console, "GET", "/console/LICENSES.txt").status == 404
    assert fetch(console, "GET", "/console/..%2fpage.py").status == 404
