"""The console in a real headless browser, against the real system with the demo model."""

import pytest

from tests.system.console.browser import Browser
from tests.system.console.pages import address
from tests.system.served import ROOT, Served, fetch

pytestmark = pytest.mark.system
STATIC = ROOT / "services" / "gateway" / "ops" / "console" / "static"


@pytest.mark.parametrize("view", ["chat", "overview", "requests", "charts"])
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
        "[...document.querySelectorAll('button, input, select, textarea, a')].filter((one) => one.checkVisibility())"
        ".every((one) => one.tabIndex >= 0 && (one.textContent || one.ariaLabel || one.labels?.length))"
    ), "everything can be reached with the keyboard and has a name"


def test_it_works_by_keyboard_alone(console: Served, browser: Browser):
    browser.open(address(console, "requests"))
    browser.wait("document.querySelector('.filters')")
    for _ in range(3):  # the link to the content, the chat, and the overview
        browser.key("Tab")
    assert browser.js("document.activeElement.innerText") == "Overview"
    browser.key("Enter", "\r")
    browser.wait("location.hash === '#/overview' && document.querySelector('.box')")


def test_the_files_have_a_strict_policy_and_name_no_other_host(console: Served):
    page = fetch(console, "GET", "/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    tag = page.headers["etag"]
    assert fetch(console, "GET", "/", **{"If-None-Match": tag}).status == 304
    names = [path.relative_to(STATIC) for path in STATIC.rglob("*.js")]
    assert len(names) > 15
    for name in names:
        reply = fetch(console, "GET", f"/console/{name}")
        assert reply.status == 200
        if name.parts[0] != "vendor" and "swagger" not in name.name:
            assert b"https://" not in reply.body
            assert b"http://" not in reply.body.replace(b"http://www.w3.org/2000/svg", b"")
    assert fetch(console, "GET", "/console/vendor/LICENSES.txt").status == 404
    assert fetch(console, "GET", "/console/..%2fpage.py").status == 404
