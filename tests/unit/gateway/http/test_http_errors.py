import json

import pytest
from starlette.exceptions import HTTPException

from antiphon.services.gateway.edge.http.errors import as_service_error, error_body, error_response
from antiphon.shared.errors import CODES, ServiceError


@pytest.mark.spec("S-API-081")
@pytest.mark.parametrize("code", CODES)
def test_every_code_becomes_an_error_object_with_its_status(code: str):
    response = error_response(ServiceError(code, "Sorry.", param="n"))
    assert response.status_code == CODES[code].status
    expected = {"message": "Sorry.", "type": CODES[code].type, "param": "n", "code": code}
    assert json.loads(bytes(response.body)) == {"error": expected}
    assert response.headers["content-type"] == "application/json"
    assert ("retry-after" in response.headers) == CODES[code].retryable
    assert ("retry-after-ms" in response.headers) == CODES[code].retryable


def test_no_parameter_is_null():
    assert json.loads(error_body(ServiceError("timeout", "x")))["error"]["param"] is None


def test_times_to_retry_spread_out_above_what_was_asked_for():
    replies = [error_response(ServiceError("draining", "x", retry_after_s=4.0)) for _ in range(50)]
    waits = [int(reply.headers["retry-after-ms"]) for reply in replies]
    assert all(4000 <= wait <= 5000 for wait in waits)
    assert len(set(waits)) > 10
    assert all(4 <= int(reply.headers["retry-after"]) <= 5 for reply in replies)


def test_an_unexpected_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture):
    error = as_service_error(KeyError("secret"))
    assert error.code == "internal_error"
    assert "secret" not in error.message
    assert "secret" in caplog.text


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_value"), (404, "not_found"), (413, "request_too_large")])
def test_the_framework_s_own_errors_have_codes_too(status: int, code: str):
    assert as_service_error(HTTPException(status, "Bad")).code == code
