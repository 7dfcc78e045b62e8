"""Addresses of the console's views, and what its tests do in pages. No fixtures."""

import json
from typing import Any

from tests.system.console.browser import Browser
from tests.system.served import Served

COMPLETIONS = """
const complete = (body, id) => fetch('v1/completions', {
  method: 'POST', headers: {'content-type': 'application/json', 'x-request-id': id}, body: JSON.stringify(body),
}).then((reply) => reply.text());
"""


def address(served: Served, view: str = "") -> str:
    return f"http://127.0.0.1:{served.port}/{view and '#/' + view}"


def show(browser: Browser, view: str) -> None:
    """Goes to another view of the page that is open."""
    browser.js(f"location.hash = '#/{view}', null")


def plant(browser: Browser, **answers: Any) -> None:
    """Answers what the page asks for from now on: values by a part of the address, with `_` for `/`."""
    found = {path.replace("_", "/"): json.dumps(body) for path, body in answers.items()}
    browser.js(
        "(() => { window.fetched ??= window.fetch; const real = window.fetched;"
        f"const planted = Object.entries({json.dumps(found)});"
        "window.fetch = (url, ...more) => { const one = planted.find(([part]) => String(url).includes(part));"
        "return one ? Promise.resolve(new Response(one[1])) : real(url, ...more); }; })()"
    )


def load(browser: Browser, tokens: int = 60) -> None:
    """Sends requests from the page, several at the same time, until `unload`."""
    body = json.dumps({"prompt": "x y z", "max_tokens": tokens, "ignore_eos": True})
    browser.js(f"{COMPLETIONS} window.load = setInterval(() => complete({body}, 'load'), 250), null")


def unload(browser: Browser) -> None:
    browser.js("clearInterval(window.load), null")
