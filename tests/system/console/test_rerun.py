"""The console's view of a request runs it again, and forks it from one of its tokens."""

import json

import pytest

from tests.system.console.browser import Browser
from tests.system.console.pages import address
from tests.system.served import Served, fetch

pytestmark = pytest.mark.system
STORY = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 7}
CHOSEN = "document.querySelector('.tokens [aria-selected=true]')"
# The page's own request for a replay, with the token OTHER at position 5 of what was recorded.
CHANGED = """
(() => { const send = window.fetch; window.fetch = async (path, options) => {
  if (!String(path).endsWith('/replay')) return send(path, options);
  const record = await (await send(String(path).replace(/replay$/, 'record'))).json();
  record.sequences[0].token_ids[5] = OTHER;
  return send('v1/replay', {...options, body: JSON.stringify({record})});
}; })()
"""


def planted(served: Served, name: str, **more: object) -> str:
    """Returns the text of a request with this name."""
    answer = fetch(served, "POST", "/v1/completions", {**STORY, **more}, **{"X-Request-Id": name})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


def likely_token(served: Served, position: int) -> int:
    """Returns a token that the story does not have at a position, and that is among the likeliest there."""
    body = {**STORY, "logprobs": 5, "return_tokens_as_token_ids": True}
    found = fetch(served, "POST", "/v1/completions", body).json["choices"][0]["logprobs"]
    others = [token for token in found["top_logprobs"][position] if token != found["tokens"][position]]
    return int(others[0].removeprefix("token_id:"))


def open_output(browser: Browser, served: Served, name: str) -> None:
    browser.open(address(served, f"requests/{name}"))
    browser.wait("document.querySelectorAll('.tokens [role=option]').length === 40")


def test_a_fork_streams_from_a_chosen_token_and_leads_to_its_own_timeline(console: Served, browser: Browser):
    whole = planted(console, "fork-me")
    open_output(browser, console, "fork-me")
    assert browser.js("document.querySelector('form.fork button').disabled"), "no token is chosen yet"
    # By keyboard: choose the eleventh token, go to the form, change a parameter, submit.
    browser.js("document.querySelector('.tokens').focus()")
    for _ in range(2):
        browser.key("ArrowRight")
    browser.key("ArrowDown")
    browser.wait(f"{CHOSEN}?.id === 'token-11'")
    browser.wait("document.querySelector('p.chosen')?.innerText.includes('1 new')")
    browser.key("Enter", "\r")
    assert browser.js("document.activeElement.name") == "temperature"
    browser.fill("form.fork [name=seed]", "8")
    browser.key("Enter", "\r")
    browser.wait("document.querySelector('.pane .facts')?.innerText.includes('length')")
    kept = browser.js("document.querySelector('.pane .kept').textContent")
    assert kept
    assert whole.startswith(kept)
    assert whole not in browser.js("document.querySelector('.pane').textContent"), "another seed gives another output"
    # The same parameters give the recorded output.
    browser.fill("form.fork [name=seed]", "7")
    browser.click("form.fork [name=fork]")
    browser.wait(f"document.querySelector('.pane').textContent.startsWith({json.dumps(whole)})")
    browser.wait("document.querySelector('.pane a')")
    browser.click(".pane a")
    browser.wait("document.querySelectorAll('.tokens .begun').length === 11")
    # What cannot be is told by the server.
    browser.js("document.querySelector('#token-30').click()")
    browser.fill("form.fork [name=max_tokens]", "5")
    browser.click("form.fork [name=fork]")
    browser.wait("document.querySelector('[role=alert]')?.innerText.includes('max_tokens')")


def test_a_replay_is_equal_or_shows_the_first_difference_with_its_gap(console: Served, browser: Browser):
    planted(console, "replay-me")
    open_output(browser, console, "replay-me")
    browser.click("[name=replay]")
    browser.wait("document.querySelector('.comparison .equal')?.innerText.includes('all 40 tokens')")
    browser.js(CHANGED.replace("OTHER", str(likely_token(console, 5))))
    browser.click("[name=replay]")
    browser.wait("document.querySelector('.comparison .difference')")
    shown = browser.text(".comparison")
    assert "Output 0 first differs at position 5 of 40." in shown
    assert "log probability -" in shown
    assert "gap of the log probabilities" in shown
    browser.click(".difference button")
    browser.wait(f"{CHOSEN}?.id === 'token-5' && {CHOSEN}.classList.contains('differs')")
    browser.click(".comparison a")
    browser.wait("!document.querySelector('.comparison .difference') && document.querySelector('.verdict')")


def test_several_outputs_and_a_beam_search(console: Served, browser: Browser):
    planted(console, "two-outputs", n=2)
    open_output(browser, console, "two-outputs")
    first = browser.text(".tokens")
    browser.js(
        "(() => { const one = document.querySelector('[name=sequence]'); one.value = '1';"
        "one.dispatchEvent(new Event('change')); })()"
    )
    browser.wait(f"document.querySelector('.tokens').innerText !== {json.dumps(first)}")
    planted(console, "a-beam-search", use_beam_search=True, best_of=2, temperature=0, seed=None)
    open_output(browser, console, "a-beam-search")
    assert "cannot be forked" in browser.text("main")
    browser.click("[name=replay]")
    browser.wait("document.querySelector('.comparison .equal')")
