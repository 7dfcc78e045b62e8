import pytest

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.edge.http.request_body import read_body, read_fields
from antiphon.shared.errors import ServiceError


def read(data: bytes):
    read_fields(data)
    return read_body(data, schemas.COMPLETION_DECODER)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{}x",
        b"nonsense",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\xff\xfe",
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
    ids=range(12),
)
def test_what_is_not_json_is_called_invalid_json(data: bytes):
    with pytest.raises(ServiceError) as raised:
        read(data)
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize("data", [b"[]", b"null", b'"text"', b"1"])
def test_a_body_that_is_no_object_is_refused(data: bytes):
    with pytest.raises(ServiceError, match="The request body must be an object"):
        read(data)


@pytest.mark.parametrize(
    ("data", "message", "param"),
    [
        (b'{"n": "2"}', "'n' must be an integer or null, not a string.", "n"),
        (b'{"n": true}', "'n' must be an integer or null, not a boolean.", "n"),
        (b'{"n": 2.0}', "'n' must be an integer or null, not a number.", "n"),
        (b'{"stream": 1}', "'stream' must be a boolean or null, not an integer.", "stream"),
        (b'{"temperature": 1e999}', "'temperature' is not valid: Number out of range.", "temperature"),
        (b'{"prompt": {}}', "'prompt' must be a string or a list or null, not an object.", "prompt"),
        (b'{"prompt": [[1, "a"]]}', "'prompt[0][1]' must be an integer, not a string.", "prompt[0][1]"),
        (
            b'{"stream_options": {"include_usage": 1}}',
            "'stream_options.include_usage' must be a boolean or null, not an integer.",
            "stream_options.include_usage",
        ),
    ],
)
def test_a_wrong_type_is_told_with_its_place(data: bytes, message: str, param: str):
    with pytest.raises(ServiceError) as raised:
        read(data)
    assert (raised.value.code, raised.value.message, raised.value.param) == ("invalid_value", message, param)
