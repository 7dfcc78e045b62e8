import pytest

from services.gateway.openai.parameter_names import renamed
from shared.errors import ServiceError


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("'stop' is long.", "stop", ("'stops' is long.", "stops")),
        ("'stop[1].x' is long.", "stop[1].x", ("'stops[1].x' is long.", "stops[1].x")),
        ("'stopper' and stop.", "stopper", ("'stopper' and stop.", "stopper")),
        ("Nothing.", "", ("Nothing.", "")),
    ],
)
def test_errors_name_the_parameter_that_the_client_sent(message: str, param: str, expected: tuple[str, str]):
    with pytest.raises(ServiceError) as raised, renamed({"stop": "stops"}):
        raise ServiceError("invalid_value", message, param=param)
    assert (raised.value.message, raised.value.param) == expected
