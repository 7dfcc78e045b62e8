"""Pages of strangers in a real browser, against the real system without API keys, and the page `/docs`."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.system.console.browser import Browser, find_chromium
from tests.system.console.pages import address
from tests.system.served import Served, fetch

pytestmark = pytest.mark.system
STRANGER = "evil.example"
ATTEMPTS = """
const base = 'http://127.0.0.1:%d/';
const tried = async (path, options) => {
  try { return (await fetch(base + path, options)).type; } catch (error) { return 'failed'; }
};
const text = {method: 'POST', mode: 'no-cors', headers: {'content-type': 'text/plain'}};
Promise.all([
  tried('v1/completions', {...text, body: '{"model": "antiphon-demo", "prompt": "x", "max_tokens": 2}'}),
  tried('admin/engines/engine-1/drain', {...text, body: '{"force": true}'}),
  tried('admin/engines/engine-1/drain', {...text, body: new Blob(['{"force": true}'])}),
  tried('v1/completions', {method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'}),
  tried('v1/requests', {}),
])
"""
FORM = """
(() => { const form = document.createElement('form');
  Object.assign(form, {method: 'post', enctype: 'text/plain', action: 'http://127.0.0.1:%d/admin/engines/engine-1/drain'});
  form.innerHTML = '<input name=\\'{"force": true, "x": "\\' value=\\'"}\\'>';
  document.body.append(form); form.submit(); })()
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>stranger</title><body>hello</body>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def strange_port() -> Iterator[int]:
    """The port of a web server whose pages the browser finds at the name `STRANGER`."""
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def deceived(tmp_path: Path, console: Served) -> Iterator[Browser]:
    """A browser for which the stranger's name means this machine."""
    binary = find_chromium()
    assert binary is not None
    browser = Browser(binary, tmp_path / "profile", f"--host-resolver-rules=MAP {STRANGER} 127.0.0.1")
    yield browser
    browser.close()


def work_of(served: Served) -> tuple[int, list[str]]:
    """Returns how many requests were ever made to the models, and the states of the engines."""
    requests = fetch(served, "GET", "/v1/requests?limit=100").json
    members = fetch(served, "GET", "/admin/topology").json["members"]
    return len(requests["data"]), [one["state"] for one in members if one["service"] == "engine"]


def test_a_strangers_page_does_nothing_and_reads_nothing(console: Served, deceived: Browser, strange_port: int):
    before = work_of(console)
    deceived.open(f"http://{STRANGER}:{strange_port}/")
    assert deceived.js(ATTEMPTS % console.port) == ["opaque", "opaque", "opaque", "failed", "failed"]
    assert work_of(console) == before
    deceived.js(FORM % console.port)
    deceived.wait("document.body.innerText.includes('--allowed-origins')")
    assert work_of(console) == before


def test_a_strangers_name_for_this_machine_does_not_reach_the_server(console: Served, deceived: Browser):
    for path in ("", "docs", "v1/requests", "admin/topology"):
        deceived.open(f"http://{STRANGER}:{console.port}/{path}")
        assert "--allowed-hosts" in deceived.text()


def test_a_link_from_a_strangers_page_opens_the_console(console: Served, deceived: Browser, strange_port: int):
    deceived.open(f"http://{STRANGER}:{strange_port}/")
    deceived.js(f"(() => {{ location.href = '{address(console)}'; }})()")
    deceived.wait("document.querySelectorAll('option').length")
    assert deceived.js("location.href").startswith(address(console))


def test_the_documentation_loads_nothing_from_elsewhere(console: Served, browser: Browser):
    browser.open(f"{address(console)}docs")
    browser.wait("document.querySelectorAll('.opblock').length > 30")
    browser.click("[data-path='/version']")
    browser.click(".try-out__btn")
    browser.click(".execute")
    browser.wait("document.querySelector('.live-responses-table')")
    assert [url for url in browser.requested if not url.startswith((address(console), "data:"))] == []
