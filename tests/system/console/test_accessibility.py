"""Every view of the console, checked by axe-core in light, dark and at the width of a phone, and walked by keyboard."""

from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from tests.system.console import chat_screenshots
from tests.system.console.browser import Browser
from tests.system.console.chat_page import ask, settings
from tests.system.console.pages import address, plant, show
from tests.system.served import Served, fetch

pytestmark = pytest.mark.system
LOOKS = (("light", 1280, 900), ("dark", 1280, 900), ("light", 390, 844), ("dark", 390, 844))
AXE = (resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
FOUND = """
axe.run(document).then((found) => ({passed: found.passes.map((one) => one.id), violated: found.violations
  .map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(' | ')}`)}))
"""
CONTROLS = """
[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
  .filter((one) => !one.disabled && one.tabIndex >= 0 && one.checkVisibility({visibilityProperty: true}))
"""
# The name of a control, so that one can be told from another.
NAME = "(one) => `${one.tagName} ${one.name || one.ariaLabel || one.textContent.slice(0, 40)}`"
HAS_OUTLINE = """
(() => { const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1; })()
"""


def answer(served: Served) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
    assert fetch(served, "POST", "/v1/completions", body, **{"X-Request-Id": "seen"}).status == 200


def chat(browser: Browser, served: Served) -> None:
    """With Markdown, thinking, a failed turn and the settings."""
    chat_screenshots.answer(browser, served)
    chat_screenshots.settings_of(browser, served)
    settings(browser, tools="{oops")
    ask(browser, "And now?")
    browser.wait("document.querySelector('.composer [role=alert]')")


def tokens(browser: Browser, served: Served) -> None:
    """An answer with the probabilities of its tokens, and the actions of its conversation."""
    chat_screenshots.tokens(browser, served)
    browser.click(".conversations [name=more]")
    browser.wait("document.querySelector('.conversations [name=rename]')")


def overview(browser: Browser, served: Served) -> None:
    """With the details of a process."""
    browser.open(address(served, "overview"))
    browser.wait("document.querySelector('.box[aria-label^=engine-2]')")
    browser.click(".box[aria-label^=gateway-1]")
    browser.wait("document.querySelector('.details')")


def trouble(browser: Browser, served: Served) -> None:
    """An overview with a lost engine among many."""
    found = fetch(served, "GET", "/admin/topology").json
    [one, *_] = [each for each in found["members"] if each["service"] == "engine"]
    found["members"] += [{**one, "id": f"more-{number}", "instance_id": f"more-{number}"} for number in range(9)]
    gone = {"id": "tokenizer-9", "instance_id": "x", "age_s": 3.0, "reason": "its process ended"}
    browser.open(address(served, "requests"))
    plant(browser, admin_topology={**found, "lost": [{"service": "tokenizer", **gone}]})
    show(browser, "overview")
    browser.wait("document.querySelector('.box.group') && document.querySelector('.box.gone')")


def engine(browser: Browser, served: Served) -> None:
    browser.open(address(served, "topology/engine-1"))
    browser.wait("document.querySelectorAll('.chart canvas').length > 4")


def requests(browser: Browser, served: Served) -> None:
    answer(served)
    browser.open(address(served, "requests"))
    browser.wait("document.querySelector('tbody tr')")


def timeline(browser: Browser, served: Served) -> None:
    """A finished request that was replayed and forked."""
    answer(served)
    browser.open(address(served, "requests/seen"))
    browser.click("[role=option]:nth-child(5)")
    browser.click("[name=fork]")
    browser.wait("document.querySelector('.pane a')")
    browser.click("[name=replay]")
    browser.wait("document.querySelector('.comparison .equal')")
    browser.wait("document.querySelector('svg .step')")


def charts(browser: Browser, served: Served) -> None:
    browser.open(address(served, "charts"))
    browser.wait("document.querySelectorAll('.chart canvas').length > 4")


def key(browser: Browser, served: Served) -> None:
    """The question for a key, over a view."""
    overview(browser, served)
    browser.click("[name=key]")
    browser.wait("document.querySelector('dialog[open]')")


VIEWS: tuple[Callable[[Browser, Served], None], ...] = (
    chat,
    tokens,
    overview,
    trouble,
    engine,
    requests,
    timeline,
    charts,
    key,
)


def violations(browser: Browser) -> list[str]:
    if not browser.js("'axe' in window"):
        browser.js(f"{AXE}; null")
    found = browser.js(FOUND)
    assert {"color-contrast", "label", "button-name"} & set(found["passed"]), "axe has looked at the page"
    return found["violated"]


def walk(browser: Browser, most: int) -> list[Any]:
    """Presses Tab until a control is reached again. Returns the numbers of the controls in `CONTROLS`, in order."""
    seen: list[Any] = []
    for _ in range(most):
        browser.key("Tab")
        number = browser.js(f"{CONTROLS}.indexOf(document.activeElement)")
        if number in seen:
            break
        if number >= 0:
            seen.append(number)
            where = browser.js(f"({NAME})(document.activeElement)")
            assert browser.js(HAS_OUTLINE), f"the focus on {where} cannot be seen"
    return seen


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_axe_finds_nothing_and_tab_reaches_every_control(
    console: Served, browser: Browser, view: Callable[[Browser, Served], None]
):
    view(browser, console)
    for scheme, width, height in reversed(LOOKS):
        browser.size(width, height, phone=width < 500)
        browser.scheme(scheme)
        assert violations(browser) == [], (scheme, width)
        assert browser.js("document.documentElement.scrollWidth") <= width, "the page itself does not scroll sideways"
    if view is key:
        return  # a modal dialog keeps the focus until it is closed
    browser.js("document.activeElement.blur(), document.body.tabIndex = -1, document.body.focus(), null")
    count = browser.js(f"{CONTROLS}.length")
    seen = walk(browser, count + 3)
    missed = [browser.js(f"({NAME})({CONTROLS}[{number}])") for number in set(range(count)) - set(seen)]
    assert missed == []
    assert count > 5


def test_axe_sees_what_is_wrong(console: Served, browser: Browser):
    overview(browser, console)
    browser.js("document.querySelector('h1').style.color = 'var(--line)', null")
    browser.js("document.querySelector('select').ariaLabel = '', null")
    found = violations(browser)
    assert [one.partition(":")[0] for one in found] == ["color-contrast", "select-name"]


def test_the_question_for_a_key_ends_with_escape_and_gives_the_focus_back(console: Served, browser: Browser):
    overview(browser, console)
    browser.js("document.querySelector('[name=key]').focus()")
    browser.key("Enter", "\r")
    browser.wait("document.activeElement.type === 'password'")
    # The dialog is modal: the controls behind it are out of reach.
    for _ in range(8):
        browser.key("Tab")
        assert browser.js("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    browser.key("Escape")
    browser.wait("!document.querySelector('dialog')")
    assert browser.js("document.activeElement.name") == "key"
