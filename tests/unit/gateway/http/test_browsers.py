"""Which requests may be those of a stranger's page: by method, path and headers, with API keys and without."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.edge.http.browsers import BrowserRules
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError

HERE = "127.0.0.1:8000"
GENERATE, ADMIN = "/v1/completions", "/admin/models"
JSON = {"content-type": "application/json", "content-length": "2"}


def refusal(
    method: str, path: str, headers: dict[str, str], *, has_keys: bool = False, hosts: str = "", origins: str = ""
) -> str:
    """Returns the message with which a request is refused, empty if it is accepted."""
    settings = GatewaySettings(host="gpu.lan", allowed_hosts=hosts, allowed_origins=origins)
    given = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    try:
        BrowserRules(settings, has_keys=has_keys).check(method, path, given)
    except ServiceError as error:
        return f"{error.status} {error.message}"
    return ""


OWN_HOSTS = [
    "localhost", "LocalHost:8000", "localhost.", "app.localhost:8000", "127.0.0.1", "127.9.9.9:1", "[::1]:8000",
    "[::1]", "0.0.0.0:8000", "192.168.1.7:8000", "8.8.8.8", "[fe80::1]:80", "gpu.lan", "GPU.lan:8000",
    socket.gethostname(),
    f"{socket.gethostname()}.local:8000", "host.docker.internal:8000", "host.containers.internal:8000", "",
]  # fmt: skip
STRANGE_HOSTS = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost", "gateway",
    "host.docker.internal.evil.example", "1e100.net", "[evil]:80", "0x7f.1.evil", "evil.example.", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_a_host_of_this_machine_is_accepted(host: str) -> None:
    for path in (GENERATE, ADMIN, "/", "/metrics"):
        for has_keys in (False, True):
            assert not refusal("GET", path, {"host": host}, has_keys=has_keys)


@pytest.mark.parametrize("host", STRANGE_HOSTS)
def test_another_name_is_refused_and_the_message_says_how_to_allow_it(host: str) -> None:
    for path in ("/", "/docs", "/v1/requests", GENERATE, ADMIN, "/metrics"):
        said = refusal("GET", path, {"host": host})
        assert said.startswith("403 ")
        assert "--allowed-hosts" in said
        assert len(said) < 500
    assert not refusal("GET", "/readyz", {"host": host}), "probes of balancers"
    assert not refusal("POST", GENERATE, {"host": host}, has_keys=True)
    assert refusal("GET", "/v1/load_lora_adapter", {"host": host}, has_keys=True)
    assert not refusal("GET", ADMIN, {"host": host}, hosts='["*"]')


def test_a_name_can_be_allowed_and_a_request_without_a_name_is_no_browsers() -> None:
    assert not refusal("GET", ADMIN, {"host": "LLM.example.org:443"}, hosts='["other", "llm.Example.org"]')
    assert refusal("GET", ADMIN, {"host": "sub.llm.example.org"}, hosts='["llm.example.org"]')
    assert not refusal("GET", ADMIN, {})


OWN_ORIGINS = [
    "http://127.0.0.1:8000", "https://127.0.0.1:8000", "http://localhost:3000", "https://app.localhost", "http://[::1]:1",
    "http://0.0.0.0:5173", "https://tauri.localhost", "tauri://localhost", "app://obsidian.md", "file://",
    "vscode-webview://0abc", "vscode-file://vscode-app", "chrome-extension://abc", "moz-extension://abc",
]  # fmt: skip
STRANGE_ORIGINS = [
    "http://evil.example", "https://evil.example:8000", "null", "", "http://127.0.0.1.evil.example", "http://6.6.6.6",
    "http://192.168.1.9:8000", "https://localhost.evil.example", "http://evil.example#127.0.0.1", "ftp://localhost",
    "\xff",
]  # fmt: skip


@pytest.mark.parametrize("origin", OWN_ORIGINS)
def test_pages_of_this_machine_are_accepted(origin: str) -> None:
    for site in ({}, {"sec-fetch-site": "cross-site"}):
        assert not refusal("POST", ADMIN, {"host": HERE, "origin": origin, **site, **JSON})


@pytest.mark.parametrize("origin", STRANGE_ORIGINS)
def test_pages_of_strangers_are_refused_unless_they_are_allowed(origin: str) -> None:
    headers = {"host": HERE, "origin": origin, **JSON}
    for path in (GENERATE, ADMIN, "/", "/v1/files"):
        said = refusal("POST", path, headers)
        assert said.startswith("403 ")
        assert "--allowed-origins" in said
        assert not refusal("POST", path, headers, origins='["*"]')
    assert not refusal("POST", GENERATE, headers, has_keys=True), "the key is the proof"
    assert refusal("POST", ADMIN, headers, has_keys=True)


def test_a_named_origin_is_accepted_and_no_other() -> None:
    headers = {"host": HERE, "origin": "https://app.example", "sec-fetch-site": "cross-site", **JSON}
    assert not refusal("POST", GENERATE, headers, origins='["https://app.example"]')
    assert refusal("POST", GENERATE, headers, origins='["https://app.example:444", "http://app.example"]')


def test_a_server_behind_a_proxy_knows_its_own_pages() -> None:
    hosts = '["llm.example.org"]'
    own = {"host": "llm.example.org", "origin": "https://llm.example.org", **JSON}
    assert not refusal("POST", GENERATE, own, hosts=hosts)
    assert not refusal("POST", GENERATE, {**own, "host": "llm.example.org:443"}, hosts=hosts)
    replaced = {**own, "host": "127.0.0.1:8000"}
    assert refusal("POST", GENERATE, replaced, hosts=hosts)
    assert not refusal("POST", GENERATE, {**replaced, "sec-fetch-site": "same-origin"}, hosts=hosts)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_of_another_sites_requests_only_links_to_pages_are_followed(site: str) -> None:
    link = {"host": HERE, "sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for path in ("/", "/console/index.html", "/docs", "/openapi.json", "/version"):
        assert not refusal("GET", path, link)
        assert refusal("POST", path, link)
        assert refusal("GET", path, {**link, "sec-fetch-dest": "iframe"})
        assert refusal("GET", path, {**link, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"})
    for path in ("/metrics", "/admin/topology", "/v1/requests", GENERATE):
        assert "--allowed-origins" in refusal("GET", path, link)
    assert not refusal("GET", "/v1/requests", {**link, "sec-fetch-site": "same-origin"})
    assert not refusal("GET", "/", {**link, "sec-fetch-site": "none"})


def test_a_browser_must_call_json_json_and_other_programs_need_not() -> None:
    page = {"host": HERE, "origin": "http://localhost:3000", "content-length": "2"}
    for kind in (
        "application/json",
        "application/json; charset=utf-8",
        "Application/LD+JSON",
        "multipart/form-data; boundary=B",
    ):
        assert not refusal("POST", GENERATE, {**page, "content-type": kind})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "text/plain;application/json", "text/x+json"):
        said = refusal("POST", GENERATE, {**page, "content-type": kind})
        assert said.startswith("400 ")
        assert "application/json" in said
    assert refusal("POST", GENERATE, page), "a blob without a type"
    assert refusal("POST", GENERATE, {"host": HERE, "sec-fetch-site": "same-origin", "transfer-encoding": "chunked"})
    assert not refusal("POST", "/admin/engines/engine-1/resume", {**page, "content-length": "0"})
    # curl without a header, as in Ollama's documentation; Node's fetch
    for other in ({"content-type": "application/x-www-form-urlencoded"}, {"sec-fetch-mode": "cors"}, {}):
        assert not refusal("POST", "/api/chat", {"host": HERE, "content-length": "2", **other})


NAMES = ("host", "origin", "sec-fetch-site", "sec-fetch-mode", "content-type", "content-length")


@given(st.dictionaries(st.sampled_from(NAMES), st.text(st.characters(max_codepoint=255), max_size=40)), st.booleans())
def test_no_header_is_more_than_a_refusal(headers: dict[str, str], has_keys: bool) -> None:
    for path in (GENERATE, ADMIN):
        said = refusal("POST", path, headers, has_keys=has_keys)
        assert said[:3] in ("", "400", "403")
