"""An answer that runs goes on through a change of view, a reload, and the death of its engine or gateway."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.support.slow import slow_but
from tests.system.console.browser import Browser
from tests.system.console.chat_page import ask, finished, open_chat, settings
from tests.system.served import Served, fetch, frozen, slowed, wait_until

pytestmark = pytest.mark.system
QUESTION = "Tell me a story."
TOKENS = 1500
MORE = {"ignore_eos": True, "temperature": 0}
BEGUN = "document.querySelector('.turn.assistant .markdown')?.innerText.length > 20"


def whole(served: Served) -> str:
    """The answer when nothing happens."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, **MORE}
    return fetch(served, "POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]


@contextlib.contextmanager
def begun(browser: Browser, served: Served) -> Iterator[None]:
    """An answer that has begun. The engines are slow meanwhile, so that it does not end."""
    with slowed(*(pid for name, pid in served.pids().items() if name.startswith("engine"))):
        open_chat(browser, served)
        settings(browser, max_tokens=str(TOKENS), more=json.dumps(MORE))
        browser.click("[name=close-settings]")
        ask(browser, QUESTION)
        browser.wait(BEGUN)
        yield


def answer(browser: Browser) -> str:
    """The text of the finished answer, as the page has it."""
    finished(browser)
    browser.js("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }, null")
    browser.click(".turn.assistant [name=copy]")
    browser.wait("window.copied")
    assert browser.js("document.querySelector('[role=alert]')") is None
    return browser.js("copied")


def running(served: Served) -> dict[str, str]:
    """Who computes the only request that runs."""
    found = fetch(served, "GET", "/v1/requests?state=running").json["data"]
    return {"engine": found[0]["engines"][0], "gateway": found[0]["gateway"]} if found and found[0]["engines"] else {}


def kill(served: Served, which: str) -> None:
    names: dict[str, str] = {}

    def is_known() -> bool:
        names.update(running(served))
        return bool(names)

    wait_until(is_known, 60)
    os.kill(served.pids()[names[which]], signal.SIGKILL)


def view(browser: Browser, served: Served) -> None:
    browser.js("location.hash = '#/requests'")
    browser.wait("document.querySelector('main.requests h1')")
    browser.wait("document.querySelector('.conversations .runs')")
    browser.js("location.hash = '#/chat'")


def reload(browser: Browser, served: Served) -> None:
    browser.open("about:blank")
    open_chat(browser, served, "chat")


EVENTS: dict[str, Callable[[Browser, Served], None]] = {
    "view": view,
    "reload": reload,
    "engine": lambda browser, served: kill(served, "engine"),
    "gateway": lambda browser, served: kill(served, "gateway"),
}


@pytest.mark.parametrize("event", slow_but(["reload", "engine"], EVENTS))
def test_an_answer_survives(console: Served, browser: Browser, event: str):
    expected = whole(console)
    with begun(browser, console):
        EVENTS[event](browser, console)
    assert answer(browser) == expected
    usage = browser.text(".turn.assistant .facts")
    assert f"{TOKENS} tokens" in usage


@pytest.mark.slow
def test_an_answer_whose_server_was_away_for_long_goes_on_when_one_asks_for_it(console: Served, browser: Browser):
    expected = whole(console)
    # What would start the gateway again stands still, and a minute passes in the page.
    with begun(browser, console), frozen(console.process.pid):
        gateway = running(console)["gateway"]
        os.kill(console.pids()[gateway], signal.SIGKILL)
        browser.wait("document.querySelector('.turn.assistant')?.innerText.includes('connection is lost')")
        browser.js("(() => { const now = Date.now; Date.now = () => now() + 61_000; })()")
        browser.wait("document.querySelector('.turn.assistant [role=alert] [name=resume]')")
        assert "cannot be reached" in browser.text(".turn.assistant [role=alert]")
    wait_until(lambda: gateway in console.pids(), 60)
    browser.click("[name=resume]")
    assert answer(browser) == expected


def test_an_answer_of_which_nothing_is_left_says_so(console: Served, browser: Browser):
    with begun(browser, console):
        stored = "db.transaction('messages').objectStore('messages').getAll().onsuccess = ({ target }) => "
        position = browser.js(
            "new Promise((done) => { indexedDB.open('antiphon').onsuccess = ({ target: { result: db } }) => {"
            "const look = () => {"
            f"{stored} {{ const one = target.result.find((one) => one.role !== 'user' && one.content.length > 20);"
            "one ? done(one.position) : setTimeout(look, 50); }; }; look(); }; })"
        )
        browser.open("about:blank")
        # Another client ends the stream: nothing can be resumed, as after a restart of everything.
        assert fetch(console, "DELETE", f"/v1/streams/{position.partition(':')[0]}").status == 200
    open_chat(browser, console, "chat")
    browser.wait("document.querySelector('.turn.assistant [role=alert]')?.innerText.includes('rest of the answer')")
    assert browser.js(BEGUN), "what had arrived is still there"
    assert browser.js("!!document.querySelector('[name=retry]')")
