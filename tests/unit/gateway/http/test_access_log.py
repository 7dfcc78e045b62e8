"""The access log: which requests have a line, and what is in it."""

import json
import logging
from typing import Any

import pytest

from antiphon.services.gateway.edge.access.call import Call, Generated
from antiphon.services.gateway.edge.http.access_log import PATH_CHARS_MAX, AccessLog
from antiphon.shared.observability.logs import JsonFormatter, LineFormatter
from antiphon.shared.security.api_keys import ApiKey

DONE = Generated(
    request_id="R1",
    model="toy",
    prompt_tokens=7,
    output_tokens=5,
    first_token_s=0.25,
    engines=("engine-1", "engine-2"),
    finish_reasons=("stop",),
    error="",
)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [LineFormatter("g-1").format(one).split(" g-1 ")[1] for one in caplog.records if one.levelno >= level]


def ended(path: str = "/v1/completions", *, method: str = "POST", status: int = 200, **given: Any) -> None:
    call = given.pop("call", Call())
    shown = given.pop("shown", path)
    log = AccessLog(is_on=given.pop("is_on", True))
    log.ended(method, path, status, 0.5, shown=shown, call=call, request_id="R1")


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "antiphon.access")


def test_a_line_says_what_was_asked_and_generated(caplog: pytest.LogCaptureFixture):
    ended(call=Call(key=ApiKey(name="a team"), client_request_id="mine", generated=DONE))
    assert lines(caplog) == [
        "POST /v1/completions 200 0.500s request_id=R1 client_request_id=mine key=a%20team model=toy prompt_tokens=7 "
        "output_tokens=5 first_token_s=0.25 engines=engine-1,engine-2 finish_reasons=stop"
    ]
    fields = json.loads(JsonFormatter("g-1").format(caplog.records[0]))
    assert (fields["status"], fields["duration_s"], fields["engines"]) == (200, 0.5, ["engine-1", "engine-2"])


def test_without_a_generation_there_is_the_request_alone(caplog: pytest.LogCaptureFixture):
    ended("/v1/model", method="GET", status=404, call=Call(error_code="not_found"))
    assert lines(caplog) == ["GET /v1/model 404 0.500s request_id=R1 error=not_found"]


@pytest.mark.parametrize(
    "path",
    ["/livez", "/readyz", "/metrics", "/", "/console/main.js", "/admin/topology", "/admin/history", "/v1/requests"],
)
def test_what_is_polled_has_a_line_on_the_level_debug_alone(path: str, caplog: pytest.LogCaptureFixture):
    ended(path, method="GET")
    assert len(lines(caplog, logging.DEBUG)) == 1
    assert lines(caplog) == []


def test_a_stranger_at_a_polled_path_is_told(caplog: pytest.LogCaptureFixture):
    ended("/admin/topology", method="GET", status=401)
    assert len(lines(caplog)) == 1


def test_requests_of_a_batch_are_not_told(caplog: pytest.LogCaptureFixture):
    ended(call=Call(in_batch=True, generated=DONE))
    assert lines(caplog) == []


def test_a_path_can_forge_nothing_and_is_bounded(caplog: pytest.LogCaptureFixture):
    ended(status=404, shown="/x 200 0.1s key=admin\r\n\x1b[2J" + "y" * 1000)
    [line] = lines(caplog)
    assert line.startswith(r"POST /x%20200%200.1s%20key=admin\x0d\n\x1b[2Jyyy")
    assert len(line) < PATH_CHARS_MAX + 100


def test_switched_off_there_is_no_line(caplog: pytest.LogCaptureFixture):
    ended(is_on=False)
    assert caplog.records == []
