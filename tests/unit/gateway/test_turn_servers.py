"""Where requests to MCP servers may go, and what the operator's file may say."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.gateway.guests.turns.mcp.errors import ToolFailedError
from antiphon.services.gateway.guests.turns.mcp.outbound import connected, stranger
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.mcp_servers import read_mcp_servers

ALLOWED = ("mcp.example.com", ".example.org", "10.0.0.1")


def test_an_allowed_host_is_taken() -> None:
    target = stranger("https://a.example.org/mcp?x=1", ALLOWED, "tools[0].server_url")
    assert (target.host, target.port, target.path, target.only_public) == ("a.example.org", 443, "/mcp?x=1", True)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/mcp",
        "https://mcp.example.com.evil.net/",
        "https://mcp.example.com:8443/",
        "https://user@mcp.example.com/",
        "ftp://mcp.example.com/",
        "//mcp.example.com/",
        "https://[::1/",
        "http://127.0.0.1/",
        "",
    ],
)
def test_a_url_leads_only_to_allowed_hosts(url: str) -> None:
    with pytest.raises(ServiceError) as error:
        stranger(url, ALLOWED, "tools[0].server_url")
    assert (error.value.code, error.value.param) == ("invalid_value", "tools[0].server_url")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fd00::1"])
def test_an_address_inside_a_network_is_not_connected_to(address: str) -> None:
    target = stranger("http://mcp.example.com/", ALLOWED, "tools[0].server_url")
    for addresses in ([address], ["93.184.216.34", address]):
        with pytest.raises(ToolFailedError, match="inside a private network"):
            connected(target, time.monotonic() + 1, addresses_of=lambda host, port, found=addresses: found)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "must have JSON"),
        ({"servers": {"a": {"url": "http://a/", "other": 1}}}, "other"),
        ({"servers": {"a": {"url": "file:///a"}}}, "'a' must have a URL"),
        ({"servers": {"a": {"url": "http://a:99999/"}}}, "'a' must have a URL"),
        ({"servers": {"a": {"url": "http://a/", "timeout_s": 0}}}, "timeout_s"),
        ({"servers": {"a": {"url": "http://a/", "headers": {"A\n": "b"}}}}, "header"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: Any, told: str) -> None:
    file = tmp_path / "servers.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SettingsError, match=told):
        read_mcp_servers(str(file))
    with pytest.raises(SettingsError, match="cannot be read"):
        read_mcp_servers(str(tmp_path / "none"))
    assert read_mcp_servers("") == {}
