import pytest

from antiphon.services.gateway.apis.openai.bodies.parameter_names import in_names, new_name, renamed
from antiphon.shared.errors import ServiceError


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


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("tools[12].function.parameters", "tools[12].schema"),
        ("tools[].function.parameters", "tools[].schema"),
        ("tools[3].function.name", "tools[3].name"),
        ("tools[3].functions", "tools[3].functions"),
        ("tools", "tools"),
    ],
)
def test_a_name_may_have_the_number_of_an_element(param: str, expected: str):
    names = {"tools[].function.parameters": "tools[].schema", "tools[].function": "tools[]"}
    assert new_name(param, names) == expected
    with pytest.raises(ServiceError) as raised, renamed(names):
        raise ServiceError("invalid_value", f"'{param}' is wrong.", param=param)
    assert (raised.value.message, raised.value.param) == (f"'{expected}' is wrong.", expected)


@pytest.mark.parametrize("name", ["\\", "\\1", "\\g<0>", "a[]", "'", "'quoted'", ".*", "("])
def test_a_name_that_the_client_made_up_may_be_any(name: str):
    error = ServiceError("unsupported_parameter", f"Unknown parameter '{name}'.", param=name)
    found = in_names(error, {name: f"sampling_params.{name}"})
    assert (found.param, found.message) == (f"sampling_params.{name}", f"Unknown parameter 'sampling_params.{name}'.")
