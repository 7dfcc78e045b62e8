"""Drives the chat page: asks, waits, and plants answers that a small model would not give. No fixtures."""

import json
from collections.abc import Sequence
from typing import Any

from tests.system.console.browser import Browser
from tests.system.console.pages import address
from tests.system.served import Served

HAS_MODEL = "[...document.querySelectorAll('[name=model] option')].some((one) => one.value === 'antiphon-demo')"
LAST = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
PLANT = """
(() => { const real = window.fetch; window.bodies = []; window.holdAt = null; window.fetch = (url, options = {}) => {
  if (!String(url).includes('chat/completions')) return real(url, options);
  window.bodies.push(JSON.parse(options.body));
  const chunks = %(chunks)s, encoder = new TextEncoder();
  let at = 0;
  const body = new ReadableStream({ async pull(controller) {
    if (at === window.holdAt) await new Promise((go) => { window.release = go; });
    if (%(pause_ms)s && at %% 20 === 0) await new Promise((go) => setTimeout(go, 20 * %(pause_ms)s));
    if (at < chunks.length) controller.enqueue(encoder.encode(`data: ${JSON.stringify(chunks[at++])}\\n\\n`));
    else { controller.enqueue(encoder.encode('data: [DONE]\\n\\n')); controller.close(); }
  } });
  return Promise.resolve(new Response(body, { headers: { 'content-type': 'text/event-stream' } }));
}; })(), null
"""


def open_chat(browser: Browser, served: Served, view: str = "chat/new") -> None:
    browser.open(address(served, view))
    browser.wait(f"document.querySelector('.composer') && {HAS_MODEL}")
    # Questions of the page are answered with yes: a real dialog would hold the test.
    browser.js("window.asked = [], window.confirm = (question) => { window.asked.push(question); return true; }, null")


def ask(browser: Browser, text: str) -> None:
    browser.fill(".ask textarea", text)
    browser.wait("!document.querySelector('[name=send]').disabled")
    browser.key("Enter", "\r")


def finished(browser: Browser, count: int = 1) -> None:
    browser.wait(f"document.querySelectorAll('.turn.assistant .facts a').length >= {count}")
    browser.wait("document.querySelector('[name=send]')")


def settings(browser: Browser, **values: str) -> None:
    """Fills fields of the drawer, which stays open."""
    if not browser.js("!!document.querySelector('.drawer')"):
        browser.click("[name=settings]")
    for name, value in values.items():
        browser.fill(f".drawer [name={name}]", value)


def choose(browser: Browser, selector: str, value: str) -> None:
    """Chooses an option of a `select`."""
    browser.wait(f"document.querySelector({json.dumps(selector)})")
    browser.js(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.value = {json.dumps(value)};"
        "one.dispatchEvent(new Event('change')); })()"
    )


def give_files(browser: Browser, *files: tuple[str, str, str]) -> None:
    """Attaches files by the button's field. `files`: name, type, and the content as an expression of JavaScript."""
    made = ", ".join(f"new File([{content}], {json.dumps(name)}, {{type: '{kind}'}})" for name, kind, content in files)
    browser.js(
        f"(async () => {{ const data = new DataTransfer(); for (const one of [{made}]) data.items.add(one);"
        "const field = document.querySelector('[name=files]'); field.files = data.files;"
        "field.dispatchEvent(new Event('change')); })()"
    )


def plant(
    browser: Browser, deltas: Sequence[dict[str, Any]], *, pause_ms: float = 0, probabilities: bool = False
) -> None:
    """Answers the next requests of the page with these deltas. `window.holdAt`: the chunk before which it waits.

    `pause_ms`: between two deltas, on average. `probabilities`: each delta is a token that has some.
    """
    head = {"id": "chatcmpl-planted", "model": "planted"}

    def choice(delta: dict[str, Any]) -> dict[str, Any]:
        top = [{"token": f"{number}", "logprob": -1.0 - number} for number in range(5)]
        content = [{"token": delta.get("content", ""), "logprob": -0.5, "top_logprobs": top}]
        logprobs = {"logprobs": {"content": content}} if probabilities else {}
        return {"index": 0, "delta": delta, "finish_reason": None, **logprobs}

    chunks = [{**head, "choices": [choice(delta)]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({**head, "choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": len(deltas)}})
    browser.js(PLANT % {"chunks": json.dumps(chunks), "pause_ms": pause_ms})


def pieces(text: str, size: int = 5) -> list[dict[str, Any]]:
    """A text in pieces, as a stream has them."""
    return [{"content": text[start : start + size]} for start in range(0, len(text), size)]
